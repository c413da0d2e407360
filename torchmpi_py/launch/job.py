"""Run the MPI's starter as a job that ends: by itself, by a signal, by its time limit, or by a rank that failed.

The job has a folder, named in TORCHMPIRUN_JOB_DIR. The folder's path in a process's environment marks the process as
the job's, wherever it moved to (a new session, a new parent), so that ending the job ends every process of it and no
other. Ranks leave in it that they run, and how they failed (`marks`).

To end a job: its starter gets the signal and `GRACE_SECONDS` to end the ranks in its own way, also on other hosts; a
second Ctrl-C cuts that short. Whatever is left on this host is then killed. Slurm's starter wants signals of its own
(`stop_signals`), each with its grace: one that is killed leaves the ranks on the other hosts running.

A terminal is not handed on as standard input. The starter is in a session of its own, where Open MPI would never read
from that terminal, and MPICH would take the shell's keys when the job is in the background.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from torchmpi_py.launch import leftovers, marks
from torchmpi_py.launch.deaths import Death, Lookout
from torchmpi_py.launch.terminal import Tail, say

GRACE_SECONDS = 5.0
FAILURE_GRACE_SECONDS = 2.5  # a rank has failed: how long the MPI may take to end the others by itself
TRACE_SECONDS = 30.0  # and how long the rank may take to write its trace before that
TIMEOUT_CODE = 124  # as timeout(1)
_POLL_SECONDS = 0.05
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)  # batch systems announce the end of an allocation with them


def _die_with_parent() -> None:
    """In the starter, before it is executed: have the kernel end it if torchmpirun is killed without a chance to."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # 1: PR_SET_PDEATHSIG


@dataclass
class Job:
    """One run of a starter and everything it starts."""

    command: list[str]
    environment: Mapping[str, str]
    folder: Path
    timeout_seconds: float | None = None
    begin: float = field(default_factory=time.monotonic)
    attempt: int = 0
    elastic: bool = False
    log_dir: Path | None = None
    failure_grace_seconds: float = FAILURE_GRACE_SECONDS
    stop_signals: tuple[int, ...] = ()  # in place of the signal that ends the job
    reason: str = ""  # why it failed, in words
    was_ended: bool = False  # by a signal or the time limit
    _ending: list[int] = field(default_factory=list)
    _shared_memory: set[str] = field(default_factory=set)
    _first_deaths: list[Death] = field(default_factory=list)
    _death_time: float = 0.0
    _files_before: set[str] = field(default_factory=leftovers.randomly_named)

    def run(self) -> int:
        """Start, wait, clean up; return the exit code of the job."""
        self._tail = Tail(self.log_dir, self.attempt)
        with self._signals():
            # A session of its own: a Ctrl-C then reaches the job once, through us, and not also from the terminal.
            self.process = subprocess.Popen(
                self.command,
                env=self.environment,
                stdin=subprocess.DEVNULL if os.isatty(0) else None,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
            self._lookout = Lookout(self.folder, self.process.pid)
            try:
                code = self._wait()
            finally:
                self._clean_up()
        self.was_ended |= bool(self._ending)
        return code

    def _wait(self) -> int:
        look = time.monotonic()
        interval = 0.1
        while self._running():
            now = time.monotonic()
            if self._ending:
                self._end(self._ending[0])
                return 128 + self._ending[0]
            if self.timeout_seconds is not None and now - self.begin > self.timeout_seconds:
                say(f"the job passed its limit of {self.timeout_seconds:g} s (--timeout)")
                self.was_ended = True
                self._end(signal.SIGTERM)
                return TIMEOUT_CODE
            if self._failed_for() > self.failure_grace_seconds:
                self._end(signal.SIGTERM, GRACE_SECONDS if self.stop_signals else FAILURE_GRACE_SECONDS)
            if now > look:  # often until MPI is up, seldom after
                self._shared_memory |= leftovers.shared_memory(self._processes())
                interval = 5.0 if self._shared_memory else min(5.0, 1.2 * interval)
                look = now + interval
        if self._ending:
            return 128 + self._ending[0]
        return self._code()

    def _running(self) -> bool:
        self._tail.show()
        deaths = self._lookout.wait(_POLL_SECONDS)
        if deaths and not self._ending:
            self._shared_memory |= leftovers.shared_memory(self._processes())  # the others map what the dead one had
            if self.elastic:
                for death in deaths:
                    say(f"{death.name} {death.explain()}; the others go on")
            elif not self._first_deaths and not marks.failures(self.folder):
                time.sleep(_POLL_SECONDS)  # one that died before may not have ended yet
                deaths = sorted(deaths + self._lookout.wait(0.0), key=lambda death: death.order)
                self._first_deaths = deaths[:1] if deaths[0].order < sys.maxsize else deaths
                self._death_time = time.time()
        return self.process.poll() is None

    def _end(self, signum: int, grace_seconds: float = GRACE_SECONDS) -> None:
        """Ask the starter, wait, then kill what is left of the job on this host."""
        self._shared_memory |= leftovers.shared_memory(self._processes())
        for wanted in self.stop_signals or (signum,):
            self.process.send_signal(wanted)
            until = time.monotonic() + grace_seconds
            num_signals = len(self._ending)
            while self._running() and time.monotonic() < until and len(self._ending) == num_signals:
                pass
        self._kill()

    def _kill(self) -> None:
        for _ in range(20):  # again, for a process may start another before it dies
            alive = self._processes()
            if not alive:
                break
            for process_id in alive:
                try:
                    os.kill(process_id, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            if self.process.poll() is None:
                self.process.wait()
            time.sleep(0.02)

    def _processes(self) -> list[int]:
        return leftovers.processes_marked(f"TORCHMPIRUN_JOB_DIR={self.folder}")

    def _clean_up(self) -> None:
        self._shared_memory |= leftovers.shared_memory(self._processes())
        self._kill()
        for failure in marks.failures(self.folder):
            self._shared_memory.update(failure.held)
        leftovers.remove_shared_memory(self._shared_memory)
        leftovers.remove_randomly_named(self._files_before)
        leftovers.remove_session_folders(self.process.pid)
        self._lookout.close()
        self._tail.show()

    def _failed_for(self) -> float:
        """Seconds since a rank failed or died."""
        times = [failure.when for failure in marks.failures(self.folder)]
        if any(death.status != 0 for death in self._first_deaths):
            times.append(self._death_time)
        return time.time() - min(times) if times else 0.0

    def _code(self) -> int:
        """That of the first rank that failed; else the starter's own, a death by signal in the shell's form."""
        own = self.process.returncode
        code = 128 - own if own < 0 else int(own)
        if self.elastic and code == 0:
            return 0
        failures = marks.failures(self.folder)
        reasons = [f"{death.name} {how}" for death in self._first_deaths if (how := death.explain(code))]
        left = sorted(marks.ranks_running(self.folder))
        if failures:
            first = failures[0]
            code = first.code
            where = "" if self.log_dir is None else f"; its output is in {self.log_dir / f'rank-{first.rank}.log'}"
            after = "after that" if reasons else "first"
            reasons.append(f"rank {first.rank} failed {after}, with exit code {code}{where}")
        elif left and code == 0:
            code = 1
            ranks = f"rank{'s' * (len(left) > 1)} {', '.join(map(str, left))}"
            text = f"{ranks} did not reach the end of the program, though the MPI reports success (os._exit on a rank?)"
            reasons.append(text)
        self.reason = "; ".join(reasons) if code else ""
        return code

    @contextmanager
    def _signals(self) -> Iterator[None]:
        def end(signum: int, _: FrameType | None) -> None:
            self._ending.append(signum)

        def pass_on(signum: int, _: FrameType | None) -> None:
            self.process.send_signal(signum)

        handlers = dict.fromkeys(_ENDING, end) | dict.fromkeys(_PASSED_ON, pass_on)
        before = {}
        for signum, handler in handlers.items():
            if signal.getsignal(signum) is not signal.SIG_IGN:  # nohup, or the background of a script
                before[signum] = signal.signal(signum, handler)
        try:
            yield
        finally:
            for signum, former in before.items():
                signal.signal(signum, former)
