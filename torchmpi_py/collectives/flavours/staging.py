"""Collectives within a node for tensors that are not symmetric. The tensors are copied through slots, chunk by chunk.

Each collective is a pipeline (``schedule.pipeline``) of stages, with a barrier between two stages:

1. Copy in: each rank copies its chunk into its in slot, except the part that only this rank reads.
2. Reduce (only in collectives that reduce): each rank reduces the slice of a chunk that it owns into its out slot, as
   in the first shot of ``two_shot.py``.
3. Copy out: each rank copies data from the slots of its peers.

While one chunk is reduced, the next chunk is copied in, and the previous chunk is copied out. So the ranks need about
one barrier per chunk, and four slots of shared memory per rank, whatever the size of the tensors.

Most allreduces of two ranks take one shot: each rank reduces the whole chunk into its own result. The two ranks
exchange as many bytes as if each rank reduced one slice, but need one barrier less. The out slots are not needed, so a
chunk may use two slots.
"""

from __future__ import annotations

from torch import Tensor

from torchmpi_py.collectives.flavours.node_group import Exchange, NodeGroup
from torchmpi_py.collectives.flavours.schedule import chunks, pipeline, slices
from torchmpi_py.collectives.reductions import Kernel
from torchmpi_py.core.tensors import copy_to


def allreduce(node: NodeGroup, x: Tensor, out: Tensor, how: Kernel, root: int | None = None) -> None:
    """Write the reduction of all ``x`` into every rank's ``out``, or only into root's ``out`` if ``root`` is set."""
    if root is None and takes_one_shot(node, how):
        _one_shot(node, x, out, how)
        return
    pieces = chunks(0, x.numel(), node.chunk_bytes // x.itemsize)
    me, dtype = node.rank, x.dtype

    def copy_in(k: int) -> None:
        begin, end = pieces[k]
        lower, upper = slices(end - begin, node.size)[me]
        # Copy the slices that peers own. This rank reads its own slice from ``x``.
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
            how.reduce(sources, own)  # No other rank needs the result.
            return
        # Write the result into the out slot for the peers, and copy it into ``out`` while it is in the cache.
        reduced = node.reduced(me, k, dtype, upper - lower)
        how.reduce(sources, reduced)
        if root is None:
            own.copy_(reduced)

    def copy_out(k: int) -> None:
        begin, end = pieces[k]
        # Copy the slices that peers have reduced.
        for rank, (lower, upper) in enumerate(slices(end - begin, node.size)):
            if rank != me and root in (None, me):
                out[begin + lower : begin + upper].copy_(node.reduced(rank, k, dtype, upper - lower))

    pipeline(len(pieces), [copy_in, reduce, copy_out], node.barrier)


def takes_one_shot(node: NodeGroup, how: Kernel) -> bool:
    """Return whether each rank computes the whole result of an allreduce itself.

    One shot is faster only with two ranks, and if values need no conversion. If values need a conversion, it costs less
    to send a result than to compute it twice. Products of complex numbers take two shots, because their bits depend on
    how the work is divided between threads, so two processes may compute different bits.
    """
    return node.size == 2 and how.is_plain and not (how.dtype.is_complex and how.op != "sum")


def allreduce_at_once(node: NodeGroup, x: Tensor, out: Tensor, how: Kernel, ready: tuple[bytes, list[Tensor]]) -> bool:
    """Carry out an allreduce of tensors that fit into two slots, in one shot. Return False if the headers differ.

    The values travel with the headers, in the slots of the current turn. ``ready`` consists of this rank's header and
    of the ranks' slots, from ``node.staged``. No barrier is needed at the end, because the slots are overwritten only
    two operations later. Before that, all ranks announce the next operation, which means that they have read the slots.
    If the headers differ, no tensor has changed.
    """
    header, slots = ready
    slots[node.rank].copy_(x)
    if not node.announce(header):
        return False
    how.reduce([x if rank == node.rank else slot for rank, slot in enumerate(slots)], out)
    return True


def _one_shot(node: NodeGroup, x: Tensor, out: Tensor, how: Kernel) -> None:
    """Carry out an allreduce in one shot, with chunks that fill two slots."""
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
    """Copy rank r's ``x``, of ``counts[r]`` elements, into ``parts[r]`` on all ranks, or only on root.

    Other ranks pass None for ``parts``. Ranks with fewer elements than others make empty copies in the last chunks.
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
    """Carry out an ``Exchange``: send one row from each rank to each rank."""
    rows, outs, how, root = wanted
    me, size, dtype = node.rank, node.size, outs[0].dtype
    count = outs[0].numel()
    pieces = chunks(0, count, max(1, node.chunk_bytes // (size * outs[0].itemsize)))

    def copy_in(k: int) -> None:
        begin, end = pieces[k]
        if rows is not None:  # Copy this chunk of each peer's row into one slot, side by side.
            given = node.given(me, k, dtype, size * (end - begin)).view(size, end - begin)
            for rank in range(size):
                if rank != me:
                    given[rank].copy_(rows[rank, begin:end])

    def copy_out(k: int) -> None:
        begin, end = pieces[k]
        # Read this rank's row from the slot of each rank that has rows, but read its own row from its tensor.
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
