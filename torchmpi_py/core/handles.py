"""Wait handles.

A handle is one operation under way. It owns the operation, and with it every buffer, until the operation is complete:
the communication thread or the list of posted requests refers to the handle, so that dropping one is safe. Two kinds:

ThreadHandle    the operation runs in the communication thread, on duplicates of the communicators, in order of launch
RequestHandle   the operation was posted to MPI as a nonblocking call (``posted.py``)

Handles of operations that were posted to MPI as nonblocking calls: MPI moves them on while one waits.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

import torch

from torchmpi_py.core import backoff, config, mpi_api
from torchmpi_py.errors import CollectiveTimeout, CommunicatorError, NotStarted

logger = logging.getLogger("torchmpi_py")
R_co = TypeVar("R_co", covariant=True)
R = TypeVar("R")


class Work(Protocol[R_co]):
    """What a handle needs of an operation: how to carry it out in the background, and how to finish a posted one."""

    @property
    def label(self) -> object:
        """What to call it: an object whose ``str`` says it, and that does not keep the buffers alive."""

    def run_in_background(self) -> R_co:
        """Carry out the operation on the background duplicate of its communicator; return its result."""

    def finish(self) -> R_co:
        """What is left to do once the transfer is complete (conversions, copies out); return the result."""

    def explain(self, error: Exception) -> Exception:
        """An error of MPI in the operation's own words."""


class Handle(ABC, Generic[R]):
    """One operation under way. ``wait()`` returns its result, ``done()`` asks, ``synchronize()`` blocks the host.

    Any number of waits give the same result, or raise the same error. For CPU tensors ``wait`` and ``synchronize`` both
    block until the result is there.
    """

    def __init__(self, work: Work[R]) -> None:
        self._work: Work[R] | None = work  # keeps every buffer alive until the operation is complete
        self._label = work.label
        self._result: R | None = None
        self._error: BaseException | None = None
        self._traceback: TracebackType | None = None
        self._error_was_seen = False

    @abstractmethod
    def _complete(self, timeout_seconds: float | None) -> bool:
        """Wait for completion, at most so long (None: for ever; 0: only look). Return whether it is complete."""

    def done(self) -> bool:
        """Whether the operation is complete, with a result or an error; never blocks.

        NotStarted in a forked child, unless the operation was complete before the fork.
        """
        return self._complete(0)

    def wait(self, timeout_seconds: float | None = None) -> R:
        """Block until the operation is complete and return its result (the output tensor, or the number).

        Raises what the operation raised, or CollectiveTimeout when it is not complete after ``timeout_seconds``; it
        then goes on, and may be waited for again. Default: for ever, or ``Tuning.deadline_seconds`` where
        ``Tuning.at_deadline`` is "raise".
        """
        if timeout_seconds is None and config.can_raise:
            timeout_seconds = config.current.deadline_seconds
        if not self._complete(timeout_seconds):
            told = f"{self._label} is not complete after {timeout_seconds:g} s; it goes on, wait again for its result"
            raise CollectiveTimeout(f"{told}. {self.who_is_late()}")
        if self._error is not None:
            self._error_was_seen = True
            raise self._error.with_traceback(self._traceback)  # as it was, however often it is raised
        return self._result  # type: ignore[return-value]

    def is_settled(self) -> bool:
        """Whether the host is through with it, as ``done`` for CPU tensors."""
        return self._complete(0)

    def who_is_late(self) -> str:
        """Which ranks have not come to the operation, or a question."""
        return getattr(self._work, "who_is_late", str)() or "Has every rank launched it?"

    def expect(self) -> None:
        """Count the operation as waited for until it is complete or given up: the wait itself is out of sight."""
        entry = getattr(self._work, "entry", None)
        if entry is not None and not self._error_was_seen:
            backoff.active[self] = entry[0]
            if self._work is None:  # it has completed meanwhile
                backoff.active.pop(self, None)

    def give_up(self) -> None:
        """Nobody waits for it any more: it is not late, and if it fails, that need not be told."""
        self._error_was_seen = True
        backoff.active.pop(self, None)

    def synchronize(self) -> None:
        """Block the host until the operation is complete."""
        self.wait()

    @contextlib.contextmanager
    def _waited_for(self, timeout_seconds: float | None) -> Iterator[None]:
        """In this block somebody waits for the operation, and it may be reported as late.

        NotStarted in a forked child, unless it was complete before.
        """
        if mpi_api.is_forked() and self._work is not None:
            raise NotStarted(
                f"{self._label} was launched by the process from which this one was forked; only there can it be "
                "waited for"
            )
        entry = getattr(self._work, "entry", None) if timeout_seconds != 0 else None
        if entry is None:
            yield
            return
        wait = object()
        backoff.active[wait] = entry[0]
        try:
            yield
        finally:
            backoff.active.pop(wait, None)

    def _settle(self, step: Callable[[], R]) -> None:
        """Run the operation's last step, keep its result or error, and let the buffers go."""
        try:
            self._result = step()
        except BaseException as error:
            self._error, self._traceback = error, error.__traceback__
        self._work = None
        backoff.active.pop(self, None)

    def __bool__(self) -> bool:
        raise TypeError("a handle is neither true nor false; use handle.done() or handle.wait()")

    def __repr__(self) -> str:
        state = "under way" if self._work is not None else "failed" if self._error is not None else "complete"
        return f"<Handle {self._label}: {state}>"

    def __del__(self) -> None:
        if getattr(self, "_error", None) is not None and not self._error_was_seen:
            logger.error("%s failed, and nobody waited for it: %r", self._label, self._error)


class ThreadHandle(Handle[R]):
    """An operation in the queue of the communication thread."""

    def __init__(self, work: Work[R]) -> None:
        super().__init__(work)
        self._open = threading.Lock()
        self._open.acquire()
        self._in_inference_mode = torch.is_inference_mode_enabled()  # which belongs to the thread that launches
        self._on_settled: Callable[[], object] | None = getattr(work, "on_settled", None)

    def _execute(self) -> None:
        assert self._work is not None
        with torch.inference_mode() if self._in_inference_mode else contextlib.nullcontext():
            self._settle(self._work.run_in_background)
        self._open.release()
        if self._on_settled is not None:
            self._on_settled()
            self._on_settled = None

    def _complete(self, timeout_seconds: float | None) -> bool:
        with self._waited_for(timeout_seconds):
            if not self._open.acquire(timeout=lock_timeout(timeout_seconds)):
                return False
        self._open.release()
        return True


def lock_timeout(seconds: float | None) -> float:
    """What a lock takes for so long (None: for ever)."""
    return -1 if seconds is None else min(max(0.0, seconds), threading.TIMEOUT_MAX)


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


class MpiRequest(Protocol):
    """What a handle needs of a nonblocking call: mpi4py's Request has it."""

    def Test(self) -> bool: ...  # noqa: N802

    def Wait(self) -> Any: ...  # noqa: N802

    def Cancel(self) -> Any: ...  # noqa: N802


class RequestHandle(Handle[R]):
    """An operation posted to MPI as one or more nonblocking calls."""

    def __init__(self, work: Work[R], requests: Sequence[MpiRequest]) -> None:
        super().__init__(work)
        self._requests = list(requests)
        self._failure: Exception | None = None
        self._lock = threading.Lock()
        self.on_settled: Callable[[], object] = lambda: None

    def _complete(self, timeout_seconds: float | None) -> bool:
        with self._waited_for(timeout_seconds):
            return self._advance_until(timeout_seconds)

    def _advance_until(self, timeout_seconds: float | None) -> bool:
        deadline = math.inf if timeout_seconds is None else time.monotonic() + timeout_seconds
        if not self._lock.acquire(timeout=lock_timeout(timeout_seconds)):
            return False  # another thread is waiting for it
        try:
            while self._work is not None:
                self._advance(self._work, wait=timeout_seconds is None)
                if self._work is not None:
                    if time.monotonic() >= deadline:
                        return False
                    time.sleep(0)
            return True
        finally:
            self._lock.release()

    def _advance(self, work: Work[R], *, wait: bool) -> None:
        """Let MPI move the transfer forward; settle the operation when all requests are complete or have failed."""
        while self._requests:
            try:
                if wait:
                    self._requests[-1].Wait()
                elif not self._requests[-1].Test():
                    return
            except Exception as error:
                self._failure = self._failure or work.explain(error)
            self._requests.pop()
        self._settle(work.finish if self._failure is None else self._fail)
        self.on_settled()

    def cancel(self) -> None:
        """Take receives back that nothing has come for; unless a thread waits for them."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            if self._work is not None and not all(request.Test() for request in self._requests):
                self._failure = CommunicatorError(f"{self._label} was cancelled: nothing has come for it")
                for request in self._requests:
                    request.Cancel()
                self.give_up()
                self._advance(self._work, wait=True)
        finally:
            self._lock.release()

    def _fail(self) -> R:
        assert self._failure is not None
        raise self._failure
