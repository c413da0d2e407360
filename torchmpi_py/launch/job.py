"""Run mpirun as a job that ends: in order, by a signal, by its time limit, or because a rank failed.

"mpirun" here means the launcher of the MPI in use: mpirun, mpiexec or srun.

The job has a folder, whose path is in TORCHMPIRUN_JOB_DIR. Every process with this path in its environment belongs to
the job, even in a new session or under a new parent. So ending the job ends all of its processes and no others. Process
groups would not do, because mpirun and programs create sessions of their own. Ranks leave marks in the folder: that
they run, and how they failed (`exit_marks`).

A signal that asks the job to end is sent to the ranks that have a handler for it. They have ``--grace`` seconds to end.
A second Ctrl-C or the time limit cuts this time short (`signals`). Then mpirun gets the signal and has `GRACE_SECONDS`
to end the ranks in its own way, also on other hosts; a second Ctrl-C cuts this time short too. Whatever is left on this
host is then killed. Slurm's srun needs signals of its own (`stop_signals`), each with its own grace period, because a
killed srun would leave the ranks on other hosts running.

There are several detectors of a death, because each serves a case that the others miss:

- mpirun ends the other ranks, also on other hosts. But MPICH's does not notice a rank that dies before MPI runs, and
  Open MPI's lets an elastic job go on.
- `deaths` sees each death on this host, names the first one, and has the job ended if mpirun does not end it.
- The ranks watch each other (`watch.watchdog`). They report in which operation a rank died. They also end a job in
  which mpirun sees another process in a rank's place, such as a shell.
- `last_wait` sees ranks that hang after their program, and an mpirun that hangs after the ranks.

In an elastic job a death is reported, and the job goes on to its last rank.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

from torchmpi_py.errors import LaunchError
from torchmpi_py.launch import cleanup, exit_marks, handed_input, starter_report, terminal
from torchmpi_py.launch.cleanup import GRACE_SECONDS
from torchmpi_py.launch.command import StarterCommand
from torchmpi_py.launch.deaths import BY_STARTER, Death, Lookout, are_by_starter
from torchmpi_py.launch.job_spec import JobSpec
from torchmpi_py.launch.last_wait import LastWait
from torchmpi_py.launch.notices import NoticeFilter
from torchmpi_py.launch.signals import ForwardedSignal, Signals
from torchmpi_py.launch.starter_report import StarterReport
from torchmpi_py.launch.terminal import say

FAILURE_GRACE_SECONDS = 3.5  # seconds for the MPI to end the other ranks after a rank has failed
TRACE_SECONDS = 30.0  # seconds for the failed rank to write its trace before that
TIMEOUT_CODE = 124  # the code that timeout(1) uses
ROOM_REMEDY = "free space there, or set TMPDIR to another folder"
STARTING_SECONDS = 60.0  # a job that fails within this time may not have started on all hosts
_POLL_SECONDS = 0.05
_OUTPUT_SECONDS = 0.2  # mpirun may still have to read what the ranks have written
# If the ranks take longer than this to end after a signal, a line says that torchmpirun waits.
_QUIET_SECONDS = 2.0

# Look the function up here, because a child that was forked beside other threads must not load anything.
_prctl: Any = getattr(ctypes.CDLL(None), "prctl", None)


def die_with_parent() -> None:
    """Have the kernel end this new mpirun if torchmpirun is killed; called before the exec."""
    _prctl(1, signal.SIGTERM)  # 1: PR_SET_PDEATHSIG


@contextlib.contextmanager
def refusing(subject: str, remedy: str) -> Iterator[None]:
    """Turn an OSError within the block into a LaunchError, because the job cannot start."""
    try:
        yield
    except OSError as error:
        raise LaunchError(f"{subject}: {error.strerror or error}; {remedy}") from None


def new_folder() -> tempfile.TemporaryDirectory[str]:
    """Create a folder for the marks of a job. Raise LaunchError if none can be created."""
    with refusing("no folder for the job", ROOM_REMEDY):
        return tempfile.TemporaryDirectory(prefix=cleanup.FOLDER_PREFIX, ignore_cleanup_errors=True)


@dataclass
class Job:
    """One run of mpirun and of everything that it starts."""

    command: StarterCommand
    spec: JobSpec
    folder: Path
    begin: float = field(default_factory=time.monotonic)  # start of the first attempt
    reason: str = ""  # why the job failed
    verb: str = "failed"  # what happened to the job, for a message
    has_run: bool = False
    may_lack_something: bool = False  # The start failed, and no rank of this host reported why.
    was_ended: bool = False  # A signal or the time limit ended the job.
    has_lasted: bool = False  # The job ran for longer than a failing start takes.
    starts_again: bool = False  # The job was ended because its hosts have changed.
    signals: Signals = field(default_factory=Signals)
    news: Callable[[], str] = lambda: ""  # Why the job must end and start again. Empty if it should go on.
    _deaths: list[Death] = field(default_factory=list)  # The first death. In an elastic job every death.
    _failed_since: float = 0.0  # When a failed or dead rank was first seen; 0 if there is none.
    _is_ending: bool = False
    _was_explained: bool = False

    def __post_init__(self) -> None:
        self._remains = cleanup.Remains(self.folder, stop_signals=self.spec.vendor.stop_signals)
        self._notices = NoticeFilter(self._has_explained)
        self._failure_grace = FAILURE_GRACE_SECONDS + TRACE_SECONDS * bool(self.spec.profile)

    @property
    def is_late(self) -> bool:
        """Return whether the time limit has passed."""
        return self.spec.timeout is not None and time.monotonic() - self.begin > self.spec.timeout

    @property
    def _sees_all(self) -> bool:
        """Return whether no rank of the job can be on another host, or every rank has been on this one."""
        return self._lookout.sees_all or not (len(self.spec.hosts) > 1 or self.spec.mpi_args)

    def _has_explained(self) -> bool:
        """Return whether a rank has reported why it fails.

        The thread that shows the output calls this, possibly while the folder is being removed.
        """
        try:
            self._was_explained = self._was_explained or bool(exit_marks.failures(self.folder))
        except OSError:
            return True
        return self._was_explained

    def run(self) -> int:
        """Start the job, wait for it, and clean up; return its exit code."""
        self.has_run, started = True, time.monotonic()
        stderr = terminal.relay(self._notices)
        self._remains.describe()
        # mpirun gets a session of its own. A Ctrl-C then reaches the job once, through torchmpirun, and not also from
        # the terminal.
        if self.command.hostfile:
            path = self.folder / "hostfile"
            with refusing(f"cannot write {path}", ROOM_REMEDY):
                path.write_text(self.command.hostfile)
        with refusing(f"cannot start {self.command.words[0]}", "try it by hand"):
            if self.command.hands_input:
                handed_input.offer(self.folder)
            self.process = subprocess.Popen(
                self.command.words,
                env=self.command.environment,
                stdin=subprocess.DEVNULL if self.command.hands_input else terminal.starter_input(),
                stderr=stderr,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        if stderr is not None:
            os.close(stderr)
        self._remains.starter = self.process.pid
        self._remains.describe()
        self._lookout = Lookout(self.folder, self.process.pid, self.spec.num_ranks)
        self._last_wait = LastWait(self._lookout, self._remains)
        try:
            code = self._wait()
            self.has_lasted = time.monotonic() - started > STARTING_SECONDS
            self.may_lack_something = not (self.has_lasted or self.was_ended or exit_marks.failures(self.folder))
            return code
        finally:
            self._remains.clear(self.process.wait)
            self._lookout.close()

    def _wait(self) -> int:
        """Watch the job until it has ended or must be ended; return its exit code."""
        look, interval, news = time.monotonic(), 0.1, ""
        while self._running():
            now = time.monotonic()
            if self.signals.ending or (news := self._change()):
                break
            if self.is_late:
                self.reason = f"the job passed its limit of {self.spec.timeout:g} s (--timeout)"
                say(self.reason)
                self.was_ended = True
                self._end(signal.SIGTERM)
                return TIMEOUT_CODE
            # End the job if a rank failed or all ranks left, but mpirun does not end it; or if the ranks hang at their
            # end.
            failed_seconds = self._failed_for()
            hang = "" if failed_seconds else self._last_wait.look()
            if failed_seconds > self._failure_grace or self._last_wait.is_starter_alone or hang:
                self._end(signal.SIGTERM, None if self.spec.vendor.stop_signals else FAILURE_GRACE_SECONDS)
            if hang:
                self.reason, self.was_ended = hang, True  # a restart would repeat a finished program
                say(hang)
                return 1  # the same code as after the timeout of a rank's watchdog
            if now > look:  # look often until MPI runs, and rarely afterwards
                self._remains.look()
                interval = 5.0 if self._remains.shared_memory else min(5.0, 1.2 * interval)
                look = now + interval
        if self.signals.ending or news:
            return self._stop(news)
        # mpirun has ended, but the ranks that it killed may still be ending.
        until = time.monotonic() + _OUTPUT_SECONDS  # MPICH's mpirun does not wait for the ranks that it has killed
        self._look_for_deaths(0.0)
        while self._lookout.is_holding or (self._lookout.living and time.monotonic() < until):
            time.sleep(_POLL_SECONDS)
            self._look_for_deaths(0.0)
        code = self._exit_code()
        if code == 0 and self.spec.num_ranks > 1 and (ranks_alone := exit_marks.ranks_alone(self.folder)):
            say(exit_marks.explain_alone(ranks_alone))
        return code

    def _stop(self, news: str) -> int:
        """End the job because of a signal, or as by SIGTERM because of ``news``; return its exit code."""
        signum = self.signals.ending[0] if self.signals.ending else signal.SIGTERM
        if news:
            say(news)
        else:
            self.was_ended, self.reason = True, f"the job was ended by signal {signum}"
        self._give_time(signum)
        self.starts_again = bool(news)  # whatever the exit code: a program that has saved may end with 0
        self._end(signum)
        return 128 + signum

    def _change(self) -> str:
        """Return why the job must end and start again.

        The result is empty if the job should go on, or if the programs of its ranks are over.
        """
        news = self.news()
        return "" if news and next(self.folder.glob("through-*"), None) and not self._left() else news

    def _running(self) -> bool:
        """Handle signals and deaths for a moment; return whether mpirun still runs."""
        self.signals.look_at_parent()
        self.signals.pass_on(self.process)
        self._look_for_deaths(_POLL_SECONDS)
        return self.process.poll() is None

    def _look_for_deaths(self, seconds: float) -> None:
        """Record the deaths since the last call, unless the job is being ended."""
        deaths = self._lookout.wait(seconds)
        if deaths and not (self.signals.ending or self._is_ending):
            self.record_deaths(deaths)

    def record_deaths(self, deaths: list[Death]) -> None:
        """Record the deaths that may explain why the job fails.

        Deaths that the MPI or a failing rank caused are left out.
        """
        self._remains.look()  # the other ranks map the shared memory that the dead rank had
        if self._deaths and not self.spec.elastic:
            return
        # A death counts only if it began before every failure, because a failing rank has the MPI end the others.
        failed = [failure.rank for failure in exit_marks.failures(self.folder)]
        deaths = deaths + self._lookout.wait(0.0)  # also read the deaths that these failures caused meanwhile
        deaths = [death for death in deaths if all(death.began < self._lookout.began(rank) < inf for rank in failed)]
        if deaths and not self.spec.elastic:
            self._deaths = deaths[:1] if deaths[0].began < inf else deaths
            return
        self._deaths += deaths
        for death in deaths:
            say(f"{death.name} {death.explain()}{'; the others go on' if death.num_left else ''}")

    def _give_time(self, signum: int) -> None:
        """Pass the signal on to ranks that have a handler; return when they have ended or their time is over."""
        forwarded = ForwardedSignal(self._remains, signum)
        if not forwarded.ranks or not self.spec.grace:
            return
        self._remains.look()
        forwarded.send()
        begin, num_signals, is_quiet = time.monotonic(), len(self.signals.ending), True
        while self._running() and len(self.signals.ending) == num_signals:
            seconds = time.monotonic() - begin
            if forwarded.is_over():
                if forwarded.reason:
                    say(forwarded.reason)
                if len(forwarded.ranks) == self.spec.num_ranks:
                    time.sleep(_OUTPUT_SECONDS)
                    self._remains.kill(self.process.wait)  # the kill keeps mpirun from printing a report of these ends
                return
            if seconds > self.spec.grace or self.is_late:
                ranks = ", ".join(map(str, sorted(forwarded.unfinished())))
                when = f"{self.spec.grace:g} s after signal {signum} (--grace)"
                if self.is_late:
                    when = f"when the limit of {self.spec.timeout:g} s passed (--timeout)"
                say(f"killed rank {ranks}: not ended {when}")
                return
            if is_quiet and seconds > _QUIET_SECONDS:
                is_quiet = False
                rest = self.spec.grace - seconds
                say(f"signal {signum} was passed on; the ranks have {rest:.0f} s more to end, or until the next signal")

    def _end(self, signum: int, grace_seconds: float | None = None) -> None:
        """Send mpirun the signal, wait, then kill what is left of the job on this host."""
        self._is_ending = True  # a rank that dies from now on was ended with the job
        self._remains.look()
        for stop_signal in self.spec.vendor.stop_signals or (signum,):
            num_signals = len(self.signals.ending)
            self.process.send_signal(stop_signal)
            until = time.monotonic() + (GRACE_SECONDS if grace_seconds is None else grace_seconds)
            while self._running() and time.monotonic() < until and len(self.signals.ending) == num_signals:
                pass
        self._remains.kill(self.process.wait)

    def _failed_for(self) -> float:
        """Return the seconds since a failed or dead rank was first seen.

        The time in a failed rank's mark cannot be used, because it comes from a different clock.
        """
        has_died = not self.spec.elastic and any(death.status != 0 for death in self._deaths)
        if not (has_died or exit_marks.failures(self.folder)):
            return 0.0
        self._failed_since = self._failed_since or time.monotonic()
        return time.monotonic() - self._failed_since

    def _exit_code(self) -> int:
        """Return the exit code of the job, and set `reason`.

        It is the code of the first rank that died; in an elastic job, of the first that failed. Otherwise it is
        mpirun's own code, in the form that a shell uses.
        """
        # If torchmpirun has ended mpirun, mpirun's own code says only that.
        own = max(self._lookout.codes_in_order, default=0) if self._is_ending else self.process.returncode
        code = 128 - own if own < 0 else int(own)
        failures = exit_marks.failures(self.folder)
        if not failures and (agreed_code := exit_marks.code_of_end(self.folder)):
            # The ranks received a request to end, but torchmpirun did not: a host may be about to leave.
            self.verb, self.was_ended = "ended, as its ranks were asked to", not self.spec.discover
            return agreed_code
        report = self._starter_report(code)
        if report and not self._lookout.has(report.rank) and all(each.report for each in failures):
            self.reason = report.text
            return report.code
        unknown = "cannot tell which rank failed first: torchmpirun sees only this host's ranks"
        may_be_other = bool(self.spec.vendor.killed_code) or not self._sees_all
        if may_be_other and not failures and are_by_starter(self._deaths, code, self.spec.vendor.killed_code):
            self.reason = f"a rank called MPI_Abort, with exit code {code}" if self._sees_all else unknown
            return code
        if self.spec.elastic and self._deaths and self._lookout.is_deserted and not self._lookout.codes_in_order:
            code = code or self._deaths[-1].code()
        if not (unfinished := self._left()) and self.spec.elastic and code == 0 and not failures:
            return 0
        among = "" if self._sees_all or report else ", unless a rank of another host failed before"
        reasons = [f"{death.name} {death.explain(0 if self.spec.elastic else code)}{among}" for death in self._deaths]
        if self._deaths and not self.spec.elastic:
            code = min(self._deaths, key=lambda death: death.status in BY_STARTER).code(code)
        elif failures:
            code = failures[0].code
            reasons.append(self._explain_failure(failures[0], is_first=not reasons))
        elif unfinished and code == 0:
            code = 1
            ranks = f"rank{'s' * (len(unfinished) > 1)} {', '.join(map(str, unfinished))}"
            lost = "a lost host" if len(self.spec.hosts) > 1 else "mpirun has left them"
            why = lost if self.spec.elastic else "os._exit on a rank"
            reasons.append(f"{ranks} did not reach the end of the program, though the MPI reports success ({why}?)")
        elif not (reasons or self._sees_all):
            reasons.append(unknown)
        self.reason = "; ".join(reasons) if code else ""
        return code

    def _starter_report(self, code: int) -> StarterReport | None:
        """Return what mpirun printed about the first rank that ended; None if this host sees every rank."""
        if self._sees_all or self.spec.elastic or self._is_ending:
            return None
        terminal.catch_up()
        return starter_report.find(self.spec.vendor, self._notices.seen.decode(errors="replace"), code)

    def _explain_failure(self, failure: exit_marks.Failure, *, is_first: bool) -> str:
        """Return which rank failed, or its report about a different rank because of which it ended the job."""
        log = (
            "" if self.spec.log_dir is None else f"; its output is in {self.spec.log_dir / f'rank-{failure.rank}.log'}"
        )
        if failure.report:
            return f"{failure.report}; rank {failure.rank} reported it{log}"
        when = "first" if is_first else "after that"
        if not self._sees_all:
            when += " on this host"
        return f"rank {failure.rank} failed {when}, with exit code {failure.code}{log}"

    def _left(self) -> list[int]:
        """Return the ranks that left in the middle of the program.

        os._exit(0) after the program counts as an end in order. In an elastic job the result is the ranks that still
        run without their mpirun. Dead ranks are left out. Ranks of other hosts that share the folder are left out too,
        because their state is unknown.
        """
        running, died = exit_marks.ranks_running(self.folder), {death.rank for death in self._deaths if death.status}
        if self.spec.elastic:
            dead = {death.rank for death in self._deaths}
            running = {rank: number for rank, number in running.items() if number and rank not in dead}
        ranks = (rank for rank in running if rank in died or not exit_marks.is_left(self.folder, f"through-{rank}"))
        return sorted(ranks)
