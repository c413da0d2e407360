"""Run mpirun as a job, and make sure that the job ends: normally, by a signal, by its time limit, or after a failure.

"mpirun" here means the launcher of the MPI in use: mpirun, mpiexec or srun.

The job has a folder, whose path is in TORCHMPIRUN_JOB_DIR. Every process with this path in its environment belongs to
the job, even in a new session or under a new parent. So torchmpirun can end exactly the processes of the job. Process
groups would not suffice, because mpirun and programs create new sessions. Marks in the folder show which ranks run, and
how they failed (`exit_marks`).

A signal that requests the end of the job is first sent to the ranks that have a handler for it. They have ``--grace``
seconds to end. Then mpirun gets the signal, and has `GRACE_SECONDS` to end the ranks on all hosts. A second Ctrl-C cuts
both periods short, and the time limit cuts the ``--grace`` period short (`signals`). After that, the remaining
processes on this host are killed. Slurm's srun needs other signals (`stop_signals`), each with a grace period, because
a killed srun would leave the ranks on other hosts running.

Several components detect deaths, because each component covers cases that the other components miss:

- mpirun detects a death and ends the other ranks, also on other hosts. But MPICH's mpirun does not detect a rank that
  dies before MPI runs, and Open MPI's mpirun lets an elastic job continue.
- `deaths` detects every death on this host and the order of the deaths. The job is ended here if mpirun does not end
  it.
- The ranks watch each other (`watch.watchdog`), and report the operation in which a rank died. They also end the job if
  mpirun cannot see the death, because mpirun started a shell or another program, which then started the rank.
- `last_wait` detects ranks that hang after the end of their program, and an mpirun that hangs after the end of all
  ranks.

In an elastic job a death is reported, and the job continues until its last rank has ended.
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

FAILURE_GRACE_SECONDS = 3.5  # Time for the MPI to end the other ranks after a rank has failed.
TRACE_SECONDS = 30.0  # Additional time for the failed rank to write its trace.
TIMEOUT_CODE = 124  # The exit code that timeout(1) uses.
ROOM_REMEDY = "free space in the folder for temporary files, or set TMPDIR to another folder"
STARTING_SECONDS = 60.0  # A job that fails within this time may not have started on all hosts.
_POLL_SECONDS = 0.05
_OUTPUT_SECONDS = 0.2  # Time for mpirun to read and print the last output of the ranks.
# If the ranks take longer than this to end after a signal, torchmpirun prints a line about the wait.
_QUIET_SECONDS = 2.0

# Look up the function at import, because a child that is forked in a process with several threads must not load
# libraries.
_prctl: Any = getattr(ctypes.CDLL(None), "prctl", None)


def die_with_parent() -> None:
    """Make the kernel send SIGTERM to this process when torchmpirun dies.

    The child process calls this function before it executes mpirun.
    """
    _prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG is 1.


@contextlib.contextmanager
def refusing(subject: str, remedy: str) -> Iterator[None]:
    """Raise LaunchError with ``subject`` and ``remedy`` if the block raises an OSError."""
    try:
        yield
    except OSError as error:
        raise LaunchError(f"{subject}: {error.strerror or error}; {remedy}") from None


def new_folder() -> tempfile.TemporaryDirectory[str]:
    """Create a folder for the marks of a job. Raise LaunchError if it cannot be created."""
    with refusing("cannot create a folder for the job", ROOM_REMEDY):
        return tempfile.TemporaryDirectory(prefix=cleanup.FOLDER_PREFIX, ignore_cleanup_errors=True)


@dataclass
class Job:
    """One run of mpirun and of all processes that mpirun starts."""

    command: StarterCommand
    spec: JobSpec
    folder: Path
    begin: float = field(default_factory=time.monotonic)  # start of the first attempt
    reason: str = ""  # Reason for the failure of the job.
    verb: str = "failed"  # The predicate of a message about the end of the job.
    has_run: bool = False
    may_lack_something: bool = False  # The job ended early, and no rank of this host recorded a failure.
    was_ended: bool = False  # The job must not be restarted, for example because a signal or the time limit ended it.
    has_lasted: bool = False  # The job ran for more than STARTING_SECONDS.
    starts_again: bool = False  # The job was ended because its hosts have changed.
    signals: Signals = field(default_factory=Signals)
    news: Callable[[], str] = lambda: ""  # Returns the reason for a restart, or "" if the job should continue.
    _deaths: list[Death] = field(default_factory=list)  # The first death, or in an elastic job all deaths.
    _failed_since: float = 0.0  # Time at which the first failed or dead rank was seen. 0 if there is none.
    _is_ending: bool = False
    _was_explained: bool = False

    def __post_init__(self) -> None:
        self._remains = cleanup.Remains(self.folder, stop_signals=self.spec.vendor.stop_signals)
        self._notices = NoticeFilter(self._has_explained)
        self._failure_grace = FAILURE_GRACE_SECONDS + TRACE_SECONDS * bool(self.spec.profile)

    @property
    def is_late(self) -> bool:
        """Whether the time limit has passed."""
        return self.spec.timeout is not None and time.monotonic() - self.begin > self.spec.timeout

    @property
    def _sees_all(self) -> bool:
        """Whether all ranks of the job run on this host.

        True if every rank has started here, or if the job has at most one host and no ``--mpi-args``.
        """
        return self._lookout.sees_all or not (len(self.spec.hosts) > 1 or self.spec.mpi_args)

    def _has_explained(self) -> bool:
        """Return whether a rank has recorded a failure, and so has printed its cause.

        The thread that prints mpirun's output calls this method, possibly while the job's folder is being removed. In
        that case return True.
        """
        try:
            self._was_explained = self._was_explained or bool(exit_marks.failures(self.folder))
        except OSError:
            return True
        return self._was_explained

    def run(self) -> int:
        """Start the job, wait for its end, and clean up; return the exit code of the job."""
        self.has_run, started = True, time.monotonic()
        stderr = terminal.relay(self._notices)
        self._remains.describe()
        if self.command.hostfile:
            path = self.folder / "hostfile"
            with refusing(f"cannot write {path}", ROOM_REMEDY):
                path.write_text(self.command.hostfile)
        with refusing(f"cannot start {self.command.words[0]}", "check the command that torchmpirun --dry-run prints"):
            if self.command.hands_input:
                handed_input.offer(self.folder)
            # Start mpirun in a new session. Otherwise a Ctrl-C would reach the job twice: from the terminal, and from
            # torchmpirun.
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
        """Watch the job until it has ended or must be ended; return the exit code of the job."""
        look, interval, news = time.monotonic(), 0.1, ""
        while self._running():
            now = time.monotonic()
            if self.signals.ending or (news := self._change()):
                break
            if self.is_late:
                self.reason = f"the job exceeded its time limit of {self.spec.timeout:g} s (--timeout)"
                say(self.reason)
                self.was_ended = True
                self._end(signal.SIGTERM)
                return TIMEOUT_CODE
            # End the job in three cases. A rank has failed, but mpirun does not end the job. All ranks have ended, but
            # mpirun has not. The ranks hang after the end of their program.
            failed_seconds = self._failed_for()
            hang = "" if failed_seconds else self._last_wait.look()
            if failed_seconds > self._failure_grace or self._last_wait.is_starter_alone or hang:
                self._end(signal.SIGTERM, None if self.spec.vendor.stop_signals else FAILURE_GRACE_SECONDS)
            if hang:
                self.reason, self.was_ended = hang, True  # A restart would repeat a program that has finished.
                say(hang)
                return 1  # This is also the exit code after the timeout of a rank's watchdog.
            if now > look:  # Search for shared memory often until there is some, and rarely afterwards.
                self._remains.look()
                interval = 5.0 if self._remains.shared_memory else min(5.0, 1.2 * interval)
                look = now + interval
        if self.signals.ending or news:
            return self._stop(news)
        # mpirun has ended, but ranks may still be ending, because MPICH's mpirun does not wait for ranks that it kills.
        until = time.monotonic() + _OUTPUT_SECONDS
        self._look_for_deaths(0.0)
        while self._lookout.is_holding or (self._lookout.living and time.monotonic() < until):
            time.sleep(_POLL_SECONDS)
            self._look_for_deaths(0.0)
        code = self._exit_code()
        if code == 0 and self.spec.num_ranks > 1 and (ranks_alone := exit_marks.ranks_alone(self.folder)):
            say(exit_marks.explain_alone(ranks_alone))
        return code

    def _stop(self, news: str) -> int:
        """End the job because of a signal, or with SIGTERM for a restart; return the exit code of the job.

        ``news`` is the reason for the restart, or "" after a signal.
        """
        signum = self.signals.ending[0] if self.signals.ending else signal.SIGTERM
        if news:
            say(news)
        else:
            self.was_ended, self.reason = True, f"the job was ended by signal {signum}"
        self._give_time(signum)
        self.starts_again = bool(news)  # Restart even after exit code 0: a program may use this code after saving.
        self._end(signum)
        return 128 + signum

    def _change(self) -> str:
        """Return the reason for a restart of the job.

        The result is empty if the job should continue, or if the programs of its ranks have returned.
        """
        news = self.news()
        return "" if news and next(self.folder.glob("through-*"), None) and not self._left() else news

    def _running(self) -> bool:
        """Handle signals and deaths for at most ``_POLL_SECONDS``; return whether mpirun is still running."""
        self.signals.look_at_parent()
        self.signals.pass_on(self.process)
        self._look_for_deaths(_POLL_SECONDS)
        return self.process.poll() is None

    def _look_for_deaths(self, seconds: float) -> None:
        """Wait at most ``seconds`` for deaths, and record them unless the job is being ended."""
        deaths = self._lookout.wait(seconds)
        if deaths and not (self.signals.ending or self._is_ending):
            self.record_deaths(deaths)

    def record_deaths(self, deaths: list[Death]) -> None:
        """Record the deaths that may explain the failure of the job.

        Deaths that the MPI or a failing rank caused are not recorded. In an elastic job, also print each death.
        """
        self._remains.look()  # Look now, because the other ranks still map the shared memory of the dead rank.
        if self._deaths and not self.spec.elastic:
            return
        # A death counts only if it began before every failure, because a failing rank makes the MPI kill other ranks.
        failed = [failure.rank for failure in exit_marks.failures(self.folder)]
        # Read the ranks' pipes again, because they show when these failures began.
        deaths = deaths + self._lookout.wait(0.0)
        deaths = [death for death in deaths if all(death.began < self._lookout.began(rank) < inf for rank in failed)]
        if deaths and not self.spec.elastic:
            self._deaths = deaths[:1] if deaths[0].began < inf else deaths
            return
        self._deaths += deaths
        for death in deaths:
            say(f"{death.name} {death.explain()}{'; the other ranks continue' if death.num_left else ''}")

    def _give_time(self, signum: int) -> None:
        """Send the signal to the ranks that have a handler, and wait until these ranks end or their time is over."""
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
                    self._remains.kill(self.process.wait)  # Without this kill, mpirun would print an error report.
                return
            if seconds > self.spec.grace or self.is_late:
                ranks = ", ".join(map(str, sorted(forwarded.unfinished())))
                when = f"{self.spec.grace:g} s after signal {signum} (--grace)"
                if self.is_late:
                    when = f"when the time limit of {self.spec.timeout:g} s passed (--timeout)"
                say(f"killed rank{'s' * (',' in ranks)} {ranks}: still running {when}")
                return
            if is_quiet and seconds > _QUIET_SECONDS:
                is_quiet = False
                rest = self.spec.grace - seconds
                say(f"signal {signum} was passed to the ranks; they have {rest:.0f} s to end (Ctrl-C ends them now)")

    def _end(self, signum: int, grace_seconds: float | None = None) -> None:
        """Send the signal to mpirun, wait for its end, then kill the remaining processes of the job on this host."""
        self._is_ending = True  # From now on, a dead rank is not a cause but a result of the end of the job.
        self._remains.look()
        for stop_signal in self.spec.vendor.stop_signals or (signum,):
            num_signals = len(self.signals.ending)
            self.process.send_signal(stop_signal)
            until = time.monotonic() + (GRACE_SECONDS if grace_seconds is None else grace_seconds)
            while self._running() and time.monotonic() < until and len(self.signals.ending) == num_signals:
                pass
        self._remains.kill(self.process.wait)

    def _failed_for(self) -> float:
        """Return the seconds since the first failed or dead rank was seen; 0 if there is none.

        The time in a failed rank's mark cannot be used, because it is not a monotonic time.
        """
        has_died = not self.spec.elastic and any(death.status != 0 for death in self._deaths)
        if not (has_died or exit_marks.failures(self.folder)):
            return 0.0
        self._failed_since = self._failed_since or time.monotonic()
        return time.monotonic() - self._failed_since

    def _exit_code(self) -> int:
        """Return the exit code of the job, and set `reason`.

        The exit code is the code of the first rank that died or failed, or of the first rank that failed in an elastic
        job. Without such a rank, it is mpirun's exit code, or 128 + N if signal N killed mpirun.
        """
        # If torchmpirun has ended mpirun, mpirun's exit code shows only that, so use the codes of the ranks.
        own = max(self._lookout.codes_in_order, default=0) if self._is_ending else self.process.returncode
        code = 128 - own if own < 0 else int(own)
        failures = exit_marks.failures(self.folder)
        if not failures and (agreed_code := exit_marks.code_of_end(self.folder)):
            # The ranks received a request to end, but torchmpirun did not. A host may be about to leave the job.
            self.verb, self.was_ended = "ended, because its ranks received a request to end", not self.spec.discover
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
        among = "" if self._sees_all or report else ", but a rank of another host may have failed earlier"
        reasons = [f"{death.name} {death.explain(0 if self.spec.elastic else code)}{among}" for death in self._deaths]
        if self._deaths and not self.spec.elastic:
            code = min(self._deaths, key=lambda death: death.status in BY_STARTER).code(code)
        elif failures:
            code = failures[0].code
            reasons.append(self._explain_failure(failures[0], is_first=not reasons))
        elif unfinished and code == 0:
            code = 1
            ranks = f"rank{'s' * (len(unfinished) > 1)} {', '.join(map(str, unfinished))}"
            lost = "was a host lost" if len(self.spec.hosts) > 1 else "did mpirun end before the ranks"
            why = lost if self.spec.elastic else "did a rank call os._exit"
            reasons.append(f"{ranks} did not reach the end of the program, but the MPI reports success ({why}?)")
        elif not (reasons or self._sees_all):
            reasons.append(unknown)
        self.reason = "; ".join(reasons) if code else ""
        return code

    def _starter_report(self, code: int) -> StarterReport | None:
        """Return mpirun's report about the first rank that ended, or None.

        Return None if all ranks run on this host, if the job is elastic, or if torchmpirun is ending the job.
        """
        if self._sees_all or self.spec.elastic or self._is_ending:
            return None
        terminal.catch_up()
        return starter_report.find(self.spec.vendor, self._notices.seen.decode(errors="replace"), code)

    def _explain_failure(self, failure: exit_marks.Failure, *, is_first: bool) -> str:
        """Return a message about a failed rank.

        If the rank ended the job because of a problem on another rank, the message is about this problem.
        """
        log = "" if self.spec.log_dir is None else f"; see {self.spec.log_dir / f'rank-{failure.rank}.log'}"
        if failure.report:
            return f"{failure.report}; rank {failure.rank} reported it{log}"
        when = "first" if is_first else "after that"
        if not self._sees_all:
            when += " on this host"
        return f"rank {failure.rank} failed {when}, with exit code {failure.code}{log}"

    def _left(self) -> list[int]:
        """Return the ranks that have not reached the end of the program.

        A rank that calls os._exit(0) after the program has returned is not included. In an elastic job, the result
        contains the ranks that still run although mpirun has ended. Dead ranks are not included. Ranks of other hosts
        that share the folder are not included either, because the state of these ranks is unknown.
        """
        running, died = exit_marks.ranks_running(self.folder), {death.rank for death in self._deaths if death.status}
        if self.spec.elastic:
            dead = {death.rank for death in self._deaths}
            running = {rank: number for rank, number in running.items() if number and rank not in dead}
        ranks = (rank for rank in running if rank in died or not exit_marks.is_left(self.folder, f"through-{rank}"))
        return sorted(ranks)
