"""The machine: starting on CPU or GPU, the memory that may be used, and facts for a report.

Ranks may share a GPU; the facts say how many do.
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
_GPU_CACHE_BYTES = 256 << 20  # more than the cache of any GPU so far
_MOST_BYTES = {"cpu": 1 << 30, "cuda": 8 << 30}  # on a GPU, for 1 GiB of each verb


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
            mpi.start()  # the ranks that have a GPU wait in theirs
    except mpi.RanksDisagree:
        pass  # the rank without a GPU has the reason

    # Every rank has initialized MPI by now, also where start raised: all agree on the outcome.
    if failure := first_failure(MPI.COMM_WORLD, failure):
        raise UsageError(f"--device cuda: {failure}")


def first_failure(comm: MPI.Comm, failure: str) -> str:
    """Return, on every rank, the failure of the lowest rank that has one; "" without failures. Collective."""
    return next(filter(None, comm.allgather(failure)), "")


def free_bytes(meminfo: Path = _MEMORY, cgroup: Path = _CGROUP) -> int:
    """Return the number of free bytes on this machine, or in the container that limits this process."""
    limits = []
    match = re.search(r"MemAvailable:\s+(\d+) kB", _read(meminfo))
    if match:
        limits.append(int(match[1]) << 10)
    most, used = _read(cgroup / "memory.max").strip(), _read(cgroup / "memory.current").strip()
    if most.isdigit() and used.isdigit():
        limits.append(max(0, int(most) - int(used)))
    return min(limits, default=_ASSUMED_FREE_BYTES)


def agreed_cache_bytes(comm: MPI.Comm, device: torch.device) -> int:
    """Return the bytes of the largest last-level cache of the ranks; for a GPU, an upper limit. Collective."""
    if device.type == "cuda":
        return _GPU_CACHE_BYTES
    sizes: list[int] = comm.allgather(caches.last_level_cache_bytes() or _ASSUMED_CACHE_BYTES)
    return max(sizes)


def agreed_max_bytes(comm: MPI.Comm, given: int | None, device: torch.device) -> int:
    """Return the bytes of buffers per rank: ``given``, or this rank's share of a quarter of the free memory.

    The share is at most 1 GiB of host memory, or 8 GiB of GPU memory. Collective, with one result on all ranks.
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
    """Return the number of cores of this machine, including cores that this rank may not use."""
    return os.cpu_count() or 1


def limit_threads() -> None:
    """Limit torch to one thread if the ranks of this machine use all of its cores."""
    if mpi.local_size() >= num_cores():
        torch.set_num_threads(1)


def facts(comm: MPI.Comm, device: torch.device = _CPU) -> dict[str, str]:
    """Return facts about this machine and the GPUs of all ranks, in the order of a report's header. Collective."""
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
    """Return the GPUs and how many ranks share each GPU, from the identity and the name of each rank's GPU."""
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
