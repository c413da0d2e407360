"""Flavour ``mpi``: stock MPI through mpi4py, for CPU tensors.

Each verb is written once, as the *steps* it takes: a generator of (name of a blocking MPI call, its arguments). Run one
after the other they are the blocking form; small operations, which take a single step, and send and recv are also
posted as the nonblocking call of the same name, and the generator goes on when that is complete.

Messages longer than ``Tuning.message_bytes`` travel in pieces. Where an MPI collective would count beyond 32 bits in
total, the verb is composed of calls that do not: allgather of broadcasts, reduce_scatter of reduces, the others of
messages between pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

from torchmpi_py import config, handles
from torchmpi_py.collectives import wire
from torchmpi_py.collectives.flavour import Flavour
from torchmpi_py.collectives.gathering import Sizes, exchange_sizes

if TYPE_CHECKING:
    from mpi4py import MPI

    from torchmpi_py.collectives.operation import Operation

R = TypeVar("R")
Step = tuple[str, tuple[Any, ...]]  # the name of the MPI call, its arguments
Steps = Iterator[Step]


class Mpi(Flavour):
    """Stock MPI."""

    name = "mpi"
    devices = frozenset({"cpu"})

    def launch(self, operation: Operation[R]) -> handles.Handle[R]:
        """Post small collectives and all point-to-point messages to MPI; leave the rest to the communication thread.

        Point-to-point messages must not queue: a receive launched before its counterpart's send would block the thread.
        """
        steps = _STEPS.get(operation.method)
        is_pairwise = operation.method in ("send", "recv")
        if steps is None or (operation.num_bytes > config.tuning().native_async_bytes and not is_pairwise):
            return super().launch(operation)
        remaining = steps(operation.comm.direct, *operation.arguments)
        first = [*remaining] if is_pairwise else [step for step in (next(remaining, None),) if step is not None]
        requests = [getattr(operation.comm.direct, f"I{name.lower()}")(*arguments) for name, arguments in first]
        handle = handles.RequestHandle(_Posted(operation, remaining), requests)
        return handles.communication_thread().keep(handle)

    def broadcast(self, comm: MPI.Comm, x: Tensor, root: int) -> None:
        _run(comm, _broadcast(comm, x, root))

    def reduce(self, comm: MPI.Comm, source: Tensor, destination: Tensor, op: str, root: int) -> None:
        _run(comm, _reduce(comm, source, destination, op, root))

    def allreduce(self, comm: MPI.Comm, source: Tensor, destination: Tensor, op: str) -> None:
        _run(comm, _allreduce(comm, source, destination, op))

    def reduce_scatter(self, comm: MPI.Comm, source: Tensor, destination: Tensor, op: str) -> None:
        _run(comm, _reduce_scatter(comm, source, destination, op))

    def alltoall(self, comm: MPI.Comm, source: Tensor, destination: Tensor) -> None:
        _run(comm, _alltoall(comm, source, destination))

    def scatter(self, comm: MPI.Comm, source: Tensor, destination: Tensor, root: int) -> None:
        _run(comm, _scatter(comm, source, destination, root))

    def sendreceive(self, comm: MPI.Comm, x: Tensor, out: Tensor, source: int, destination: int) -> None:
        _run(comm, _sendreceive(comm, x, out, source, destination))

    def send(self, comm: MPI.Comm, x: Tensor, destination: int) -> None:
        _run(comm, _send(comm, x, destination))

    def recv(self, comm: MPI.Comm, x: Tensor, source: int) -> None:
        _run(comm, _recv(comm, x, source))

    def allgather(self, comm: MPI.Comm, x: Tensor, out: Tensor | None) -> Tensor:
        sizes = exchange_sizes(comm, x, out)
        out = sizes.output("allgather", x, out, writers=range(comm.size))
        _run(comm, _allgather(comm, x, out, sizes))
        return out

    def gather(self, comm: MPI.Comm, x: Tensor, out: Tensor | None, root: int) -> Tensor | None:
        sizes = exchange_sizes(comm, x, out)
        result = sizes.output("gather", x, out, writers=(root,)) if comm.rank == root else None
        _run(comm, _gather(comm, x, result, root, sizes))
        return result

    def broadcast_object(self, comm: MPI.Comm, obj: object, root: int) -> Any:
        from mpi4py.util import pkl5  # objects of any size, large buffers out of band

        return pkl5.Intracomm(comm).bcast(obj, root)

    def allgather_object(self, comm: MPI.Comm, obj: object) -> list[Any]:
        from mpi4py.util import pkl5

        return list(pkl5.Intracomm(comm).allgather(obj))


class _Posted:
    """An operation whose first step was posted: what is left of its steps, and then of itself."""

    def __init__(self, operation: Operation[Any], remaining: Steps) -> None:
        self.operation = operation
        self.remaining = remaining
        self.run_in_background = operation.run_in_background

    def finish(self) -> Any:
        for step in self.remaining:
            raise AssertionError(f"{self.operation}: posted as one message, but step {step[0]} follows")
        return self.operation.finish()

    def __str__(self) -> str:
        return str(self.operation)


def _run(comm: MPI.Comm, steps: Steps) -> None:
    for name, arguments in steps:
        getattr(comm, name)(*arguments)


def _limit() -> int:
    return config.tuning().message_bytes


def _broadcast(comm: MPI.Comm, x: Tensor, root: int) -> Steps:
    for (piece,) in wire.pieces(_limit(), x.itemsize, x):
        yield "Bcast", (wire.raw(piece), root)


def _allreduce(comm: MPI.Comm, source: Tensor, destination: Tensor, op: str) -> Steps:
    how = wire.reduction(source.dtype, op)
    if how.decode is not None:
        yield from _encoded(comm, source, destination, how, "Allreduce", (how.mpi_op,))
        return
    for sent, received in wire.pieces(config.tuning().message_bytes, how.itemsize, source, destination):
        given, taken = wire.pair(sent, received, how.mpi_type)
        yield "Allreduce", (given, taken, how.mpi_op)
    if how.divide:
        destination.div_(comm.size)


def _reduce(comm: MPI.Comm, source: Tensor, destination: Tensor, op: str, root: int) -> Steps:
    how = wire.reduction(source.dtype, op)
    is_root = comm.rank == root
    if how.decode is not None:
        yield from _encoded(comm, source, destination if is_root else None, how, "Reduce", (how.mpi_op, root))
        return
    for sent, received in wire.pieces(config.tuning().message_bytes, how.itemsize, source, destination):
        buffers = wire.pair(sent, received, how.mpi_type) if is_root else (wire.typed(sent, how.mpi_type), None)
        yield "Reduce", (*buffers, how.mpi_op, root)
    if how.divide and is_root:
        destination.div_(comm.size)


def _encoded(
    comm: MPI.Comm, source: Tensor, destination: Tensor | None, how: wire.Reduction, call: str, last: tuple[Any, ...]
) -> Steps:
    """The steps of (all)reduce for a dtype that travels in another form; without destination: this rank only gives."""
    assert how.encode is not None, how
    assert how.decode is not None, how
    target = source if destination is None else destination  # not written without a destination
    for piece, received in wire.pieces(config.tuning().wire_bytes, how.itemsize, source, target):
        scratch = how.encode(piece)
        buffer = wire.typed(scratch, how.mpi_type)
        yield call, (buffer, None, *last) if destination is None else (wire.in_place(), buffer, *last)
        if destination is not None:
            received.copy_(how.decode(scratch.div_(comm.size) if how.divide else scratch).view_as(received))


def _reduce_scatter(comm: MPI.Comm, source: Tensor, destination: Tensor, op: str) -> Steps:
    how = wire.reduction(source.dtype, op)
    limit = _limit() if how.encode is None else config.tuning().wire_bytes
    if source.numel() * how.itemsize > limit:
        for root, part in enumerate(source.chunk(comm.size)):
            yield from _reduce(comm, part, destination, op, root)
        return
    sent = source if how.encode is None else how.encode(source)
    received = destination if how.encode is None else sent.new_empty(destination.shape)
    yield "Reduce_scatter_block", (wire.typed(sent, how.mpi_type), wire.typed(received, how.mpi_type), how.mpi_op)
    if how.divide:
        received.div_(comm.size)
    if how.decode is not None:
        destination.copy_(how.decode(received))


def _alltoall(comm: MPI.Comm, source: Tensor, destination: Tensor) -> Steps:
    if source.nbytes <= _limit():
        yield "Alltoall", (wire.raw(source), wire.raw(destination))
        return
    sent, received = source.chunk(comm.size), destination.chunk(comm.size)
    for distance in range(comm.size):
        to, of = (comm.rank + distance) % comm.size, (comm.rank - distance) % comm.size
        yield from _sendreceive(comm, sent[to], received[of], of, to)


def _scatter(comm: MPI.Comm, source: Tensor, destination: Tensor, root: int) -> Steps:
    if source.nbytes <= _limit():
        yield "Scatter", (wire.raw(source) if comm.rank == root else None, wire.raw(destination), root)
    elif comm.rank != root:
        yield from _recv(comm, destination, root)
    else:
        for rank, part in enumerate(source.chunk(comm.size)):
            if rank == root:
                destination.copy_(part)
            else:
                yield from _send(comm, part, rank)


def _sendreceive(comm: MPI.Comm, x: Tensor, out: Tensor, source: int, destination: int) -> Steps:
    for sent, received in wire.pieces(_limit(), x.itemsize, x, out):
        yield "Sendrecv", (wire.raw(sent), destination, 0, wire.raw(received), source, 0)


def _send(comm: MPI.Comm, x: Tensor, destination: int) -> Steps:
    for (piece,) in wire.pieces(_limit(), x.itemsize, x):
        yield "Send", (wire.raw(piece), destination)


def _recv(comm: MPI.Comm, x: Tensor, source: int) -> Steps:
    for (piece,) in wire.pieces(_limit(), x.itemsize, x):
        yield "Recv", (wire.raw(piece), source)


def _allgather(comm: MPI.Comm, x: Tensor, out: Tensor, sizes: Sizes) -> Steps:
    if out.nbytes > _limit():
        for root, part in enumerate(sizes.split(out)):
            if root == comm.rank:
                part.copy_(x)
            yield from _broadcast(comm, part, root)
    elif sizes.are_equal:
        yield "Allgather", (wire.raw(x), wire.raw(out))
    else:
        yield "Allgatherv", (wire.raw(x), [*wire.raw(out)[:1], sizes.num_bytes, wire.raw(out)[1]])


def _gather(comm: MPI.Comm, x: Tensor, out: Tensor | None, root: int, sizes: Sizes) -> Steps:
    if sum(sizes.num_bytes) <= _limit():
        spec = None if out is None else [wire.raw(out)[0], sizes.num_bytes, wire.raw(out)[1]]
        yield "Gatherv", (wire.raw(x), spec, root)
    elif out is None:
        yield from _send(comm, x, root)
    else:
        for rank, part in enumerate(sizes.split(out)):
            if rank == root:
                part.copy_(x)
            else:
                yield from _recv(comm, part, rank)


_STEPS: dict[str, Callable[..., Steps]] = {
    "broadcast": _broadcast,
    "reduce": _reduce,
    "allreduce": _allreduce,
    "reduce_scatter": _reduce_scatter,
    "alltoall": _alltoall,
    "scatter": _scatter,
    "send": _send,
    "recv": _recv,
}
