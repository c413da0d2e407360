"""What torch.distributed gets for a call: a ``Work``, and the call itself behind it.

A *call* is one or more operations of the package, one after another, and what concludes them. It is *under way* from
when it is queued until that is done, and is held by the queue, so that its ``Work`` may be dropped.
"""

from __future__ import annotations

import datetime as dt
import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed

from torchmpi_py.collectives.operation import Operation
from torchmpi_py.errors import CollectiveTimeout
from torchmpi_py.handles import Handle
from torchmpi_py.torch_backend import futures


class TimedOut(CollectiveTimeout, distributed.DistBackendError):
    """A collective of a process group was not complete within the group's timeout."""


class Call:
    """Operations that are carried out one after another; then ``conclude``, and ``results`` are there."""

    def __init__(
        self,
        operations: Sequence[Operation[Any]],
        results: list[Tensor],
        conclude: Callable[[], object] | None = None,
    ) -> None:
        self.operations = operations
        self.results = results
        self._conclusions = [conclude] if conclude is not None else []
        self.device = operations[0].device if operations else None
        self._lock = threading.Lock()
        self._is_over = False
        self._when_over: Callable[[], None] | None = None

    @property
    def label(self) -> object:
        """What to call it."""
        return self.operations[0].label if self.operations else "a call of torch.distributed"

    @property
    def noted(self) -> Any:
        """What the first operation was noted as."""
        return self.operations[0].noted if self.operations else None

    @property
    def tensors(self) -> Iterable[Tensor]:
        """All that its operations read and write."""
        return (x for operation in self.operations for x in operation.tensors)

    def run(self, *, in_background: bool = False) -> list[Tensor]:
        """Carry it out; on the background channel, if it comes from a callback."""
        for operation in self.operations:
            operation.run(in_background)
        for conclude in self._conclusions:
            conclude()
        return self.results

    def run_in_background(self) -> list[Tensor]:
        """The same, as a handle calls it."""
        return self.run()

    def afterwards(self, step: Callable[[], object]) -> None:
        """Conclude it with ``step`` too."""
        self._conclusions.append(step)

    def is_over(self) -> None:
        """It is complete, or has failed: do what was to be done then."""
        with self._lock:
            self._is_over = True
        if self._when_over is not None:
            self._when_over()

    def when_over(self, step: Callable[[], None]) -> None:
        """Run ``step`` when the call is over, once, or now."""
        with self._lock:
            if not self._is_over:
                self._when_over = step
                return
        step()

    def finish(self) -> list[Tensor]:
        """Nothing of it is posted."""
        return self.results

    def explain(self, error: Exception) -> Exception:
        """Its operations have done so."""
        return error

    def who_is_late(self) -> str:
        """Which ranks have not come to its first operation."""
        return self.operations[0].who_is_late() if self.operations else ""


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

    ``seconds``: after so long ``wait`` gives up (None: never); the call goes on.
    """

    def __init__(
        self,
        handle: Handle[Any],
        results: list[Tensor],
        seconds: float | None,
        when_over: Callable[[Callable[[], None]], None],
        when_late: Callable[[bool], object],
        before_wait: Callable[[Handle[Any]], object],
    ) -> None:
        super().__init__()
        self._handle, self._results, self._seconds = handle, results, seconds
        self._when_over, self._when_late = when_over, when_late
        self._before_wait = functools.partial(before_wait, handle)
        self._lock = threading.Lock()
        self._made: futures.CallFuture | None = None

    def wait(self, timeout: dt.timedelta | None = None) -> bool:
        """Block until it is complete, at most so long (default: the group's timeout)."""
        given = 0.0 if timeout is None else timeout.total_seconds()
        seconds = given if given > 0 else self._seconds
        self._before_wait()
        try:
            self._handle.wait(seconds)
        except CollectiveTimeout as error:
            self._handle.give_up()
            self._when_late(True)
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
        """A future of the tensors."""
        with self._lock:
            if self._made is not None:
                return self._made
            self._made = future = futures.of(self._results, self._before_wait)
        self._when_over(functools.partial(_complete, future, self._handle, self._results))
        return future


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
        return torch.futures.collect_all([work.get_future() for work in self._works])


def _complete(future: futures.CallFuture, handle: Handle[Any], results: list[Tensor]) -> None:
    with futures.callbacks():
        try:
            handle.wait()
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_result(results)
