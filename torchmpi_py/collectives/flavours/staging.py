"""Collectives within a node for tensors that are not symmetric: through the slots of a channel, chunk by chunk.

Each collective is a pipeline (``schedule.pipeline``) of stages, with a barrier between two stages:

1. Copy in: each rank copies its chunk into its in slot, except the part that it reads itself.
2. Reduce, in collectives that reduce: each rank reduces the slice of a chunk that it owns into its out slot, as in the
   first shot of ``two_shot.py``.
3. Copy out: each rank reads from the slots of the others.

While one chunk is reduced, the next one is copied in and the last one out. So the ranks need one barrier per chunk, and
four slots of shared memory per rank, however large the tensors are.

An allreduce of two ranks is done in one shot: each rank reduces all of a chunk into its own result. The two ranks
exchange as many bytes as with a slice for each, but need one barrier less. The out slots are unused, so a chunk may use
two slots.
"""

from __future__ import annotations

from torch import Tensor

from torchmpi_py.collectives.flavours.node_group import Exchange, NodeGroup
from torchmpi_py.collectives.flavours.schedule import chunks, pipeline, slices
from torchmpi_py.collectives.reductions import Kernel
from torchmpi_py.core.tensors import copy_to


def allreduce(node: NodeGroup, x: Tensor, out: Tensor, how: Kernel, root: int | None = None) -> None:
    """Write the reduction of all ``x`` into every rank's ``out``; with ``root``, only into the one of root."""
    if root is None and takes_one_shot(node, how):
        _one_shot(node, x, out, how)
        return
    pieces = chunks(0, x.numel(), node.chunk_bytes // x.itemsize)
    me, dtype = node.rank, x.dtype

    def copy_in(k: int) -> None:
        begin, end = pieces[k]
        lower, upper = slices(end - begin, node.size)[me]
        # Copy the slices that the others own; this rank reads its own slice from ``x``.
        given = node.given(me, k, dtype, end - begin)
        given[:lower].copy_(x[begin : begin + lower])
        given[upper:].copy_(x[begin + upper : end])

    def reduce(k: int) -> None:
        begin, end = pieces[k]
        lower, upper = slices(end - begin, node.size)[me]
        sources = [
            (x[begin:end] if rank == me else node.given(rank, k, dtype, end - begin))[lower:upper]
            for rank in range(node.size)
        ]
        own = out[begin + lower : begin + upper]
        if root == me:
            how.reduce(sources, own)  # no other rank needs the result
            return
        # The result goes to the out slot for the others, and is copied into ``out`` while it is in the cache.
        reduced = node.reduced(me, k, dtype, upper - lower)
        how.reduce(sources, reduced)
        if root is None:
            own.copy_(reduced)

    def copy_out(k: int) -> None:
        begin, end = pieces[k]
        # Copy the slices that the others have reduced.
        for rank, (lower, upper) in enumerate(slices(end - begin, node.size)):
            if rank != me and root in (None, me):
                out[begin + lower : begin + upper].copy_(node.reduced(rank, k, dtype, upper - lower))

    pipeline(len(pieces), [copy_in, reduce, copy_out], node.barrier)


def takes_one_shot(node: NodeGroup, how: Kernel) -> bool:
    """Return whether each rank computes all results of an allreduce.

    This is faster only with two ranks, and with plain values: other values are cheaper to send than to convert twice.
    The bits of complex products depend on where a thread starts, so two processes may compute different bits.
    """
    return node.size == 2 and how.is_plain and not (how.dtype.is_complex and how.op != "sum")


def allreduce_at_once(node: NodeGroup, x: Tensor, out: Tensor, how: Kernel, ready: tuple[bytes, list[Tensor]]) -> bool:
    """Carry out an allreduce that fits into two slots in one shot; return False if the headers differ.

    The values travel with the headers, in the slots of this turn. ``ready`` has the header and these slots by rank,
    from ``node.staged``. No barrier follows. These slots are written again in the turn after next. By then all ranks
    have announced the next turn, and therefore have read the slots. If the headers differ, only slots have changed.
    """
    header, slots = ready
    slots[node.rank].copy_(x)
    if not node.announce(header):
        return False
    how.reduce([x if rank == node.rank else slot for rank, slot in enumerate(slots)], out)
    return True


def _one_shot(node: NodeGroup, x: Tensor, out: Tensor, how: Kernel) -> None:
    """Carry out an allreduce in one shot, in chunks of two slots."""
    pieces = chunks(0, x.numel(), max(1, 2 * node.chunk_bytes // x.itemsize))

    def copy_in(k: int) -> None:
        begin, end = pieces[k]
        node.two_slots(node.rank, k, x.dtype, end - begin).copy_(x[begin:end])

    def reduce(k: int) -> None:
        begin, end = pieces[k]
        sources = [node.two_slots(rank, k, x.dtype, end - begin) for rank in range(node.size)]
        sources[node.rank] = x[begin:end]
        how.reduce(sources, out[begin:end])

    pipeline(len(pieces), [copy_in, reduce], node.barrier)


def broadcast(node: NodeGroup, x: Tensor, root: int) -> None:
    """Copy the ``x`` of ``root`` into the ``x`` of every rank."""
    pieces = chunks(0, x.numel(), node.chunk_bytes // x.itemsize)

    def copy_in(k: int) -> None:
        if node.rank == root:
            begin, end = pieces[k]
            node.given(root, k, x.dtype, end - begin).copy_(x[begin:end])

    def copy_out(k: int) -> None:
        if node.rank != root:
            begin, end = pieces[k]
            x[begin:end].copy_(node.given(root, k, x.dtype, end - begin))

    pipeline(len(pieces), [copy_in, copy_out], node.barrier)


def gather(node: NodeGroup, x: Tensor, parts: list[Tensor] | None, counts: list[int]) -> None:
    """Copy rank r's ``x``, of ``counts[r]`` elements, into part r on ranks with ``parts`` (all ranks, or root).

    Ranks with fewer elements make empty copies in the last chunks.
    """
    step = node.chunk_bytes // x.itemsize
    num_chunks = -(-max(counts) // step)

    def copy_in(k: int) -> None:
        piece = x[k * step : (k + 1) * step]
        node.given(node.rank, k, x.dtype, piece.numel()).copy_(piece)

    def copy_out(k: int) -> None:
        for rank, part in enumerate(parts or []):
            piece = part[k * step : (k + 1) * step]
            own = x[k * step : (k + 1) * step] if rank == node.rank else node.given(rank, k, x.dtype, piece.numel())
            copy_to(piece, own)

    pipeline(num_chunks, [copy_in, copy_out], node.barrier)


def exchange(node: NodeGroup, wanted: Exchange) -> None:
    """Send a row of each rank's tensor to each rank."""
    rows, outs, how, root = wanted
    me, size, dtype = node.rank, node.size, outs[0].dtype
    count = outs[0].numel()
    pieces = chunks(0, count, max(1, node.chunk_bytes // (size * outs[0].itemsize)))

    def copy_in(k: int) -> None:
        begin, end = pieces[k]
        if rows is not None:  # copy the row for each other rank, side by side, into one slot
            given = node.given(me, k, dtype, size * (end - begin)).view(size, end - begin)
            for rank in range(size):
                if rank != me:
                    given[rank].copy_(rows[rank, begin:end])

    def copy_out(k: int) -> None:
        begin, end = pieces[k]
        # The row for this rank comes from the slot of each rank that has rows, but this rank's own from its tensor.
        sources = [
            rows[me, begin:end]
            if rank == me and rows is not None
            else node.given(rank, k, dtype, size * (end - begin)).view(size, end - begin)[me]
            for rank in (range(size) if root is None else (root,))
        ]
        if how is not None:
            how.reduce(sources, outs[0][begin:end])
            return
        for out, source in zip(outs, sources, strict=True):
            out[begin:end].copy_(source)

    pipeline(len(pieces), [copy_in, copy_out], node.barrier)
