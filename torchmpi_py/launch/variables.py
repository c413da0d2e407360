"""Environment variables of a rank: the launcher's, which tell the rank's place, and torchrun's, derived from them.

*The launcher's.* Each MPI has its own names for rank, size, local rank and local size. The more specific names come
first, because Slurm's are also set for a batch script, from which another launcher may have been started.

*torchrun's* are RANK, WORLD_SIZE, LOCAL_RANK, ..., MASTER_ADDR, MASTER_PORT. Programs for ``torchrun`` read them. The
import of the package sets them in a process that an MPI's launcher has started, from the launcher's own variables and
without MPI. All ranks derive the same MASTER_PORT from the job's name. On several hosts `complete` adds the values that
only MPI knows, once MPI runs.

The variable TORCHMPIRUN_WORLD is a record of the job, the rank, and the values that were set here. Processes inherit
the record together with the variables. Without it, a stale variable of an outer job could not be told from a user's:

- The record is of this job and this rank. Then a variable with a different value was set later, by the program or by a
  ``torchrun`` that the rank has started, and stays.
- The record is of another job, from which this one was started. Then a variable with the recorded value is stale, and
  is set again.
- There is no record. Then a variable that is set comes from the user, and stays.

If TORCHELASTIC_RUN_ID is set, a rank has started ``torchrun``, and its variables stay. The variables of an outer
``torchrun`` never reach a rank, because torchmpirun removes them.

``torchmpirun`` gives its ranks a record without a job: the hosts, and a free port.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import zlib
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path

from torchmpi_py.launch import proc

_RANK = (
    "OMPI_COMM_WORLD_RANK",  # Open MPI
    "PMIX_RANK",
    "PMI_RANK",  # MPICH, Intel MPI, Cray
    "PALS_RANKID",  # HPE
    "MV2_COMM_WORLD_RANK",  # MVAPICH
    "SLURM_PROCID",  # last, because srun also starts independent programs without MPI
)
SIZE = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "JSM_NAMESPACE_SIZE", "SLURM_STEP_NUM_TASKS")
_LOCAL_RANK = (
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",  # MPICH, Intel MPI
    "PMI_LOCAL_RANK",  # Cray
    "PALS_LOCAL_RANKID",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "SLURM_LOCALID",
)
_LOCAL_SIZE = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE")

RECORD = "TORCHMPIRUN_WORLD"
NOTEBOOK = "TORCHMPIRUN_NOTEBOOK"  # address and key of a notebook, for the notebook's ranks
CORES = "TORCHMPIRUN_CORES"  # usable cores of the rank's host; the rank may be bound to some of them
ADDRESS, PORT = "MASTER_ADDR", "MASTER_PORT"
OF_A_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
NAMES = (*OF_A_RANK, ADDRESS, PORT)
# for --layouts: the folder of the counts, and the seconds to measure
LAYOUT, LAYOUT_SECONDS = "TORCHMPIRUN_LAYOUT", "TORCHMPIRUN_LAYOUT_SECONDS"
LOOPBACK = "127.0.0.1"

OPEN_MPI = {
    "OMPI_MCA_osc": "^ucx",  # This component prints noise where there is no InfiniBand.
    "OMPI_MCA_btl_tcp_links": "2",  # One connection between two ranks does not fill both directions of a link.
    # a longer message first sends a request, whose answer queues behind data
    "OMPI_MCA_btl_tcp_eager_limit": str(640 << 10),
    "OMPI_MCA_btl_tcp_max_send_size": str(640 << 10),  # must be at least the eager limit
}
"""Settings of Open MPI that speed up several hosts and remove noise; see docs/decisions/020-between-nodes.md."""

_TORCHRUN = "TORCHELASTIC_"
_JOBS = ("PMIX_NAMESPACE", "PMI_JOBID", "PALS_APID")
_MOST_ANCESTORS = 10
_MOST_NODES = 1 << 15  # a limit, because the import must stay fast whatever a variable holds
# stricter than int(), which accepts more forms, and than str.isdigit, which accepts digits that int() refuses
_NUMBER = r"[0-9]{1,9}"
_SPAN = rf"{_NUMBER}(?:-{_NUMBER})?"
_NODES = re.compile(rf"([\w.-]+)(?:\[({_SPAN}(?:,{_SPAN})*)\]([\w.-]*))?(?:,|$)", re.ASCII)
_FIRST_PORT, _NUM_PORTS = 10_000, 19_000  # below the ports that a system assigns, and below torchrun's 29500


def rank_in(environment: Mapping[str, str]) -> int | None:
    """Return the rank in the job."""
    return _first_number(_RANK, environment)


def size_in(environment: Mapping[str, str]) -> int | None:
    """Return the number of ranks in the job; None if the launcher does not set it, as in a Slurm job's script."""
    return _first_number(SIZE, environment)


def has_mpi(environment: Mapping[str, str]) -> bool:
    """Return whether an MPI's launcher, or srun on behalf of one (``--mpi=pmix``), has started this process."""
    return _first_number(_RANK[:-1], environment) is not None


def local_rank_in(environment: Mapping[str, str]) -> int | None:
    """Return the rank among the ranks of this host."""
    return _first_number(_LOCAL_RANK, environment)


def local_size_in(environment: Mapping[str, str]) -> int | None:
    """Return the number of ranks on this host."""
    size = _first_number(_LOCAL_SIZE, environment)
    if size is not None:
        return size
    node = _first_number(("SLURM_NODEID",), environment) or 0
    return tasks_on_node(environment.get("SLURM_STEP_TASKS_PER_NODE", ""), node)


def is_srun(environment: Mapping[str, str]) -> bool:
    """Return whether Slurm's srun has started this rank; under another launcher srun's variables are a daemon's."""
    # mpirun has started this rank; mpirun's daemons may have the same numbers as ranks
    if "OMPI_COMM_WORLD_RANK" in environment:
        return False
    place = environment.get("SLURM_PROCID"), environment.get("SLURM_STEP_NUM_TASKS")
    return place == (str(rank_in(environment)), str(size_in(environment)))


def tasks_on_node(layout: str, node: int) -> int | None:
    """Read Slurm's ``4(x2),3``: four tasks on each of two nodes, then three on the next one."""
    for number, times in re.findall(rf"(?:^|(?<=,))({_NUMBER})(?:\(x({_NUMBER})\))?(?=,|$)", layout):
        node -= int(times or 1)
        if node < 0:
            return int(number)
    return None


def nodes(names: str) -> list[str]:
    """Read Slurm's ``node[07-09,12],login``; empty for any other form, and for more than `_MOST_NODES`."""
    names_of_nodes: list[str] = []
    place = 0
    while place < len(names):
        if (part := _NODES.match(names, place)) is None:
            return []
        place, (before, spans, after) = part.end(), part.groups("")
        for span in spans.split(","):
            first, _, last = span.partition("-")
            numbers = range(int(first or 0), int(last or first or 0) + 1)
            if len(names_of_nodes) + len(numbers) > _MOST_NODES:
                return []
            names_of_nodes += [f"{before}{str(n).zfill(len(first)) if first else ''}{after}" for n in numbers]
    return names_of_nodes


def number(text: str) -> int | None:
    """Return the number that a launcher's variable holds; None for any other text."""
    return int(text) if re.fullmatch(_NUMBER, text) else None


def _first_number(names: tuple[str, ...], environment: Mapping[str, str]) -> int | None:
    numbers = (number(environment.get(name, "")) for name in names)
    return next((each for each in numbers if each is not None), None)


def set_variables(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set torchrun's variables in a process that an MPI's launcher has started; elsewhere do nothing.

    Not collective. A second call changes nothing, and neither does a call in a child process. Tasks of srun without an
    MPI may be independent of each other, and a single rank is an ordinary program. For these nothing is set, unless
    ``torchmpirun`` has started them.
    """
    rank, size = rank_in(environment), size_in(environment)
    if rank is None or size is None or rank >= size:
        return
    record = read_record(environment)
    if is_under_torchrun(environment) or (not record and (size == 1 or not has_mpi(environment))):
        return
    # without spaces, because spaces separate the entries
    own = {"JOB": "".join(job_name(environment).split()), "BY": f"{rank}/{size}"}
    is_same_job = own["JOB"] in ("", record.get("JOB"))  # a child of a daemon cannot find the job's name
    if is_same_job and record.get("BY") == own["BY"]:
        return
    for name in NAMES:
        if name in record and environment.get(name) == record[name]:
            del environment[name]
    _set(environment, own, _values(environment, {} if "JOB" in record else record, rank, size))


def complete(address: str, group_rank: int, environment: MutableMapping[str, str] = os.environ) -> None:
    """Set the values that MPI has found: MASTER_ADDR unless it is known, and GROUP_RANK.

    Do nothing without a record.
    """
    record = read_record(environment)
    if "JOB" in record:
        _set(environment, record, {ADDRESS: record.get(ADDRESS, address), "GROUP_RANK": str(group_rank)})


def _set(environment: MutableMapping[str, str], record: Mapping[str, str], values: Mapping[str, str]) -> None:
    """Set the ``values`` that the environment lacks or has from the record, and add them to the new record."""
    ours = {name: value for name, value in values.items() if environment.get(name) in (None, record.get(name))}
    environment.update(ours)
    environment[RECORD] = " ".join(f"{name}={value}" for name, value in {**record, **ours}.items())


def read_record(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the content of the record; empty if there is none."""
    entries = (entry.partition("=") for entry in environment.get(RECORD, "").split())
    return {name: value for name, _, value in entries}


def is_own(environment: Mapping[str, str], name: str) -> bool:
    """Return whether the variable ``name`` has a value that was not set here."""
    return bool(environment.get(name)) and environment[name] != read_record(environment).get(name)


def is_under_torchrun(environment: Mapping[str, str]) -> bool:
    """Return whether a torchrun has set the variables."""
    return f"{_TORCHRUN}RUN_ID" in environment


def record_for_ranks(hosts: Sequence[tuple[str, int]], folder: Path) -> str:
    """Return the record that ``torchmpirun`` gives the ranks of a job on these hosts (names and slots).

    Empty ``hosts`` stand for this host.
    """
    layout = ",".join(f"{_name_for_others(name)}:{slots}" for name, slots in hosts)
    return f"{PORT}={_free_port(folder.name)}" + (f" HOSTS={layout}" if layout else "")


def without_outer(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for the ranks of another job, without the variables of this rank and of torchrun."""
    is_stale = is_under_torchrun(environment)
    dropped = {RECORD, *OF_A_RANK, *(name for name in (ADDRESS, PORT) if is_stale or not is_own(environment, name))}
    return {
        name: value for name, value in environment.items() if name not in dropped and not name.startswith(_TORCHRUN)
    }


def job_name(environment: Mapping[str, str]) -> str:
    """Return a name of this process's job that all its ranks find and no other job has; empty if unknown."""
    for name in _JOBS:
        if environment.get(name):
            return environment[name]
    if is_srun(environment):
        return f"{environment.get('SLURM_JOB_ID')}.{environment.get('SLURM_STEP_ID')}"
    return _hydra_job()


def _hydra_job() -> str:
    """Return the address at which MPICH's mpiexec listens.

    It is read from the command line of an ancestor of this process: mpiexec's proxy, which runs once on each host.
    """
    process_id = os.getpid()
    for _ in range(_MOST_ANCESTORS):
        process_id = int(proc.field(process_id, "status", "PPid"))
        if match := re.search(rb"\0--control-port\0([^\0]+)", proc.read(process_id, "cmdline")):
            return os.fsdecode(match[1])
    return ""


def _values(environment: Mapping[str, str], record: Mapping[str, str], rank: int, size: int) -> dict[str, str]:
    """Return the variables that are known without MPI; ``record``: torchmpirun's record."""
    local_rank, local_size = local_rank_in(environment), local_size_in(environment)
    hosts = _hosts(environment, record.get("HOSTS", ""))
    is_one_host = local_size == size
    values = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": local_size,
        "GROUP_RANK": 0 if is_one_host else _group_rank(environment, hosts, rank),
        ADDRESS: LOOPBACK if is_one_host else next((name for name, _ in hosts), None),
        PORT: record.get(PORT) or _port(job_name(environment)),
    }
    return {name: str(value) for name, value in values.items() if value is not None}


def _hosts(environment: Mapping[str, str], layout: str) -> list[tuple[str, int]]:
    """Return names and slots of the job's hosts in their order: torchmpirun's, else Slurm's (0 slots: unknown)."""
    if layout:
        hosts = (host.rpartition(":") for host in layout.split(","))
        return [(name, number(slots) or 0) for name, _, slots in hosts if name]
    names = "SLURM_STEP_NODELIST" if is_srun(environment) else "SLURM_JOB_NODELIST"
    return [(name, 0) for name in nodes(environment.get(names, ""))]


def _group_rank(environment: Mapping[str, str], hosts: Sequence[tuple[str, int]], rank: int) -> int | None:
    """Return the index of this host: Slurm's, else by the host's name, else the host whose slots hold the rank."""
    node = number(environment.get("SLURM_NODEID", ""))
    if node is not None and is_srun(environment):
        return node
    for match in (str, _short):
        own = match(socket.gethostname())
        indices = [index for index, (name, _) in enumerate(hosts) if match(name) == own]
        if len(indices) == 1:
            return indices[0]
    for index, (_, slots) in enumerate(hosts):
        rank -= slots
        if rank < 0:
            return index
    return None


def _short(name: str) -> str:
    return name if re.fullmatch(r"[\d.]+", name) else name.partition(".")[0]


def _name_for_others(name: str) -> str:
    """Return the name by which other hosts reach a host.

    A user name and brackets are removed. This host's own name replaces a loopback name (``localhost``, ``::1``,
    ``127.0.0.1``).
    """
    bare = name.rpartition("@")[2].strip("[]")
    return socket.gethostname() if bare in ("localhost", "::1") or bare.startswith("127.") else bare


def _port(job: str) -> int:
    return _FIRST_PORT + zlib.crc32(os.fsencode(job)) % _NUM_PORTS


def _free_port(job: str) -> int:
    """Return the port of the job's name, or the next port that is free on this host."""
    for port in range(first := _port(job), first + _NUM_PORTS):
        with contextlib.suppress(OSError), socket.socket() as trying:
            trying.bind(("", port))
            return port
    return first
