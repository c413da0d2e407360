"""Flavour ``mpi``: stock MPI through mpi4py; GPU tensors too where the MPI takes addresses of GPU memory.

Each verb is written once, as the *steps* it takes (``mpi_steps.py``): names of blocking MPI calls with their arguments.
The blocking form makes the steps one after the other. The asynchronous form of small collectives, which take a single
step, and of send and recv posts the nonblocking call of the same name; the steps go on when that call is complete.

MPI knows nothing of streams: before each call on a GPU tensor the host waits for all work in the current stream, the
conversions of the steps before included. Of GPU tensors only send and recv are posted; for collectives the
communication thread does the waiting.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor

from torchmpi_py.collectives import mpi_buffers
from torchmpi_py.collectives.flavour import Flavour
from torchmpi_py.collectives.flavours import gpu_probe, mpi_steps
from torchmpi_py.collectives.flavours.mpi_steps import Steps
from torchmpi_py.collectives.operation import Operation
from torchmpi_py.core import communication_thread, config, handles
from torchmpi_py.core.channels import Channel
from torchmpi_py.core.mpi_api import MPI

R = TypeVar("R")


def _in_steps(steps: Callable[..., Steps]) -> Callable[..., None]:
    """The blocking form of a verb: its ``steps``, one after the other, for tensors on the device of the first one."""

    def carry_out(_: Flavour, channel: Channel, x: Tensor, *others: Any) -> None:
        for name, arguments in steps(channel.mpi, x, *others):
            if x.is_cuda:
                mpi_buffers.synchronize_stream(x)
            getattr(channel.mpi, name)(*arguments)

    return carry_out


_allreduce_in_steps = _in_steps(mpi_steps.allreduce)


def _only_step(source: Tensor, destination: Tensor, op: str) -> tuple[Any, ...] | None:
    """The arguments of the only MPI call of an allreduce on the host; None where there are several, or conversions.

    By hand, for a generator takes 1 us longer.
    """
    how, num_bytes = mpi_buffers.reduction(source.dtype, op), source.nbytes
    is_only = how.decode is None and not how.divide and not source.is_cuda
    if not is_only or num_bytes > config.current.message_bytes:
        return None
    address, memory, given = destination.data_ptr(), MPI.memory.fromaddress, source.data_ptr()
    sent: mpi_buffers.Buffer = MPI.IN_PLACE if given == address else [memory(given, num_bytes), how.mpi_type]
    return sent, [memory(address, num_bytes), how.mpi_type], how.mpi_op


class Mpi(Flavour):
    """Stock MPI."""

    name = "mpi"
    devices = frozenset({"cpu", "cuda"})

    def missing(self, device: str) -> str:
        return gpu_probe.why_not() if device == "cuda" else ""

    def posts(self, operation: Operation[Any]) -> bool:
        if operation.method in _POSTS:
            return True
        is_small = operation.num_bytes <= config.current.native_async_bytes
        return is_small and operation.method in _STEPS and not operation.arguments[0].is_cuda

    def launch(self, operation: Operation[R]) -> handles.Handle[R]:
        """Post small collectives and all send and recv to MPI; leave the rest to the communication thread.

        Point-to-point messages must not queue: a receive launched before its counterpart's send would block the thread.
        """
        comm, thread = operation.comm.direct.mpi, communication_thread.current()
        x = operation.arguments[0]
        if operation.method in _POSTS:
            if x.is_cuda:
                mpi_buffers.synchronize_stream(x)
            return thread.keep(handles.RequestHandle(operation, _POSTS[operation.method](comm, *operation.arguments)))
        if not self.posts(operation):
            return super().launch(operation)
        if operation.method == "allreduce" and (only_step := _only_step(*operation.arguments)) is not None:
            return thread.keep(handles.RequestHandle(operation, [comm.Iallreduce(*only_step)]))
        steps = _STEPS[operation.method](comm, *operation.arguments)
        first = next(steps, None)  # None: there are no elements
        requests = [] if first is None else [getattr(comm, _POSTED_AS[first[0]])(*first[1])]
        return thread.keep(handles.RequestHandle(operation, requests, functools.partial(_run_out, operation, steps)))

    def again(self, operation: Operation[Any], num_tensors: int) -> Callable[[Tensor], object]:
        if operation.method != "allreduce" or _only_step(*operation.arguments) is None:
            return super().again(operation, num_tensors)
        how = mpi_buffers.reduction(operation.arguments[0].dtype, operation.arguments[2])
        # All that the calls have in common is looked up here.
        allreduce, in_place, memory = operation.comm.direct.mpi.Allreduce, MPI.IN_PLACE, MPI.memory.fromaddress
        mpi_type, mpi_op, num_bytes = how.mpi_type, how.mpi_op, operation.num_bytes
        return lambda x: allreduce(in_place, [memory(x.data_ptr(), num_bytes), mpi_type], mpi_op)

    broadcast = _in_steps(mpi_steps.broadcast)
    reduce = _in_steps(mpi_steps.reduce)
    reduce_scatter = _in_steps(mpi_steps.reduce_scatter)
    alltoall = _in_steps(mpi_steps.alltoall)
    scatter = _in_steps(mpi_steps.scatter)
    send = _in_steps(mpi_steps.send)
    allgather = _in_steps(mpi_steps.allgather)
    gather = _in_steps(mpi_steps.gather)

    def allreduce(self, channel: Channel, source: Tensor, destination: Tensor, op: str) -> None:
        if (only_step := _only_step(source, destination, op)) is None:
            _allreduce_in_steps(self, channel, source, destination, op)
        else:
            channel.mpi.Allreduce(*only_step)

    def recv(self, channel: Channel, x: Tensor, source: int) -> None:
        if x.is_cuda:
            mpi_buffers.synchronize_stream(x)
        mpi_steps.receive(channel.mpi, x, source)

    def sendreceive(self, channel: Channel, x: Tensor, out: Tensor, source: int, destination: int) -> None:
        if x.is_cuda:
            mpi_buffers.synchronize_stream(x)
        mpi_steps.sendreceive(channel.mpi, x, out, source, destination)

    def broadcast_object(self, channel: Channel, obj: object, root: int) -> Any:
        from mpi4py.util import pkl5  # objects of any size, large buffers out of band

        return pkl5.Intracomm(channel.mpi).bcast(obj, root)

    def allgather_object(self, channel: Channel, obj: object) -> list[Any]:
        from mpi4py.util import pkl5

        return list(pkl5.Intracomm(channel.mpi).allgather(obj))


def _run_out(operation: Operation[Any], remaining: Steps) -> None:
    """The conversions of an operation whose only step was posted, once that step is complete."""
    for step in remaining:
        raise AssertionError(f"{operation}: posted as one message, but step {step[0]} follows")


_STEPS: dict[str, Callable[..., Steps]] = {  # the collectives that take one step when they are small
    "broadcast": mpi_steps.broadcast,
    "reduce": mpi_steps.reduce,
    "allreduce": mpi_steps.allreduce,
    "reduce_scatter": mpi_steps.reduce_scatter,
    "alltoall": mpi_steps.alltoall,
    "scatter": mpi_steps.scatter,
}
_POSTED_AS = {
    "Allreduce": "Iallreduce",
    "Alltoall": "Ialltoall",
    "Bcast": "Ibcast",
    "Reduce": "Ireduce",
    "Reduce_scatter_block": "Ireduce_scatter_block",
    "Scatter": "Iscatter",
}
_POSTS: dict[str, Callable[..., Sequence[handles.MpiRequest]]] = {
    "send": mpi_steps.post_send,
    "recv": mpi_steps.post_recv,
}
