"""Watching operations: each is noted on the board of its node, compared with the neighbour's, and timed.

Every call pays for it, so what is done for each stands here in one piece: a record (``board.py``), a mark
(``sequences.py``), two looks at the neighbour's mark; what that comes to, ``python -m torchmpi_py.bench watch`` tells.
Where in the program an operation was called is found by going up the frames until one is not the package's own; what
was found is kept by the place of the call, and looked up again where the same place calls something else.

An operation is *under way* while a call carries it out (its record has begun, and has not ended), or waits for it
(``waiting.active``); one that was launched and that nobody waits for is not. ``watchdog.py`` looks at the oldest one.
"""

from __future__ import annotations

import os
import sys
import zlib
from time import time_ns
from types import CodeType
from typing import TYPE_CHECKING, Any

from torchmpi_py import board, waiting
from torchmpi_py.board import BEGUN, ENDED, LAUNCHED, NUM_RECORDS, ROW_BITS, Board, Record
from torchmpi_py.channels import DIRECT
from torchmpi_py.errors import RanksDisagree
from torchmpi_py.sequences import CHECKSUM_BITS, POSITIONS, Sequence

if TYPE_CHECKING:
    from torchmpi_py.collectives.operation import Operation
    from torchmpi_py.communicators import Communicator

_PACKAGE = os.path.dirname(__file__) + os.sep
_MOST_KEPT = 4096
_WORDS = board.RECORD_BYTES // 8
SIZE = 2
"""Where the number of bytes stands among what ranks call alike, if it has to be the same."""

Noted = tuple[int, int, int, int, Sequence | None]
"""An operation that was noted: the number of its record, where that and the neighbour's mark are, its mark, and its
sequence if it has one. A plain tuple, for one is made in each call."""


def note(operation: Operation[Any] | _Plain, lane: int, is_launch: bool = False) -> Noted:
    """Note an operation that begins now, or is launched.

    RanksDisagree if the neighbour is known to do another, unless its ranks meet first, and find out together.
    """
    used = board.current
    assert used is not None, "operations are noted between start and stop"
    frame = sys._getframe(3)  # below are this function, run or launch, and the verb
    same = operation.same
    known = used.calls.get((id(frame.f_code), frame.f_lasti))
    if known is None or known[0] != same or same is None:
        known = _look_up(used, operation, frame)
    _, names, checksum = known
    sequence = operation.comm.sequences[lane]
    number = next(used.numbers)
    place = used.first_record + number % NUM_RECORDS * _WORDS
    now = time_ns()
    begun = 0 if is_launch else now
    if same is None:
        used.pack(place * 8, number, sequence.index + 1, now, begun, 0, operation.num_bytes, names)
        return number, place, sequence.neighbours_first, -1, None
    sequence.position = position = sequence.position + 1
    used.pack(place * 8, number, position << ROW_BITS | sequence.index + 1, now, begun, 0, operation.num_bytes, names)
    mark = (sequence.use | position & POSITIONS) << CHECKSUM_BITS | checksum
    words, slot = used.words, position & 63
    words[sequence.first + slot] = mark
    slot += sequence.neighbours_first
    theirs = words[slot]
    noted = number, place, slot, mark, sequence
    if theirs != mark and theirs >> CHECKSUM_BITS == mark >> CHECKSUM_BITS and not operation.flavour.meets_first:
        fail(noted)
        raise RanksDisagree(_difference(noted))
    return noted


def note_plain(name: str, comm: Communicator, lane: int = DIRECT) -> Noted:
    """Note something that is no verb, and that all ranks call alike. ``end`` or ``fail`` it."""
    return note(_Plain(name, comm, (name,)), lane)


def note_own(name: str, comm: Communicator) -> Noted:
    """Note that this rank launches something by itself, as a request to a parameter server. ``end`` or ``fail`` it."""
    return note(_Plain(name, comm, None), DIRECT, True)


class _Plain:
    """An operation that is no verb."""

    meets_first = False
    num_bytes = 0
    arguments = ()

    def __init__(self, name: str, comm: Communicator, same: tuple[str] | None) -> None:
        self.name, self.comm, self.same, self.flavour = name, comm, same, self


def begin(noted: Noted) -> None:
    """It was launched, and is carried out from now on."""
    used = board.current
    if used is not None and used.words[noted[1]] == noted[0]:  # a thousand later ones may have taken its place
        used.words[noted[1] + BEGUN] = time_ns()


def end(noted: Noted) -> None:
    """It is over. RanksDisagree if the neighbour's operation at this place is another one."""
    number, place, slot, mark, _ = noted
    used = board.current
    if used is None:
        return
    words = used.words
    if words[place] == number:
        words[place + ENDED] = time_ns()
    theirs = words[slot]
    if theirs != mark and theirs >> CHECKSUM_BITS == mark >> CHECKSUM_BITS:
        raise RanksDisagree(_difference(noted))


def fail(noted: Noted) -> None:
    """It has failed, unless it is over."""
    number, place, *_ = noted
    used = board.current
    if used is not None and used.words[place] == number and not used.words[place + ENDED]:
        used.words[place + ENDED] = (1 << 64) - time_ns()


def under_way(used: Board) -> set[int]:
    """The numbers of the operations that a thread of the user carries out, or waits for."""
    first = used.first_record
    words = used.words[first : first + NUM_RECORDS * _WORDS].tolist()
    columns = (words[column::_WORDS] for column in (0, LAUNCHED, BEGUN, ENDED))
    found = {number for number, at, begun, ended in zip(*columns, strict=True) if begun and at == begun and not ended}
    return found.union(tuple(waiting.active))  # what was launched begins later


def _look_up(used: Board, operation: Operation[Any] | _Plain, frame: Any) -> tuple[Any, int, int]:
    """(what ranks call alike, numbers of two strings: what and where, checksum); kept for the user's own frames."""
    same = operation.same
    words, checksum = _in_words(used, _by_itself(operation) if same is None else same)
    site = _site(used, frame)
    made = same, words << 32 | site, checksum
    if used.sites[id(frame.f_code), frame.f_lasti][0] == site:
        if len(used.calls) > _MOST_KEPT:
            used.calls.clear()
        used.calls[id(frame.f_code), frame.f_lasti] = made
    return made


def _by_itself(operation: Operation[Any] | _Plain) -> tuple[Any, ...]:
    """What is said of an operation that has no counterparts to compare with; of a message, from or to whom."""
    if operation.flavour is operation:
        return (operation.name,)
    parts = operation.name, operation.flavour.name, 0, getattr(operation.arguments[0], "dtype", "object")
    way = {"send": "to", "recv": "from"}.get(operation.name)
    return parts if way is None else (*parts, way, operation.arguments[-1])


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
        site, _ = used.sites.get((id(frame.f_code), frame.f_lasti)) or _name(used, frame)
        if site >= 0:
            return site
        frame = frame.f_back


def _name(used: Board, frame: Any) -> tuple[int, CodeType]:
    """The string of a frame; -1 for the package's own, unless it is the last. The code is kept: its id may return."""
    if len(used.sites) > _MOST_KEPT:
        used.sites.clear()
        used.calls.clear()
    code, site = frame.f_code, -1
    if frame.f_back is None or not code.co_filename.startswith(_PACKAGE):
        site = used.keep_string(f"{code.co_filename}:{frame.f_lineno} in {code.co_name}")
    used.sites[id(code), frame.f_lasti] = made = site, code
    return made


def _difference(noted: Noted) -> str:
    number, _, _, mark, sequence = noted
    used = board.current
    if used is None or sequence is None or sequence.neighbour is None:
        return "the ranks call different operations"
    mine = used.record(number)
    position = mark >> CHECKSUM_BITS & POSITIONS if mine is None else mine.position
    theirs = used.counterpart(sequence.index, position, sequence.neighbours_index)
    told = f"{_told('this rank', mine)}; {_told(f'rank {sequence.neighbour}', theirs)}"
    return f"operation {position} of this communicator is not the same on all ranks: {told}"


def _told(who: str, record: Record | None) -> str:
    return f"{who} does something else" if record is None else f"{who} calls {record.what} at {record.site}"
