"""Signals: what comes to torchmpirun from outside, and what of it goes on to the ranks of this host.

Ctrl-C, SIGTERM and SIGHUP end the job, and so does the death of torchmpirun's parent (a batch script's shell, an ssh
session), which counts as a SIGHUP. torchmpirun survives that death where it was started to: SIGHUP ignored (nohup),
SIGINT ignored (the background of a script), or as the leader of a session (setsid). SIGINT or SIGTERM, once more, cuts
the ranks' time short.

SIGUSR1 and SIGUSR2 go to the MPI's starter, with ``--groups`` to those of all groups: batch systems announce the end of
an allocation with them, and a program that dies of one, or fails soon after it, would find no time in another attempt.
(A rank that has called ``mpi.start`` takes SIGUSR1 for a question, and lives.)

A signal that asks the job to end goes from torchmpirun to the ranks, and not through the MPI's starter, which would end
them. Only ranks that heed the signal get it: one that SIGTERM would kill has nothing to save, and its death would have
the MPI end the others before their time. Every Python program heeds Ctrl-C: it raises KeyboardInterrupt. SIGHUP goes on
as SIGTERM, for which programs save. Ranks of other hosts get nothing: training with checkpoints passes the request on
(`engine.EndRequests`), and another program there is ended with the job.

A rank that leaves by KeyboardInterrupt or ``sys.exit`` in a job that is asked to end waits to be killed (`wrap`), and
so leaves the others their time. But some of these may wait for that rank in a call of the MPI's library, where Python
runs no handlers, and they would wait in vain. Marks say which ranks Ctrl-C has reached. A handler of the program's
own leaves no mark: there a rank that neither ends nor writes anything for a while counts as waiting.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from types import FrameType

from torchmpi_py.launch import cleanup, exit_marks, proc
from torchmpi_py.launch.terminal import say

SAME_SECONDS = 1.0  # one request: timeout(1) signals the process and its group, systemd sends SIGTERM and SIGHUP
SOON_SECONDS = 30.0  # a failure so soon after a signal that was passed on counts as its effect
PARENT_ENDED = "its parent has ended, and so does the job (nohup or setsid lets it go on)"

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_CUTTING_SHORT = (signal.SIGINT, signal.SIGTERM)  # when the job is being ended already
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)
_POLL_SECONDS = 0.05
_DEADLOCK_SECONDS = 3.0  # how long Ctrl-C may take to reach the first rank
_DEAF_SECONDS = 0.5  # how long a signal may take to reach a program that computes, once another rank has left
_IDLE_SECONDS = 10.0  # how long ranks may write nothing, once another rank has left


class Signals:
    """Within ``with``, signals are kept in place of their effect, for the loops that run a job and start it again."""

    def __init__(self) -> None:
        self.ending: list[int] = []  # those that end the job, in order
        self._to_pass_on: list[int] = []
        self._passed_on: dict[int, float] = {}  # when
        self._before: dict[int, object] = {}
        self._ended_at = 0.0  # the last of `ending`
        self._parent = 0  # 0: its death does not matter

    def __enter__(self) -> "Signals":
        is_to_survive = any(signal.getsignal(each) is signal.SIG_IGN for each in (signal.SIGHUP, signal.SIGINT))
        if not is_to_survive and os.getsid(0) != os.getpid():
            self._parent = os.getppid()
        for signum in (*_ENDING, *_PASSED_ON):
            if signal.getsignal(signum) is not signal.SIG_IGN:  # nohup, or the background of a script
                self._before[signum] = signal.signal(signum, self.receive)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, former in self._before.items():
            signal.signal(signum, former)  # type: ignore[arg-type]

    def receive(self, signum: int, _: FrameType | None = None) -> None:
        """Keep a signal; one that ends the job counts once a second."""
        if signum not in _ENDING:
            self._to_pass_on.append(signum)
            return
        now = time.monotonic()
        if not self.ending or (signum in _CUTTING_SHORT and now - self._ended_at > SAME_SECONDS):
            self.ending.append(signum)
            self._ended_at = now

    def look_at_parent(self) -> None:
        """Take the parent's death for a SIGHUP, unless the job is being ended already."""
        if self._parent and os.getppid() != self._parent and not self.ending:
            self.receive(signal.SIGHUP)
            say(PARENT_ENDED)

    def wait(self, seconds: float, is_over: Callable[[], bool] = lambda: False) -> None:
        """Wait so long, or until ``is_over()``, or until a signal ends the job."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not (self.ending or is_over()):
            time.sleep(_POLL_SECONDS)
            self.look_at_parent()

    def pass_on(self, *processes: "subprocess.Popen[bytes]") -> None:
        """Send starters what came for the ranks; without a starter, drop it."""
        while self._to_pass_on:
            signum = self._to_pass_on.pop(0)
            for process in processes:
                process.send_signal(signum)
                self._passed_on[signum] = time.monotonic()

    def cause(self, code: int) -> int:
        """The signal passed on of which a job died that has just ended with this code, or soon after; else 0."""
        for signum, when in self._passed_on.items():
            if code in (signum, 128 + signum) or time.monotonic() - when < SOON_SECONDS:
                return signum
        return 0


class ForwardedSignal:
    """A signal that asks the ranks of this host to end.

    ``ranks``: the processes of the ranks that get it. ``reason``: why some have no more time.
    """

    def __init__(self, remains: cleanup.Remains, signum: int) -> None:
        self._remains = remains
        self._signum = signal.SIGINT if signum == signal.SIGINT else signal.SIGTERM
        self.reason = ""
        # A rank of an elastic job that has died leaves its mark, and its number may be another process's by now.
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
        """Ranks that have the signal, live, and have not left their program."""
        left = {failure.rank for failure in exit_marks.failures(self._remains.folder)}
        here = exit_marks.ranks_running(self._remains.folder)
        return {rank for rank in self.ranks.keys() - left if rank in here and self._lives(here[rank])}

    def is_over(self) -> bool:
        """Whether the job can be ended: no rank is at work, and some rank has to be ended."""
        left = exit_marks.failures(self._remains.folder)
        at_work = self.unfinished()
        # All are through. The starter ends the job, unless a rank waits to be killed, or never had the signal.
        if not at_work:
            return bool(left) or any(self._lives(process_id) for process_id in self._others)
        has_heard = {rank for rank in self.ranks if exit_marks.is_left(self._remains.folder, f"heard-{rank}")}
        # All that are at work run Python code, in ``finally`` for instance: they have their time.
        if at_work <= has_heard:
            return False
        # Some may wait in MPI for a rank that has left, or for each other.
        times = [failure.when for failure in left if failure.rank in has_heard]
        if self._is_idle(at_work):
            ranks = ", ".join(map(str, sorted(at_work)))
            since = f"{_IDLE_SECONDS:g} s after another rank has left"
            self.reason = f"nothing written, and not ended, {since} (waits in MPI?), so killed: rank {ranks}"
        elif not has_heard and self._is_deadlock():
            self.reason = "no rank answers Ctrl-C (all of them wait in MPI?), so killed"
        return bool(self.reason) or (bool(times) and time.time() - min(times) > _DEAF_SECONDS)

    def _is_idle(self, at_work: set[int]) -> bool:
        """Whether a rank has left, and for a while no other has left or written anything, to a disk or elsewhere."""
        written = {rank: num_written(self.ranks[rank]) for rank in at_work}
        if written != self._written:
            self._written, self._changed = written, time.monotonic()
        has_agreed = exit_marks.code_of_end(self._remains.folder) != 0  # all ranks know, and may take their time
        return len(at_work) < len(self.ranks) and not has_agreed and time.monotonic() - self._changed > _IDLE_SECONDS

    def _is_deadlock(self) -> bool:
        """Whether Ctrl-C, which no rank has heard, would have been heard by one that does not wait in C code."""
        if self._signum != signal.SIGINT or time.monotonic() - self._sent < _DEADLOCK_SECONDS:
            return False
        return not any(exit_marks.is_left(self._remains.folder, f"own-{rank}") for rank in self.ranks)

    def _lives(self, process_id: int) -> bool:
        return self._remains.has(process_id)


def _heeds(process_id: int, signum: int) -> bool:
    """Whether the process has a handler for the signal."""
    return bool(int(proc.field(process_id, "status", "SigCgt"), 16) >> signum - 1 & 1)


def num_written(process_id: int) -> int:
    """Bytes that the process has written, to files and pipes; 0 where that is not known."""
    return int(proc.field(process_id, "io", "wchar"))
