"""The journal: each operation is recorded on the board of its node, compared with the neighbour's, and timed.

Every call pays for the journal, so the steps of ``record`` and ``end`` stand in one piece: a record and a fingerprint
on the board (``status_board.py``), and two looks at the neighbour's fingerprint (``sequences.py``). Texts and checksum
of a call are kept by its place in the program. ``python benchmarks/watching.py`` measures the cost.

An operation is *under way* while a call carries it out (begun, not ended, and its communicator not freed), or waits
for it (``backoff.active``; a future counts as a wait from its request on). ``watch/watchdog.py`` looks at the oldest.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Sequence
from sys import _getframe
from time import monotonic_ns
from types import CodeType, FrameType
from typing import Any, Protocol, TypeVar

from torchmpi_py.core import backoff, sequences, status_board
from torchmpi_py.core.channels import DIRECT
from torchmpi_py.core.sequences import CallSequence
from torchmpi_py.core.status_board import ASYNCHRONOUS_SHIFT, CHECKSUM_BITS, IS_LAUNCH, STRING_BITS, Board, Record, pack
from torchmpi_py.errors import RanksDisagree, TorchMPIError

R = TypeVar("R")
_HALF = status_board.NUM_RECORDS // 2 - 1
_LATELY_NS = 1_000_000_000  # two looks of the watchdog
_NEXT = 1 << CHECKSUM_BITS  # fingerprints that differ by less have the same generation and sequence number
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_BENCH = os.path.join(_PACKAGE, "bench", "")  # calls verbs as a program does
MOST_CALLS_KEPT = 4096
_SIZE_INDEX = 2  # of the number of bytes in ``Recorded.fingerprint``, if it has to be the same
_AGREED = (TorchMPIError, ValueError, TypeError)  # the rest is of MPI, of one rank alone, or of a signal's handler
_NO_CALL = (None, ..., None, 0, 0)  # differs from every call

Entry = tuple[int, int, int, int, int, CallSequence | None]
"""A recorded operation: the record's number, the words where the record begins and ends, the word of the neighbour's
fingerprint, this rank's fingerprint, and the sequence if there is one. A plain tuple: every call makes one."""

evicted_open: dict[int, Record] = {}
"""Operations under way in one thread whose records those of other threads may have overwritten, by number."""


class RecordedGroup(Protocol):
    """The communicator of an operation."""

    @property
    def key(self) -> str: ...

    @property
    def size(self) -> int: ...

    @property
    def sequences(self) -> Sequence[CallSequence]:
        """The sequence of operations of each thread role."""


class Method(Protocol):
    """The way in which an operation is carried out: a flavour."""

    @property
    def name(self) -> str: ...

    @property
    def exchanges_headers(self) -> bool:
        """Whether the ranks compare their calls themselves, before any data moves."""


class Recorded(Protocol):
    """What the journal and the reports read of an operation: a collective's ``Plan``, or ``Plain``."""

    @property
    def name(self) -> str:
        """The verb."""

    @property
    def flavour(self) -> Method: ...

    @property
    def comm(self) -> RecordedGroup: ...

    @property
    def num_bytes(self) -> int: ...

    @property
    def dtype(self) -> object:
        """Of the tensor; None for an object."""

    @property
    def others(self) -> Sequence[Any]:
        """Of a message: its source or destination."""

    @property
    def fingerprint(self) -> tuple[Any, ...] | None:
        """What has to be equal on all ranks; None for an operation without counterparts to compare with."""


class Plain:
    """An operation that is no verb: a barrier, a file that all ranks write. ``fingerprint`` as in ``Recorded``."""

    exchanges_headers = False
    num_bytes = 0
    dtype, others = None, ()

    def __init__(self, name: str, comm: RecordedGroup, fingerprint: tuple[str] | None) -> None:
        self.name, self.comm, self.fingerprint, self.flavour = name, comm, fingerprint, self


def record(operation: Recorded, thread_role: int, form: int = 0, frame: FrameType | None = None) -> Entry:
    """Record an operation that begins now, or is launched; ``frame``: the caller's, unless it is the verb's caller.

    ``form``: IS_LAUNCH for a launched operation, with IS_ASYNCHRONOUS if its counterparts must be asynchronous, too.

    RanksDisagree if the neighbour calls another operation, unless the flavour's ranks find that out by their headers.
    """
    used = status_board.current
    assert used is not None, "operations are recorded between start and stop"
    # 1. The call: texts, slot and checksum, kept from the last call at this place of the program.
    frame = frame or _getframe(2).f_back or _getframe(2)  # below are this function, run or launch, and the verb
    code, parts, sequence = frame.f_code, operation.fingerprint, operation.comm.sequences[thread_role]
    known_code, known_parts, known_sequence, names, checksum = used.calls.get(id(code) + frame.f_lasti, _NO_CALL)
    if known_parts != parts or known_sequence is not sequence or known_code is not code:
        names, checksum = _look_up(used, operation, sequence, frame)
    # 2. The record. Twice a round through all records, those that are open are kept from being overwritten.
    number, (begin_byte, word, end_word) = used.next_record()
    now = monotonic_ns()
    if not number & _HALF:
        _keep_open(used)
    if parts is None:
        # Nothing to compare: the neighbour's word is one of the blank slot, which equals this fingerprint, 0.
        pack(used.mapping, begin_byte, number, 0, now, operation.num_bytes, names | form)
        return number, word, end_word, sequence.blank, 0, None
    if sequence.is_broken:
        raise sequences.refused(operation.name, operation.comm)
    try:
        fingerprint, (mine, neighbours) = sequence.next_fingerprint()
        # The two versions of a function have fingerprints that differ in a bit.
        fingerprint |= checksum ^ form >> ASYNCHRONOUS_SHIFT
        pack(used.mapping, begin_byte, number, fingerprint, now, operation.num_bytes, names | form)
    except BaseException:  # from a signal's handler
        sequence.is_broken = not sequence.is_alone
        fail((number, word, end_word, 0, 0, None))
        raise
    entry = number, word, end_word, neighbours, fingerprint, sequence
    # 3. The fingerprint, after its record: a reader of the fingerprint finds the record. Then the first look.
    words = used.words
    words[mine] = fingerprint
    theirs = words[neighbours]
    # A neighbour that is behind, or ahead, has another sequence number there: no difference.
    if theirs != fingerprint and theirs ^ fingerprint < _NEXT and not operation.flavour.exchanges_headers:
        fail(entry)
        sequence.is_broken = True  # the neighbour is in an operation of this number, which this rank never enters
        raise RanksDisagree(_difference(number))._of_call(operation.name, operation.comm)
    return entry


def record_plain(name: str, comm: RecordedGroup, thread_role: int = DIRECT) -> Entry:
    """Record an operation that is no verb, and that all ranks call alike. ``end`` or ``fail`` it."""
    return record(Plain(name, comm, (name,)), thread_role)


def record_own(name: str, comm: RecordedGroup) -> Entry:
    """Record a launch of this rank alone, as a request to a parameter server. ``end`` or ``fail`` it."""
    return record(Plain(name, comm, None), DIRECT, IS_LAUNCH)


def run_together(
    name: str, comm: RecordedGroup, step: Callable[[], R], *, is_patient: bool = False, frame: FrameType | None = None
) -> R:
    """``step()``, recorded as an operation that all ranks call alike, and in which they wait for each other.

    An operation that ``is_patient`` has no deadline. ``frame``: as for ``record``.
    """
    return _until_over(record(Plain(name, comm, (name,)), DIRECT, IS_LAUNCH * is_patient, frame), step)


def run_alone(name: str, comm: RecordedGroup, step: Callable[[], R], *, frame: FrameType | None = None) -> R:
    """``step()``, recorded as a wait of this rank for other ranks of ``comm``, which need not call it alike."""
    return _until_over(record(Plain(name, comm, None), DIRECT, frame=frame), step)


def run_while_others_work(name: str, comm: RecordedGroup, step: Callable[[], R]) -> R:
    """``step()``, as by ``run_together``, where ranks that train asynchronously wait for each other.

    The fastest rank may wait there for hours. So the deadline counts only while no missing rank of this node calls
    anything, as a rank that trains does; never where ranks of other nodes, which cannot be seen, may be missing.
    """
    # A launch does not age: the entry in ``unhurried`` decides whether this operation does.
    entry = record(Plain(name, comm, (name,)), DIRECT, IS_LAUNCH)
    begin(entry)
    backoff.unhurried[wait := object()] = entry[0], comm.size
    try:
        return _until_over(entry, step)
    finally:
        backoff.unhurried.pop(wait, None)


def _until_over(entry: Entry, step: Callable[[], R]) -> R:
    try:
        returned = step()
        end_launched(entry)
    except BaseException as error:
        if not isinstance(error, _AGREED):
            break_off(entry)
        fail(entry)
        raise
    return returned


def begin(entry: Entry) -> None:
    """Record that a launched operation is carried out from now on."""
    used = status_board.current
    if used is not None and used.words[entry[1]] == entry[0]:  # the record may have been overwritten
        used.words[entry[1] + status_board.BEGUN] = monotonic_ns()


def end(entry: Entry) -> None:
    """Record the end of an operation. RanksDisagree if the neighbour's at this sequence number is another one."""
    number, word, end_word, neighbours, fingerprint, _ = entry
    words = status_board.current.words  # type: ignore[union-attr]
    # Not where the record of an operation that was under way for long has been overwritten.
    if not evicted_open or evicted_open.pop(number, None) is None or words[word] == number:
        words[end_word] = monotonic_ns()
    theirs = words[neighbours]  # the second look: the first one may have come before the neighbour
    if theirs != fingerprint and theirs ^ fingerprint < _NEXT:
        break_off(entry)
        raise RanksDisagree(_difference(number))


def break_off(entry: Entry) -> None:
    """Refuse all later operations of the sequence: the ranks may not have carried out this one alike."""
    if entry[5] is not None and not entry[5].is_alone:
        entry[5].is_broken, entry[5].broken_from = True, min(entry[5].broken_from, entry[4])


def end_launched(entry: Entry) -> None:
    """Like ``end``, for a launched operation: its record may be overwritten, and ``stop`` may have taken the board."""
    used = status_board.current
    if used is not None:
        if used.words[entry[1]] != entry[0]:
            # The place of the end belongs to another operation's record now; the comparison is still due.
            entry = entry[0], entry[1], used.scrap_word, *entry[3:]
        end(entry)


def fail(entry: Entry) -> None:
    """Record the failure of an operation that has not ended."""
    number, word, end_word = entry[:3]
    if (used := status_board.current) is None:
        return
    evicted_open.pop(number, None)
    # Not where the record is another's, nor where ``end`` has found a difference: that operation has ended.
    if used.words[word] == number and used.words[end_word] < used.words[word + status_board.LAUNCHED]:
        used.words[word + status_board.NAMES] |= status_board.HAS_FAILED
        used.words[end_word] = monotonic_ns()


def _difference(number: int) -> str:
    used = status_board.current
    mine = None if used is None else find_record(used, number)
    text = "" if used is None or mine is None else sequences.difference(used, mine)
    return text or "the ranks call different operations"


def find_record(used: Board, number: int) -> Record | None:
    """A record of this rank that was not overwritten, or whose operation is under way."""
    return used.record(number) or evicted_open.get(number)


def under_way(used: Board) -> set[int]:
    """The numbers of the operations that this process carries out, or waits for."""
    return called(used).union(tuple(backoff.active.values()))


def called(used: Board) -> set[int]:
    """The numbers of the operations that the program's threads carry out."""
    found = {each.number for each in map(used.record, _open(used)) if each and not sequences.is_freed(used, each)}
    found.update(number for number, kept in tuple(evicted_open.items()) if not sequences.is_passed(used, kept))
    late = (number for number, size in tuple(backoff.unhurried.values()) if not _may_come(used, number, size))
    return found.union(late)


def _may_come(used: Board, number: int, size: int) -> bool:
    """Whether a missing rank is out of sight, or at work, and none that is missing has come to its end."""
    mine = find_record(used, number)
    if mine is None:
        return True
    missing = sequences.behind(used, mine)
    # A rank in ``stop`` calls no more operations.
    if any(used.get(status_board.HAS_LEFT, index) == status_board.STOPPING for index in missing):
        return False
    is_in_sight = len(used.slots_of.get(mine.slot, ())) == size
    return not is_in_sight or any(_has_called_lately(used, index) for index in missing)


def _has_called_lately(used: Board, index: int) -> bool:
    last = next(iter(used.records(index)), None)
    return last is not None and used.now(index) - max(last.launched, abs(last.ended)) < _LATELY_NS


def _open(used: Board) -> set[int]:
    # One look at all records at once, for this runs within a call: not ended, and not launched for another thread.
    columns = used.columns
    is_open = (columns[status_board.ENDED] < columns[status_board.LAUNCHED]) & (
        columns[status_board.NAMES] & IS_LAUNCH == 0
    )
    return set(columns[0][is_open].tolist()) if is_open.any() else set()


def _keep_open(used: Board) -> None:
    """Keep the records of open operations, before others overwrite them; not those that are passed.

    Of one that is not numbered, as a message, nobody would see that it was left without an end: once its record is
    overwritten, nobody sees that it hangs.
    """
    kept = [*filter(None, map(used.record, _open(used))), *evicted_open.values()]
    evicted_open.clear()
    evicted_open.update(
        {each.number: each for each in kept if sequences.is_numbered(each) and not sequences.is_passed(used, each)}
    )


def _look_up(used: Board, operation: Recorded, sequence: CallSequence, frame: Any) -> tuple[int, int]:
    """(NAMES of a call's record, its checksum); kept for frames of the program, not for the package's own."""
    code, parts = frame.f_code, operation.fingerprint
    text, checksum = _text(used, _without_counterparts(operation) if parts is None else parts)
    site = _site(used, frame)
    # A call is kept only where the frame itself is the site: one line of the package serves many lines of programs.
    names = (sequence.index + 1) << 2 * STRING_BITS | text << STRING_BITS | site
    if used.sites.get((id(code), frame.f_lasti), (0,))[0] == site and parts is not None:
        if len(used.calls) > MOST_CALLS_KEPT:
            used.calls.clear()
        used.calls[id(code) + frame.f_lasti] = code, parts, sequence, names, checksum
    return names, checksum


def _without_counterparts(operation: Recorded) -> tuple[Any, ...]:
    """In place of a fingerprint, the text's parts; of a message also its source or destination."""
    if isinstance(operation, Plain):
        return (operation.name,)
    parts = operation.name, operation.flavour.name, 0, operation.dtype or "object"
    way = {"send": "to", "recv": "from"}.get(operation.name)
    return parts if way is None else (*parts, way, operation.others[-1])


def _text(used: Board, parts: tuple[Any, ...]) -> tuple[int, int]:
    """(string, checksum) of an operation; the size is in the record, and not in the string."""
    if (found := used.texts.get(parts)) is not None:
        return found
    if len(used.texts) > MOST_CALLS_KEPT:
        used.texts.clear()  # the strings stay on the board, and are found again
    flat = [part for each in parts for part in (each if isinstance(each, tuple) else (each,))]
    shown = [part for index, part in enumerate(flat) if index != _SIZE_INDEX or not isinstance(part, int)]
    text = used.keep_string(" ".join(str(part) for part in shown), str(parts[0]))
    checksum = zlib.crc32(repr(parts).encode(errors="backslashreplace")) & (1 << CHECKSUM_BITS) - 1
    used.texts[parts] = made = text, checksum
    return made


def _site(used: Board, frame: Any) -> int:
    """The string with file and line of the nearest caller outside the package; of the last one, if all are inside."""
    while (site := (used.sites.get((id(frame.f_code), frame.f_lasti)) or _name_frame(used, frame))[0]) < 0:
        if frame.f_back is None:  # in a thread of torch's; elsewhere the same line has callers, so nothing is kept
            return used.keep_string(f"{frame.f_code.co_filename}:{frame.f_lineno}", frame.f_code.co_filename)
        frame = frame.f_back
    return site


def _name_frame(used: Board, frame: Any) -> tuple[int, CodeType]:
    """The string of a frame; -1 for the package's own. The code is kept: its id may return."""
    if len(used.sites) > MOST_CALLS_KEPT:
        used.sites.clear()
        used.calls.clear()
    code, name = frame.f_code, frame.f_code.co_filename
    is_own = name.startswith(_PACKAGE) and not name.startswith(_BENCH)
    site = -1 if is_own else used.keep_string(f"{name}:{frame.f_lineno} in {code.co_name}", name)
    used.sites[id(code), frame.f_lasti] = made = site, code
    return made
