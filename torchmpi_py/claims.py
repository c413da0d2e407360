"""One rank of several that notice the same tells it: each claims the report on the board, and the earliest one holds.

There is a word on the board for each reason, so that a report that was asked for, say, keeps nobody from another one.
"""

from __future__ import annotations

import time

from torchmpi_py import board_layout
from torchmpi_py.board import Board

LATE = board_layout.CLAIMED_LATE
DEATH = board_layout.CLAIMED_DEATH
DIFFERENCE = board_layout.CLAIMED_DIFFERENCE
ASKED = board_layout.CLAIMED_ASKED

_AGAIN_SECONDS = 30.0
_AGAIN_WHEN_ASKED_SECONDS = 1.0
_CLAIM_SECONDS = 0.02


def take(used: Board, reason: int) -> bool:
    """Whether this rank is the one to report; not if one of the node has done so, for this reason, shortly before."""
    mine = time.monotonic_ns()
    if _recent(used, reason, mine):
        return False
    used.put(reason, mine)
    time.sleep(_CLAIM_SECONDS)
    return min(_recent(used, reason, mine)) == (mine, used.index)


def is_told(used: Board, number: int) -> bool:
    """Whether another rank has just told of a late operation that is this one of this rank, seen from there."""
    mine = used.record(number)
    if mine is None or not mine.position:
        return False
    tellers = [index for _, index in _recent(used, LATE, time.monotonic_ns()) if index != used.index]
    theirs = [(used.counterpart(mine.row, mine.mark, index), index) for index in tellers]
    return any(record is not None and record.number == used.get(LATE_NUMBER, index) for record, index in theirs)


def tell(used: Board, number: int) -> None:
    """Which of this rank's operations it would tell of as late."""
    used.put(LATE_NUMBER, number)


LATE_NUMBER = board_layout.LATE_NUMBER


def _recent(used: Board, reason: int, now: int) -> list[tuple[int, int]]:
    """(when, by whom) it was claimed that is not too long ago."""
    again_seconds = _AGAIN_WHEN_ASKED_SECONDS if reason == ASKED else _AGAIN_SECONDS
    claims = [(used.get(reason, index), index) for index in used.indices]
    return [claim for claim in claims if now - claim[0] < again_seconds * 1e9]
