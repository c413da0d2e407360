"""Two tests of GPU memory, which run when the package starts with GPUs.

``probe`` tests whether the MPI is *CUDA-aware*, that is, whether it accepts addresses of GPU memory. The name and
version of an MPI do not show this. An MPI that is not CUDA-aware crashes on GPU addresses, or produces wrong values.
Therefore a child process on each node runs the trial (``cuda_trial.py``). Ranks pass GPU memory to MPI only if all
trials succeed. Each node saves its *verdict* in a file, together with the facts for which the verdict is valid: MPI,
MPI's library and settings, torch, host, GPU. Later jobs read the file.

``run`` tests whether ranks can use each other's GPU memory and events. Some containers and virtual machines do not
allow this, and on some machines peers read wrong values.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from torchmpi_py import trusted_files
from torchmpi_py.collectives.flavours import cuda_trial
from torchmpi_py.core import agree, config
from torchmpi_py.core.channels import Channel
from torchmpi_py.core.communicators import Communicator
from torchmpi_py.core.mpi_api import MPI
from torchmpi_py.errors import CommunicatorError, Unavailable
from torchmpi_py.memory import cuda_ipc, gpus

logger = logging.getLogger("torchmpi_py")

FORMAT = 1
LIMIT_SECONDS = 60.0
NUM_BYTES = 1 << 16

# Prefixes of variables that make a process a rank of a job. A child process with these variables would try to join the
# job, or wait for it. TORCHMPIRUN_JOB_DIR stays in the environment, so that torchmpirun finds the child at cleanup.
_OF_JOB = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "HYDI_", "MPI_LOCAL", "PALS_", "MV2_COMM_WORLD_", "SLURM_", "TORCHMPI_")
_OF_OPEN_MPI_JOB = ("ess", "pmix", "orte_", "num_procs", "initial_wdir")  # OMPI_MCA_ names that mpirun sets
_KEPT = ("OMPI_MCA_", "OMPI_ALLOW_RUN_AS_ROOT", "PMIX_MCA_", "PRTE_ALLOW_RUN_AS_ROOT")
# Prefixes of variables that determine whether an MPI, or a library that the MPI uses, supports GPUs.
_SETTINGS = ("OMPI_MCA_", "MPICH_", "MPIR_CVAR_", "MV2_", "I_MPI_OFFLOAD", "UCX_", "FI_", "PSM")

why_no_gpu_memory = "it is not known whether the MPI accepts GPU memory; call mpi.start(with_cuda=True) first"
"""Why ranks must not pass GPU memory to MPI, or "". All ranks have the same text. Only a session assigns it."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The result of a trial.

    ``why_not`` is the reason why MPI does not accept GPU memory, or "" if MPI accepts it. ``is_final`` is False if the
    trial ended before it used GPU memory; such a verdict is not saved.
    """

    why_not: str
    is_final: bool = True


class GpuFacts(NamedTuple):
    """Facts about the software and hardware of a job. A verdict is valid only for jobs with the same facts."""

    mpi: str
    library: str
    settings: str
    torch: str
    host: str
    gpu: str

    def path(self) -> pathlib.Path:
        """Return the path of the file that stores the verdict for these facts."""
        host = re.sub(r"[^A-Za-z0-9.+]+", "_", self.host)
        digest = hashlib.sha256(repr(tuple(self)).encode()).hexdigest()[:12]
        return config.tuning_directory() / f"cuda_aware-{host}-{digest}.json"


def probe(world: Communicator) -> str:
    """Return why MPI does not accept GPU memory on at least one node, or "". All ranks of ``world`` must call it.

    The first rank of each node reads the node's saved verdict. Without a saved verdict, this rank runs a trial on its
    GPU, which takes some seconds.
    """
    channel = world.direct
    reason = _no_gpu()
    if not reason and channel.places[channel.rank].local == 0:
        reason = _verdict().why_not
    reasons = channel.mpi.allgather(f"{reason} (on {socket.gethostname()})" if reason else "")
    return next((text for text in reasons if text), "")


def _no_gpu() -> str:
    """Return why this rank has no GPU, or ""."""
    return "" if torch.cuda.is_available() else f"torch {torch.__version__} sees no CUDA device"


def _verdict() -> Verdict:
    """Return the verdict for this node, from a file or from a new trial."""
    facts = _facts()
    saved = read(facts)
    if saved is not None:
        return saved
    verdict = run_trial(command(f"cuda:{torch.cuda.current_device()}"))
    if verdict.is_final:
        with contextlib.suppress(OSError):
            write(facts, verdict)
    return verdict


def _facts() -> GpuFacts:
    """Return the facts about this rank's MPI, torch, host and GPU."""
    settings = sorted(f"{k}={v}" for k, v in singleton_environment(os.environ).items() if k.startswith(_SETTINGS))
    return GpuFacts(
        mpi=MPI.Get_library_version().strip("\0 \n"),
        library=_library(),
        settings=" ".join(settings),
        torch=torch.__version__,
        host=socket.gethostname(),
        gpu=torch.cuda.get_device_name(),
    )


def _library() -> str:
    """Return the paths and modification times of MPI's library files, or "" if they cannot be determined.

    The times distinguish builds of one version of MPI, because only some builds may support CUDA.
    """
    with contextlib.suppress(OSError):
        lines = pathlib.Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
        paths = {line.split(maxsplit=5)[5] for line in lines if "/libmpi" in line}
        return ", ".join(f"{path} of {os.stat(path).st_mtime_ns}" for path in sorted(paths))
    return ""


def command(device: str) -> list[str]:
    """Return the command line of a trial on ``device``."""
    return [sys.executable, cuda_trial.__file__, device]


def singleton_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return a copy of the environment in which a process starts as its own job of one rank."""
    return {name: value for name, value in environment.items() if not _is_of_job(name)}


def _is_of_job(name: str) -> bool:
    """Return whether a variable makes a process a rank of a job."""
    if name.startswith("OMPI_MCA_"):
        return name.removeprefix("OMPI_MCA_").startswith(_OF_OPEN_MPI_JOB)
    return name.startswith(_OF_JOB) and not name.startswith(_KEPT)


def run_trial(command: Sequence[str], limit_seconds: float = LIMIT_SECONDS) -> Verdict:
    """Run a trial in a child process, and return the verdict. Also return a verdict if the process cannot start."""
    try:
        # Use a file instead of a pipe, because a process that the child has started could keep a pipe open for ever.
        with tempfile.TemporaryFile() as file:
            environment, nothing = singleton_environment(os.environ), subprocess.DEVNULL
            child = subprocess.Popen(command, stdin=nothing, stdout=file, stderr=subprocess.STDOUT, env=environment)
            status = _wait(child, limit_seconds)
            file.seek(0)
            output = file.read().decode(errors="replace")
    except OSError as error:
        return Verdict(f"it is not known whether this MPI is CUDA-aware: cannot start a trial: {error}", is_final=False)
    return judge(output, status, limit_seconds)


def _wait(child: subprocess.Popen[bytes], limit_seconds: float) -> int | None:
    """Return the exit status of a child process, or kill it after ``limit_seconds`` and return None."""
    try:
        return child.wait(limit_seconds)
    except subprocess.TimeoutExpired:
        child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(5)
        return None


def judge(output: str, status: int | None, limit_seconds: float) -> Verdict:
    """Return the verdict on a trial with this output and exit status (None if the trial did not end in time)."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    reports = [line.partition(cuda_trial.MARK)[2].strip() for line in lines if cuda_trial.MARK in line]
    word, _, what = reports[-1].partition(" ") if reports else ("", "", "")
    if word == cuda_trial.RIGHT:
        return Verdict("")
    during = f"on GPU memory, in {what}" if word == cuda_trial.TRYING else "before it used GPU memory"
    if word == cuda_trial.WRONG:
        end = f"gave wrong values in {what}"
    elif word == cuda_trial.FAILED:
        end = f"failed in {what}"
    elif status is None:
        end = f"did not end within {limit_seconds:g} s {during}"
    elif status < 0:
        end = f"crashed with signal {-status} ({signal.strsignal(-status)}) {during}"
    else:
        end = f"ended with exit code {status} {during}: {lines[-1] if lines else 'no output'}"
    if not reports:
        return Verdict(f"it is not known whether this MPI is CUDA-aware: a trial {end}", is_final=False)
    return Verdict(f"this MPI is not CUDA-aware: a trial {end}; use another flavour, or an MPI built with CUDA")


def read(facts: GpuFacts) -> Verdict | None:
    """Return the saved verdict for these facts, or None if there is no such verdict or its file is not readable."""
    path = facts.path()
    try:
        content = trusted_files.read_json(path, owners={path.parent.stat().st_uid})
        is_of_facts = (content["format"], content["facts"]) == (FORMAT, facts._asdict())
        why = content["why_not"] if is_of_facts else None
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("the trial of GPU memory is repeated, because %s is not readable: %r", path, error)
        return None
    if not isinstance(why, str):
        return None
    return Verdict(f"{why}; delete {path} to repeat the trial" if why else "")


def write(facts: GpuFacts, verdict: Verdict) -> None:
    """Save a verdict atomically, so that no reader finds an incomplete file. Raise OSError if the write fails."""
    config.keep(facts.path(), {"format": FORMAT, "facts": facts._asdict(), "why_not": verdict.why_not})


def run(world: Channel, device: torch.device) -> None:
    """Test GPU IPC in every IPC group, and switch IPC off on all ranks if the test fails in any group.

    All ranks of ``world`` must call it.
    """
    if gpus.why_no_ipc():
        return
    group = world.split([gpus.group(place) for place in world.places])
    caught = (Unavailable, CommunicatorError)
    failed = agree.first_as(Unavailable, "a test of the access to other ranks' GPU memory failed: ")
    try:
        agree.run_on_all_ranks(world.mpi.allgather, lambda: _try_out(group, device), caught, str, failed)
    except Unavailable as error:
        gpus.switch_off(str(error))
        if world.rank == 0:
            logger.warning("flavour cudaipc is switched off: %s", gpus.why_no_ipc())
    group.free()


def _try_out(group: Channel, device: torch.device) -> None:
    """Fill this rank's GPU memory with a known value, and check that this rank reads the right values from all ranks.

    Raise Unavailable if a read fails or returns wrong values.
    """
    part, segment = cuda_ipc.allocate(group.mpi, group.places, NUM_BYTES, device, lambda segment: None)
    events = cuda_ipc.PeerEvents(group, device)
    part.fill_(_value(group.rank))
    events.record(cuda_ipc.READY)
    group.mpi.Barrier()
    events.follow(cuda_ipc.READY)
    try:
        views = [segment.view(place.local, torch.uint8, NUM_BYTES) for place in group.places]
        wrong = [rank for rank, view in enumerate(views) if not (view == _value(rank)).all()]
    except RuntimeError as error:
        raise Unavailable(agree.first_line(error)) from None
    finally:
        group.mpi.Barrier()  # Memory and events must exist until all ranks have read.
    if wrong:
        raise Unavailable(f"rank {group.rank} of {group.size} reads wrong values from these ranks: {wrong}")


def _value(rank: int) -> int:
    """Return the byte, never 0, with which ``rank`` fills its memory."""
    return rank % 255 + 1
