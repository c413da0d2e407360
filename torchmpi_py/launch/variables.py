"""Environment variables of a rank: reading the launcher's variables, and setting torchrun's variables from them.

*Launcher variables.* Each MPI has its own names for rank, size, local rank and local size. The lists below begin with
the names that only ranks have. Slurm's names are at the end, because Slurm also sets them for a batch script, from
which another launcher may have been started.

*torchrun variables.* Programs for ``torchrun`` read RANK, WORLD_SIZE, LOCAL_RANK, ..., MASTER_ADDR and MASTER_PORT. In
a process that an MPI's launcher has started, the import of the package sets these variables from the launcher
variables, without MPI. All ranks derive the same MASTER_PORT from the name of the job. On several hosts, `complete`
adds the values that are known only when MPI runs.

The variable TORCHMPIRUN_WORLD is a record of the job, the rank, and the values that this module has set. Child
processes inherit the record together with the variables. The record distinguishes stale variables of an outer job from
variables of the user:

- If the record describes this job and this rank, a variable with a different value was set later, by the program or by
  a ``torchrun`` that the rank has started. The variable is kept.
- If the record describes another job, from which this job was started, a variable with the recorded value is stale and
  is set again.
- If there is no record, the user has set the variable, and it is kept.

If TORCHELASTIC_RUN_ID is set, this process was started by a ``torchrun``, which a rank has started. Then torchrun's
variables are kept. The variables of an outer ``torchrun`` never reach a rank, because torchmpirun removes them.

``torchmpirun`` sets a record without a job for its ranks. This record contains the hosts and a free port.
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
    "SLURM_PROCID",  # This is the last name, because srun also starts independent programs without MPI.
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
NOTEBOOK = "TORCHMPIRUN_NOTEBOOK"  # Address and key of a notebook, for the notebook's ranks.
CORES = "TORCHMPIRUN_CORES"  # Number of usable cores of the rank's host. The rank may be bound to fewer cores.
ADDRESS, PORT = "MASTER_ADDR", "MASTER_PORT"
OF_A_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
NAMES = (*OF_A_RANK, ADDRESS, PORT)
# For --layouts: the folder for the counts of the ranks, and the duration of a measurement in seconds.
LAYOUT, LAYOUT_SECONDS = "TORCHMPIRUN_LAYOUT", "TORCHMPIRUN_LAYOUT_SECONDS"
LOOPBACK = "127.0.0.1"

OPEN_MPI = {
    "OMPI_MCA_osc": "^ucx",  # This component prints warnings on hosts without InfiniBand.
    "OMPI_MCA_btl_tcp_links": "2",  # A single connection between two ranks does not fill both directions of a link.
    # A message above the eager limit is preceded by a request. The reply to the request waits behind other data, so
    # use a high limit.
    "OMPI_MCA_btl_tcp_eager_limit": str(640 << 10),
    "OMPI_MCA_btl_tcp_max_send_size": str(640 << 10),  # This size must be at least the eager limit.
}
"""Open MPI settings that avoid warnings and are faster between hosts; see docs/decisions/020-between-nodes.md."""

_TORCHRUN = "TORCHELASTIC_"
_JOBS = ("PMIX_NAMESPACE", "PMI_JOBID", "PALS_APID")
_MOST_ANCESTORS = 10
_MOST_NODES = 1 << 15  # The import must remain fast for any content of a variable.
# Do not use int(), which accepts other forms too, or str.isdigit, which accepts characters that int() rejects.
_NUMBER = r"[0-9]{1,9}"
_SPAN = rf"{_NUMBER}(?:-{_NUMBER})?"
_NODES = re.compile(rf"([\w.-]+)(?:\[({_SPAN}(?:,{_SPAN})*)\]([\w.-]*))?(?:,|$)", re.ASCII)
_FIRST_PORT, _NUM_PORTS = 10_000, 19_000  # These ports are below torchrun's 29500 and the ports that Linux assigns.


def rank_in(environment: Mapping[str, str]) -> int | None:
    """Return the rank of this process in its job; None if the launcher does not set it."""
    return _first_number(_RANK, environment)


def size_in(environment: Mapping[str, str]) -> int | None:
    """Return the number of ranks in the job; None if the launcher does not set it, as in a Slurm job's script."""
    return _first_number(SIZE, environment)


def has_mpi(environment: Mapping[str, str]) -> bool:
    """Return whether an MPI's launcher, or srun with support for an MPI (``--mpi=pmix``), has started this process."""
    return _first_number(_RANK[:-1], environment) is not None


def local_rank_in(environment: Mapping[str, str]) -> int | None:
    """Return the rank among the ranks of this host; None if the launcher does not set it."""
    return _first_number(_LOCAL_RANK, environment)


def local_size_in(environment: Mapping[str, str]) -> int | None:
    """Return the number of ranks on this host; None if the launcher does not set it."""
    size = _first_number(_LOCAL_SIZE, environment)
    if size is not None:
        return size
    node = _first_number(("SLURM_NODEID",), environment) or 0
    return tasks_on_node(environment.get("SLURM_STEP_TASKS_PER_NODE", ""), node)


def is_srun(environment: Mapping[str, str]) -> bool:
    """Return whether Slurm's srun has started this rank.

    Under another launcher, srun has started only the launcher's daemons, whose variables the ranks inherit.
    """
    # Open MPI's mpirun has started this rank. The test below could still succeed, because the daemon's number and size
    # in srun may equal the rank and size in the job.
    if "OMPI_COMM_WORLD_RANK" in environment:
        return False
    place = environment.get("SLURM_PROCID"), environment.get("SLURM_STEP_NUM_TASKS")
    return place == (str(rank_in(environment)), str(size_in(environment)))


def tasks_on_node(layout: str, node: int) -> int | None:
    """Return the number of tasks on a node from Slurm's layout; None if the layout does not contain the node.

    The layout ``4(x2),3`` means four tasks on each of the first two nodes, and three tasks on the third.
    """
    for number, times in re.findall(rf"(?:^|(?<=,))({_NUMBER})(?:\(x({_NUMBER})\))?(?=,|$)", layout):
        node -= int(times or 1)
        if node < 0:
            return int(number)
    return None


def nodes(names: str) -> list[str]:
    """Return the nodes in a Slurm list such as ``node[07-09,12],login``.

    The result is empty if the list cannot be parsed, or contains more than `_MOST_NODES` nodes.
    """
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
    """Return the number in the text of a variable; None if the text is not a number of at most nine digits."""
    return int(text) if re.fullmatch(_NUMBER, text) else None


def _first_number(names: tuple[str, ...], environment: Mapping[str, str]) -> int | None:
    numbers = (number(environment.get(name, "")) for name in names)
    return next((each for each in numbers if each is not None), None)


def set_variables(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set torchrun's variables in a process that an MPI's launcher has started; in other processes do nothing.

    The ranks do not communicate. A second call changes nothing, and neither does a call in a child process. Nothing is
    set in tasks of srun without an MPI, which may be independent programs, or in a job of one rank, which is an
    ordinary program. But if ``torchmpirun`` has started these processes, the variables are set.
    """
    rank, size = rank_in(environment), size_in(environment)
    if rank is None or size is None or rank >= size:
        return
    record = read_record(environment)
    if is_under_torchrun(environment) or (not record and (size == 1 or not has_mpi(environment))):
        return
    # Remove spaces from the name of the job, because spaces separate the entries of the record.
    own = {"JOB": "".join(job_name(environment).split()), "BY": f"{rank}/{size}"}
    is_same_job = own["JOB"] in ("", record.get("JOB"))  # A child of a daemon cannot find the job's name.
    if is_same_job and record.get("BY") == own["BY"]:
        return
    for name in NAMES:
        if name in record and environment.get(name) == record[name]:
            del environment[name]
    _set(environment, own, _values(environment, {} if "JOB" in record else record, rank, size))


def complete(address: str, group_rank: int, environment: MutableMapping[str, str] = os.environ) -> None:
    """Set GROUP_RANK, and MASTER_ADDR unless it is already known, to values that were determined with MPI.

    Do nothing if there is no record of this job.
    """
    record = read_record(environment)
    if "JOB" in record:
        _set(environment, record, {ADDRESS: record.get(ADDRESS, address), "GROUP_RANK": str(group_rank)})


def _set(environment: MutableMapping[str, str], record: Mapping[str, str], values: Mapping[str, str]) -> None:
    """Set each of the ``values`` whose variable is not set or has the recorded value, and update the record."""
    ours = {name: value for name, value in values.items() if environment.get(name) in (None, record.get(name))}
    environment.update(ours)
    environment[RECORD] = " ".join(f"{name}={value}" for name, value in {**record, **ours}.items())


def read_record(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the entries of the record in TORCHMPIRUN_WORLD; empty if there is no record."""
    entries = (entry.partition("=") for entry in environment.get(RECORD, "").split())
    return {name: value for name, _, value in entries}


def is_own(environment: Mapping[str, str], name: str) -> bool:
    """Return whether the variable ``name`` is set to a value that does not come from this module."""
    return bool(environment.get(name)) and environment[name] != read_record(environment).get(name)


def is_under_torchrun(environment: Mapping[str, str]) -> bool:
    """Return whether ``torchrun`` has started this process and has set the variables."""
    return f"{_TORCHRUN}RUN_ID" in environment


def record_for_ranks(hosts: Sequence[tuple[str, int]], folder: Path) -> str:
    """Return the record that ``torchmpirun`` sets for the ranks of a job.

    ``hosts`` are names and slots; if they are empty, the job runs on this host. The port is derived from ``folder``.
    """
    layout = ",".join(f"{_name_for_others(name)}:{slots}" for name, slots in hosts)
    return f"{PORT}={_free_port(folder.name)}" + (f" HOSTS={layout}" if layout else "")


def without_outer(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for another job, without the variables of this rank and of torchrun."""
    is_stale = is_under_torchrun(environment)
    dropped = {RECORD, *OF_A_RANK, *(name for name in (ADDRESS, PORT) if is_stale or not is_own(environment, name))}
    return {
        name: value for name, value in environment.items() if name not in dropped and not name.startswith(_TORCHRUN)
    }


def job_name(environment: Mapping[str, str]) -> str:
    """Return the name of this process's job, which is unique and the same on all its ranks; empty if unknown."""
    for name in _JOBS:
        if environment.get(name):
            return environment[name]
    if is_srun(environment):
        return f"{environment.get('SLURM_JOB_ID')}.{environment.get('SLURM_STEP_ID')}"
    return _hydra_job()


def _hydra_job() -> str:
    """Return the address at which MPICH's mpiexec listens; empty if this is not a rank of MPICH.

    The address is in the command line of mpiexec's proxy, which runs once on each host and is an ancestor of the ranks.
    """
    process_id = os.getpid()
    for _ in range(_MOST_ANCESTORS):
        process_id = int(proc.field(process_id, "status", "PPid"))
        if match := re.search(rb"\0--control-port\0([^\0]+)", proc.read(process_id, "cmdline")):
            return os.fsdecode(match[1])
    return ""


def _values(environment: Mapping[str, str], record: Mapping[str, str], rank: int, size: int) -> dict[str, str]:
    """Return the values of torchrun's variables that are known without MPI; ``record`` is torchmpirun's record."""
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
    """Return the names and slots of the job's hosts in order, from torchmpirun's record or else from Slurm.

    The number of slots is 0 if it is unknown.
    """
    if layout:
        hosts = (host.rpartition(":") for host in layout.split(","))
        return [(name, number(slots) or 0) for name, _, slots in hosts if name]
    names = "SLURM_STEP_NODELIST" if is_srun(environment) else "SLURM_JOB_NODELIST"
    return [(name, 0) for name in nodes(environment.get(names, ""))]


def _group_rank(environment: Mapping[str, str], hosts: Sequence[tuple[str, int]], rank: int) -> int | None:
    """Return the index of this host in the job; None if it is unknown.

    Slurm sets the index. Without Slurm, use the host with this host's name, or else the host whose slots contain the
    rank.
    """
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
    """Return the name under which other hosts can reach the host ``name``.

    The result has no user name and no brackets. A loopback name (``localhost``, ``::1``, ``127.0.0.1``) is replaced by
    the name of this host.
    """
    bare = name.rpartition("@")[2].strip("[]")
    return socket.gethostname() if bare in ("localhost", "::1") or bare.startswith("127.") else bare


def _port(job: str) -> int:
    return _FIRST_PORT + zlib.crc32(os.fsencode(job)) % _NUM_PORTS


def _free_port(job: str) -> int:
    """Return the port derived from the job's name, or the next port that is free on this host."""
    for port in range(first := _port(job), first + _NUM_PORTS):
        with contextlib.suppress(OSError), socket.socket() as trying:
            trying.bind(("", port))
            return port
    return first
