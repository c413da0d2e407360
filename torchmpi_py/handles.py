"""Wait handles, and the communication thread behind most of them.

A handle is one operation under way. It owns the operation, and with it every buffer, until the operation is complete:
the communication thread or the list of posted requests refers to the handle, so that dropping one is safe. Two kinds:

ThreadHandle    the operation runs in the communication thread, on duplicates of the communicators, in order of launch
RequestHandle   the operation was posted to MPI as a nonblocking call; MPI moves it forward when it is waited for
"""

from __future__ import annotations

import collections
import logging
import math
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from torchmpi_py.errors import CollectiveTimeout

if TYPE_CHECKING:
    from mpi4py import MPI

logger = logging.getLogger("torchmpi_py")
R_co = TypeVar("R_co", covariant=True)
R = TypeVar("R")


class Work(Protocol[R_co]):
    """What a handle needs of an operation: how to carry it out in the background, and how to finish a posted one."""

    def run_in_background(self) -> R_co:
        """Carry out the operation on the background duplicate of its communicator; return its result."""

    def finish(self) -> R_co:
        """What is left to do once the transfer is complete (conversions, copies out); return the result."""

    def explain(self, error: RuntimeError) -> Exception:
        """An error of MPI in the operation's own words."""


class Handle(ABC, Generic[R]):
    """One operation under way. ``wait()`` returns its result, ``done()`` asks, ``synchronize()`` blocks the host.

    Any number of waits give the same result, or raise the same error. For CPU tensors ``wait`` and ``synchronize`` both
    block until the result is there.
    """

    def __init__(self, work: Work[R]) -> None:
        self._work: Work[R] | None = work  # keeps every buffer alive until the operation is complete
        self._name = str(work)
        self._result: R | None = None
        self._error: BaseException | None = None
        self._error_was_seen = False

    @abstractmethod
    def _complete(self, timeout_seconds: float | None) -> bool:
        """Wait for completion, at most so long (None: for ever; 0: only look). Return whether it is complete."""

    def done(self) -> bool:
        """Whether the operation is complete, with a result or an error; never blocks."""
        return self._complete(0)

    def wait(self, timeout_seconds: float | None = None) -> R:
        """Block until the operation is complete and return its result (the output tensor, or the number).

        Raises what the operation raised, or CollectiveTimeout when it is not complete after ``timeout_seconds``; it
        then goes on, and may be waited for again.
        """
        if not self._complete(timeout_seconds):
            raise CollectiveTimeout(
                f"{self._name} is not complete after {timeout_seconds} s; it goes on, wait again for its result. "
                "Has every rank launched it?"
            )
        if self._error is not None:
            self._error_was_seen = True
            raise self._error
        return self._result  # type: ignore[return-value]

    def synchronize(self) -> None:
        """Block the host until the operation is complete."""
        self.wait()

    def _settle(self, step: Callable[[], R]) -> None:
        """Run the operation's last step, keep its result or error, and let the buffers go."""
        try:
            self._result = step()
        except BaseException as error:
            self._error = error
        self._work = None

    def __bool__(self) -> bool:
        raise TypeError("a handle is neither true nor false; use handle.done() or handle.wait()")

    def __repr__(self) -> str:
        state = "under way" if self._work is not None else "failed" if self._error is not None else "complete"
        return f"<Handle {self._name}: {state}>"

    def __del__(self) -> None:
        if getattr(self, "_error", None) is not None and not self._error_was_seen:
            logger.error("%s failed, and nobody waited for it: %r", self._name, self._error)


class ThreadHandle(Handle[R]):
    """An operation in the queue of the communication thread."""

    def __init__(self, work: Work[R]) -> None:
        super().__init__(work)
        self._open = threading.Lock()
        self._open.acquire()

    def _execute(self) -> None:
        assert self._work is not None
        self._settle(self._work.run_in_background)
        self._open.release()

    def _complete(self, timeout_seconds: float | None) -> bool:
        if not self._open.acquire(timeout=-1 if timeout_seconds is None else max(0.0, timeout_seconds)):
            return False
        self._open.release()
        return True


class RequestHandle(Handle[R]):
    """An operation posted to MPI as one or more nonblocking calls."""

    def __init__(self, work: Work[R], requests: list[MPI.Request]) -> None:
        super().__init__(work)
        self._requests = requests
        self._lock = threading.Lock()

    def _complete(self, timeout_seconds: float | None) -> bool:
        deadline = math.inf if timeout_seconds is None else time.monotonic() + timeout_seconds
        if not self._lock.acquire(timeout=-1 if timeout_seconds is None else max(0.0, timeout_seconds)):
            return False  # another thread is waiting for it
        try:
            while self._work is not None:
                self._advance(self._work, wait=timeout_seconds is None)
                if self._work is not None and time.monotonic() >= deadline:
                    return False
            return True
        finally:
            self._lock.release()

    def _advance(self, work: Work[R], *, wait: bool) -> None:
        """Let MPI move the transfer forward; settle the operation when it is complete, or has failed."""
        try:
            while self._requests:
                if wait:
                    self._requests[-1].Wait()
                elif not self._requests[-1].Test():
                    time.sleep(0)
                    return
                self._requests.pop()
        except RuntimeError as error:
            self._error, self._work = work.explain(error), None
            return
        self._settle(work.finish)


class CommunicationThread:
    """Carries out operations one after the other, in the order of their launch, which is the same on every rank.

    With ``inline`` (an MPI without MPI_THREAD_MULTIPLE) the launching thread does it, before the launch returns.
    """

    def __init__(self, *, inline: bool) -> None:
        self.inline = inline
        self._queue: queue.SimpleQueue[ThreadHandle[Any] | None] = queue.SimpleQueue()
        self._posted: collections.deque[RequestHandle[Any]] = collections.deque()
        self._thread: threading.Thread | None = None

    def submit(self, work: Work[R]) -> Handle[R]:
        """Queue an operation."""
        handle = ThreadHandle(work)
        if self.inline:
            handle._execute()
        else:
            self._ensure_thread()
            self._queue.put(handle)
        return handle

    def keep(self, handle: RequestHandle[R]) -> Handle[R]:
        """Hold a posted operation until it is complete, also when its handle is dropped."""
        while self._posted and self._posted[0].done():
            self._posted.popleft()
        self._posted.append(handle)
        return handle

    def drain(self) -> None:
        """Block until everything launched so far is complete. Errors stay with their handles."""
        while self._posted:
            self._posted.popleft()._complete(None)
        if self._thread is not None:
            self.submit(_Nothing())._complete(None)

    def close(self) -> None:
        """Drain, and end the thread."""
        self.drain()
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def _ensure_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="torchmpi_py-communication", daemon=True)
            self._thread.start()

    def _loop(self) -> None:
        while (handle := self._queue.get()) is not None:
            handle._execute()
            del handle  # or the last operation's buffers would live until the next one


class _Nothing:
    """The operation that marks the end of the queue."""

    def run_in_background(self) -> None:
        return None

    finish = run_in_background

    def explain(self, error: RuntimeError) -> Exception:
        return error


_thread: CommunicationThread | None = None


def install(thread: CommunicationThread | None) -> None:
    """Make ``thread`` the one that operations are launched on."""
    global _thread
    _thread = thread


def communication_thread() -> CommunicationThread:
    """The communication thread of this process."""
    assert _thread is not None, "operations are launched after start() has installed the communication thread"
    return _thread


def wait_all(handles: Iterable[Handle[Any]]) -> list[Any]:
    """Wait for every handle, in order, and return their results; then raise the first error, if there was one.

    The error carries a note that says how many more operations failed.
    """
    results, errors = [], []
    for handle in handles:
        try:
            results.append(handle.wait())
        except Exception as error:
            errors.append(error)
    if errors:
        first = errors[0]
        if len(errors) > 1 and hasattr(first, "add_note"):  # Python 3.11
            first.add_note(f"{len(errors) - 1} more of the operations waited for failed")
        raise first
    return results
