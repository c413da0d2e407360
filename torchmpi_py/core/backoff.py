"""Waiting for other processes: pauses instead of a busy processor, and the order of memory accesses at a barrier.

Memory that ranks share is written before a barrier, of MPI or of flags, and read after the barrier. A barrier orders
processes, not their memory accesses. On x86 stores become visible in order and loads are carried out in order, so the
barrier suffices. On other machines (ARM, POWER, RISC-V) a *fence* stands before the barrier and one after it. See
docs/decisions/016-memory-ordering.md.
"""

from __future__ import annotations

import ctypes
import math
import platform
import sys
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from torchmpi_py.core.mpi_api import MPI

T = TypeVar("T")
_WORTH_A_SLEEP_SECONDS = 20e-6
_PR_SET_TIMERSLACK = 29  # linux/prctl.h

KEEPS_ORDER = platform.machine().lower() in ("x86_64", "amd64", "i386", "i686")
"""Whether this machine has total store order."""

active: dict[object, int] = {}
"""What threads of this process wait for now: for each wait, the number of the record of its operation (``journal.py``).

A future's wait happens in C++, out of sight: there the handle stands for the wait (``Handle.expect``)."""

limited: dict[object, tuple[int, float]] = {}
"""Waits that the program has given a time limit: the number of the record, and the seconds. Such an operation is not
late before that, whatever the deadline."""

unhurried: dict[object, tuple[int, int]] = {}
"""Waits for ranks that may come late while they work (``journal.run_while_others_work``): the number of the record, and
the number of ranks."""


class Nap:
    """Pauses between one look and the next: a ``share`` of the time since ``begin``, at most ``longest_seconds``.

    So an early event is seen early, and a late one costs next to nothing. A sleep takes some 60 us at least, or 10 in a
    thread that has called ``end_sleeps_in_time``.
    """

    def __init__(self, longest_seconds: float, share: float = 0.1) -> None:
        self._longest_seconds, self._share = longest_seconds, share
        self.begin()

    def begin(self) -> None:
        """Something happened: the next pauses are short again."""
        self._since = time.monotonic()

    @property
    def seconds(self) -> float:
        """The time since ``begin``."""
        return time.monotonic() - self._since

    def take(self, at_most_seconds: float | None = None) -> None:
        """Pause; the first pauses are as short as can be."""
        pause = min(at_most_seconds or self._longest_seconds, self.seconds * self._share)
        time.sleep(pause if pause > _WORTH_A_SLEEP_SECONDS else 0)


def end_sleeps_in_time() -> None:
    """Let the sleeps of this thread end when they are due; on Linux, where they otherwise last up to 50 us longer.

    For a thread on which others wait. To look without a pause, or to yield, is no substitute: on a busy machine such a
    thread comes last, while one that sleeps is preferred when it wakes up.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1), 0, 0, 0)


def complete(request: MPI.Request, nap: Nap, timeout_seconds: float = math.inf) -> bool:
    """Wait for a request of MPI, in naps, at most ``timeout_seconds``; whether the request is complete."""
    while not request.Test():
        if nap.seconds > timeout_seconds:
            return False
        nap.take()
    return True


def barrier(comm: MPI.Comm) -> None:
    """An MPI barrier in which no rank spins; it orders accesses to memory that the ranks share."""
    fenced(lambda: complete(comm.Ibarrier(), Nap(0.002)))()


def fenced(wait: Callable[[], T]) -> Callable[[], T]:
    """``wait``, a barrier of processes, which orders their memory accesses as well."""
    if KEEPS_ORDER:
        return wait

    def between_fences() -> T:
        fence()
        returned = wait()
        fence()
        return returned

    return between_fences


def fence() -> None:
    """All memory accesses of this thread before the call come before all that follow it.

    Python has no fence. The first pair unlocks, a store-release; the second one locks, a load-acquire. Neither passes
    the other, nothing before passes the former, and nothing after passes the latter.
    """
    lock = threading.Lock()
    for _ in range(2):
        lock.acquire()
        lock.release()
