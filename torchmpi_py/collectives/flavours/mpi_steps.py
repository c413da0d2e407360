"""The steps of each verb over stock MPI: which blocking MPI calls, with which buffers, in which order.

Messages longer than ``Tuning.message_bytes`` travel in pieces. Where an MPI collective would count beyond 32 bits in
total, the verb is composed of calls that do not: allgather of broadcasts, reduce_scatter of reduces, the others of
messages between pairs. Tensors are flat. A generator goes on when its last step is complete: what follows a ``yield``
(a division, a conversion) sees the result. On a GPU the work before a ``yield`` has only been queued; the caller of MPI
waits for that work first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from torchmpi_py.collectives import mpi_buffers
from torchmpi_py.collectives.flavour import Sizes
from torchmpi_py.core import config
from torchmpi_py.core.mpi_api import MPI
from torchmpi_py.core.tensors import copy_if_overlapping, copy_to
from torchmpi_py.errors import RanksDisagree

Step = tuple[str, tuple[Any, ...]]  # the name of the MPI call, its arguments
Steps = Iterator[Step]

MESSAGE, EXCHANGE, INTERNAL = range(3)  # tags: a receive that is under way must not catch a piece of another verb


def broadcast(comm: MPI.Comm, x: Tensor, root: int) -> Steps:
    """Bcast."""
    for (piece,) in mpi_buffers.pieces(config.current.message_bytes, x.itemsize, x):
        yield "Bcast", (mpi_buffers.raw(piece), root)


def allreduce(comm: MPI.Comm, source: Tensor, destination: Tensor, op: str) -> Steps:
    """Allreduce."""
    how = mpi_buffers.reduction(source.dtype, op)
    if how.decode is not None:
        yield from _encoded(comm, source, destination, how, "Allreduce", (how.mpi_op,))
        return
    for sent, received in mpi_buffers.pieces(config.current.message_bytes, how.itemsize, source, destination):
        given, taken = mpi_buffers.pair(sent, received, how.mpi_type)
        yield "Allreduce", (given, taken, how.mpi_op)
    if how.divide:
        destination.div_(comm.size)


def reduce(comm: MPI.Comm, source: Tensor, destination: Tensor, op: str, root: int) -> Steps:
    """Reduce."""
    how = mpi_buffers.reduction(source.dtype, op)
    is_root = comm.rank == root
    if how.decode is not None:
        yield from _encoded(comm, source, destination if is_root else None, how, "Reduce", (how.mpi_op, root))
        return
    for sent, received in mpi_buffers.pieces(config.current.message_bytes, how.itemsize, source, destination):
        buffers = (
            mpi_buffers.pair(sent, received, how.mpi_type) if is_root else (mpi_buffers.typed(sent, how.mpi_type), None)
        )
        yield "Reduce", (*buffers, how.mpi_op, root)
    if how.divide and is_root:
        destination.div_(comm.size)


def _encoded(
    comm: MPI.Comm,
    source: Tensor,
    destination: Tensor | None,
    how: mpi_buffers.Reduction,
    call: str,
    last: tuple[Any, ...],
) -> Steps:
    """The steps of (all)reduce for a dtype that travels in another form. ``destination`` is None where none is due."""
    assert how.encode is not None, how
    assert how.decode is not None, how
    target = source if destination is None else destination  # not written without a destination
    for piece, received in mpi_buffers.pieces(config.current.wire_bytes, how.itemsize, source, target):
        scratch = how.encode(piece)
        buffer = mpi_buffers.typed(scratch, how.mpi_type)
        yield call, (buffer, None, *last) if destination is None else (MPI.IN_PLACE, buffer, *last)
        if destination is not None:
            received.copy_(how.decode(scratch.div_(comm.size) if how.divide else scratch).view_as(received))


def reduce_scatter(comm: MPI.Comm, source: Tensor, destination: Tensor, op: str) -> Steps:
    """Reduce_scatter_block; large: a reduce per rank."""
    how = mpi_buffers.reduction(source.dtype, op)
    limit = config.current.message_bytes if how.encode is None else config.current.wire_bytes
    if source.numel() * how.itemsize > limit:
        for root, part in enumerate(source.chunk(comm.size)):
            yield from reduce(comm, part, destination, op, root)
        return
    sent = copy_if_overlapping(source, destination) if how.encode is None else how.encode(source)
    received = destination if how.encode is None else sent.new_empty(destination.shape)
    yield (
        "Reduce_scatter_block",
        (mpi_buffers.typed(sent, how.mpi_type), mpi_buffers.typed(received, how.mpi_type), how.mpi_op),
    )
    if how.divide:
        received.div_(comm.size)
    if how.decode is not None:
        destination.copy_(how.decode(received))


def alltoall(comm: MPI.Comm, source: Tensor, destination: Tensor) -> Steps:
    """Alltoall; large: pairwise exchanges at growing distance."""
    if source.nbytes <= config.current.message_bytes:
        yield "Alltoall", (mpi_buffers.raw(source), mpi_buffers.raw(destination))
        return
    sent, received = source.chunk(comm.size), destination.chunk(comm.size)
    for distance in range(comm.size):
        to, of = (comm.rank + distance) % comm.size, (comm.rank - distance) % comm.size
        yield from sendreceive(comm, sent[to], received[of], of, to, INTERNAL)


def scatter(comm: MPI.Comm, source: Tensor, destination: Tensor, root: int) -> Steps:
    """Scatter; large: messages from root."""
    if source.nbytes <= config.current.message_bytes:
        source = copy_if_overlapping(source, destination)  # alone, a rank may give one memory for both
        yield "Scatter", (mpi_buffers.raw(source) if comm.rank == root else None, mpi_buffers.raw(destination), root)
    elif comm.rank != root:
        yield from recv(comm, destination, root, INTERNAL)
    else:
        for rank, part in enumerate(source.chunk(comm.size)):
            if rank == root:
                destination.copy_(part)
            else:
                yield from send(comm, part, rank, INTERNAL)


def _messages(*tensors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """The pieces that travel as a message each: one without bytes for empty tensors, which the other side may not be.

    Without it the next message would come in its place.
    """
    if tensors[0].numel() == 0:
        return (tensors,)
    return mpi_buffers.pieces(config.current.message_bytes, tensors[0].itemsize, *tensors)


def sendreceive(comm: MPI.Comm, x: Tensor, out: Tensor, source: int, destination: int, tag: int = EXCHANGE) -> Steps:
    """Sendrecv."""
    for sent, received in _messages(x, out):
        status = MPI.Status()
        yield (
            "Sendrecv",
            (mpi_buffers.raw(sent), destination, tag, mpi_buffers.raw(received), source, tag, status),
        )
        check_arrived(status, received.nbytes)


def send(comm: MPI.Comm, x: Tensor, destination: int, tag: int = MESSAGE) -> Steps:
    """Send."""
    for (piece,) in _messages(x):
        yield "Send", (mpi_buffers.raw(piece), destination, tag)


def recv(comm: MPI.Comm, x: Tensor, source: int, tag: int = MESSAGE) -> Steps:
    """Recv."""
    for (piece,) in _messages(x):
        status = MPI.Status()
        yield "Recv", (mpi_buffers.raw(piece), source, tag, status)
        check_arrived(status, piece.nbytes)


class Receipt:
    """A posted receive, which must bring as many bytes as it has room for.

    A signal's handler may raise between the end of the request, which is null then, and the check.
    """

    def __init__(self, comm: MPI.Comm, piece: Tensor, source: int, tag: int) -> None:
        self.request = comm.Irecv(mpi_buffers.raw(piece), source, tag)
        self.num_bytes = piece.nbytes
        self.status = MPI.Status()

    def Test(self) -> bool:  # noqa: N802 - as mpi4py's Request
        if self.request and not self.request.Test(self.status):
            return False
        check_arrived(self.status, self.num_bytes)
        return True

    def Cancel(self) -> None:  # noqa: N802
        self.request.Cancel()

    def Wait(self) -> None:  # noqa: N802
        if self.request:
            self.request.Wait(self.status)
        check_arrived(self.status, self.num_bytes)


def post_recv(comm: MPI.Comm, x: Tensor, source: int, tag: int = MESSAGE) -> list[Receipt]:
    """Irecv of every piece."""
    return [Receipt(comm, piece, source, tag) for (piece,) in _messages(x)]


def post_send(comm: MPI.Comm, x: Tensor, destination: int, tag: int = MESSAGE) -> list[MPI.Request]:
    """Isend of every piece."""
    return [comm.Isend(mpi_buffers.raw(piece), destination, tag) for (piece,) in _messages(x)]


def check_arrived(status: MPI.Status, num_bytes: int) -> None:
    """RanksDisagree unless so many bytes came: MPI itself accepts a shorter message without an error."""
    arrived = status.Get_elements(MPI.BYTE)
    if arrived != num_bytes:
        raise RanksDisagree(
            f"rank {status.Get_source()} sent {arrived} bytes where {num_bytes} were expected; the rest of the tensor "
            "is as it was. Sender and receiver need tensors of the same dtype and number of elements"
        )


def allgather(comm: MPI.Comm, x: Tensor, out: Tensor, sizes: Sizes) -> Steps:
    """Allgather(v); large: a broadcast per rank."""
    if out.nbytes > config.current.message_bytes:
        for root, part in enumerate(sizes.split(out)):
            if root == comm.rank:
                copy_to(part, x)
            yield from broadcast(comm, part, root)
        return
    x = copy_if_overlapping(x, out)  # MPI would have to know of all ranks that they are in place
    if sizes.are_equal:
        yield "Allgather", (mpi_buffers.raw(x), mpi_buffers.raw(out))
    else:
        yield "Allgatherv", (mpi_buffers.raw(x), [*mpi_buffers.raw(out)[:1], sizes.num_bytes, mpi_buffers.raw(out)[1]])


def gather(comm: MPI.Comm, x: Tensor, out: Tensor | None, root: int, sizes: Sizes) -> Steps:
    """Gatherv; large: messages to root."""
    if sum(sizes.num_bytes) <= config.current.message_bytes:
        spec = None if out is None else [mpi_buffers.raw(out)[0], sizes.num_bytes, mpi_buffers.raw(out)[1]]
        x = x if out is None else copy_if_overlapping(x, out)
        yield "Gatherv", (mpi_buffers.raw(x), spec, root)
    elif out is None:
        yield from send(comm, x, root, INTERNAL)
    else:
        for rank, part in enumerate(sizes.split(out)):
            if rank == root:
                copy_to(part, x)
            else:
                yield from recv(comm, part, rank, INTERNAL)
