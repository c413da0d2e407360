"""Communicators for process groups.

torch.distributed makes a group by its members alone, and lets each rank destroy it when it likes. MPI's communicators
are freed by all their ranks together, and are few. So a communicator is not freed with its group, but kept, with those
that the same ranks had before, for their next group: the ranks agree on one that is free on all of them, or make
another one. ``mpi.stop()`` frees them all.

Messages have a communicator too, one for all groups of the same ranks. Each group has tags of its own there, so that
what was sent to a group that is no more is not received by the next one.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from torchmpi_py.core import communicators, journal
from torchmpi_py.core.channels import Channel
from torchmpi_py.core.communicators import Communicator, Stack
from torchmpi_py.core.mpi_api import MPI
from torchmpi_py.torch_backend import call_queue

_CREATION_TAG_BITS = 14  # every MPI has tags up to 32767
_NUM_USES = 64


class Tags(NamedTuple):
    """Those of a group: ``number``, from ``first``. Tags of the program beyond them begin again."""

    first: int
    number: int

    def of(self, tag: int) -> int:
        """What a tag of the program is for MPI."""
        return self.first + tag % (self.number - 1)

    @property
    def own(self) -> int:
        """One that the program does not have."""
        return self.first + self.number - 1


class Membership(NamedTuple):
    """What a group has: a communicator for its collectives; one for messages, and the tags to use there."""

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


class _Family:
    """What groups of the same ranks have had: communicators, in the order in which all ranks made them."""

    def __init__(self, ranks: Sequence[int]) -> None:
        world: Any = communicators.stack().levels[0].direct.mpi
        tag = zlib.crc32(repr(list(ranks)).encode()) >> 32 - _CREATION_TAG_BITS
        self.comms: list[Communicator] = []
        first = self._add(world.Create_group(world.group.Incl(list(ranks)), tag))
        self.line = first.direct.keep("messages of process groups", _Line)

    def acquire(self) -> Communicator:
        """The first that is free on all ranks, or another one."""
        mine = [comm not in _busy and not comm.is_free for comm in self.comms]
        told = self.line.mpi.allgather(mine)
        found = (comm for comm, *free in zip(self.comms, *told, strict=True) if all(free))
        return next(found, None) or self._add(self.line.mpi.Dup())

    def _add(self, group: MPI.Comm) -> Communicator:
        used = communicators.stack()
        made = Communicator(group, used.place, f"process group of {group.size} ranks")
        self.comms.append(made)
        used.others.append(made)
        return made


_made: dict[tuple[int, ...], _Family] = {}  # by their ranks
_busy: set[Communicator] = set()
_stack: Stack | None = None  # that they belong to


def acquire(ranks: Sequence[int]) -> Membership:
    """What a group of these ranks of the world needs. Collective over them."""
    global _stack
    if _stack is not communicators.stack():
        _stack = communicators.stack()
        _made.clear()
        _busy.clear()
    world = communicators.stack().levels[0]
    family, comm = journal.run_alone("a new process group", world, lambda: _meet(ranks), frame=call_queue.program())
    _busy.add(comm)
    family.line.num_uses += 1
    return Membership(comm, family.line.mpi, _tags(family.line.num_uses))


def _meet(ranks: Sequence[int]) -> tuple[_Family, Communicator]:
    key = tuple(ranks)
    if key not in _made:
        _made[key] = _Family(ranks)
    return _made[key], _made[key].acquire()


def release(comm: Communicator) -> None:
    """This rank's group is destroyed. Not collective. One that is stuck is never used again."""
    if comm.is_stuck:
        comm.release(is_lost=True)
    else:
        _busy.discard(comm)


def _tags(use: int) -> Tags:
    """Those of the n-th group of the same ranks; they come round after a while."""
    last: Any = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)
    number = (int(last) + 1) // _NUM_USES
    return Tags(use % _NUM_USES * number, number)
