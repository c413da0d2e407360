"""A signal that asks the job to end, passed on to the ranks of this host, and how far they are in ending.

The ranks get it from torchmpirun, and not from the MPI's starter, which would end them. Only ranks that heed it do: one
that SIGTERM would kill has nothing to save, and its death would have the MPI end the others before their time. Ctrl-C
is heeded by every Python program: it raises KeyboardInterrupt. SIGHUP goes on as SIGTERM, for which programs save.

Ranks of other hosts get nothing. What trains with checkpoints tells them (`engine.end_requests`); another program there
is ended with the job.

A rank that leaves by KeyboardInterrupt or ``sys.exit`` in a job that is asked to end waits to be killed (`wrap`), and
so leaves the others their time. But some of these may wait for it in a call of the MPI's library, where Python's
signals are not seen: Ctrl-C has not reached them, and they would wait in vain.
"""

import contextlib
import os
import signal
import time
from pathlib import Path

from torchmpi_py.launch import leftovers, marks

_DEAF_SECONDS = 0.5  # how long a signal may take to reach a program that computes, once another rank has left


class PassedOn:
    """The signal, and ``ranks``, those that have it: their processes."""

    def __init__(self, remains: leftovers.Remains, signum: int) -> None:
        self._remains = remains
        self._signum = signal.SIGINT if signum == signal.SIGINT else signal.SIGTERM
        running = {rank: pid for rank, pid in marks.ranks_running(remains.folder).items() if pid}
        self.ranks = {rank: pid for rank, pid in running.items() if _heeds(pid, self._signum)}
        self._others = [pid for rank, pid in running.items() if rank not in self.ranks]

    def send(self) -> None:
        """Send it."""
        marks.announce_end(self._remains.folder)
        for process_id in self.ranks.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process_id, self._signum)

    def unfinished(self) -> set[int]:
        """Ranks that have it, live, and have not left their program."""
        left = {failure.rank for failure in marks.failures(self._remains.folder)}
        here = marks.ranks_running(self._remains.folder)
        return {rank for rank in self.ranks.keys() - left if rank in here and self._lives(here[rank])}

    def is_over(self) -> bool:
        """Whether the job can be ended: nobody is at work, and some rank is not about to end by itself."""
        left = marks.failures(self._remains.folder)
        at_work = self.unfinished()
        if not at_work:
            return bool(left) or any(self._lives(process_id) for process_id in self._others)
        has_heard = {rank for rank in self.ranks if marks.has_heard(self._remains.folder, rank)}
        times = [failure.when for failure in left if failure.rank in has_heard]
        return bool(times) and time.time() - min(times) > _DEAF_SECONDS and not at_work <= has_heard

    def _lives(self, process_id: int) -> bool:
        return leftovers.is_marked(process_id, self._remains.mark)


def _heeds(process_id: int, signum: int) -> bool:
    """Whether the process has a handler for the signal."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process_id}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> signum - 1 & 1)
    return False
