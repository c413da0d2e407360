"""Groups of ranks, each a job of its own: ``torchmpirun -n 8 --groups 4 sweep.py``.

torchmpirun starts itself once per group, with the group's share of the ranks, and of the hosts or of this host's cores
and GPUs. The groups share experiments (`sweeps`). Separate jobs are used because MPI ends a whole job when a rank dies:
this way a killed rank costs one experiment.

Rank 0 of a group keeps a mark in torchmpirun's folder during an experiment. If a group's job fails during an
experiment, the group is restarted and goes on with the next experiment. A group that fails without a mark would fail
again and again, so its failure ends the other groups. A rank 0 on another host leaves no mark. There a failure after
the first minute may belong to an experiment, and the group is restarted a limited number of times. A job that ends in
order in the middle of an experiment (``os._exit(0)``) counts as failed.
"""

import contextlib
import os
import pickle
import signal
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from torchmpi_py.errors import LaunchError
from torchmpi_py.launch import binding, child_python, hosts, topology, variables
from torchmpi_py.launch.cleanup import Guardian
from torchmpi_py.launch.group_of_ranks import EXPERIMENT, REASON, VARIABLE, GroupOfRanks
from torchmpi_py.launch.hosts import Host
from torchmpi_py.launch.job import STARTING_SECONDS, TIMEOUT_CODE, die_with_parent, new_folder
from torchmpi_py.launch.job_spec import JobSpec
from torchmpi_py.launch.signals import SOON_SECONDS, Signals
from torchmpi_py.launch.terminal import say

OPTION = "--spec"  # Option of a group's torchmpirun: the file of its pickled JobSpec.
_MOST_UNSEEN = 10  # Failures of a job whose rank 0 runs on another host and so leaves no mark here.
_MISTAKE_CODE = 2  # `torchmpirun`'s exit code for options that do not fit.
_OF_ONE_JOB = (variables.ADDRESS, variables.PORT)  # Two jobs cannot have the same port.
_POLL_SECONDS = 0.1


def divide(spec: JobSpec, count: int, folder: str) -> list[tuple[JobSpec, tuple[int, ...]]]:
    """Return each group's job, and the job's cores on this host (empty: all cores).

    Raise LaunchError if the ranks cannot be divided into groups of equal size.
    """
    if spec.num_ranks % count:
        raise LaunchError(f"--groups {count} does not divide {spec.num_ranks} ranks; set -n to a multiple of {count}")
    size, token = spec.num_ranks // count, uuid.uuid4().hex
    slots = [host.name for host in spec.hosts for _ in range(host.num_slots)]
    if slots and len(slots) < spec.num_ranks:
        raise LaunchError(f"--groups: {spec.num_ranks} ranks need as many slots, but the hosts have {len(slots)}")
    cores = [] if slots else topology.cores()
    is_crowded = not slots and sum(len(core.cpus) for core in cores) < count
    num_gpus = 0 if slots else hosts.num_gpus(spec.environment)
    jobs = []
    for index in range(count):
        own = slots[index * size : (index + 1) * size]
        others = slots[: index * size] + slots[(index + 1) * size : spec.num_ranks]
        part = () if is_crowded else binding.cores_of_rank(cores, index, count)
        gpus = _gpus(range(index * size, (index + 1) * size), num_gpus, spec.environment)
        of_group = replace(
            spec,
            num_ranks=size,
            hosts=hosts.merge(map(Host, own)),
            environment={name: value for name, value in spec.environment.items() if name not in _OF_ONE_JOB} | gpus,
            group=GroupOfRanks(index, count, token, folder),
        )
        if is_crowded or set(own) & set(others):  # nothing divides the host's cores between the groups
            threads = {name: "1" for name in binding.THREAD_VARIABLES if name not in spec.environment}
            of_group = replace(of_group, bind="none", variables=threads | {**spec.variables})
        jobs.append((_with_own_files(of_group), tuple(cpu for core in part for cpu in core.cpus)))
    return jobs


def _gpus(ranks: range, num_gpus: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variable with the GPUs that these ranks would use in one job with all other ranks."""
    if not num_gpus:
        return {}
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",")[:num_gpus] if visible else [str(gpu) for gpu in range(num_gpus)]
    return {"CUDA_VISIBLE_DEVICES": ",".join(dict.fromkeys(names[rank % num_gpus] for rank in ranks))}


def _with_own_files(spec: JobSpec) -> JobSpec:
    assert spec.group is not None
    name = f"group-{spec.group.index}"
    page = spec.timeline
    return replace(
        spec,
        log_dir=None if spec.log_dir is None else spec.log_dir / name,
        profile=None if spec.profile is None else spec.profile / name,
        timeline=None if page is None else page.with_stem(f"{page.stem}-{name}"),
    )


def start_job(
    spec: JobSpec, file: Path, cores: Sequence[int] = (), output: IO[bytes] | None = None
) -> "subprocess.Popen[bytes]":
    """Start a torchmpirun for the job, whose description is written to the ``file``.

    ``cores`` are the cores that the job may use; empty for all cores.
    """

    def prepare() -> None:  # runs in the new process before the exec
        die_with_parent()
        if cores:
            os.sched_setaffinity(0, cores)

    file.write_bytes(pickle.dumps(spec))
    return subprocess.Popen(
        child_python.command("torchmpi_py.launch", OPTION, str(file)),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
        preexec_fn=prepare,
    )


@dataclass
class _GroupJob:
    """The torchmpirun of one group, restarted as often as experiments end it."""

    spec: JobSpec
    cores: tuple[int, ...]
    ends_at: float | None  # time of the system's monotonic clock
    num_unseen: int = 0

    def __post_init__(self) -> None:
        self.start()

    @property
    def group(self) -> GroupOfRanks:
        """The group, and the history of its earlier jobs."""
        assert self.spec.group is not None
        return self.spec.group

    def start(self) -> None:
        self.ended = 0.0
        for mark in (EXPERIMENT, REASON):
            self.group.path(mark).unlink(missing_ok=True)
        self.started = time.monotonic()
        spec = replace(self.spec, variables={**self.spec.variables, VARIABLE: self.group.text})
        if self.ends_at is not None:
            spec = replace(spec, timeout=max(_POLL_SECONDS, self.ends_at - self.started))
        self.process = start_job(spec, self.group.path("spec"), self.cores)

    def code(self) -> int | None:
        """Return the exit code of the job; None while it runs."""
        code = self.process.poll()
        if code is not None:
            self.ended = self.ended or time.monotonic()  # time at which the end was first seen
        if code == 0 and self.group.path(EXPERIMENT).exists():
            return 1
        return 128 - code if code is not None and code < 0 else code

    def can_go_on(self, code: int) -> bool:
        """Return whether a failed job may be restarted because of its experiments."""
        goes_on = self.group.path(EXPERIMENT).exists()
        if not goes_on and self.spec.hosts and not hosts.is_this_host(self.spec.hosts[0].name):
            self.num_unseen += 1
            goes_on = self.ended - self.started > STARTING_SECONDS and self.num_unseen <= _MOST_UNSEEN
        reason = self.group.path(REASON).read_text() if self.group.path(REASON).exists() else ""
        last_end = reason or f"its job ended with exit code {code}"
        group = replace(self.group, last_end=last_end, restart=self.group.restart + 1)
        self.spec = replace(self.spec, group=group)
        return goes_on and code not in (TIMEOUT_CODE, _MISTAKE_CODE)


def run(spec: JobSpec, count: int) -> int:
    """Run the groups' jobs to their end; return the exit code of the first that fails for good, else 0."""
    if spec.system == "Slurm":
        raise LaunchError(f"--groups on several nodes of Slurm: write --hosts {','.join(map(str, spec.hosts))}")
    ends_at = None if spec.timeout is None else time.monotonic() + spec.timeout
    folder = new_folder()
    with Guardian(folder.name), folder, Signals() as signals:
        jobs = divide(spec, count, folder.name)
        return _wait([_GroupJob(of_group, cores, ends_at) for of_group, cores in jobs], signals)


def _wait(jobs: list[_GroupJob], signals: Signals) -> int:
    """Restart failed groups, and end all groups on a signal or if one cannot go on; return the exit code."""
    running, code, num_sent = list(jobs), 0, 0
    while running:
        time.sleep(_POLL_SECONDS)
        signals.look_at_parent()
        signals.pass_on(*(job.process for job in running))
        if len(signals.ending) > num_sent:
            num_sent = len(signals.ending)
            _send(running, signals.ending[-1])
        for job in list(running):
            exit_code = job.code()
            if exit_code is None:
                continue
            is_ending, name = bool(signals.ending or code), f"group {job.group.index}"
            # After a signal that was passed on, at the end of an allocation for example, groups may end and are not
            # restarted. But if other groups go on, a group is restarted, because they wait for its experiments.
            signum = signals.cause(exit_code) if exit_code and not is_ending else 0
            others = [other for other in running if other is not job and other.code() is None]
            if signum and others and time.monotonic() - job.ended < SOON_SECONDS:
                continue
            if exit_code and not is_ending and (others or not signum) and job.can_go_on(exit_code):
                say(f"{name} failed with exit code {exit_code}; restarting it for the remaining experiments")
                job.start()
                continue
            running.remove(job)
            if not exit_code or is_ending:
                continue
            code = exit_code
            if code == TIMEOUT_CODE:
                continue  # the other groups have the same time limit, so each ends without a signal from here
            where = f"after signal {signum}, which was passed on" if signum else "outside of an experiment"
            say(f"{name} failed {where}, with exit code {exit_code}{', which ends the others' if others else ''}")
            _send(running, signal.SIGTERM)
    return 128 + signals.ending[0] if signals.ending else code


def _send(jobs: Sequence[_GroupJob], signum: int) -> None:
    for job in jobs:
        with contextlib.suppress(ProcessLookupError):
            job.process.send_signal(signum)
