"""Groups of ranks, each in a separate job: ``torchmpirun -n 8 --groups 4 sweep.py``.

torchmpirun starts another torchmpirun for each group, with the group's share of the ranks and of the hosts. If all
groups run on this host, each group gets a share of the cores and GPUs. The groups divide the experiments of a sweep
(`sweeps`) among themselves. The jobs are separate because MPI ends a whole job when a rank dies. With separate jobs, a
killed rank interrupts only one experiment.

During an experiment, rank 0 of the group keeps a mark in torchmpirun's folder. If the group's job fails while the mark
exists, the group is restarted and continues with the next experiment. A group that fails without a mark would probably
fail again after a restart, so its failure ends the other groups. If rank 0 runs on another host, it cannot write a
mark. Then a failure after the first minute is attributed to an experiment, and the group is restarted a limited number
of times. A job that ends with exit code 0 during an experiment (``os._exit(0)``) counts as failed.
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

OPTION = "--spec"  # Option of a group's torchmpirun, for the file that contains its pickled JobSpec.
_MOST_UNSEEN = 10  # Limit for the restarts of a group whose rank 0 runs on another host, so that there is no mark.
_MISTAKE_CODE = 2  # `torchmpirun`'s exit code for invalid options.
_OF_ONE_JOB = (variables.ADDRESS, variables.PORT)  # Two jobs cannot use the same port.
_POLL_SECONDS = 0.1


def divide(spec: JobSpec, count: int, folder: str) -> list[tuple[JobSpec, tuple[int, ...]]]:
    """Return the job of each of the ``count`` groups, and the CPUs of this host that the job may use (empty for all).

    The groups write their marks into ``folder``. Raise LaunchError if the ranks cannot be divided into groups of equal
    size, or if the hosts have too few slots.
    """
    if spec.num_ranks % count:
        raise LaunchError(f"--groups {count}: cannot divide {spec.num_ranks} ranks; set -n to a multiple of {count}")
    size, token = spec.num_ranks // count, uuid.uuid4().hex
    slots = [host.name for host in spec.hosts for _ in range(host.num_slots)]
    if slots and len(slots) < spec.num_ranks:
        raise LaunchError(f"--groups: expected {spec.num_ranks} slots, found {len(slots)}; add hosts or reduce -n")
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
        if is_crowded or set(own) & set(others):  # The groups share the cores of a host, so do not bind their ranks.
            threads = {name: "1" for name in binding.THREAD_VARIABLES if name not in spec.environment}
            of_group = replace(of_group, bind="none", variables=threads | {**spec.variables})
        jobs.append((_with_own_files(of_group), tuple(cpu for core in part for cpu in core.cpus)))
    return jobs


def _gpus(ranks: range, num_gpus: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Return CUDA_VISIBLE_DEVICES for a group, with the GPUs that its ranks would use in one job of all ranks."""
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
    """Write the job's description to ``file``, and start a torchmpirun that runs the job.

    ``cores`` are the CPUs that the job may use (empty for all). ``output`` replaces the standard output and the
    standard error of the new process (default: no change).
    """

    def prepare() -> None:  # The new process calls this function before exec.
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
    """The torchmpirun process of one group, which is restarted when an experiment has made it fail."""

    spec: JobSpec
    cores: tuple[int, ...]
    ends_at: float | None  # monotonic time of the time limit; None without a limit
    num_unseen: int = 0

    def __post_init__(self) -> None:
        self.start()

    @property
    def group(self) -> GroupOfRanks:
        """The group, with its number of restarts and the reason why its last job ended."""
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
        """Return the exit code of the job, or None while the job runs; 1 if the job ended with 0 in an experiment."""
        code = self.process.poll()
        if code is not None:
            self.ended = self.ended or time.monotonic()  # Keep the time at which the end was first seen.
        if code == 0 and self.group.path(EXPERIMENT).exists():
            return 1
        return 128 - code if code is not None and code < 0 else code

    def can_go_on(self, code: int) -> bool:
        """Return whether a failed job may be restarted, because an experiment has probably made it fail.

        Also record the reason for the failure and the number of restarts in ``spec``, for the restarted job.
        """
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
    """Run the jobs of all groups; return the exit code of the first failed job that is not restarted, else 0."""
    if spec.system == "Slurm":
        raise LaunchError(f"--groups: list Slurm's nodes explicitly; add --hosts {','.join(map(str, spec.hosts))}")
    ends_at = None if spec.timeout is None else time.monotonic() + spec.timeout
    folder = new_folder()
    with Guardian(folder.name), folder, Signals() as signals:
        jobs = divide(spec, count, folder.name)
        return _wait([_GroupJob(of_group, cores, ends_at) for of_group, cores in jobs], signals)


def _wait(jobs: list[_GroupJob], signals: Signals) -> int:
    """Restart failed groups. End all groups on a signal, or if a group cannot be restarted; return the exit code."""
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
            # A signal that torchmpirun passes to all groups, such as at the end of an allocation, may end all of them.
            # Then do not restart any group. But if other groups still run some time after the signal, restart this
            # group, because the other groups wait for its experiments.
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
                continue  # The other groups have the same time limit, so they end without a signal from this process.
            where = f"after signal {signum}" if signum else "probably outside of an experiment"
            say(f"{name} failed with exit code {exit_code}, {where}{'; ending the other groups' if others else ''}")
            _send(running, signal.SIGTERM)
    return 128 + signals.ending[0] if signals.ending else code


def _send(jobs: Sequence[_GroupJob], signum: int) -> None:
    for job in jobs:
        with contextlib.suppress(ProcessLookupError):
            job.process.send_signal(signum)
