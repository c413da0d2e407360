"""What torch.distributed gets for a call: a ``Work``, which may be dropped, for the queue holds the call."""

from __future__ import annotations

import datetime as dt
import functools
import threading
from collections.abc import Sequence
from typing import Any

from torch import Tensor, distributed

from torchmpi_py.errors import CollectiveTimeout
from torchmpi_py.handles import Handle
from torchmpi_py.torch_backend import futures
from torchmpi_py.torch_backend.call import Carrier


class TimedOut(CollectiveTimeout, distributed.DistBackendError):
    """A collective of a process group was not complete within the group's timeout."""


class Done(distributed.Work):
    """A call that was carried out at once."""

    def __init__(self, results: list[Tensor]) -> None:
        super().__init__()
        self._results = results

    def wait(self, timeout: dt.timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def synchronize(self) -> None:
        """There is nothing to wait for."""

    def result(self) -> list[Tensor]:
        return self._results

    def get_future(self) -> futures.CallFuture:
        future = futures.of(self._results)
        future.set_result(self._results)
        return future


OVER = Done([])
"""For calls that block: torch.distributed keeps it to itself, and to make one takes a third as long as the verb."""


class Pending(distributed.Work):
    """A call under way, behind a handle of the package. ``wait`` and the future raise what the call raises.

    ``seconds``: after so long they give up (None: never); the call goes on.
    """

    def __init__(self, handle: Handle[Any], results: list[Tensor], seconds: float | None, carrier: Carrier) -> None:
        super().__init__()
        self._handle, self._results, self._seconds, self._carrier = handle, results, seconds, carrier
        self._lock = threading.Lock()
        self._made: futures.CallFuture | None = None

    def wait(self, timeout: dt.timedelta | None = None) -> bool:
        """Block until it is complete, at most so long (default: the group's timeout)."""
        given = 0.0 if timeout is None else timeout.total_seconds()
        seconds = given if given > 0 else self._seconds
        self._carrier.before_wait(self._handle)
        try:
            self._handle.wait(seconds)
        except CollectiveTimeout as error:
            self._handle.give_up()
            self._carrier.when_late()
            raise TimedOut(f"the timeout of {seconds:g} s has passed: {error}") from None
        return True

    def is_completed(self) -> bool:
        return self._handle.done()

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        """What the call has raised, if it is over."""
        if self._handle.done():
            try:
                self._handle.wait()
            except Exception as error:
                return error
        return None

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[Tensor]:
        return self._results

    def get_future(self) -> futures.CallFuture:
        """A future of the tensors. From now on the call counts as waited for (``watch.py``)."""
        with self._lock:
            if self._made is not None:
                return self._made
            before_wait = functools.partial(self._carrier.before_future, self._handle)
            self._made = future = futures.of(self._results, before_wait)
        self._carrier.expect(self._handle)
        completion = _Completion(future, self._handle, self._results)
        self._carrier.when_over(completion.complete)
        if self._seconds is not None:
            completion.expire_after(self._seconds, self._carrier)
        return future


class _Completion:
    """Completes a future, once: when the call is over, or when it is late."""

    def __init__(self, future: futures.CallFuture, handle: Handle[Any], results: list[Tensor]) -> None:
        self._future, self._handle, self._results = future, handle, results
        self._once = threading.Lock()
        self._timer: threading.Timer | None = None

    def complete(self) -> None:
        """The call is over."""
        if not self._once.acquire(blocking=False):
            return
        if self._timer is not None:
            self._timer.cancel()
        try:
            self._handle.wait()
        except Exception as error:
            self._future.set_exception(error)
        else:
            self._future.set_result(self._results)

    def expire_after(self, seconds: float, carrier: Carrier) -> None:
        """After so long, give up."""
        self._timer = threading.Timer(seconds, self._expire, [seconds, carrier])
        self._timer.daemon = True
        self._timer.start()

    def _expire(self, seconds: float, carrier: Carrier) -> None:
        late = self._handle.who_is_late()
        if not self._handle.is_settled() and self._once.acquire(blocking=False):
            self._handle.give_up()
            carrier.when_late()
            self._future.set_exception(TimedOut(f"the timeout of {seconds:g} s has passed: {self._handle!r}. {late}"))


class Several(distributed.Work):
    """Several calls, as one."""

    def __init__(self, works: Sequence[Any]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: dt.timedelta | None = None) -> bool:
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> Exception | None:
        return next(filter(None, (work.exception() for work in self._works)), None)

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[Tensor]:
        return [x for work in self._works for x in work.result()]

    def get_future(self) -> Any:
        return futures.of_all([work.get_future() for work in self._works], self.result())
