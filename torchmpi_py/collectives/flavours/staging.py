"""Collectives within a node for tensors that are not symmetric: through the slots of a channel, chunk by chunk.

Each collective is a pipeline (``schedule.pipeline``) of stages, between which all ranks meet:

1. copy in: each rank copies its chunk into its in slot, but for what it reads itself
2. reduce, where there is something to reduce: of a chunk each rank reduces the slice that it owns into its out slot, as
   in the first shot of ``two_shot.py``
3. copy out: each rank reads from the slots of the others

While one chunk is reduced the next is copied in and the last one out, so the ranks meet once per chunk. The memory that
peers share is four slots a rank, however large the tensors.

An allreduce of two ranks is done in one shot: each reduces all of a chunk into its own result. As many bytes pass
between them as with a slice for each, and they meet once less. Nothing is in out slots, so that chunks take two slots.
"""

from __future__ import annotations

from torch import Tensor

from torchmpi_py.collectives.flavours.node_group import Exchange, NodeGroup
from torchmpi_py.collectives.flavours.schedule import chunks, pipeline, slices
from torchmpi_py.collectives.reductions import Kernel
from torchmpi_py.core.tensors import copy_to


def allreduce(node: NodeGroup, x: Tensor, out: Tensor, how: Kernel, root: int | None = None) -> None:
    """Every rank's ``out`` becomes the reduction of all ``x``; with ``root`` only that rank's. Collective."""
    if root is None and takes_one_shot(node, how):
        _one_shot(node, x, out, how)
        return
    pieces = chunks(0, x.numel(), node.chunk_bytes // x.itemsize)
    me, dtype = node.rank, x.dtype

    def copy_in(k: int) -> None:
        begin, end = pieces[k]
        lower, upper = slices(end - begin, node.size)[me]
        # The slices that the others own; this rank reads its own slice from ``x``.
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
            how.reduce(sources, own)  # no other rank needs it
            return
        # The result goes to the out slot for the others, and is copied into ``out`` while it is in the cache.
        reduced = node.reduced(me, k, dtype, upper - lower)
        how.reduce(sources, reduced)
        if root is None:
            own.copy_(reduced)

    def copy_out(k: int) -> None:
        begin, end = pieces[k]
        # The slices that the others have reduced.
        for rank, (lower, upper) in enumerate(slices(end - begin, node.size)):
            if rank != me and root in (None, me):
                out[begin + lower : begin + upper].copy_(node.reduced(rank, k, dtype, upper - lower))

    pipeline(len(pieces), [copy_in, reduce, copy_out], node.barrier)


def takes_one_shot(node: NodeGroup, how: Kernel) -> bool:
    """Whether each rank computes all results of an allreduce.

    Only of two ranks. Values that are not plain are cheaper to send than to convert twice. Bits of complex products
    depend on where a thread begins, so that two processes may compute different ones.
    """
    return node.size == 2 and how.is_plain and not (how.dtype.is_complex and how.op != "sum")


def allreduce_at_once(node: NodeGroup, x: Tensor, out: Tensor, how: Kernel, ready: tuple[bytes, list[Tensor]]) -> bool:
    """``allreduce`` in one shot of what fits into two slots: the values come with the headers, in slots of this turn.

    ``ready``: the header and these slots by rank, from ``node.staged``.

    No barrier follows: these slots are written again in the turn after next, when all ranks have announced the next one
    and so have read the slots. False if the headers differ; then nothing has changed but slots.
    """
    header, slots = ready
    slots[node.rank].copy_(x)
    if not node.announce(header):
        return False
    how.reduce([x if rank == node.rank else slot for rank, slot in enumerate(slots)], out)
    return True


def _one_shot(node: NodeGroup, x: Tensor, out: Tensor, how: Kernel) -> None:
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
    """Every rank's ``x`` becomes root's."""
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
    """On ranks with ``parts`` (all, or root alone) part r becomes rank r's ``x``, of ``counts[r]`` elements.

    Ranks with less to give make empty copies in the last chunks.
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
    """Each rank gives a row of its tensor to each rank."""
    rows, outs, how, root = wanted
    me, size, dtype = node.rank, node.size, outs[0].dtype
    count = outs[0].numel()
    pieces = chunks(0, count, max(1, node.chunk_bytes // (size * outs[0].itemsize)))

    def copy_in(k: int) -> None:
        begin, end = pieces[k]
        if rows is not None:  # this rank gives: its row for each other rank, side by side in one slot
            given = node.given(me, k, dtype, size * (end - begin)).view(size, end - begin)
            for rank in range(size):
                if rank != me:
                    given[rank].copy_(rows[rank, begin:end])

    def copy_out(k: int) -> None:
        begin, end = pieces[k]
        # From each rank that gives, the row for this rank; this rank's own row comes from its tensor.
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
