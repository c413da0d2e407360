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
from typing import TypeVar

from torchmpi_py.core import backoff, call_sites, comparison, status_board
from torchmpi_py.core.call_sites import UNKNOWN
from torchmpi_py.core.channels import DIRECT
from torchmpi_py.core.recorded import Plain, Recorded, RecordedGroup
from torchmpi_py.core.sequences import CallSequence
from torchmpi_py.core.status_board import (
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
    Board,
    Record,
    pack,
)
from torchmpi_py.errors import RanksDisagree

R = TypeVar("R")
_HALF = NUM_RECORDS // 2 - 1
_LATELY_NS = 1_000_000_000  # two looks of the watchdog
_NEXT = 1 << CHECKSUM_BITS  # marks that are nearer are of the same place
Entry = tuple[int, int, int, int, int, CallSequence | None]
"""An operation that was noted: the number of its record, the words where that begins and ends, the word of the
neighbour's mark, its own mark, and its sequence if it has one. A plain tuple, for one is made in each call."""


def record(operation: Recorded, thread_role: int, is_launch: bool = False, frame: FrameType | None = None) -> Entry:
    """Note an operation that begins now, or is launched; by ``frame``, if that is not what calls the verb.

    RanksDisagree if the neighbour is known to do another, unless its ranks meet first, and find out together.
    """
    used = status_board.current
    assert used is not None, "operations are noted between start and stop"
    frame = frame or _getframe(3)  # below are this function, run or launch, and the verb
    code, fingerprint, sequence = frame.f_code, operation.fingerprint, operation.comm.sequences[thread_role]
    known_code, known_fingerprint, known_sequence, names, checksum = used.calls.get(id(code) + frame.f_lasti, UNKNOWN)
    if known_fingerprint != fingerprint or known_sequence is not sequence or known_code is not code:
        names, checksum = call_sites.look_up(used, operation, sequence, frame)
    number, (place, word, end_word) = used.next_record()
    now = monotonic_ns()
    if not number & _HALF:
        _keep_open(used)
    if fingerprint is None:
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
    entry = number, word, end_word, slot, mark, sequence
    if theirs != mark and theirs ^ mark < _NEXT and not operation.flavour.exchanges_headers:
        fail(entry)
        raise RanksDisagree(_difference(number))
    return entry


def record_plain(name: str, comm: RecordedGroup, thread_role: int = DIRECT) -> Entry:
    """Note something that is no verb, and that all ranks call alike. ``end`` or ``fail`` it."""
    return record(Plain(name, comm, (name,)), thread_role)


def run_together(
    name: str, comm: RecordedGroup, step: Callable[[], R], *, is_patient: bool = False, frame: FrameType | None = None
) -> R:
    """``step()``, noted as something that all ranks call alike, and in which they wait for each other.

    What ``is_patient`` may take as long as it wants: no deadline counts. ``frame``: as for ``note``.
    """
    return _until_over(record(Plain(name, comm, (name,)), DIRECT, is_patient, frame), step)


def run_alone(name: str, comm: RecordedGroup, step: Callable[[], R], *, frame: FrameType | None = None) -> R:
    """``step()``, noted as something in which this rank waits for others of ``comm``, which need not call it alike."""
    return _until_over(record(Plain(name, comm, None), DIRECT, frame=frame), step)


def run_while_others_work(name: str, comm: RecordedGroup, step: Callable[[], R]) -> R:
    """``step()``, noted as ``together`` does, in which ranks that train asynchronously wait for each other.

    The fastest may wait there for hours. So the deadline counts only while no rank of this node that has not come calls
    anything, as one that trains does; and where ranks of other nodes may be missing, which cannot be seen, not at all.
    """
    entry = record(Plain(name, comm, (name,)), DIRECT, True)
    begin(entry)
    wait = object()
    backoff.unhurried[wait] = entry[0], comm.size
    try:
        return _until_over(entry, step)
    finally:
        backoff.unhurried.pop(wait, None)


def _until_over(entry: Entry, step: Callable[[], R]) -> R:
    try:
        returned = step()
    except BaseException:
        fail(entry)
        raise
    end_launched(entry)
    return returned


def record_own(name: str, comm: RecordedGroup) -> Entry:
    """Note that this rank launches something by itself, as a request to a parameter server. ``end`` or ``fail`` it."""
    return record(Plain(name, comm, None), DIRECT, True)


def begin(entry: Entry) -> None:
    """It was launched, and is carried out from now on."""
    used = status_board.current
    if used is not None and used.words[entry[1]] == entry[0]:  # a thousand later ones may have taken its place
        used.words[entry[1] + BEGUN] = monotonic_ns()


def end(entry: Entry) -> None:
    """It is over. RanksDisagree if the neighbour's at this place is another one."""
    number, word, end_word, slot, mark, _ = entry
    words = status_board.current.words  # type: ignore[union-attr]
    if not evicted_open or _has_place(words, word, number):
        words[end_word] = monotonic_ns()
    theirs = words[slot]
    if theirs != mark and theirs ^ mark < _NEXT:
        raise RanksDisagree(_difference(number))


def _has_place(words: memoryview, word: int, number: int) -> bool:
    """Whether the record of an operation that is over is still there."""
    return evicted_open.pop(number, None) is None or words[word] == number


def end_launched(entry: Entry) -> None:
    """The same, of one that was launched: a thousand later ones may have taken its place, and ``stop`` the board."""
    used = status_board.current
    if used is not None:
        if used.words[entry[1]] != entry[0]:
            entry = entry[0], entry[1], used.waste, *entry[3:]
        end(entry)


def fail(entry: Entry) -> None:
    """It has failed, unless it is over."""
    number, word, end_word, *_ = entry
    used = status_board.current
    if used is None:
        return
    evicted_open.pop(number, None)
    if used.words[word] == number and used.words[end_word] < used.words[word + LAUNCHED]:
        used.words[word + NAMES] |= HAS_FAILED
        used.words[end_word] = monotonic_ns()


evicted_open: dict[int, Record] = {}
"""Operations that a thread carries out while others, in other threads, may have taken the places of their records."""


def called(used: Board) -> set[int]:
    """The numbers of the operations that a thread of the user carries out."""
    found = _open(used).union(number for number, kept in tuple(evicted_open.items()) if not _is_passed(used, kept))
    return found.union(
        number for number, size in tuple(backoff.unhurried.values()) if not _may_come(used, number, size)
    )


def under_way(used: Board) -> set[int]:
    """The numbers of those, and of the operations that one waits for."""
    return called(used).union(tuple(backoff.active.values()))


def _may_come(used: Board, number: int, size: int) -> bool:
    """Whether a rank that this one waits for is out of sight, or at work; not if one has come to its end."""
    mine = find_record(used, number)
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


def find_record(used: Board, number: int) -> Record | None:
    """One of this rank's, while it is there, or under way."""
    return used.record(number) or evicted_open.get(number)


def _open(used: Board) -> set[int]:
    columns = used.columns
    is_open = (columns[ENDED] < columns[LAUNCHED]) & (columns[NAMES] & IS_LAUNCH == 0)
    return set(columns[0][is_open].tolist()) if is_open.any() else set()


def _keep_open(used: Board) -> None:
    """What has not ended lives on when its place is taken; not messages, of which there is nothing else to see.

    What its thread has left without an end (an exception from a signal's handler) is passed by the next one.
    """
    found = [used.record(number) for number in _open(used)]
    kept = [each for each in (*found, *evicted_open.values()) if each is not None and each.position]
    evicted_open.clear()
    evicted_open.update({each.number: each for each in kept if not _is_passed(used, each)})


def _is_passed(used: Board, kept: Record) -> bool:
    """Whether a later operation was noted in the same sequence, or the sequence's row is another's now."""
    first = used.first_mark(used.index, kept.row)
    return kept.row < 0 or max(used.words[first : first + MARKS_PER_ROW]) >> CHECKSUM_BITS > kept.mark >> CHECKSUM_BITS


def _difference(number: int) -> str:
    used = status_board.current
    mine = None if used is None else find_record(used, number)
    told = "" if used is None or mine is None else comparison.difference(used, mine)
    return told or "the ranks call different operations"
