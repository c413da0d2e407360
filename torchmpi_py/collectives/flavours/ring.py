"""Flavour ``ring``: collectives of messages between pairs of ranks, for CPU tensors, within a node and across nodes.

The verbs follow plans: ``ring_schedule.py`` has them, and says what a slice, a chunk, a round and a step is. Here is
the transfer. A rank takes a few rounds by turns, so that while it adds what came for one, the messages of the others
are under way. Of a tensor of S bytes (the larger of what is brought and what is got) each of P ranks sends

allreduce       2 S (P-1)/P   twice around the ring: reduce_scatter, then allgather
reduce_scatter  S (P-1)/P     around the ring; every rank on the way adds its own values to a chunk
allgather       S (P-1)/P     around the ring; so on average when the slices have unequal sizes
alltoall        S (P-1)/P     directly, with the ranks at distance 1, then 2, and so on
broadcast       S             down a chain of all ranks, or in few chunks down a binomial tree, where some send more
reduce          S             the same, upwards. By way of reduce_scatter the root would get 2 S (P-1)/P bytes, and the
                              root sets the pace; through the chain it gets S
gather, scatter S/P           directly, all of it to or from the root

in chunks of up to CHUNK_BYTES, and in no message longer than ``Tuning.message_bytes``. 16-bit floats are added as
float32 and travel as such until they are (``reductions.py``), which doubles the bytes of that half.

The total of an element is computed by one rank, in an order that the plan fixes, and passed on unchanged: all ranks get
the same bits, and so do two runs. Beside the tensors a reduction takes 2 * ROUNDS_UNDER_WAY * CHUNK_BYTES for what
comes, kept for the next one, and passingly about as much where values travel in another form than they are stored in;
the other verbs take nothing.

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
from torchmpi_py.collectives.flavours import ring_plan
from torchmpi_py.collectives.flavours.mpi_steps import INTERNAL
from torchmpi_py.collectives.flavours.ring_plan import NOTHING, Step
from torchmpi_py.collectives.flavours.schedule import Bounds, chunks, slices
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
"""Within a node, where the receiver copies, it matters little; through TCP 3 save a tenth against 1, as much as 4."""


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
            yield from reduction.walk(ring_plan.reduce_scatter(me, pieces), _part(out, pieces[me]))
            in_bytes = [(begin * x.itemsize, end * x.itemsize) for begin, end in pieces]
            yield from copies.walk(ring_plan.allgather(me, in_bytes))

        rounds = ring_plan.rounds(slices(x.numel(), channel.size), reduction.step)
        waits = reduction.begin(map(around_twice, rounds), out)
        first = next(waits, [])
        return lambda: _wait(itertools.chain([first], waits))

    def reduce_scatter(self, channel: Channel, source: Tensor, destination: Tensor, op: str) -> None:
        reduction, me = _Reduction(channel, source, op), channel.rank
        out = destination.view(-1)
        before = me * out.numel()

        def around(pieces: list[Bounds]) -> Walk:
            begin, end = pieces[me]
            return reduction.walk(ring_plan.reduce_scatter(me, pieces), out[begin - before : end - before])

        rounds = ring_plan.rounds(_in_order([out.numel()] * channel.size), reduction.step)
        reduction.run(map(around, rounds), out)

    def reduce(self, channel: Channel, source: Tensor, destination: Tensor, op: str, root: int) -> None:
        reduction, is_root = _Reduction(channel, source, op), channel.rank == root
        out, pieces = destination.view(-1), chunks(0, source.numel(), reduction.step)
        tree = ring_plan.tree(channel.rank, channel.size, root, len(pieces))
        walks = (
            reduction.walk(ring_plan.reduce(tree, piece), _part(out, piece) if is_root else None) for piece in pieces
        )
        reduction.run(walks, out)

    def broadcast(self, channel: Channel, x: Tensor, root: int) -> None:
        copies, pieces = _Copies(channel, x, x), chunks(0, x.nbytes, _chunk_bytes())
        tree = ring_plan.tree(channel.rank, channel.size, root, len(pieces))
        copies.run(ring_plan.broadcast(tree, piece) for piece in pieces)

    def allgather(self, channel: Channel, x: Tensor, out: Tensor, sizes: Sizes) -> None:
        sizes.split(out)[channel.rank].copy_(x)
        rounds = ring_plan.rounds(_in_order(sizes.num_bytes), _chunk_bytes())
        _Copies(channel, out, out).run(ring_plan.allgather(channel.rank, pieces) for pieces in rounds)

    def alltoall(self, channel: Channel, source: Tensor, destination: Tensor) -> None:
        me, size, slice_bytes = channel.rank, channel.size, source.nbytes // channel.size
        destination.chunk(size)[me].copy_(source.chunk(size)[me])
        _Copies(channel, source, destination).run(ring_plan.alltoall(me, size, slice_bytes, _chunk_bytes()))

    def gather(self, channel: Channel, x: Tensor, out: Tensor | None, root: int, sizes: Sizes) -> None:
        if out is not None:
            sizes.split(out)[root].copy_(x)
        plan = ring_plan.gather(channel.rank, root, _in_order(sizes.num_bytes), _chunk_bytes())
        _Copies(channel, x, x if out is None else out).run(plan)

    def scatter(self, channel: Channel, source: Tensor, destination: Tensor, root: int) -> None:
        if channel.rank == root:
            destination.copy_(source.chunk(channel.size)[root])
        bounds = _in_order([destination.nbytes] * channel.size)
        plan = ring_plan.scatter(channel.rank, root, bounds, _chunk_bytes())
        _Copies(channel, source, destination).run(plan)


class _Copies:
    """Walks rounds whose messages carry bytes as they lie: sent from ``given``, received into ``taken``."""

    def __init__(self, channel: Channel, given: Tensor, taken: Tensor) -> None:
        self.comm = channel.mpi
        self.given, _ = mpi_buffers.raw(given)
        self.taken, _ = mpi_buffers.raw(taken)

    def walk(self, steps: Iterable[Step]) -> Walk:
        """One round."""
        for step in steps:
            yield _post(self.comm, step, _part(self.given, step.sent), _part(self.taken, step.received))

    def run(self, plan: Iterable[Iterable[Step]]) -> None:
        """All rounds."""
        _wait(ring_plan.in_turns(map(self.walk, plan), ROUNDS_UNDER_WAY))


class _Reduction:
    """Walks rounds whose messages carry partial results; ``step`` elements make the largest chunk."""

    def __init__(self, channel: Channel, source: Tensor, op: str) -> None:
        self.comm = channel.mpi
        self.num_ranks = channel.size
        self.x = source.view(-1)
        self.how = kernel(source.dtype, op)
        self.step = max(1, _chunk_bytes() // self.how.dtype.itemsize)
        self.rooms = channel.keep((_Rooms, _chunk_bytes()), _Rooms)

    def walk(self, steps: Sequence[Step], target: Tensor | None) -> Walk:
        """One round; with ``target``, what comes last completes the reduction of these elements, which goes there.

        What came is added to in the room where it came, and sent from there while the next comes into the other room.
        """
        how, incoming, other = self.how, self.rooms.take(), self.rooms.take()
        plain_target = target.view(how.dtype) if target is not None and how.is_plain else None
        held, partial = NOTHING, self.x[:0]  # which elements this rank has added something to, and the outcome

        def mine(bounds: Bounds) -> Tensor:
            return partial if bounds == held else how.partial(_part(self.x, bounds))

        for step in steps:
            begin, end = step.received
            given, came = mine(step.sent), incoming[: (end - begin) * how.dtype.itemsize].view(how.dtype)
            yield _post(self.comm, step, mpi_buffers.raw(given)[0], mpi_buffers.raw(came)[0])
            if end > begin:
                out = plain_target if plain_target is not None and step is steps[-1] else came
                held, partial = step.received, how.combine(mine(step.received), came, out=out)
            incoming, other = other, incoming
        if target is not None and target.numel():
            result = how.result(partial, self.num_ranks, target.dtype)
            if plain_target is None:
                target.copy_(result)
        self.rooms.unused += (incoming, other)

    def begin(self, walks: Iterable[Walk], out: Tensor) -> Walk:
        """What to wait for in all rounds; a rank that is alone has no messages to wait for."""
        if self.num_ranks == 1:
            self.how.reduce([self.x], out)
            return iter(())
        return ring_plan.in_turns(walks, ROUNDS_UNDER_WAY)

    def run(self, walks: Iterable[Walk], out: Tensor) -> None:
        """All rounds."""
        _wait(self.begin(walks, out))


class _Rooms:
    """Memory for a chunk each, kept with a channel: to touch new memory costs as much as to receive into it."""

    def __init__(self, channel: Channel) -> None:
        self.num_bytes = max(_chunk_bytes(), torch.complex128.itemsize)
        self.unused: list[Tensor] = []

    def take(self) -> Tensor:
        """A room; put it back among the ``unused`` when no message comes or goes there any more."""
        return self.unused.pop() if self.unused else torch.empty(self.num_bytes, dtype=torch.uint8, device="cpu")

    def free(self) -> None:
        self.unused.clear()


def _wait(waits: Iterable[Requests]) -> None:
    for requests in waits:
        if requests:
            requests[0].Waitall(requests)


def _post(comm: MPI.Comm, step: Step, given: Any, taken: Any) -> Requests:
    """Post a step's messages; none where there are no bytes."""
    requests = []
    if len(taken):
        requests.append(comm.Irecv([taken, MPI.BYTE], step.source, INTERNAL))
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
