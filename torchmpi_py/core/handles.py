"""Work (one or several operations), and the handles through which a program waits for the work.

A handle owns its work, and thereby every buffer of the work, until the work is complete. The communication thread, or
its table of posted requests, refers to the handle, so a program may drop the handle. There are two classes:

- ThreadHandle: the communication thread carries out the work, on duplicates of the communicators, in order of launch.
- RequestHandle: the work was posted to MPI as nonblocking calls. MPI advances the transfer while a thread waits.

Posting avoids the switch to another thread, which would take longer than a small message. Large messages use the
communication thread, because MPI makes no progress on posted calls while Python computes.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

import torch

from torchmpi_py.core import backoff, config, mpi_api
from torchmpi_py.core.journal import Entry
from torchmpi_py.core.mpi_api import MPI
from torchmpi_py.errors import CollectiveTimeout, CommunicatorError, NotStarted, TorchMPIError

logger = logging.getLogger("torchmpi_py")
R = TypeVar("R")
_CANCEL_SECONDS = 1.0  # time within which a waiting thread must notice that its receive was cancelled
_STILL_PENDING = "The operation is still pending: call error.handle.wait(); do not repeat the call."


class Work(Generic[R]):
    """One operation under way, or several operations with one result.

    The default methods suit work without communication. A subclass provides ``label`` and ``run``.
    """

    __slots__ = ()

    entry: Entry | None = None
    """The entry in the journal; with None, neither reports nor timeouts cover the work."""

    @property
    def label(self) -> object:
        """An object whose ``str`` describes the work, even after ``release``; the handle keeps this object."""
        raise NotImplementedError

    def run(self, in_background: bool = False) -> R:
        """Carry out the work and return its result; ``in_background`` is True in a communication thread."""
        raise NotImplementedError

    def finish(self) -> R:
        """Run the steps after the transfer of posted work (conversions, copies out), and return the result."""
        raise NotImplementedError

    def explain(self, error: Exception) -> Exception:
        """Return the error to raise for ``error``, which MPI raised in posted work."""
        return error

    def late_ranks(self) -> str:
        """Return a sentence that lists the ranks that have not called the operation; empty if they are not known."""
        return ""

    def on_done(self) -> None:
        """Run the steps that are chained to the work.

        The communication thread makes this call once, when waiting threads can already read the result.
        """

    def release(self) -> None:
        """Drop all references to buffers; the handle calls this when the work is complete or has failed."""


class Handle(ABC, Generic[R]):
    """The handle of an operation that an asynchronous call has started.

    ``wait()`` blocks until the operation is complete, and returns the result. ``done()`` returns whether the operation
    is complete, without blocking. Repeated calls of ``wait`` return the same result or raise the same error. A handle
    keeps the tensors of its operation alive, so a program may drop the handle.

    Examples:
        >>> handle = mpi.allreduce_async(torch.ones(2))
        >>> handle.wait().eq(mpi.size()).all().item(), handle.done()
        (True, True)
    """

    to_array: Callable[[Any], R] | None = None  # function that converts the result to an array
    _array: Any = None
    _error: BaseException | None = None
    _error_was_seen = False

    def __init__(self, work: Work[R]) -> None:
        self._work: Work[R] | None = work  # None once the work is complete
        self._label = work.label
        self._result: R | None = None
        self._traceback: TracebackType | None = None
        self._in_inference_mode = torch.is_inference_mode_enabled()  # mode of the launching thread

    @abstractmethod
    def _complete(self, timeout_seconds: float | None) -> bool:
        """Wait until the operation is complete, and return whether it is.

        With a timeout of None, wait without limit; with 0, return immediately.
        """

    def done(self) -> bool:
        """Return whether the operation is complete, with a result or an error; never block.

        Returns:
            True or False.

        Raises:
            NotStarted: this process was forked from the process that started the operation.
        """
        return self._complete(0)

    def wait(self, timeout_seconds: float | None = None) -> R:
        """Block until the operation is complete, and return its result.

        For GPU tensors this call makes the current stream wait, and blocks the host only until the operation is queued.
        To block the host until the GPU has finished, call ``synchronize``.

        Args:
            timeout_seconds (float): limit of the wait in seconds. Default None: no limit, or
                ``Tuning.deadline_seconds`` with ``Tuning.at_deadline="raise"``.

        Returns:
            The result of the collective: a tensor, array, number, or object.

        Raises:
            CollectiveTimeout: the limit passed. The operation is still pending: call ``wait`` again, and do not repeat
                the collective.
            RanksDisagree: the ranks made different calls.
            CommunicatorError: MPI reported an error.
            NotStarted: this process was forked from the process that started the operation.
        """
        if timeout_seconds is None and config.can_raise:
            timeout_seconds = config.current.deadline_seconds
        if not (self._complete(None) if timeout_seconds is None else self._complete_within(timeout_seconds)):
            state = f"{self._label} is not complete after {timeout_seconds:g} s. {_STILL_PENDING}"
            late = CollectiveTimeout(f"{state} {self.who_is_late()}")._of_call(*_call_of(self._label))
            late.handle = self
            raise late
        if self._error is not None:
            self._error_was_seen = True
            raise self._error.with_traceback(self._traceback)  # Otherwise the traceback would grow with every call.
        self._hand_over()
        result: Any = self._result
        if self.to_array is not None:
            result = self._array = self.to_array(result) if self._array is None else self._array
        return result  # type: ignore[no-any-return]

    def _hand_over(self) -> None:
        """Make this thread's later work on the result wait for the operation."""

    def is_settled(self) -> bool:
        """Return whether the host has finished its part of the operation; a GPU may still be working on it."""
        return self._complete(0)

    def who_is_late(self) -> str:
        """Return a sentence that lists the late ranks, or advice if the late ranks are not known."""
        work = self._work
        return (work.late_ranks() if work is not None else "") or "Check that every rank launches this operation."

    def expect(self, limit_seconds: float | None = None) -> None:
        """Register a wait for the operation, until the operation is complete or ``give_up`` is called.

        Callers use this for waits inside torch's C++ code, which we cannot observe. ``limit_seconds`` is the time limit
        of such a wait, like the argument of ``wait``.
        """
        work = self._work
        if work is not None and work.entry is not None and not self._error_was_seen:
            if limit_seconds is not None:
                backoff.limited[self] = work.entry[0], limit_seconds
            backoff.active[self] = work.entry[0]
            if self._work is None:  # Another thread has completed the operation during this call.
                self._end_wait()

    def give_up(self) -> None:
        """Remove the wait that ``expect`` registered: reports skip the operation, and its error is not logged."""
        self._error_was_seen = True
        self._end_wait()

    def on_its_stream(self) -> AbstractContextManager[object]:
        """Return a context in which this thread's GPU work runs on the operation's stream, if there is a stream."""
        return contextlib.nullcontext()

    def synchronize(self) -> None:
        """Block the host until the operation is complete, also on a GPU.

        Raises:
            TorchMPIError: the operation failed; see ``wait`` for the errors.
        """
        self.wait()

    def _check_process(self) -> None:
        """Raise NotStarted in a forked child, unless the operation was complete before the fork."""
        if self._work is not None and mpi_api.is_forked():
            raise NotStarted(
                f"{self._label} was launched before this process was forked; wait for it in the parent process"
            )

    @contextlib.contextmanager
    def _waited_for(self) -> Iterator[None]:
        """Mark, inside a ``with`` block, that a thread waits for the operation, so that reports may list it."""
        self._check_process()
        work, wait = self._work, object()
        if work is not None and work.entry is not None:
            backoff.active[wait] = work.entry[0]
        try:
            yield
        finally:
            backoff.active.pop(wait, None)

    def _complete_within(self, seconds: float) -> bool:
        """Call ``_complete`` with a limit that the program has set; the operation is not late before this limit."""
        work, wait = self._work, object()
        if work is not None and work.entry is not None:
            backoff.limited[wait] = work.entry[0], seconds
        try:
            return self._complete(seconds)
        finally:
            backoff.limited.pop(wait, None)

    def _end_wait(self) -> None:
        """Remove the wait for the operation that ``expect`` has registered."""
        backoff.active.pop(self, None)
        backoff.limited.pop(self, None)

    def _end_with(self, step: Callable[[], R]) -> None:
        """Run the operation's last step, keep its result or error, and release the buffers."""
        try:
            if self._in_inference_mode == torch.is_inference_mode_enabled():
                self._result = step()
            else:
                with torch.inference_mode(self._in_inference_mode):
                    self._result = step()
        except BaseException as error:
            self._error, self._traceback = error, error.__traceback__
        work, self._work = self._work, None
        if work is not None:
            work.release()
        self._end_wait()

    def __bool__(self) -> bool:
        raise TypeError("a handle is neither true nor false; use handle.done() or handle.wait()")

    def __repr__(self) -> str:
        state = "under way" if self._work is not None else "failed" if self._error is not None else "complete"
        return f"<Handle {self._label}: {state}>"

    def __del__(self) -> None:
        if self._error is not None and not self._error_was_seen:
            logger.error("%s failed, and the program never called wait() on its handle: %r", self._label, self._error)


class ThreadHandle(Handle[R]):
    """An operation in the queue of the communication thread."""

    def __init__(self, work: Work[R]) -> None:
        super().__init__(work)
        self._open = threading.Lock()  # held until the operation is complete
        self._open.acquire()
        self._is_over = False

    def execute(self) -> None:
        """Carry out the operation. The communication thread calls this, once."""
        work = self._work
        assert work is not None
        self._end_with(self._run)
        self._is_over = True
        self._open.release()  # Let waiting threads continue before the chained steps run.
        try:
            work.on_done()
        except Exception:  # The communication thread must continue with its other operations.
            logger.exception("a step chained to %s failed", self._label)

    def _run(self) -> R:
        assert self._work is not None
        return self._work.run(True)

    def _complete(self, timeout_seconds: float | None) -> bool:
        if timeout_seconds == 0:
            self._check_process()
        elif not self._is_over:
            with self._waited_for():
                # The lock only makes the thread sleep. The result is ``_is_over``, because ``acquire`` may also fail
                # when another waiting thread briefly holds the lock after the operation is over.
                if self._open.acquire(timeout=lock_timeout(timeout_seconds)):
                    self._open.release()
        return self._is_over


def _call_of(label: object) -> tuple[str | None, Any]:
    """Return (name of the collective, communicator) of an operation whose label is a plan, else (None, None)."""
    return getattr(label, "name", None), getattr(label, "comm", None)


def lock_timeout(seconds: float | None) -> float:
    """Return ``seconds`` (None: no limit) as a timeout for ``Lock.acquire``."""
    return -1 if seconds is None else min(max(0.0, seconds), threading.TIMEOUT_MAX)


def wait_all(handles: Iterable[Handle[Any]]) -> list[Any]:
    """Wait for every handle, in order, and return their results.

    After an error the function still waits for the remaining handles, and then raises the first error. A note on this
    error gives the number of other operations that failed. Other ranks need not wait at the same time, or in the same
    order.

    Args:
        handles (iterable of Handle): handles to wait for.

    Returns:
        The list of results, in the order of ``handles``.

    Raises:
        TorchMPIError: an operation failed; see ``Handle.wait`` for the errors.

    Examples:
        >>> tensors = [torch.ones(2), torch.ones(3)]
        >>> results = mpi.wait_all([mpi.allreduce_async(x) for x in tensors])
        >>> results[1] is tensors[1]
        True
    """
    results, errors = [], []
    for handle in handles:
        try:
            results.append(handle.wait())
        except Exception as error:
            if error is not handle._error and not isinstance(error, CollectiveTimeout):
                raise  # A signal handler raised the error, not the operation.
            errors.append(error)
    if errors:
        first = errors[0]
        if len(errors) > 1 and hasattr(first, "add_note"):  # Python 3.11 added this method.
            first.add_note(f"wait_all: number of other operations that failed: {len(errors) - 1}")
        raise first
    return results


class MpiRequest(Protocol):
    """A nonblocking call with the methods of mpi4py's Request."""

    def Test(self) -> bool: ...  # noqa: N802

    def Wait(self) -> Any: ...  # noqa: N802

    def Cancel(self) -> Any: ...  # noqa: N802


class RequestHandle(Handle[R]):
    """An operation posted to MPI as one or more nonblocking calls.

    Once all ``requests`` are complete, ``last_steps`` runs before the work's own ``finish``.
    """

    def __init__(
        self, work: Work[R], requests: Sequence[MpiRequest], last_steps: Callable[[], object] | None = None
    ) -> None:
        super().__init__(work)
        self._requests = list(requests)
        self._last_steps = last_steps
        self._failure: Exception | None = None
        self._is_cancelled = False
        self._lock = threading.Lock()  # held by the thread that advances the transfer
        self._table: dict[int, RequestHandle[Any]] = {}

    @property
    def comm(self) -> Any:
        """The communicator of the operation; None if it is not known."""
        return _call_of(self._label)[1]

    def stay_in(self, table: dict[int, RequestHandle[Any]]) -> None:
        """Keep this handle in ``table`` until the operation is complete, so that the program may drop the handle."""
        self._table = table
        table[id(self)] = self

    def _complete(self, timeout_seconds: float | None) -> bool:
        if timeout_seconds == 0:
            self._check_process()
            return self._advance_until(0)
        with self._waited_for():
            return self._advance_until(timeout_seconds)

    def _advance_until(self, timeout_seconds: float | None) -> bool:
        """Advance the transfer, one thread at a time; return whether it is complete within ``timeout_seconds``."""
        deadline = math.inf if timeout_seconds is None else time.monotonic() + timeout_seconds
        # Only the main thread may block in MPI. Any other thread could still be in MPI when the main thread finalizes
        # MPI.
        blocks = timeout_seconds is None and threading.current_thread() is threading.main_thread()
        if not self._lock.acquire(timeout=lock_timeout(timeout_seconds)):
            return False  # Another thread is advancing the transfer.
        try:
            while self._work is not None:
                self._advance(self._work, wait=blocks)
                if self._work is None:
                    break
                if self._is_cancelled:
                    self._take_back(self._work)
                elif time.monotonic() >= deadline:
                    return False
                else:
                    time.sleep(0)  # Only yield, because MPI may advance large messages only inside these calls.
            return True
        finally:
            self._lock.release()

    def _advance(self, work: Work[R], *, wait: bool) -> None:
        """Let MPI advance the transfer; end the operation when all requests are complete or have failed."""
        while self._requests:
            try:
                if wait:
                    self._requests[-1].Wait()
                elif not self._requests[-1].Test():
                    return
            # After an error from MPI, the loop still waits for the other requests, because MPI may write into their
            # buffers. An exception from a signal handler is not caught here, so the request stays in the list.
            except (MPI.Exception, TorchMPIError) as error:
                self._failure = self._failure or work.explain(error)
            self._requests.pop()
        self._end_with(self._finish)
        self._last_steps = None
        self._table.pop(id(self), None)

    def _finish(self) -> R:
        assert self._work is not None
        if self._failure is not None:
            raise self._failure
        if self._last_steps is not None:
            self._last_steps()
        return self._work.finish()

    def settle(self) -> None:
        """Block until the operation is complete, without raising its error; reports do not show this wait."""
        self._advance_until(None)

    def cancel(self) -> None:
        """Cancel receives for which no message has arrived; threads that wait for them raise CommunicatorError.

        Receives for which the main thread waits are not cancelled.
        """
        self._is_cancelled = True
        self._advance_until(_CANCEL_SECONDS)

    def _take_back(self, work: Work[R]) -> None:
        """Cancel the requests, and end the operation with an error."""
        cancelled = CommunicatorError(f"{self._label} was cancelled: no message has arrived for it")
        self._failure = cancelled._of_call(*_call_of(self._label))
        for request in self._requests:
            request.Cancel()
        self.give_up()
        self._advance(work, wait=True)
