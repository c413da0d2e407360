"""Waiting without a busy processor, for what cannot wake the one who waits: a message, a request of MPI."""

from __future__ import annotations

import math
import time

from torchmpi_py.core import fences
from torchmpi_py.core.mpi_api import MPI

_WORTH_A_SLEEP_SECONDS = 20e-6

active: dict[object, int] = {}
"""What threads of this process wait for now: of each wait, the number of the record of its operation (``watch.py``).

Where the wait itself is out of sight, as C++'s for a future is, the handle stands for it (``Handle.expect``)."""

unhurried: dict[object, tuple[int, int]] = {}
"""Waits for ranks that may come as late as they want while they work (``watch.while_others_work``): the number of the
record, and of how many ranks."""


class Nap:
    """Pauses between one look and the next: a tenth of the time since ``begin``, at most ``longest_seconds``.

    So what comes soon is seen soon, and what takes long costs next to nothing.
    """

    def __init__(self, longest_seconds: float) -> None:
        self._longest_seconds = longest_seconds
        self.begin()

    def begin(self) -> None:
        """Something happened: look often again."""
        self._since = time.monotonic()

    @property
    def seconds(self) -> float:
        """The time since ``begin``."""
        return time.monotonic() - self._since

    def take(self, at_most_seconds: float | None = None) -> None:
        """Pause; the first pauses only give way."""
        pause = min(at_most_seconds or self._longest_seconds, self.seconds / 10)
        time.sleep(pause if pause > _WORTH_A_SLEEP_SECONDS else 0)


def complete(request: MPI.Request, nap: Nap, timeout_seconds: float = math.inf) -> bool:
    """Wait for a request of MPI, in naps, at most so long; whether it is complete."""
    while not request.Test():
        if nap.seconds > timeout_seconds:
            return False
        nap.take()
    return True


def barrier(comm: MPI.Comm, longest_seconds: float = 0.002) -> None:
    """An MPI barrier in which nobody spins; memory that the ranks share is ordered by it."""
    fences.around(lambda: complete(comm.Ibarrier(), Nap(longest_seconds)))()
