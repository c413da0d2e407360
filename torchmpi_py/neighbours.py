"""The watchdog's sleep: until it is time, it is woken, or the process of one of two other ranks of its node ends.

The end is noticed by a descriptor of the process, where the system has them; else who is woken has to look.
"""

from __future__ import annotations

import os
import select

from torchmpi_py import claims, recovery, reports
from torchmpi_py.board import Board
from torchmpi_py.board_layout import ENDING, HAS_LEFT

_NUM_WATCHED = 2
_LAST_SECONDS = 5.0  # for one that is about to end the job


class Neighbours:
    """The next two ranks of this node, and what is known of their ends."""

    def __init__(self, used: Board, wake: int) -> None:
        others = sorted(used.indices, key=lambda index: (index <= used.index, index))[:-1]
        neighbours = others[: 0 if recovery.is_elastic() else _NUM_WATCHED]
        self._board, self._wake = used, wake
        self._lives = {file: index for index in neighbours if (file := reports.descriptor(used, index)) is not None}
        self._suspects = [index for index in neighbours if index not in self._lives.values()]
        self._gone: dict[int, float] = {}  # those that are gone, and since when that is known
        self._poll = select.poll()  # unlike select, it has no limit of 1024
        for file in (wake, *self._lives):
            self._poll.register(file, select.POLLIN)

    def sleep(self, seconds: float) -> bool:
        """Until it is time, or a neighbour ends, or the watchdog is woken; whether it was woken."""
        found = dict(self._poll.poll(seconds * 1000))
        for file in self._lives.keys() & found.keys():
            self._suspects.append(self._lives.pop(file))
            self._poll.unregister(file)
            if found[file] != select.POLLNVAL:
                os.close(file)
        if found.get(self._wake) == select.POLLNVAL:  # the program has closed what it does not know
            self._poll.unregister(self._wake)
            return False
        return self._wake in found

    def whose_death_to_tell(self, now: float) -> int | None:
        """One that is dead, if this rank is the one to tell: in a while, if another is about to do that."""
        used = self._board
        for index in self._suspects:
            if not reports.is_dead(used, index):
                continue
            since = self._gone.setdefault(index, now)
            is_expected = used.get(HAS_LEFT, index) == ENDING
            if (not is_expected and claims.take(used, claims.DEATH)) or now - since >= _LAST_SECONDS:
                return index
        return None

    def close(self) -> None:
        """Watch them no longer."""
        for file in self._lives:
            os.close(file)
