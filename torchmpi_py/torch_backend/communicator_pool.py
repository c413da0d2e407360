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


class Tags(NamedTuple):
    """The tags of a group: ``number``, from ``first``; the program's tags count from 0."""

    first: int
    number: int

    def of(self, verb: str, tag: int) -> int:
        """The first tag in MPI for a tag of the program, for ``mpi_steps``; ValueError for one beyond the group's."""
        number, largest = operator.index(tag), self.number - 1
        if not 0 <= number <= largest:
            raise ValueError(
                f"{verb}: tag={tag}: give one from 0 to {largest}, the largest that a group has on this MPI"
            )
        return (self.first + number) * TAGS_PER_KIND


class Membership(NamedTuple):
    """A group's communicators: for collectives, and for messages, with the tags to use there."""

    comm: Communicator
    messages: MPI.Comm
    tags: Tags


class _Line:
    """A communicator for the messages of some groups."""

    def __init__(self, mpi: MPI.Comm) -> None:
        self.mpi: MPI.Comm = mpi.Dup()

    def free(self) -> None:
        """Nothing: MPICH would give what nobody has received to the next communicator."""


class _Pool:
    """The communicators of one session."""

    def __init__(self) -> None:
        self.families: dict[tuple[int, ...], _Family] = {}  # by their ranks in the world
        self.busy: set[Communicator] = set()  # in use by a group of this rank

    def take(self, ranks: Sequence[int]) -> Membership:
        """Communicators and tags for a group of ``ranks``. Collective over them."""
        key = tuple(ranks)
        if key not in self.families:
            self.families[key] = _Family(ranks)
        family = self.families[key]
        comm = family.take(self.busy)
        self.busy.add(comm)
        return Membership(comm, *family.messages())


class _Family:
    """The communicators of groups of the same ranks, in the order in which all ranks made them."""

    def __init__(self, ranks: Sequence[int]) -> None:
        world: Any = communicators.stack().levels[0].direct.mpi
        tag = zlib.crc32(repr(list(ranks)).encode()) >> 32 - _CREATION_TAG_BITS
        self.comms: list[Communicator] = []
        first = self._add(world.Create_group(world.group.Incl(list(ranks)), tag))
        self.first, self.num_groups = first.direct, 0
        self.line = self._new_line(self.first.mpi)

    def take(self, busy: set[Communicator]) -> Communicator:
        """The first communicator that is free on all ranks, or a new one."""
        # Ranks destroy their groups at different times: what is free here may be in use on another rank.
        mine = [comm not in busy and not comm.is_free for comm in self.comms]
        gathered = self.line.mpi.allgather(mine)
        found = (comm for comm, *free in zip(self.comms, *gathered, strict=True) if all(free))
        return next(found, None) or self._add(self.line.mpi.Dup())

    def messages(self) -> tuple[MPI.Comm, Tags]:
        """The communicator and the tags for the messages of the next group. Collective."""
        use = self.num_groups % _NUM_USES
        if self.num_groups and use == 0:
            self.line = self._new_line(self.line.mpi)  # a call may be stuck on the first communicator
        last: Any = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)
        number = (int(last) + 1) // _NUM_USES // TAGS_PER_KIND
        self.num_groups += 1
        return self.line.mpi, Tags(use * number, number)

    def _new_line(self, mpi: MPI.Comm) -> _Line:
        return self.first.keep(("messages of process groups", self.num_groups), lambda _: _Line(mpi))

    def _add(self, group: MPI.Comm) -> Communicator:
        used = communicators.stack()
        made = Communicator(group, used.place, f"process group of {group.size} ranks")
        self.comms.append(made)
        used.others.append(made)
        return made


_pools: weakref.WeakKeyDictionary[Stack, _Pool] = weakref.WeakKeyDictionary()


def _pool() -> _Pool:
    """The pool of the session, which ends with its level stack."""
    return _pools.setdefault(communicators.stack(), _Pool())


def acquire(ranks: Sequence[int]) -> Membership:
    """The communicators and tags for a group of these ranks of the world. Collective over them."""
    pool, world = _pool(), communicators.stack().levels[0]
    frame = torch_internals.program()
    return journal.run_alone("a new process group", world, lambda: pool.take(ranks), frame=frame)


def release(comm: Communicator) -> None:
    """This rank's group is destroyed. Not collective. A communicator that is stuck is never used again."""
    if comm.is_stuck:
        comm._release(is_lost=True)
    elif communicators.is_started():
        _pool().busy.discard(comm)
