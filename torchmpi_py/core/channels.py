"""Channels: the parts of a communicator, each for one of the process's threads.

Every communicator has two channels: ``direct`` for calls of the user's thread, ``background`` for the communication
thread. Each channel has a separate MPI communicator, so one thread never receives the other thread's messages. Each
channel also has separate copies of the objects that flavours keep between calls (staging memory, process groups, inner
and outer groups).
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
"""Values of ``Channel.user``. NOBODY: no thread is in a collective. MISUSED: two threads were in a collective at the
same time."""


class Place(NamedTuple):
    """The place of a rank: its node, identified by the lowest world rank of the node, and its local rank."""

    node: int
    local: int


class Places(Sequence[Place]):
    """The places of a channel's ranks, in a table of two numbers per rank.

    Channels with equal tables share one table in memory.
    """

    def __init__(self, places: Any) -> None:
        self.table = _shared(np.array(places, np.int32).tobytes()).reshape(-1, len(Place._fields))
        self.nodes, self.locals = self.table.T

    def __len__(self) -> int:
        return len(self.nodes)

    def __getitem__(self, rank: Any) -> Any:
        rows = self.table[rank]
        return Places(rows) if rows.ndim > 1 else Place(*rows.tolist())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Places) and np.array_equal(self.table, other.table)


_shared = functools.lru_cache(32)(functools.partial(np.frombuffer, dtype=np.int32))


class Resource(Protocol):
    """An object that a flavour stores in a channel between calls."""

    def free(self) -> None:
        """Free the resource. All ranks of the channel must make this call, and free all resources in the same order."""


@runtime_checkable
class Losable(Protocol):
    """A resource that a rank can release alone after another rank has died."""

    def abandon(self) -> None:
        """Release this rank's part of the resource, without the other ranks."""


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
        self.user = NOBODY  # ident of the thread that is in a collective, or NOBODY or MISUSED
        self._kept: dict[Hashable, Resource] = {}
        ulfm.register(self)

    def keep(self, key: Hashable, make: Callable[[Channel], Kept]) -> Kept:
        """Return the resource stored under ``key``; the first call creates it with ``make``.

        ``make`` may be collective, so all ranks of the channel must make the first call with a key.
        """
        if key not in self._kept:
            # Leave inference mode, because normal mode cannot fully use tensors that were created in inference mode.
            with torch.inference_mode(False):
                self._kept[key] = make(self)
        return self._kept[key]  # type: ignore[return-value]

    def give_back(self, key: Hashable) -> None:
        """Free the resource stored under ``key`` before the channel is freed.

        All ranks of the channel must make this call. If freeing raises an error, the channel keeps the resource.
        """
        self._kept[key].free()
        del self._kept[key]

    def split(self, colours: Sequence[int]) -> Channel:
        """Return a new channel of the ranks that have this rank's colour, in rank order.

        All ranks of this channel must make this call with the same ``colours``, one for each rank.
        """
        mine = colours[self.rank]
        places = Places(self.places.table[np.equal(colours, mine)])
        return Channel(self.mpi.Split(mine, self.rank), places, self.thread_role)

    @property
    def is_in_use(self) -> bool:
        """Whether one thread is in a collective on this channel."""
        return self.user not in (NOBODY, MISUSED)

    def comms(self) -> list[MPI.Comm]:
        """Return the communicators that MPI has to revoke when a rank dies."""
        return [self.mpi]

    def free(self, *, is_lost: bool = False) -> None:
        """Free the resources, the newest first, and then the MPI communicator.

        All ranks of the channel must make this call. If the channel ``is_lost``, for example because a rank died, this
        rank only abandons its parts of the resources, without the other ranks.
        """
        while self._kept:
            resource = self._kept.popitem()[1]
            if not is_lost:
                resource.free()
            elif isinstance(resource, Losable):
                resource.abandon()
        if not is_lost:
            self.mpi.Free()
