"""Watching operations: each is noted on the board of its node, compared with the neighbour's, and timed.

Every call pays for it: a record (``board.py``), a mark (``sequences.py``), two looks at the neighbour's marks; what
that comes to stands in docs/watching.md. Where in the program an operation was called is found by going up the frames
until one is not the package's own.

An operation is *active* while it is carried out, or waited for; one that was posted and that nobody waits for is not.
``watchdog.py`` looks at the oldest active one.
"""

from __future__ import annotations

import os
import sys
import zlib
from time import time_ns
from types import CodeType
from typing import TYPE_CHECKING, Any, NamedTuple

from torchmpi_py import board
from torchmpi_py.board import Board, Record
from torchmpi_py.channels import DIRECT
from torchmpi_py.errors import RanksDisagree
from torchmpi_py.sequences import CHECKSUM_BITS, Sequence

if TYPE_CHECKING:
    from torchmpi_py.collectives.operation import Operation
    from torchmpi_py.communicators import Communicator

_PACKAGE = os.path.dirname(__file__) + os.sep
_MOST_KEPT = 4096
SIZE = 2
"""Where the number of bytes stands among what ranks call alike, if it has to be the same."""

active: dict[int, None] = {}
"""The operations that this process carries out, or waits for, now: the numbers of their records."""


class Noted(NamedTuple):
    """An operation that was noted: its record, and its place in a sequence if it has one."""

    number: int
    sequence: Sequence | None
    position: int
    checksum: int

    def begin(self) -> None:
        """It was launched, and is carried out from now on."""
        if (used := board.current) is not None:
            used.begin(self.number, time_ns())

    def enter(self) -> None:
        """Somebody waits for it from now on."""
        active[self.number] = None

    def leave(self) -> None:
        """Nobody waits for it any more."""
        active.pop(self.number, None)


def note(operation: Operation[Any] | _Plain, lane: int, *, is_launch: bool = False) -> Noted:
    """Note an operation that begins now, or is launched.

    RanksDisagree if the neighbour is known to do another, unless its ranks meet first, and find out together.
    """
    used = board.current
    assert used is not None, "operations are noted between start and stop"
    same = operation.same
    now = time_ns()
    site = _site(used, sys._getframe(2))  # below are this function, and run or launch
    if same is None:
        words, checksum = _in_words(used, (operation.name, operation.flavour.name))
        number = used.write(-1, 0, now, is_launch, operation.num_bytes, words << 32 | site)
        sequence, position = None, 0
    else:
        words, checksum = used.texts.get(same) or _in_words(used, same)
        sequence = operation.comm.sequences[lane]
        sequence.position = position = sequence.position + 1
        number = used.write(sequence.index, position, now, is_launch, operation.num_bytes, words << 32 | site)
        if not sequence.begin(checksum) and not operation.flavour.meets_first:
            used.end(number, now, has_failed=True)
            raise RanksDisagree(_difference(number, sequence, position))
    if not is_launch:
        active[number] = None
    return _new(Noted, (number, sequence, position, checksum))


_new = tuple.__new__  # a third of what the constructor takes


def note_plain(name: str, comm: Communicator) -> Noted:
    """Note something that is no verb, and that all ranks call alike, in the user's thread. ``end`` or ``fail`` it."""
    return note(_Plain(name, comm), DIRECT)


class _Plain:
    """An operation that is no verb."""

    meets_first = False
    num_bytes = 0

    def __init__(self, name: str, comm: Communicator) -> None:
        self.name, self.comm, self.same, self.flavour = name, comm, (name,), self


def end(noted: Noted) -> None:
    """It is over. RanksDisagree if the neighbour's operation at this place is another one."""
    number, sequence, position, checksum = noted
    active.pop(number, None)
    if (used := board.current) is not None:
        used.end(number, time_ns())
    if sequence is not None and not sequence.agrees(position, checksum):
        raise RanksDisagree(_difference(number, sequence, position))


def fail(noted: Noted) -> None:
    """It has failed."""
    active.pop(noted.number, None)
    if (used := board.current) is not None:
        used.end(noted.number, time_ns(), has_failed=True)


def _in_words(used: Board, same: tuple[Any, ...]) -> tuple[int, int]:
    """(the string, the checksum) of what ranks call alike; sizes are in the records, and not among the words."""
    if (found := used.texts.get(same)) is not None:
        return found
    if len(used.texts) > _MOST_KEPT:
        used.texts.clear()
    parts = [part for index, part in enumerate(same) if index != SIZE or not isinstance(part, int)]
    words = used.keep_string(" ".join(str(part) for part in parts))
    checksum = zlib.crc32(repr(same).encode(errors="backslashreplace")) & (1 << CHECKSUM_BITS) - 1
    used.texts[same] = made = words, checksum
    return made


def _site(used: Board, frame: Any) -> int:
    """The string with file and line of the nearest caller outside the package."""
    while True:
        site, _ = used.sites.get((id(frame.f_code), frame.f_lasti)) or _look_up(used, frame)
        if site >= 0:
            return site
        frame = frame.f_back


def _look_up(used: Board, frame: Any) -> tuple[int, CodeType]:
    """The string of a frame; -1 for the package's own, unless it is the last. The code is kept: its id may return."""
    if len(used.sites) > _MOST_KEPT:
        used.sites.clear()
    code, site = frame.f_code, -1
    if frame.f_back is None or not code.co_filename.startswith(_PACKAGE):
        site = used.keep_string(f"{code.co_filename}:{frame.f_lineno} in {code.co_name}")
    used.sites[id(code), frame.f_lasti] = made = site, code
    return made


def _difference(number: int, sequence: Sequence | None, position: int) -> str:
    used = board.current
    if used is None or sequence is None:
        return "the ranks call different operations"
    mine = next((record for record in used.records(used.index) if record.number == number), None)
    theirs = used.counterpart(sequence.index, position, sequence.neighbours_index)
    told = f"{_told('this rank', mine)}; {_told(f'rank {sequence.neighbour}', theirs)}"
    return f"operation {position} of this communicator is not the same on all ranks: {told}"


def _told(who: str, record: Record | None) -> str:
    return f"{who} does something else" if record is None else f"{who} calls {record.what} at {record.site}"
