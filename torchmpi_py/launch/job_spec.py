"""JobSpec: a complete description of a job, from the command line and the environment of torchmpirun.

All decisions about a job are made here. Later steps only read the JobSpec: the command of an attempt (`command`), the
process (`job`), the groups (`group_jobs`), and the checks of the hosts (`host_check`). A JobSpec is frozen.
`dataclasses.replace` makes a variant, such as a group's part of the job.
"""

import argparse
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from torchmpi_py.errors import LaunchError
from torchmpi_py.launch import allocation, mpirun, surroundings
from torchmpi_py.launch.group_of_ranks import GroupOfRanks
from torchmpi_py.launch.hosts import Host
from torchmpi_py.launch.mpirun import Vendor
from torchmpi_py.launch.terminal import say

NETWORKS = Path("/sys/class/net")
_MOST_RESTARTS = 3  # Default of --max-restarts with --elastic-restart, or if the MPI does not support --elastic.


@dataclass(frozen=True)
class JobSpec:
    """The description of a job: program, ranks, hosts, MPI, limits, and output."""

    program: tuple[str, ...] = ()  # the program and its arguments
    as_module: bool = False
    vendor: Vendor = mpirun.OPEN_MPI
    starter: str = "mpirun"  # Path of the MPI's mpirun.
    num_ranks: int = 0  # 0 if unknown.
    hosts: tuple[Host, ...] = ()  # Empty for this host.
    system: str = ""  # Name of the batch system that listed the hosts. "" if the user has listed them.
    notes: Sequence[str] = ()  # Messages about the choice of ranks and hosts.
    bind: str = "core"
    environment: Mapping[str, str] = field(default_factory=dict)  # torchmpirun's environment
    variables: Mapping[str, str] = field(default_factory=dict)  # variables of --env
    launch_agent: str = ""
    interface: str = ""  # name of the network interface between hosts
    srun_mpi: str = "pmix"
    mpi_args: Sequence[str] = ()
    elastic: bool = False
    max_restarts: int = 0
    elastic_restart: tuple[int, ...] = ()  # the smallest and the largest number of ranks, or empty
    discover: str = ""  # a shell command that prints the hosts
    timeout: float | None = None  # seconds for all attempts together
    grace: float = 30.0  # seconds for ranks to end after a signal
    log_dir: Path | None = None
    profile: Path | None = None
    timeline: Path | None = None
    text: str = ""  # the command line, for messages
    group: GroupOfRanks | None = None

    @property
    def has_srun(self) -> bool:
        """Whether Slurm's srun starts processes on other hosts, instead of ssh."""
        return "SLURM_JOB_ID" in self.environment

    @property
    def host_names(self) -> tuple[str, ...]:
        """The names of the hosts that may get ranks; empty if all ranks run on this host."""
        return tuple(host.name for host in self.hosts) or allocation.slurm_nodes(self.environment)

    @property
    def restart(self) -> int:
        """The number of attempts that were made before the first attempt of this torchmpirun."""
        return 0 if self.group is None else self.group.restart


def read(options: argparse.Namespace, words: list[str], environment: Mapping[str, str]) -> JobSpec:
    """Return the job that the options describe. Raise LaunchError if options contradict each other.

    ``words`` is the command line.
    """
    vendor, starter = _mpi(options, environment)
    placed = allocation.place(options.num_ranks, options.hosts, options.hostfile, environment)
    num_ranks = placed.num_ranks
    if options.ranks_per_host:
        num_ranks = allocation.num_ranks_as_torchrun(options.ranks_per_host, options.num_ranks, placed)
    if options.elastic_restart or options.discover:
        num_ranks = _num_ranks_within(options, num_ranks)
    if num_ranks > surroundings.MOST_RANKS:
        raise LaunchError(
            f"{num_ranks} ranks are too many (limit: {surroundings.MOST_RANKS}); reduce -n, --elastic-restart or slots"
        )
    if options.groups and (options.elastic or options.max_restarts is not None or options.dry_run):
        option = "--elastic" if options.elastic else "--dry-run" if options.dry_run else "--max-restarts"
        raise LaunchError(f"--groups and {option} cannot be combined; omit one of the two options")
    # A settings file may set the agent for other MPIs, so ignore the setting if this MPI does not support it.
    is_unfit = not vendor.agent and "launch_agent" in options.settings
    same = {each.name: getattr(options, each.name) for each in fields(JobSpec) if each.name in options}
    return JobSpec(
        **same
        | {
            "program": tuple(options.program),
            "vendor": vendor,
            "starter": starter,
            "num_ranks": num_ranks,
            "hosts": placed.hosts,
            "system": placed.system,
            "notes": [] if vendor.name == "srun" else placed.notes,  # Slurm's srun distributes the ranks itself.
            "launch_agent": "" if is_unfit else options.launch_agent or placed.agent,
            "interface": _interface(options) if len(placed.hosts) > 1 or options.discover else "",
            "environment": dict(environment),
            "variables": _variables(options.env, environment),
            "elastic": options.elastic and bool(vendor.elastic),
            "max_restarts": _max_restarts(options, vendor),
            "text": _text(words, options),
        }
    )


def _interface(options: argparse.Namespace) -> str:
    """Return the network interface between hosts. Raise LaunchError if this host lacks it, except with --dry-run."""
    name: str = options.interface
    if name and not (options.dry_run or (NETWORKS / name).exists()):
        up = ", ".join(sorted(file.parent.name for file in NETWORKS.glob("*/operstate") if file.read_text() == "up\n"))
        raise LaunchError(f"--interface {name}: this host has no such interface; use an active one: {up or '(none)'}")
    return name


def _mpi(options: argparse.Namespace, environment: Mapping[str, str]) -> tuple[Vendor, str]:
    """Return the MPI and the path of its mpirun. With --dry-run, the MPI need not be installed."""
    if options.mpi and options.dry_run:
        vendor = mpirun.vendor_named(options.mpi)
        return vendor, vendor.programs[0]
    return mpirun.find(options.mpi, environment)


def _max_restarts(options: argparse.Namespace, vendor: Vendor) -> int:
    """Return the largest number of restarts. Print a line if --elastic is set but this MPI does not support it.

    The default is `_MOST_RESTARTS` with --elastic-restart, and with --elastic if this MPI does not support elastic
    jobs; otherwise the default is 0.
    """
    lacks_elastic, most = options.elastic and not vendor.elastic, options.max_restarts
    if most is None:
        most = _MOST_RESTARTS if lacks_elastic or options.elastic_restart else 0
    if lacks_elastic:
        say(
            f"{vendor.name} does not support --elastic (Open MPI 5 with ULFM does): if a rank dies, the job restarts "
            f"from its last checkpoint, at most {most} time{'s' * (most != 1)} (--max-restarts)"
        )
    return int(most)


def _num_ranks_within(options: argparse.Namespace, num_ranks: int) -> int:
    """Return the number of ranks within the limits of --elastic-restart; with --discover, return the maximum.

    Raise LaunchError for options that cannot be combined with --elastic-restart or --discover.
    """
    if not options.elastic_restart:
        raise LaunchError("--discover needs limits for the number of ranks; add the option --elastic-restart MIN:MAX")
    (least, most), script = options.elastic_restart, options.discover
    of_restart = {"-n": options.num_ranks, "--groups": options.groups, "--elastic": options.elastic}
    of_script = {f"--{name}": getattr(options, name) for name in ("hosts", "hostfile")}
    for option, value in (of_restart | of_script if script else of_restart).items():
        if value:
            other = f"--elastic-restart {least}:{most}" if option in of_restart else "--discover"
            raise LaunchError(f"{option} and {other} cannot be combined; omit {option}")
    if num_ranks < least and not script:
        remedy = "set a lower minimum, or add --discover SCRIPT to wait for hosts"
        raise LaunchError(f"--elastic-restart {least}:{most}: the hosts have slots for {num_ranks} ranks; {remedy}")
    return int(most if script else min(num_ranks, most))


def _variables(pairs: list[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of --env; the value of a ``NAME`` without a value comes from ``environment``.

    Raise LaunchError for a text that is not a variable, and for variables TORCHMPIRUN_...
    """
    variables = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not name or not (equals or name in environment):
            raise LaunchError(f"--env {pair!r}: write NAME=VALUE, or NAME if the variable is set here")
        if name.startswith("TORCHMPIRUN_"):
            raise LaunchError(f"--env {name}: names with TORCHMPIRUN_ are reserved for torchmpirun; use another name")
        variables[name] = value if equals else environment[name]
    return variables


def _text(words: list[str], options: argparse.Namespace) -> str:
    """Return the command line without the values of ``--env``, which may be secret."""
    words = list(words)
    for number, word in enumerate(words[: len(words) - len(options.program)]):
        if word.removeprefix("--env=") in options.env:
            words[number] = re.sub(r"^((--env=)?[^=]+=).*", r"\1...", word, flags=re.DOTALL)
    return shlex.join(["torchmpirun", *words])
