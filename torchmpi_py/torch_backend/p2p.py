"""Send and receive messages with tags in a process group, from one rank or from any rank.

A message must not wait in a queue for collectives or other messages, because a program may call a receive before the
send that matches it. So each message is posted to MPI immediately, on a communicator for messages, with tags of the
group (``communicator_pool.py``).
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch import Tensor

from torchmpi_py.collectives.flavours import mpi_steps
from torchmpi_py.collectives.plan import Operation, Plan
from torchmpi_py.collectives.registry import BY_NAME
from torchmpi_py.core import communication_thread, config, journal
from torchmpi_py.core.channels import DIRECT
from torchmpi_py.core.communicators import resolve
from torchmpi_py.core.handles import RequestHandle
from torchmpi_py.core.mpi_api import MPI
from torchmpi_py.core.status_board import IS_LAUNCH
from torchmpi_py.core.tensors import check_rank, check_tensor, flat, output_buffer
from torchmpi_py.memory.devices import HostCopy
from torchmpi_py.torch_backend.communicator_pool import Membership
from torchmpi_py.torch_backend.work import PendingWork


class Message(PendingWork):
    """A message in transit. Other calls do not wait for it. MPI transfers it while a thread waits for it."""

    def __init__(self, handle: RequestHandle[Any], x: Tensor, seconds: float | None, receipts: list[Any]) -> None:
        super().__init__([x], seconds)
        self.handle: RequestHandle[Any] = handle
        self._receipts = receipts

    def expect(self) -> None:
        super().expect()
        threading.Thread(target=self._end_when_over, name="torchmpi_py-message", daemon=True).start()

    def _end_when_over(self) -> None:
        self.handle.settle()
        self.end()

    def source_rank(self) -> int:
        """Wait for the message; return the group rank of its sender."""
        self.wait()
        return int(self._receipts[0].status.Get_source())

    _source_rank = source_rank


class Mailbox:
    """The point-to-point messages of a group."""

    def __init__(self, membership: Membership) -> None:
        self._members, self._comm, self._mpi = membership, membership.comm, membership.messages
        self._receives: dict[int, RequestHandle[Any]] = {}  # pending receives
        communication_thread.current().add_companion(self)

    def send(self, x: Tensor, destination: int, tag: int, seconds: float | None, frame: FrameType) -> Message:
        """Post a send to MPI, and return the message."""
        check_rank("send", "dst", destination, resolve(self._comm).size)
        place, buffer = self._members.tag("send", tag), flat(check_tensor("send", "tensor", x)).cpu()
        operation = self._operation("send", destination, buffer, x)
        handle, _ = _posted(operation, frame, lambda: mpi_steps.post_send(self._mpi, buffer, destination, place))
        communication_thread.current().keep(handle)
        return Message(handle, x, seconds, [])

    def receive(self, x: Tensor, source: int | None, tag: int, seconds: float | None, frame: FrameType) -> Message:
        """Post a receive to MPI, from any rank if ``source`` is None, and return the message."""
        size, place = resolve(self._comm).size, self._members.tag("recv", tag)
        where = MPI.ANY_SOURCE if source is None else check_rank("recv", "src", source, size)
        buffer, copy_out = output_buffer("recv", check_tensor("recv", "tensor", x), holds_input=False)
        if source is None and x.nbytes > config.current.message_bytes:
            raise ValueError(
                f"recv: {x.nbytes} bytes need several messages, which could mix with messages from other ranks; pass "
                "the sender's rank (src=)"
            )
        if x.is_cuda:
            copy = HostCopy(x.detach())
            buffer = copy.empty()
            copy_out = functools.partial(copy.from_host, buffer, None)
        operation = self._operation("recv from any rank" if source is None else "recv", where, buffer, x)
        operation.conclude = None if copy_out is None else lambda _: copy_out()
        handle, receipts = _posted(operation, frame, lambda: mpi_steps.post_recv(self._mpi, buffer, where, place))
        handle.stay_in(self._receives)
        return Message(handle, x, seconds, receipts)

    def drain(self) -> None:
        """Do nothing, because receives without a matching message may stay pending."""

    def close(self) -> None:
        """Cancel the receives without a matching message."""
        for handle in list(self._receives.values()):
            handle.cancel()

    def _operation(self, name: str, other: int, buffer: Tensor, x: Tensor) -> Operation[Any]:
        plan = Plan(
            name=name, flavour=BY_NAME["mpi"], comm=self._comm, others=(other,), num_bytes=x.nbytes, dtype=buffer.dtype
        )
        return Operation(plan, (buffer,), x, launched=time.time_ns())


def _posted(
    operation: Operation[Any], frame: FrameType, post: Callable[[], list[Any]]
) -> tuple[RequestHandle[Any], list[Any]]:
    """Record an operation, post it to MPI, and return its handle and its requests."""
    operation.entry = journal.record(operation.plan, DIRECT, IS_LAUNCH, frame)
    try:
        requests = post()
        return RequestHandle(operation, requests), requests
    except BaseException:
        journal.fail(operation.entry)
        raise
