"""JobSpec: a complete description of a job, from the command line and the environment of torchmpirun.

Everything is decided once, here. Later steps only read this object: the command of an attempt (`command`), the process
(`job`), the groups (`group_jobs`), and the checks of the hosts (`host_check`). The object is frozen.
`dataclasses.replace` makes a variation, such as a group's part of the job.
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
_MOST_RESTARTS = 3  # default of --max-restarts with --elastic-restart, or if restarts replace --elastic


@dataclass(frozen=True)
class JobSpec:
    """A job: its program, its ranks and where they run, its MPI, its limits, and where its output goes."""

    program: tuple[str, ...] = ()  # the program and its arguments
    as_module: bool = False
    vendor: Vendor = mpirun.OPEN_MPI
    starter: str = "mpirun"  # Path of the MPI's mpirun.
    num_ranks: int = 0  # 0 if unknown.
    hosts: tuple[Host, ...] = ()  # Empty: this host.
    system: str = ""  # The batch system that named the hosts. "" if the user has named them.
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
    elastic_restart: tuple[int, ...] = ()  # the smallest and the largest number of ranks
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
        """Return whether Slurm's srun starts processes on other hosts, in place of ssh."""
        return "SLURM_JOB_ID" in self.environment

    @property
    def host_names(self) -> tuple[str, ...]:
        """The hosts that may get ranks; empty if all ranks run on this host."""
        return tuple(host.name for host in self.hosts) or allocation.slurm_nodes(self.environment)

    @property
    def restart(self) -> int:
        """The number of attempts before this torchmpirun's first one."""
        return 0 if self.group is None else self.group.restart


def read(options: argparse.Namespace, words: list[str], environment: Mapping[str, str]) -> JobSpec:
    """Return the job that the options describe. Raise LaunchError if options do not fit together.

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
            f"{num_ranks} ranks are too many: set -n, or name fewer slots (at most {surroundings.MOST_RANKS})"
        )
    if options.groups and (options.elastic or options.max_restarts is not None or options.dry_run):
        option = "--elastic" if options.elastic else "--dry-run" if options.dry_run else "--max-restarts"
        raise LaunchError(f"--groups starts several jobs and restarts failed ones itself; omit {option}")
    is_unfit = not vendor.agent and "launch_agent" in options.settings  # a settings file may name it for other MPIs
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
            "notes": [] if vendor.name == "srun" else placed.notes,  # srun distributes the ranks itself
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
        raise LaunchError(f"--interface {name}: no such interface here; name one that is up: {up or 'none is'}")
    return name


def _mpi(options: argparse.Namespace, environment: Mapping[str, str]) -> tuple[Vendor, str]:
    """Return the MPI, and the path of its mpirun; --dry-run shows any MPI, installed or not."""
    if options.mpi and options.dry_run:
        vendor = mpirun.vendor_named(options.mpi)
        return vendor, vendor.programs[0]
    return mpirun.find(options.mpi, environment)


def _max_restarts(options: argparse.Namespace, vendor: Vendor) -> int:
    """Return the user's number of restarts; else a few if restarts replace --elastic or change the ranks."""
    lacks_elastic, most = options.elastic and not vendor.elastic, options.max_restarts
    if most is None:
        most = _MOST_RESTARTS if lacks_elastic or options.elastic_restart else 0
    if lacks_elastic:
        say(
            f"{vendor.name} does not support --elastic (Open MPI 5 with ULFM does): a death will restart the job from "
            f"its last checkpoint, at most {most} time{'s' * (most != 1)} (--max-restarts)"
        )
    return int(most)


def _num_ranks_within(options: argparse.Namespace, num_ranks: int) -> int:
    """Return the number of ranks by --elastic-restart; its maximum with --discover.

    Raise LaunchError for options that exclude --elastic-restart or --discover.
    """
    if not options.elastic_restart:
        raise LaunchError("--discover needs --elastic-restart MIN:MAX, the least and greatest number of ranks; add it")
    (least, most), script = options.elastic_restart, options.discover
    of_restart = {"-n": options.num_ranks, "--groups": options.groups, "--elastic": options.elastic}
    of_script = {f"--{name}": getattr(options, name) for name in ("hosts", "hostfile")}
    for option, value in (of_restart | of_script if script else of_restart).items():
        if value:
            other = f"--elastic-restart {least}:{most}" if option in of_restart else "--discover"
            raise LaunchError(f"{option} and {other} exclude each other; omit {option}")
    if num_ranks < least and not script:
        remedy = "write a lower number, or --discover SCRIPT to wait for hosts"
        raise LaunchError(f"--elastic-restart {least}:{most}: there is room for {num_ranks} ranks; {remedy}")
    return int(most if script else min(num_ranks, most))


def _variables(pairs: list[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of --env; ``NAME`` alone takes its value from ``environment``.

    Raise LaunchError for variables that are not allowed.
    """
    variables = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not name or not (equals or name in environment):
            raise LaunchError(f"--env {pair!r}: write NAME=VALUE, or NAME if the variable is set here")
        if name.startswith("TORCHMPIRUN_"):
            raise LaunchError(f"--env {name}: torchmpirun itself sets variables of this name; choose a different name")
        variables[name] = value if equals else environment[name]
    return variables


def _text(words: list[str], options: argparse.Namespace) -> str:
    """Return the command line without the values of ``--env``, which may be secret."""
    words = list(words)
    for number, word in enumerate(words[: len(words) - len(options.program)]):
        if word.removeprefix("--env=") in options.env:
            words[number] = re.sub(r"^((--env=)?[^=]+=).*", r"\1...", word, flags=re.DOTALL)
    return shlex.join(["torchmpirun", *words])
