"""Reductions over *peer views*: one tensor per rank, all of which this rank can read and write.

An allreduce takes two shots:

1. Each rank owns a slice. The rank reads this slice from all peer views, and reduces it in rank order.
2. The rank stores the result of its slice into all peer views.

The caller makes one barrier before a reduction, when the values of all ranks are complete, and one barrier after it,
when all results are complete. For tensors of S bytes, each rank reads S and writes S, which is the minimum if P ranks
each need the result. The ranks work in chunks that stay in the cache of a core, so the data moves through memory only
once. All ranks get the same bits, because each slice has one owner.

Alternative: each rank reduces all slices itself (one shot). It is not used here because each rank would read P S bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from torchmpi_py.collectives.flavours.schedule import Bounds, chunks, slices
from torchmpi_py.collectives.reductions import Kernel

Step = tuple[list[Tensor], Tensor, list[Tensor]]  # sources of a chunk, first destination, further destinations


def plan(sources: Sequence[Tensor], destinations: Sequence[Tensor], bounds: Bounds, cache_bytes: int) -> list[Step]:
    """Return the steps that reduce the elements within ``bounds`` of all sources into all destinations.

    The destinations may be the sources.
    """
    # All sources of a chunk and its result fit into ``cache_bytes`` together, but a chunk has at least 1024 elements.
    step = max(1024, cache_bytes // ((len(sources) + 1) * sources[0].itemsize))
    return [
        ([x[begin:end] for x in sources], destinations[0][begin:end], [x[begin:end] for x in destinations[1:]])
        for begin, end in chunks(*bounds, step)
    ]


def carry_out(steps: Sequence[Step], how: Kernel) -> None:
    """Carry out the ``steps`` from ``plan``."""
    for sources, first, others in steps:
        how.reduce(sources, first)  # First shot: the result is now in this core's cache.
        for other in others:
            other.copy_(first)  # Second shot: copy the result to a peer.


def allreduce(sources: Sequence[Tensor], destinations: Sequence[Tensor], rank: int, cache_bytes: int) -> list[Step]:
    """Return this rank's steps of an allreduce over peer views."""
    # The result is written to the first destination, and copied from it while it is in the cache. So this rank's own
    # tensor is the first destination.
    own_first = [destinations[rank], *destinations[:rank], *destinations[rank + 1 :]]
    return plan(sources, own_first, slices(sources[0].numel(), len(sources))[rank], cache_bytes)


def reduce(sources: Sequence[Tensor], destination: Tensor, rank: int, cache_bytes: int) -> list[Step]:
    """Return this rank's steps of a reduce into ``destination``, the root's tensor."""
    return plan(sources, [destination], slices(sources[0].numel(), len(sources))[rank], cache_bytes)


def reduce_scatter(sources: Sequence[Tensor], destination: Tensor, rank: int, cache_bytes: int) -> list[Step]:
    """Return the steps that reduce slice ``rank`` of the peer views into ``destination``, this rank's tensor."""
    count = destination.numel()
    mine = [source[rank * count : (rank + 1) * count] for source in sources]
    return plan(mine, [destination], (0, count), cache_bytes)


def publish(x: Tensor, out: Tensor, rank: int, size: int) -> None:
    """Copy the slices of ``x`` that peers own into ``out``, which peers can read.

    ``x`` and ``out`` may be the same tensor. The caller must make a barrier before peers read ``out``.
    """
    if x.data_ptr() == out.data_ptr():
        return
    lower, upper = slices(x.numel(), size)[rank]  # This rank reads its own slice from ``x``.
    out[:lower].copy_(x[:lower])
    out[upper:].copy_(x[upper:])
