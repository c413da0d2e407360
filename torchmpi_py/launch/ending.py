"""A signal that asks the job to end, passed on to the ranks of this host, and how far they are in ending.

The ranks get it from torchmpirun, and not from the MPI's starter, which would end them. Only ranks that heed it do: one
that SIGTERM would kill has nothing to save, and its death would have the MPI end the others before their time. Ctrl-C
is heeded by every Python program: it raises KeyboardInterrupt. SIGHUP goes on as SIGTERM, for which programs save.

Ranks of other hosts get nothing. What trains with checkpoints tells them (`engine.resume`); another program there
is ended with the job.

A rank that leaves by KeyboardInterrupt or ``sys.exit`` in a job that is asked to end waits to be killed (`wrap`), and
so leaves the others their time. But some of these may wait for it in a call of the MPI's library, where Python's
signals are not seen, and they would wait in vain. Of Ctrl-C is known which ranks it has reached. A handler of the
program's own leaves no mark: there a rank that neither ends nor writes anything for a while counts as waiting.
"""

import contextlib
import os
import signal
import time
from pathlib import Path

from torchmpi_py.launch import cleanup, exit_marks

_DEADLOCK_SECONDS = 3.0  # how long Ctrl-C may take to reach the first rank
_DEAF_SECONDS = 0.5  # how long a signal may take to reach a program that computes, once another rank has left
_IDLE_SECONDS = 10.0  # how long ranks may write nothing, once another rank has left


class PassedOn:
    """The signal, ``ranks``, those that have it: their processes, and ``reason``, why some have no more time."""

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
        """Send it."""
        exit_marks.announce_end(self._remains.folder)
        for process_id in self.ranks.values():
            with contextlib.suppress(OSError):
                if self._lives(process_id):
                    os.kill(process_id, self._signum)
        self._sent = time.monotonic()

    def unfinished(self) -> set[int]:
        """Ranks that have it, live, and have not left their program."""
        left = {failure.rank for failure in exit_marks.failures(self._remains.folder)}
        here = exit_marks.ranks_running(self._remains.folder)
        return {rank for rank in self.ranks.keys() - left if rank in here and self._lives(here[rank])}

    def is_over(self) -> bool:
        """Whether the job can be ended: no rank is at work, and some rank has to be ended."""
        left = exit_marks.failures(self._remains.folder)
        at_work = self.unfinished()
        if not at_work:
            return bool(left) or any(self._lives(process_id) for process_id in self._others)
        has_heard = {rank for rank in self.ranks if exit_marks.has_heard(self._remains.folder, rank)}
        if at_work <= has_heard:
            return False
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
        written = {rank: _num_written(self.ranks[rank]) for rank in at_work}
        if written != self._written:
            self._written, self._changed = written, time.monotonic()
        has_agreed = bool(
            exit_marks.code_of_end(self._remains.folder)
        )  # all know of the request, and may take their time
        return len(at_work) < len(self.ranks) and not has_agreed and time.monotonic() - self._changed > _IDLE_SECONDS

    def _is_deadlock(self) -> bool:
        """Whether Ctrl-C, which no rank has heard, would have been heard by one that does not wait in C code."""
        if self._signum != signal.SIGINT or time.monotonic() - self._sent < _DEADLOCK_SECONDS:
            return False
        return not any(exit_marks.has_own_handler(self._remains.folder, rank) for rank in self.ranks)

    def _lives(self, process_id: int) -> bool:
        return process_id > 0 and cleanup.is_marked(process_id, self._remains.mark)


def _heeds(process_id: int, signum: int) -> bool:
    """Whether the process has a handler for the signal."""
    return bool(int(_field(process_id, "status", "SigCgt"), 16) >> signum - 1 & 1)


def _num_written(process_id: int) -> int:
    """Bytes that the process has written, to files and pipes; 0 where that is not known."""
    return int(_field(process_id, "io", "wchar"))


def _field(process_id: int, file: str, name: str) -> str:
    """The number after ``name:`` in a file that the system has of a process; "0" where that is not known."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process_id}/{file}").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return line.split()[1]
    return "0"
