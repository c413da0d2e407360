"""The ``Work`` of each call to torch.distributed, the future of the call, and the callbacks of the future.

A program may drop a ``Work``, because the queue keeps each call until the call is complete.

A callback (``future.then``) runs in the thread that completes the future. This is the thread that carries out the
group's calls, and it runs the callback before the next call. If the call is already complete, the callback runs in the
thread that adds the callback.

A callback may make calls and wait for them, as DDP's PowerSGD hook does. A call from a callback must not queue behind
calls that wait for the callback, and its place among the other calls may differ between ranks. So calls from callbacks
are carried out immediately, on a separate channel. Their order on this channel is the order of the calls to which the
callbacks are chained. This order is the same on all ranks if the program chains callbacks in the order of its calls,
and before it waits for later calls. (Callbacks of other futures, such as ``torch.futures.collect_all``, make calls like
any other part of the program.)
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
    """The state of each thread: whether the thread is running a callback of a future."""

    is_in_callback = False


callback_state = _InCallback()


@contextlib.contextmanager
def _callback(gpus: Sequence[torch.device]) -> Iterator[None]:
    """Run a callback in this block, and at the end wait for the work that the callback has queued on the GPUs.

    torch runs a callback on a separate stream. The callback may use memory that was allocated on another stream, such
    as the copies of DDP's PowerSGD hook. If this memory were freed before the callback's work is done, the other stream
    could reuse the memory too early.
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
    """Do nothing. Most futures need no preparation for a wait."""


class _Failure:
    """The value of a future that has failed.

    For C++, an error that Python sets on a future is an ordinary value. DDP treats this value as gradients and pickles
    it to find the tensors, without checking that it contains any. So pickling this value raises the error.
    """

    def __init__(self, error: BaseException, *, raises: bool = True) -> None:
        self.error = error
        self.raises = raises

    def __reduce__(self) -> Any:
        if self.raises:
            raise self.error
        return _Failure, (None,)


class CallFuture(torch.futures.Future[Any]):
    """The future of a call. Before a wait, ``before_wait`` carries out the call if no other thread can do so."""

    def __init__(self, devices: list[torch.device], before_wait: Callable[[], object] = _nothing) -> None:
        super().__init__(devices=list(devices))
        self.gpus, self.before_wait = devices, before_wait

    def wait(self) -> Any:
        """Block until the future is complete. Return its value, or raise the error of the call."""
        self.before_wait()
        return super().wait()

    def then(self, callback: Callable[..., Any]) -> CallFuture:
        """Return a future for the result of ``callback``, which is called with this future."""
        following = CallFuture(self.gpus, self.before_wait)
        super().then(functools.partial(_follow, callback, following))
        return following

    def set_exception(self, error: Any) -> None:
        """Complete the future with an error. A wait in Python raises the error, and so does DDP's wait in C++."""
        failure = _Failure(error, raises=not self.gpus)  # ``set_result`` of a future of GPU tensors pickles the value.
        raise_on_wait(self, error)
        self.set_result(failure)
        failure.raises = True

    def add_done_callback(self, callback: Callable[..., None]) -> None:
        """Run ``callback`` with this future when the future is complete."""
        gpus = self.gpus

        def run(future: Any) -> None:
            with _callback(gpus):
                callback(future)

        super().add_done_callback(run)


def _gpus(results: Sequence[Tensor]) -> list[torch.device]:
    """Return the GPUs of the tensors. torch requires this list to create a future of the tensors."""
    return sorted({x.device for x in results if x.is_cuda}, key=str)


def first(future: Any) -> Any:
    """Return the first tensor of a call. This function is a callback that queues no GPU work."""
    return future.value()[0]


def _follow(callback: Callable[..., Any], following: CallFuture, future: Any) -> None:
    try:
        with _callback([] if callback is first else following.gpus):
            result = callback(future)
        following.set_result(result)
    except BaseException as error:
        is_ordinary = isinstance(error, Exception)
        following.set_exception(error if is_ordinary else RuntimeError(f"a callback of a future ended with {error!r}"))


class TimedOut(CollectiveTimeout, distributed.DistBackendError):
    """A collective of a process group was not complete within the group's timeout."""


class CallWork(distributed.Work):
    """Base class of the ``Work`` classes. Each subclass sets ``_results`` and defines ``exception``."""

    _results: list[Tensor]

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[Tensor]:
        return self._results


class Several(CallWork):
    """The ``Work`` of several calls together. torch waits for this object, and requests no future."""

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
    """The ``Work`` of a call that is already complete."""

    def __init__(self, results: list[Tensor]) -> None:
        super().__init__([], results)

    def get_future(self) -> CallFuture:
        future = CallFuture(_gpus(self._results))
        future.set_result(self._results)
        return future


OVER = work_of(Done([]).get_future())
"""The ``Work`` of blocking calls that the calling thread has carried out. Programs never see this object; creating an
object for each call would take a third of the call's time."""


class PendingWork(CallWork):
    """The ``Work`` of a call under way. ``wait`` and the future raise the call's error.

    ``handle`` is the handle of the call.

    A wait raises TimedOut after ``seconds`` (None: never), but the call continues. A subclass sets the handle when it
    launches the call, and calls ``end`` once, when the call is over. A message calls ``end`` only if it has a future.
    """

    handle: Handle[Any]

    def __init__(self, results: list[Tensor], seconds: float | None) -> None:
        super().__init__()
        self._results, self._seconds = results, seconds
        self._lock = threading.Lock()
        self._is_over = False
        self._future: CallFuture | None = None
        self._future_is_open = threading.Lock()  # The thread that completes the future acquires this lock permanently.
        self._timer: threading.Timer | None = None

    def before_wait(self) -> None:
        """Prepare a wait of this thread for the call. A subclass may override this method."""

    def before_future_wait(self) -> None:
        """Prepare a wait of this thread for the future. A subclass may override this method."""

    def expect(self) -> None:
        """Count the call as waited for from now on, because torch's waits for the future cannot be observed."""
        self.handle.expect(self._seconds)

    def give_up(self) -> None:
        """Record that the program no longer waits for the call. The call continues."""
        self.handle.give_up()

    def wait(self, timeout: dt.timedelta | None = None) -> bool:
        """Block until the call is complete, for at most ``timeout`` (default: the group's timeout)."""
        limit = 0.0 if timeout is None else timeout.total_seconds()
        seconds = limit if limit > 0 else self._seconds
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
        """Return the error that the call has raised; None if it succeeded or is still under way."""
        if self.handle.done():
            try:
                self.handle.wait()
            except Exception as error:
                return error
        return None

    def get_future(self) -> CallFuture:
        """Return the future of the call's results. From now on the call counts as waited for (``core/journal.py``)."""
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
        """Complete the future after the call has completed or failed."""
        with self._lock:
            self._is_over = True
        self._complete_future()

    def _complete_future(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        future = self._future  # The timer or the program may have completed the future already.
        if future is None or future.done() or not self._future_is_open.acquire(blocking=False):
            return
        # Use the call's stream. On the program's own stream, later work of the program would wait for the call too.
        with self.handle.on_its_stream():
            try:
                self.handle.wait()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(self._results)
            finally:
                future.before_wait = _nothing  # Break the reference cycle, which would keep the tensors alive.

    def _expire(self) -> None:
        """Complete the future with TimedOut, because the call has exceeded its timeout."""
        late = self.handle.who_is_late()
        if self._future is None or self.handle.is_settled() or not self._future_is_open.acquire(blocking=False):
            return
        self.give_up()
        error = TimedOut(f"the timeout of {self._seconds:g} s has passed: {self.handle!r}. {late}")
        self._future.set_exception(error)
