"""Which cores a rank gets, computed from the cores that ``topology`` reads.

Rank i of k on a host gets the i-th of k contiguous parts of the physical cores. The sizes of the parts differ by at
most one. The cores are ordered by NUMA node and socket, because neighbours share a cache and a memory controller, and
each core includes its hardware threads. A hybrid processor has fast and small cores. Both kinds are divided, because
ranks that synchronize in every step should be equally fast. With more ranks than physical cores the hardware threads
are divided. With more ranks than hardware threads no rank is bound: two ranks pinned to one core would wait for each
other while another core idles.

If the machine reports which cores are *near* each GPU (on the same socket, or part of one), the ranks of a GPU share
those cores instead. Rank i computes on GPU i modulo the number of GPUs, in the order of PCI addresses. If anything is
unclear, the first rule holds for all ranks of the host.
"""

import os
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from pathlib import Path

from torchmpi_py.launch.topology import Core, read_cpus

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

# a folder per GPU, named by its PCI address; a container lists only its own
_DRIVER_GPUS = Path("/proc/driver/nvidia/gpus")
_PCI_DEVICES = Path("/sys/bus/pci/devices")


def bound_cores(how: str, cores: Sequence[Core], local_rank: int, local_size: int) -> tuple[tuple[Core, ...], int]:
    """Return a rank's cores by ``--bind core``, ``numa`` or ``socket``, and the number of threads for its share."""
    if how == "core":
        part = cores_of_rank(cores, local_rank, local_size, cores_near_gpus(os.environ))
        return part, len(part)
    part, num_sharers = domain_of_rank(cores, local_rank, local_size, "socket" if how == "socket" else "node")
    return part, max(1, len(part) // num_sharers)


def cores_of_rank(
    cores: Sequence[Core], local_rank: int, local_size: int, near: Sequence[frozenset[int]] = ()
) -> tuple[Core, ...]:
    """Return part `local_rank` of `local_size` parts of the cores; all cores if ranks outnumber threads.

    `near` holds the CPUs near each GPU. Then the ranks of a GPU share these CPUs, unless a rank would get less than
    half of its part.
    """
    if not 0 <= local_rank < local_size:
        raise ValueError(f"local rank {local_rank} is not in 0..{local_size - 1}")
    if len(cores) < local_size:
        cores = [core._replace(cpus=(cpu,)) for core in cores for cpu in core.cpus]
    if len(cores) < local_size:
        return tuple(cores)
    parts = _parts_near(cores, local_size, near)
    return parts[local_rank] if parts else _part(cores, local_rank, local_size)


def domain_of_rank(cores: Sequence[Core], local_rank: int, local_size: int, kind: str) -> tuple[tuple[Core, ...], int]:
    """Return all cores of a rank's sockets or NUMA nodes, and how many ranks share them.

    ``kind`` is "socket" or "node".
    """
    of_kind = attrgetter(kind)
    domains = [tuple(group) for _, group in groupby(sorted(cores, key=of_kind), of_kind)]
    firsts = [len(domains) * rank // local_size for rank in range(local_size + 1)]
    first, last = firsts[local_rank : local_rank + 2]
    part = tuple(core for domain in domains[first : max(first + 1, last)] for core in domain)
    return part, firsts[:local_size].count(first)


def _part(cores: Sequence[Core], index: int, num_parts: int) -> tuple[Core, ...]:
    """Return part ``index`` of the cores: some small cores and some large cores.

    The rarer kind of core is divided first, and cores of the other kind make the parts equal.
    """
    few, many = sorted(([core for core in cores if core.is_small == small] for small in (False, True)), key=len)
    ends = [len(few) * number // num_parts for number in (index, index + 1)]
    rest = [len(cores) * number // num_parts - end for number, end in zip((index, index + 1), ends, strict=True)]
    return (*few[slice(*ends)], *many[slice(*rest)])


def _parts_near(cores: Sequence[Core], num_ranks: int, near: Sequence[frozenset[int]]) -> list[tuple[Core, ...]]:
    """Return the part of every rank near its GPU; empty if not all ranks can get a good part."""
    if num_ranks == 1 or not near:
        return []
    of_gpus = [tuple(core for core in cores if some.issuperset(core.cpus)) for some in near]
    shares = [of_gpus[rank % len(near)] for rank in range(num_ranks)]
    distinct = set(shares)
    if not all(distinct) or sum(map(len, distinct)) != len({core for share in distinct for core in share}):
        return []  # if groups of cores overlap, two ranks could get the same core
    parts = []
    for rank, share in enumerate(shares):
        sharers = [other for other in range(num_ranks) if shares[other] == share]
        parts.append(_part(share, sharers.index(rank), len(sharers)))
    enough = max(1, len(cores) // num_ranks // 2)
    return parts if min(map(len, parts)) >= enough else []


def cores_near_gpus(
    environment: Mapping[str, str], driver: Path = _DRIVER_GPUS, devices: Path = _PCI_DEVICES
) -> list[frozenset[int]]:
    """Return the CPUs near each GPU that CUDA shows to a rank, in CUDA's order; empty if unsure."""
    try:
        addresses = sorted((path.name for path in driver.iterdir()), key=lambda name: (len(name), name))
        models = {(devices / address / "device").read_text() for address in addresses}
        if len(models) > 1 and environment.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
            return []  # by default CUDA puts the fastest GPU first, an order unknown here
        near = [read_cpus((devices / address / "local_cpulist").read_text()) for address in addresses]
    except (OSError, ValueError):
        return []
    return [near[index] for index in _visible(environment, len(addresses))]


def _visible(environment: Mapping[str, str], num_gpus: int) -> Sequence[int]:
    """Return the indices of the GPUs that CUDA_VISIBLE_DEVICES shows; empty if unclear."""
    text = environment.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return range(num_gpus)
    names = [name.strip() for name in text.split(",")]
    if not all(name.isascii() and name.isdigit() for name in names):
        return ()  # the entries are UUIDs or MIG instances, or empty
    indices = [int(name) for name in names]
    if len(set(indices)) < len(indices) or max(indices) >= num_gpus:
        return ()
    # The indices are unclear in two cases. If one of several GPUs is visible, all ranks may share it, or each rank
    # may see a different GPU. Slurm may count from the first GPU that it has granted.
    is_cut = len(indices) < num_gpus
    return () if is_cut and (len(indices) == 1 or "SLURM_JOB_ID" in environment) else indices


def threads_per_rank(num_cores: int, local_size: int) -> int:
    """Return how many threads a rank may start so that the ranks of a host fill its cores; at least 1."""
    return max(1, num_cores // local_size)
