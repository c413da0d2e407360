"""Environment variables of a rank: those of the launcher, which say the rank's place, and torchrun's, set from these.

*The launcher's.* Each MPI has its own names for rank, size, local rank and local size. The more specific names stand
first: Slurm's are also set for a batch script, from which another starter may have come.

*torchrun's* are RANK, WORLD_SIZE, LOCAL_RANK, ..., MASTER_ADDR, MASTER_PORT. Programs that are written for ``torchrun``
read them. The import of the package sets them in a process that an MPI's launcher has started, from the launcher's own
variables and without MPI: all ranks come to the same MASTER_PORT by way of the job's name. What only MPI knows, on
several hosts, `complete` adds when MPI runs.

A record, the variable TORCHMPIRUN_WORLD, holds the job, the rank, and what was set here. Processes inherit it together
with the variables, and so it distinguishes what has the same names:

- The record is of this job and this rank: a variable that differs from it was set since, by the program or by a
  ``torchrun`` that the rank has started, and stays.
- The record is of another job, from which this one was started: a variable that equals it is stale, and is set again.
- There is none: a variable that is set is the user's and stays.

Where TORCHELASTIC_RUN_ID is set, a rank has started ``torchrun``, whose variables stay: an outer one's never reach a
rank, because torchmpirun takes them out.

``torchmpirun`` gives its ranks a record without a job: the hosts, and a port that is free.
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
    "SLURM_PROCID",  # the last: srun also starts programs that have nothing to do with MPI, nor with each other
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
NOTEBOOK = "TORCHMPIRUN_NOTEBOOK"  # address and key of a notebook, for its ranks
CORES = "TORCHMPIRUN_CORES"  # usable cores of the rank's host, of which it may have been bound to some
ADDRESS, PORT = "MASTER_ADDR", "MASTER_PORT"
OF_A_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
NAMES = (*OF_A_RANK, ADDRESS, PORT)
LAYOUT, LAYOUT_SECONDS = "TORCHMPIRUN_LAYOUT", "TORCHMPIRUN_LAYOUT_SECONDS"  # --layouts: folder of counts, how long
LOOPBACK = "127.0.0.1"

OPEN_MPI = {
    "OMPI_MCA_osc": "^ucx",  # this component prints noise where there is no InfiniBand
    "OMPI_MCA_btl_tcp_links": "2",  # one connection of two ranks does not fill both directions of a link
    "OMPI_MCA_btl_tcp_eager_limit": str(640 << 10),  # a longer message asks first, and its answer queues behind data
    "OMPI_MCA_btl_tcp_max_send_size": str(640 << 10),  # at least as much
}
"""Settings of Open MPI for ranks on several hosts, and against noise; docs/decisions/020-between-nodes.md."""

_TORCHRUN = "TORCHELASTIC_"
_JOBS = ("PMIX_NAMESPACE", "PMI_JOBID", "PALS_APID")
_MOST_ANCESTORS = 10
_MOST_NODES = 1 << 15  # the import must stay fast whatever a variable holds
_NUMBER = r"[0-9]{1,9}"  # int() also reads what is no number of a launcher, and str.isdigit accepts what int() refuses
_SPAN = rf"{_NUMBER}(?:-{_NUMBER})?"
_NODES = re.compile(rf"([\w.-]+)(?:\[({_SPAN}(?:,{_SPAN})*)\]([\w.-]*))?(?:,|$)", re.ASCII)
_FIRST_PORT, _NUM_PORTS = 10_000, 19_000  # below those that a system gives away, and torchrun's 29500


def rank_in(environment: Mapping[str, str]) -> int | None:
    """The rank in the job."""
    return _first_number(_RANK, environment)


def size_in(environment: Mapping[str, str]) -> int | None:
    """The number of ranks in the job; None where the launcher does not say, as in the script of a Slurm job."""
    return _first_number(SIZE, environment)


def has_mpi(environment: Mapping[str, str]) -> bool:
    """Whether an MPI's launcher, or srun on behalf of one (``--mpi=pmix``), has started this process."""
    return _first_number(_RANK[:-1], environment) is not None


def local_rank_in(environment: Mapping[str, str]) -> int | None:
    """The rank among those on this host."""
    return _first_number(_LOCAL_RANK, environment)


def local_size_in(environment: Mapping[str, str]) -> int | None:
    """The number of ranks on this host."""
    size = _first_number(_LOCAL_SIZE, environment)
    if size is not None:
        return size
    node = _first_number(("SLURM_NODEID",), environment) or 0
    return tasks_on_node(environment.get("SLURM_STEP_TASKS_PER_NODE", ""), node)


def is_srun(environment: Mapping[str, str]) -> bool:
    """Whether Slurm's srun has started this rank; under another launcher its variables are those of a daemon."""
    if "OMPI_COMM_WORLD_RANK" in environment:  # mpirun's, whose daemons may have the numbers of the ranks
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
    found: list[str] = []
    place = 0
    while place < len(names):
        if (part := _NODES.match(names, place)) is None:
            return []
        place, (before, spans, after) = part.end(), part.groups("")
        for span in spans.split(","):
            first, _, last = span.partition("-")
            numbers = range(int(first or 0), int(last or first or 0) + 1)
            if len(found) + len(numbers) > _MOST_NODES:
                return []
            found += [f"{before}{str(n).zfill(len(first)) if first else ''}{after}" for n in numbers]
    return found


def number(text: str) -> int | None:
    """The number that a launcher's variable holds; None for any other text."""
    return int(text) if re.fullmatch(_NUMBER, text) else None


def _first_number(names: tuple[str, ...], environment: Mapping[str, str]) -> int | None:
    numbers = (number(environment.get(name, "")) for name in names)
    return next((each for each in numbers if each is not None), None)


def set_variables(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set torchrun's variables in a process that an MPI's launcher has started; elsewhere do nothing. Not collective.

    A second call changes nothing, nor does one in a child process. Tasks of srun without an MPI may be independent of
    each other, and a single rank is no more than a program: for these nothing is set, unless by ``torchmpirun``.
    """
    rank, size = rank_in(environment), size_in(environment)
    if rank is None or size is None or rank >= size:
        return
    record = read_record(environment)
    if is_under_torchrun(environment) or (not record and (size == 1 or not has_mpi(environment))):
        return
    own = {"JOB": "".join(job_name(environment).split()), "BY": f"{rank}/{size}"}  # spaces separate the entries
    is_same_job = own["JOB"] in ("", record.get("JOB"))  # a daemon's child does not find the job
    if is_same_job and record.get("BY") == own["BY"]:
        return
    for name in NAMES:
        if name in record and environment.get(name) == record[name]:
            del environment[name]
    _set(environment, own, _values(environment, {} if "JOB" in record else record, rank, size))


def complete(address: str, group_rank: int, environment: MutableMapping[str, str] = os.environ) -> None:
    """Set what MPI has found: MASTER_ADDR, unless it is known, and GROUP_RANK. Does nothing without a record."""
    record = read_record(environment)
    if "JOB" in record:
        _set(environment, record, {ADDRESS: record.get(ADDRESS, address), "GROUP_RANK": str(group_rank)})


def _set(environment: MutableMapping[str, str], record: Mapping[str, str], values: Mapping[str, str]) -> None:
    """Set the ``values`` that the environment lacks, or has from the record, and put them into the new record."""
    ours = {name: value for name, value in values.items() if environment.get(name) in (None, record.get(name))}
    environment.update(ours)
    environment[RECORD] = " ".join(f"{name}={value}" for name, value in {**record, **ours}.items())


def read_record(environment: Mapping[str, str]) -> dict[str, str]:
    """Content of the record; empty where there is none."""
    entries = (entry.partition("=") for entry in environment.get(RECORD, "").split())
    return {name: value for name, _, value in entries}


def is_own(environment: Mapping[str, str], name: str) -> bool:
    """Whether the variable ``name`` has a value that was not set here."""
    return bool(environment.get(name)) and environment[name] != read_record(environment).get(name)


def is_under_torchrun(environment: Mapping[str, str]) -> bool:
    """Whether a torchrun has set the variables."""
    return f"{_TORCHRUN}RUN_ID" in environment


def record_for_ranks(hosts: Sequence[tuple[str, int]], folder: Path) -> str:
    """The record that ``torchmpirun`` gives the ranks of a job on ``hosts`` (names and slots); none: on this host."""
    layout = ",".join(f"{_name_for_others(name)}:{slots}" for name, slots in hosts)
    return f"{PORT}={_free_port(folder.name)}" + (f" HOSTS={layout}" if layout else "")


def without_outer(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment for the ranks of another job: without the place in an outer one, torchrun's included."""
    is_stale = is_under_torchrun(environment)
    dropped = {RECORD, *OF_A_RANK, *(name for name in (ADDRESS, PORT) if is_stale or not is_own(environment, name))}
    return {
        name: value for name, value in environment.items() if name not in dropped and not name.startswith(_TORCHRUN)
    }


def job_name(environment: Mapping[str, str]) -> str:
    """A name of this process's job that all its ranks find, and no other job has; empty if the launcher gives none."""
    for name in _JOBS:
        if environment.get(name):
            return environment[name]
    if is_srun(environment):
        return f"{environment.get('SLURM_JOB_ID')}.{environment.get('SLURM_STEP_ID')}"
    return _hydra_job()


def _hydra_job() -> str:
    """Address at which MPICH's mpiexec listens, from the command line of one of its proxies, one on each host."""
    process_id = os.getpid()
    for _ in range(_MOST_ANCESTORS):
        process_id = int(proc.field(process_id, "status", "PPid"))
        if found := re.search(rb"\0--control-port\0([^\0]+)", proc.read(process_id, "cmdline")):
            return os.fsdecode(found[1])
    return ""


def _values(environment: Mapping[str, str], given: Mapping[str, str], rank: int, size: int) -> dict[str, str]:
    """The variables, as far as they are known without MPI; ``given``: the record of torchmpirun."""
    local_rank, local_size = local_rank_in(environment), local_size_in(environment)
    hosts = _hosts(environment, given.get("HOSTS", ""))
    is_one_host = local_size == size
    found = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": local_size,
        "GROUP_RANK": 0 if is_one_host else _group_rank(environment, hosts, rank),
        ADDRESS: LOOPBACK if is_one_host else next((name for name, _ in hosts), None),
        PORT: given.get(PORT) or _port(job_name(environment)),
    }
    return {name: str(value) for name, value in found.items() if value is not None}


def _hosts(environment: Mapping[str, str], layout: str) -> list[tuple[str, int]]:
    """Names and slots of the job's hosts in their order: torchmpirun's, else Slurm's (0 slots: not known)."""
    if layout:
        hosts = (host.rpartition(":") for host in layout.split(","))
        return [(name, number(slots) or 0) for name, _, slots in hosts if name]
    names = "SLURM_STEP_NODELIST" if is_srun(environment) else "SLURM_JOB_NODELIST"
    return [(name, 0) for name in nodes(environment.get(names, ""))]


def _group_rank(environment: Mapping[str, str], hosts: Sequence[tuple[str, int]], rank: int) -> int | None:
    """The index of this host: Slurm's, else that of its name, else the one whose slots hold the rank."""
    node = number(environment.get("SLURM_NODEID", ""))
    if node is not None and is_srun(environment):
        return node
    for match in (str, _short):
        own = match(socket.gethostname())
        found = [index for index, (name, _) in enumerate(hosts) if match(name) == own]
        if len(found) == 1:
            return found[0]
    for index, (_, slots) in enumerate(hosts):
        rank -= slots
        if rank < 0:
            return index
    return None


def _short(name: str) -> str:
    return name if re.fullmatch(r"[\d.]+", name) else name.partition(".")[0]


def _name_for_others(name: str) -> str:
    """A host's name for its peers: of ``user@[::1]`` the address, of this host's loopback the host's name."""
    bare = name.rpartition("@")[2].strip("[]")
    return socket.gethostname() if bare in ("localhost", "::1") or bare.startswith("127.") else bare


def _port(job: str) -> int:
    return _FIRST_PORT + zlib.crc32(os.fsencode(job)) % _NUM_PORTS


def _free_port(job: str) -> int:
    """The port of the job's name, or the next one that is free on this host."""
    for port in range(first := _port(job), first + _NUM_PORTS):
        with contextlib.suppress(OSError), socket.socket() as trying:
            trying.bind(("", port))
            return port
    return first
