"""Communicators for process groups.

torch.distributed makes a group by its members alone, and lets each rank destroy it when it likes. MPI's communicators
are freed by all their ranks together, and are few. So a communicator is not freed with its group, but kept, with those
that the same ranks had before, for their next group: the ranks agree on one that is free on all of them, or make
another one. ``mpi.stop()`` frees them all.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

from torchmpi_py import communicators
from torchmpi_py.communicators import Communicator, Stack

_TAG_BITS = 14  # every MPI has tags up to 32767

_made: dict[tuple[int, ...], list[Communicator]] = {}  # by their ranks, in the order in which all of them were made
_busy: set[Communicator] = set()
_stack: Stack | None = None  # that they belong to


def acquire(ranks: Sequence[int]) -> Communicator:
    """A communicator of these ranks of the world, for a process group alone. Collective over them."""
    global _stack
    if _stack is not communicators.stack():
        _stack = communicators.stack()
        _made.clear()
        _busy.clear()
    family = _made.setdefault(tuple(ranks), [])
    comm = _free_one(family) or _make(ranks, family)
    _busy.add(comm)
    return comm


def release(comm: Communicator) -> None:
    """This rank's group is destroyed. Not collective. One that is stuck is never used again."""
    if comm.is_stuck:
        comm._give_back(is_lost=True)
    else:
        _busy.discard(comm)


def _free_one(family: list[Communicator]) -> Communicator | None:
    """The first that is free on all ranks."""
    if not family:
        return None
    mine = [comm not in _busy for comm in family]
    told = family[0].background.mpi.allgather(mine)
    return next((comm for comm, *free in zip(family, *told, strict=True) if all(free)), None)


def _make(ranks: Sequence[int], family: list[Communicator]) -> Communicator:
    used = communicators.stack()
    if family:
        group = family[0].background.mpi.Dup()
    else:
        world: Any = used.levels[0].direct.mpi
        group = world.Create_group(
            world.group.Incl(list(ranks)), zlib.crc32(repr(list(ranks)).encode()) >> 32 - _TAG_BITS
        )
    made = Communicator(group, used.place, f"process group of {len(ranks)} ranks")
    family.append(made)
    used.others.append(made)
    return made
