"""Waits for other processes: pauses instead of busy loops, and the order of memory accesses at a barrier.

Ranks write shared memory before a barrier (of MPI or of flags) and read it after the barrier. A barrier orders the
processes, but not necessarily their memory accesses. On x86 the barrier suffices, because stores become visible in
order and loads run in order. On other machines (ARM, POWER, RISC-V) one *fence* precedes the barrier and another fence
follows it. See docs/decisions/016-memory-ordering.md.
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
_PR_SET_TIMERSLACK = 29  # from linux/prctl.h

KEEPS_ORDER = platform.machine().lower() in ("x86_64", "amd64", "i386", "i686")
"""Whether this machine has total store order."""

active: dict[object, int] = {}
"""The current waits of this process's threads: for each wait, the record number of its operation (``journal.py``).

The wait on a future happens in C++, where Python cannot observe it. So ``Handle.expect`` registers the handle as a
wait."""

limited: dict[object, tuple[int, float]] = {}
"""Waits with a time limit from the program: for each wait, the record number and the limit in seconds. Hang detection
does not report such an operation as late before its limit, even if the timeout of the job is shorter."""

unhurried: dict[object, tuple[int, int]] = {}
"""Waits for ranks that may be late because they are training (``journal.run_while_others_work``): for each wait, the
record number and the number of ranks."""


class Nap:
    """Pauses between two checks of a condition.

    Each pause lasts a ``share`` of the time since ``begin``, and at most ``longest_seconds``. So an event that happens
    soon is detected soon, and a long wait costs almost no processor time. A sleep lasts at least about 60 us, or 10 us
    in a thread that has called ``end_sleeps_in_time``.
    """

    def __init__(self, longest_seconds: float, share: float = 0.1) -> None:
        self._longest_seconds, self._share = longest_seconds, share
        self.begin()

    def begin(self) -> None:
        """Restart the clock after an event, so that the next pauses are short again."""
        self._since = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds since the last call of ``begin``."""
        return time.monotonic() - self._since

    def take(self, at_most_seconds: float | None = None) -> None:
        """Pause once, for at most ``at_most_seconds``; the first pauses only yield the processor."""
        pause = min(at_most_seconds or self._longest_seconds, self.seconds * self._share)
        time.sleep(pause if pause > _WORTH_A_SLEEP_SECONDS else 0)


def end_sleeps_in_time() -> None:
    """Make the sleeps of this thread end when they are due; by default, Linux adds up to 50 us.

    Call this in a thread for which other threads wait. A busy loop cannot replace the sleeps, even if the loop yields.
    On a busy machine the scheduler prefers a thread that wakes from a sleep, and runs a thread in a busy loop last.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1), 0, 0, 0)


def complete(request: MPI.Request, nap: Nap, timeout_seconds: float = math.inf) -> bool:
    """Wait for an MPI request, with the pauses of ``nap``; return whether it completed within ``timeout_seconds``."""
    while not request.Test():
        if nap.seconds > timeout_seconds:
            return False
        nap.take()
    return True


def barrier(comm: MPI.Comm) -> None:
    """Run an MPI barrier without busy waiting; the barrier also orders accesses to memory that the ranks share."""
    fenced(lambda: complete(comm.Ibarrier(), Nap(0.002)))()


def fenced(wait: Callable[[], T]) -> Callable[[], T]:
    """Return a function that calls ``wait``, a barrier of processes, and also orders the processes' memory accesses."""
    if KEEPS_ORDER:
        return wait

    def between_fences() -> T:
        fence()
        returned = wait()
        fence()
        return returned

    return between_fences


def fence() -> None:
    """Order this thread's memory accesses: every access before the call completes before any access after the call."""
    # Python has no fence, so this code locks and unlocks a lock twice. The first unlock is a store-release, the second
    # lock is a load-acquire, and these two cannot be reordered. No earlier access moves past the first unlock, and no
    # later access moves before the second lock.
    lock = threading.Lock()
    for _ in range(2):
        lock.acquire()
        lock.release()
