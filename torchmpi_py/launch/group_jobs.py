"""Groups of ranks, each a job of its own: ``torchmpirun -n 8 --groups 4 sweep.py``.

torchmpirun starts itself once for each group, with the group's part of the ranks, and with its part of the hosts or of
this host's cores and GPUs. The groups share experiments (`sweeps`). A group whose job fails with an experiment under
way is started again, and goes on with the next one: a rank that is killed costs one experiment. Rank 0 of a group has a
mark in torchmpirun's folder while an experiment is under way. A group that fails without one would fail for ever, and
ends the others. A rank 0 on another host leaves no mark: there a failure after the first minute may be an experiment's,
and the group is started again a limited number of times. One that ends in order in the middle of an experiment
(``os._exit(0)``) has failed.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from torchmpi_py.errors import LaunchError
from torchmpi_py.launch import allocation, binding, child_python, exit_marks, host_check, hosts, topology, variables
from torchmpi_py.launch.cleanup import Guardian
from torchmpi_py.launch.hosts import Host
from torchmpi_py.launch.job import STARTING_SECONDS, TIMEOUT_CODE, die_with_parent, new_folder
from torchmpi_py.launch.signals import SOON_SECONDS, Signals
from torchmpi_py.launch.terminal import say

VARIABLE = "TORCHMPIRUN_GROUP"
_MARK, _REASON = "experiment", "reason"
_MOST_IDLE_FAILURES = 2  # in a row, on another host, where rank 0 leaves no mark
_MOST_FAR_FAILURES = 10  # there in all, of jobs that came up, as nobody knows which were outside of experiments
_MISTAKE_CODE = 2  # torchmpirun's own, for options that do not fit
_OF_ONE_JOB = (variables.ADDRESS, variables.PORT)  # two jobs cannot have the same port
_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class GroupOfRanks:
    """A group's part of a job, as torchmpirun gives it to itself and to the group's ranks."""

    index: int
    count: int
    token: str  # the same for all groups that one torchmpirun has started
    folder: str  # where marks go; on torchmpirun's host alone
    num_ranks: int = 0
    hosts: str = ""  # as --hosts has it; "": this host
    shares_host: bool = False  # shares cores with another group
    cores: tuple[int, ...] = ()  # this host's; none: all
    gpus: str = ""  # for CUDA_VISIBLE_DEVICES; "": as it is
    last_end: str = ""  # how this group's former job failed
    restart: int = 0  # how many jobs it has had before
    ends_at: float | None = None  # by the system's monotonic clock

    def record_experiment(self) -> None:
        """Leave that an experiment is under way."""
        exit_marks.leave(self.folder, f"{_MARK}-{self.index}")

    def record_no_experiment(self) -> None:
        """Remove that mark: the experiment has ended, and is recorded."""
        (Path(self.folder) / f"{_MARK}-{self.index}").unlink(missing_ok=True)

    def record_end(self, reason: str) -> None:
        """Leave why the group's job failed."""
        exit_marks.leave(self.folder, f"{_REASON}-{self.index}", reason)


def read(text: str) -> GroupOfRanks:
    """The group in a text that torchmpirun has written."""
    return GroupOfRanks(**json.loads(text))


def group_in(environment: Mapping[str, str]) -> GroupOfRanks | None:
    """The group that this rank belongs to; None without ``--groups``."""
    return read(environment[VARIABLE]) if environment.get(VARIABLE) else None


def apply(group: GroupOfRanks, options: argparse.Namespace) -> None:
    """Turn the options of all groups into those of one."""
    options.groups, options.num_ranks, options.ranks_per_host = None, group.num_ranks, None
    if group.ends_at is not None:
        options.timeout = max(_POLL_SECONDS, group.ends_at - time.monotonic())
    if group.hosts:
        options.hosts, options.hostfile = group.hosts, None
    if group.shares_host:  # nobody divides the host's cores between the groups
        options.bind = "none"
        options.env = [f"{name}=1" for name in binding.THREAD_VARIABLES if name not in os.environ] + options.env
    for name in ("log_dir", "profile"):
        if getattr(options, name) is not None:
            setattr(options, name, getattr(options, name) / f"group-{group.index}")
    if options.timeline is not None:
        options.timeline = options.timeline.with_stem(f"{options.timeline.stem}-group-{group.index}")
    options.env = [*options.env, f"{VARIABLE}={json.dumps(asdict(group), separators=(',', ':'))}"]


def divide(
    count: int, num_ranks: int, named: Sequence[Host], environment: Mapping[str, str], folder: str
) -> list[GroupOfRanks]:
    """The groups of a job. LaunchError where its ranks cannot be divided."""
    if num_ranks % count:
        raise LaunchError(f"--groups {count} does not divide {num_ranks} ranks; give -n a multiple of {count}")
    size, token = num_ranks // count, uuid.uuid4().hex
    slots = [host.name for host in named for _ in range(host.num_slots)]
    if named and len(slots) < num_ranks:
        raise LaunchError(f"--groups: {num_ranks} ranks need as many slots, and the hosts have {len(slots)}")
    cores = [] if named else topology.cores()
    is_crowded = not named and sum(len(core.cpus) for core in cores) < count
    num_gpus = 0 if named else hosts.num_gpus(environment)
    groups = []
    for index in range(count):
        own = slots[index * size : (index + 1) * size]
        others = slots[: index * size] + slots[(index + 1) * size : num_ranks]
        part = () if is_crowded else binding.cores_of_rank(cores, index, count)
        groups.append(
            GroupOfRanks(
                index,
                count,
                token,
                folder,
                size,
                ",".join(map(str, hosts.merge(map(Host, own)))),
                shares_host=is_crowded or bool(set(own) & set(others)),
                cores=tuple(cpu for core in part for cpu in core.cpus),
                gpus=_gpus(range(index * size, (index + 1) * size), num_gpus, environment),
            )
        )
    return groups


def _gpus(ranks: range, num_gpus: int, environment: Mapping[str, str]) -> str:
    """The GPUs that the ranks would have in one job with all others."""
    if not num_gpus:
        return ""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",")[:num_gpus] if visible else [str(gpu) for gpu in range(num_gpus)]
    return ",".join(dict.fromkeys(names[rank % num_gpus] for rank in ranks))


@dataclass
class _GroupJob:
    """The torchmpirun of one group, started again as often as experiments end it."""

    group: GroupOfRanks
    words: Sequence[str]  # the command line for all groups
    num_idle_failures: int = 0
    num_far_failures: int = 0

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        self.ended = 0.0
        for mark in (_MARK, _REASON):
            self._path(mark).unlink(missing_ok=True)
        visible = {"CUDA_VISIBLE_DEVICES": self.group.gpus} if self.group.gpus else {}
        self.started = time.monotonic()
        environment = {name: value for name, value in os.environ.items() if name not in _OF_ONE_JOB}
        self.process = subprocess.Popen(
            child_python.command("torchmpi_py.launch", "--group", json.dumps(asdict(self.group)), *self.words),
            env={**environment, **visible},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=self._prepare,
        )

    def _path(self, mark: str) -> Path:
        return Path(self.group.folder) / f"{mark}-{self.group.index}"

    def _prepare(self) -> None:
        """In the new process, before it is executed."""
        die_with_parent()
        if self.group.cores:
            os.sched_setaffinity(0, self.group.cores)

    def code(self) -> int | None:
        """Exit code of the job; None while it runs."""
        code = self.process.poll()
        if code is not None:
            self.ended = self.ended or time.monotonic()  # when that was first seen
        if code == 0 and self._path(_MARK).exists():
            return 1
        return 128 - code if code is not None and code < 0 else code

    def can_go_on(self, code: int) -> bool:
        """Whether a failed job is to be started again, because of its experiments."""
        is_far = bool(self.group.hosts) and not host_check.is_this_host(hosts.parse_hosts(self.group.hosts)[0].name)
        has_mark = self._path(_MARK).exists()
        may_be_of_one = is_far and not has_mark and self.ended - self.started > STARTING_SECONDS
        self.num_far_failures += may_be_of_one
        is_idle = not (has_mark or (may_be_of_one and self.num_far_failures <= _MOST_FAR_FAILURES))
        self.num_idle_failures = self.num_idle_failures + 1 if is_idle else 0
        reason = self._path(_REASON).read_text() if self._path(_REASON).exists() else ""
        last_end = reason or f"its job ended with exit code {code}"
        self.group = replace(self.group, last_end=last_end, restart=self.group.restart + 1)
        may_try = self.num_idle_failures < (_MOST_IDLE_FAILURES if self.group.hosts else 1) and code != _MISTAKE_CODE
        return code != TIMEOUT_CODE and (may_try or not is_idle)


def run(options: argparse.Namespace, words: Sequence[str]) -> int:
    """Run the groups' jobs to their end; the exit code of the first that fails for good, else 0.

    ``words`` is the command line of this torchmpirun.
    """
    if options.max_restarts is not None or options.elastic:
        given = "--elastic" if options.elastic else "--max-restarts"
        raise LaunchError(f"--groups starts a failed group again, without {given}; leave out {given}")
    placed = allocation.place(options.num_ranks, options.hosts, options.hostfile, os.environ)
    if placed.system == "Slurm":
        raise LaunchError(f"--groups on several nodes of Slurm: write --hosts {','.join(map(str, placed.hosts))}")
    ends_at = None if options.timeout is None else time.monotonic() + options.timeout
    folder = new_folder()
    with Guardian(folder.name), folder, Signals() as signals:
        groups = divide(options.groups, placed.num_ranks, placed.hosts, os.environ, folder.name)
        return _wait([_GroupJob(replace(group, ends_at=ends_at), words) for group in groups], signals)


def _wait(jobs: list[_GroupJob], signals: Signals) -> int:
    """Start failed groups again, and end all when one cannot go on, or a signal asks for it; the exit code."""
    running, code, num_sent = list(jobs), 0, 0
    while running:
        time.sleep(_POLL_SECONDS)
        signals.look_at_parent()
        signals.pass_on(*(job.process for job in running))
        if len(signals.ending) > num_sent:
            num_sent = len(signals.ending)
            _send(running, signals.ending[-1])
        for job in list(running):
            ended = job.code()
            if ended is None:
                continue
            is_ending, who = bool(signals.ending or code), f"group {job.group.index}"
            # After a signal that was passed on, at the end of an allocation say, groups may end, and are not started
            # again; unless others go on, which wait for what they have left.
            signum = signals.cause(ended) if ended and not is_ending else 0
            others = [other for other in running if other is not job and other.code() is None]
            if signum and others and time.monotonic() - job.ended < SOON_SECONDS:
                continue
            if ended and not is_ending and (others or not signum) and job.can_go_on(ended):
                say(f"{who} failed with exit code {ended}; it is started again for what is left")
                job.start()
                continue
            running.remove(job)
            if not ended or is_ending:
                continue
            code = ended
            if code == TIMEOUT_CODE:
                continue  # the others end by their own limit, which is the same
            where = f"after signal {signum}, which was passed on" if signum else "outside of an experiment"
            say(f"{who} failed {where}, with exit code {ended}{', which ends the others' if others else ''}")
            _send(running, signal.SIGTERM)
    return 128 + signals.ending[0] if signals.ending else code


def _send(jobs: Sequence[_GroupJob], signum: int) -> None:
    for job in jobs:
        with contextlib.suppress(ProcessLookupError):
            job.process.send_signal(signum)
