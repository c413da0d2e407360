"""Flavour ``mpi``: MPI's own collectives through mpi4py, also for GPU tensors if the MPI accepts GPU memory.

Each collective is written once, as a sequence of *steps* (``mpi_steps.py``): names and arguments of blocking MPI calls.
The blocking form makes these calls one after the other. The asynchronous form of a small collective with a single step
posts MPI's nonblocking version of the call. When the call is complete, the conversions after the step follow. Send and
recv are posted whatever their size. The communication thread carries out all other asynchronous operations.

MPI does not support streams. Before each call on a GPU tensor the host therefore waits for all work in the current
stream, including the conversions of earlier steps. For GPU tensors only send and recv are posted, so that only the
communication thread waits for the stream of a collective.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor

from torchmpi_py.collectives import mpi_buffers
from torchmpi_py.collectives.flavour import Flavour, Sizes
from torchmpi_py.collectives.flavours import gpu_probe, mpi_steps
from torchmpi_py.collectives.flavours.mpi_steps import Steps
from torchmpi_py.collectives.plan import Operation, Plan, Post
from torchmpi_py.core import communication_thread, config, handles
from torchmpi_py.core.channels import Channel
from torchmpi_py.core.mpi_api import MPI

R = TypeVar("R")


def _in_steps(steps: Callable[..., Steps]) -> Callable[..., None]:
    """Return a flavour's method that carries out the ``steps`` of a collective one after the other."""

    def carry_out(_: Flavour, channel: Channel, x: Tensor, *others: Any) -> None:
        for name, arguments in steps(channel.mpi, x, *others):
            if x.is_cuda:
                mpi_buffers.synchronize_stream(x)
            getattr(channel.mpi, name)(*arguments)

    return carry_out


class Mpi(Flavour):
    """MPI's own collectives, and messages between two ranks."""

    name = "mpi"
    devices = frozenset({"cpu", "cuda"})

    def missing(self, device: str) -> str:
        return gpu_probe.why_no_gpu_memory if device == "cuda" else ""

    def bind(self, plan: Plan) -> tuple[Callable[..., Any], Post | None]:
        """Return (work, post) of a plan; ``post`` is for small collectives and for send and recv.

        Send and recv must not wait in the queue of the communication thread. If both ranks launched a receive before
        their send, both threads would block in the receive.
        """
        work, post = super().bind(plan)
        comm = plan.comm.direct.mpi
        if plan.name in _POSTS:
            return work, functools.partial(_post_message, comm)
        if plan.device is not None:
            return work, post
        is_small = plan.num_bytes <= config.current.native_async_bytes
        if (only_call := _only_call(plan)) is not None:
            name, arguments_of = only_call
            call = getattr(comm, name)
            work = lambda *tensors: call(*arguments_of(*tensors))  # noqa: E731
            if is_small:
                post = functools.partial(_post_call, getattr(comm, _posted_as(name)), arguments_of)
        elif plan.method == "allgather":
            work = _allgather_at_once(comm, plan.others[0]) or work
        elif is_small and plan.method in _POSTED:
            post = functools.partial(_post_step, comm)
        return work, post

    broadcast = _in_steps(mpi_steps.broadcast)
    reduce = _in_steps(mpi_steps.reduce)
    reduce_scatter = _in_steps(mpi_steps.reduce_scatter)
    alltoall = _in_steps(mpi_steps.alltoall)
    scatter = _in_steps(mpi_steps.scatter)
    send = _in_steps(mpi_steps.send)
    allgather = _in_steps(mpi_steps.allgather)
    gather = _in_steps(mpi_steps.gather)
    allreduce = _in_steps(mpi_steps.allreduce)

    def recv(self, channel: Channel, x: Tensor, source: int) -> None:
        if x.is_cuda:
            mpi_buffers.synchronize_stream(x)
        mpi_steps.receive(channel.mpi, x, source)

    def sendreceive(self, channel: Channel, x: Tensor, out: Tensor, source: int, destination: int) -> None:
        if x.is_cuda:
            mpi_buffers.synchronize_stream(x)
        mpi_steps.sendreceive(channel.mpi, x, out, source, destination)

    def broadcast_object(self, channel: Channel, obj: object, root: int) -> Any:
        from mpi4py.util import pkl5  # This module sends objects of any size, and large buffers without pickling.

        return pkl5.Intracomm(channel.mpi).bcast(obj, root)

    def allgather_object(self, channel: Channel, obj: object) -> list[Any]:
        from mpi4py.util import pkl5

        return list(pkl5.Intracomm(channel.mpi).allgather(obj))


def _only_call(plan: Plan) -> tuple[str, Callable[..., tuple[Any, ...]]] | None:
    """Return the name of the only MPI call of a plan, and a function from the plan's tensors to the call's arguments.

    Return None if the plan may need several calls or conversions. Then a generator in ``mpi_steps`` yields the steps,
    which takes longer.
    """
    if plan.num_bytes > config.current.message_bytes:
        return None
    memory, num_bytes, in_place = MPI.memory.fromaddress, plan.num_bytes, MPI.IN_PLACE
    if plan.method == "broadcast":
        (root,) = plan.others
        return "Bcast", lambda x: ([memory(x.data_ptr(), num_bytes), MPI.BYTE], root)
    if plan.method != "allreduce":
        return None
    assert plan.dtype is not None, plan
    how = mpi_buffers.reduction(plan.dtype, *plan.others)
    if how.decode is not None or how.divide:
        return None
    mpi_type, mpi_op = how.mpi_type, how.mpi_op

    def arguments_of(source: Tensor, destination: Tensor) -> tuple[Any, ...]:
        address, start = destination.data_ptr(), source.data_ptr()
        sent: mpi_buffers.Buffer = in_place if start == address else [memory(start, num_bytes), mpi_type]
        return sent, [memory(address, num_bytes), mpi_type], mpi_op

    return "Allreduce", arguments_of


def _allgather_at_once(comm: MPI.Comm, sizes: Sizes) -> Callable[[Tensor, Tensor], None] | None:
    """Return a function that makes an allgather in one MPI call without a generator; None if one call is not enough."""
    memory, own_bytes, all_bytes = MPI.memory.fromaddress, sizes.num_bytes[comm.rank], sum(sizes.num_bytes)
    if not sizes.are_equal or all_bytes > config.current.message_bytes:
        return None

    def work(x: Tensor, out: Tensor) -> None:
        address, source = out.data_ptr(), x.data_ptr()
        if address - own_bytes < source < address + all_bytes:  # the inlined test of copy_if_overlapping
            source = (x := x.clone()).data_ptr()
        comm.Allgather([memory(source, own_bytes), MPI.BYTE], [memory(address, all_bytes), MPI.BYTE])

    return work


def _keep(operation: Operation[R], requests: Sequence[handles.MpiRequest], *steps: Any) -> handles.Handle[R]:
    """Create the handle of posted requests, and register it with the communication thread, which keeps it alive."""
    return communication_thread.current().keep(handles.RequestHandle(operation, requests, *steps))


def _post_message(comm: MPI.Comm, operation: Operation[R]) -> handles.Handle[R]:
    """Post a send or a recv."""
    x = operation.arguments[0]
    if x.is_cuda:
        mpi_buffers.synchronize_stream(x)
    return _keep(operation, _POSTS[operation.plan.name](comm, x, *operation.plan.others))


def _post_call(
    call: Callable[..., MPI.Request], arguments_of: Callable[..., tuple[Any, ...]], operation: Operation[R]
) -> handles.Handle[R]:
    """Post a collective that consists of one MPI call without conversions."""
    return _keep(operation, [call(*arguments_of(*operation.arguments))])


def _post_step(comm: MPI.Comm, operation: Operation[R]) -> handles.Handle[R]:
    """Make the conversions before the only step of a collective, and post the step.

    The handle makes the conversions after the step.
    """
    steps = getattr(mpi_steps, operation.plan.method)(comm, *operation.arguments, *operation.plan.others)
    first = next(steps, None)  # A collective of tensors without elements has no step.
    requests = [] if first is None else [getattr(comm, _posted_as(first[0]))(*first[1])]
    return _keep(operation, requests, functools.partial(_run_out, operation, steps))


@functools.cache
def _posted_as(name: str) -> str:
    """Return the name of the nonblocking version of an MPI call, such as Ibcast for Bcast."""
    return f"I{name.lower()}"


def _run_out(operation: Operation[Any], remaining: Steps) -> None:
    """Make the conversions that follow the only step of an operation. The step must be complete."""
    for step in remaining:
        raise AssertionError(f"{operation.plan}: posted as one message, but step {step[0]} follows")


_POSTED = frozenset({"broadcast", "reduce", "allreduce", "reduce_scatter", "alltoall", "scatter"})
"""The collectives that take only one step if they are small."""
_POSTS: dict[str, Callable[..., Any]] = {"send": mpi_steps.post_send, "recv": mpi_steps.post_recv}
