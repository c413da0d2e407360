"""Flavour ``ring``: collectives of messages between pairs of ranks, for CPU tensors, within a node and across nodes.

Collectives follow the plans of ``schedule.py``, which defines slice, chunk, round, step. This is the transfer. A rank
takes a few rounds by turns, so that while it adds what came for one, the messages of the others are under way. Of a
tensor of S bytes (the larger of input and output) each of P ranks sends

allreduce       2 S (P-1)/P   twice around the ring: reduce_scatter, then allgather
reduce_scatter  S (P-1)/P     around the ring; every rank on the way adds its own values to a chunk
allgather       S (P-1)/P     around the ring; so on average when the slices have unequal sizes
alltoall        S (P-1)/P     directly, with the ranks at distance 1, then 2, and so on
broadcast       S             down a chain of all ranks, or in few chunks down a binomial tree, where some send more
reduce          S             the same, upwards. By way of reduce_scatter the root would get 2 S (P-1)/P bytes, and the
                              root sets the pace; through the chain it gets S
gather, scatter S/P           directly, all of it to or from the root

in chunks of up to CHUNK_BYTES, and in no message longer than ``Tuning.message_bytes``. 16-bit floats are added as
float32, and partial sums travel as float32 (``reductions.py``), which doubles the bytes of that half; but not in its
first step around the ring, where each rank sends values of its own, nor with two ranks, where there is no other step.

The total of an element is computed by one rank, in an order that the plan fixes, and passed on unchanged: all ranks get
the same bits, and so do two runs. Beside the tensors a reduction takes 2 * ROUNDS_UNDER_WAY * CHUNK_BYTES of memory
for received chunks, kept for the next reduction, and for a short time about as much again where values travel in
another form than they are stored in; the other collectives take none.

The ring is that of Baidu's and Horovod's allreduce and of TorchMPI's p2p collectives. No allreduce can send less:
Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchmpi_py.collectives import mpi_buffers
from torchmpi_py.collectives.flavour import Flavour, Requests, Sizes, Walk, complete
from torchmpi_py.collectives.flavours import schedule
from torchmpi_py.collectives.flavours.mpi_steps import INTERNAL, in_order
from torchmpi_py.collectives.flavours.schedule import NOTHING, Bounds, Step, chunks, slices
from torchmpi_py.collectives.reductions import kernel
from torchmpi_py.core import config
from torchmpi_py.core.channels import Channel
from torchmpi_py.core.mpi_api import MPI
from torchmpi_py.core.tensors import copy_to

CHUNK_BYTES = 512 << 10
"""Largest chunk. A message costs 10 us beside its bytes, more through TCP, where 128 KiB would take half as long again
and 256 KiB a fifth. 1 MiB would save 3 % in shared memory, 7 % through TCP (allreduce of 16 and 64 MiB on 2 ranks); but
it would halve the number of chunks, without which nothing is under way while another is added, and fill a chain more
slowly."""

LEAST_CHUNK_BYTES = 64 << 10
CHUNKS_OF_A_SLICE = 4
"""Chunks of a slice that is too small for so many of CHUNK_BYTES: while one is added the others travel."""

ROUNDS_UNDER_WAY = 3
"""Rounds by turns. Within a node, where the receiver copies, their number matters little; through TCP 3 rounds save a
tenth of the time of 1, as much as 4 do."""


class Ring(Flavour):
    """Messages between pairs of ranks."""

    name = "ring"
    devices = frozenset({"cpu"})

    def walk(self, verb: str, channel: Channel, *arguments: Any) -> Walk:
        """allreduce, reduce_scatter, allgather: their rounds have equally many steps on all ranks. Others: at once."""
        of_verb: Any = {"allreduce": _allreduce, "reduce_scatter": _reduce_scatter, "allgather": _allgather}
        if verb not in of_verb:
            return super().walk(verb, channel, *arguments)
        return itertools.chain.from_iterable(of_verb[verb](channel, *arguments))

    def allreduce(self, channel: Channel, source: Tensor, destination: Tensor, op: str) -> None:
        _run(_allreduce(channel, source, destination, op))

    def reduce_scatter(self, channel: Channel, source: Tensor, destination: Tensor, op: str) -> None:
        _run(_reduce_scatter(channel, source, destination, op))

    def reduce(self, channel: Channel, source: Tensor, destination: Tensor, op: str, root: int) -> None:
        _run(_reduce(channel, source, destination, op, root))

    def broadcast(self, channel: Channel, x: Tensor, root: int) -> None:
        copies, pieces = _Copies(channel, x, x), chunks(0, x.nbytes, _chunk_bytes(x.nbytes))
        tree = schedule.tree(channel.rank, channel.size, root, len(pieces))
        _run(copies.walks(schedule.broadcast(tree, piece) for piece in pieces))

    def allgather(self, channel: Channel, x: Tensor, out: Tensor, sizes: Sizes) -> None:
        _run(_allgather(channel, x, out, sizes))

    def alltoall(self, channel: Channel, source: Tensor, destination: Tensor) -> None:
        me, size, slice_bytes = channel.rank, channel.size, source.nbytes // channel.size
        destination.chunk(size)[me].copy_(source.chunk(size)[me])
        plan = schedule.alltoall(me, size, slice_bytes, _chunk_bytes(slice_bytes))
        _run(_Copies(channel, source, destination).walks(plan))

    def gather(self, channel: Channel, x: Tensor, out: Tensor | None, root: int, sizes: Sizes) -> None:
        if out is not None:
            copy_to(sizes.split(out)[root], x)
        plan = schedule.gather(channel.rank, root, in_order(sizes.num_bytes), _chunk_bytes(max(sizes.num_bytes)))
        _run(_Copies(channel, x, x if out is None else out).walks(plan))

    def scatter(self, channel: Channel, source: Tensor, destination: Tensor, root: int) -> None:
        if channel.rank == root:
            destination.copy_(source.chunk(channel.size)[root])
        bounds = in_order([destination.nbytes] * channel.size)
        plan = schedule.scatter(channel.rank, root, bounds, _chunk_bytes(destination.nbytes))
        _run(_Copies(channel, source, destination).walks(plan))


def _allreduce(channel: Channel, source: Tensor, destination: Tensor, op: str) -> Iterable[Walk]:
    reduction, me, out = _Reduction(channel, source, op), channel.rank, destination.view(-1)
    if channel.size == 1:
        return reduction.alone(out)
    x, copies, bounds = reduction.x, _Copies(channel, out, out), slices(out.numel(), channel.size)

    def around_twice(pieces: list[Bounds]) -> Walk:
        # Once around the ring every rank adds to each chunk, until its owner has the total ...
        yield from reduction.walk(schedule.reduce_scatter(me, pieces), out[slice(*pieces[me])], is_ring=True)
        # ... and once more every rank passes the totals on, as bytes.
        in_bytes = [(begin * x.itemsize, end * x.itemsize) for begin, end in pieces]
        yield from copies.walk(schedule.allgather(me, in_bytes))

    return map(around_twice, schedule.rounds(bounds, reduction.step(bounds)))


def _reduce_scatter(channel: Channel, source: Tensor, destination: Tensor, op: str) -> Iterable[Walk]:
    reduction, me, out = _Reduction(channel, source, op), channel.rank, destination.view(-1)
    if channel.size == 1:
        return reduction.alone(out)
    before = me * out.numel()  # elements of the whole before this rank's slice
    bounds = in_order([out.numel()] * channel.size)

    def around(pieces: list[Bounds]) -> Walk:
        begin, end = pieces[me]
        return reduction.walk(schedule.reduce_scatter(me, pieces), out[begin - before : end - before], is_ring=True)

    return map(around, schedule.rounds(bounds, reduction.step(bounds)))


def _reduce(channel: Channel, source: Tensor, destination: Tensor, op: str, root: int) -> Iterable[Walk]:
    reduction, is_root, out = _Reduction(channel, source, op), channel.rank == root, destination.view(-1)
    if channel.size == 1:
        return reduction.alone(out)
    pieces = chunks(0, source.numel(), reduction.step([(0, source.numel())]))
    tree = schedule.tree(channel.rank, channel.size, root, len(pieces))
    # Up the tree: a rank adds its values to what its children send; only root writes the total into ``out``.
    return (reduction.walk(schedule.reduce(tree, piece), out[slice(*piece)] if is_root else None) for piece in pieces)


def _allgather(channel: Channel, x: Tensor, out: Tensor, sizes: Sizes) -> Iterable[Walk]:
    copy_to(sizes.split(out)[channel.rank], x)  # the others' parts come around the ring, and are sent on from ``out``
    rounds = schedule.rounds(in_order(sizes.num_bytes), _chunk_bytes(max(sizes.num_bytes)))
    return _Copies(channel, out, out).walks(schedule.allgather(channel.rank, pieces) for pieces in rounds)


def _run(rounds: Iterable[Walk]) -> None:
    """All rounds of a verb, some at a time."""
    complete(schedule.in_turns(iter(rounds), ROUNDS_UNDER_WAY))


class _Copies:
    """Walks rounds whose messages carry plain bytes: sent from ``given``, received into ``received``."""

    def __init__(self, channel: Channel, given: Tensor, received: Tensor) -> None:
        self.comm = channel.mpi
        self.tensors = given, received  # alive as long as a walk: MPI has their addresses
        self.given, _ = mpi_buffers.raw(given)
        self.received, _ = mpi_buffers.raw(received)

    def walk(self, steps: Iterable[Step]) -> Walk:
        """One round."""
        for step in steps:
            yield post(self.comm, step, self.given[slice(*step.sent)], self.received[slice(*step.received)])

    def walks(self, plan: Iterable[Iterable[Step]]) -> Iterable[Walk]:
        """All rounds."""
        return map(self.walk, plan)


class _Reduction:
    """Walks rounds whose messages carry partial results."""

    def __init__(self, channel: Channel, source: Tensor, op: str) -> None:
        self.comm = channel.mpi
        self.num_ranks = channel.size
        self.x = source.view(-1)
        self.how = kernel(source.dtype, op)
        self.pool = channel.keep((ChunkPool, _largest_chunk_bytes()), ChunkPool)

    def step(self, bounds: Sequence[Bounds]) -> int:
        """Elements of a chunk of slices with these bounds."""
        itemsize, longest = self.how.dtype.itemsize, max(end - begin for begin, end in bounds)
        return max(1, _chunk_bytes(longest * itemsize) // itemsize)

    def walk(self, steps: Sequence[Step], target: Tensor | None, *, is_ring: bool = False) -> Walk:
        """One round. With ``target``, the last message completes the reduction of these elements, written there.

        ``is_ring``: in the first step all ranks send values of their own, as they are if that is shorter.

        Two buffers take turns: this rank adds its values to a message where the message has arrived, and sends the
        result from there while the next message arrives in the other buffer.
        """
        how, incoming, other = self.how, self.pool.borrow(), self.pool.borrow()
        plain_target = target.view(how.dtype) if target is not None and how.is_plain else None
        held, partial = NOTHING, self.x[:0]  # the elements that were added last, and the partial result

        def mine(bounds: Bounds) -> Tensor:
            return partial if bounds == held else how.partial(self.x[slice(*bounds)])

        as_it_is = is_ring and self.x.itemsize < how.dtype.itemsize
        for step in steps:
            # Post both messages: the partial result (in the first step this rank's own values), and the next one.
            begin, end = step.received
            given, dtype = (self.x[slice(*step.sent)], self.x.dtype) if as_it_is else (mine(step.sent), how.dtype)
            came = incoming[: (end - begin) * dtype.itemsize].view(dtype)
            yield post(self.comm, step, mpi_buffers.raw(given)[0], mpi_buffers.raw(came)[0])
            came, as_it_is = how.partial(came) if as_it_is else came, False
            # Both are complete: add this rank's values to what came, in the last step right into the target.
            if end > begin:
                out = plain_target if plain_target is not None and step is steps[-1] else came
                held, partial = step.received, how.combine(mine(step.received), came, out=out)
            incoming, other = other, incoming
        # The owner of the chunk has the reduction: divide (avg) and bring it into the dtype of the tensor.
        if target is not None and target.numel():
            result = how.result(partial, self.num_ranks, target.dtype)
            if plain_target is None:
                target.copy_(result)
        self.pool.unused += (incoming, other)

    def alone(self, out: Tensor) -> Iterable[Walk]:
        """The rounds of a rank that is alone: none."""
        self.how.reduce([self.x], out)
        return ()


class ChunkPool:
    """Buffers of a chunk each, kept with a channel: to touch new memory costs as much as to receive into it."""

    def __init__(self, channel: Channel) -> None:
        self.num_bytes = max(_largest_chunk_bytes(), torch.complex128.itemsize)
        self.unused: list[Tensor] = []

    def borrow(self) -> Tensor:
        """A buffer; the borrower puts it back among the ``unused`` when no message comes or goes there any more."""
        if self.unused:
            return self.unused.pop()
        with torch.inference_mode(False):  # it is kept, for calls outside of that mode too
            return torch.empty(self.num_bytes, dtype=torch.uint8, device="cpu")

    def free(self) -> None:
        self.unused.clear()


def post(comm: MPI.Comm, step: Step, given: Any, received: Any) -> Requests:
    """Post a step's messages; none where there are no bytes."""
    requests = []
    if len(received):  # the receive first, so that the message finds its place
        requests.append(comm.Irecv([received, MPI.BYTE], step.source, INTERNAL))
    if len(given):
        requests.append(comm.Isend([given, MPI.BYTE], step.to, INTERNAL))
    return requests


def _chunk_bytes(slice_bytes: int) -> int:
    """Size of the chunks of slices: small slices make CHUNKS of them, so that one is added while others travel."""
    wanted = -(-slice_bytes // CHUNKS_OF_A_SLICE // LEAST_CHUNK_BYTES) * LEAST_CHUNK_BYTES
    return min(_largest_chunk_bytes(), max(LEAST_CHUNK_BYTES, wanted))


def _largest_chunk_bytes() -> int:
    return min(CHUNK_BYTES, config.current.message_bytes)
