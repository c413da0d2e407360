"""Sequences: the operations of a communicator, in one thread, one after another on every rank.

The n-th operation must be the same on all ranks: the same verb, with sizes, dtype, op and root that fit. Each rank
marks what its n-th is on the board, and compares with the next rank of its node, as it begins and again before it
returns: whoever comes later sees the other's mark. So a mismatch is found by one of two neighbours at the latest when
the operation is over, and mostly before any data has moved.
"""

from __future__ import annotations

from collections.abc import Sequence as Ranks

from torchmpi_py import board
from torchmpi_py.board import MARKS_PER_ROW, Row
from torchmpi_py.channels import Place

CHECKSUM_BITS = 24
_CHECKSUM = (1 << CHECKSUM_BITS) - 1


class Sequence:
    """That of one rank. ``rows`` are those of all ranks, None where there is none."""

    def __init__(self, rank: int, places: Ranks[Place], rows: Ranks[Row | None]) -> None:
        self.position = 0
        self.neighbour: int | None = None  # its rank
        self.row = rows[rank]
        self.index = -1 if self.row is None else self.row.place
        self._board = used = board.current
        if used is None or self.row is None:
            return
        self._words = used.words
        used.rows_of[self.row.place] = {
            place.local: row.place
            for place, row in zip(places, rows, strict=True)
            if row is not None and place.node == places[rank].node
        }
        self._first = used.first_mark(used.index, self.row.place)
        self._use = self.row.use << 2 * CHECKSUM_BITS
        for step in range(1, len(places)):
            other = (rank + step) % len(places)
            theirs = rows[other]
            if theirs is not None and places[other].node == places[rank].node and places[other].local in used.indices:
                self.neighbour = other
                self.neighbours_index = places[other].local
                self._neighbours_first = used.first_mark(places[other].local, theirs.place)
                self._neighbours_use = theirs.use << CHECKSUM_BITS
                break

    def begin(self, checksum: int) -> bool:
        """The next operation begins, at ``position``; whether the neighbour's is the same, as far as is known."""
        position = self.position
        if self.row is None:
            return True
        words, slot = self._words, position % MARKS_PER_ROW
        position &= _CHECKSUM
        words[self._first + slot] = self._use | position << CHECKSUM_BITS | checksum
        if self.neighbour is None:
            return True
        theirs = words[self._neighbours_first + slot]
        return theirs & _CHECKSUM == checksum or theirs >> CHECKSUM_BITS != self._neighbours_use | position

    def agrees(self, position: int, checksum: int) -> bool:
        """Whether the neighbour's operation of that position is this one, if it has come to it."""
        if self.neighbour is None:
            return True
        theirs = self._words[self._neighbours_first + position % MARKS_PER_ROW]
        return theirs & _CHECKSUM == checksum or theirs >> CHECKSUM_BITS != self._neighbours_use | position & _CHECKSUM

    def free(self) -> None:
        """Give the row back."""
        if self._board is not None and self.row is not None:
            self._board.rows_of.pop(self.row.place, None)
            self._board.give_row_back(self.row)
        self.row = self.neighbour = None
