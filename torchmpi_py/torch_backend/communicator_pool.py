"""Communicators for process groups, used again by the next group of the same ranks.

In torch.distributed the members alone make a group, and each rank destroys it at any time. MPI's communicators are
freed by all their ranks together, and are few. So a communicator outlives its group: for the next group of the same
ranks, they agree on a communicator that is free on all of them, or make one. ``mpi.stop()`` frees all.

All groups of the same ranks share one communicator for messages. Each group has tags of its own there, so that a group
does not receive a message that was sent to a former one.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from torchmpi_py.core import communicators, journal
from torchmpi_py.core.channels import Channel
from torchmpi_py.core.communicators import Communicator, Stack
from torchmpi_py.core.mpi_api import MPI
from torchmpi_py.torch_backend import torch_internals

_CREATION_TAG_BITS = 14  # every MPI has tags up to 32767
_NUM_USES = 64


class Tags(NamedTuple):
    """The tags of a group: ``number``, from ``first``. Larger tags of the program wrap around."""

    first: int
    number: int

    def of(self, tag: int) -> int:
        """The tag in MPI for a tag of the program."""
        return self.first + tag % (self.number - 1)

    @property
    def own(self) -> int:
        """A tag that the program cannot use."""
        return self.first + self.number - 1


class Membership(NamedTuple):
    """A group's communicators: for collectives, and for messages, with the tags to use there."""

    comm: Communicator
    messages: MPI.Comm
    tags: Tags


class _Line:
    """The communicator for messages, which is given back with the first one for collectives."""

    def __init__(self, channel: Channel) -> None:
        self.mpi = channel.mpi.Dup()
        self.num_uses = 0

    def free(self) -> None:
        self.mpi.Free()


class _Pool:
    """The communicators of one session."""

    def __init__(self) -> None:
        self.families: dict[tuple[int, ...], _Family] = {}  # by their ranks in the world
        self.busy: set[Communicator] = set()  # in use by a group of this rank

    def take(self, ranks: Sequence[int]) -> tuple[_Family, Communicator]:
        """A communicator that is free on all ``ranks``. Collective over them."""
        key = tuple(ranks)
        if key not in self.families:
            self.families[key] = _Family(ranks)
        family = self.families[key]
        comm = family.take(self.busy)
        self.busy.add(comm)
        return family, comm


class _Family:
    """The communicators of groups of the same ranks, in the order in which all ranks made them."""

    def __init__(self, ranks: Sequence[int]) -> None:
        world: Any = communicators.stack().levels[0].direct.mpi
        tag = zlib.crc32(repr(list(ranks)).encode()) >> 32 - _CREATION_TAG_BITS
        self.comms: list[Communicator] = []
        first = self._add(world.Create_group(world.group.Incl(list(ranks)), tag))
        self.line = first.direct.keep("messages of process groups", _Line)

    def take(self, busy: set[Communicator]) -> Communicator:
        """The first communicator that is free on all ranks, or a new one."""
        # Ranks destroy their groups at different times: what is free here may be in use on another rank.
        mine = [comm not in busy and not comm.is_free for comm in self.comms]
        gathered = self.line.mpi.allgather(mine)
        found = (comm for comm, *free in zip(self.comms, *gathered, strict=True) if all(free))
        return next(found, None) or self._add(self.line.mpi.Dup())

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
    family, comm = journal.run_alone("a new process group", world, lambda: pool.take(ranks), frame=frame)
    family.line.num_uses += 1
    return Membership(comm, family.line.mpi, _tags(family.line.num_uses))


def release(comm: Communicator) -> None:
    """This rank's group is destroyed. Not collective. A communicator that is stuck is never used again."""
    if comm.is_stuck:
        comm._release(is_lost=True)
    elif communicators.is_started():
        _pool().busy.discard(comm)


def _tags(use: int) -> Tags:
    """The tags of the n-th group of the same ranks. Groups that are ``_NUM_USES`` apart share their tags."""
    last: Any = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)
    number = (int(last) + 1) // _NUM_USES
    return Tags(use % _NUM_USES * number, number)
