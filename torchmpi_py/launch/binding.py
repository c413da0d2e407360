"""Choice of the cores for each rank, from the cores that ``topology`` reads.

Rank i of k on a host gets the i-th of k contiguous parts of the physical cores. The sizes of the parts differ by at
most one. The cores are sorted by NUMA node and socket, because neighbouring cores share a cache and a memory
controller. Each core includes its hardware threads. A hybrid processor has large, fast cores and small, slow cores.
Each rank gets a share of both kinds, because ranks that synchronize in every step should be equally fast. With more
ranks than physical cores, the hardware threads are divided. With more ranks than hardware threads, no rank is bound:
if two ranks were bound to the same core, they might wait for each other while another core is idle.

The machine may report the cores that are *near* each GPU (on the same socket, or in a part of a socket). Then the ranks
that use a GPU share the cores near this GPU instead. Rank i uses GPU i modulo the number of GPUs, in the order of PCI
addresses. If the report is incomplete or ambiguous, all ranks of the host get the contiguous parts.
"""

import os
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from pathlib import Path

from torchmpi_py.launch.topology import Core, read_cpus

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

# This folder has one folder per GPU, whose name is the GPU's PCI address. In a container it lists only the container's
# GPUs.
_DRIVER_GPUS = Path("/proc/driver/nvidia/gpus")
_PCI_DEVICES = Path("/sys/bus/pci/devices")


def bound_cores(how: str, cores: Sequence[Core], local_rank: int, local_size: int) -> tuple[tuple[Core, ...], int]:
    """Return the cores of a rank, and the number of threads for its share of these cores.

    ``how`` is the value of ``--bind``: "core", "numa" or "socket".
    """
    if how == "core":
        part = cores_of_rank(cores, local_rank, local_size, cores_near_gpus(os.environ))
        return part, len(part)
    part, num_sharers = domain_of_rank(cores, local_rank, local_size, "socket" if how == "socket" else "node")
    return part, max(1, len(part) // num_sharers)


def cores_of_rank(
    cores: Sequence[Core], local_rank: int, local_size: int, near: Sequence[frozenset[int]] = ()
) -> tuple[Core, ...]:
    """Return part `local_rank` of `local_size` equal parts of the cores.

    If there are more ranks than hardware threads, return all cores. If `near` contains the CPUs near each GPU, the
    ranks that use a GPU share the cores near this GPU. `near` is ignored if a rank would then get less than half of its
    equal part, or if the cores near two GPUs overlap only partly.
    """
    if not 0 <= local_rank < local_size:
        raise ValueError(f"local rank {local_rank}: expected 0 to {local_size - 1}; unset other launchers' variables")
    if len(cores) < local_size:
        cores = [core._replace(cpus=(cpu,)) for core in cores for cpu in core.cpus]
    if len(cores) < local_size:
        return tuple(cores)
    parts = _parts_near(cores, local_size, near)
    return parts[local_rank] if parts else _part(cores, local_rank, local_size)


def domain_of_rank(cores: Sequence[Core], local_rank: int, local_size: int, kind: str) -> tuple[tuple[Core, ...], int]:
    """Return all cores of a rank's sockets or NUMA nodes, and the number of ranks that share these cores.

    ``kind`` is "socket" or "node".
    """
    of_kind = attrgetter(kind)
    domains = [tuple(group) for _, group in groupby(sorted(cores, key=of_kind), of_kind)]
    firsts = [len(domains) * rank // local_size for rank in range(local_size + 1)]
    first, last = firsts[local_rank : local_rank + 2]
    part = tuple(core for domain in domains[first : max(first + 1, last)] for core in domain)
    return part, firsts[:local_size].count(first)


def _part(cores: Sequence[Core], index: int, num_parts: int) -> tuple[Core, ...]:
    """Return part ``index`` of the cores, with a share of the small cores and of the large cores.

    The sizes of the parts differ by at most one. If there are fewer small cores than large cores, the small cores are
    divided first, and large cores fill the parts (and vice versa).
    """
    few, many = sorted(([core for core in cores if core.is_small == small] for small in (False, True)), key=len)
    ends = [len(few) * number // num_parts for number in (index, index + 1)]
    rest = [len(cores) * number // num_parts - end for number, end in zip((index, index + 1), ends, strict=True)]
    return (*few[slice(*ends)], *many[slice(*rest)])


def _parts_near(cores: Sequence[Core], num_ranks: int, near: Sequence[frozenset[int]]) -> list[tuple[Core, ...]]:
    """Return each rank's share of the cores near its GPU; empty if ``near`` cannot be used.

    ``near`` cannot be used if the cores near two GPUs overlap only partly, if a rank would get too few cores, or if
    there is only one rank.
    """
    if num_ranks == 1 or not near:
        return []
    of_gpus = [tuple(core for core in cores if some.issuperset(core.cpus)) for some in near]
    shares = [of_gpus[rank % len(near)] for rank in range(num_ranks)]
    distinct = set(shares)
    if not all(distinct) or sum(map(len, distinct)) != len({core for share in distinct for core in share}):
        return []  # The cores near two GPUs overlap only partly, so ranks of both GPUs could get the same core.
    parts = []
    for rank, share in enumerate(shares):
        sharers = [other for other in range(num_ranks) if shares[other] == share]
        parts.append(_part(share, sharers.index(rank), len(sharers)))
    enough = max(1, len(cores) // num_ranks // 2)
    return parts if min(map(len, parts)) >= enough else []


def cores_near_gpus(
    environment: Mapping[str, str], driver: Path = _DRIVER_GPUS, devices: Path = _PCI_DEVICES
) -> list[frozenset[int]]:
    """Return the CPUs near each GPU that CUDA shows to a rank, in CUDA's order; empty if this order is unknown."""
    try:
        addresses = sorted((path.name for path in driver.iterdir()), key=lambda name: (len(name), name))
        models = {(devices / address / "device").read_text() for address in addresses}
        if len(models) > 1 and environment.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
            return []  # By default CUDA lists the fastest GPU first, so the order is unknown here.
        near = [read_cpus((devices / address / "local_cpulist").read_text()) for address in addresses]
    except (OSError, ValueError):
        return []
    return [near[index] for index in _visible(environment, len(addresses))]


def _visible(environment: Mapping[str, str], num_gpus: int) -> Sequence[int]:
    """Return the indices of the GPUs that CUDA_VISIBLE_DEVICES lists; empty if the indices are ambiguous.

    If the variable is not set, all GPUs are visible.
    """
    text = environment.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return range(num_gpus)
    names = [name.strip() for name in text.split(",")]
    if not all(name.isascii() and name.isdigit() for name in names):
        return ()  # The entries are UUIDs or MIG instances, or empty.
    indices = [int(name) for name in names]
    if len(set(indices)) < len(indices) or max(indices) >= num_gpus:
        return ()
    # The indices are ambiguous in two cases. If one of several GPUs is visible, all ranks may share it, or each rank
    # may see a different GPU. In a Slurm job, index 0 may be the first GPU of the job instead of the host.
    is_cut = len(indices) < num_gpus
    return () if is_cut and (len(indices) == 1 or "SLURM_JOB_ID" in environment) else indices


def threads_per_rank(num_cores: int, local_size: int) -> int:
    """Return the number of threads per rank with which the ranks of a host use all its cores; at least 1."""
    return max(1, num_cores // local_size)
