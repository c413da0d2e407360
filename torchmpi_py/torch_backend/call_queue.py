"""The calls of one process group, in the order in which the program makes them.

A call is one or more operations of the package, one after another, and a last step, such as a copy into lists. A call
is *under way* from when the call is queued until the last step is done.

torch.distributed lets one rank make a call that blocks where another rank makes the same call asynchronously: only the
order counts. So a group has one communicator for both, and carries out its calls one after another: a call that blocks
in the thread that makes it, if no call of the group is under way, and all others in a thread of the group. The first
call that needs the thread starts it. Groups do not wait for each other.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from torch import Tensor

from torchmpi_py.collectives.plan import Operation
from torchmpi_py.core import communication_thread, config, journal
from torchmpi_py.core.channels import DIRECT
from torchmpi_py.core.communication_thread import CommunicationThread
from torchmpi_py.core.communicators import Communicator
from torchmpi_py.core.handles import Handle, Work
from torchmpi_py.core.status_board import IS_LAUNCH
from torchmpi_py.memory import devices
from torchmpi_py.torch_backend.work import PendingWork

Call = tuple[Sequence[Operation[Any]], list[Tensor], Callable[[], object] | None]
"""The operations of a call, its results, and its last step. A plain tuple, for one is made in each call."""


def record(operations: Sequence[Operation[Any]], thread_role: int, is_launch: bool, frame: FrameType) -> None:
    """Record the operations of a call in the journal, all before the first one runs. RanksDisagree as in the verbs."""
    try:
        for operation in operations:
            operation.entry = journal.record(operation.plan, thread_role, IS_LAUNCH * is_launch, frame)
    except BaseException as error:
        _fail_rest(operations, error)
        raise


def _carry_out(call: Call, in_background: bool = False) -> list[Tensor]:
    """Run the operations of a call, then its last step; return its results."""
    operations, results, last_step = call
    try:
        for operation in operations:
            operation.run(in_background)
    except BaseException as error:
        _fail_rest(operations, error)
        raise
    if last_step is not None:
        last_step()
    return results


def _fail_rest(operations: Sequence[Operation[Any]], error: BaseException) -> None:
    """Close the entries behind an operation that has failed: the program may go on, and waits in none of them."""
    for operation in operations:
        if operation.entry is not None:
            if not isinstance(error, Exception):  # from a signal's handler, and so on this rank alone
                journal.break_off(operation.entry)
            journal.fail(operation.entry)


class QueuedCall(PendingWork, Work[list[Tensor]]):
    """A call in the queue of a group."""

    def __init__(self, queue: CallQueue, call: Call, seconds: float | None) -> None:
        super().__init__(call[1], seconds)
        self._queue = queue
        self._call = call
        self._operations = call[0]
        self.entry = call[0][0].entry if call[0] else None  # the first operation stands for all
        self._is_over = False
        self._when_over: Callable[[], None] | None = None

    @property
    def label(self) -> object:
        return self._operations[0].label if self._operations else "a call of torch.distributed"

    def late_ranks(self) -> str:
        return self._operations[0].late_ranks() if self._operations else ""

    def run(self, in_background: bool = False) -> list[Tensor]:
        self._queue.enter()
        return _carry_out(self._call)

    def release(self) -> None:
        for operation in self._operations:
            operation.release()
        self._call = ((), [], None)

    def on_done(self) -> None:
        """Run what was chained to the call; then let the queue go on."""
        self._queue.leave(self)

    def end(self) -> None:
        """The call is complete, or has failed: complete its future."""
        with self._lock:
            self._is_over = True
            step, self._when_over = self._when_over, None  # the step refers to the call
        if step is not None:
            step()

    def when_over(self, step: Callable[[], None]) -> None:
        with self._lock:
            if not self._is_over:
                self._when_over = step
                return
        step()

    def when_late(self) -> None:
        self._queue.give_up()

    def expect(self) -> None:
        self._queue.expect(self.handle, self._seconds)

    def before_wait(self) -> None:
        self._queue.carry_on(self)

    def before_future_wait(self) -> None:
        self.handle.done()  # NotStarted in a forked child
        self._queue.carry_on(self)
        self._queue.end_deferred(self)


class CallQueue:
    """The queue of a group, and the thread that carries out its calls."""

    def __init__(self, comm: Communicator, name: str) -> None:
        self._comm = comm
        self._name = name
        self._thread: CommunicationThread | None = None
        self._channel = threading.RLock()  # held by the thread that carries out a call
        self._callbacks = threading.RLock()  # held by the thread that carries out a call of a callback
        self._order = threading.Lock()
        self._num_queued = 0
        self._depth = 0  # of callbacks that carry on with the queue
        self._deferred: list[QueuedCall] = []  # carried out by such callbacks, and not ended
        self._expected: weakref.WeakSet[Handle[Any]] = weakref.WeakSet()  # of calls that have futures
        self._runner = 0  # the thread that carries out queued calls, while it does

    def run_here(self, call: Call, frame: FrameType) -> bool:
        """Record a call, made at ``frame``, and carry it out; False, and nothing has happened, if others come first."""
        if self._num_queued or config.can_raise or not self._channel.acquire(blocking=False):
            return False
        try:
            if self._num_queued:  # queued by another thread since the look: that call comes first
                return False
            operations, _, last_step = call
            if len(operations) == 1 and last_step is None:
                (operation,) = operations
                operation.plan.run(operation.arguments, operation.target, operation.conclude, frame=frame)
            else:
                record(operations, DIRECT, False, frame)
                _carry_out(call)
            return True
        finally:
            self._channel.release()

    def run_in_callback(self, call: Call) -> None:
        """Carry a call out in this thread, whatever is under way, on the channel for callbacks."""
        with self._callbacks:
            _carry_out(call, in_background=True)

    def submit(self, call: Call, seconds: float | None) -> QueuedCall:
        """Queue a call for the thread of the group. Its work and its future give up after ``seconds``."""
        operations, results, _ = call
        try:
            # Counted first: from here on no call of another thread runs where it is made, and overtakes this one.
            with self._order:
                self._num_queued += 1
                if self._thread is None:
                    self._thread = communication_thread.current().beside(self._name)
            queued = QueuedCall(self, call, seconds)
            device = operations[0].plan.device if operations else None
            tensors = itertools.chain(results, *(operation.tensors for operation in operations))
            queued.handle = devices.submit(queued, device, tensors, self._thread)
        except BaseException:  # it may not be queued, or not known to the program
            for operation in operations:
                journal.break_off(operation.entry)  # type: ignore[arg-type]
            raise
        return queued

    def enter(self) -> None:
        """The thread begins with a call."""
        self._channel.acquire()
        self._runner = threading.get_ident()

    def leave(self, call: QueuedCall) -> None:
        """The thread is through with a call. Callbacks of the call run before the next call begins."""
        try:
            if self._depth:
                # A callback waits for this call. It comes first, as on ranks where the call was over already.
                self._deferred.append(call)
                return
            call.end()
            # The callback that waited has run with that: now those of the calls that it has waited for.
            while self._deferred:
                self._deferred.pop(0).end()
        finally:
            # The count falls first: else a call that finds the channel free would be queued for nothing.
            with self._order:
                self._num_queued -= 1
                if not self._num_queued:
                    self._set_stuck(False)
            self._channel.release()

    def carry_on(self, call: QueuedCall) -> None:
        """Before a wait of this thread: if it is the thread that has yet to carry the call out, do that now.

        Callbacks of calls that are carried out here run after the callback that waits.
        """
        if self._runner == threading.get_ident() and self._thread is not None:
            self._depth += 1
            try:
                self._thread.carry_out_until(call.handle.is_settled)
            finally:
                self._depth -= 1

    def end_deferred(self, call: QueuedCall) -> None:
        """Before a wait of this thread for a callback of ``call``: let that callback run, if it was put off."""
        if self._runner == threading.get_ident() and call in self._deferred:
            self._deferred.remove(call)
            call.end()

    def expect(self, handle: Handle[Any], limit_seconds: float | None) -> None:
        """Count a call as waited for until it is over, given up, or abandoned."""
        with self._order:
            self._expected.add(handle)
        handle.expect(limit_seconds)

    def give_up(self) -> None:
        """The program no longer waits for a call, which goes on."""
        with self._order:
            if self._num_queued:
                self._set_stuck(True)

    def close(self, seconds: float | None) -> None:
        """Wait ``seconds`` for the queued calls (None: without limit), and end the thread, unless it is stuck."""
        thread, self._thread = self._thread, None
        if thread is not None and communication_thread.is_installed():
            communication_thread.current().remove_companion(thread)
            # A call that is late now may never end: nothing waits for the thread any more, nor uses its communicator.
            if seconds is not None and not thread.is_stuck and not thread.is_drained_within(seconds):
                thread.is_stuck = self._comm.is_stuck = True
            if thread.is_stuck:
                self._abandon()
            thread.close()

    def _abandon(self) -> None:
        """No rank is late in the calls under way: their futures will not be completed, or come too late."""
        with self._order:
            expected = list(self._expected)
        for handle in expected:
            handle.give_up()

    def _set_stuck(self, is_stuck: bool) -> None:
        self._comm.is_stuck = is_stuck
        if self._thread is not None:
            self._thread.is_stuck = is_stuck
