"""Flavour ``hierarchical``: fast memory within groups of ranks first, then the network between groups.

The *groups* are the nodes of a communicator. If the span begins at its level, they are the groups of the level at which
the span ends (``set_collective_span``). Each rank has an *inner* channel, its group, and an *outer* channel, its
column: the ranks with the same inner rank in all groups. If groups are unequal, only the roots of the groups have a
column.

- allreduce of S bytes, M equal groups of m ranks: reduce-scatter inside (each rank owns S/m), allreduce of every slice
  across groups by its owners, allgather inside. 2 S (M-1)/M bytes leave each group, with a ring outside, whatever m is.
- allreduce, unequal groups: reduce to the group's root, allreduce across the roots, broadcast inside.
- reduce_scatter: the first half of an allreduce. S (M-1)/M bytes leave each group.
- allgather: the second half. S (M-1)/M bytes leave each group. With unequal groups or parts it uses the roots, in one
  piece.
- broadcast and reduce: through the roots. S bytes enter each other group, or leave it.

The work is divided into *pieces*. While some pieces travel between groups, each as a walk (``Flavour.walk``), the ranks
work on the next one inside. In broadcast and reduce only one piece travels at a time. A piece is so large that the
outer flavour can send one chunk to each neighbour. So the pieces under way fill both directions of a group's link,
while the memory inside is also busy.

Alternative: one flavour for all ranks, such as a ring. It is not used between nodes, because each rank of a node would
send its own bytes over the network. The idea is that of TorchMPI's hierarchical collectives, which had no such
collectives on CPUs, and did not map the root to an inner rank.
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
"""Bytes of a piece, for each group and each rank that carries the piece: a chunk of the outer ring, or less."""

MOST_PIECE_BYTES = 32 << 20
"""Largest piece. Several pieces lie in scratch memory, which would otherwise grow with the number of groups."""

PIECES_UNDER_WAY = 3  # pieces that travel between groups while the next one is reduced inside


class Members(NamedTuple):
    """The flavours to combine: ``inners`` and ``rooted`` inside groups, ``outer`` between them.

    Collectives with a root use the flavours in ``rooted``. The first flavour that can serve the group is used. The last
    one serves any group, and carries messages between two ranks.
    """

    inners: Sequence[Flavour]
    rooted: Sequence[Flavour]
    outer: Flavour


class Hierarchical(Flavour):
    """Collectives by one flavour inside groups and another between groups, for each type of device."""

    name = "hierarchical"

    def __init__(self, members: Mapping[str, Members]) -> None:
        self.members = members
        self.devices = frozenset(members)  # type: ignore[misc]

    def missing(self, device: str) -> str:
        return self.members[device].inners[-1].missing(device)

    def refuses(self, channel: Channel) -> str:
        if span_end(channel) is not None or channel.num_nodes > 1:
            return ""
        remedy = "to define groups of your own, call set_collective_span(begin, end) with end below begin"
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
        """Carry out an allreduce of equal groups: between groups, every rank reduces the slice that it owns."""
        groups, inner, outer = self._parts(channel, x)
        size, index = groups.inner.size, groups.inner.rank

        def reduce_inside(piece: slice) -> tuple[Tensor, Walk]:
            partial, target = how.partial(x[piece]), out[piece]
            if partial.numel() % size:  # slices must be equal, so the last piece may need some more zeros
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
        """Carry out an allreduce of unequal groups: between groups, the roots reduce whole pieces."""
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
        # Each piece is reduced inside to the group's root, then between groups to the root of root's group, and sent
        # inside to root.
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
            # Row i of the partial results belongs to the ranks with inner rank i, in the order of the groups.
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
        """Carry out an allgather of different sizes, or of unequal groups."""
        groups, inner, outer = self._parts(channel, x, with_root=True)
        # 1. Inside, the root gathers all parts of the group.
        mine = groups.members[groups.group]
        is_root = groups.inner.rank == 0
        part = x.new_empty((sum(sizes.rows[rank] for rank in mine), *x.shape[1:])) if is_root else None
        inner.gather(groups.inner, x, part, 0, sizes.of(mine))
        # 2. Between groups, the roots gather the parts of all groups, and bring them into the order of ranks.
        if part is not None:
            in_order = [rank for members in groups.members for rank in members]
            is_sorted = in_order == sorted(in_order)
            gathered = out if is_sorted else out.new_empty(out.shape)
            outer.allgather(groups.roots, part, gathered, sizes.summed(groups.members))
            if not is_sorted:
                parts = sizes.split(out)
                for rank, rows in zip(in_order, sizes.of(in_order).split(gathered), strict=True):
                    parts[rank].copy_(rows)
        # 3. Inside, the root broadcasts the result.
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
    """Work on pieces: ``begin`` inside the groups, a walk between them, ``end`` inside; some pieces are under way.

    ``begin`` returns the tensor for ``end``, and the walk. All ranks start and finish the same walks in the same order,
    and a walk has equally many steps on all ranks. So two ranks agree on the order of their messages, and one tag is
    enough. For trees one tag would not be enough.
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
    """The groups of a channel's ranks, ordered by their lowest rank; kept with the channel."""

    def __init__(self, channel: Channel) -> None:
        colours = _colours(channel)
        self.members = [[rank for rank, c in enumerate(colours) if c == colour] for colour in dict.fromkeys(colours)]
        self.location = {rank: (g, i) for g, members in enumerate(self.members) for i, rank in enumerate(members)}
        self.group, _ = self.location[channel.rank]
        self.are_equal = len({len(members) for members in self.members}) == 1
        self.are_single = len(self.members) == channel.size
        """Whether each rank is a group of its own, so that the flavour between groups does all the work."""
        self.inner = channel.split(colours)
        indices = [self.location[rank][1] for rank in range(channel.size)]
        self.outer = channel.split(indices)  # this rank's column; the first column has the roots of all groups
        self.roots = self.outer
        columns = zip(*self.members, strict=True) if self.are_equal else []
        self.by_columns = [rank for column in columns for rank in sorted(column)]
        """For equal groups: the ranks of the first column in the order of ``outer``, then of the second, and so on."""

    def free(self) -> None:
        """Free the channels."""
        self.outer.free()
        self.inner.free()


def groups_of(channel: Channel) -> NodeGroups:
    """Return the groups of a channel for the current span."""
    return channel.keep((NodeGroups, communicators.stack().span), NodeGroups)


def span_end(channel: Channel) -> Communicator | None:
    """Return the level at which the span ends, if the span begins at the level of ``channel``.

    None if the span begins elsewhere, or if the groups of the level are not smaller; then nodes are the groups.
    """
    stack = communicators.stack()
    level, groups = (stack.levels[index] for index in stack.span)
    is_begin = channel in (level.direct, level.background)
    return groups if is_begin and groups.size < level.size else None


def _colours(channel: Channel) -> list[int]:
    """Return a number for every rank of a channel: equal within a group, different between groups. Collective."""
    end = span_end(channel)
    if end is None:
        return list(channel.places.nodes.tolist())
    # The allgather uses the channel, because another thread may be using the communicator of the level.
    firsts = channel.mpi.allgather(end.direct.places[0])
    return [firsts.index(first) for first in firsts]


def _step(x: Tensor, groups: NodeGroups, num_carriers: int) -> int:
    """Return the number of elements of a piece of ``x``, a multiple of the number of ranks that carry it per group.

    Small tensors have smaller pieces, so that several are under way. On GPUs pieces are larger, because the ranks of a
    group synchronize on the host once per piece.
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
    """Return ``x`` as a partial result in new memory, which may be overwritten."""
    return x.view(how.dtype).clone() if how.is_plain else how.partial(x)


def _nothing(*_chunk: int) -> None:
    """Do nothing: in a stage in which pieces travel, and between stages, where the walks already make ranks wait."""


def _chain_step(x: Tensor) -> int:
    """Return the number of elements of a piece that the roots pass on, while ranks work on the next one inside."""
    piece_bytes = config.current.gpu_cache_bytes if x.is_cuda else CHUNK_BYTES
    return max(1, piece_bytes // max(4, x.itemsize))
