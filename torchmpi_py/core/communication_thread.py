"""The communication thread: it carries out asynchronous operations, and holds posted ones until they are complete."""

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
    """An object with operations of its own under way, which end with those of a thread."""

    def drain(self) -> None: ...

    def close(self) -> None: ...


class CommunicationThread:
    """A queue of operations, carried out one after the other in the order of launch, which is equal on all ranks.

    With ``inline`` (an MPI without MPI_THREAD_MULTIPLE) the launching thread does it, before the launch returns.
    """

    def __init__(self, *, inline: bool, name: str = "communication") -> None:
        self.inline = inline
        self._name = f"torchmpi_py-{name}"
        self._queue: queue.SimpleQueue[ThreadHandle[Any] | None] = queue.SimpleQueue()
        self._posted: dict[int, RequestHandle[Any]] = {}
        self._to_look_at: Iterator[int] = iter(())  # of those posted: keys
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._companions: list[Companion] = []
        self._last_entry: Entry | None = None  # of the operation that was queued last
        self.is_stuck = False  # in an operation that no thread waits for any more: drain and close do not wait either
        self.streams: dict[Any, Any] = {}  # the stream of its operations, by device

    def submit(self, work: Work[R]) -> Handle[R]:
        """Queue an operation."""
        return self.enqueue(ThreadHandle(work), work.entry)

    def enqueue(self, handle: ThreadHandle[R], entry: Entry | None) -> Handle[R]:
        """Queue the operation of ``handle``, which has this ``entry``."""
        self._last_entry = entry
        if self.inline:
            with handle._waited_for():
                handle.execute()
        else:
            self._ensure_thread()
            self._queue.put(handle)
        return handle

    def keep(self, handle: RequestHandle[R]) -> Handle[R]:
        """Hold a posted operation until it is complete, also when its handle is dropped."""
        handle.stay_in(self._posted)
        with self._lock:
            # A dropped handle is let go here, as no thread waits for it: two looks a launch keep the table short.
            keys = list(itertools.islice(self._to_look_at, 2))
            if not keys:
                self._to_look_at = iter(list(self._posted))  # a copy: threads that wait take out what is complete
            for key in keys:
                if (posted := self._posted.get(key)) is not None:
                    posted.done()
        return handle

    def beside(self, name: str) -> CommunicationThread:
        """Another thread, for operations that must not wait for this one's; it is drained and closed with this one."""
        other = CommunicationThread(inline=self.inline, name=name)
        self.add_companion(other)
        return other

    def add_companion(self, other: Companion) -> None:
        """Drain and close ``other`` with this thread."""
        self._companions.append(other)

    def remove_companion(self, other: Companion) -> None:
        """Undo ``add_companion`` or ``beside``; no effect the second time."""
        if other in self._companions:
            self._companions.remove(other)

    def carry_out_until(self, is_done: Callable[[], bool]) -> None:
        """From within an operation in this thread: carry out the operations behind it, until ``is_done``."""
        while not is_done():
            if (handle := self._queue.get()) is None:
                self._queue.put(None)  # the end, which is for the thread's loop
                return
            handle.execute()

    def is_drained_within(self, seconds: float) -> bool:
        """Wait at most ``seconds`` for the queue; whether all of it is complete."""
        return self._thread is None or self._submit_end_mark()._complete_within(seconds)

    def _submit_end_mark(self) -> Handle[None]:
        return self.submit(_EndMark(self._last_entry))

    def drain(self, comms: Container[object] | None = None) -> None:
        """Block until all launched operations are complete; warn when that takes long. Errors stay with handles.

        With ``comms`` messages of other communicators may stay open: their counterparts may come later.
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
        """Drain, and end the thread."""
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
            del handle  # or the last operation's buffers would live until the next one


def _wait_audibly(handle: Handle[Any]) -> None:
    if not handle._complete(DRAIN_WARNING_SECONDS):
        logger.warning("waiting for %r; has every rank called its counterpart?", handle)
        handle._complete(None)


class _EndMark(Work[None]):
    """The operation behind the last one of the queue. A wait for this one is a wait for ``entry``, that of the last."""

    label = "the operations in the communication thread"

    def __init__(self, entry: Entry | None) -> None:
        self.entry = entry

    def run(self, in_background: bool = False) -> None:
        return None


_stuck: list[threading.Thread] = []  # threads that ``close`` did not wait for


def are_over() -> bool:
    """Whether no thread is in an operation any more. Gives each stuck thread a last second to end."""
    for thread in _stuck:
        thread.join(_STUCK_SECONDS)
    return not any(thread.is_alive() for thread in _stuck)


current_thread: CommunicationThread | None = None
"""The communication thread of the session; a session alone assigns it, and ``exits`` in a forked child."""


def current() -> CommunicationThread:
    """The communication thread of this process."""
    assert current_thread is not None, "operations are launched between start and stop"
    return current_thread


def is_installed() -> bool:
    """Whether there is a communication thread."""
    return current_thread is not None
