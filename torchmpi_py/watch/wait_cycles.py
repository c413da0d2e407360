"""Find cycles of waits (deadlocks): each rank waits for a call that the next rank, which also waits, has not made.

The comparison of calls finds ranks that differ at one place of one sequence. But ranks may also wait in different
sequences. For example, one rank waits in a blocking call and another rank for an asynchronous call. Or two ranks use
two communicators in opposite order, or one rank waits for a message and another rank in a collective.

The idea: each watchdog publishes on the board the operation in which its rank waits. An operation needs another rank if
it cannot complete before that rank calls it. An allreduce, allgather, reduce_scatter, alltoall or barrier needs all
ranks, and a message needs its other side. Suppose that each rank of a cycle waits in an operation that needs the next
rank, and that the next rank has not called it. Then the cycle can never resolve, because every call that a rank has
made or launched is already on the board.

This is a proof only if nothing else can make a missing call. So a watchdog publishes a wait only after a second, and
only if the wait has no time limit. A cycle counts only if two successive looks find the same operations. If a rank of
the cycle has another Python thread, that thread might still make the call. Then the report is printed, and the job
continues until its timeout.

An alternative is to look for all types of cycles: also for calls that are queued behind another call, and for
broadcasts that wait for their root. We do not do so, because the board does not show whether a call is queued or
posted, nor which ranks a broadcast has passed. A false cycle would end a correct job. So these waits end only at the
timeout. The same is true for a rank whose watchdog cannot run, for example in mpi4py calls on Python objects, which
block other Python threads.
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
"""The members of a cycle: pairs of a local rank and the record number of the operation in which that rank waits."""


def publish(board: Board, ages: Mapping[int, float]) -> None:
    """Write to the board in which operation this rank waits, and whether another thread might make a call.

    ``ages`` maps the record numbers of the operations under way to their ages in seconds.
    """
    limited = {number for number, _ in tuple(backoff.limited.values())}
    # A wait that is a handle belongs to a future. Ignore this wait, because perhaps no thread waits for the future.
    waits = {number for wait, number in tuple(backoff.active.items()) if type(wait) is object} | journal.called(board)
    old = [number for number in waits - limited if ages.get(number, 0.0) >= _SURE_SECONDS]
    own = [thread.ident for thread in threading.enumerate() if thread.name.startswith("torchmpi_py-")]
    board.put(WAITS_ALONE, len(sys._current_frames().keys() - set(own)) == 1)
    board.put(WAITS_IN, old[0] if len(waits) == len(old) == 1 else 0)


def find(board: Board) -> Circle:
    """Return the cycle in which this rank waits, or an empty set if there is none."""
    mine = _waited_for(board, board.index)
    # Search depth-first from this rank to the ranks that it needs, and so on, until a path returns to this rank.
    paths: list[tuple[tuple[int, Record], ...]] = [] if mine is None else [((board.index, mine),)]
    seen: set[int] = set()
    while paths:
        path = paths.pop()
        for index in _needed(board, *path[-1]):
            if index == board.index:
                return frozenset((each, record.number) for each, record in path)
            if index not in seen and (record := _waited_for(board, index)) is not None:
                paths.append((*path, (index, record)))
            seen.add(index)
    return frozenset()


def _waited_for(board: Board, index: int) -> Record | None:
    number = board.get(WAITS_IN, index)
    records = board.records(index) if number else ()
    return next((each for each in records if each.number == number and not each.ended), None)


def _needed(board: Board, index: int, record: Record) -> list[int]:
    """Return the ranks of this node that a rank's operation needs, and that have not called it."""
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
    """Return whether a rank has not called another rank's operation; for a message, whether no counterpart is open."""
    if not record.sequence_number:
        other = _OTHER_SIDE[record.text.split(" ")[0]]
        return all(each.ended or each.text.split(" ")[0] != other for each in board.records(index))
    slot = board.find_slot(index, group.generation, group.ranks)
    return slot is not None and sequences.last_place(board, index, slot) < record.fingerprint >> CHECKSUM_BITS


def describe(board: Board, circle: Circle) -> str:
    """Describe the operations of a wait cycle, with their call sites."""
    waits = sorted((board.get(WORLD_RANK, index), index, number) for index, number in circle)
    calls = [(rank, next((r for r in board.records(index) if r.number == n), None)) for rank, index, n in waits]
    return "; ".join(f"rank {rank} waits in {r.call}" for rank, r in calls if r is not None)
