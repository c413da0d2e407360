"""Who of a node calls something else than this rank at the same place of a communicator's sequence, in words.

Ranks compare marks (``watch.py``); here is told, from the records beside them, what the marks stand for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torchmpi_py.core.status_board import CHECKSUM_BITS, MARKS_PER_ROW, WORLD_RANK, Board, Record

_MOST_NAMED = 4


class Side(NamedTuple):
    """Another rank of the node that has come to the same place: what it calls there, and whether that is the same."""

    local: int
    is_same: bool
    record: Record | None


def sides(used: Board, mine: Record) -> Iterator[Side]:
    """The others that have come to the place of one of this rank's operations."""
    for index, is_same in _come(used, mine):
        yield Side(index, is_same, used.counterpart(mine.row, mine.mark, index))


def differing(used: Board, mine: Record) -> list[Side]:
    """Those of them that call something else. Cheap where none does: only then records are read."""
    return [
        Side(index, False, used.counterpart(mine.row, mine.mark, index))
        for index, is_same in _come(used, mine)
        if not is_same
    ]


def _come(used: Board, mine: Record) -> Iterator[tuple[int, bool]]:
    """(index, whether it calls the same) of the others that have come to the place of an operation."""
    others = used.rows_of.get(mine.row, {}) if mine.position else {}
    for index in sorted(others, key=lambda index: used.get(WORLD_RANK, index)):
        if index != used.index and index in used.indices:
            mark = used.words[used.first_mark(index, others[index]) + mine.position % MARKS_PER_ROW]
            if mark >> CHECKSUM_BITS == mine.mark >> CHECKSUM_BITS:
                yield index, mark == mine.mark


def behind(used: Board, mine: Record) -> list[int]:
    """The ranks of this node that have not come to the place of one of this rank's operations."""
    rows = used.rows_of.get(mine.row, {}) if mine.position else {}
    place, seen = mine.mark >> CHECKSUM_BITS, used.indices
    return [index for index, row in rows.items() if index in seen and _last_place(used, index, row) < place]


def _last_place(used: Board, index: int, row: int) -> int:
    first = used.first_mark(index, row)
    return max(used.words[first : first + MARKS_PER_ROW]) >> CHECKSUM_BITS


def describe_difference(used: Board, mine: Record, others: list[Side]) -> str:
    """What this rank calls, and what others do."""
    theirs = [
        f"rank {used.get(WORLD_RANK, side.local)} {describe_record(side.record)}" for side in others[:_MOST_NAMED]
    ]
    return "; ".join([f"this rank {describe_record(mine)}", *theirs])


def difference(used: Board, mine: Record) -> str:
    """In what others differ from an operation of this rank; empty if they do not, or none has come."""
    different = differing(used, mine)
    if not different:
        return ""
    sides = describe_difference(used, mine, different)
    return f"operation {mine.position} of this communicator is not the same on all ranks: {sides}"


def describe_record(record: Record | None) -> str:
    """What a rank calls, and where."""
    return "does something else" if record is None else f"calls {record.what} at {record.site}"
