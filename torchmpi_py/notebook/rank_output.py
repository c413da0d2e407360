"""The output of several ranks as one text, in which a line that several ranks have written appears once.

A line that only rank 0 has written appears unchanged. Any other line starts with the ranks that have written it, such
as ``[1]`` or ``[0-3]``. The lines of each rank keep their order. A line waits until all ranks have written an equal
line, but at most for ``HOLD_SECONDS``. Alternative: one text per rank. Why not: most lines would appear once per rank.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection
from typing import NamedTuple

HOLD_SECONDS = 0.2
_LINE_END = re.compile(r"\r\n|[\r\n]")


class WaitingText(NamedTuple):
    """A line, or a value of several lines, that waits to be written, and its time of arrival."""

    stream: str
    text: str
    since: float


class OutputMerger:
    """A buffer that joins equal texts of ``num_ranks`` ranks, and calls ``write(stream, text)`` for each text."""

    def __init__(self, num_ranks: int, write: Callable[[str, str], object]) -> None:
        self._write = write
        self._waiting: list[deque[WaitingText]] = [deque() for _ in range(num_ranks)]
        self._num_written = [0] * num_ranks  # number of texts of each rank that were written
        self._begun: defaultdict[tuple[int, str], list[str]] = defaultdict(list)  # pieces of incomplete lines

    def add(self, rank: int, stream: str, text: str) -> None:
        """Add output that a rank has written. An incomplete last line is held back until the rest of it arrives."""
        # Join the pieces of a line only when the line is complete, so the cost is linear in the number of pieces.
        begin, begun = 0, self._begun[rank, stream]
        for line_end in _LINE_END.finditer(text):
            self.add_block(rank, stream, "".join([*begun, text[begin : line_end.end()]]))
            begin = line_end.end()
            begun.clear()
        if begin < len(text):
            begun.append(text[begin:])

    def add_block(self, rank: int, stream: str, text: str) -> None:
        """Add a text that must not be divided into lines."""
        self._waiting[rank].append(WaitingText(stream, text, time.monotonic()))

    def flush(self, *, is_end: bool = False) -> None:
        """Write the texts that are due; with ``is_end`` write all texts."""
        if is_end:
            for (rank, stream), pieces in self._begun.items():
                if pieces:
                    self.add_block(rank, stream, "".join([*pieces, "\n"]))
            self._begun.clear()
        while ranks := self._ranks_to_write(is_end):
            stream, text, _ = self._waiting[ranks[0]][0]
            for rank in ranks:
                self._waiting[rank].popleft()
                self._num_written[rank] += 1
            label = "" if ranks == [0] else f"[{ranks_as_text(ranks)}] "
            self._write(stream, "".join(f"{label}{line}" for line in text.splitlines(keepends=True)))

    def _ranks_to_write(self, is_end: bool) -> list[int]:
        """Return the ranks that share the next text to write; an empty list if no text is due.

        Ranks with fewer written texts have priority, so that they catch up, and their texts are joined with equal texts
        of other ranks.
        """
        heads = {rank: waiting[0] for rank, waiting in enumerate(self._waiting) if waiting}
        due = time.monotonic() - HOLD_SECONDS
        for first in sorted(heads, key=lambda rank: (self._num_written[rank], rank)):
            ranks = [rank for rank, head in heads.items() if head[:2] == heads[first][:2]]
            if is_end or len(ranks) == len(self._waiting) or heads[first].since < due:
                return ranks
        return []


def ranks_as_text(ranks: Collection[int]) -> str:
    """Return the ranks as a text, such as ``0-2,5`` for the ranks 0, 1, 2 and 5."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def name_ranks(ranks: Collection[int]) -> str:
    """Return the ranks as words of a message, such as ``rank 1`` or ``ranks 0-2,5``."""
    return f"rank{'s' * (len(ranks) > 1)} {ranks_as_text(ranks)}"
