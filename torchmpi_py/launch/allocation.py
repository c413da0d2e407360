"""The hosts of a batch system's job, the number of ranks on each host, and checks of how torchmpirun was started.

`_SYSTEMS` has one function per batch system, which reads the hosts from the environment. To support another system, add
a row. Without ``-n`` the number of ranks is the number of tasks or slots in the user's request to the batch system. If
the user has requested only hosts from Slurm or Flux, each host gets one rank per GPU, or without GPUs one rank per
core. SLURM_TASKS_PER_NODE cannot be used in this case, because it counts hardware threads (seen with Slurm 22.05).
"""

import contextlib
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from torchmpi_py.errors import LaunchError
from torchmpi_py.launch import hosts, topology, variables
from torchmpi_py.launch.hosts import Host

Environment = Mapping[str, str]
# The hosts, and the unit that a slot stands for: a "slot" or "task" of the user's request, a "GPU" or a "core".
Allocated = tuple[Iterable[Host], str]
_ASKED_FOR_TASKS = ("SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_NTASKS_PER_GPU", "SLURM_GPUS_PER_TASK")
# The keys are variables in which a launcher sets the number of processes that it has started. The values are the names
# of the launchers.
_STEPS = {"SLURM_STEP_NUM_TASKS": "srun", "JSM_NAMESPACE_SIZE": "jsrun"}
# If one of these variables is set, torchmpirun runs in a rank, in a Flux instance or under `srun --pty`. The variables
# in `_STEPS` then do not describe torchmpirun.
_INSIDE = ("TORCHMPIRUN_JOB_DIR", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "FLUX_URI", "SLURM_PTY_PORT", "SLURM_PTY_WIN_COL")
_PBS_AGENT = Path(__file__).with_name("templates") / "pbs_agent.sh"


class Placement(NamedTuple):
    """The hosts and the number of ranks of a job."""

    hosts: tuple[Host, ...]  # Empty for this host, or for the single host of the batch system's job.
    num_ranks: int
    system: str  # Name of the batch system that listed the hosts. "" if the user has listed them.
    agent: str  # A program that replaces ssh. "" for ssh itself.
    notes: list[str]  # Messages about the default number of ranks, or about hosts without a rank.


def place(num_ranks: int | None, text: str | None, hostfile: Path | None, environment: Environment) -> Placement:
    """Return the placement of the ranks on the hosts from --hosts (``text``), the hostfile or the batch system."""
    if text and hostfile:
        raise LaunchError("--hosts and --hostfile both list the hosts; use only one of them")
    named = hosts.parse_hosts(text) if text else hosts.read_hostfile(hostfile) if hostfile else ()
    system, allocated, unit = _allocated(environment, (LaunchError,) if named else ())
    own = named or (allocated if len(allocated) > 1 else ())  # A single host is this host, which needs no ssh.
    number = num_ranks or sum(host.num_slots for host in own or allocated) or _counted_here(environment)[0]
    notes = _idle(own, number, allocated, system)
    if own and not (named or num_ranks) and unit in ("GPU", "core"):
        notes = [f"{number} ranks: one for each {unit} of the {len(own)} hosts of {system}'s job"]
    system = "" if named or not own else system
    has_tmrsh = system == "PBS" and shutil.which("pbs_tmrsh", path=environment.get("PATH"))
    return Placement(own, number, system, str(_PBS_AGENT) if has_tmrsh else "", notes)


def _idle(own: tuple[Host, ...], num_ranks: int, allocated: tuple[Host, ...], system: str) -> list[str]:
    """Return a warning about allocated hosts without a rank, or an empty list.

    Every MPI fills all slots of a host before it uses the next host.
    """
    firsts = accumulate((host.num_slots for host in own), initial=0)
    busy = {host.name for host, first in zip(own, firsts, strict=False) if first < num_ranks}
    idle = [host.name for host in allocated if host.name not in busy]
    # The user may have listed the hosts under names that differ from the names in the batch system. The busy hosts then
    # count as idle too, so the sum below is wrong, and the idle hosts are unknown.
    is_sure = own and len(idle) + len(busy) == len(allocated)
    listed = ", ".join(idle[:4]) + ", ..." * (len(idle) > 4)
    remedy = "omit -n, --hosts and --hostfile, or list each host with its number of ranks (--hosts a:2,b:2)"
    return [f"{system}'s job has hosts without a rank ({listed}); {remedy}"] if idle and is_sure else []


def num_ranks_as_torchrun(number: int, num_ranks: int | None, placed: Placement) -> int:
    """Return the ``number`` of --nproc-per-node. Raise LaunchError if -n is set, or if there are several hosts."""
    if num_ranks:
        raise LaunchError(f"-n {num_ranks} and --nproc-per-node {number} both set the number of ranks; use only -n")
    if len(placed.hosts) > 1:
        raise LaunchError(
            f"--nproc-per-node works on one host, but the job has several; use --hosts a:{number},b:{number}"
        )
    return number


def check(environment: Environment) -> None:
    """Raise LaunchError if the Slurm job is heterogeneous, or if a launcher has started torchmpirun several times."""
    if "SLURM_JOB_ID_HET_GROUP_1" in environment or "SLURM_JOB_ID_PACK_GROUP_1" in environment:
        raise LaunchError("no MPI can start ranks in a heterogeneous Slurm job; submit it without ` : ` and `hetjob`")
    for variable, launcher in _STEPS.items():
        number = variables.number(environment.get(variable, "")) or 1
        if number > 1 and not any(name in environment for name in _INSIDE):
            problem = f"{launcher} has started torchmpirun {number} times"
            raise LaunchError(f"{problem}, but torchmpirun starts all ranks itself; call it once, without {launcher}")


def _allocated(environment: Environment, ignored: tuple[type[Exception], ...]) -> tuple[str, tuple[Host, ...], str]:
    """Return the batch system that has allocated hosts to this job, the hosts, and the unit of their slots.

    Without a batch system, all three are empty. A batch system is skipped if reading its hosts raises one of the
    exceptions in ``ignored``.
    """
    for system, read in _SYSTEMS:
        with contextlib.suppress(*ignored):
            named, unit = read(environment)
            if slots := hosts.merge(named):
                # A list of one host with one slot does not mean that the job should have one rank.
                return system, () if unit == "slot" and sum(host.num_slots for host in slots) == 1 else slots, unit
    return "", (), ""


def _in_file(name: str, environment: Environment) -> Allocated:
    remedy = f"; unset {name}, or list the hosts with --hosts or --hostfile"
    return hosts.read_hostfile(Path(environment[name]), name, remedy) if environment.get(name) else (), "slot"


def _lsf(environment: Environment) -> Allocated:
    pairs = re.findall(r"(\S+)\s*(\S*)", environment.get("LSB_MCPU_HOSTS", ""))
    return [hosts.parse_host(":".join(pair), "LSB_MCPU_HOSTS") for pair in pairs], "slot"


def _slurm(environment: Environment) -> Allocated:
    names, unit, divisor = slurm_nodes(environment), "task", 1
    layout = environment.get("SLURM_TASKS_PER_NODE", "")
    if not any(name in environment for name in _ASKED_FOR_TASKS):
        _, _, gpus = environment.get("SLURM_GPUS_PER_NODE", "").rpartition(":")  # The value may be 4 or a100:4.
        if number := variables.number(gpus) or hosts.num_gpus(environment):
            return [Host(name, number) for name in names], "GPU"
        # Slurm does not report the number of hardware threads per core. Assume the same number as on this host.
        layout, unit = environment.get("SLURM_JOB_CPUS_PER_NODE", ""), "core"
        per_task = variables.number(environment.get("SLURM_CPUS_PER_TASK", "")) or 1
        divisor = max(per_task, *(len(core.cpus) for core in topology.cores()))
    numbers = ((name, variables.tasks_on_node(layout, node)) for node, name in enumerate(names))
    return [Host(name, max(1, number // divisor)) for name, number in numbers if number], unit


def slurm_nodes(environment: Environment) -> tuple[str, ...]:
    """Return the hosts of the Slurm allocation; empty outside of an allocation."""
    node_names = variables.nodes(names := environment.get("SLURM_JOB_NODELIST", ""))
    return tuple(node_names or (names and hosts.output_of(environment, "scontrol", "show", "hostnames", names)).split())


def slurm_layout(named: Iterable[Host], environment: Environment) -> dict[str, str]:
    """Return SLURM_TASKS_PER_NODE with the slots of the hosts in ``named``.

    In a Slurm job, Open MPI reads the slots from this variable, even if there is a hostfile.
    """
    slots = {host.name: str(host.num_slots) for host in named}
    layout = ",".join(slots.get(node, "1") for node in slurm_nodes(environment)) if slots else ""
    return {"SLURM_TASKS_PER_NODE": layout} if layout else {}


def _flux(environment: Environment) -> Allocated:
    """Return the hosts of a Flux instance if this process runs in the instance's initial program.

    For example, the script of a ``flux batch`` job is the initial program of an instance.
    """
    is_initial = "FLUX_URI" in environment and "FLUX_TASK_RANK" not in environment
    names = variables.nodes(hosts.output_of(environment, "flux", "getattr", "hostlist").strip()) if is_initial else []
    number, unit = _counted_here(environment) if names else (0, "")
    return [Host(name, number) for name in names], unit


def _counted_here(environment: Environment) -> tuple[int, str]:
    return (number, "GPU") if (number := hosts.num_gpus(environment)) else (topology.num_usable_cores(), "core")


_FILES = {"PBS": "PBS_NODEFILE", "LSF": "LSB_DJOB_HOSTFILE", "Grid Engine": "PE_HOSTFILE"}
_SYSTEMS: list[tuple[str, Callable[[Environment], Allocated]]] = [
    *((system, partial(_in_file, name)) for system, name in _FILES.items()),
    *(("LSF", _lsf), ("Slurm", _slurm), ("Flux", _flux)),
]
