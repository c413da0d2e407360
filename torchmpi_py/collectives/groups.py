"""The groups whose ranks flavour ``hierarchical`` combines first, and the channels inside and between them."""

from __future__ import annotations

from torchmpi_py import communicators
from torchmpi_py.channels import Channel
from torchmpi_py.communicators import Communicator


class Groups:
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


def groups_of(channel: Channel) -> Groups:
    """The groups of a channel, for the span in use."""
    return channel.keep((Groups, communicators.stack().span), Groups)


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
