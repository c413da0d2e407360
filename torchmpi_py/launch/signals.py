"""Signals that torchmpirun receives, and how they reach the ranks of this host.

Ctrl-C, SIGTERM and SIGHUP end the job. So does the death of torchmpirun's parent (a batch script's shell, an ssh
session), which counts as a SIGHUP. The job survives that death in three cases: SIGHUP is ignored (nohup), SIGINT is
ignored (the background of a script), or torchmpirun leads a session (setsid). A second SIGINT or SIGTERM cuts the
ranks' time short.

SIGUSR1 and SIGUSR2 are passed on to mpirun, with ``--groups`` to every group's mpirun. Batch systems announce the end
of an allocation with them. A program that dies of such a signal, or fails soon after it, would have no time in another
attempt. (A rank that has called ``mpi.start`` answers SIGUSR1 with a report, and lives.)

A signal that asks the job to end goes from torchmpirun directly to the ranks. mpirun would not pass it on: it would end
the ranks. Only ranks with a handler for the signal get it. A rank that SIGTERM would kill has nothing to save, and its
death would make the MPI end the other ranks too early. Every Python program handles Ctrl-C: it raises
KeyboardInterrupt. SIGHUP is passed on as SIGTERM, because programs save at SIGTERM. Ranks on other hosts get no signal.
Training with checkpoints passes the request on to them (`engine.EndRequests`); any other program there is ended with
the job.

A rank that leaves by KeyboardInterrupt or ``sys.exit`` in such a job waits until torchmpirun kills it (`wrap`), so that
the other ranks keep their time. But other ranks may be waiting for that rank inside the MPI library, where Python runs
no handlers, and they would wait in vain. Marks show which ranks Ctrl-C has reached. A handler of the program's own
leaves no mark. There a rank counts as waiting if it neither ends nor writes anything for a while.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from types import FrameType

from torchmpi_py.launch import cleanup, exit_marks, proc
from torchmpi_py.launch.terminal import say

# signals within this time are one request: timeout(1) signals the process and its group, systemd sends SIGTERM and
# SIGHUP
SAME_SECONDS = 1.0
SOON_SECONDS = 30.0  # a failure this soon after a signal that was passed on counts as its effect
PARENT_ENDED = "its parent has ended, so the job ends too (to prevent that, start it with nohup or setsid)"

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_CUTTING_SHORT = (signal.SIGINT, signal.SIGTERM)  # signals that count while the job is already ending
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)
_POLL_SECONDS = 0.05
_DEADLOCK_SECONDS = 3.0  # Limit for Ctrl-C to reach the first rank.
_DEAF_SECONDS = 0.5  # Limit for a signal to reach a computing program, once another rank has left.
_IDLE_SECONDS = 10.0  # How long ranks may write nothing once another rank has left.


class Signals:
    """Record signals within ``with`` instead of obeying them, for the loops that run and restart a job."""

    def __init__(self) -> None:
        self.ending: list[int] = []  # signals that end the job, in order
        self._to_pass_on: list[int] = []
        self._passed_on: dict[int, float] = {}  # signal: time at which it was passed on
        self._before: dict[int, object] = {}
        self._ended_at = 0.0  # time of the last signal in `ending`
        self._parent = 0  # process number; 0 if its death does not matter

    def __enter__(self) -> "Signals":
        is_to_survive = any(signal.getsignal(each) is signal.SIG_IGN for each in (signal.SIGHUP, signal.SIGINT))
        if not is_to_survive and os.getsid(0) != os.getpid():
            self._parent = os.getppid()
        for signum in (*_ENDING, *_PASSED_ON):
            # a signal stays ignored under nohup or in the background of a script
            if signal.getsignal(signum) is not signal.SIG_IGN:
                self._before[signum] = signal.signal(signum, self.receive)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, former in self._before.items():
            signal.signal(signum, former)  # type: ignore[arg-type]

    def receive(self, signum: int, _: FrameType | None = None) -> None:
        """Record a signal; a signal that ends the job counts at most once a second."""
        if signum not in _ENDING:
            self._to_pass_on.append(signum)
            return
        now = time.monotonic()
        if not self.ending or (signum in _CUTTING_SHORT and now - self._ended_at > SAME_SECONDS):
            self.ending.append(signum)
            self._ended_at = now

    def look_at_parent(self) -> None:
        """Treat the parent's death as a SIGHUP, unless the job is already ending."""
        if self._parent and os.getppid() != self._parent and not self.ending:
            self.receive(signal.SIGHUP)
            say(PARENT_ENDED)

    def wait(self, seconds: float, is_over: Callable[[], bool] = lambda: False) -> None:
        """Wait for ``seconds``, or until ``is_over()`` is true or a signal ends the job."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not (self.ending or is_over()):
            time.sleep(_POLL_SECONDS)
            self.look_at_parent()

    def pass_on(self, *processes: "subprocess.Popen[bytes]") -> None:
        """Pass the signals for the ranks on to these mpirun processes; without any, drop them."""
        while self._to_pass_on:
            signum = self._to_pass_on.pop(0)
            for process in processes:
                process.send_signal(signum)
                self._passed_on[signum] = time.monotonic()

    def cause(self, code: int) -> int:
        """Return the passed-on signal of which a job died that has just ended with this code; 0 if there is none.

        A job that fails soon after the signal counts too.
        """
        for signum, when in self._passed_on.items():
            if code in (signum, 128 + signum) or time.monotonic() - when < SOON_SECONDS:
                return signum
        return 0


class ForwardedSignal:
    """A signal that asks the ranks of this host to end.

    ``ranks`` are the processes of the ranks that get the signal. ``reason`` says why some ranks get no more time.
    """

    def __init__(self, remains: cleanup.Remains, signum: int) -> None:
        self._remains = remains
        self._signum = signal.SIGINT if signum == signal.SIGINT else signal.SIGTERM
        self.reason = ""
        # A rank of an elastic job that has died leaves its mark behind, and its process number may belong to another
        # process now.
        running = {rank: pid for rank, pid in exit_marks.ranks_running(remains.folder).items() if self._lives(pid)}
        self.ranks = {rank: pid for rank, pid in running.items() if _heeds(pid, self._signum)}
        self._others = [pid for rank, pid in running.items() if rank not in self.ranks]
        self._sent = self._changed = time.monotonic()
        self._written: dict[int, int] = {}

    def send(self) -> None:
        """Send the signal."""
        exit_marks.leave(self._remains.folder, "ending")
        for process_id in self.ranks.values():
            if self._lives(process_id):
                cleanup.send_signal(process_id, self._signum)
        self._sent = time.monotonic()

    def unfinished(self) -> set[int]:
        """Return the ranks that got the signal, live, and have not left their program."""
        ranks_gone = {failure.rank for failure in exit_marks.failures(self._remains.folder)}
        here = exit_marks.ranks_running(self._remains.folder)
        return {rank for rank in self.ranks.keys() - ranks_gone if rank in here and self._lives(here[rank])}

    def is_over(self) -> bool:
        """Return whether the job can be ended: no rank is at work, and some rank must be ended."""
        failures = exit_marks.failures(self._remains.folder)
        at_work = self.unfinished()
        # All ranks have left their programs. mpirun ends the job, unless a rank waits to be killed or never got the
        # signal.
        if not at_work:
            return bool(failures) or any(self._lives(process_id) for process_id in self._others)
        has_heard = {rank for rank in self.ranks if exit_marks.is_left(self._remains.folder, f"heard-{rank}")}
        # Every rank at work runs Python code, in ``finally`` for example, and keeps its time.
        if at_work <= has_heard:
            return False
        # Some ranks may be waiting in MPI for a rank that has left, or for each other.
        times = [failure.when for failure in failures if failure.rank in has_heard]
        if self._is_idle(at_work):
            ranks = ", ".join(map(str, sorted(at_work)))
            since = f"for {_IDLE_SECONDS:g} s after another rank left"
            self.reason = f"killed rank {ranks}: no output and no end {since} (waiting in MPI?)"
        elif not has_heard and self._is_deadlock():
            self.reason = "killed all ranks: none of them answers Ctrl-C (waiting in MPI?)"
        return bool(self.reason) or (bool(times) and time.time() - min(times) > _DEAF_SECONDS)

    def _is_idle(self, at_work: set[int]) -> bool:
        """Return whether a rank has left, and for a while no other rank has left or written anything."""
        written = {rank: num_written(self.ranks[rank]) for rank in at_work}
        if written != self._written:
            self._written, self._changed = written, time.monotonic()
        # then all ranks know of the end, and may take their time
        has_agreed = exit_marks.code_of_end(self._remains.folder) != 0
        return len(at_work) < len(self.ranks) and not has_agreed and time.monotonic() - self._changed > _IDLE_SECONDS

    def _is_deadlock(self) -> bool:
        """Return whether all ranks wait in C code, because Ctrl-C has reached none of them in time."""
        if self._signum != signal.SIGINT or time.monotonic() - self._sent < _DEADLOCK_SECONDS:
            return False
        return not any(exit_marks.is_left(self._remains.folder, f"own-{rank}") for rank in self.ranks)

    def _lives(self, process_id: int) -> bool:
        return self._remains.has(process_id)


def _heeds(process_id: int, signum: int) -> bool:
    """Return whether the process has a handler for the signal."""
    return bool(int(proc.field(process_id, "status", "SigCgt"), 16) >> signum - 1 & 1)


def num_written(process_id: int) -> int:
    """Return how many bytes the process has written to files and pipes; 0 if unknown."""
    return int(proc.field(process_id, "io", "wchar"))
