"""Handles of operations that were posted to MPI as nonblocking calls: MPI moves them on while one waits."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from torchmpi_py.errors import CommunicatorError
from torchmpi_py.handles import Handle, Work, lock_timeout

R = TypeVar("R")


class Request(Protocol):
    """What a handle needs of a nonblocking call: mpi4py's Request has it."""

    def Test(self) -> bool: ...  # noqa: N802

    def Wait(self) -> Any: ...  # noqa: N802

    def Cancel(self) -> Any: ...  # noqa: N802


class RequestHandle(Handle[R]):
    """An operation posted to MPI as one or more nonblocking calls."""

    def __init__(self, work: Work[R], requests: Sequence[Request]) -> None:
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
