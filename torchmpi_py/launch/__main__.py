"""torchmpirun: start one process per GPU, or per core, through the MPI of this environment.

    torchmpirun -n 4 train.py --epochs 5

torchmpirun finds the MPI, builds its argument list, starts every rank inside `wrap`, and ends with the exit code of the
first rank that failed. On success it prints nothing of its own, unless ranks never met each other.

Without a job, --check asks the hosts whether they can run one, --version says what is installed, and --template prints
a script for a batch system.
"""

import argparse
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from torchmpi_py import trusted_files
from torchmpi_py.errors import LaunchError
from torchmpi_py.launch import (
    binding,
    group_jobs,
    host_check,
    host_facts,
    hosts,
    job,
    mpirun,
    notices,
    private,
    ready_scripts,
    surroundings,
    terminal,
    timeline_file,
    topology,
    transports,
    variables,
    wrap,
)
from torchmpi_py.launch.job import FAILURE_GRACE_SECONDS, TRACE_SECONDS, Job
from torchmpi_py.launch.mpirun import Vendor
from torchmpi_py.launch.options import parse
from torchmpi_py.launch.terminal import Tail, say

# What the ranks must not inherit: the place of this process in another job, and the variable by which a started process
# forbids MPI to its children.
_DROPPED = ("PMIX_", "PMI_", "OMPI_COMM_", "OMPI_ARGV", "OMPI_COMMAND", "PRTE_LAUNCHED", "HYDI_", "MPI_LOCAL")
_DROPPED_WHOLE = ("TORCHMPI_STARTED_PID", group_jobs.VARIABLE, timeline_file.VARIABLE)
_KEPT = ("PMIX_MCA_",)
# What must reach the ranks on other hosts, besides what --env gives.
_FORWARDED = (
    "TORCHMPI",
    "MPI4PY_",
    "OMPI_MCA_",
    "PYTHONPATH",
    variables.ADDRESS,
    variables.PORT,
    "GLOO_",
    "NCCL_",
    *binding.THREAD_VARIABLES,
)
# What --check passes on of --env: what loads Python, the MPI and the GPUs. The rest may be secret, and every user of a
# host can read a command line there.
_CHECKED = (
    *_FORWARDED,
    "PATH",
    "PYTHON",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "TMPDIR",
    "OMPI_",
    "OPAL_",
    "MPICH_",
    "I_MPI_",
    "UCX_",
    "FI_",
    "CUDA_",
)

_TRIED_BYTES = 4096  # one block of a disk


def given_environment(pairs: list[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that --env gives; ``NAME`` alone has its value in ``environment``. LaunchError for any other form."""
    given = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not name or not (equals or name in environment):
            raise LaunchError(f"--env {pair!r}: write NAME=VALUE, or NAME where the variable is set here")
        if name.startswith("TORCHMPIRUN_") and name != group_jobs.VARIABLE:  # which --groups gives in this way
            raise LaunchError(f"--env {name}: torchmpirun itself sets variables of this name; choose another name")
        given[name] = value if equals else environment[name]
    return given


@dataclass(frozen=True)
class JobPlan:
    """A job as it would be started: everything that --dry-run prints."""

    num_ranks: int
    command: list[str]
    environment: dict[str, str]
    added: dict[str, str]
    hostfile: Path | None
    hostfile_text: str
    hosts: tuple[hosts.Host, ...]
    forwarded: tuple[str, ...]  # variables that reach other hosts
    hands_input: bool  # no option and no batch system can place rank 0 on another host


def inherited_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without what would confuse the ranks."""
    return {
        name: value
        for name, value in transports.without_ours(variables.without_outer(environment)).items()
        if name not in _DROPPED_WHOLE and (name.startswith(_KEPT) or not name.startswith(_DROPPED))
    }


def wrapped(options: argparse.Namespace, vendor: Vendor) -> list[str]:
    """The command of one rank, as this starter is to get it."""
    command = [sys.executable, str(Path(__file__).with_name("wrap.py")), "--bind", options.bind]
    if options.log_dir is not None:
        command += ["--log-dir", str(options.log_dir.absolute())]
    if options.profile is not None:
        command += ["--profile", str(options.profile.absolute())]
    program = options.program
    if wrap.needs_quotes(program, vendor.interpreted):
        command.append("--quoted")
        program = wrap.quote(program, vendor.interpreted)
    return [*command, *(["-m"] if options.as_module else []), *program]


def choose(options: argparse.Namespace, environment: Mapping[str, str]) -> tuple[Vendor, str]:
    """The MPI, and the path of its starter."""
    if options.mpi and options.dry_run:  # of any MPI, installed or not
        vendor = mpirun.vendor_named(options.mpi)
        return vendor, vendor.programs[0]
    return mpirun.find(options.mpi, environment)


def plan(
    options: argparse.Namespace,
    vendor: Vendor,
    program: str,
    folder: Path,
    environment: Mapping[str, str],
    attempt: int = 0,
) -> JobPlan:
    """The job that the options describe; its ``folder`` is only named here."""
    named = hosts.named_hosts(options, environment)
    num_ranks = options.num_ranks or hosts.default_num_ranks(named, environment)
    if num_ranks > surroundings.MOST_RANKS:
        raise LaunchError(
            f"{num_ranks} ranks are too many: write -n, or fewer slots (at most {surroundings.MOST_RANKS})"
        )
    hostfile = folder / "hostfile" if named else None
    num_here = hosts.num_ranks_on_busiest(named, num_ranks)
    surroundings.raise_open_files(num_here)
    busy = len(named) > 1 or num_here >= topology.num_usable_cores()
    has_srun = "SLURM_JOB_ID" in environment  # in place of ssh
    with_ssh = bool(named) and not (options.launch_agent or has_srun)
    inherited, given = inherited_environment(environment), given_environment(options.env, environment)
    starters = None if mpirun.has_folder(vendor, program, options.mpi_args, inherited | given) else folder
    is_root = os.geteuid() == 0
    added = mpirun.settings(vendor, busy=busy, is_root=is_root, hostfile=hostfile, with_ssh=with_ssh, folder=starters)
    added |= mpirun.library_of(vendor, program)
    added = {name: value for name, value in added.items() if name == vendor.hostfile_variable or name not in inherited}
    record = variables.record_for_ranks([(host.name, host.num_slots) for host in named], folder)
    added |= {"TORCHMPIRUN_JOB_DIR": str(folder), "TORCHMPIRUN_RESTART": str(attempt), variables.RECORD: record}
    added |= {name: value for name, value in given.items() if inherited.get(name) != value}
    reaching = sorted({*given, *(name for name in inherited | added if name.startswith(_FORWARDED))})
    hands_input = terminal.has_input() and not (named or options.mpi_args or has_srun)
    starter = mpirun.arguments(
        vendor,
        num_ranks=num_ranks,
        hostfile=hostfile,
        forward=tuple(reaching),
        agent=options.launch_agent,
        elastic=options.elastic,
        no_input=hands_input or not terminal.has_input(),
        extra=tuple(options.mpi_args),
    )
    text = hosts.render(named, vendor.hostfile_line)
    command = [program, *starter, *wrapped(options, vendor)]
    return JobPlan(num_ranks, command, inherited | added, added, hostfile, text, named, tuple(reaching), hands_input)


def check_program(program: str) -> None:
    """Refuse what no rank could run, before any of them tries."""
    if re.fullmatch(r"python[\d.]*", os.path.basename(program)):
        raise LaunchError(f"leave out {program}: torchmpirun runs the ranks under {sys.executable}")
    if not os.path.exists(program):
        raise LaunchError(f"{program}: there is no such program here")
    if not (os.path.isfile(program) or os.path.isdir(program)):
        raise LaunchError(f"{program} is a named pipe, a device or a socket; name a Python file")


def check_folder(option: str, folder: Path | None, replaced: str = "") -> None:
    """Refuse a folder for the ranks' output where no file can be written; remove one that is to be ``replaced``."""
    if folder is None:
        return
    files = "files"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_TRIED_BYTES))
        if replaced:
            files = replaced
            trusted_files.refuse_others(folder / replaced)
            (folder / replaced).unlink(missing_ok=True)
    except OSError as error:
        what = f"{option} {folder}: cannot write {files} there: {error.strerror}"
        raise LaunchError(f"{what}; name a folder that can be written to, or make room") from None


def check_shared_memory(vendor: Vendor, num_ranks: int, folder: str = "/dev/shm") -> None:
    """Refuse where this MPI cannot start; warn where it may crash."""
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise LaunchError(f"{vendor.name} cannot work without a {folder} to write to; mount one, or use --mpi openmpi")
    needed, free = vendor.shared_bytes * num_ranks, os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    if free < needed:
        say(
            f"{folder} has {free >> 20} MiB free, and {num_ranks} ranks of {vendor.name} want {needed >> 20}: they may "
            "crash (signal 7); give it more (docker run --shm-size=1g), or use --mpi openmpi"
        )


def run(options: argparse.Namespace) -> int:
    """Start the job, again if it fails, or print it; its exit code."""
    vendor, program = choose(options, os.environ)
    most = options.max_restarts or 0
    if options.elastic and not vendor.elastic:
        options.elastic = False
        most = job.MOST_FOR_ELASTIC if options.max_restarts is None else most
        say(
            f"{vendor.name} has nothing for --elastic (no ULFM; Open MPI 5 has it): a death will restart the job from "
            f"its last checkpoint, at most {most} time{'s' * (most != 1)} (--max-restarts)"
        )
    if options.dry_run:
        with job.new_folder() as folder:
            show(plan(options, vendor, program, Path(folder), os.environ))
        return 0
    host_check.refuse_misfit(inquiry(options, vendor, program))
    num_before = options.group.restart if options.group is not None else 0
    check_folder("--log-dir", options.log_dir, replaced="" if num_before else "rank-0.log")
    check_folder("--profile", options.profile)
    with timeline_file.kept(options) as timeline:
        code, attempts = run_attempts(options, vendor, program, most, num_before)
        last = attempts[-1]
        timeline.write(code, last.reason, restart=num_before + sum(each.has_run for each in attempts) - 1)
    if code and options.group is not None:
        options.group.record_end(last.reason)
    if code and last.may_lack_something:
        explain_start(options, vendor, program)
    return code


def run_attempts(
    options: argparse.Namespace, vendor: Vendor, program: str, most: int, num_before: int
) -> tuple[int, list[Job]]:
    """Start the job, and again if it fails, at most ``most`` times more; its exit code, and the attempts.

    ``num_before``: how many attempts another torchmpirun has made before, of a group that is started again.
    """
    if vendor.shared_bytes and not hosts.named_hosts(options, os.environ):
        check_shared_memory(vendor, options.num_ranks or hosts.default_num_ranks((), os.environ))

    attempts: list[Job] = []

    def make(folder: Path, attempt: int, begin: float) -> Job:
        chosen = plan(options, vendor, program, folder, os.environ, num_before + attempt)
        attempts.append(make_job(options, vendor, chosen, folder, begin))
        return attempts[-1]

    return job.run(make, most, Tail(options.log_dir)), attempts


def make_job(options: argparse.Namespace, vendor: Vendor, chosen: JobPlan, folder: Path, begin: float) -> Job:
    """An attempt to run the job; what its starter reads is written into its folder."""
    if chosen.hostfile is not None:
        with job.refusing(f"cannot write {chosen.hostfile}", job.ROOM_REMEDY):
            chosen.hostfile.write_text(chosen.hostfile_text)
    return Job(
        chosen.command,
        chosen.environment,
        folder,
        timeout_seconds=options.timeout,
        begin=begin,
        elastic=options.elastic,
        num_ranks=chosen.num_ranks,
        num_hosts=len(chosen.hosts),
        log_dir=options.log_dir,
        failure_grace_seconds=FAILURE_GRACE_SECONDS + TRACE_SECONDS * (options.profile is not None),
        stop_signals=vendor.stop_signals,
        grace_seconds=options.grace,
        hands_input=chosen.hands_input,
    )


def explain_start(options: argparse.Namespace, vendor: Vendor, program: str) -> None:
    """Say which hosts of a job on several could not run the job that has failed."""
    asked = inquiry(options, vendor, program)
    if len(asked.hosts) > 1:
        for line in host_check.check(replace(asked, doctor=host_facts.WITHOUT_DOCTOR)).problems:
            say(line)


def inquiry(options: argparse.Namespace, vendor: Vendor, program: str) -> host_check.Inquiry:
    """What to ask the hosts of the job that the options describe."""
    chosen = plan(options, vendor, program, Path(os.devnull), os.environ)
    reaching = tuple(name for name in chosen.forwarded if name.startswith(_CHECKED))
    files = [program] + ([] if options.as_module else [os.path.abspath(word) for word in options.program[:1]])
    return host_check.Inquiry(
        tuple(host.name for host in chosen.hosts) or host_check.nodes_of_allocation(os.environ),
        chosen.environment,
        reaching,
        tuple(files),
        options.launch_agent,
        " ".join(chosen.environment.get(name, "") for name in vendor.ssh_environment),
        starter=(vendor, program),
    )


def answer(options: argparse.Namespace) -> int:
    """Print what --template, --version or --check asks for; the exit code."""
    if options.template:
        print(ready_scripts.text(options.template), end="")
        return 0
    try:
        vendor, program = choose(options, os.environ)
        asked, no_starter = inquiry(options, vendor, program), ""
    except LaunchError as error:
        if options.check:
            raise
        asked, no_starter = host_check.Inquiry((), os.environ), str(error)
    if options.version:
        print("\n".join(host_check.versions(asked, no_starter)))
        return 0
    found = host_check.check(asked)
    print(notices.printable("\n".join([*found.problems, *found.warnings, *([] if found.problems else [found.text])])))
    return 2 if found.problems else 0


def show(chosen: JobPlan) -> None:
    """Print the variables and the command of a job."""
    for name, value in chosen.added.items():
        print(f"{name}={shlex.quote(value)} \\")
    print(shlex.join(chosen.command))


def main(argv: list[str] | None = None) -> int:
    """The command `torchmpirun`."""
    words = sys.argv[1:] if argv is None else argv
    options = parse(words)
    if options.group is not None:
        group_jobs.apply(options.group, options)
    try:
        if not hasattr(os, "sched_getaffinity"):
            raise LaunchError("this system is not Linux, and torchmpirun works on Linux only")
        surroundings.open_standard_streams()
        surroundings.set_home()
        surroundings.check_folder()
        if options.check or options.version or options.template:
            return answer(options)
        if options.ranks_per_host:
            options.num_ranks = hosts.num_ranks_as_torchrun(options, os.environ)
        if not (options.as_module or options.dry_run):
            check_program(options.program[0])
        if options.private:
            private.check(options, os.environ)
            if not (options.dry_run or options.group is not None):  # a group is born in the network of all groups
                private.enter()
        return group_jobs.run(options, words) if options.groups else run(options)
    except LaunchError as error:
        say(str(error))
        return 2
    except KeyboardInterrupt:  # before the first attempt
        return 130


if __name__ == "__main__":
    sys.exit(main())
