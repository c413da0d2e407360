"""Sequences: the operations of a communicator, in one thread, one after another on every rank.

The n-th operation must be the same on all ranks: the same verb, with sizes, dtype, op and root that fit. Each rank
marks what its n-th is on the board, and compares with the next rank of its node, as it begins and again before it
returns: the rank that comes later sees the other's mark. So a mismatch of operations in which the ranks wait for each
other is found by one of two neighbours at the latest when the operation is over, and mostly before any data has moved.

``watch.py`` does that, by hand; here is told where the marks are. The ranks of a communicator agree on the use of their
rows, so that equal operations have equal marks. Without a neighbour a mark is compared with itself; without a row of
its own (all are taken) a rank marks in one that nobody looks at, and compares with an empty one.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable
from collections.abc import Sequence as Ranks
from typing import NamedTuple

from torchmpi_py.core import grouping, status_board
from torchmpi_py.core.channels import Place
from torchmpi_py.core.status_board import (
    BLANK,
    CHECKSUM_BITS,
    MARKS_PER_ROW,
    NUM_ROWS,
    POSITION_BITS,
    SCRAP,
    USES,
    WORLD_RANK,
    Row,
)

logger = logging.getLogger("torchmpi_py")


class Offer(NamedTuple):
    """What a rank tells the others of a new communicator: a row for each thread, and its rank in the world."""

    rows: tuple[Row | None, Row | None]
    world_rank: int


def offer() -> Offer:
    """This rank's."""
    used = status_board.current
    return Offer((None, None), 0) if used is None else Offer((used.take_row(), used.take_row()), used.get(WORLD_RANK))


@functools.cache
def _warn() -> None:
    """Once a process is enough."""
    logger.warning(
        "more than %d communicators: what is called on further ones is not compared; free() those that are done with",
        NUM_ROWS // 2,
    )


class CallSequence:
    """That of one rank, for one thread (``lane``). ``offers`` are those of all ranks."""

    def __init__(self, rank: int, places: Ranks[Place], offers: Ranks[Offer], thread_role: int, key: str) -> None:
        rows = [offer.rows[thread_role] for offer in offers]
        self.neighbour: int | None = None  # its rank
        self.row = rows[rank]
        self.index = -1 if self.row is None else self.row.place
        self._board = used = status_board.current
        if used is None:
            return
        self.blank = used.first_mark(used.index, BLANK)
        use = max((row.use for row in rows if row is not None), default=0)
        self.use = use & USES - 1
        if None in rows and rows.index(None) == rank:
            _warn()
        if self.row is None:
            self._begin(used.first_mark(used.index, SCRAP), self.blank)
            return
        used.settle_row(self.row, use, key, grouping.in_words([offer.world_rank for offer in offers], strides=True))
        used.rows_of[self.row.place] = {
            place.local: row.place
            for place, row in zip(places, rows, strict=True)
            if row is not None and place.node == places[rank].node
        }
        first = neighbours_first = used.first_mark(used.index, self.row.place)  # without one, its own
        for step in range(1, len(places)):
            other = (rank + step) % len(places)
            theirs = rows[other]
            if theirs is not None and places[other].node == places[rank].node and places[other].local in used.indices:
                self.neighbour = other
                self.neighbours_index = places[other].local
                neighbours_first = used.first_mark(places[other].local, theirs.place)
                break
        self._begin(first, neighbours_first)

    def _begin(self, first: int, neighbours_first: int) -> None:
        places = [(first + slot, neighbours_first + slot) for slot in range(MARKS_PER_ROW)]
        step = 1 << CHECKSUM_BITS  # a position that overflows makes it another use, on all ranks alike
        marks = itertools.count((self.use << POSITION_BITS) * step + step, step)
        self.next_mark: Callable[[], tuple[int, tuple[int, int]]] = zip(
            marks, itertools.cycle(places[1:] + places[:1]), strict=False
        ).__next__
        """The next operation's mark but for the checksum, and where it is: this rank's word, and the neighbour's."""

    def free(self) -> None:
        """Give the row back."""
        if self._board is not None and self.row is not None:
            self._board.rows_of.pop(self.row.place, None)
            self._board.give_row_back(self.row)
        self.row = self.neighbour = None
