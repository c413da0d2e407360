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
import zlib
from sys import _getframe
from time import time_ns
from types import CodeType
from typing import TYPE_CHECKING, Any

from torchmpi_py import board, waiting
from torchmpi_py.board import (
    BEGUN,
    CHECKSUM_BITS,
    ENDED,
    IS_LAUNCH,
    LAUNCHED,
    NAMES,
    NUM_RECORDS,
    POSITION_BITS,
    STRING_BITS,
    Board,
    Record,
    pack,
)
from torchmpi_py.channels import DIRECT
from torchmpi_py.errors import RanksDisagree
from torchmpi_py.sequences import Sequence

if TYPE_CHECKING:
    from torchmpi_py.collectives.operation import Operation
    from torchmpi_py.communicators import Communicator

_PACKAGE = os.path.dirname(__file__) + os.sep
_BENCH = os.path.join(_PACKAGE, "bench", "")  # which calls as a program does
_MOST_KEPT = 4096
_WORDS = board.RECORD_BYTES // 8
_NEXT = 1 << CHECKSUM_BITS  # marks that are nearer are of the same place
SIZE = 2
"""Where the number of bytes stands among what ranks call alike, if it has to be the same."""

Noted = tuple[int, int, int, int, int, Sequence | None]
"""An operation that was noted: the number of its record, the words where that begins and ends, the word of the
neighbour's mark, its own mark, and its sequence if it has one. A plain tuple, for one is made in each call."""
_Known = tuple[CodeType, Any, Sequence, int, int]
"""What is kept of a call: the code it is in, what ranks call alike, and in which sequence; the numbers of its row and
of two strings, what and where; a checksum."""


def note(operation: Operation[Any] | _Plain, lane: int, is_launch: bool = False) -> Noted:
    """Note an operation that begins now, or is launched.

    RanksDisagree if the neighbour is known to do another, unless its ranks meet first, and find out together.
    """
    used = board.current
    assert used is not None, "operations are noted between start and stop"
    frame = _getframe(3)  # below are this function, run or launch, and the verb
    code, same, sequence = frame.f_code, operation.same, operation.comm.sequences[lane]
    known = used.calls.get(id(code) + frame.f_lasti)
    if known is None or known[1] != same or known[2] is not sequence or known[0] is not code or same is None:
        known = _look_up(used, operation, sequence, frame)
    number, (place, word, end_word) = used.next_record()
    now = time_ns()
    if same is None:
        pack(used.mapping, place, number, 0, now, operation.num_bytes, known[3] | IS_LAUNCH * is_launch)
        return number, word, end_word, sequence.blank, 0, None
    mark, (mine, slot) = sequence.next_mark()
    mark |= known[4]
    names = known[3] | IS_LAUNCH if is_launch else known[3]
    pack(used.mapping, place, number, mark, now, operation.num_bytes, names)
    words = used.words
    words[mine] = mark
    theirs = words[slot]
    noted = number, word, end_word, slot, mark, sequence
    if theirs != mark and theirs ^ mark < _NEXT and not operation.flavour.meets_first:
        fail(noted)
        raise RanksDisagree(_difference(noted))
    return noted


def note_plain(name: str, comm: Communicator, lane: int = DIRECT) -> Noted:
    """Note something that is no verb, and that all ranks call alike. ``end`` or ``fail`` it."""
    return note(_Plain(name, comm, (name,)), lane)


def note_own(name: str, comm: Communicator) -> Noted:
    """Note that this rank launches something by itself, as a request to a parameter server. ``end`` or ``fail`` it."""
    return note(_Plain(name, comm, None), DIRECT, True)


def note_patient(name: str, comm: Communicator) -> Noted:
    """As ``note_plain``, of what may take as long as it wants: no deadline counts. ``end`` or ``fail`` it."""
    return note(_Plain(name, comm, (name,)), DIRECT, True)


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
    """It is over, and nothing was noted meanwhile. RanksDisagree if the neighbour's at this place is another one."""
    _, _, end_word, slot, mark, _ = noted
    words = board.current.words  # type: ignore[union-attr]
    words[end_word] = time_ns()
    theirs = words[slot]
    if theirs != mark and theirs ^ mark < _NEXT:
        raise RanksDisagree(_difference(noted))


def end_launched(noted: Noted) -> None:
    """The same, of one that was launched."""
    used = board.current
    if used is not None:
        if used.words[noted[1]] != noted[0]:
            noted = noted[0], noted[1], used.waste, *noted[3:]
        end(noted)


def fail(noted: Noted) -> None:
    """It has failed, unless it is over."""
    number, word, end_word, *_ = noted
    used = board.current
    if used is not None and used.words[word] == number and used.words[end_word] < used.words[word + LAUNCHED]:
        used.words[end_word] = (1 << 64) - time_ns()


def under_way(used: Board) -> set[int]:
    """The numbers of the operations that a thread of the user carries out, or waits for."""
    first = used.first_record
    words = used.words[first : first + NUM_RECORDS * _WORDS].tolist()
    columns = (words[column::_WORDS] for column in (0, LAUNCHED, NAMES, ENDED))
    found = {number for number, at, names, ended in zip(*columns, strict=True) if ended < at and not names & IS_LAUNCH}
    return found.union(tuple(waiting.active))


def _look_up(used: Board, operation: Operation[Any] | _Plain, sequence: Sequence, frame: Any) -> _Known:
    """What is noted of a call; kept for the user's own frames."""
    code, same = frame.f_code, operation.same
    words, checksum = _in_words(used, _by_itself(operation) if same is None else same)
    site = _site(used, frame)
    names = (sequence.index + 1) << 2 * STRING_BITS | words << STRING_BITS | site
    made = code, same, sequence, names, checksum
    if used.sites[id(code), frame.f_lasti][0] == site:
        if len(used.calls) > _MOST_KEPT:
            used.calls.clear()
        used.calls[id(code) + frame.f_lasti] = made
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
    flat = [part for each in same for part in (each if isinstance(each, tuple) else (each,))]
    parts = [part for index, part in enumerate(flat) if index != SIZE or not isinstance(part, int)]
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
    is_own = code.co_filename.startswith(_PACKAGE) and not code.co_filename.startswith(_BENCH)
    if frame.f_back is None or not is_own:
        site = used.keep_string(f"{code.co_filename}:{frame.f_lineno} in {code.co_name}")
    used.sites[id(code), frame.f_lasti] = made = site, code
    return made


def _difference(noted: Noted) -> str:
    number, _, _, _, mark, sequence = noted
    used = board.current
    if used is None or sequence is None or sequence.neighbour is None:
        return "the ranks call different operations"
    mine = used.record(number)
    position = mark >> CHECKSUM_BITS & (1 << POSITION_BITS) - 1
    theirs = used.counterpart(sequence.index, position, sequence.neighbours_index)
    told = f"this rank {calls(mine)}; rank {sequence.neighbour} {calls(theirs)}"
    return f"operation {position} of this communicator is not the same on all ranks: {told}"


def calls(record: Record | None) -> str:
    """What a rank calls, and where."""
    return "does something else" if record is None else f"calls {record.what} at {record.site}"
