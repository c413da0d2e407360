"""send and recv of a process group: messages with tags, from a certain rank or from any.

They must not queue behind collectives, nor behind each other: a receive may come before its counterpart's send. So they
are posted to MPI at once, on a communicator of their own. Tags beyond those that MPI has begin again; the last one is
for ``monitoring.py``.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from torchmpi_py import communication_thread, watch
from torchmpi_py.channels import DIRECT
from torchmpi_py.collectives import mpi_steps
from torchmpi_py.collectives.operation import Operation
from torchmpi_py.collectives.registry import BY_NAME
from torchmpi_py.communicators import Communicator
from torchmpi_py.handles import RequestHandle
from torchmpi_py.tensors import check_rank, check_tensor, flat, written
from torchmpi_py.torch_backend.monitoring import last_tag
from torchmpi_py.torch_backend.work import Pending

_FROM_ANY = "recv from any rank"


class Message(Pending):
    """A message under way."""

    def __init__(self, handle: RequestHandle[Any], x: Tensor, seconds: float | None, receipts: list[Any]) -> None:
        super().__init__(handle, [x], seconds, _in_a_thread, _nothing, _nothing)
        self._receipts = receipts

    def source_rank(self) -> int:
        """The rank that sent it, in the group."""
        self.wait()
        return int(self._receipts[0].status.Get_source())

    _source_rank = source_rank


def send(comm: Communicator, x: Tensor, destination: int, tag: int, seconds: float | None, frame: FrameType) -> Message:
    """Post it."""
    check_rank("send", "dst", destination, comm.size)
    buffer = flat(check_tensor("send", "tensor", x)).cpu()
    mpi = comm.background.mpi
    return _posted(
        "send", comm, (buffer, destination), x, None, seconds, frame,
        lambda: mpi_steps.post_send(mpi, buffer, destination, tag % last_tag()),
    )  # fmt: skip


def receive(
    comm: Communicator, x: Tensor, source: int | None, tag: int, seconds: float | None, frame: FrameType
) -> Message:
    """Post it; from any rank if ``source`` is None."""
    from mpi4py import MPI

    where = MPI.ANY_SOURCE if source is None else check_rank("recv", "src", source, comm.size)
    buffer, copy_out = written("recv", check_tensor("recv", "tensor", x), holds_input=False)
    if x.is_cuda:
        buffer = torch.empty(x.shape, dtype=x.dtype, device="cpu")
        copy_out = functools.partial(_copy, x, buffer)
    mpi = comm.background.mpi
    name = _FROM_ANY if source is None else "recv"
    return _posted(
        name, comm, (buffer, where), x, copy_out, seconds, frame,
        lambda: mpi_steps.post_recv(mpi, buffer, where, tag % last_tag()),
    )  # fmt: skip


def _posted(
    name: str,
    comm: Communicator,
    arguments: tuple[Any, ...],
    x: Tensor,
    copy_out: Callable[[], object] | None,
    seconds: float | None,
    frame: FrameType,
    post: Callable[[], list[Any]],
) -> Message:
    conclude = None if copy_out is None else lambda _: copy_out()
    operation: Operation[Any] = Operation(name, name, BY_NAME["mpi"], comm, arguments, conclude, x.nbytes, x)
    operation.noted = watch.note(operation, DIRECT, True, frame)
    try:
        requests = post()
    except BaseException:
        watch.fail(operation.noted)
        raise
    handle = RequestHandle(operation, requests)
    communication_thread.current().keep(handle)
    return Message(handle, x, seconds, requests)


def _copy(x: Tensor, buffer: Tensor) -> None:
    x.detach().copy_(buffer)


def _in_a_thread(step: Callable[[], None]) -> None:
    """A future of a message is completed by who waits for it, and nobody else may do so."""
    threading.Thread(target=step, name="torchmpi_py-message", daemon=True).start()


def _nothing(_: object) -> None:
    """A message that is late holds nothing else up, and can be waited for in every thread."""
