"""The calls of one process group, in the order in which the program makes them.

torch.distributed lets one rank make a call that blocks where another one makes it asynchronously: all that counts is
the order. So a group has one communicator for both, and its calls are carried out one after another: one that blocks in
the thread that makes it, if nothing of the group is under way, and all others in a thread of the group. That is begun
with the first call that needs it, and groups do not wait for each other.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from torchmpi_py import communication_thread, config, streams
from torchmpi_py.communication_thread import CommunicationThread
from torchmpi_py.communicators import Communicator
from torchmpi_py.handles import Handle
from torchmpi_py.torch_backend.work import Call


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

    def submit(self, call: Call) -> Handle[Any]:
        """Queue it for the thread of the group."""
        with self._order:
            self._num_queued += 1
            if self._thread is None:
                self._thread = communication_thread.current().beside(self._name)
        return streams.submit(_Queued(call, self), call.device, call.tensors, self._thread)

    def before_wait(self, handle: Handle[Any]) -> None:
        """Before this thread waits: if it is the one that has yet to carry that out, do it now."""
        if self._runner == threading.get_ident() and self._thread is not None:
            self._thread.carry_out_until(handle.done)

    def set_stuck(self, is_stuck: bool) -> None:
        """Whether somebody has stopped waiting for a call, which goes on."""
        self._comm.is_stuck = is_stuck
        if self._thread is not None:
            self._thread.is_stuck = is_stuck

    def close(self) -> None:
        """Wait for what is queued, unless it is stuck, and end the thread."""
        if self._thread is not None and communication_thread.is_installed():
            communication_thread.current().let_go(self._thread)
            self._thread.close()
        self._thread = None


class _Queued:
    """A call as work for the thread."""

    def __init__(self, call: Call, queue: CallQueue) -> None:
        self._call, self._queue = call, queue
        self.label, self.noted = call.label, call.noted
        self.finish, self.explain, self.who_is_late = call.finish, call.explain, call.who_is_late

    def run_in_background(self) -> Sequence[Tensor]:
        self._queue._channel.acquire()
        self._queue._runner = threading.get_ident()
        return self._call.run()

    def on_settled(self) -> None:
        """The handle is complete: now what was chained to the call may run, and then the next call."""
        queue = self._queue
        try:
            self._call.is_over()
        finally:
            with queue._order:
                queue._num_queued -= 1
                if not queue._num_queued:
                    queue.set_stuck(False)
            queue._channel.release()
