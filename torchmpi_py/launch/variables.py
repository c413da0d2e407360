"""Rank, size, local rank and local size, as whoever started this process wrote them into its environment.

Each MPI has its own names. The more specific ones stand first: Slurm's are also set for a batch script, from which
another starter may have come.
"""

import re
from collections.abc import Mapping

_RANK = (
    "OMPI_COMM_WORLD_RANK",  # Open MPI
    "PMIX_RANK",
    "PMI_RANK",  # MPICH, Intel MPI, Cray
    "PALS_RANKID",  # HPE
    "MV2_COMM_WORLD_RANK",  # MVAPICH
    "SLURM_PROCID",  # the last: srun also starts programs that have nothing to do with MPI, nor with each other
)
SIZE = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
_LOCAL_RANK = (
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",  # MPICH, Intel MPI
    "PMI_LOCAL_RANK",  # Cray
    "PALS_LOCAL_RANKID",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "SLURM_LOCALID",
)
_LOCAL_SIZE = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE")


def rank(environment: Mapping[str, str]) -> int | None:
    """The rank in the job."""
    return _first_number(_RANK, environment)


def size(environment: Mapping[str, str]) -> int | None:
    """The number of ranks in the job; None where the launcher does not say, as in the script of a Slurm job."""
    return _first_number(SIZE, environment)


def has_mpi(environment: Mapping[str, str]) -> bool:
    """Whether an MPI's launcher, or srun on behalf of one (``--mpi=pmix``), has started this process."""
    return _first_number(_RANK[:-1], environment) is not None


def local_rank(environment: Mapping[str, str]) -> int | None:
    """The rank among those on this host."""
    return _first_number(_LOCAL_RANK, environment)


def local_size(environment: Mapping[str, str]) -> int | None:
    """The number of ranks on this host."""
    told = _first_number(_LOCAL_SIZE, environment)
    if told is not None:
        return told
    node = _first_number(("SLURM_NODEID",), environment) or 0
    return tasks_on_node(environment.get("SLURM_STEP_TASKS_PER_NODE", ""), node)


def is_srun(environment: Mapping[str, str]) -> bool:
    """Whether Slurm's srun has started this rank; under another launcher its variables are those of a daemon."""
    place = environment.get("SLURM_PROCID"), environment.get("SLURM_STEP_NUM_TASKS")
    return place == (str(rank(environment)), str(size(environment)))


def tasks_on_node(layout: str, node: int) -> int | None:
    """Read Slurm's ``4(x2),3``: four tasks on each of two nodes, then three on the next one."""
    first = 0
    for part in layout.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            break
        first += int(match[2] or 1)
        if node < first:
            return int(match[1])
    return None


def nodes(names: str) -> list[str]:
    """Read Slurm's ``node[07-09,12],login``; empty for what is more involved."""
    if re.search(r"\][^,]*\[", names):
        return []
    found = []
    for before, numbers, after in re.findall(r"([^\[,]+)(?:\[([\d,-]*)\]([^,]*))?", names):
        for part in numbers.split(","):
            first, _, last = part.partition("-")
            each = [f"{n:0{len(first)}}" for n in range(int(first), int(last or first) + 1)] if first else [""]
            found += [f"{before}{number}{after}" for number in each]
    return found


def _first_number(names: tuple[str, ...], environment: Mapping[str, str]) -> int | None:
    return next((int(environment[name]) for name in names if environment.get(name, "").isdigit()), None)
