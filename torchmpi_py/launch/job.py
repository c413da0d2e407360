"""Run the MPI's starter as a job that ends: by itself, by a signal, by its time limit, or by a rank that failed.

The job has a folder, named in TORCHMPIRUN_JOB_DIR. The folder's path in a process's environment marks the process as
the job's, wherever it moved to (a new session, a new parent), so that ending the job ends every process of it and no
other. `wrap` leaves in it how ranks failed.

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
from typing import NamedTuple, TextIO

from torchmpi_py.launch import leftovers

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


def _say(text: str) -> None:
    """To the terminal, if it is still there: the job must be ended in order all the same."""
    try:
        print(f"torchmpirun: {text}", file=sys.stderr, flush=True)
    except BrokenPipeError:
        _silence(sys.stderr)


def _silence(stream: TextIO) -> None:
    """Nobody reads it any more: send it nowhere, also what Python still wants to write when it exits."""
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


class Failure(NamedTuple):
    """How `wrap` tells that a rank failed."""

    when: float
    rank: int
    code: int
    held: list[str]  # shared memory


@dataclass
class Job:
    """One run of a starter and everything it starts."""

    command: list[str]
    environment: Mapping[str, str]
    folder: Path
    timeout_seconds: float | None = None
    elastic: bool = False
    log_dir: Path | None = None
    failure_grace_seconds: float = FAILURE_GRACE_SECONDS
    stop_signals: tuple[int, ...] = ()  # in place of the signal that ends the job
    _ending: list[int] = field(default_factory=list)
    _shared_memory: set[str] = field(default_factory=set)
    _shown_bytes: int = 0
    _files_before: set[str] = field(default_factory=leftovers.randomly_named)

    def run(self) -> int:
        """Start, wait, clean up; return the exit code of the job."""
        if self.log_dir is not None:
            (self.log_dir / "rank-0.log").unlink(missing_ok=True)
        # A session of its own: a Ctrl-C then reaches the job once, through us, and not also from the terminal.
        self.process = subprocess.Popen(
            self.command,
            env=self.environment,
            stdin=subprocess.DEVNULL if os.isatty(0) else None,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
        try:
            with self._signals():
                code = self._wait()
        finally:
            self._clean_up()
        return code

    def _wait(self) -> int:
        begin = time.monotonic()
        look = begin
        interval = 0.1
        while self._running():
            now = time.monotonic()
            if self._ending:
                self._end(self._ending[0])
                return 128 + self._ending[0]
            if self.timeout_seconds is not None and now - begin > self.timeout_seconds:
                _say(f"the job passed its limit of {self.timeout_seconds:g} s (--timeout)")
                self._end(signal.SIGTERM)
                return TIMEOUT_CODE
            if not self.elastic and self._failed_for() > self.failure_grace_seconds:
                self._end(signal.SIGTERM)
            if now > look:  # often until MPI is up, seldom after
                self._shared_memory |= leftovers.shared_memory(self._processes())
                interval = 5.0 if self._shared_memory else min(5.0, 1.2 * interval)
                look = now + interval
        if self._ending:
            return 128 + self._ending[0]
        return self._code()

    def _running(self) -> bool:
        self._show()
        try:
            self.process.wait(_POLL_SECONDS)
        except subprocess.TimeoutExpired:
            return True
        return False

    def _end(self, signum: int) -> None:
        """Ask the starter, wait, then kill what is left of the job on this host."""
        self._shared_memory |= leftovers.shared_memory(self._processes())
        for wanted in self.stop_signals or (signum,):
            self.process.send_signal(wanted)
            until = time.monotonic() + GRACE_SECONDS
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
        for failure in self._failures():
            self._shared_memory.update(failure.held)
        leftovers.remove_shared_memory(self._shared_memory)
        leftovers.remove_randomly_named(self._files_before)
        leftovers.remove_session_folders(self.process.pid)
        self._show()

    def _failures(self) -> list[Failure]:
        """The ranks that failed, in order of time."""
        failures = []
        for path in self.folder.glob("failed-*"):
            first, *held = path.read_text().splitlines()
            when, code = first.split()
            failures.append(Failure(float(when), int(path.name.removeprefix("failed-")), int(code), held))
        return sorted(failures)

    def _failed_for(self) -> float:
        failures = self._failures()
        return time.time() - failures[0].when if failures else 0.0

    def _code(self) -> int:
        """That of the first rank that failed; else the starter's own, a death by signal in the shell's form."""
        own = self.process.returncode
        failures = self._failures()
        if failures and not (self.elastic and own == 0):
            first = failures[0]
            where = "" if self.log_dir is None else f"; its output is in {self.log_dir / f'rank-{first.rank}.log'}"
            _say(f"rank {first.rank} failed first, with exit code {first.code}{where}")
            return first.code
        left = sorted(int(path.name.removeprefix("running-")) for path in self.folder.glob("running-*"))
        if own == 0 and left and not self.elastic:
            ranks = f"rank{'s' * (len(left) > 1)} {', '.join(map(str, left))}"
            _say(f"{ranks} did not reach the end of the program, though the MPI reports success (os._exit on a rank?)")
            return 1
        return 128 - own if own < 0 else int(own)

    def _show(self) -> None:
        """Copy to the terminal what rank 0 has added to its log, until nobody reads it any more."""
        if self.log_dir is None or sys.stdout is None or not (self.log_dir / "rank-0.log").exists():
            return
        with (self.log_dir / "rank-0.log").open("rb") as log:
            log.seek(self._shown_bytes)
            added = log.read()
        if added:
            self._shown_bytes += len(added)
            try:
                sys.stdout.buffer.write(added)
                sys.stdout.buffer.flush()
            except BrokenPipeError:
                _silence(sys.stdout)

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
