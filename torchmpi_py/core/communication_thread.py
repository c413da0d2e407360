"""The communication thread runs asynchronous operations, and keeps posted operations alive until they are complete."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from collections.abc import Callable, Container, Iterator
from typing import Any, Protocol, TypeVar

from torchmpi_py.core.handles import Handle, RequestHandle, ThreadHandle, Work
from torchmpi_py.core.journal import Entry

logger = logging.getLogger("torchmpi_py")
R = TypeVar("R")
DRAIN_WARNING_SECONDS = 20.0
_STUCK_SECONDS = 1.0


class Companion(Protocol):
    """An object that runs operations of its own. It is drained and closed together with a communication thread."""

    def drain(self) -> None: ...

    def close(self) -> None: ...


class CommunicationThread:
    """A queue of operations, and the thread that runs them in the order of their launch.

    The order must be equal on all ranks. With ``inline`` (for an MPI without MPI_THREAD_MULTIPLE) the launching thread
    runs each operation before the launch returns.
    """

    def __init__(self, *, inline: bool, name: str = "communication") -> None:
        self.inline = inline
        self._name = f"torchmpi_py-{name}"
        self._queue: queue.SimpleQueue[ThreadHandle[Any] | None] = queue.SimpleQueue()
        self._posted: dict[int, RequestHandle[Any]] = {}
        self._to_look_at: Iterator[int] = iter(())  # keys of ``_posted`` that ``keep`` has not checked yet
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._companions: list[Companion] = []
        self._last_entry: Entry | None = None  # journal entry of the newest operation in the queue
        # Whether this thread hangs in an operation for which no thread waits any more. If so, drain and close return
        # without waiting.
        self.is_stuck = False
        self.streams: dict[Any, Any] = {}  # the GPU stream of the operations, by device

    def submit(self, work: Work[R]) -> Handle[R]:
        """Queue an operation, and return its handle."""
        return self.enqueue(ThreadHandle(work), work.entry)

    def enqueue(self, handle: ThreadHandle[R], entry: Entry | None) -> Handle[R]:
        """Queue the operation of ``handle``, and return ``handle``; ``entry`` is the operation's journal entry."""
        self._last_entry = entry
        if self.inline:
            with handle._waited_for():
                handle.execute()
        else:
            self._ensure_thread()
            self._queue.put(handle)
        return handle

    def keep(self, handle: RequestHandle[R]) -> Handle[R]:
        """Keep the handle of a posted operation alive until the operation is complete, and return the handle."""
        handle.stay_in(self._posted)
        with self._lock:
            # If the program has dropped a handle, no thread waits for it, so ``done`` completes and removes it here.
            # Two checks per launch keep the table short.
            keys = list(itertools.islice(self._to_look_at, 2))
            if not keys:
                self._to_look_at = iter(list(self._posted))  # A copy, because waiting threads remove complete handles.
            for key in keys:
                if (posted := self._posted.get(key)) is not None:
                    posted.done()
        return handle

    def beside(self, name: str) -> CommunicationThread:
        """Return a new thread for operations that must not wait for this thread's operations.

        The new thread is drained and closed together with this thread.
        """
        other = CommunicationThread(inline=self.inline, name=name)
        self.add_companion(other)
        return other

    def add_companion(self, other: Companion) -> None:
        """Drain and close ``other`` whenever this thread is drained or closed."""
        self._companions.append(other)

    def remove_companion(self, other: Companion) -> None:
        """Undo ``add_companion`` or ``beside``; a second call has no effect."""
        if other in self._companions:
            self._companions.remove(other)

    def carry_out_until(self, is_done: Callable[[], bool]) -> None:
        """Run the next operations in the queue until ``is_done()``; only an operation in this thread may call this."""
        while not is_done():
            if (handle := self._queue.get()) is None:
                self._queue.put(None)  # None ends the thread's loop, so put it back for the loop.
                return
            handle.execute()

    def is_drained_within(self, seconds: float) -> bool:
        """Wait at most ``seconds`` for the operations in the queue; return whether all of them are complete."""
        return self._thread is None or self._submit_end_mark()._complete_within(seconds)

    def _submit_end_mark(self) -> Handle[None]:
        return self.submit(_EndMark(self._last_entry))

    def drain(self, comms: Container[object] | None = None) -> None:
        """Block until all launched operations are complete; log a warning if this takes more than 20 s.

        The handles keep the errors of their operations. With ``comms``, posted operations on other communicators may
        stay incomplete, because other ranks may call the matching operations later.
        """
        if self.is_stuck:
            return
        for other in list(self._companions):
            other.drain()
        while posted := [each for each in list(self._posted.values()) if comms is None or each.comm in comms]:
            for handle in posted:
                _wait_audibly(handle)
                self._posted.pop(id(handle), None)
        if self._thread is not None:
            _wait_audibly(self._submit_end_mark())

    def close(self) -> None:
        """Drain the queue and end the thread. Do not wait for a thread that is stuck."""
        self.drain()
        while self._companions:
            self._companions.pop().close()
        if self._thread is not None:
            self._queue.put(None)
            if self.is_stuck:
                _stuck.append(self._thread)
            else:
                self._thread.join()
            self._thread = None

    def _ensure_thread(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
                self._thread.start()

    def _loop(self) -> None:
        while (handle := self._queue.get()) is not None:
            handle.execute()
            del handle  # Otherwise the last operation's buffers would live until the next operation.


def _wait_audibly(handle: Handle[Any]) -> None:
    if not handle._complete(DRAIN_WARNING_SECONDS):
        logger.warning("waiting for %r; check that every rank calls the matching operation", handle)
        handle._complete(None)


class _EndMark(Work[None]):
    """A mark at the end of the queue; reports show a wait for it as a wait for ``entry``, the last real operation."""

    label = "the operations in the communication thread"

    def __init__(self, entry: Entry | None) -> None:
        self.entry = entry

    def run(self, in_background: bool = False) -> None:
        return None


_stuck: list[threading.Thread] = []  # threads that ``close`` did not wait for


def are_over() -> bool:
    """Wait up to one second for each stuck thread to end; return whether all stuck threads have ended."""
    for thread in _stuck:
        thread.join(_STUCK_SECONDS)
    return not any(thread.is_alive() for thread in _stuck)


current_thread: CommunicationThread | None = None
"""The communication thread of the session. Only a session assigns this variable; in a forked child, ``exits`` does."""


def current() -> CommunicationThread:
    """Return the communication thread of this process."""
    assert current_thread is not None, "operations are launched between start and stop"
    return current_thread


def is_installed() -> bool:
    """Return whether this process has a communication thread."""
    return current_thread is not None
