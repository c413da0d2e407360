"""Channels: a communicator as one thread of a process uses it.

Every communicator has two: ``direct`` for calls made by the user's thread, ``background`` for the communication thread.
Each has an MPI communicator of its own, so that the two threads can never match each other's messages, and its own
share of what flavours keep between calls (staging memory, process groups, inner and outer groups).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch

from torchmpi_py.core import ulfm
from torchmpi_py.core.mpi_api import MPI

DIRECT, BACKGROUND = 0, 1
NOBODY, MISUSED = 0, -1
"""``Channel.user`` without a thread in a collective; and after two threads were in one at the same time."""


class Place(NamedTuple):
    """The place of a rank: its node (the lowest rank of the world there) and its local rank on that node."""

    node: int
    local: int


class Places(Sequence[Place]):
    """The places of the ranks of a channel: a table of two numbers per rank, which channels of the same ranks share."""

    def __init__(self, places: Any) -> None:
        self.table = _shared(np.array(places, np.int32).tobytes()).reshape(-1, len(Place._fields))
        self.nodes, self.locals = self.table.T

    def __len__(self) -> int:
        return len(self.nodes)

    def __getitem__(self, rank: Any) -> Any:
        found = self.table[rank]
        return Places(found) if found.ndim > 1 else Place(*found.tolist())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Places) and np.array_equal(self.table, other.table)


_shared = functools.lru_cache(32)(functools.partial(np.frombuffer, dtype=np.int32))


class Resource(Protocol):
    """An object that a flavour keeps with a channel."""

    def free(self) -> None:
        """Free the resource. All ranks of the channel call this, in the same order, when its communicator is freed."""


@runtime_checkable
class Losable(Protocol):
    """A resource that has steps of its own for the case that a rank died."""

    def abandon(self) -> None:
        """Release what this rank holds; not collective."""


Kept = TypeVar("Kept", bound=Resource)


class Channel:
    """An MPI communicator (``mpi``) for one ``thread_role`` (DIRECT or BACKGROUND), and the places of its ranks."""

    def __init__(self, mpi: MPI.Comm, places: Sequence[Place], thread_role: int) -> None:
        self.mpi = mpi
        self.rank: int = mpi.rank
        self.size: int = mpi.size
        self.places = places if isinstance(places, Places) else Places(places)
        self.thread_role = thread_role
        self.num_nodes = len(set(self.places.nodes.tolist()))
        self.user = NOBODY  # the ident of the thread that carries out a collective
        self._kept: dict[Hashable, Resource] = {}
        ulfm.register(self)

    def keep(self, key: Hashable, make: Callable[[Channel], Kept]) -> Kept:
        """The resource under ``key``, made on first use. ``make`` may be collective over the channel."""
        if key not in self._kept:
            with torch.inference_mode(False):  # tensors made there could not be used outside of it
                self._kept[key] = make(self)
        return self._kept[key]  # type: ignore[return-value]

    def give_back(self, key: Hashable) -> None:
        """Free the resource under ``key``, before the channel is freed. Collective; after an error it is there."""
        self._kept[key].free()
        del self._kept[key]

    def split(self, colours: Sequence[int]) -> Channel:
        """The channel of the ranks with this rank's colour, in rank order. Collective, with equal ``colours``."""
        mine = colours[self.rank]
        places = Places(self.places.table[np.equal(colours, mine)])
        return Channel(self.mpi.Split(mine, self.rank), places, self.thread_role)

    @property
    def is_in_use(self) -> bool:
        """Whether a thread is in a collective."""
        return self.user not in (NOBODY, MISUSED)

    def comms(self) -> list[MPI.Comm]:
        """The communicators that MPI has to revoke when a rank dies."""
        return [self.mpi]

    def free(self, *, is_lost: bool = False) -> None:
        """Free the resources, the youngest first, and the MPI communicator. Collective.

        If the channel ``is_lost``, because one of its ranks has died, this rank abandons them without the others.
        """
        while self._kept:
            resource = self._kept.popitem()[1]
            if not is_lost:
                resource.free()
            elif isinstance(resource, Losable):
                resource.abandon()
        if not is_lost:
            self.mpi.Free()
