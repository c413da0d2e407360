"""Reductions and moves over *peer views*: one tensor per rank, all of which this rank can read and write.

Two shots:

1. each rank owns a slice, reads that slice from all peers and reduces it in rank order
2. the rank stores the result of its slice into all peers

The caller lets all ranks meet before (everyone's values are there) and after (everyone's results are there). Per rank,
of S bytes: S read, S written, the least that P separate results can cost; done in chunks that stay in the cache of a
core, the total moves once. All ranks get the same bits, for a slice has one owner.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from torchmpi_py.collectives.flavours.schedule import Bounds, chunks, slices
from torchmpi_py.collectives.reductions import Kernel

Step = tuple[list[Tensor], Tensor, list[Tensor]]  # a chunk: its sources, the first destination, the others


def plan(sources: Sequence[Tensor], destinations: Sequence[Tensor], bounds: Bounds, cache_bytes: int) -> list[Step]:
    """The steps that reduce the elements within ``bounds`` of all sources into all destinations (maybe the sources)."""
    # All sources of a chunk and its result fit into ``cache_bytes`` together, but no chunk has under 1024 elements.
    step = max(1024, cache_bytes // ((len(sources) + 1) * sources[0].itemsize))
    return [
        ([x[begin:end] for x in sources], destinations[0][begin:end], [x[begin:end] for x in destinations[1:]])
        for begin, end in chunks(*bounds, step)
    ]


def carry_out(steps: Sequence[Step], how: Kernel) -> None:
    """Carry out the steps of a plan."""
    for sources, first, others in steps:
        how.reduce(sources, first)  # the first shot; this rank's own result, which is in its cache now
        for other in others:
            other.copy_(first)  # the second shot


def allreduce(sources: Sequence[Tensor], destinations: Sequence[Tensor], rank: int, cache_bytes: int) -> list[Step]:
    """This rank's share of an allreduce over peer views."""
    # The own tensor is the first destination: it is reduced into, and copied from there while it is in the cache.
    own_first = [destinations[rank], *destinations[:rank], *destinations[rank + 1 :]]
    return plan(sources, own_first, slices(sources[0].numel(), len(sources))[rank], cache_bytes)


def reduce(sources: Sequence[Tensor], destination: Tensor, rank: int, cache_bytes: int) -> list[Step]:
    """This rank's share of a reduction into one of the peers' tensors."""
    return plan(sources, [destination], slices(sources[0].numel(), len(sources))[rank], cache_bytes)


def reduce_scatter(sources: Sequence[Tensor], destination: Tensor, rank: int, cache_bytes: int) -> list[Step]:
    """Slice ``rank`` of the reduction over peer views, into a tensor of this rank's own."""
    count = destination.numel()
    mine = [source[rank * count : (rank + 1) * count] for source in sources]
    return plan(mine, [destination], (0, count), cache_bytes)


def publish(x: Tensor, out: Tensor, rank: int, size: int) -> None:
    """Copy into ``out``, which peers can read, the slices of ``x`` that peers own; a barrier has to follow.

    ``x`` and ``out`` may be the same tensor.
    """
    if x.data_ptr() == out.data_ptr():
        return
    lower, upper = slices(x.numel(), size)[rank]  # this rank's own slice is read from ``x``
    out[:lower].copy_(x[:lower])
    out[upper:].copy_(x[upper:])
