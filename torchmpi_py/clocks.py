"""How far the clocks of the ranks are apart, measured over MPI by Cristian's algorithm.

A rank asks rank 0 for its time, some dozens of times, and keeps the answer with the shortest round trip. Rank 0 read
its clock somewhere between question and answer, so that ::

    offset = (asked + answered) / 2 - time of rank 0         this rank's clock less that of rank 0

is wrong by half the round trip at most. The ranks of a node share one clock: one of them asks, the others take its
word, and on the node of rank 0 the offset is 0, exactly.
"""

from __future__ import annotations

import array
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from mpi4py import MPI

NUM_ROUNDS = 50
_TAG = 7011


class Reading(NamedTuple):
    """What was measured: all three in nanoseconds, ``at_ns`` by this rank's own clock."""

    at_ns: int
    offset_ns: int
    uncertainty_ns: int


def read(comm: MPI.Comm, nodes: Sequence[int], clock: Callable[[], int] = time.time_ns) -> Reading:
    """This rank's clock against rank 0's. Collective over ``comm``, on which nothing else is under way.

    ``nodes`` says for each rank which is the lowest rank on its node.
    """
    mine = Reading(clock(), 0, 0)
    for asker in sorted(set(nodes) - {nodes[0]}):
        if comm.rank == 0:
            _answer(comm, asker, clock)
        elif comm.rank == asker:
            mine = min((_ask(comm, clock) for _ in range(NUM_ROUNDS)), key=lambda reading: reading.uncertainty_ns)
    return Reading(*comm.allgather(tuple(mine))[nodes[comm.rank]])


def _ask(comm: MPI.Comm, clock: Callable[[], int]) -> Reading:
    answer = array.array("q", [0])
    asked = clock()
    comm.Send(answer, 0, _TAG)
    comm.Recv(answer, 0, _TAG)
    answered = clock()
    return Reading(answered, (asked + answered) // 2 - answer[0], (answered - asked + 1) // 2)


def _answer(comm: MPI.Comm, asker: int, clock: Callable[[], int]) -> None:
    for _ in range(NUM_ROUNDS):
        buffer = array.array("q", [0])
        comm.Recv(buffer, asker, _TAG)
        buffer[0] = clock()
        comm.Send(buffer, asker, _TAG)
