"""Communicators for process groups, used again by the next group of the same ranks.

In torch.distributed the members alone make a group, and each rank destroys it at any time. MPI's communicators are
freed by all their ranks together, and are few. So a communicator outlives its group: for the next group of the same
ranks, they agree on a communicator that is free on all of them, or make one. ``mpi.stop()`` frees them.

``_NUM_USES`` groups of the same ranks share a communicator for messages, then a new one is made. Each group has tags of
its own there, which no other group ever gets, so that it receives nothing that was sent to another one, live or
destroyed: a message that nobody has received may still be under way, and cannot be looked for.
"""

from __future__ import annotations

import operator
import weakref
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from torchmpi_py.collectives.flavours.mpi_steps import TAGS_PER_KIND
from torchmpi_py.core import communicators, journal
from torchmpi_py.core.communicators import Communicator, Stack
from torchmpi_py.core.mpi_api import MPI
from torchmpi_py.torch_backend import torch_internals

_CREATION_TAG_BITS = 14  # every MPI has tags up to 32767
_NUM_USES = 64


class Membership(NamedTuple):
    """A group's communicators: for collectives, and for messages, with ``num_tags`` tags there from ``first_tag``."""

    comm: Communicator
    messages: MPI.Comm
    first_tag: int
    num_tags: int

    def tag(self, verb: str, tag: int) -> int:
        """The first tag in MPI for a tag of the program, which count from 0; ValueError for one beyond the group's."""
        number, largest = operator.index(tag), self.num_tags - 1
        if not 0 <= number <= largest:
            raise ValueError(
                f"{verb}: tag={tag}: give one from 0 to {largest}, the largest that a group has on this MPI"
            )
        return (self.first_tag + number) * TAGS_PER_KIND


class _Family:
    """The communicators of groups of the same ranks, in the order in which all ranks made them."""

    def __init__(self, ranks: Sequence[int]) -> None:
        world: Any = communicators.stack().levels[0].direct.mpi
        tag = zlib.crc32(repr(list(ranks)).encode()) >> 32 - _CREATION_TAG_BITS
        self.comms: list[Communicator] = []
        first = self._add(world.Create_group(world.group.Incl(list(ranks)), tag))
        self.num_groups = 0
        # Never freed: MPICH would give messages that no rank has received to the next communicator.
        self.messages = first.direct.mpi.Dup()

    def join(self) -> Membership:
        """The communicators and tags for a new group. Collective."""
        # Ranks destroy their groups at different times: what is free here may be in use on another rank.
        mine = [comm not in _busy and not comm.is_free for comm in self.comms]
        gathered = self.messages.allgather(mine)
        usable = (comm for comm, *free in zip(self.comms, *gathered, strict=True) if all(free))
        comm = next(usable, None) or self._add(self.messages.Dup())
        _busy.add(comm)
        use = self.num_groups % _NUM_USES
        if self.num_groups and use == 0:
            self.messages = self.messages.Dup()
        self.num_groups += 1
        last: Any = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)
        num_tags = (int(last) + 1) // _NUM_USES // TAGS_PER_KIND
        return Membership(comm, self.messages, use * num_tags, num_tags)

    def _add(self, group: MPI.Comm) -> Communicator:
        used = communicators.stack()
        self.comms.append(used.keep(Communicator(group, used.place, f"process group of {group.size} ranks")))
        return self.comms[-1]


# By level stack, with which a session ends, and by the ranks in the world.
_families: weakref.WeakKeyDictionary[Stack, dict[tuple[int, ...], _Family]] = weakref.WeakKeyDictionary()
_busy: weakref.WeakSet[Communicator] = weakref.WeakSet()  # in use by a group of this rank


def acquire(ranks: Sequence[int]) -> Membership:
    """The communicators and tags for a group of these ranks of the world. Collective over them."""
    used, key = communicators.stack(), tuple(ranks)

    def join() -> Membership:
        families = _families.setdefault(used, {})
        if key not in families:
            families[key] = _Family(ranks)
        return families[key].join()

    return journal.run_alone("a new process group", used.levels[0], join, frame=torch_internals.program())


def release(comm: Communicator) -> None:
    """This rank's group is destroyed. Not collective. A communicator that is stuck is never used again."""
    if comm.is_stuck:
        comm._release(is_lost=True)
    else:
        _busy.discard(comm)
