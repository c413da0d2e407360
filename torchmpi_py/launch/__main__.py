"""torchmpirun: start one process per GPU, or per core, through the MPI of this environment.

    torchmpirun -n 4 train.py --epochs 5

torchmpirun finds the MPI, builds the arguments of its mpirun, and runs the program in every rank through `wrap`. If
ranks fail, torchmpirun exits with the exit code of the first one. If the job succeeds, torchmpirun prints only notes,
for example about its choice of ranks, or about ranks that ran without contacting each other.

Four options do not run a job. --check tests whether the hosts can run a job. --dry-run prints the command of the job.
--version prints the versions of the installed software. --template prints a script for a batch system.
"""

import argparse
import os
import pickle
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from torchmpi_py.errors import LaunchError
from torchmpi_py.launch import (
    allocation,
    attempts,
    checks,
    command,
    discovery,
    group_jobs,
    host_check,
    host_facts,
    job,
    job_spec,
    layouts,
    mpirun,
    notices,
    ready_scripts,
    surroundings,
    timeline_file,
)
from torchmpi_py.launch.job import Job
from torchmpi_py.launch.job_spec import JobSpec
from torchmpi_py.launch.options import parse
from torchmpi_py.launch.terminal import Tail, say


def run(spec: JobSpec) -> int:
    """Run the job, with restarts after failures if the user allows them; return the exit code of the last attempt."""
    checks.check_output_folder("--log-dir", spec.log_dir, replaced="" if spec.restart else "rank-0.log")
    checks.check_output_folder("--profile", spec.profile)
    with timeline_file.kept(spec) as (spec_of_page, page), discovery.Discovery(spec_of_page) as current:

        def make(folder: Path, attempt: int, start: float) -> Job:
            return Job(command.build(current.spec, folder, attempt), current.spec, folder, start, news=current.news)

        code, jobs = attempts.run(make, spec.max_restarts, Tail(spec.log_dir), current.wait)
        last = jobs[-1]
        page.write(code, last.reason, restart=spec.restart + sum(each.has_run for each in jobs) - 1)
    if code and spec.group is not None:
        spec.group.record_end(last.reason)
    if code and last.may_lack_something:
        explain_start(last.spec)
    return code


def explain_start(spec: JobSpec) -> None:
    """After a failed start on several hosts, print a line for each host that cannot run the job."""
    if len(spec.host_names) > 1:
        for line in host_check.check(spec, host_facts.WITHOUT_DOCTOR).problems:
            say(line)


def answer(options: argparse.Namespace, words: list[str]) -> int:
    """Print the output of --template, --version or --check; return the exit code."""
    if options.template:
        print(ready_scripts.text(options.template), end="")
        return 0
    if options.version:
        no_starter = ""
        try:
            vendor, starter = mpirun.find(options.mpi, os.environ)
        except LaunchError as error:
            vendor, starter, no_starter = mpirun.vendor_named("srun"), "", str(error)
        here = JobSpec(vendor=vendor, starter=starter, environment=os.environ)
        print("\n".join(host_check.versions(here, no_starter)))
        return 0
    result = host_check.check(discovery.first(job_spec.read(options, words, os.environ), waits=False))
    print(notices.printable("\n".join([*result.problems, *result.warnings, *[result.text][: not result.problems]])))
    return 2 if result.problems else 0


def show(spec: JobSpec, settings: Mapping[str, Path]) -> int:
    """Print the variables and the command of a job; return 0.

    ``settings`` maps the name of an option to the settings file that contains the option. Print these files too.
    """
    for name, file in settings.items():
        print(f"# {name}: from {file}")
    with job.new_folder() as folder:
        starter_command = command.build(spec, Path(folder))
    for name, value in starter_command.added.items():
        print(f"{name}={shlex.quote(value)} \\")
    print(shlex.join(starter_command.words))
    return 0


def start(words: list[str]) -> int:
    """Do what the command line requests; return the exit code.

    ``words`` is the command line without the program's name. Raise LaunchError if the job cannot be started.
    """
    if words[:1] == [group_jobs.OPTION]:
        try:
            spec = pickle.loads(Path(*words[1:]).read_bytes())
        except Exception:
            raise LaunchError(f"{shlex.join(words)}: only torchmpirun itself uses this option; omit it") from None
        return run(spec)
    surroundings.set_home()
    options = parse(words)
    if not hasattr(os, "sched_getaffinity"):
        raise LaunchError("torchmpirun works only on Linux, but this system is not Linux; run it on a Linux host")
    surroundings.open_standard_streams()
    checks.check_working_folder()
    if options.check or options.version or options.template:
        return answer(options, words)
    allocation.check(os.environ)
    spec = discovery.first(job_spec.read(options, words, os.environ), waits=not (options.dry_run or options.layouts))
    for note in spec.notes:
        say(note)
    if options.layouts:
        layouts.check(options, spec)
    return show(spec, options.settings) if options.dry_run else launch(spec, options)


def launch(spec: JobSpec, options: argparse.Namespace) -> int:
    """Run the job: as a single job, as groups, or in several layouts; return the exit code."""
    if not spec.as_module:
        checks.check_program(spec.program[0])
    host_check.refuse_misfit(spec)
    if spec.vendor.shared_bytes and not spec.hosts:
        checks.check_shared_memory(spec.vendor, spec.num_ranks)
    if options.layouts:
        return layouts.run(spec, options.layout_seconds)
    if not options.groups:
        return run(spec)
    # Check here too. Otherwise each group would print the same error.
    checks.check_output_folder("--log-dir", spec.log_dir)
    checks.check_output_folder("--profile", spec.profile)
    timeline_file.check(spec)
    return group_jobs.run(spec, options.groups)


def main(argv: list[str] | None = None) -> int:
    """Run `torchmpirun` with the arguments ``argv`` (default: the command line's); return the exit code."""
    try:
        return start(sys.argv[1:] if argv is None else argv)
    except LaunchError as error:
        say(str(error))
        return 2
    except KeyboardInterrupt:  # Ctrl-C can raise this error only before the first attempt.
        return 130


if __name__ == "__main__":
    sys.exit(main())
