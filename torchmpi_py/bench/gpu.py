"""Measuring on GPUs: the session, the memory that may be used, and the facts for the header of a report.

Ranks may share a GPU; the facts say how many do.
"""

from __future__ import annotations

import collections
import contextlib
import subprocess
from collections.abc import Hashable, Sequence
from pathlib import Path

import torch

import torchmpi_py as mpi
from torchmpi_py.bench import UsageError
from torchmpi_py.core.mpi_api import MPI
from torchmpi_py.memory import gpus

CACHE_BYTES = 256 << 20  # more than the cache of any GPU so far
_MOST_BYTES = 8 << 30  # for 1 GiB of each verb
_DRIVER = Path("/proc/driver/nvidia/version")


def start(device: str) -> None:
    """Start the package for measurements on "cpu" or "cuda". UsageError, on every rank, if a rank has no GPU."""
    if device == "cpu":
        mpi.start()
        return
    failure = ""
    try:
        mpi.start(with_cuda=True)
    except ValueError as error:
        failure = str(error)
        with contextlib.suppress(mpi.RanksDisagree):
            mpi.start()  # to meet the others, which have a GPU, in theirs
    except mpi.RanksDisagree:
        pass  # another rank tells why

    failures = [text for text in MPI.COMM_WORLD.allgather(failure) if text]
    if failures:
        raise UsageError(f"--device cuda: {failures[0]}")


def agreed_max_bytes(comm: MPI.Comm, given: int | None, device: torch.device) -> int:
    """Bytes of buffers a rank: ``given``, or a quarter of what its GPU has free over the ranks there, at most 8 GiB.

    Collective; the same on all ranks.
    """
    mine = gpus.identity(device.index)
    num_sharing = comm.allgather(mine).count(mine)
    shares: list[int] = comm.allgather(torch.cuda.mem_get_info(device)[0] // 4 // num_sharing)
    return given or min(_MOST_BYTES, *shares)


def facts(comm: MPI.Comm, device: torch.device) -> dict[str, str]:
    """What a reader needs to know of the GPUs of all ranks; nothing on CPU. Collective."""
    if device.type == "cpu":
        return {}
    told = comm.allgather((gpus.identity(device.index), torch.cuda.get_device_name(device)))
    return describe(told) | {"GPU driver": _driver(), "CUDA": str(torch.version.cuda)}


def describe(told: Sequence[tuple[Hashable, str]]) -> dict[str, str]:
    """Identity and name of each rank's GPU, in words."""
    ranks = collections.Counter(identity for identity, _ in told)
    names = collections.Counter(dict(told).values())
    return {
        "GPUs": ", ".join(f"{number} x {name}" for name, number in names.items()),
        "ranks per GPU": " or ".join(map(str, sorted(set(ranks.values())))),
    }


def _driver() -> str:
    """The version of the kernel's driver."""
    try:
        line = _DRIVER.read_text().splitlines()[0]
        return next(word for word in line.split() if word[0].isdigit() and "." in word)
    except (OSError, IndexError, StopIteration):
        return _asked_driver()


def _asked_driver() -> str:
    """The same by asking, where the kernel does not show it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip().partition("\n")[0] or "unknown"
