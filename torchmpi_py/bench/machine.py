"""The parts of the bench that depend on the machine: the start on CPU or GPU, memory limits, and facts for a report.

Ranks may share a GPU. The facts include the number of ranks on each GPU.
"""

from __future__ import annotations

import collections
import contextlib
import datetime as dt
import os
import re
from collections.abc import Hashable, Sequence
from pathlib import Path

import torch
from torch.utils import collect_env

import torchmpi_py as mpi
from torchmpi_py.bench import UsageError
from torchmpi_py.bench.buffers import format_size
from torchmpi_py.collectives import measured_cache
from torchmpi_py.core.mpi_api import MPI
from torchmpi_py.memory import caches, gpus

_MEMORY = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_CPU = torch.device("cpu")
_ASSUMED_CACHE_BYTES = 32 << 20
_ASSUMED_FREE_BYTES = 1 << 30
_GPU_CACHE_BYTES = 256 << 20  # larger than the cache of any GPU so far
_MOST_BYTES = {"cpu": 1 << 30, "cuda": 8 << 30}  # 8 GiB suffice for every collective of 1 GiB on a GPU.


def start(device: str) -> None:
    """Start the package for measurements on "cpu" or "cuda". Raise UsageError on every rank if a rank has no GPU."""
    if device == "cpu":
        mpi.start()
        return
    failure = ""
    try:
        mpi.start(with_cuda=True)
    except ValueError as error:
        failure = str(error)
        with contextlib.suppress(mpi.RanksDisagree):
            mpi.start()  # The ranks with a GPU wait in mpi.start() until this rank also calls it.
    except mpi.RanksDisagree:
        pass  # The rank without a GPU reports the reason below.

    # Every rank has initialized MPI, even if mpi.start() raised an error, so the ranks can exchange their failures.
    if failure := first_failure(MPI.COMM_WORLD, failure):
        raise UsageError(f"--device cuda: {failure}")


def first_failure(comm: MPI.Comm, failure: str) -> str:
    """Return the failure of the lowest rank that failed, or "" if no rank failed.

    All ranks of ``comm`` must call this function, and all get the same result.
    """
    return next(filter(None, comm.allgather(failure)), "")


def free_bytes(meminfo: Path = _MEMORY, cgroup: Path = _CGROUP) -> int:
    """Return the bytes of free memory of this machine, or of this process's container if less is free there."""
    limits = []
    match = re.search(r"MemAvailable:\s+(\d+) kB", _read(meminfo))
    if match:
        limits.append(int(match[1]) << 10)
    most, used = _read(cgroup / "memory.max").strip(), _read(cgroup / "memory.current").strip()
    if most.isdigit() and used.isdigit():
        limits.append(max(0, int(most) - int(used)))
    return min(limits, default=_ASSUMED_FREE_BYTES)


def agreed_cache_bytes(comm: MPI.Comm, device: torch.device) -> int:
    """Return the size in bytes of the largest last-level cache of any rank; for a GPU, an upper limit.

    All ranks of ``comm`` must call this function.
    """
    if device.type == "cuda":
        return _GPU_CACHE_BYTES
    sizes: list[int] = comm.allgather(caches.last_level_cache_bytes() or _ASSUMED_CACHE_BYTES)
    return max(sizes)


def agreed_max_bytes(comm: MPI.Comm, given: int | None, device: torch.device) -> int:
    """Return the number of bytes for buffers per rank: ``given``, or this rank's share of a quarter of the free memory.

    The ranks of a node, or of a GPU, have equal shares. All ranks use the smallest share of any rank, but at most 1 GiB
    of host memory, or 8 GiB of GPU memory. All ranks of ``comm`` must call this function.
    """
    if device.type == "cuda":
        identity = gpus.identity(device.index)
        num_sharing = comm.allgather(identity).count(identity)
        free = torch.cuda.mem_get_info(device)[0]
    else:
        num_sharing, free = mpi.local_size(), free_bytes()
    shares: list[int] = comm.allgather(free // 4 // num_sharing)
    return given or min(_MOST_BYTES[device.type], *shares)


def num_cores() -> int:
    """Return the number of logical CPUs of this machine, including CPUs that this rank is not allowed to use."""
    return os.cpu_count() or 1


def limit_threads() -> None:
    """Limit torch to one thread if this machine has at least as many ranks as logical CPUs."""
    if mpi.local_size() >= num_cores():
        torch.set_num_threads(1)


def facts(comm: MPI.Comm, device: torch.device = _CPU) -> dict[str, str]:
    """Return facts about this machine and the GPUs of all ranks, in the order of a report's header.

    All ranks of ``comm`` must call this function.
    """
    vendor, version = MPI.get_vendor()
    cache_bytes = caches.last_level_cache_bytes()
    nodes = mpi.num_nodes()
    on_cpu = {
        "processor": measured_cache.cpu_model(),
        "cores": str(num_cores()),
        "last-level cache": format_size(cache_bytes) if cache_bytes else "unknown",
        "ranks": f"{mpi.size()} on {nodes} node{'s' if nodes > 1 else ''}",
        "threads per rank": str(torch.get_num_threads()),
        "MPI": f"{vendor} {'.'.join(map(str, version))}",
        "torch": torch.__version__,
        "torchmpi_py": mpi.__version__,
        "date": dt.datetime.now(dt.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }
    return on_cpu | (_gpu_facts(comm, device) if device.type == "cuda" else {})


def _gpu_facts(comm: MPI.Comm, device: torch.device) -> dict[str, str]:
    gathered = comm.allgather((gpus.identity(device.index), torch.cuda.get_device_name(device)))
    driver = collect_env.get_nvidia_driver_version(collect_env.run) or "unknown"  # type: ignore[no-untyped-call]
    return describe_gpus(gathered) | {"GPU driver": driver, "CUDA": str(torch.version.cuda)}


def describe_gpus(gathered: Sequence[tuple[Hashable, str]]) -> dict[str, str]:
    """Return facts about the GPUs for a report: their names, and the number of ranks on each GPU.

    ``gathered`` contains the identity and the name of each rank's GPU.
    """
    ranks = collections.Counter(identity for identity, _ in gathered)
    names = collections.Counter(dict(gathered).values())
    return {
        "GPUs": ", ".join(f"{number} x {name}" for name, number in names.items()),
        "ranks per GPU": " or ".join(map(str, sorted(set(ranks.values())))),
    }


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
