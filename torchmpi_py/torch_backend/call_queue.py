"""Carry out the calls of one process group in the order in which the program makes them.

A call consists of one or more operations of the package, one after another, and then its last steps, such as a copy
into lists. A call is *under way* from the moment when it is queued until it leaves the queue.

The idea: torch.distributed matches calls by their order alone, so one rank may block in a call that another rank makes
asynchronously. In this package, a blocking collective never matches an asynchronous one, because the two forms use
different channels. So a group uses one channel for both forms, and carries out one call at a time. A blocking call runs
in the thread that makes it if no other call of the group is under way. Every other call runs in a thread of the group,
which starts at the first such call. Groups do not wait for each other, so two groups may be used in different orders.

An alternative is to hand every call to the thread of the group. It was rejected because handing a small call to another
thread and back takes longer than the call itself.

A callback may wait for a later call of the group, but only the thread that runs the callback can carry out that call.
So the thread carries out the later call during the wait, and delays the callbacks of the later call until the first
callback has ended. The callbacks therefore run in the same order on all ranks, even if the later call completed before
the wait on some ranks.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from torch import Tensor

from torchmpi_py.collectives.plan import Operation
from torchmpi_py.core import communication_thread, communicators, journal
from torchmpi_py.core.channels import BACKGROUND, DIRECT
from torchmpi_py.core.communication_thread import CommunicationThread
from torchmpi_py.core.communicators import Communicator
from torchmpi_py.core.handles import Work
from torchmpi_py.core.status_board import IS_LAUNCH
from torchmpi_py.memory import devices
from torchmpi_py.torch_backend.work import PendingWork

Call = tuple[Sequence[Operation[Any]], list[Tensor], Sequence[Callable[[], object]]]
"""The operations of a call, its results, and its last steps. A plain tuple is used because every call creates one."""


def _record(call: Call, thread_role: int, form: int, frame: FrameType) -> None:
    """Record all operations of a call in the journal before the first operation runs.

    Raise RanksDisagree, as a collective does, if the ranks make different calls.
    """
    try:
        for operation in call[0]:
            operation.entry = journal.record(operation.plan, thread_role, form, frame)
    except BaseException as error:
        _fail_rest(call, error)
        raise


def _carry_out(call: Call, in_background: bool = False) -> list[Tensor]:
    """Run the operations of a call, then its last steps; return its results."""
    operations, results, last_steps = call
    try:
        for operation in operations:
            operation.run(in_background)
    except BaseException as error:
        _fail_rest(call, error)
        raise
    for step in last_steps:
        step()
    return results


def _fail_rest(call: Call, error: BaseException) -> None:
    """Close the journal entries of a failed call, because the program may continue without waiting for the call."""
    for operation in call[0]:
        if operation.entry is not None:
            if not isinstance(error, Exception):  # A signal handler has raised the error, on this rank only.
                journal.break_off(operation.entry)
            journal.fail(operation.entry)


class QueuedCall(PendingWork, Work[list[Tensor]]):
    """A call in the queue of a group."""

    label: object = None

    def __init__(self, queue: CallQueue, call: Call, seconds: float | None) -> None:
        super().__init__(call[1], seconds)
        self._queue = queue
        self._call = call
        self._first = first = call[0][0]  # operation that represents the whole call
        self.entry, self.label = first.entry, first.label

    def late_ranks(self) -> str:
        return self._first.late_ranks()

    def run(self, in_background: bool = False) -> list[Tensor]:
        self._queue.enter()
        return _carry_out(self._call)

    def release(self) -> None:
        for operation in self._call[0]:
            operation.release()
        self._call = ((), [], ())

    def on_done(self) -> None:
        """Run the callbacks of the call's future, and then let the queue continue."""
        self._queue.leave(self)

    def give_up(self) -> None:
        super().give_up()
        self._queue.give_up()

    def abandon(self) -> None:
        """Record that nothing waits for the call's future, if it has one, because the call may never end."""
        if self._future is not None:
            self.handle.give_up()

    def before_wait(self) -> None:
        self._queue.carry_on(self)

    def before_future_wait(self) -> None:
        self.handle.done()  # This raises NotStarted in a forked child.
        self._queue.carry_on(self)
        self._queue.end_early(self)


class CallQueue:
    """The queue of a group's calls, and the thread that carries them out."""

    def __init__(self, comm: Communicator, name: str) -> None:
        self._comm = comm
        self._name = name
        self.is_open = True
        self._thread: CommunicationThread | None = None
        self._runner = 0  # identifier of the group's thread, or 0 before its first call
        self._direct = threading.RLock()  # held during a call on channel DIRECT
        self._background = threading.RLock()  # held during a call on channel BACKGROUND
        self._order = threading.Lock()  # held while ``_under_way`` changes
        self._under_way: set[QueuedCall] = set()
        self._to_end: list[QueuedCall] = []  # complete calls whose callbacks have yet to run
        self._is_ending = False  # whether callbacks are running

    def run_here(self, call: Call, frame: FrameType) -> bool:
        """Carry out a call in this thread, and return True, unless the call must be queued.

        If the call must be queued, return False without any effect. Also return False if the group is closed, or if a
        forked child has inherited the group; the caller then raises the error. ``frame`` is the place in the program
        that makes the call.
        """
        if self._under_way or not self.is_open or communicators.current_stack is None:
            return False
        if not self._direct.acquire(blocking=False):
            return False
        try:
            if self._under_way:  # Another thread has just queued a call, which must run first.
                return False
            operations, _, last_steps = call
            if len(operations) == 1 and not last_steps:
                (operation,) = operations
                operation.plan.run(operation.arguments, operation.target, operation.conclude, frame=frame)
            else:
                _record(call, DIRECT, 0, frame)
                _carry_out(call)
            return True
        finally:
            self._direct.release()

    def run_in_callback(self, call: Call, frame: FrameType) -> None:
        """Carry out a call from a callback immediately, in this thread and on the channel for callbacks."""
        with self._background:
            _record(call, BACKGROUND, 0, frame)
            _carry_out(call, in_background=True)

    def submit(self, call: Call, is_launch: bool, seconds: float | None, frame: FrameType) -> QueuedCall:
        """Queue a call for the thread of the group, and return the queued call.

        A wait for the queued call raises an error after ``seconds`` (None: never). ``is_launch`` is True if the program
        does not wait in this call.
        """
        _record(call, DIRECT, IS_LAUNCH * is_launch, frame)
        operations, results, _ = call
        queued = QueuedCall(self, call, seconds)
        try:
            # Add the call first, so that another thread cannot carry out its own call ahead of this one.
            with self._order:
                self._under_way.add(queued)
                if self._thread is None:
                    self._thread = communication_thread.current().beside(self._name)
            tensors = itertools.chain(results, *(operation.tensors for operation in operations))
            queued.handle = devices.submit(queued, operations[0].plan.device, tensors, self._thread)
        except BaseException:  # The program gets no handle, even if the call is in the queue.
            for operation in operations:
                journal.break_off(operation.entry)  # type: ignore[arg-type]
            raise
        return queued

    def enter(self) -> None:
        """Acquire the channel for a queued call, and record that this thread carries out the group's calls."""
        self._direct.acquire()
        self._runner = threading.get_ident()

    def leave(self, call: QueuedCall) -> None:
        """Run the callbacks of a call that this thread has completed, before the next call begins.

        If a callback waits for a later call, this method is called for the later call during the wait.
        """
        self._to_end.append(call)
        try:
            if not self._is_ending:
                self._is_ending = True
                try:
                    while self._to_end:
                        self._to_end.pop(0).end()
                finally:
                    self._is_ending = False
        finally:
            # Remove the call before releasing the lock. Otherwise the next blocking call might be queued needlessly.
            with self._order:
                self._under_way.discard(call)
                if not self._under_way:
                    self._set_stuck(False)
            self._direct.release()

    def carry_on(self, call: QueuedCall) -> None:
        """Carry out ``call`` before a wait for it, if this is the thread that carries out the group's calls."""
        if self._runner == threading.get_ident() and self._thread is not None:
            self._thread.carry_out_until(call.handle.is_settled)

    def end_early(self, call: QueuedCall) -> None:
        """Run the delayed callbacks of ``call`` before this thread waits for one of them."""
        if self._runner == threading.get_ident() and call in self._to_end:
            self._to_end.remove(call)
            call.end()

    def give_up(self) -> None:
        """Record that the program no longer waits for a call. The call continues."""
        with self._order:
            if self._under_way:
                self._set_stuck(True)

    def close(self, seconds: float | None) -> None:
        """Wait at most ``seconds`` for the queued calls (None: no limit), and end the thread unless it is stuck."""
        self.is_open = False
        thread, self._thread = self._thread, None
        if thread is not None and communication_thread.is_installed():
            communication_thread.current().remove_companion(thread)
            # A call that is still running may never end. ``is_stuck`` ensures that nothing waits for the thread, and
            # that no later group uses the communicator.
            if seconds is not None and not thread.is_stuck and not thread.is_drained_within(seconds):
                thread.is_stuck = self._comm.is_stuck = True
            if thread.is_stuck:
                # Hang detection must not report these calls as late, because nothing waits for their futures now.
                for call in list(self._under_way):
                    call.abandon()
            thread.close()

    def _set_stuck(self, is_stuck: bool) -> None:
        self._comm.is_stuck = is_stuck
        if self._thread is not None:
            self._thread.is_stuck = is_stuck
