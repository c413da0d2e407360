"""The journal: it records each operation on the node's board, compares it with the neighbour's, and times it.

The idea: each rank writes a record and a fingerprint of every call to memory that its node shares
(``status_board.py``), and reads the fingerprint of one neighbour (``sequences.py``). So a mismatch raises an error in
the call, and any rank can report what a stopped or dead rank did. The alternative is an exchange of messages before
each collective, as in PyTorch's ``TORCH_DISTRIBUTED_DEBUG=DETAIL``. It also covers ranks of other nodes, but it makes
each call wait for the slowest rank twice, and a rank that hangs cannot answer. Across nodes ``watch/cross_check.py``
compares the records instead, outside of calls.

Every call pays for the journal. So ``record`` and ``end`` hold their steps inline, and the texts and the checksum of a
call are cached by its place in the program. ``python benchmarks/watching.py`` measures the overhead.

An operation is *under way* while a call carries it out: it has begun, it has not ended, and its communicator is not
freed. It is also under way while a thread waits for it (``backoff.active``). A future counts as a wait from its request
on. ``watch/watchdog.py`` looks at the oldest operation under way.
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
_LATELY_NS = 1_000_000_000  # the time between two looks of the watchdog
_NEXT = 1 << CHECKSUM_BITS  # Fingerprints whose XOR is less than this have equal generations and sequence numbers.
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_BENCH = os.path.join(_PACKAGE, "bench", "")  # The bench calls collectives as a user's program does.
MOST_CALLS_KEPT = 4096
_SIZE_INDEX = 2  # Index of the number of bytes in ``Recorded.fingerprint``, if all ranks need the same size.
_AGREED = (TorchMPIError, ValueError, TypeError)  # Other errors come from MPI, from one rank, or from a signal handler.
_NO_CALL = (None, ..., None, 0, 0)  # unequal to every call

Entry = tuple[int, int, int, int, int, CallSequence | None]
"""A recorded operation: the record's number, the words where the record begins and ends, the word of the neighbour's
fingerprint, this rank's fingerprint, and the sequence if there is one. It is a plain tuple, because every call creates
one."""

evicted_open: dict[int, Record] = {}
"""Operations under way in one thread whose records other threads may have overwritten, by number."""


class RecordedGroup(Protocol):
    """The communicator of an operation."""

    @property
    def key(self) -> str: ...

    @property
    def size(self) -> int: ...

    @property
    def sequences(self) -> Sequence[CallSequence]:
        """Return the sequence of operations of each thread role."""


class Method(Protocol):
    """The implementation that carries out an operation: a flavour."""

    @property
    def name(self) -> str: ...

    @property
    def exchanges_headers(self) -> bool:
        """Whether the ranks compare their calls by headers of their own, before any data moves."""


class Recorded(Protocol):
    """The interface through which the journal and the reports read an operation: a ``Plan``, or ``Plain``."""

    @property
    def name(self) -> str:
        """The name of the collective or message."""

    @property
    def flavour(self) -> Method: ...

    @property
    def comm(self) -> RecordedGroup: ...

    @property
    def num_bytes(self) -> int: ...

    @property
    def dtype(self) -> object:
        """The tensor's dtype; None for an object."""

    @property
    def others(self) -> Sequence[Any]:
        """The remaining arguments. For a send or receive, the last argument is the destination or source rank."""

    @property
    def fingerprint(self) -> tuple[Any, ...] | None:
        """The values that must be equal on all ranks; None for an operation that has no counterparts to compare."""


class Plain:
    """An operation that is not a collective: a barrier, or a file that all ranks write, for example."""

    exchanges_headers = False
    num_bytes = 0
    dtype, others = None, ()

    def __init__(self, name: str, comm: RecordedGroup, fingerprint: tuple[str] | None) -> None:
        self.name, self.comm, self.fingerprint, self.flavour = name, comm, fingerprint, self


def record(operation: Recorded, thread_role: int, form: int = 0, frame: FrameType | None = None) -> Entry:
    """Record an operation that begins now or is launched now; return its entry.

    ``frame`` is the frame to show as the call, by default the caller of the collective. ``form`` is IS_LAUNCH for a
    launched operation, with IS_ASYNCHRONOUS if its counterparts on other ranks must be asynchronous too.

    Raise RanksDisagree if the neighbour calls another operation, unless the flavour's headers find such a difference.
    """
    board = status_board.current
    assert board is not None, "operations are recorded between start and stop"
    # 1. The call: texts, slot and checksum, cached from the last call at this place in the program.
    # The default skips our own frames: record(), run or launch, the collective.
    frame = frame or _getframe(2).f_back or _getframe(2)
    code, parts, sequence = frame.f_code, operation.fingerprint, operation.comm.sequences[thread_role]
    known_code, known_parts, known_sequence, names, checksum = board.calls.get(id(code) + frame.f_lasti, _NO_CALL)
    if known_parts != parts or known_sequence is not sequence or known_code is not code:
        names, checksum = _look_up(board, operation, sequence, frame)
    # 2. The record. Twice per round through all records, save the open ones before they are overwritten.
    number, (begin_byte, word, end_word) = board.next_record()
    now = monotonic_ns()
    if not number & _HALF:
        _save_open(board)
    if parts is None:
        # Nothing to compare: return a word of the blank slot as the neighbour's. It is 0, as this fingerprint is.
        pack(board.mapping, begin_byte, number, 0, now, operation.num_bytes, names | form)
        return number, word, end_word, sequence.blank, 0, None
    if sequence.is_broken:
        raise sequences.refused(operation.name, operation.comm)
    try:
        fingerprint, (mine, neighbours) = sequence.next_fingerprint()
        # The fingerprints of the blocking and the asynchronous version differ in one bit.
        fingerprint |= checksum ^ form >> ASYNCHRONOUS_SHIFT
        pack(board.mapping, begin_byte, number, fingerprint, now, operation.num_bytes, names | form)
    except BaseException:  # A signal handler may raise here.
        sequence.is_broken = not sequence.is_alone
        fail((number, word, end_word, 0, 0, None))
        raise
    entry = number, word, end_word, neighbours, fingerprint, sequence
    # 3. The fingerprint, written after its record so that a reader of the fingerprint finds the record. Then compare.
    words = board.words
    words[mine] = fingerprint
    theirs = words[neighbours]
    # The word of a neighbour that is behind or ahead has a different sequence number, which is not a difference.
    if theirs != fingerprint and theirs ^ fingerprint < _NEXT and not operation.flavour.exchanges_headers:
        fail(entry)
        sequence.is_broken = True  # The neighbour is in its operation of this number, and this rank never enters it.
        raise RanksDisagree(_difference(number))._of_call(operation.name, operation.comm)
    return entry


def record_plain(name: str, comm: RecordedGroup, thread_role: int = DIRECT) -> Entry:
    """Record an operation that is not a collective but that all ranks call in the same way. ``end`` or ``fail`` it."""
    return record(Plain(name, comm, (name,)), thread_role)


def record_own(name: str, comm: RecordedGroup) -> Entry:
    """Record a launch by this rank alone, such as a request to a parameter server.

    The caller must ``end`` or ``fail`` the record.
    """
    return record(Plain(name, comm, None), DIRECT, IS_LAUNCH)


def run_together(
    name: str, comm: RecordedGroup, step: Callable[[], R], *, is_patient: bool = False, frame: FrameType | None = None
) -> R:
    """Run ``step``, recorded as an operation that all ranks call, and in which they wait for each other.

    Hang detection applies no timeout to an operation that ``is_patient``. ``frame`` has the meaning that it has in
    ``record``.
    """
    return _until_over(record(Plain(name, comm, (name,)), DIRECT, IS_LAUNCH * is_patient, frame), step)


def run_alone(name: str, comm: RecordedGroup, step: Callable[[], R], *, frame: FrameType | None = None) -> R:
    """Run ``step``, recorded as a wait of this rank for other ranks of ``comm``, which need not make the same call."""
    return _until_over(record(Plain(name, comm, None), DIRECT, frame=frame), step)


def run_while_others_work(name: str, comm: RecordedGroup, step: Callable[[], R]) -> R:
    """Run ``step`` like ``run_together``, at a point where ranks that train asynchronously wait for each other.

    The fastest rank may wait there for hours. So the timeout counts only while every missing rank of this node is
    silent; a rank that trains makes calls. The timeout never counts where ranks of other nodes may be missing,
    because this rank cannot see their calls.
    """
    # A launch is never late. The entry in ``unhurried`` decides whether this operation counts as late.
    entry = record(Plain(name, comm, (name,)), DIRECT, IS_LAUNCH)
    begin(entry)
    backoff.unhurried[wait := object()] = entry[0], comm.size
    try:
        return _until_over(entry, step)
    finally:
        backoff.unhurried.pop(wait, None)


def _until_over(entry: Entry, step: Callable[[], R]) -> R:
    try:
        result = step()
        end_launched(entry)
    except BaseException as error:
        if not isinstance(error, _AGREED):
            break_off(entry)
        fail(entry)
        raise
    return result


def begin(entry: Entry) -> None:
    """Record that a launched operation is carried out from now on."""
    board = status_board.current
    if board is not None and board.words[entry[1]] == entry[0]:  # The record may have been overwritten.
        board.words[entry[1] + status_board.BEGUN] = monotonic_ns()


def end(entry: Entry) -> None:
    """Record the end of an operation. Raise RanksDisagree if the neighbour's operation of this number differs."""
    number, word, end_word, neighbours, fingerprint, _ = entry
    words = status_board.current.words  # type: ignore[union-attr]
    # Leave the end unwritten if the record of a long operation has been overwritten.
    if not evicted_open or evicted_open.pop(number, None) is None or words[word] == number:
        words[end_word] = monotonic_ns()
    theirs = words[neighbours]  # Compare again, because the neighbour may not have called before the first comparison.
    if theirs != fingerprint and theirs ^ fingerprint < _NEXT:
        break_off(entry)
        raise RanksDisagree(_difference(number))


def break_off(entry: Entry) -> None:
    """Refuse all later operations of the sequence, because some ranks may not have carried out this one."""
    if entry[5] is not None and not entry[5].is_alone:
        entry[5].is_broken, entry[5].broken_from = True, min(entry[5].broken_from, entry[4])


def end_launched(entry: Entry) -> None:
    """End a launched operation: its record may be overwritten by now, and ``stop`` may have removed the board."""
    board = status_board.current
    if board is not None:
        if board.words[entry[1]] != entry[0]:
            # The word for the end now belongs to another operation's record, but the comparison still has to follow.
            entry = entry[0], entry[1], board.scrap_word, *entry[3:]
        end(entry)


def fail(entry: Entry) -> None:
    """Record the failure of an operation that has not ended."""
    number, word, end_word = entry[:3]
    if (board := status_board.current) is None:
        return
    evicted_open.pop(number, None)
    # Skip a record that belongs to another operation, and an operation that ``end`` has ended with a difference.
    if board.words[word] == number and board.words[end_word] < board.words[word + status_board.LAUNCHED]:
        board.words[word + status_board.NAMES] |= status_board.HAS_FAILED
        board.words[end_word] = monotonic_ns()


def _difference(number: int) -> str:
    board = status_board.current
    mine = None if board is None else find_record(board, number)
    text = "" if board is None or mine is None else sequences.difference(board, mine)
    return text or "the ranks call different operations"


def find_record(board: Board, number: int) -> Record | None:
    """Return a record of this rank; None if it was overwritten, unless its operation is under way."""
    return board.record(number) or evicted_open.get(number)


def under_way(board: Board) -> set[int]:
    """Return the numbers of the operations that this process carries out or waits for."""
    return called(board).union(tuple(backoff.active.values()))


def called(board: Board) -> set[int]:
    """Return the numbers of the operations that the program's threads carry out."""
    numbers = {each.number for each in map(board.record, _open(board)) if each and not sequences.is_freed(board, each)}
    numbers.update(number for number, each in tuple(evicted_open.items()) if not sequences.is_passed(board, each))
    late = (number for number, size in tuple(backoff.unhurried.values()) if not _may_arrive(board, number, size))
    return numbers.union(late)


def _may_arrive(board: Board, number: int, size: int) -> bool:
    """Return whether a missing rank is at work or out of sight, and no missing rank is already in ``stop``."""
    mine = find_record(board, number)
    if mine is None:
        return True
    missing = sequences.behind(board, mine)
    # A rank in ``stop`` calls no more operations.
    if any(board.get(status_board.HAS_LEFT, index) == status_board.STOPPING for index in missing):
        return False
    is_in_sight = len(board.slots_of.get(mine.slot, ())) == size
    return not is_in_sight or any(_has_called_lately(board, index) for index in missing)


def _has_called_lately(board: Board, index: int) -> bool:
    last = next(iter(board.records(index)), None)
    return last is not None and board.now(index) - max(last.launched, abs(last.ended)) < _LATELY_NS


def _open(board: Board) -> set[int]:
    """Return the numbers of the records that have not ended and that were not launched for another thread."""
    # Look at all records with numpy at once, because this runs within a call.
    columns = board.columns
    is_open = (columns[status_board.ENDED] < columns[status_board.LAUNCHED]) & (
        columns[status_board.NAMES] & IS_LAUNCH == 0
    )
    return set(columns[0][is_open].tolist()) if is_open.any() else set()


def _save_open(board: Board) -> None:
    """Copy the records of open operations before other records overwrite them, except those that are passed.

    Operations without a sequence number, such as messages, are not copied. If an exception had left one without an
    end, no later call would show that it is over. So a hang in a message is invisible once its record is overwritten.
    """
    records = [*filter(None, map(board.record, _open(board))), *evicted_open.values()]
    evicted_open.clear()
    evicted_open.update(
        {each.number: each for each in records if sequences.is_numbered(each) and not sequences.is_passed(board, each)}
    )


def _look_up(board: Board, operation: Recorded, sequence: CallSequence, frame: Any) -> tuple[int, int]:
    """Return (NAMES of a call's record, its checksum); cache both for frames of the program, not of the package."""
    code, parts = frame.f_code, operation.fingerprint
    text, checksum = _text(board, _without_counterparts(operation) if parts is None else parts)
    site = _site(board, frame)
    # Cache a call only if the frame itself is the site, because one line of the package serves many lines of programs.
    names = (sequence.index + 1) << 2 * STRING_BITS | text << STRING_BITS | site
    if board.sites.get((id(code), frame.f_lasti), (0,))[0] == site and parts is not None:
        if len(board.calls) > MOST_CALLS_KEPT:
            board.calls.clear()
        board.calls[id(code) + frame.f_lasti] = code, parts, sequence, names, checksum
    return names, checksum


def _without_counterparts(operation: Recorded) -> tuple[Any, ...]:
    """Return the parts of the text for an operation without a fingerprint; a message has its source or destination."""
    if isinstance(operation, Plain):
        return (operation.name,)
    parts = operation.name, operation.flavour.name, 0, operation.dtype or "object"
    preposition = {"send": "to", "recv": "from"}.get(operation.name)
    return parts if preposition is None else (*parts, preposition, operation.others[-1])


def _text(board: Board, parts: tuple[Any, ...]) -> tuple[int, int]:
    """Return (string, checksum) of an operation. The string omits the size, because the record holds the size."""
    if (cached := board.texts.get(parts)) is not None:
        return cached
    if len(board.texts) > MOST_CALLS_KEPT:
        board.texts.clear()  # The strings stay on the board, where ``keep_string`` finds them again.
    flat = [part for each in parts for part in (each if isinstance(each, tuple) else (each,))]
    shown = [part for index, part in enumerate(flat) if index != _SIZE_INDEX or not isinstance(part, int)]
    text = board.keep_string(" ".join(str(part) for part in shown), str(parts[0]))
    checksum = zlib.crc32(repr(parts).encode(errors="backslashreplace")) & (1 << CHECKSUM_BITS) - 1
    board.texts[parts] = result = text, checksum
    return result


def _site(board: Board, frame: Any) -> int:
    """Return the string of file and line of the nearest caller outside the package, or else of the outermost caller."""
    while (site := (board.sites.get((id(frame.f_code), frame.f_lasti)) or _name_frame(board, frame))[0]) < 0:
        # A thread of torch's has no caller outside. The result is not cached, because elsewhere the same line has one.
        if frame.f_back is None:
            return board.keep_string(f"{frame.f_code.co_filename}:{frame.f_lineno}", frame.f_code.co_filename)
        frame = frame.f_back
    return site


def _name_frame(board: Board, frame: Any) -> tuple[int, CodeType]:
    """Return a frame's string (-1 for the package's own frames) and its code, kept because ids of freed code recur."""
    if len(board.sites) > MOST_CALLS_KEPT:
        board.sites.clear()
        board.calls.clear()
    code, name = frame.f_code, frame.f_code.co_filename
    is_own = name.startswith(_PACKAGE) and not name.startswith(_BENCH)
    site = -1 if is_own else board.keep_string(f"{name}:{frame.f_lineno} in {code.co_name}", name)
    board.sites[id(code), frame.f_lasti] = result = site, code
    return result
