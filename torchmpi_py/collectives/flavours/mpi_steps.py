"""The steps of each collective over MPI: a sequence of blocking MPI calls with their buffers.

Messages longer than ``Tuning.message_bytes`` travel in pieces. If the counts of an MPI collective could exceed 32 bits
in total, several smaller calls replace it. An allgather becomes broadcasts, and a reduce_scatter becomes reduces.
Gather, scatter and alltoall become messages between pairs of ranks, as planned by ``schedule.py``.

A message's tag encodes the dtype, so that the bits of one dtype never arrive as values of another dtype. This costs no
additional bytes. A message of a different dtype does not match a receive; the receive finds the message in a probe, and
raises an error (``Receipt``). Alternative: a header in the message. It is not used because it needs either a copy or a
derived datatype, which makes large messages 3 to 20 times slower.

Tensors are flat. A generator is resumed only when the yielded step is complete, so code after a ``yield`` (a division,
a conversion) works on the result. On a GPU the work before a ``yield`` has only been queued, so the caller waits for
the stream before it makes the MPI call.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from torchmpi_py.collectives import mpi_buffers
from torchmpi_py.collectives.flavour import Sizes
from torchmpi_py.collectives.flavours import schedule
from torchmpi_py.core import config
from torchmpi_py.core.mpi_api import MPI
from torchmpi_py.core.tensors import copy_if_overlapping, copy_to
from torchmpi_py.errors import RanksDisagree

Step = tuple[str, tuple[Any, ...]]  # name and arguments of an MPI call
Steps = Iterator[Step]

_DTYPES = [None, *sorted({x for x in vars(torch).values() if isinstance(x, torch.dtype)}, key=str)]
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
TAGS_PER_KIND = 64  # more than the number of dtypes
MESSAGE, EXCHANGE, INTERNAL = (kind * TAGS_PER_KIND for kind in range(3))
"""The first tag of each kind of message: send and recv, sendreceive, and the pieces of large collectives.

Each kind has its own tags, so that a pending receive never gets a message of another kind.
"""
# The time between two probes for a message of a different dtype. A probe takes some microseconds.
_LOOK_SECONDS = 100e-6
# The time between two searches for such messages with every possible tag. The usual probe finds only the first message
# from a rank.
_SEARCH_SECONDS = 0.05


def broadcast(comm: MPI.Comm, x: Tensor, root: int) -> Steps:
    """Yield a Bcast for each piece of ``x``."""
    for (piece,) in mpi_buffers.pieces(config.current.message_bytes, x.itemsize, x):
        yield "Bcast", (mpi_buffers.raw(piece), root)


def allreduce(comm: MPI.Comm, source: Tensor, destination: Tensor, op: str) -> Steps:
    """Yield an Allreduce for each piece of ``source``."""
    return _reduced(comm, source, destination, op)


def reduce(comm: MPI.Comm, source: Tensor, destination: Tensor, op: str, root: int) -> Steps:
    """Yield a Reduce for each piece of ``source``."""
    return _reduced(comm, source, destination if comm.rank == root else None, op, root)


def _reduced(comm: MPI.Comm, source: Tensor, destination: Tensor | None, op: str, *root: int) -> Steps:
    """Yield the steps of a reduce to ``root``, or without ``root`` of an allreduce.

    Without ``destination`` this rank gets no result.
    """
    how = mpi_buffers.reduction(source.dtype, op)
    limit = config.current.message_bytes if how.encode is None else config.current.wire_bytes
    target = source if destination is None else destination  # Without a destination, the target is a placeholder.
    for piece, received in mpi_buffers.pieces(limit, how.itemsize, source, target):
        sent = piece if how.encode is None else how.encode(piece)
        result = received if how.encode is None else sent
        send_buffer, receive_buffer = mpi_buffers.pair(sent, result, how.mpi_type)
        if destination is None:
            send_buffer, receive_buffer = mpi_buffers.typed(sent, how.mpi_type), None
        yield "Reduce" if root else "Allreduce", (send_buffer, receive_buffer, how.mpi_op, *root)
        if destination is not None and how.divide:
            result.div_(comm.size)
        if destination is not None and how.decode is not None:
            received.copy_(how.decode(result).view_as(received))


def reduce_scatter(comm: MPI.Comm, source: Tensor, destination: Tensor, op: str) -> Steps:
    """Yield a Reduce_scatter_block, or for large tensors one reduce for each rank's slice."""
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
    """Yield an Alltoall, or for large tensors messages between pairs of ranks."""
    if source.nbytes <= config.current.message_bytes:
        yield "Alltoall", (mpi_buffers.raw(source), mpi_buffers.raw(destination))
        return
    destination.chunk(comm.size)[comm.rank].copy_(source.chunk(comm.size)[comm.rank])
    length, step = source.nbytes // comm.size, config.current.message_bytes
    yield from _exchanges(comm, source, destination, schedule.alltoall(comm.rank, comm.size, length, step))


def scatter(comm: MPI.Comm, source: Tensor, destination: Tensor, root: int) -> Steps:
    """Yield a Scatter, or for large tensors messages from root."""
    if source.nbytes <= config.current.message_bytes:
        source = copy_if_overlapping(source, destination)  # On a single rank both may be the same memory.
        yield "Scatter", (mpi_buffers.raw(source) if comm.rank == root else None, mpi_buffers.raw(destination), root)
        return
    bounds = in_order([destination.nbytes] * comm.size)
    plan = schedule.scatter(comm.rank, root, bounds, config.current.message_bytes)
    yield from _exchanges(comm, source, destination, plan)
    if comm.rank == root:
        destination.copy_(source.chunk(comm.size)[root])


def _messages(*tensors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Cut tensors of equal size into the pieces that travel as one message each.

    An empty tensor also has one piece, because the other rank's tensor might have elements. Without an empty message, a
    later message would match the other rank's receive.
    """
    if tensors[0].numel() == 0:
        return (tensors,)
    return mpi_buffers.pieces(config.current.message_bytes, tensors[0].itemsize, *tensors)


def _exchanges(comm: MPI.Comm, source: Tensor, target: Tensor, plan: Iterable[Iterable[schedule.Step]]) -> Steps:
    """Yield a Sendrecv for every step of a plan. The messages may be empty.

    Raise RanksDisagree if a message is shorter than planned.
    """
    (sent, _), (room, _), tag = mpi_buffers.raw(source), mpi_buffers.raw(target), INTERNAL + _CODES[source.dtype]
    for step in itertools.chain.from_iterable(plan):
        status, piece = MPI.Status(), room[slice(*step.received)]
        send_buffer = [sent[slice(*step.sent)], MPI.BYTE]
        yield "Sendrecv", (send_buffer, step.to, tag, [piece, MPI.BYTE], step.source, tag, status)
        if (arrived := status.Get_elements(MPI.BYTE)) != len(piece):  # MPI accepts shorter messages.
            raise RanksDisagree(
                f"rank {step.source} sent {arrived} bytes where {len(piece)} bytes were expected; pass tensors of the "
                "same dtype and number of elements on all ranks. The remaining elements of the result are unchanged"
            )


def in_order(lengths: Iterable[int]) -> list[schedule.Bounds]:
    """Return the bounds of consecutive slices of these lengths. The first slice begins at 0."""
    ends = list(itertools.accumulate(lengths))
    return list(zip([0, *ends], ends, strict=False))


def send(comm: MPI.Comm, x: Tensor, destination: int) -> Steps:
    """Yield a Send for each piece of ``x``."""
    for (piece,) in _messages(x):
        yield "Send", (mpi_buffers.raw(piece), destination, MESSAGE + _CODES[x.dtype])


def receive(comm: MPI.Comm, x: Tensor, source: int) -> None:
    """Receive ``x`` in pieces, one after the other."""
    for (piece,) in _messages(x):
        Receipt(comm, piece, source, MESSAGE).wait_or_cancel()


def sendreceive(comm: MPI.Comm, x: Tensor, out: Tensor, source: int, destination: int) -> None:
    """Send ``x`` and receive ``out`` in pieces, one pair of pieces after the other."""
    for sent, received in _messages(x, out):
        receipt = Receipt(comm, received, source, EXCHANGE)
        (request,) = post_send(comm, sent, destination, EXCHANGE)
        try:
            receipt.wait_or_cancel()
            request.Wait()
        except BaseException:
            _abandoned.append((request, sent))
            raise


_abandoned: list[object] = []  # Sends that an error interrupted are kept alive, because MPI may still read the buffers.


class Receipt:
    """A posted receive, whose message must have the dtype of the piece, and exactly as many bytes.

    If the first message from the source does not fit, the receive is not posted. If a message of a different dtype
    arrives before the right message, the receive is cancelled. In both cases the wrong message is received and
    discarded, so that the next receive gets the next message. Two messages may arrive between two probes. In this case
    the receive gets the first message of its own dtype, and the next receive finds the other message.
    """

    def __init__(self, comm: MPI.Comm, piece: Tensor, source: int, tag: int) -> None:
        self.tag, self.num_bytes, self.status = tag + _CODES[piece.dtype], piece.nbytes, MPI.Status()
        self._comm, self._source, self._kind, self._next_search = comm, source, tag, time.monotonic() + _SEARCH_SECONDS
        self._next_look = 0.0
        self._error: RanksDisagree | None = None
        self.request = MPI.REQUEST_NULL
        if self._finds_misfit(self.num_bytes):
            self._error = self._receive_misfit()
        else:
            self.request = comm.Irecv(mpi_buffers.raw(piece), source, self.tag)

    def Test(self) -> bool:  # noqa: N802 - the name in mpi4py's Request
        if self._error is not None:
            raise self._error
        # The request is null here if an earlier call completed it, but a signal handler raised before the check below.
        try:
            if self.request and not self.request.Test(self.status) and not self._is_cut_off():
                return False
        except MPI.Exception as error:
            self.request = MPI.REQUEST_NULL  # The request is complete, and must not be cancelled.
            if error.Get_error_class() != MPI.ERR_TRUNCATE:
                raise
            raise self._misfit(self.status, f"more than {self.num_bytes}") from error
        if self.status.Is_cancelled():
            return True  # The caller of Cancel raises the error.
        if (arrived := self.status.Get_elements(MPI.BYTE)) != self.num_bytes:
            raise self._misfit(self.status, arrived)
        return True

    def _finds_misfit(self, most_bytes: float) -> bool:
        """Return whether a message of this kind has arrived with a different dtype or more than ``most_bytes``.

        Set ``status`` to the status of this message. Usually only the first message from the source is examined,
        because a search for later messages takes longer.
        """
        tags: Iterable[int] = (MPI.ANY_TAG,)
        if time.monotonic() > self._next_search:
            self._next_search = time.monotonic() + _SEARCH_SECONDS
            tags = (tag for tag in range(self._kind + 1, self._kind + len(_DTYPES)) if tag != self.tag)
        if not any(self._comm.Iprobe(self._source, tag, self.status) for tag in tags):
            return False
        is_of_kind = self._kind < self.status.tag < self._kind + TAGS_PER_KIND
        return is_of_kind and (self.status.tag != self.tag or self.status.Get_elements(MPI.BYTE) > most_bytes)

    def _is_cut_off(self) -> bool:
        """Cancel the receive and raise RanksDisagree if a message of a different dtype has arrived.

        Return True if the receive was complete before it could be cancelled, and False if no such message has arrived.
        """
        if (now := time.monotonic()) < self._next_look:
            return False
        self._next_look = now + _LOOK_SECONDS
        if not self._finds_misfit(math.inf):
            return False
        # A receive that already matches a message cannot be cancelled. The next receive then finds the wrong message.
        ended = MPI.Status()
        self.request.Cancel()
        self.request.Wait(ended)
        if not ended.Is_cancelled():
            self.status = ended
            return True
        self._error = self._receive_misfit()
        raise self._error

    def _receive_misfit(self) -> RanksDisagree:
        """Receive and discard the message that does not fit; return the error for the caller to raise."""
        num_bytes = self.status.Get_elements(MPI.BYTE)
        self._comm.Recv([bytearray(num_bytes), MPI.BYTE], self.status.source, self.status.tag)
        return self._misfit(self.status, num_bytes)

    def _misfit(self, status: MPI.Status, num_bytes: int | str) -> RanksDisagree:
        """Return the error for a message that does not fit."""
        sent, expected = (_DTYPES[tag % TAGS_PER_KIND] for tag in (status.tag, self.tag))
        return RanksDisagree(
            f"rank {status.source} sent {num_bytes} bytes of {sent} where {self.num_bytes} bytes of {expected} were "
            "expected; pass tensors of the same dtype and number of elements on both ranks"
        )

    def Cancel(self) -> None:  # noqa: N802
        self.request.Cancel()

    def Wait(self) -> None:  # noqa: N802
        while not self.Test():
            os.sched_yield()  # Do not sleep, because MPI may advance large messages only in Test.

    def wait_or_cancel(self) -> None:
        """Wait for the message. Cancel the receive after an exception, for example an exception in a signal handler.

        After the cancellation MPI no longer writes to the tensor.
        """
        try:
            self.Wait()
        except BaseException:
            if self.request:
                self.request.Cancel()
                self.request.Wait()
            raise


def post_recv(comm: MPI.Comm, x: Tensor, source: int, tag: int = MESSAGE) -> list[Receipt]:
    """Post an Irecv for every piece of ``x``."""
    return [Receipt(comm, piece, source, tag) for (piece,) in _messages(x)]


def post_send(comm: MPI.Comm, x: Tensor, destination: int, tag: int = MESSAGE) -> list[MPI.Request]:
    """Post an Isend for every piece of ``x``."""
    return [comm.Isend(mpi_buffers.raw(piece), destination, tag + _CODES[x.dtype]) for (piece,) in _messages(x)]


def allgather(comm: MPI.Comm, x: Tensor, out: Tensor, sizes: Sizes) -> Steps:
    """Yield an Allgather or Allgatherv, or for large tensors the broadcasts of each rank's part."""
    if out.nbytes > config.current.message_bytes:
        for root, part in enumerate(sizes.split(out)):
            if root == comm.rank:
                copy_to(part, x)
            yield from broadcast(comm, part, root)
        return
    x = copy_if_overlapping(x, out)  # MPI allows IN_PLACE only if all ranks use it.
    if sizes.are_equal:
        yield "Allgather", (mpi_buffers.raw(x), mpi_buffers.raw(out))
    else:
        yield "Allgatherv", (mpi_buffers.raw(x), [*mpi_buffers.raw(out)[:1], sizes.num_bytes, mpi_buffers.raw(out)[1]])


def gather(comm: MPI.Comm, x: Tensor, out: Tensor | None, root: int, sizes: Sizes) -> Steps:
    """Yield a Gatherv, or for large tensors messages to root."""
    if sum(sizes.num_bytes) <= config.current.message_bytes:
        spec = None if out is None else [mpi_buffers.raw(out)[0], sizes.num_bytes, mpi_buffers.raw(out)[1]]
        x = x if out is None else copy_if_overlapping(x, out)
        yield "Gatherv", (mpi_buffers.raw(x), spec, root)
        return
    if out is not None:
        copy_to(sizes.split(out)[root], x)
    plan = schedule.gather(comm.rank, root, in_order(sizes.num_bytes), config.current.message_bytes)
    yield from _exchanges(comm, x, x if out is None else out, plan)
