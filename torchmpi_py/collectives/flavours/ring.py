"""Flavour ``ring``: collectives of messages between pairs of ranks, for CPU tensors, within a node and across nodes.

The verbs follow the plans of ``schedule.py``, which defines slice, chunk, round and step. Here is the transfer. A rank
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
float32 and travel as float32 until the sum is complete (``reductions.py``), which doubles the bytes of that half.

The total of an element is computed by one rank, in an order that the plan fixes, and passed on unchanged: all ranks get
the same bits, and so do two runs. Beside the tensors a reduction takes 2 * ROUNDS_UNDER_WAY * CHUNK_BYTES of memory
for received chunks, kept for the next reduction, and for a short time about as much again where values travel in
another form than they are stored in; the other verbs take none.

The ring is that of Baidu's and Horovod's allreduce and of TorchMPI's p2p collectives. No allreduce can send less:
Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchmpi_py.collectives import mpi_buffers
from torchmpi_py.collectives.flavour import Flavour, Sizes
from torchmpi_py.collectives.flavours import schedule
from torchmpi_py.collectives.flavours.mpi_steps import INTERNAL
from torchmpi_py.collectives.flavours.schedule import NOTHING, Bounds, Step, chunks, slices
from torchmpi_py.collectives.reductions import kernel
from torchmpi_py.core import config
from torchmpi_py.core.channels import Channel
from torchmpi_py.core.mpi_api import MPI

if TYPE_CHECKING:
    Requests = list[MPI.Request]
    Walk = Iterator[Requests]  # of a round: what has to be complete before the next step

CHUNK_BYTES = 512 << 10
"""Largest chunk. A message costs 10 us beside its bytes, more through TCP, where 128 KiB would take half as long again
and 256 KiB a fifth. 1 MiB would save 3 % in shared memory, 7 % through TCP (allreduce of 16 and 64 MiB on 2 ranks); but
it would halve the number of chunks, without which nothing is under way while another is added, and fill a chain more
slowly."""

ROUNDS_UNDER_WAY = 3
"""Rounds by turns. Within a node, where the receiver copies, their number matters little; through TCP 3 rounds save a
tenth of the time of 1, as much as 4 do."""


class Ring(Flavour):
    """Messages between pairs of ranks."""

    name = "ring"
    devices = frozenset({"cpu"})

    def allreduce(self, channel: Channel, source: Tensor, destination: Tensor, op: str) -> None:
        self.begin_allreduce(channel, source, destination, op)()

    def begin_allreduce(self, channel: Channel, source: Tensor, destination: Tensor, op: str) -> Callable[[], None]:
        """The first messages set out at once; all ranks begin and complete several in the same order."""
        reduction, me = _Reduction(channel, source, op), channel.rank
        x, out = reduction.x, destination.view(-1)
        copies = _Copies(channel, out, out)

        def around_twice(pieces: list[Bounds]) -> Walk:
            # Once around the ring every rank adds to each chunk, until its owner has the total ...
            yield from reduction.walk(schedule.reduce_scatter(me, pieces), _part(out, pieces[me]))
            # ... and once more every rank passes the totals on, as bytes.
            in_bytes = [(begin * x.itemsize, end * x.itemsize) for begin, end in pieces]
            yield from copies.walk(schedule.allgather(me, in_bytes))

        rounds = schedule.rounds(slices(x.numel(), channel.size), reduction.step)
        waits = reduction.begin(map(around_twice, rounds), out)
        first = next(waits, [])  # posts the first messages of the first rounds
        return lambda: _wait(itertools.chain([first], waits))

    def reduce_scatter(self, channel: Channel, source: Tensor, destination: Tensor, op: str) -> None:
        reduction, me = _Reduction(channel, source, op), channel.rank
        out = destination.view(-1)
        before = me * out.numel()  # elements of the whole before this rank's slice

        def around(pieces: list[Bounds]) -> Walk:
            begin, end = pieces[me]
            return reduction.walk(schedule.reduce_scatter(me, pieces), out[begin - before : end - before])

        rounds = schedule.rounds(_in_order([out.numel()] * channel.size), reduction.step)
        reduction.run(map(around, rounds), out)

    def reduce(self, channel: Channel, source: Tensor, destination: Tensor, op: str, root: int) -> None:
        reduction, is_root = _Reduction(channel, source, op), channel.rank == root
        out, pieces = destination.view(-1), chunks(0, source.numel(), reduction.step)
        tree = schedule.tree(channel.rank, channel.size, root, len(pieces))
        # Up the tree: a rank adds its values to what its children send; only root writes the total into ``out``.
        walks = (
            reduction.walk(schedule.reduce(tree, piece), _part(out, piece) if is_root else None) for piece in pieces
        )
        reduction.run(walks, out)

    def broadcast(self, channel: Channel, x: Tensor, root: int) -> None:
        copies, pieces = _Copies(channel, x, x), chunks(0, x.nbytes, _chunk_bytes())
        tree = schedule.tree(channel.rank, channel.size, root, len(pieces))
        copies.run(schedule.broadcast(tree, piece) for piece in pieces)

    def allgather(self, channel: Channel, x: Tensor, out: Tensor, sizes: Sizes) -> None:
        sizes.split(out)[channel.rank].copy_(x)  # the others' parts come around the ring, and are sent on from ``out``
        rounds = schedule.rounds(_in_order(sizes.num_bytes), _chunk_bytes())
        _Copies(channel, out, out).run(schedule.allgather(channel.rank, pieces) for pieces in rounds)

    def alltoall(self, channel: Channel, source: Tensor, destination: Tensor) -> None:
        me, size, slice_bytes = channel.rank, channel.size, source.nbytes // channel.size
        destination.chunk(size)[me].copy_(source.chunk(size)[me])
        _Copies(channel, source, destination).run(schedule.alltoall(me, size, slice_bytes, _chunk_bytes()))

    def gather(self, channel: Channel, x: Tensor, out: Tensor | None, root: int, sizes: Sizes) -> None:
        if out is not None:
            sizes.split(out)[root].copy_(x)
        plan = schedule.gather(channel.rank, root, _in_order(sizes.num_bytes), _chunk_bytes())
        _Copies(channel, x, x if out is None else out).run(plan)

    def scatter(self, channel: Channel, source: Tensor, destination: Tensor, root: int) -> None:
        if channel.rank == root:
            destination.copy_(source.chunk(channel.size)[root])
        bounds = _in_order([destination.nbytes] * channel.size)
        plan = schedule.scatter(channel.rank, root, bounds, _chunk_bytes())
        _Copies(channel, source, destination).run(plan)


class _Copies:
    """Walks rounds whose messages carry plain bytes: sent from ``given``, received into ``received``."""

    def __init__(self, channel: Channel, given: Tensor, received: Tensor) -> None:
        self.comm = channel.mpi
        self.given, _ = mpi_buffers.raw(given)
        self.received, _ = mpi_buffers.raw(received)

    def walk(self, steps: Iterable[Step]) -> Walk:
        """One round."""
        for step in steps:
            yield post(self.comm, step, _part(self.given, step.sent), _part(self.received, step.received))

    def run(self, plan: Iterable[Iterable[Step]]) -> None:
        """All rounds."""
        _wait(schedule.in_turns(map(self.walk, plan), ROUNDS_UNDER_WAY))


class _Reduction:
    """Walks rounds whose messages carry partial results; ``step`` elements make the largest chunk."""

    def __init__(self, channel: Channel, source: Tensor, op: str) -> None:
        self.comm = channel.mpi
        self.num_ranks = channel.size
        self.x = source.view(-1)
        self.how = kernel(source.dtype, op)
        self.step = max(1, _chunk_bytes() // self.how.dtype.itemsize)
        self.pool = channel.keep((ChunkPool, _chunk_bytes()), ChunkPool)

    def walk(self, steps: Sequence[Step], target: Tensor | None) -> Walk:
        """One round. With ``target``, the last message completes the reduction of these elements, written there.

        Two buffers take turns: this rank adds its values to a message where the message has arrived, and sends the
        result from there while the next message arrives in the other buffer.
        """
        how, incoming, other = self.how, self.pool.borrow(), self.pool.borrow()
        plain_target = target.view(how.dtype) if target is not None and how.is_plain else None
        held, partial = NOTHING, self.x[:0]  # the elements that were added last, and the partial result

        def mine(bounds: Bounds) -> Tensor:
            return partial if bounds == held else how.partial(_part(self.x, bounds))

        for step in steps:
            # Post both messages: the partial result (in the first step this rank's own values), and the next one.
            begin, end = step.received
            given, came = mine(step.sent), incoming[: (end - begin) * how.dtype.itemsize].view(how.dtype)
            yield post(self.comm, step, mpi_buffers.raw(given)[0], mpi_buffers.raw(came)[0])
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

    def begin(self, walks: Iterable[Walk], out: Tensor) -> Walk:
        """The requests to wait for in all rounds; a rank that is alone has none."""
        if self.num_ranks == 1:
            self.how.reduce([self.x], out)
            return iter(())
        return schedule.in_turns(walks, ROUNDS_UNDER_WAY)

    def run(self, walks: Iterable[Walk], out: Tensor) -> None:
        """All rounds."""
        _wait(self.begin(walks, out))


class ChunkPool:
    """Buffers of a chunk each, kept with a channel: to touch new memory costs as much as to receive into it."""

    def __init__(self, channel: Channel) -> None:
        self.num_bytes = max(_chunk_bytes(), torch.complex128.itemsize)
        self.unused: list[Tensor] = []

    def borrow(self) -> Tensor:
        """A buffer; the borrower puts it back among the ``unused`` when no message comes or goes there any more."""
        return self.unused.pop() if self.unused else torch.empty(self.num_bytes, dtype=torch.uint8, device="cpu")

    def free(self) -> None:
        self.unused.clear()


def _wait(waits: Iterable[Requests]) -> None:
    for requests in waits:
        if requests:
            requests[0].Waitall(requests)


def post(comm: MPI.Comm, step: Step, given: Any, received: Any) -> Requests:
    """Post a step's messages; none where there are no bytes."""
    requests = []
    if len(received):  # the receive first, so that the message finds its place
        requests.append(comm.Irecv([received, MPI.BYTE], step.source, INTERNAL))
    if len(given):
        requests.append(comm.Isend([given, MPI.BYTE], step.to, INTERNAL))
    return requests


def _part(x: Any, bounds: Bounds) -> Any:
    begin, end = bounds
    return x[begin:end]


def _in_order(lengths: Iterable[int]) -> list[Bounds]:
    """The bounds of slices of these lengths, one after the other."""
    ends = list(itertools.accumulate(lengths))
    return list(zip([0, *ends], ends, strict=False))


def _chunk_bytes() -> int:
    return min(CHUNK_BYTES, config.current.message_bytes)
