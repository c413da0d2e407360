"""What torch.distributed gets for a call: a ``Work``, its future, and what the program chains to the future.

A program may drop a ``Work``: the queue holds the call until it is complete.

A callback (``future.then``) runs where the future is completed: in the thread that carries out the group's calls,
before the next call; or, if the call is complete already, in the thread that chains. A callback may make calls, and
wait for them, as DDP's PowerSGD hook does. Such a call must not queue behind calls that wait for it, and its place
among the others may differ from rank to rank. So calls from a callback are carried out at once, on a channel of their
own. Among themselves they come in the order of the calls that they are chained to, on all ranks, if the program chains
in the order of its calls, and before it waits for later ones. (Callbacks of other futures, such as those of
``torch.futures.collect_all``, make calls like any other part of the program.)
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
from torchmpi_py.memory import devices
from torchmpi_py.torch_backend.torch_internals import raise_on_wait, work_of


class _InCallback(threading.local):
    """Whether this thread runs a callback of a future."""

    is_in_callback = False


callback_state = _InCallback()


@contextlib.contextmanager
def _callback(gpus: Sequence[torch.device]) -> Iterator[None]:
    """A block that runs a callback; at its end the work that the callback has queued on the GPUs is done.

    A callback runs on a stream of torch's own, and may use memory that was taken on another stream, as what DDP's
    PowerSGD hook has copied. Given back earlier, that memory could be the other stream's next tensor at once.
    """
    former = callback_state.is_in_callback
    callback_state.is_in_callback = True
    try:
        yield
    finally:
        callback_state.is_in_callback = former
        for gpu in gpus:
            devices.of(gpu).current().synchronize()


def _nothing() -> None:
    """The step before a wait for most futures."""


class _Failure:
    """The value of a future that has an error.

    Errors that Python gives a future are values to C++. DDP takes them for gradients, and looks for the tensors in them
    by pickle, without expecting to find none: DDP has to meet the error there.
    """

    def __init__(self, error: BaseException, *, raises: bool = True) -> None:
        self.error = error
        self.raises = raises

    def __reduce__(self) -> Any:
        if self.raises:
            raise self.error
        return _Failure, (None,)


class CallFuture(torch.futures.Future[Any]):
    """The future of a call. ``before_wait`` carries the call out, where that is the work of the thread that waits."""

    def __init__(self, devices: list[torch.device], before_wait: Callable[[], object] = _nothing) -> None:
        super().__init__(devices=list(devices))
        self.gpus, self.before_wait = devices, before_wait

    def wait(self) -> Any:
        """Block until the future is completed; its value, or the error of the call."""
        self.before_wait()
        return super().wait()

    def then(self, callback: Callable[..., Any]) -> CallFuture:
        """The future of the value that ``callback`` makes of this future."""
        following = CallFuture(self.gpus, self.before_wait)
        super().then(functools.partial(_follow, callback, following))
        return following

    def set_exception(self, error: Any) -> None:
        """Complete the future with an error, for waits in Python, and for DDP, which waits in C++."""
        failure = _Failure(error, raises=not self.gpus)  # a future of GPU tensors pickles the value it is given
        raise_on_wait(self, error)
        self.set_result(failure)
        failure.raises = True

    def add_done_callback(self, callback: Callable[..., None]) -> None:
        """Run ``callback`` with this future when it is completed."""
        gpus = self.gpus

        def run(future: Any) -> None:
            with _callback(gpus):
                callback(future)

        super().add_done_callback(run)


def _gpus(results: Sequence[Tensor]) -> list[torch.device]:
    """The GPUs of tensors, which their future has to know."""
    return sorted({x.device for x in results if x.is_cuda}, key=str)


def first(future: Any) -> Any:
    """The callback for the first of a call's tensors. It queues nothing."""
    return future.value()[0]


def _follow(callback: Callable[..., Any], following: CallFuture, future: Any) -> None:
    try:
        with _callback([] if callback is first else following.gpus):
            made = callback(future)
        following.set_result(made)
    except BaseException as error:
        is_ordinary = isinstance(error, Exception)
        following.set_exception(error if is_ordinary else RuntimeError(f"a callback ended by {error!r}"))


class TimedOut(CollectiveTimeout, distributed.DistBackendError):
    """A collective of a process group was not complete within the group's timeout."""


class CallWork(distributed.Work):
    """What the works below have in common. Each sets ``_results`` and says what ``exception`` is."""

    _results: list[Tensor]

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[Tensor]:
        return self._results


class Several(CallWork):
    """Several calls, as one. torch waits for them together, and asks for no future."""

    def __init__(self, works: Sequence[Any], results: list[Tensor] | None = None) -> None:
        super().__init__()
        self._works = works
        self._results = [x for work in works for x in work.result()] if results is None else results

    def wait(self, timeout: dt.timedelta | None = None) -> bool:
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def exception(self) -> Exception | None:
        return next(filter(None, (work.exception() for work in self._works)), None)


class Done(Several):
    """A call that was carried out at once."""

    def __init__(self, results: list[Tensor]) -> None:
        super().__init__([], results)

    def get_future(self) -> CallFuture:
        future = CallFuture(_gpus(self._results))
        future.set_result(self._results)
        return future


OVER = work_of(Done([]).get_future())
"""The work of all calls that block, which torch.distributed does not show. To make one takes a third of the verb."""


class PendingWork(CallWork):
    """A call under way, behind ``handle``. ``wait`` and the future raise what the call raises.

    After ``seconds`` the waits give up (None: never); the call goes on. A subclass sets the handle when it launches,
    and calls ``end`` once: when the call is over, though for a message only if there is a future.
    """

    handle: Handle[Any]

    def __init__(self, results: list[Tensor], seconds: float | None) -> None:
        super().__init__()
        self._results, self._seconds = results, seconds
        self._lock = threading.Lock()
        self._is_over = False
        self._future: CallFuture | None = None
        self._future_is_open = threading.Lock()  # acquired, for good, by the thread that completes the future
        self._timer: threading.Timer | None = None

    def before_wait(self) -> None:
        """Called by a thread before it waits for the call."""

    def before_future_wait(self) -> None:
        """Called by a thread before it waits for the future."""

    def expect(self) -> None:
        """Called when the future is created: later waits on it happen inside torch, where we cannot observe them."""
        self.handle.expect(self._seconds)

    def give_up(self) -> None:
        """The program no longer waits for the call, which goes on."""
        self.handle.give_up()

    def wait(self, timeout: dt.timedelta | None = None) -> bool:
        """Block until the call is complete, at most ``timeout`` (default: the group's)."""
        given = 0.0 if timeout is None else timeout.total_seconds()
        seconds = given if given > 0 else self._seconds
        self.before_wait()
        try:
            self.handle.wait(seconds)
        except CollectiveTimeout as error:
            self.give_up()
            late = TimedOut(f"the timeout of {seconds:g} s has passed: {error}")
            late.handle = self
            raise late._of_call(error.verb, error.comm) from None
        return True

    def is_completed(self) -> bool:
        return self.handle.done()

    def exception(self) -> Exception | None:
        """What the call has raised, if it is over."""
        if self.handle.done():
            try:
                self.handle.wait()
            except Exception as error:
                return error
        return None

    def get_future(self) -> CallFuture:
        """A future of the tensors. From now on the call counts as waited for (``core/journal.py``)."""
        with self._lock:
            if self._future is not None:
                return self._future
            self._future = future = CallFuture(_gpus(self._results), self.before_future_wait)
            self.expect()
            if self._seconds is not None:
                self._timer = threading.Timer(self._seconds, self._expire)
                self._timer.daemon = True
                self._timer.start()
            is_over = self._is_over
        if is_over:
            self._complete_future()
        return future

    def end(self) -> None:
        """The call is complete, or has failed: complete its future."""
        with self._lock:
            self._is_over = True
        self._complete_future()

    def _complete_future(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        future = self._future  # which may be completed already: by the timer, or by the program
        if future is None or future.done() or not self._future_is_open.acquire(blocking=False):
            return
        # On the program's stream its later work would wait for the call, too.
        with self.handle.on_its_stream():
            try:
                self.handle.wait()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(self._results)
            finally:
                future.before_wait = _nothing  # the two would keep each other, and the tensors, alive

    def _expire(self) -> None:
        """The call is late: let the future give up."""
        late = self.handle.who_is_late()
        if self._future is None or self.handle.is_settled() or not self._future_is_open.acquire(blocking=False):
            return
        self.give_up()
        error = TimedOut(f"the timeout of {self._seconds:g} s has passed: {self.handle!r}. {late}")
        self._future.set_exception(error)
