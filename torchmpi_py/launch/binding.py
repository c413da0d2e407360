"""Cores and threads: which cores a rank gets. Arithmetic apart from the three functions that ask the system.

The *allowed* cores are those the scheduler lets this process run on (an affinity mask, as batch systems and containers
set it). Rank i of k on a host gets the i-th of k contiguous parts, whose sizes differ by at most one: contiguous,
because neighbours share a cache and a memory controller. With fewer cores than ranks nobody is bound: two ranks pinned
to one core would wait for each other while another core idles.

A container may also limit processor *time* (a cgroup quota) without saying on which cores. Such a quota bounds the
number of threads, and leaves the cores as they are.
"""

import math
import os
from collections.abc import Sequence
from pathlib import Path

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

_CGROUP_ROOT = Path("/sys/fs/cgroup")


def cores_of_rank(cores: Sequence[int], local_rank: int, local_size: int) -> tuple[int, ...]:
    """Part number `local_rank` of `local_size` contiguous parts; all cores when there is not one for each rank."""
    if not 0 <= local_rank < local_size:
        raise ValueError(f"local rank {local_rank} is not in 0..{local_size - 1}")
    ordered = sorted(cores)
    if len(ordered) < local_size:
        return tuple(ordered)
    begin = len(ordered) * local_rank // local_size
    end = len(ordered) * (local_rank + 1) // local_size
    return tuple(ordered[begin:end])


def threads_per_rank(num_cores: int, local_size: int) -> int:
    """Threads a rank may start so that all ranks of a host together fill its cores; at least one."""
    return max(1, num_cores // local_size)


def quota_cores(text: str) -> float:
    """Read a cgroup's ``quota period`` (microseconds) as a number of cores; infinite when there is no limit."""
    try:
        quota, period = text.split()
        return float(quota) / float(period) if float(quota) > 0 else math.inf
    except ValueError:  # "max 100000": no limit
        return math.inf


def allowed_cores() -> tuple[int, ...]:
    """Cores this process may run on."""
    return tuple(sorted(os.sched_getaffinity(0)))


def num_usable_cores() -> int:
    """Cores' worth of time this process and its siblings may use: allowed cores, or less under a cgroup quota."""
    return max(1, min(len(allowed_cores()), math.floor(_smallest_quota())))


def _smallest_quota() -> float:
    """The tightest limit of our cgroups; math.floor needs a finite number, so no limit is a large one."""
    quotas = [float(1 << 20)]
    for folder in _cgroup_folders():
        try:
            if (folder / "cpu.max").exists():
                quotas.append(quota_cores((folder / "cpu.max").read_text()))
            elif (folder / "cpu.cfs_quota_us").exists():
                period = (folder / "cpu.cfs_period_us").read_text()
                quotas.append(quota_cores((folder / "cpu.cfs_quota_us").read_text() + " " + period))
        except OSError:
            continue
    return max(1.0, min(quotas))


def _cgroup_folders() -> list[Path]:
    """Folders of this process's cgroup and of its ancestors, version 2 and the version 1 `cpu` controller."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    folders: list[Path] = []
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = _CGROUP_ROOT / ("cpu" if controllers else "")
        leaf = root / name.lstrip("/")
        folders += [leaf, *(parent for parent in leaf.parents if parent.is_relative_to(root))]
    return folders
