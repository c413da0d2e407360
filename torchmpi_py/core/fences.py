"""Order of memory accesses between processes, on machines that do not keep it.

Memory that ranks share is written before a barrier of MPI and read after it. MPI says that a barrier orders processes,
not their memory accesses. On x86 stores become visible in order and loads are carried out in order, so the barrier's
own suffice. On other machines (ARM, POWER, RISC-V) a *fence* stands before the barrier and one after it. See
docs/decisions/016-memory-ordering.md.
"""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

KEEPS_ORDER = platform.machine().lower() in ("x86_64", "amd64", "i386", "i686")
"""Whether this machine has total store order."""


def fence() -> None:
    """All memory accesses of this thread before the call come before all that follow it.

    Python has no fence. The first pair unlocks, a store-release; the second one locks, a load-acquire. Neither passes
    the other, nothing before passes the former, and nothing after passes the latter.
    """
    lock = threading.Lock()
    for _ in range(2):
        lock.acquire()
        lock.release()


def around(meet: Callable[[], T]) -> Callable[[], T]:
    """``meet``, a barrier of processes, that orders their memory accesses as well."""
    if KEEPS_ORDER:
        return meet

    def fenced() -> T:
        fence()
        met = meet()
        fence()
        return met

    return fenced
