"""Where the program makes a call: outside of torch, and of this package.

A call of torch.distributed.

It is one or more operations of the package, one after another, and what concludes them; *under way* from when it is
queued until that is done.

The calls of one process group, in the order in which the program makes them.

torch.distributed lets one rank make a call that blocks where another one makes it asynchronously: all that counts is
the order. So a group has one communicator for both, and its calls are carried out one after another: one that blocks in
the thread that makes it, if nothing of the group is under way, and all others in a thread of the group. That is begun
with the first call that needs it, and groups do not wait for each other.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor

from torchmpi_py.collectives.operation import Operation
from torchmpi_py.core import communication_thread, config
from torchmpi_py.core.communication_thread import CommunicationThread
from torchmpi_py.core.communicators import Communicator
from torchmpi_py.core.handles import Handle
from torchmpi_py.memory import devices

_LIBRARIES = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(__file__) + os.sep)
_INSTALLED = ("site-packages", "dist-packages")


def program() -> FrameType:
    """The frame of the program that has led here."""
    frame = sys._getframe(2)
    while frame.f_code.co_filename.startswith(_LIBRARIES) and frame.f_back is not None:
        frame = frame.f_back
    return frame


def library(frame: FrameType) -> str:
    """The name of the installed package that a frame belongs to; empty for the user's own program."""
    parts = frame.f_code.co_filename.split(os.sep)
    found = next((place for place, part in enumerate(parts[:-1]) if part in _INSTALLED), None)
    return "" if found is None else parts[found + 1].removesuffix(".py")


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
    def entry(self) -> Any:
        """What the first operation was noted as."""
        return self.operations[0].entry if self.operations else None

    @property
    def tensors(self) -> Iterable[Tensor]:
        """All that its operations read and write."""
        return itertools.chain(self.results, *(operation.tensors for operation in self.operations))

    def run(self, *, in_background: bool = False) -> list[Tensor]:
        """Carry it out; on the background channel, if it comes from a callback."""
        for operation in self.operations:
            operation.run(in_background)
        for conclude in self._conclusions:
            conclude()
        return self.results

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


class CallRunner(Protocol):
    """Who carries out a call that is under way."""

    def when_over(self, step: Callable[[], None]) -> None:
        """Run ``step`` when it is over, once, or now."""

    def when_late(self) -> None:
        """Somebody has stopped waiting for it."""

    def expect(self, handle: Handle[Any]) -> None:
        """A future of the call was asked for: it counts as waited for until it is over, given up, or abandoned."""

    def before_wait(self, handle: Handle[Any]) -> None:
        """Before this thread waits for the handle: carry the call out, if that is this thread's work."""

    def before_future(self, handle: Handle[Any]) -> None:
        """Before it waits for what is chained to the call: carry that out, too."""


class CallQueue:
    """What carries out the calls of a group."""

    def __init__(self, comm: Communicator, name: str) -> None:
        self._comm = comm
        self._name = name
        self._thread: CommunicationThread | None = None
        self._channel = threading.RLock()  # whoever carries out a call has it
        self._callbacks = threading.RLock()  # and whoever carries out one of a callback
        self._order = threading.Lock()
        self._num_queued = 0
        self._depth = 0  # of callbacks that carry on with the queue
        self._deferred: list[_Queued] = []  # what was carried out there, and not concluded
        self._expected: weakref.WeakSet[Handle[Any]] = weakref.WeakSet()  # those that have futures
        self._runner = 0  # the thread that carries out what is queued, while it does

    def run_here(self, call: Call) -> bool:
        """Carry it out in this thread; False, and nothing has happened, if others come before it."""
        if self._num_queued or config.can_raise or not self._channel.acquire(blocking=False):
            return False
        try:
            if self._num_queued:
                return False
            call.run()
            return True
        finally:
            self._channel.release()

    def run_in_callback(self, call: Call) -> None:
        """Carry it out in this thread, whatever is under way, on the channel for callbacks."""
        with self._callbacks:
            call.run(in_background=True)

    def submit(self, call: Call) -> tuple[Handle[Any], CallRunner]:
        """Queue it for the thread of the group."""
        with self._order:
            self._num_queued += 1
            if self._thread is None:
                self._thread = communication_thread.current().beside(self._name)
        queued = _Queued(call, self)
        return devices.submit(queued, call.device, call.tensors, self._thread), queued

    def carry_on(self, handle: Handle[Any]) -> None:
        """Before this thread waits for it: if it is the one that has yet to carry that out, do it now.

        What is chained to calls that are carried out so waits until the callback that waits is over, for that one comes
        first on ranks where the calls were over already.
        """
        if self._runner == threading.get_ident() and self._thread is not None:
            self._depth += 1
            try:
                self._thread.carry_out_until(handle.is_settled)
            finally:
                self._depth -= 1

    def expect(self, handle: Handle[Any]) -> None:
        """See ``Carrier``."""
        with self._order:
            self._expected.add(handle)
        handle.expect()

    def give_up(self) -> None:
        """Somebody has stopped waiting for a call, which goes on."""
        with self._order:
            if self._num_queued:
                self._set_stuck(True)

    def close(self, seconds: float | None) -> None:
        """Wait for what is queued, at most so long (None: for ever), and end the thread, unless it is stuck."""
        thread, self._thread = self._thread, None
        if thread is not None and communication_thread.is_installed():
            communication_thread.current().let_go(thread)
            if seconds is not None and not thread.is_stuck and not thread.settles(seconds):
                thread.is_stuck = self._comm.is_stuck = True
            if thread.is_stuck:
                self._abandon()
            thread.close()

    def _abandon(self) -> None:
        """Nobody is late in what is under way: the futures of it will not be completed, or come too late."""
        with self._order:
            expected = list(self._expected)
        for handle in expected:
            handle.give_up()

    def _set_stuck(self, is_stuck: bool) -> None:
        self._comm.is_stuck = is_stuck
        if self._thread is not None:
            self._thread.is_stuck = is_stuck

    def _is_through(self) -> None:
        """With one call."""
        with self._order:
            self._num_queued -= 1
            if not self._num_queued:
                self._set_stuck(False)


class _Queued:
    """A call as work for the thread."""

    def __init__(self, call: Call, queue: CallQueue) -> None:
        self._call, self._queue = call, queue
        self.label, self.entry = call.label, call.entry
        self.finish, self.explain, self.who_is_late = call.finish, call.explain, call.who_is_late
        self.when_over, self.when_late = call.when_over, queue.give_up
        self.expect, self.before_wait = queue.expect, queue.carry_on

    def run_in_background(self) -> Sequence[Tensor]:
        self._queue._channel.acquire()
        self._queue._runner = threading.get_ident()
        return self._call.run()

    def on_settled(self) -> None:
        """The handle is complete: now what was chained to the call may run, and then the next call."""
        queue = self._queue
        try:
            if queue._depth:
                queue._deferred.append(self)
                return
            self._call.is_over()
            while queue._deferred:
                queue._deferred.pop(0)._call.is_over()
        finally:
            queue._is_through()
            queue._channel.release()

    def before_future(self, handle: Handle[Any]) -> None:
        """See ``Carrier``."""
        queue = self._queue
        handle.done()  # NotStarted in a forked child
        queue.carry_on(handle)
        if queue._runner == threading.get_ident() and self in queue._deferred:
            queue._deferred.remove(self)
            self._call.is_over()
