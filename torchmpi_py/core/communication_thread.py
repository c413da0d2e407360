"""The communication thread: asynchronous operations run in it, and posted ones are held until they are complete."""

from __future__ import annotations

import functools
import itertools
import logging
import queue
import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from torchmpi_py.core.handles import Handle, RequestHandle, ThreadHandle

logger = logging.getLogger("torchmpi_py")
R = TypeVar("R")
DRAIN_WARNING_SECONDS = 20.0


class Companion(Protocol):
    """What has operations of its own under way."""

    def drain(self) -> None: ...

    def close(self) -> None: ...


class CommunicationThread:
    """Carries out operations one after the other, in the order of their launch, which is the same on every rank.

    With ``inline`` (an MPI without MPI_THREAD_MULTIPLE) the launching thread does it, before the launch returns.
    """

    def __init__(self, *, inline: bool, name: str = "communication") -> None:
        self.inline = inline
        self._name = f"torchmpi_py-{name}"
        self._queue: queue.SimpleQueue[ThreadHandle[Any] | None] = queue.SimpleQueue()
        self._posted: dict[int, RequestHandle[Any]] = {}  # oldest first
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._others: list[Companion] = []
        self._last: Any = None  # what the operation that was queued last was noted as
        self.is_stuck = False  # in an operation that nobody waits for any more: neither do drain and close
        self.streams: dict[Any, Any] = {}  # per device, the stream that its operations go to

    def submit(self, work: Any, kind: type[ThreadHandle[R]] = ThreadHandle) -> Handle[R]:
        """Queue an operation; its handle is of a ``kind``."""
        handle = kind(work)
        self._last = getattr(work, "entry", None)
        if self.inline:
            with handle._waited_for(None):
                handle._execute()
        else:
            self._ensure_thread()
            self._queue.put(handle)
        return handle

    def keep(self, handle: RequestHandle[R]) -> Handle[R]:
        """Hold a posted operation until it is complete, also when its handle is dropped."""
        with self._lock:
            for key in list(itertools.islice(self._posted, 2)):  # look at the two that were looked at longest ago
                if (oldest := self._posted.pop(key, None)) is not None and not oldest.done():
                    self._posted[key] = oldest
            self._posted[id(handle)] = handle
            handle.on_settled = functools.partial(self._posted.pop, id(handle), None)
        return handle

    def beside(self, name: str) -> CommunicationThread:
        """Another thread, for operations that must not wait for this one's; it is drained and closed with this one."""
        other = CommunicationThread(inline=self.inline, name=name)
        self.take_along(other)
        return other

    def take_along(self, other: Companion) -> None:
        """Drain and close it with this one."""
        self._others.append(other)

    def let_go(self, other: Companion) -> None:
        """Forget one that is ``beside`` this one, if it is there yet."""
        if other in self._others:
            self._others.remove(other)

    def carry_out_until(self, is_done: Callable[[], bool]) -> None:
        """From within an operation in this thread: carry out those after it, until ``is_done``."""
        while not is_done():
            if (handle := self._queue.get()) is None:
                self._queue.put(None)  # the end, which is for the thread's loop
                return
            handle._execute()

    def settles(self, seconds: float) -> bool:
        """Whether all that is queued is over within so long."""
        return self._thread is None or self.submit(_Nothing(self._last))._complete(seconds)

    def drain(self) -> None:
        """Block until everything launched so far is complete; say so when it takes long. Errors stay with handles."""
        if self.is_stuck:
            return
        for other in list(self._others):
            other.drain()
        while self._posted:
            key, handle = next(iter(self._posted.items()))
            _wait_audibly(handle)
            self._posted.pop(key, None)
        if self._thread is not None:
            _wait_audibly(self.submit(_Nothing(self._last)))

    def close(self) -> None:
        """Drain, and end the thread."""
        self.drain()
        while self._others:
            self._others.pop().close()
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
            handle._execute()
            del handle  # or the last operation's buffers would live until the next one


def _wait_audibly(handle: Handle[Any]) -> None:
    if not handle._complete(DRAIN_WARNING_SECONDS):
        logger.warning("waiting for %r; has every rank called its counterpart?", handle)
        handle._complete(None)


class _Nothing:
    """The operation that marks the end of the queue. Who waits for it waits for the one before it."""

    label = "the operations in the communication thread"

    def __init__(self, entry: Any) -> None:
        self.entry = entry

    def run_in_background(self) -> None:
        return None

    finish = run_in_background

    def explain(self, error: Exception) -> Exception:
        return error


_stuck: list[threading.Thread] = []  # those that were not waited for
_STUCK_SECONDS = 1.0


def are_over() -> bool:
    """Whether none of the threads is in an operation any more; the last chance for those that are stuck."""
    for thread in _stuck:
        thread.join(_STUCK_SECONDS)
    return not any(thread.is_alive() for thread in _stuck)


current_thread: CommunicationThread | None = None
"""The communication thread of the session; a session alone assigns it."""


def current() -> CommunicationThread:
    """The communication thread of this process."""
    assert current_thread is not None, "operations are launched between start and stop"
    return current_thread


def is_installed() -> bool:
    """Whether there is a communication thread."""
    return current_thread is not None
