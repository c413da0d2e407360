"""Flavour ``hierarchical``: one flavour inside groups of ranks (fast memory), another between groups (the network).

Usually the *groups* are the nodes of a communicator. If the collective span (``set_collective_span``) begins at the
communicator's level, the groups are defined by the level at which the span ends. Each rank has an *inner* channel to
its group. The rank's *outer* channel is its column: the ranks with the same inner rank in all groups. If groups are
unequal, only the column of the groups' roots is used.

Steps of each collective for S bytes, and M groups of m ranks:

- allreduce, equal groups: a reduce_scatter inside each group gives each rank a slice of S/m bytes. An allreduce in each
  column completes the slices, and an allgather inside each group distributes them. With a ring between groups,
  2 S (M-1)/M bytes leave each group, whatever m is.
- allreduce, unequal groups: reduce to the group's root, allreduce between the roots, broadcast inside the groups.
- reduce_scatter: the first half of an allreduce. S (M-1)/M bytes leave each group.
- allgather: the second half of an allreduce. S (M-1)/M bytes leave each group. With unequal groups, or parts of
  different sizes, all data goes through the roots, in one piece.
- broadcast and reduce: through the roots. In a broadcast S bytes enter each group except root's group; in a reduce
  S bytes leave each group except root's group.

The work is divided into *pieces*. Some pieces travel between groups, each as a walk (``Flavour.walk``), while the ranks
work on the next piece inside the groups. In broadcast and reduce only one piece travels at a time. A piece is large
enough for the outer flavour to send one chunk to each neighbour. So the pieces keep both directions of a group's link
busy while the ranks also use the memory inside the groups.

Alternative: one flavour for all ranks, such as a ring. It is not used between nodes, because each rank of a node would
send its own bytes over the network. The idea comes from TorchMPI, which had no hierarchical collectives on CPUs, and
did not map the root of a collective to its inner rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchmpi_py.collectives.flavour import Flavour, Requests, Sizes, Walk, wait
from torchmpi_py.collectives.flavours.schedule import Bounds, chunks, kept_from, pipeline
from torchmpi_py.collectives.plan import of_a_part
from torchmpi_py.collectives.reductions import Kernel, kernel
from torchmpi_py.core import communicators, config
from torchmpi_py.core.channels import Channel
from torchmpi_py.core.communicators import Communicator

CHUNK_BYTES = 512 << 10
LEAST_CHUNK_BYTES = 64 << 10
"""Upper and lower limit of the size of a chunk on CPUs.

Each rank that carries a piece has one chunk of the piece for each group. CHUNK_BYTES is also the largest chunk of
flavour ``ring``.
"""

MOST_PIECE_BYTES = 32 << 20
"""Maximum size of a piece. Without it, the memory for the pieces under way would grow with the number of groups."""

PIECES_UNDER_WAY = 3  # number of pieces that travel between groups while another is reduced inside groups


class Members(NamedTuple):
    """The flavours that are combined: ``outer`` between groups, and one of ``inners`` or ``rooted`` inside groups.

    Steps with a root inside a group use ``rooted``, other steps use ``inners``. In both lists the first flavour that
    can serve the group is used. The last flavour of each list can serve every group. The last flavour of ``rooted``
    also carries messages between two ranks.
    """

    inners: Sequence[Flavour]
    rooted: Sequence[Flavour]
    outer: Flavour


class Hierarchical(Flavour):
    """Collectives that use one flavour inside groups and another between groups; ``members`` is by device type."""

    name = "hierarchical"

    def __init__(self, members: Mapping[str, Members]) -> None:
        self.members = members
        self.devices = frozenset(members)  # type: ignore[misc]

    def missing(self, device: str) -> str:
        return self.members[device].inners[-1].missing(device)

    def refuses(self, channel: Channel) -> str:
        if span_end(channel) is not None or channel.num_nodes > 1:
            return ""
        remedy = "to define groups of your own, call set_collective_span(begin, end) with level end below level begin"
        return f"all ranks are on one node; {remedy}"

    @of_a_part
    def allreduce(self, channel: Channel, source: Tensor, destination: Tensor, op: str) -> None:
        groups = groups_of(channel)
        if groups.are_single:
            self.members[source.device.type].outer.allreduce(groups.outer, source, destination, op)
            return
        form = self._allreduce_by_slices if groups.are_equal else self._allreduce_by_roots
        form(channel, source.view(-1), destination.view(-1), kernel(source.dtype, op))

    def _allreduce_by_slices(self, channel: Channel, x: Tensor, out: Tensor, how: Kernel) -> None:
        """Carry out an allreduce of equal groups. Between groups, every rank reduces the slice that it owns."""
        groups, inner, outer = self._parts(channel, x)
        size, index = groups.inner.size, groups.inner.rank

        def reduce_inside(piece: slice) -> tuple[Tensor, Walk]:
            partial, target = how.partial(x[piece]), out[piece]
            if partial.numel() % size:  # Slices must be equal, so the last piece may need padding.
                partial = torch.nn.functional.pad(partial, (0, -partial.numel() % size))
            count = partial.numel() // size
            if how.is_plain and inner.scatters_in_place and partial.numel() == target.numel():
                mine = target.view(partial.dtype)[index * count : (index + 1) * count]
            else:
                mine = partial.new_empty(count)
            inner.reduce_scatter(groups.inner, partial, mine, how.op)
            return mine, outer.walk("allreduce", groups.outer, mine, mine, how.op)

        def spread_inside(piece: slice, total: Tensor) -> None:
            mine, target = how.result(total, channel.size, out.dtype).to(out.dtype), out[piece]
            whole = target if target.numel() == mine.numel() * size else out.new_empty(mine.numel() * size)
            inner.allgather(groups.inner, mine, whole, Sizes.equal(mine, size))
            if whole is not target:
                target.copy_(whole[: target.numel()])

        _overlap(chunks(0, x.numel(), _step(x, groups, size)), reduce_inside, spread_inside)

    def _allreduce_by_roots(self, channel: Channel, x: Tensor, out: Tensor, how: Kernel) -> None:
        """Carry out an allreduce of unequal groups. Between groups, the groups' roots reduce whole pieces."""
        groups, inner, outer = self._parts(channel, x, with_root=True)
        is_root = groups.inner.rank == 0

        def reduce_inside(piece: slice) -> tuple[Tensor, Walk]:
            mine = _own(how, x[piece])
            inner.reduce(groups.inner, mine, mine, how.op, 0)
            return mine, outer.walk("allreduce", groups.roots, mine, mine, how.op) if is_root else iter(())

        def spread_inside(piece: slice, total: Tensor) -> None:
            if is_root:
                out[piece].copy_(how.result(total, channel.size, out.dtype))
            inner.broadcast(groups.inner, out[piece], 0)

        _overlap(chunks(0, x.numel(), _step(x, groups, 1)), reduce_inside, spread_inside)

    @of_a_part
    def reduce(self, channel: Channel, source: Tensor, destination: Tensor, op: str, root: int) -> None:
        x, out, how = source.view(-1), destination.view(-1), kernel(source.dtype, op)
        groups, inner, outer = self._parts(channel, x, with_root=True)
        if groups.are_single:
            outer.reduce(groups.outer, source, destination, op, root)
            return
        (group, index), point = groups.location[root], self.members[x.device.type].rooted[-1]
        # Each piece is first reduced inside each group to the group's root, then between the groups' roots to the root
        # of the group that contains ``root``. If ``root`` is another rank of that group, the piece is sent to ``root``.
        for piece in chunks(0, x.numel(), _chain_step(x)):
            total = _own(how, x[slice(*piece)])
            inner.reduce(groups.inner, total, total, how.op, 0)
            if groups.inner.rank == 0:
                outer.reduce(groups.roots, total, total, how.op, group)
            if index and groups.group == group and groups.inner.rank == 0:
                point.send(groups.inner, total, index)
            elif index and channel.rank == root:
                point.recv(groups.inner, total, 0)
            if channel.rank == root:
                out[slice(*piece)].copy_(how.result(total, channel.size, x.dtype))

    @of_a_part
    def broadcast(self, channel: Channel, x: Tensor, root: int) -> None:
        x = x.view(-1)
        groups, inner, outer = self._parts(channel, x, with_root=True)
        if groups.are_single:
            outer.broadcast(groups.outer, x, root)
            return
        group, index = groups.location[root]
        pieces = chunks(0, x.numel(), _chain_step(x))

        def reach_groups(k: int) -> None:
            piece = x[slice(*pieces[k])]
            if groups.group == group:
                inner.broadcast(groups.inner, piece, index)
            if groups.inner.rank == 0:
                outer.broadcast(groups.roots, piece, group)

        def spread_inside(k: int) -> None:
            if groups.group != group:
                inner.broadcast(groups.inner, x[slice(*pieces[k])], 0)

        pipeline(len(pieces), [reach_groups, spread_inside], _nothing)

    @of_a_part
    def reduce_scatter(self, channel: Channel, source: Tensor, destination: Tensor, op: str) -> None:
        out = destination.view(-1)
        groups, inner, outer = self._parts(channel, out)
        if groups.are_single or not groups.are_equal:
            outer.reduce_scatter(channel, source, destination, op)
            return
        rows, how = source.view(channel.size, -1), kernel(out.dtype, op)
        pieces = chunks(0, out.numel(), max(1, _step(source, groups, groups.inner.size) // channel.size))

        def reduce_inside(piece: slice) -> tuple[Tensor, Walk]:
            # The reduce_scatter inside the group gives part i to the rank with inner rank i. Therefore the rows are
            # ordered by columns, so that part i consists of the rows for the ranks of column i.
            partial = how.partial(rows[groups.by_columns, piece].view(-1))
            mine = partial.new_empty(partial.numel() // groups.inner.size)
            inner.reduce_scatter(groups.inner, partial, mine, how.op)
            total = mine.new_empty(mine.numel() // len(groups.members))
            return total, outer.walk("reduce_scatter", groups.outer, mine, total, how.op)

        def divide(piece: slice, total: Tensor) -> None:
            out[piece].copy_(how.result(total, channel.size, out.dtype))

        _overlap(pieces, reduce_inside, divide)

    @of_a_part
    def allgather(self, channel: Channel, x: Tensor, out: Tensor, sizes: Sizes) -> None:
        groups, inner, outer = self._parts(channel, x)
        if not (groups.are_equal and sizes.are_equal):
            self._allgather_by_roots(channel, x, out, sizes)
            return
        if groups.are_single:
            outer.allgather(groups.outer, x, out, sizes)
            return
        x, rows = x.reshape(-1), out.view(channel.size, -1)
        pieces = chunks(0, x.numel(), max(1, _step(out, groups, groups.inner.size) // channel.size))

        def gather_between_groups(piece: slice) -> tuple[Tensor, Walk]:
            mine, num_groups = x[piece], len(groups.members)
            column = x.new_empty(num_groups * mine.numel())
            return column, outer.walk("allgather", groups.outer, mine, column, Sizes.equal(mine, num_groups))

        def spread_inside(piece: slice, column: Tensor) -> None:
            gathered = column.new_empty(groups.inner.size * column.numel())
            inner.allgather(groups.inner, column, gathered, Sizes.equal(column, groups.inner.size))
            for rank, part in zip(groups.by_columns, gathered.view(channel.size, -1), strict=True):
                rows[rank, piece] = part

        _overlap(pieces, gather_between_groups, spread_inside)

    def _allgather_by_roots(self, channel: Channel, x: Tensor, out: Tensor, sizes: Sizes) -> None:
        """Carry out an allgather of parts of different sizes, or of unequal groups, through the groups' roots."""
        groups, inner, outer = self._parts(channel, x, with_root=True)
        # 1. Inside each group, the group's root gathers the parts of all members.
        mine = groups.members[groups.group]
        is_root = groups.inner.rank == 0
        part = x.new_empty((sum(sizes.rows[rank] for rank in mine), *x.shape[1:])) if is_root else None
        inner.gather(groups.inner, x, part, 0, sizes.of(mine))
        # 2. Between groups, the roots gather the parts of all groups, and sort them by rank.
        if part is not None:
            in_order = [rank for members in groups.members for rank in members]
            is_sorted = in_order == sorted(in_order)
            gathered = out if is_sorted else out.new_empty(out.shape)
            outer.allgather(groups.roots, part, gathered, sizes.summed(groups.members))
            if not is_sorted:
                parts = sizes.split(out)
                for rank, rows in zip(in_order, sizes.of(in_order).split(gathered), strict=True):
                    parts[rank].copy_(rows)
        # 3. Inside each group, the group's root broadcasts the result.
        inner.broadcast(groups.inner, out, 0)

    def _parts(self, channel: Channel, x: Tensor, *, with_root: bool = False) -> tuple[NodeGroups, Flavour, Flavour]:
        """Return the groups of the channel, and the flavours inside and between them for tensors like ``x``."""
        groups, device = groups_of(channel), x.device.type
        members = self.members[device]
        inners = members.rooted if with_root else members.inners
        inner = next(inner for inner in inners if not inner.missing(device) and not inner.refuses(groups.inner))
        return groups, inner, members.outer


def _overlap(
    pieces: Sequence[Bounds], begin: Callable[[slice], tuple[Tensor, Walk]], end: Callable[[slice, Tensor], None]
) -> None:
    """Take all pieces through three stages, with several pieces in the second stage at a time.

    The stages are ``begin`` inside the groups, a walk between the groups, and ``end`` inside the groups. ``begin``
    returns the tensor for ``end``, and the walk. All ranks resume the same walks in the same order, and a walk has the
    same number of steps on all ranks. So any two ranks agree on the order of their messages, and all walks can use one
    tag. This function is not for trees (broadcast, reduce), whose walks have different numbers of steps.
    """
    begun: dict[int, Tensor] = {}
    under_way: dict[int, tuple[Walk, Requests]] = {}  # in the order in which the walks are resumed

    def resume(k: int, walk: Walk) -> None:
        for requests in itertools.islice(walk, 1):
            under_way[k] = walk, requests

    def start(k: int) -> None:
        begun[k], walk = begin(slice(*pieces[k]))
        resume(k, walk)

    def finish(k: int) -> None:
        while k in under_way:
            oldest, (walk, requests) = next(iter(under_way.items()))
            wait(requests)
            del under_way[oldest]
            resume(oldest, walk)
        end(slice(*pieces[k]), begun.pop(k))

    with kept_from(under_way):
        pipeline(len(pieces), [start, *[_nothing] * (PIECES_UNDER_WAY - 1), finish], _nothing)


class NodeGroups:
    """The groups of a channel's ranks, ordered by their lowest rank. The channel keeps this object between calls."""

    def __init__(self, channel: Channel) -> None:
        colours = _colours(channel)
        self.members = [[rank for rank, c in enumerate(colours) if c == colour] for colour in dict.fromkeys(colours)]
        self.location = {rank: (g, i) for g, members in enumerate(self.members) for i, rank in enumerate(members)}
        self.group, _ = self.location[channel.rank]
        self.are_equal = len({len(members) for members in self.members}) == 1
        self.are_single = len(self.members) == channel.size
        """Whether every group has only one rank, so that the flavour between groups does all the work."""
        self.inner = channel.split(colours)
        indices = [self.location[rank][1] for rank in range(channel.size)]
        self.outer = channel.split(indices)  # this rank's column; column 0 consists of the groups' roots
        self.roots = self.outer
        columns = zip(*self.members, strict=True) if self.are_equal else []
        self.by_columns = [rank for column in columns for rank in sorted(column)]
        """For equal groups, the ranks column by column, in the order of each column's outer channel; else empty."""

    def free(self) -> None:
        """Free the inner and outer channels."""
        self.outer.free()
        self.inner.free()


def groups_of(channel: Channel) -> NodeGroups:
    """Return the groups of a channel for the current span."""
    return channel.keep((NodeGroups, communicators.stack().span), NodeGroups)


def span_end(channel: Channel) -> Communicator | None:
    """Return the communicator of the level at which the span ends; None if the span does not apply to ``channel``.

    The span applies if it begins at the level of ``channel``, and if the communicator of the level at its end is
    smaller than ``channel``. If the span does not apply, the groups are the nodes.
    """
    stack = communicators.stack()
    level, groups = (stack.levels[index] for index in stack.span)
    is_begin = channel in (level.direct, level.background)
    return groups if is_begin and groups.size < level.size else None


def _colours(channel: Channel) -> list[int]:
    """Return a number for every rank of a channel, equal within a group and different between groups.

    All ranks of the channel must call it.
    """
    end = span_end(channel)
    if end is None:
        return list(channel.places.nodes.tolist())
    # The allgather uses the channel, because another thread may be using the communicator of the level.
    firsts = channel.mpi.allgather(end.direct.places[0])
    return [firsts.index(first) for first in firsts]


def _step(x: Tensor, groups: NodeGroups, num_carriers: int) -> int:
    """Return the number of elements in a piece of ``x``.

    ``num_carriers`` is the number of ranks per group that carry the piece. The result is a multiple of this number.
    Small tensors have smaller pieces, so that several pieces are under way. On GPUs pieces are larger, because the
    ranks of a group synchronize on the host once per piece.
    """
    itemsize, num_chunks = max(4, x.itemsize), num_carriers * len(groups.members)
    if x.is_cuda:
        piece_bytes = config.current.gpu_cache_bytes
    else:
        share_bytes = x.numel() * itemsize // (2 * PIECES_UNDER_WAY)
        piece_bytes = min(max(share_bytes, num_chunks * LEAST_CHUNK_BYTES), num_chunks * CHUNK_BYTES)
        piece_bytes = min(piece_bytes, MOST_PIECE_BYTES)
    return max(1, piece_bytes // itemsize // num_carriers) * num_carriers


def _own(how: Kernel, x: Tensor) -> Tensor:
    """Return the partial result of ``x`` alone, in new memory that the caller may overwrite."""
    return x.view(how.dtype).clone() if how.is_plain else how.partial(x)


def _nothing(*_chunk: int) -> None:
    """Do nothing.

    This is the stage in which pieces only travel. It also replaces the barrier of the pipeline, which is not needed
    because the walks already make ranks wait.
    """


def _chain_step(x: Tensor) -> int:
    """Return the number of elements in a piece of a broadcast or reduce."""
    piece_bytes = config.current.gpu_cache_bytes if x.is_cuda else CHUNK_BYTES
    return max(1, piece_bytes // max(4, x.itemsize))
