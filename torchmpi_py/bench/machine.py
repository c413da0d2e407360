"""What machine this is: facts for the header of a report, the last-level cache, and the memory that may be used."""

from __future__ import annotations

import datetime as dt
import os
import re
from pathlib import Path

import torch

import torchmpi_py as mpi
from torchmpi_py.bench.buffers import format_size, parse_size
from torchmpi_py.core.mpi_api import MPI

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_MEMORY = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_PROCESSORS = Path("/proc/cpuinfo")
_ASSUMED_CACHE_BYTES = 32 << 20
_ASSUMED_FREE_BYTES = 1 << 30
MOST_BYTES = 1 << 30


def last_level_cache_bytes(caches: Path = _CACHES) -> int | None:
    """The size of the last-level cache, or None where the system does not tell."""
    found = []
    for folder in caches.glob("index*"):
        try:
            found.append((int((folder / "level").read_text()), parse_size((folder / "size").read_text())))
        except (OSError, ValueError):
            continue
    return max(found)[1] if found else None


def free_bytes(meminfo: Path = _MEMORY, cgroup: Path = _CGROUP) -> int:
    """Memory that this machine, or the container that limits us, has left."""
    limits = []
    match = re.search(r"MemAvailable:\s+(\d+) kB", _read(meminfo))
    if match:
        limits.append(int(match[1]) << 10)
    most, used = _read(cgroup / "memory.max").strip(), _read(cgroup / "memory.current").strip()
    if most.isdigit() and used.isdigit():
        limits.append(max(0, int(most) - int(used)))
    return min(limits, default=_ASSUMED_FREE_BYTES)


def agreed_cache_bytes(comm: MPI.Comm) -> int:
    """The largest last-level cache of all ranks' machines. Collective."""
    sizes: list[int] = comm.allgather(last_level_cache_bytes() or _ASSUMED_CACHE_BYTES)
    return max(sizes)


def agreed_max_bytes(comm: MPI.Comm, given: int | None) -> int:
    """Bytes of buffers a rank: ``given``, or a quarter of the free memory over the ranks there, at most 1 GiB.

    Collective; the same on all ranks.
    """
    shares: list[int] = comm.allgather(min(MOST_BYTES, free_bytes() // 4 // mpi.local_size()))
    return given or min(shares)


def num_cores() -> int:
    """Cores of this machine, whether this rank may use them or not."""
    return os.cpu_count() or 1


def limit_threads() -> None:
    """One thread a rank where the ranks fill the cores."""
    if mpi.local_size() >= num_cores():
        torch.set_num_threads(1)


def facts() -> dict[str, str]:
    """What a reader needs to judge the figures, in the order in which it is shown. As rank 0 sees it."""
    vendor, version = MPI.get_vendor()
    cache_bytes = last_level_cache_bytes()
    nodes = mpi.num_nodes()
    return {
        "processor": _processor(),
        "cores": str(num_cores()),
        "last-level cache": format_size(cache_bytes) if cache_bytes else "unknown",
        "ranks": f"{mpi.size()} on {nodes} node{'s' if nodes > 1 else ''}",
        "threads per rank": str(torch.get_num_threads()),
        "MPI": f"{vendor} {'.'.join(map(str, version))}",
        "torch": torch.__version__,
        "date": dt.datetime.now(dt.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }


def _processor() -> str:
    match = re.search(r"model name\s*:\s*(.+)", _read(_PROCESSORS))
    return match[1].strip() if match else os.uname().machine


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
