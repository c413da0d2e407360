"""Flavour ``ring``: collectives that consist of messages between pairs of ranks, for CPU tensors, on one or many nodes.

Collectives follow the plans of ``schedule.py``, which defines slice, chunk, round and step. This module transfers the
data. A rank works on a few rounds alternately, so that messages of the other rounds travel while the rank adds the
values of one round. For a tensor of S bytes (the larger of input and output), each of P ranks sends:

- allreduce: 2 S (P-1)/P, twice around the ring (reduce_scatter, then allgather)
- reduce_scatter: S (P-1)/P, around the ring. Every rank that a chunk passes adds its own values.
- allgather: S (P-1)/P, around the ring (on average, if the slices have different sizes)
- alltoall: S (P-1)/P, directly to the ranks at distance 1, then 2, and so on
- broadcast: S, down a chain of all ranks. For few chunks the data travels down a binomial tree, where some ranks send
  more.
- reduce: S, up a chain or a binomial tree, like a broadcast in reverse
- gather, scatter: S/P, directly to or from the root

Alternative for reduce: a reduce_scatter and a gather. It is not used because the root would receive 2 S (P-1)/P bytes,
and so determine the time of the call. Through the chain the root receives only S bytes.

The data travels in chunks of up to CHUNK_BYTES, and no message is longer than ``Tuning.message_bytes``. 16-bit floats
are added as float32, and partial sums travel as float32 (``reductions.py``), which doubles the bytes of a
reduce_scatter. The first step around the ring sends 16 bits, because each rank sends its own values. With two ranks
this is the only step.

One rank computes the total of an element, in an order that the plan fixes, and the other ranks forward the total
unchanged. So all ranks get the same bits, and repeated runs produce the same bits. In addition to the tensors, a
reduction uses 2 * ROUNDS_UNDER_WAY * CHUNK_BYTES of memory for received chunks, and keeps this memory for the next
reduction. If values are converted before they travel, a reduction temporarily uses about the same amount again. The
other collectives need no additional memory.

The ring is the algorithm of Baidu's and Horovod's allreduce and of TorchMPI's p2p collectives. No allreduce can send
less: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009).
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
"""Maximum size of a chunk. Each message costs 10 us in addition to the transfer of its bytes, and more through TCP.

Through TCP an allreduce with chunks of 128 KiB takes 50 % longer, and with chunks of 256 KiB 20 % longer. Chunks of
1 MiB would save 3 % in shared memory and 7 % through TCP (allreduce of 16 and 64 MiB on 2 ranks). But there would be
half as many chunks, which overlap less, and fill a chain more slowly.
"""

LEAST_CHUNK_BYTES = 64 << 10
CHUNKS_OF_A_SLICE = 4
"""Number of chunks in a small slice, so that some chunks travel while the values of another chunk are added."""

ROUNDS_UNDER_WAY = 3
"""Number of rounds that a rank works on alternately.

Within a node the number matters little, because the receiver copies the data. Through TCP 3 rounds save a tenth of the
time of 1 round, and 4 rounds save no more than 3.
"""


class Ring(Flavour):
    """Collectives that consist of messages between pairs of ranks."""

    name = "ring"
    devices = frozenset({"cpu"})

    def walk(self, verb: str, channel: Channel, *arguments: Any) -> Walk:
        """Carry out a collective in parts if each round has the same number of steps on all ranks, else in one part."""
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
        # First time around the ring: every rank adds its values to each chunk, until the owner has the total.
        yield from reduction.walk(schedule.reduce_scatter(me, pieces), out[slice(*pieces[me])], is_ring=True)
        # Second time around the ring: every rank forwards the totals, as bytes.
        in_bytes = [(begin * x.itemsize, end * x.itemsize) for begin, end in pieces]
        yield from copies.walk(schedule.allgather(me, in_bytes))

    return map(around_twice, schedule.rounds(bounds, reduction.step(bounds)))


def _reduce_scatter(channel: Channel, source: Tensor, destination: Tensor, op: str) -> Iterable[Walk]:
    reduction, me, out = _Reduction(channel, source, op), channel.rank, destination.view(-1)
    if channel.size == 1:
        return reduction.alone(out)
    before = me * out.numel()  # number of elements before this rank's slice
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
    # On the way up the tree, a rank adds its values to the values of its children. Only root writes into ``out``.
    return (reduction.walk(schedule.reduce(tree, piece), out[slice(*piece)] if is_root else None) for piece in pieces)


def _allgather(channel: Channel, x: Tensor, out: Tensor, sizes: Sizes) -> Iterable[Walk]:
    copy_to(sizes.split(out)[channel.rank], x)  # All parts are received into ``out`` and sent from it.
    rounds = schedule.rounds(in_order(sizes.num_bytes), _chunk_bytes(max(sizes.num_bytes)))
    return _Copies(channel, out, out).walks(schedule.allgather(channel.rank, pieces) for pieces in rounds)


def _run(rounds: Iterable[Walk]) -> None:
    """Carry out all rounds of a collective, ROUNDS_UNDER_WAY of them alternately."""
    complete(schedule.in_turns(iter(rounds), ROUNDS_UNDER_WAY))


class _Copies:
    """Rounds that send bytes from ``source``, and receive bytes into ``target``, without arithmetic."""

    def __init__(self, channel: Channel, source: Tensor, target: Tensor) -> None:
        self.comm = channel.mpi
        self.tensors = source, target  # This keeps the tensors alive, because MPI uses their addresses.
        self.source, _ = mpi_buffers.raw(source)
        self.target, _ = mpi_buffers.raw(target)

    def walk(self, steps: Iterable[Step]) -> Walk:
        """Carry out one round: post the messages of each step, and yield their requests."""
        for step in steps:
            yield post(self.comm, step, self.source[slice(*step.sent)], self.target[slice(*step.received)])

    def walks(self, plan: Iterable[Iterable[Step]]) -> Iterable[Walk]:
        """Return one walk for each round of a plan."""
        return map(self.walk, plan)


class _Reduction:
    """Rounds that send and receive partial results of a reduction."""

    def __init__(self, channel: Channel, source: Tensor, op: str) -> None:
        self.comm = channel.mpi
        self.num_ranks = channel.size
        self.x = source.view(-1)
        self.how = kernel(source.dtype, op)
        self.pool = channel.keep((ChunkPool, _largest_chunk_bytes()), ChunkPool)

    def step(self, bounds: Sequence[Bounds]) -> int:
        """Return the number of elements of a chunk, for slices with these bounds."""
        itemsize, longest = self.how.dtype.itemsize, max(end - begin for begin, end in bounds)
        return max(1, _chunk_bytes(longest * itemsize) // itemsize)

    def walk(self, steps: Sequence[Step], target: Tensor | None, *, is_ring: bool = False) -> Walk:
        """Carry out one round. With ``target``, the last step completes the reduction, and writes it into ``target``.

        With ``is_ring``, all ranks send their own values in the first step, without a conversion if the converted
        values would be longer.

        Two buffers alternate. This rank adds its values to the message in one buffer, and sends the result from this
        buffer, while the next message arrives in the other buffer.
        """
        how, incoming, other = self.how, self.pool.borrow(), self.pool.borrow()
        plain_target = target.view(how.dtype) if target is not None and how.is_plain else None
        last_bounds, partial = NOTHING, self.x[:0]  # bounds and partial result of the elements added last

        def mine(bounds: Bounds) -> Tensor:
            return partial if bounds == last_bounds else how.partial(self.x[slice(*bounds)])

        as_it_is = is_ring and self.x.itemsize < how.dtype.itemsize
        for step in steps:
            # Post both messages of the step. The rank sends its partial result, which in the first step consists of its
            # own values, and receives the next partial result.
            begin, end = step.received
            sent, dtype = (self.x[slice(*step.sent)], self.x.dtype) if as_it_is else (mine(step.sent), how.dtype)
            chunk = incoming[: (end - begin) * dtype.itemsize].view(dtype)
            yield post(self.comm, step, mpi_buffers.raw(sent)[0], mpi_buffers.raw(chunk)[0])
            chunk, as_it_is = how.partial(chunk) if as_it_is else chunk, False
            # The send and the receive are complete. Add this rank's values to the received chunk. The last step writes
            # the sum directly into the target.
            if end > begin:
                out = plain_target if plain_target is not None and step is steps[-1] else chunk
                last_bounds, partial = step.received, how.combine(mine(step.received), chunk, out=out)
            incoming, other = other, incoming
        # This rank has the complete reduction. Divide it for avg, and convert it to the dtype of the tensor.
        if target is not None and target.numel():
            result = how.result(partial, self.num_ranks, target.dtype)
            if plain_target is None:
                target.copy_(result)
        self.pool.unused += (incoming, other)

    def alone(self, out: Tensor) -> Iterable[Walk]:
        """Carry out the reduction for a channel of one rank. Return no rounds."""
        self.how.reduce([self.x], out)
        return ()


class ChunkPool:
    """Buffers of one chunk each, which a channel keeps for later calls.

    They are reused because the first access to new memory takes as long as receiving a message of the same size.
    """

    def __init__(self, channel: Channel) -> None:
        self.num_bytes = max(_largest_chunk_bytes(), torch.complex128.itemsize)
        self.unused: list[Tensor] = []

    def borrow(self) -> Tensor:
        """Return a buffer. The caller must append it to ``unused`` when no message uses it any more."""
        if self.unused:
            return self.unused.pop()
        with torch.inference_mode(False):  # Later calls outside of this mode use the buffer too.
            return torch.empty(self.num_bytes, dtype=torch.uint8, device="cpu")

    def free(self) -> None:
        self.unused.clear()


def post(comm: MPI.Comm, step: Step, source: Any, target: Any) -> Requests:
    """Post the messages of a step, except empty ones, and return their requests."""
    requests = []
    if len(target):  # Post the receive first, so that an arriving message finds its buffer.
        requests.append(comm.Irecv([target, MPI.BYTE], step.source, INTERNAL))
    if len(source):
        requests.append(comm.Isend([source, MPI.BYTE], step.to, INTERNAL))
    return requests


def _chunk_bytes(slice_bytes: int) -> int:
    """Return the size of the chunks of a slice.

    Small slices are cut into CHUNKS_OF_A_SLICE chunks, or into fewer if the chunks would be below LEAST_CHUNK_BYTES.
    """
    share_bytes = -(-slice_bytes // CHUNKS_OF_A_SLICE // LEAST_CHUNK_BYTES) * LEAST_CHUNK_BYTES
    return min(_largest_chunk_bytes(), max(LEAST_CHUNK_BYTES, share_bytes))


def _largest_chunk_bytes() -> int:
    return min(CHUNK_BYTES, config.current.message_bytes)
