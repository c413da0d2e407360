"""Waits that can never meet: each of some ranks waits for a call that another of them, itself waiting, has not made.

The comparison of calls sees ranks that differ at one place of one sequence. Ranks may also wait in different sequences:
one in a blocking call and one for an asynchronous call, two in two communicators in crossed order, one for a message
and one in a collective. Each watchdog publishes on the board in which operation its rank waits, if the rank waits. An
operation needs another rank if it cannot complete before that rank calls it: all ranks of an allreduce, allgather,
reduce_scatter, alltoall or barrier, and the other side of a message. A circle of ranks, each in an operation that needs
the next one, where the next one has not called that operation, stays as it is, because a call that a rank has made or
launched is on the board already.

This is a proof only if nothing else can make a missing call. So a wait is published after a second, it must have no
time limit, and a circle counts when two looks find the same operations. If a rank of the circle has a further Python
thread, that thread might still make the call: then the report is printed, and the job goes on until its deadline.

Alternative: look for circles of any kind, also where a call is queued behind another one, and where a broadcast waits
for its root. Not taken, because the board does not say whether a call is queued or posted, nor which ranks a broadcast
has passed; a circle that is not one would end a sound job. Such waits end at the deadline, and so do waits of
ranks whose watchdog cannot run, as in calls of mpi4py on Python objects, which keep other Python threads from running.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping

from torchmpi_py.core import backoff, journal, sequences
from torchmpi_py.core.collective import COLLECTIVES
from torchmpi_py.core.status_board import CHECKSUM_BITS, WAITS_ALONE, WAITS_IN, WORLD_RANK, Board, Group, Record

_SURE_SECONDS = 1.0
_NEED_ALL = frozenset({"barrier", *(row.name for row in COLLECTIVES.values() if row.needs_all)})
_OTHER_SIDE = {"send": "recv", "recv": "send"}
Circle = frozenset[tuple[int, int]]
"""The ranks of a circle: local rank, and the number of the record in which it waits."""


def publish(board: Board, ages: Mapping[int, float]) -> None:
    """Write to the board in which operation this rank waits, and whether no other thread could call anything."""
    limited = {number for number, _ in tuple(backoff.limited.values())}
    # A handle among the waits stands for a future, for which perhaps nothing waits.
    waits = {number for wait, number in tuple(backoff.active.items()) if type(wait) is object} | journal.called(board)
    old = [number for number in waits - limited if ages.get(number, 0.0) >= _SURE_SECONDS]
    own = [thread.ident for thread in threading.enumerate() if thread.name.startswith("torchmpi_py-")]
    board.put(WAITS_ALONE, len(sys._current_frames().keys() - set(own)) == 1)
    board.put(WAITS_IN, old[0] if len(waits) == len(old) == 1 else 0)


def find(board: Board) -> Circle:
    """The circle in which this rank waits; empty if there is none, or not for sure."""
    mine = _waited_for(board, board.index)
    ways: list[tuple[tuple[int, Record], ...]] = [] if mine is None else [((board.index, mine),)]
    seen: set[int] = set()
    while ways:
        way = ways.pop()
        for index in _needed(board, *way[-1]):
            if index == board.index:
                return frozenset((each, record.number) for each, record in way)
            if index not in seen and (record := _waited_for(board, index)) is not None:
                ways.append((*way, (index, record)))
            seen.add(index)
    return frozenset()


def _waited_for(board: Board, index: int) -> Record | None:
    number = board.get(WAITS_IN, index)
    records = board.records(index) if number else ()
    return next((each for each in records if each.number == number and not each.ended), None)


def _needed(board: Board, index: int, record: Record) -> list[int]:
    """The ranks of this node that the operation of a rank cannot do without, and that have not called it."""
    if record.slot < 0 or "any size" in record.text:
        return []
    group, words = board.group(index, record.slot), record.text.split(" ")
    members = [] if sequences.is_cut(group.ranks) else sequences.ranks_from_text(group.ranks)
    if words[0] in _OTHER_SIDE and words[-1].isdecimal() and int(words[-1]) < len(members):
        members = [members[int(words[-1])]]
    elif words[0] not in _NEED_ALL or not record.sequence_number:
        return []
    others = {board.get(WORLD_RANK, other): other for other in board.indices if other != index}
    return [others[rank] for rank in members if rank in others and _lacks(board, others[rank], record, group)]


def _lacks(board: Board, index: int, record: Record, group: Group) -> bool:
    """Whether a rank has not called the operation of another rank; for a message, whether it has none under way."""
    if not record.sequence_number:
        other = _OTHER_SIDE[record.text.split(" ")[0]]
        return all(each.ended or each.text.split(" ")[0] != other for each in board.records(index))
    slot = board.find_slot(index, group.generation, group.ranks)
    return slot is not None and sequences.last_place(board, index, slot) < record.fingerprint >> CHECKSUM_BITS


def describe(board: Board, circle: Circle) -> str:
    """The operations of a circle, with their places in the program."""
    waits = sorted((board.get(WORLD_RANK, index), index, number) for index, number in circle)
    found = [(rank, next((r for r in board.records(index) if r.number == n), None)) for rank, index, n in waits]
    return "; ".join(f"rank {rank} waits in {r.call}" for rank, r in found if r is not None)
