"""Reuse the communicators of process groups for later groups of the same ranks.

In torch.distributed, only the members create a group, and each member may destroy it at any time. But MPI has a limited
number of communicators, and all ranks of a communicator must free it together. So a communicator outlives its group.
When the same ranks create another group, they agree on a communicator that is unused on all of them, or create one.
``mpi.stop()`` frees all communicators.

Up to ``_NUM_USES`` groups of the same ranks share one communicator for messages. Each of these groups has its own range
of tags, which no other group ever gets. So a group never receives a message that was sent to an earlier group. Such a
message may still be in transit after its group was destroyed, and MPI cannot list messages in transit.
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

_CREATION_TAG_BITS = 14  # Every MPI allows tags up to 32767.
_NUM_USES = 64


class Membership(NamedTuple):
    """A group's communicators for collectives and for messages, and its range of tags."""

    comm: Communicator
    messages: MPI.Comm
    first_tag: int
    num_tags: int

    def tag(self, verb: str, tag: int) -> int:
        """Return the first MPI tag for a tag of the program. Raise ValueError if the group has no such tag."""
        number, largest = operator.index(tag), self.num_tags - 1
        if not 0 <= number <= largest:
            raise ValueError(
                f"{verb}: expected a tag from 0 to {largest}, the largest tag of a group with this MPI; found tag={tag}"
            )
        return (self.first_tag + number) * TAGS_PER_KIND


class _Family:
    """The communicators for groups of the same ranks, in the order in which all ranks created them."""

    def __init__(self, ranks: Sequence[int]) -> None:
        world: Any = communicators.stack().levels[0].direct.mpi
        tag = zlib.crc32(repr(list(ranks)).encode()) >> 32 - _CREATION_TAG_BITS
        self.comms: list[Communicator] = []
        first = self._add(world.Create_group(world.group.Incl(list(ranks)), tag))
        self.num_groups = 0
        # Never free this communicator. MPICH would deliver its unreceived messages to the next communicator.
        self.messages = first.direct.mpi.Dup()

    def join(self) -> Membership:
        """Return the communicators and tags for a new group. All ranks of the group must call it."""
        # Ranks destroy a group at different times, so a communicator may be unused here and in use on another rank.
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
        stack = communicators.stack()
        self.comms.append(stack.keep(Communicator(group, stack.place, f"process group of {group.size} ranks")))
        return self.comms[-1]


# The outer key is the level stack of the session, and the inner key contains the world ranks of the members.
_families: weakref.WeakKeyDictionary[Stack, dict[tuple[int, ...], _Family]] = weakref.WeakKeyDictionary()
_busy: weakref.WeakSet[Communicator] = weakref.WeakSet()  # communicators that a group of this rank uses


def acquire(ranks: Sequence[int]) -> Membership:
    """Return the communicators and tags for a group of these world ranks. All of these ranks must call it."""
    stack, key = communicators.stack(), tuple(ranks)

    def join() -> Membership:
        families = _families.setdefault(stack, {})
        if key not in families:
            families[key] = _Family(ranks)
        return families[key].join()

    return journal.run_alone("a new process group", stack.levels[0], join, frame=torch_internals.program())


def release(comm: Communicator) -> None:
    """Return the communicator of a destroyed group to the pool, unless the communicator is stuck.

    The other ranks need not make this call.
    """
    if comm.is_stuck:
        comm._release(is_lost=True)
    else:
        _busy.discard(comm)
