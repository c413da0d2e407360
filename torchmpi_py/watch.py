"""Watching operations: each is noted on the board of its node, compared with the neighbour's, and timed.

Every call pays for it, so what is done for each stands here in one piece: a record (``board.py``), a mark
(``sequences.py``), two looks at the neighbour's mark; what that comes to, ``python -m torchmpi_py.bench watch`` tells.
What is known of a call is kept by its place in the program (``calls.py``).

An operation is *under way* while a call carries it out (its record has begun, and has not ended), or waits for it
(``waiting.active``); one that was launched and that nobody waits for is not. A future is a wait from when it is asked
for: who waits for it, and whether, is out of sight. ``watchdog.py`` looks at the oldest operation under way.
"""

from __future__ import annotations

from collections.abc import Callable
from sys import _getframe
from time import monotonic_ns
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from torchmpi_py import board, calls, comparison, waiting
from torchmpi_py.board import Board
from torchmpi_py.board_layout import (
    BEGUN,
    CHECKSUM_BITS,
    ENDED,
    HAS_FAILED,
    HAS_LEFT,
    IS_LAUNCH,
    LAUNCHED,
    MARKS_PER_ROW,
    NAMES,
    NUM_RECORDS,
    STOPPING,
    Record,
    pack,
)
from torchmpi_py.calls import UNKNOWN, Plain
from torchmpi_py.channels import DIRECT
from torchmpi_py.errors import RanksDisagree
from torchmpi_py.sequences import Sequence

if TYPE_CHECKING:
    from torchmpi_py.collectives.operation import Operation
    from torchmpi_py.communicators import Communicator

R = TypeVar("R")
_HALF = NUM_RECORDS // 2 - 1
_LATELY_NS = 1_000_000_000  # two looks of the watchdog
_NEXT = 1 << CHECKSUM_BITS  # marks that are nearer are of the same place
Noted = tuple[int, int, int, int, int, Sequence | None]
"""An operation that was noted: the number of its record, the words where that begins and ends, the word of the
neighbour's mark, its own mark, and its sequence if it has one. A plain tuple, for one is made in each call."""


def note(
    operation: Operation[Any] | Plain, lane: int, is_launch: bool = False, frame: FrameType | None = None
) -> Noted:
    """Note an operation that begins now, or is launched; by ``frame``, if that is not what calls the verb.

    RanksDisagree if the neighbour is known to do another, unless its ranks meet first, and find out together.
    """
    used = board.current
    assert used is not None, "operations are noted between start and stop"
    frame = frame or _getframe(3)  # below are this function, run or launch, and the verb
    code, same, sequence = frame.f_code, operation.same, operation.comm.sequences[lane]
    known_code, known_same, known_sequence, names, checksum = used.calls.get(id(code) + frame.f_lasti, UNKNOWN)
    if known_same != same or known_sequence is not sequence or known_code is not code:
        names, checksum = calls.look_up(used, operation, sequence, frame)
    number, (place, word, end_word) = used.next_record()
    now = monotonic_ns()
    if not number & _HALF:
        _keep_open(used)
    if same is None:
        pack(used.mapping, place, number, 0, now, operation.num_bytes, names | IS_LAUNCH * is_launch)
        return number, word, end_word, sequence.blank, 0, None
    mark, (mine, slot) = sequence.next_mark()
    mark |= checksum
    if is_launch:
        names |= IS_LAUNCH
    pack(used.mapping, place, number, mark, now, operation.num_bytes, names)
    words = used.words
    words[mine] = mark
    theirs = words[slot]
    noted = number, word, end_word, slot, mark, sequence
    if theirs != mark and theirs ^ mark < _NEXT and not operation.flavour.meets_first:
        fail(noted)
        raise RanksDisagree(_difference(number))
    return noted


def note_plain(name: str, comm: Communicator, lane: int = DIRECT) -> Noted:
    """Note something that is no verb, and that all ranks call alike. ``end`` or ``fail`` it."""
    return note(Plain(name, comm, (name,)), lane)


def together(
    name: str, comm: Communicator, step: Callable[[], R], *, is_patient: bool = False, frame: FrameType | None = None
) -> R:
    """``step()``, noted as something that all ranks call alike, and in which they wait for each other.

    What ``is_patient`` may take as long as it wants: no deadline counts. ``frame``: as for ``note``.
    """
    return _until_over(note(Plain(name, comm, (name,)), DIRECT, is_patient, frame), step)


def alone(name: str, comm: Communicator, step: Callable[[], R], *, frame: FrameType | None = None) -> R:
    """``step()``, noted as something in which this rank waits for others of ``comm``, which need not call it alike."""
    return _until_over(note(Plain(name, comm, None), DIRECT, frame=frame), step)


def while_others_work(name: str, comm: Communicator, step: Callable[[], R]) -> R:
    """``step()``, noted as ``together`` does, in which ranks that train asynchronously wait for each other.

    The fastest may wait there for hours. So the deadline counts only while no rank of this node that has not come calls
    anything, as one that trains does; and where ranks of other nodes may be missing, which cannot be seen, not at all.
    """
    noted = note(Plain(name, comm, (name,)), DIRECT, True)
    begin(noted)
    wait = object()
    waiting.unhurried[wait] = noted[0], comm.size
    try:
        return _until_over(noted, step)
    finally:
        waiting.unhurried.pop(wait, None)


def _until_over(noted: Noted, step: Callable[[], R]) -> R:
    try:
        returned = step()
    except BaseException:
        fail(noted)
        raise
    end_launched(noted)
    return returned


def note_own(name: str, comm: Communicator) -> Noted:
    """Note that this rank launches something by itself, as a request to a parameter server. ``end`` or ``fail`` it."""
    return note(Plain(name, comm, None), DIRECT, True)


def begin(noted: Noted) -> None:
    """It was launched, and is carried out from now on."""
    used = board.current
    if used is not None and used.words[noted[1]] == noted[0]:  # a thousand later ones may have taken its place
        used.words[noted[1] + BEGUN] = monotonic_ns()


def end(noted: Noted) -> None:
    """It is over. RanksDisagree if the neighbour's at this place is another one."""
    number, word, end_word, slot, mark, _ = noted
    words = board.current.words  # type: ignore[union-attr]
    if not outlived or _has_place(words, word, number):
        words[end_word] = monotonic_ns()
    theirs = words[slot]
    if theirs != mark and theirs ^ mark < _NEXT:
        raise RanksDisagree(_difference(number))


def _has_place(words: memoryview, word: int, number: int) -> bool:
    """Whether the record of an operation that is over is still there."""
    return outlived.pop(number, None) is None or words[word] == number


def end_launched(noted: Noted) -> None:
    """The same, of one that was launched: a thousand later ones may have taken its place, and ``stop`` the board."""
    used = board.current
    if used is not None:
        if used.words[noted[1]] != noted[0]:
            noted = noted[0], noted[1], used.waste, *noted[3:]
        end(noted)


def fail(noted: Noted) -> None:
    """It has failed, unless it is over."""
    number, word, end_word, *_ = noted
    used = board.current
    if used is None:
        return
    outlived.pop(number, None)
    if used.words[word] == number and used.words[end_word] < used.words[word + LAUNCHED]:
        used.words[word + NAMES] |= HAS_FAILED
        used.words[end_word] = monotonic_ns()


outlived: dict[int, Record] = {}
"""Operations that a thread carries out while others, in other threads, may have taken the places of their records."""


def called(used: Board) -> set[int]:
    """The numbers of the operations that a thread of the user carries out."""
    found = _open(used).union(number for number, kept in tuple(outlived.items()) if not _is_passed(used, kept))
    return found.union(
        number for number, size in tuple(waiting.unhurried.values()) if not _may_come(used, number, size)
    )


def under_way(used: Board) -> set[int]:
    """The numbers of those, and of the operations that one waits for."""
    return called(used).union(tuple(waiting.active.values()))


def _may_come(used: Board, number: int, size: int) -> bool:
    """Whether a rank that this one waits for is out of sight, or at work; not if one has come to its end."""
    mine = record(used, number)
    if mine is None:
        return True
    missing = comparison.behind(used, mine)
    if any(used.get(HAS_LEFT, index) == STOPPING for index in missing):
        return False
    is_in_sight = len(used.rows_of.get(mine.row, ())) == size
    return not is_in_sight or any(_has_called_lately(used, index) for index in missing)


def _has_called_lately(used: Board, index: int) -> bool:
    last = next(iter(used.records(index)), None)
    return last is not None and used.now(index) - max(last.launched, abs(last.ended)) < _LATELY_NS


def record(used: Board, number: int) -> Record | None:
    """One of this rank's, while it is there, or under way."""
    return used.record(number) or outlived.get(number)


def _open(used: Board) -> set[int]:
    columns = used.columns
    is_open = (columns[ENDED] < columns[LAUNCHED]) & (columns[NAMES] & IS_LAUNCH == 0)
    return set(columns[0][is_open].tolist()) if is_open.any() else set()


def _keep_open(used: Board) -> None:
    """What has not ended lives on when its place is taken; not messages, of which there is nothing else to see.

    What its thread has left without an end (an exception from a signal's handler) is passed by the next one.
    """
    found = [used.record(number) for number in _open(used)]
    kept = [each for each in (*found, *outlived.values()) if each is not None and each.position]
    outlived.clear()
    outlived.update({each.number: each for each in kept if not _is_passed(used, each)})


def _is_passed(used: Board, kept: Record) -> bool:
    """Whether a later operation was noted in the same sequence, or the sequence's row is another's now."""
    first = used.first_mark(used.index, kept.row)
    return kept.row < 0 or max(used.words[first : first + MARKS_PER_ROW]) >> CHECKSUM_BITS > kept.mark >> CHECKSUM_BITS


def _difference(number: int) -> str:
    used = board.current
    mine = None if used is None else record(used, number)
    told = "" if used is None or mine is None else comparison.difference(used, mine)
    return told or "the ranks call different operations"
