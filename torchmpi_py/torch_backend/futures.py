"""Futures of calls, and what is chained to them.

What is chained to a future (``.then``) runs where the future is completed: in the thread that carries the group's calls
out, before the next one; or, if the call is over already, in the thread that chains. It may make calls itself, and wait
for them (DDP's PowerSGD hook does). Such a call must not queue behind others, which wait for it, and it may come sooner
or later among the others than on another rank. So calls that are made from a callback are carried out there and then,
on a channel of their own. Among themselves they come in the order of the calls that they are chained to, on all ranks,
as long as the program chains in the order of its calls, and before it waits for later ones. (What is chained to other
futures, such as those of ``torch.futures.collect_all``, makes calls like any other.)
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

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
