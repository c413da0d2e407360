"""Futures of calls, and what is chained to them.

What is chained to a future (``.then``) runs where the future is completed: in the thread that carries the group's calls
out, before the next one; or, if the call is over already, in the thread that chains. It may make calls itself, and wait
for them (DDP's PowerSGD hook does). Such a call must not queue behind others, which wait for it, and it may come sooner
or later among the others than on another rank. So calls that are made from a callback are carried out there and then,
on a channel of their own. Among themselves they come in the order of the calls that they are chained to, on all ranks,
as long as the program chains in the order of its calls, and before it waits for later ones. (What is chained to other
futures, such as those of ``torch.futures.collect_all``, makes calls like any other.)

What torch.distributed gets for a call: a ``Work``, which may be dropped, for the queue holds the call.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, distributed

from torchmpi_py.core.handles import Handle
from torchmpi_py.errors import CollectiveTimeout
from torchmpi_py.torch_backend.call_queue import CallRunner

_state = threading.local()


def is_in_callback() -> bool:
    """Whether what runs in this thread was chained to a future."""
    return getattr(_state, "is_in_callback", False)


@contextlib.contextmanager
def _callback() -> Iterator[None]:
    """In this block what is chained to a future runs."""
    former = is_in_callback()
    _state.is_in_callback = True
    try:
        yield
    finally:
        _state.is_in_callback = former


def _nothing() -> None:
    """What is to do before one waits for most futures."""


class _Failure:
    """What a future has instead of a value.

    Errors that Python gives a future are values to C++. DDP takes them for gradients, and looks for the tensors in them
    by way of pickle, without expecting to find none: it has to meet the error there.
    """

    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.is_told = True

    def __reduce__(self) -> Any:
        if self.is_told:
            raise self.error
        return _Failure, (None,)


class CallFuture(torch.futures.Future[Any]):
    """The future of a call. ``before_wait`` sees to it that the call is carried out, if that is up to who waits."""

    def __init__(self, devices: Sequence[torch.device], before_wait: Callable[[], object] = _nothing) -> None:
        super().__init__(devices=list(devices))
        self._devices, self._before_wait = devices, before_wait

    def wait(self) -> Any:
        """Block until it is completed; its value, or what the call has raised."""
        self._before_wait()
        return super().wait()

    def then(self, callback: Callable[..., Any]) -> CallFuture:
        """The future of what ``callback`` makes of this one."""
        following = CallFuture(self._devices, self._before_wait)
        super().then(functools.partial(_follow, callback, following))
        return following

    def set_exception(self, error: Any) -> None:
        """Complete it with an error, for who waits in Python, and for DDP, which waits in C++."""
        failure = _Failure(error)
        failure.is_told = not self._devices  # a future of GPU tensors looks for tensors when it is completed

        def tell(_: object) -> None:
            raise error

        self._set_unwrap_func(tell)
        self.set_result(failure)
        failure.is_told = True

    def add_done_callback(self, callback: Callable[..., None]) -> None:
        """Run ``callback`` with this future when it is completed."""

        def run(future: Any) -> None:
            with _callback():
                callback(future)

        super().add_done_callback(run)


def of(results: Sequence[Tensor], before_wait: Callable[[], object] = _nothing) -> CallFuture:
    """One for these tensors."""
    return CallFuture(_devices(results), before_wait)


def of_all(made: Sequence[CallFuture], results: Sequence[Tensor]) -> CallFuture:
    """One for all of them, whose value are these tensors."""

    def before_wait() -> None:
        for future in made:
            future._before_wait()

    whole = CallFuture(_devices(results), before_wait)
    torch.futures.collect_all(list(made)).add_done_callback(lambda all_of_them: _pass_on(all_of_them, whole, results))
    return whole


def _pass_on(ended: Any, whole: CallFuture, results: Sequence[Tensor]) -> None:
    try:
        ended.value()
    except Exception as error:
        whole.set_exception(error)
    else:
        whole.set_result(list(results))


def _devices(results: Sequence[Tensor]) -> list[torch.device]:
    return sorted({x.device for x in results if x.is_cuda}, key=str)


def _follow(callback: Callable[..., Any], following: CallFuture, future: Any) -> None:
    try:
        with _callback():
            made = callback(future)
        following.set_result(made)
    except BaseException as error:
        told = error if isinstance(error, Exception) else RuntimeError(f"a callback ended by {error!r}")
        following.set_exception(told)


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

    def get_future(self) -> CallFuture:
        future = of(self._results)
        future.set_result(self._results)
        return future


OVER = Done([])
"""For calls that block: torch.distributed keeps it to itself, and to make one takes a third as long as the verb."""


class PendingWork(distributed.Work):
    """A call under way, behind a handle of the package. ``wait`` and the future raise what the call raises.

    ``seconds``: after so long they give up (None: never); the call goes on.
    """

    def __init__(self, handle: Handle[Any], results: list[Tensor], seconds: float | None, carrier: CallRunner) -> None:
        super().__init__()
        self._handle, self._results, self._seconds, self._carrier = handle, results, seconds, carrier
        self._lock = threading.Lock()
        self._made: CallFuture | None = None

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

    def get_future(self) -> CallFuture:
        """A future of the tensors. From now on the call counts as waited for (``watch.py``)."""
        with self._lock:
            if self._made is not None:
                return self._made
            before_wait = functools.partial(self._carrier.before_future, self._handle)
            self._made = future = of(self._results, before_wait)
        self._carrier.expect(self._handle)
        completion = _Completion(future, self._handle, self._results)
        self._carrier.when_over(completion.complete)
        if self._seconds is not None:
            completion.expire_after(self._seconds, self._carrier)
        return future


class _Completion:
    """Completes a future, once: when the call is over, or when it is late."""

    def __init__(self, future: CallFuture, handle: Handle[Any], results: list[Tensor]) -> None:
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

    def expire_after(self, seconds: float, carrier: CallRunner) -> None:
        """After so long, give up."""
        self._timer = threading.Timer(seconds, self._expire, [seconds, carrier])
        self._timer.daemon = True
        self._timer.start()

    def _expire(self, seconds: float, carrier: CallRunner) -> None:
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
        return of_all([work.get_future() for work in self._works], self.result())
