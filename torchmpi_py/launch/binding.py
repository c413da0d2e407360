"""Cores and threads: which cores a rank gets. Arithmetic apart from the functions that ask the system.

The *allowed* cores are those the scheduler lets this process run on (an affinity mask, as batch systems and containers
set it). Rank i of k on a host gets the i-th of k contiguous parts, whose sizes differ by at most one: contiguous,
because neighbours share a cache and a memory controller. With fewer cores than ranks nobody is bound: two ranks pinned
to one core would wait for each other while another core idles.

Where the machine says which cores are *near* each GPU (on the same socket, or part of one), the ranks of a GPU share
those instead. Rank i computes on GPU i modulo their number, in the order of PCI addresses. Wherever something is
unclear, the rule above holds for all ranks of the host.

A container may also limit processor *time* (a cgroup quota) without saying on which cores. Such a quota bounds the
number of threads, and leaves the cores as they are.
"""

import math
import os
from collections.abc import Mapping, Sequence, Set
from pathlib import Path

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_DRIVER_GPUS = Path("/proc/driver/nvidia/gpus")  # a folder per GPU, named by its PCI address; in a container, its own
_PCI_DEVICES = Path("/sys/bus/pci/devices")


def cores_of_rank(
    cores: Sequence[int], local_rank: int, local_size: int, near: Sequence[Set[int]] = ()
) -> tuple[int, ...]:
    """Part number `local_rank` of `local_size` contiguous parts; all cores when there is not one for each rank.

    `near` holds for every GPU the cores near it. Then the ranks of a GPU share those, unless a rank would get less than
    half of its part.
    """
    if not 0 <= local_rank < local_size:
        raise ValueError(f"local rank {local_rank} is not in 0..{local_size - 1}")
    ordered = sorted(cores)
    if len(ordered) < local_size:
        return tuple(ordered)
    parts = _parts_near(ordered, local_size, near)
    return parts[local_rank] if parts else _part(ordered, local_rank, local_size)


def _part(cores: Sequence[int], index: int, num_parts: int) -> tuple[int, ...]:
    return tuple(cores[len(cores) * index // num_parts : len(cores) * (index + 1) // num_parts])


def _parts_near(cores: Sequence[int], num_ranks: int, near: Sequence[Set[int]]) -> list[tuple[int, ...]]:
    """The part of every rank, near its GPU; empty if that cannot be done well for all of them."""
    if num_ranks == 1 or not near:
        return []
    shares = [frozenset(near[rank % len(near)]).intersection(cores) for rank in range(num_ranks)]
    distinct = set(shares)
    if not all(distinct) or sum(map(len, distinct)) != len(frozenset().union(*distinct)):
        return []  # where some overlap, two ranks could get the same core
    parts = []
    for rank, share in enumerate(shares):
        sharers = [other for other in range(num_ranks) if shares[other] == share]
        parts.append(_part_of_each_run(sorted(share), sharers.index(rank), len(sharers)))
    enough = max(1, len(cores) // num_ranks // 2)
    return parts if min(map(len, parts)) >= enough else []


def _part_of_each_run(cores: Sequence[int], index: int, num_parts: int) -> tuple[int, ...]:
    """A part of each run of consecutive cores: the second threads of a socket's cores are a run of their own."""
    begins = [i for i, core in enumerate(cores) if i == 0 or core != cores[i - 1] + 1]
    runs = [cores[begin:end] for begin, end in zip(begins, [*begins[1:], len(cores)], strict=True)]
    if any(len(run) < num_parts for run in runs):
        return _part(cores, index, num_parts)
    return tuple(core for run in runs for core in _part(run, index, num_parts))


def cores_near_gpus(
    environment: Mapping[str, str], driver: Path = _DRIVER_GPUS, devices: Path = _PCI_DEVICES
) -> list[frozenset[int]]:
    """For every GPU that CUDA shows to a rank, in its order, the cores near it; empty if that is not known for sure."""
    try:
        addresses = sorted((path.name for path in driver.iterdir()), key=lambda name: (len(name), name))
        models = {(devices / address / "device").read_text() for address in addresses}
        if len(models) > 1 and environment.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
            return []  # CUDA puts the fastest first
        near = [read_cores((devices / address / "local_cpulist").read_text()) for address in addresses]
    except (OSError, ValueError):
        return []
    return [near[index] for index in _visible(environment, len(addresses))]


def _visible(environment: Mapping[str, str], num_gpus: int) -> Sequence[int]:
    """The GPUs that CUDA_VISIBLE_DEVICES shows, by their place in the order of all; empty if that is not clear."""
    text = environment.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return range(num_gpus)
    names = [name.strip() for name in text.split(",")]
    if not all(name.isascii() and name.isdigit() for name in names):
        return ()  # UUIDs, MIG instances, or none
    indices = [int(name) for name in names]
    if len(set(indices)) < len(indices) or max(indices) >= num_gpus:
        return ()
    # Of several GPUs one alone: all ranks share it, or each has another. Slurm may count from the first it has granted.
    is_cut = len(indices) < num_gpus
    return () if is_cut and (len(indices) == 1 or "SLURM_JOB_ID" in environment) else indices


def read_cores(text: str) -> frozenset[int]:
    """Read the system's ``0-15,32-47``."""
    cores: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)


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
    for folder in cgroup_folders("cpu"):
        try:
            if (folder / "cpu.max").exists():
                quotas.append(quota_cores((folder / "cpu.max").read_text()))
            elif (folder / "cpu.cfs_quota_us").exists():
                period = (folder / "cpu.cfs_period_us").read_text()
                quotas.append(quota_cores((folder / "cpu.cfs_quota_us").read_text() + " " + period))
        except OSError:
            continue
    return max(1.0, min(quotas))


def cgroup_folders(controller: str) -> list[Path]:
    """Folders of this process's cgroup and of its ancestors, of version 2 and of a controller of version 1."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    folders: list[Path] = []
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = _CGROUP_ROOT / (controller if controllers else "")
        leaf = root / name.lstrip("/")
        folders += [leaf, *(parent for parent in leaf.parents if parent.is_relative_to(root))]
    return folders
