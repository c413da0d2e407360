"""Flavour ``hierarchical``: the fast memory inside groups of ranks first, the network between groups for the rest.

The *groups* are the nodes of a communicator; for the level at which the span begins they are the groups of the level at
which the span ends (``set_collective_span``). Each rank has an *inner* channel, its group, and an *outer* one: its
column, the ranks with the same inner rank in all groups, or where groups are unequal the roots of the groups alone.

allreduce, M equal groups of m ranks, S bytes: reduce-scatter inside (each rank owns S/m), allreduce of every slice
across groups by its owners, allgather inside. 2 S (M-1)/M bytes leave each group, with a ring outside, whatever m is.
Unequal groups: reduce to the group's root, allreduce across the roots, broadcast inside. Work goes in chunks: while one
chunk travels between groups the next one is reduced inside. broadcast and reduce go by the roots, in chunks too: S
bytes enter each other group, or leave it. allgather, not in chunks: gathered on the roots, S M (M-1)/M bytes through
each in the ring of roots for a result of S M bytes, and broadcast inside.

After TorchMPI's hierarchical collectives, which had no such thing on CPUs, and no inner root mapping.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from torchmpi_py.collectives.flavour import Flavour, Sizes
from torchmpi_py.collectives.flavours.schedule import chunks, pipeline
from torchmpi_py.collectives.reductions import Kernel, kernel
from torchmpi_py.core import communicators, config
from torchmpi_py.core.channels import Channel
from torchmpi_py.core.communicators import Communicator


class Members(NamedTuple):
    """The flavours to combine: ``inners`` inside groups (the first that can serve the group), ``outer`` between them.

    The last of the inners serves any group, and carries messages between two ranks.
    """

    inners: Sequence[Flavour]
    outer: Flavour


class Hierarchical(Flavour):
    """One flavour inside groups, one between them, for each type of device."""

    name = "hierarchical"

    def __init__(self, members: Mapping[str, Members]) -> None:
        self.members = members
        self.devices = frozenset(members)  # type: ignore[misc]

    def missing(self, device: str) -> str:
        return self.members[device].inners[-1].missing(device)

    def refuses(self, comm: Communicator | Channel) -> str:
        if span_end(comm) is not None or comm.num_nodes > 1:
            return ""
        return (
            "all ranks are on one node; set_collective_span(begin, end) with end below begin names groups of your own"
        )

    def allreduce(self, channel: Channel, source: Tensor, destination: Tensor, op: str) -> None:
        groups, x, out = groups_of(channel), source.view(-1), destination.view(-1)
        how, inner, outer = kernel(x.dtype, op), self._inner(channel, x), self.members[x.device.type].outer
        form = _Sliced if groups.are_equal else _ByRoots
        pieces = chunks(0, x.numel(), _step(x, groups.inner.size if groups.are_equal else 1))
        reduction = form(groups, inner, outer, how, channel.size)
        under_way: dict[int, Callable[[], Tensor]] = {}

        def reduce_inside(k: int) -> None:
            under_way[k] = reduction.begin(x[slice(*pieces[k])])

        def spread_inside(k: int) -> None:
            reduction.end(under_way.pop(k)(), out[slice(*pieces[k])])

        pipeline(len(pieces), [reduce_inside, spread_inside], _no_meeting)

    def reduce(self, channel: Channel, source: Tensor, destination: Tensor, op: str, root: int) -> None:
        groups, x, out = groups_of(channel), source.view(-1), destination.view(-1)
        how, inner, of_device = kernel(x.dtype, op), self._inner(channel, x), self.members[x.device.type]
        group, index = groups.location[root]
        for piece in chunks(0, x.numel(), _step(x, 1)):
            total = _own(how, x[slice(*piece)])
            inner.reduce(groups.inner, total, total, how.op, 0)
            if groups.inner.rank == 0:
                of_device.outer.reduce(groups.roots, total, total, how.op, group)
            if index and groups.group == group:
                _pass_on(of_device.inners[-1], groups.inner, total, 0, index)
            if channel.rank == root:
                out[slice(*piece)].copy_(how.result(total, channel.size, x.dtype))

    def broadcast(self, channel: Channel, x: Tensor, root: int) -> None:
        groups, x, inner = groups_of(channel), x.view(-1), self._inner(channel, x)
        outer = self.members[x.device.type].outer
        group, index = groups.location[root]
        pieces = chunks(0, x.numel(), _step(x, 1))

        def reach_groups(k: int) -> None:
            piece = x[slice(*pieces[k])]
            if groups.group == group:
                inner.broadcast(groups.inner, piece, index)
            if groups.inner.rank == 0:
                outer.broadcast(groups.roots, piece, group)

        def spread_inside(k: int) -> None:
            if groups.group != group:
                inner.broadcast(groups.inner, x[slice(*pieces[k])], 0)

        pipeline(len(pieces), [reach_groups, spread_inside], _no_meeting)

    def allgather(self, channel: Channel, x: Tensor, out: Tensor, sizes: Sizes) -> None:
        groups, inner = groups_of(channel), self._inner(channel, x)
        mine = groups.members[groups.group]
        is_root = groups.inner.rank == 0
        part = x.new_empty((sum(sizes.rows[rank] for rank in mine), *x.shape[1:])) if is_root else None
        inner.gather(groups.inner, x, part, 0, sizes.of(mine))
        if part is not None:
            in_order = [rank for members in groups.members for rank in members]
            is_sorted = in_order == sorted(in_order)
            gathered = out if is_sorted else out.new_empty(out.shape)
            outer = self.members[x.device.type].outer
            outer.allgather(groups.roots, part, gathered, sizes.summed(groups.members))
            if not is_sorted:
                parts = sizes.split(out)
                for rank, rows in zip(in_order, sizes.of(in_order).split(gathered), strict=True):
                    parts[rank].copy_(rows)
        inner.broadcast(groups.inner, out, 0)

    def _inner(self, channel: Channel, x: Tensor) -> Flavour:
        group, device = groups_of(channel).inner, x.device.type
        inners = self.members[device].inners
        return next(inner for inner in inners if not inner.missing(device) and not inner.refuses(group))


class _Sliced:
    """Allreduce of a chunk where all groups are equal: every rank carries the slice that it owns between the groups."""

    def __init__(self, groups: NodeGroups, inner: Flavour, outer: Flavour, how: Kernel, num_ranks: int) -> None:
        self.groups, self.inner, self.outer, self.how, self.num_ranks = groups, inner, outer, how, num_ranks

    def begin(self, x: Tensor) -> Callable[[], Tensor]:
        """Reduce ``x`` inside the group and start the reduction between groups.

        The function returned waits for the latter, and gives this rank's slice of the total.
        """
        partial, size = self.how.partial(x), self.groups.inner.size
        if partial.numel() % size:
            padded = partial.new_zeros(-(-partial.numel() // size) * size)
            padded[: partial.numel()].copy_(partial)
            partial = padded
        mine = partial.new_empty(partial.numel() // size)
        self.inner.reduce_scatter(self.groups.inner, partial, mine, self.how.op)
        finish = self.outer.begin_allreduce(self.groups.outer, mine, mine, self.how.op)

        def total() -> Tensor:
            finish()
            return mine

        return total

    def end(self, total: Tensor, out: Tensor) -> None:
        """Gather the slices of ``total`` inside the group, into ``out``."""
        mine = self.how.result(total, self.num_ranks, out.dtype).to(out.dtype)
        size = self.groups.inner.size
        whole = out if out.numel() == mine.numel() * size else out.new_empty(mine.numel() * size)
        self.inner.allgather(self.groups.inner, mine, whole, Sizes.equal(mine, size))
        if whole is not out:
            out.copy_(whole[: out.numel()])


class _ByRoots(_Sliced):
    """Allreduce of a chunk where groups are unequal: the roots of the groups carry whole chunks between groups."""

    def begin(self, x: Tensor) -> Callable[[], Tensor]:
        mine, groups = _own(self.how, x), self.groups
        self.inner.reduce(groups.inner, mine, mine, self.how.op, 0)
        is_root = groups.inner.rank == 0
        finish = self.outer.begin_allreduce(groups.roots, mine, mine, self.how.op) if is_root else _no_meeting

        def total() -> Tensor:
            finish()
            return mine

        return total

    def end(self, total: Tensor, out: Tensor) -> None:
        if self.groups.inner.rank == 0:
            out.copy_(self.how.result(total, self.num_ranks, out.dtype))
        self.inner.broadcast(self.groups.inner, out, 0)


class NodeGroups:
    """How the ranks of a channel fall into groups; kept with the channel. Groups count by their lowest rank."""

    def __init__(self, channel: Channel) -> None:
        colours = _colours(channel)
        self.members = [[rank for rank, c in enumerate(colours) if c == colour] for colour in dict.fromkeys(colours)]
        self.location = {rank: (g, i) for g, members in enumerate(self.members) for i, rank in enumerate(members)}
        self.group, _ = self.location[channel.rank]
        self.are_equal = len({len(members) for members in self.members}) == 1
        self.inner = channel.split(colours)
        indices = [self.location[rank][1] for rank in range(channel.size)]
        self.outer = channel.split(indices)  # columns; the first one holds the roots of all groups
        self.roots = self.outer

    def free(self) -> None:
        """Give the channels back."""
        self.outer.free()
        self.inner.free()


def groups_of(channel: Channel) -> NodeGroups:
    """The groups of a channel, for the span in use."""
    return channel.keep((NodeGroups, communicators.stack().span), NodeGroups)


def span_end(comm: Communicator | Channel) -> Communicator | None:
    """The level whose groups are combined on ``comm``: where the span ends, if it begins there.

    None where it does not, or where those groups are not smaller: then nodes are the groups.
    """
    stack = communicators.stack()
    level, groups = (stack.levels[index] for index in stack.span)
    is_begin = comm in (level, level.direct, level.background)
    return groups if is_begin and groups.size < level.size else None


def _colours(channel: Channel) -> list[int]:
    """For every rank of a channel a number that the ranks of its group, and no others, have. Collective over it."""
    end = span_end(channel)
    if end is None:
        return [place.node for place in channel.places]
    firsts = channel.mpi.allgather(end.direct.places[0])  # no message on a communicator that another thread may use
    return [firsts.index(first) for first in firsts]


def _step(x: Tensor, size: int) -> int:
    """Elements of a chunk: a multiple of ``size`` that fits ``Tuning.wire_bytes`` also where 8 bits travel as 32.

    On GPUs chunks are larger: the ranks of a group meet on the host for each.
    """
    chunk_bytes = config.current.gpu_cache_bytes if x.is_cuda else config.current.wire_bytes
    step: int = max(1, chunk_bytes // max(4, x.itemsize) // size) * size
    return step


def _own(how: Kernel, x: Tensor) -> Tensor:
    """``x`` in the form that partial results have, in memory of its own, which may be overwritten."""
    return x.view(how.dtype).clone() if how.is_plain else how.partial(x)


def _pass_on(flavour: Flavour, channel: Channel, x: Tensor, source: int, destination: int) -> None:
    """Send ``x`` from one rank of a channel to another."""
    if channel.rank == source:
        flavour.send(channel, x, destination)
    elif channel.rank == destination:
        flavour.recv(channel, x, source)


def _no_meeting() -> None:
    """The barrier between chunks: none, for ranks wait for each other in the collectives themselves."""
