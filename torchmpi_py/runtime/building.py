"""Hang detection while the ranks build a session together: in ``start``, and in a recovery from a death.

The watchdog is itself a part of the session, and it watches only operations. A rank may hang outside of any operation:
before the watchdog runs, or in a user's function that ``start`` calls. So after the timeout (at least two minutes) this
module reports where the ranks are, and then ends the job, unless ``Tuning.at_deadline`` is "report". Until the watchdog
runs, a thread of this module provides this rank's stacks to the reporting rank.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from torchmpi_py.core import status_board
from torchmpi_py.core.config import Tuning
from torchmpi_py.core.mpi_api import MPI
from torchmpi_py.core.status_board import CLAIMED_LATE
from torchmpi_py.watch import abort, job_reports, reports, stacks, watchdog

_LEAST_SECONDS = 120.0  # long enough for the user's functions, and for trials of GPUs, which may take a minute
_GIVE_SECONDS = 0.1


@contextlib.contextmanager
def watched(what: str, tuning: Tuning) -> Iterator[None]:
    """Watch a ``with`` block in which the ranks build a session together; ``what`` describes the block in reports."""
    if tuning.deadline_seconds == 0 or MPI.COMM_WORLD.size == 1:
        yield
        return
    watch = _Construction(what, max(tuning.deadline_seconds, _LEAST_SECONDS), tuning.at_deadline != "report")
    threading.Thread(target=watch.run, name="torchmpi_py-building", daemon=True).start()
    try:
        yield
    finally:
        watch.over.set()


class _Construction:
    def __init__(self, what: str, seconds: float, ends: bool) -> None:
        self._why = f"{what} is not complete after {seconds:g} s"
        self._seconds, self._ends, self.over = seconds, ends, threading.Event()
        self._has_reported = False

    def run(self) -> None:
        """Report where the ranks are if the block exceeds the timeout, and then end the job if ``_ends`` is True."""
        ages = watchdog.Ages(time.monotonic())
        # A collective inside the block starts later than the block, so its own timeout also ends later. Let the
        # collective raise its error first.
        while ages.seconds.get(0, 0.0) < self._seconds + job_reports.RAISE_SECONDS:
            if self._is_over_within(_GIVE_SECONDS):
                return
            ages.look([0], time.monotonic())
        patience_seconds = job_reports.OTHERS_END_SECONDS
        try:
            patience_seconds = self._report()
        finally:
            if self._ends:
                self._end(patience_seconds)

    def _report(self) -> float:
        """Report where the ranks are, unless another rank does; return the seconds to wait before ending the job."""
        board = status_board.current
        self._has_reported = board is None or watchdog.claim(board, CLAIMED_LATE)
        if not self._has_reported:
            return job_reports.OTHERS_END_SECONDS
        if board is None:  # Without a board each rank reports for itself.
            watchdog.print_to_stderr(f"torchmpi_py: {self._why}. Rank {MPI.COMM_WORLD.rank} runs:\n{stacks.text()}")
            return job_reports.OTHERS_REPORT_SECONDS
        report = reports.of_node(board, self._why, silent=stacks.gather(board, self.over.is_set))
        return watchdog.tell_late(board, report, ends=self._ends)

    def _end(self, patience_seconds: float) -> None:
        """End the job after ``patience_seconds``. If the block ends first, withdraw this rank's report instead."""
        if not self._is_over_within(patience_seconds):
            abort.abort(abort.EXIT_CODE, self._why)
        elif self._has_reported:
            watchdog.withdraw()

    def _is_over_within(self, seconds: float) -> bool:
        """Wait for the end of the block; return whether the block has ended within ``seconds``.

        During the wait, provide this rank's stacks to ranks that request them.
        """
        until = time.monotonic() + seconds
        while not self.over.wait(max(0.0, min(_GIVE_SECONDS, until - time.monotonic()))):
            if (board := status_board.current) is not None:
                with contextlib.suppress(Exception):  # A recovery may remove the board.
                    stacks.give(board)
            if time.monotonic() >= until:
                return False
        return True
