"""Reductions over *peer views*: one tensor per rank, all of which this rank can read and write.

A reduction takes two shots:

1. Each rank owns a slice. It reads this slice from all peers, and reduces it in rank order.
2. The rank stores the result of its slice into the tensors of all peers.

The caller makes a barrier before, when the values of all ranks are complete, and after, when all results are. Of S
bytes, each rank reads S and writes S, which is the least cost of P separate results. The ranks work in chunks that stay
in the cache of a core, so the data moves through memory only once. All ranks get the same bits, because a slice has one
owner.

Alternative: each rank reduces all slices for itself (one shot). It is not used here, because each rank would read P S
bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from torchmpi_py.collectives.flavours.schedule import Bounds, chunks, slices
from torchmpi_py.collectives.reductions import Kernel

Step = tuple[list[Tensor], Tensor, list[Tensor]]  # the sources of a chunk, the first destination, the others


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
    """Carry out the steps of a plan."""
    for sources, first, others in steps:
        how.reduce(sources, first)  # the first shot; the result of this rank is in its cache now
        for other in others:
            other.copy_(first)  # the second shot


def allreduce(sources: Sequence[Tensor], destinations: Sequence[Tensor], rank: int, cache_bytes: int) -> list[Step]:
    """Return this rank's steps of an allreduce over peer views."""
    # This rank's tensor is the first destination, from which the result is copied while it is in the cache.
    own_first = [destinations[rank], *destinations[:rank], *destinations[rank + 1 :]]
    return plan(sources, own_first, slices(sources[0].numel(), len(sources))[rank], cache_bytes)


def reduce(sources: Sequence[Tensor], destination: Tensor, rank: int, cache_bytes: int) -> list[Step]:
    """Return this rank's steps of a reduction into the tensor of one peer."""
    return plan(sources, [destination], slices(sources[0].numel(), len(sources))[rank], cache_bytes)


def reduce_scatter(sources: Sequence[Tensor], destination: Tensor, rank: int, cache_bytes: int) -> list[Step]:
    """Return the steps that reduce slice ``rank`` over peer views into a tensor of this rank."""
    count = destination.numel()
    mine = [source[rank * count : (rank + 1) * count] for source in sources]
    return plan(mine, [destination], (0, count), cache_bytes)


def publish(x: Tensor, out: Tensor, rank: int, size: int) -> None:
    """Copy the slices of ``x`` that peers own into ``out``, which peers can read; the caller makes a barrier after it.

    ``x`` and ``out`` may be the same tensor.
    """
    if x.data_ptr() == out.data_ptr():
        return
    lower, upper = slices(x.numel(), size)[rank]  # this rank's own slice is read from ``x``
    out[:lower].copy_(x[:lower])
    out[upper:].copy_(x[upper:])
