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
from torchmpi_py.torch_backend.torch_internals import raise_on_wait


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


class Done(CallWork):
    """A call that was carried out at once."""

    def __init__(self, results: list[Tensor]) -> None:
        super().__init__()
        self._results = results

    def wait(self, timeout: dt.timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def get_future(self) -> CallFuture:
        future = CallFuture(_gpus(self._results))
        future.set_result(self._results)
        return future


OVER = Done([])
"""The work of all calls that block: torch.distributed does not show it, and making one takes a third of the verb."""


class PendingWork(CallWork):
    """A call under way, behind ``handle``. ``wait`` and the future raise what the call raises.

    After ``seconds`` the waits give up (None: never); the call goes on. A subclass sets the handle when it launches.
    """

    handle: Handle[Any]

    def __init__(self, results: list[Tensor], seconds: float | None) -> None:
        super().__init__()
        self._results, self._seconds = results, seconds
        self._lock = threading.Lock()
        self._future: CallFuture | None = None
        self._future_is_open = threading.Lock()  # acquired, for good, by the thread that completes the future
        self._timer: threading.Timer | None = None

    def before_wait(self) -> None:
        """Called by a thread before it waits for the call."""

    def before_future_wait(self) -> None:
        """Called by a thread before it waits for the future."""

    def expect(self) -> None:
        """Called when the future is made, for waits for a future cannot be seen."""

    def when_late(self) -> None:
        """Called when a wait has given up."""

    def when_over(self, step: Callable[[], None]) -> None:
        """Run ``step`` once: when the call is over, or now if the call is over already."""
        raise NotImplementedError

    def wait(self, timeout: dt.timedelta | None = None) -> bool:
        """Block until the call is complete, at most ``timeout`` (default: the group's)."""
        given = 0.0 if timeout is None else timeout.total_seconds()
        seconds = given if given > 0 else self._seconds
        self.before_wait()
        try:
            self.handle.wait(seconds)
        except CollectiveTimeout as error:
            self.handle.give_up()
            self.when_late()
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
        self.when_over(self._complete_future)
        return future

    def _complete_future(self) -> None:
        """The call is over."""
        if self._timer is not None:
            self._timer.cancel()
        if self._future is None or not self._future_is_open.acquire(blocking=False):  # or has timed out meanwhile
            return
        with contextlib.ExitStack() as stack:
            try:
                if self._future.done():  # by the program
                    return
                # On the program's stream its later work would wait for the call, too.
                stack.enter_context(self.handle.on_its_stream())
                self.handle.wait()
            except Exception as error:
                self._future.set_exception(error)
            else:
                self._future.set_result(self._results)
            finally:
                self._future.before_wait = _nothing  # the two would keep each other, and the tensors, alive

    def _expire(self) -> None:
        """The call is late: let the future give up."""
        late = self.handle.who_is_late()
        if self._future is None or self.handle.is_settled() or not self._future_is_open.acquire(blocking=False):
            return
        self.handle.give_up()
        self.when_late()
        error = TimedOut(f"the timeout of {self._seconds:g} s has passed: {self.handle!r}. {late}")
        self._future.set_exception(error)


class Several(CallWork):
    """Several calls, as one."""

    def __init__(self, works: Sequence[Any]) -> None:
        super().__init__()
        self._works = works
        self._results = [x for work in works for x in work.result()]

    def wait(self, timeout: dt.timedelta | None = None) -> bool:
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def exception(self) -> Exception | None:
        return next(filter(None, (work.exception() for work in self._works)), None)

    def get_future(self) -> CallFuture:
        """A future of all tensors, which is completed after the last call."""
        made, results = [work.get_future() for work in self._works], self._results

        def before_wait() -> None:
            for future in made:
                future.before_wait()

        whole = CallFuture(_gpus(results), before_wait)

        def complete(ended: Any) -> None:
            try:
                ended.value()
            except Exception as error:
                whole.set_exception(error)
            else:
                for future in made:  # which have ended: where they have GPUs, this stream follows theirs
                    torch.futures.Future.wait(future)
                whole.set_result(results)

        torch.futures.collect_all(list(made)).add_done_callback(complete)
        return whole
