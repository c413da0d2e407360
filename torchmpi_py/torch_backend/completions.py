"""Threads that complete futures.

What was chained to a future (``.then``) runs in the thread that completes it, and may itself wait for other collectives
(DDP's PowerSGD hook does). So it is neither the thread that carries collectives out, nor one of a fixed number: where
all are busy, there is one more.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

_tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
_lock = threading.Lock()
_num_free = 0  # threads that wait, less the tasks that wait for one


def complete(task: Callable[[], None]) -> None:
    """Run ``task`` soon, in a thread that has nothing else to do."""
    global _num_free
    with _lock:
        _num_free -= 1
        is_short = _num_free < 0
        if is_short:
            _num_free += 1
    _tasks.put(task)
    if is_short:
        threading.Thread(target=_loop, name="torchmpi_py-futures", daemon=True).start()


def _loop() -> None:
    global _num_free
    while True:
        _tasks.get()()
        with _lock:
            _num_free += 1
