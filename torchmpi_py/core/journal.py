"""The journal records and times each operation on the node's board, and compares it with the neighbour's operation.

The idea: each rank writes a record and a fingerprint of every call to memory that its node shares
(``status_board.py``), and reads the fingerprint of one neighbour (``sequences.py``). So a mismatch raises an error in
the call, and any rank can report the last operations of a stopped or dead rank. The alternative is an exchange of
messages before each collective, as in PyTorch's ``TORCH_DISTRIBUTED_DEBUG=DETAIL``. Such an exchange also covers ranks
of other nodes, but it makes each call wait for the slowest rank twice, and a rank that hangs cannot answer. For ranks
of different nodes ``watch/cross_check.py`` compares the records, outside of calls.

The journal adds to the time of every call. So ``record`` and ``end`` call few functions, and a call's texts and
checksum are cached by the call's place in the program. ``python benchmarks/watching.py`` measures the overhead.

An operation is *under way* while a call carries it out: the operation has begun, it has not ended, and its communicator
is not freed. An operation is also under way while a thread waits for it (``backoff.active``). A program that has
requested a future counts as waiting for the operation. ``watch/watchdog.py`` checks the oldest operation under way.
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
_LATELY_NS = 1_000_000_000  # longer than the interval between two checks of the watchdog
_NEXT = 1 << CHECKSUM_BITS  # Fingerprints whose XOR is less than this have equal generations and sequence numbers.
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_BENCH = os.path.join(_PACKAGE, "bench", "")  # Reports treat the bench as a user's program.
MOST_CALLS_KEPT = 4096
_SIZE_INDEX = 2  # index of the number of bytes in ``Recorded.fingerprint``, if all ranks must pass the same size
# The ranks raise these errors together. Other errors come from MPI, from one rank, or from a signal handler.
_AGREED = (TorchMPIError, ValueError, TypeError)
_NO_CALL = (None, ..., None, 0, 0)  # differs from the cached values of every call

Entry = tuple[int, int, int, int, int, CallSequence | None]
"""A recorded operation: number of the record, index of its first word, index of its end time, index of the neighbour's
fingerprint, this rank's fingerprint, and sequence or None. An entry is a plain tuple, because every call creates
one."""

evicted_open: dict[int, Record] = {}
"""Operations under way whose records may have been overwritten by operations of other threads, by number."""


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
    """The implementation that carries out an operation: a flavour."""

    @property
    def name(self) -> str: ...

    @property
    def exchanges_headers(self) -> bool:
        """Whether the ranks exchange headers, by which the flavour compares their calls before any data moves."""


class Recorded(Protocol):
    """The interface of ``Plan`` and ``Plain`` through which the journal and the reports read an operation."""

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
        """The values that must be equal on all ranks; None for an operation that is not compared between ranks."""


class Plain:
    """An operation that is not a collective: a barrier, or a file that all ranks write, for example."""

    exchanges_headers = False
    num_bytes = 0
    dtype, others = None, ()

    def __init__(self, name: str, comm: RecordedGroup, fingerprint: tuple[str] | None) -> None:
        self.name, self.comm, self.fingerprint, self.flavour = name, comm, fingerprint, self


def record(operation: Recorded, thread_role: int, form: int = 0, frame: FrameType | None = None) -> Entry:
    """Record an operation that begins now or is launched now; return its entry.

    ``frame`` is the frame that reports show as the place of the call; the default is the caller of the collective.
    ``form`` is IS_LAUNCH for a launched operation, combined with IS_ASYNCHRONOUS if its counterparts on other ranks
    must be asynchronous too.

    Raise RanksDisagree if the neighbour calls another operation, unless the flavour compares the calls by headers.
    """
    board = status_board.current
    assert board is not None, "operations are recorded between start and stop"
    # 1. Get the texts, slot and checksum of the call, cached from the last call at this place in the program.
    # The default skips our own frames: record(), run or launch, the collective.
    frame = frame or _getframe(2).f_back or _getframe(2)
    code, parts, sequence = frame.f_code, operation.fingerprint, operation.comm.sequences[thread_role]
    known_code, known_parts, known_sequence, names, checksum = board.calls.get(id(code) + frame.f_lasti, _NO_CALL)
    if known_parts != parts or known_sequence is not sequence or known_code is not code:
        names, checksum = _look_up(board, operation, sequence, frame)
    # 2. Write the record. Twice per round through all records, save the open records before they are overwritten.
    number, (begin_byte, word, end_word) = board.next_record()
    now = monotonic_ns()
    if not number & _HALF:
        _save_open(board)
    if parts is None:
        # This operation is not compared: its fingerprint is 0, like the word of the blank slot that stands for theirs.
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
    # 3. Write the fingerprint after the record, so that a reader of the fingerprint finds the record. Then compare.
    words = board.words
    words[mine] = fingerprint
    theirs = words[neighbours]
    # If the neighbour is behind or ahead, its word has another sequence number, so the two calls are not comparable.
    if theirs != fingerprint and theirs ^ fingerprint < _NEXT and not operation.flavour.exchanges_headers:
        fail(entry)
        sequence.is_broken = True  # The neighbour may wait in its operation for this rank, which never joins.
        raise RanksDisagree(_difference(number))._of_call(operation.name, operation.comm)
    return entry


def record_plain(name: str, comm: RecordedGroup, thread_role: int = DIRECT) -> Entry:
    """Record an operation that is not a collective, but that all ranks call in the same order; return its entry.

    The caller must pass the entry to ``end`` or ``fail``.
    """
    return record(Plain(name, comm, (name,)), thread_role)


def record_own(name: str, comm: RecordedGroup) -> Entry:
    """Record a launch by this rank alone, such as a request to a parameter server; return its entry.

    The caller must pass the entry to ``end`` or ``fail``.
    """
    return record(Plain(name, comm, None), DIRECT, IS_LAUNCH)


def run_together(
    name: str, comm: RecordedGroup, step: Callable[[], R], *, is_patient: bool = False, frame: FrameType | None = None
) -> R:
    """Run ``step`` and return its result; record it as an operation in which all ranks of ``comm`` wait for each other.

    Hang detection applies no timeout to an operation that ``is_patient``. See ``record`` for ``frame``.
    """
    return _until_over(record(Plain(name, comm, (name,)), DIRECT, IS_LAUNCH * is_patient, frame), step)


def run_alone(name: str, comm: RecordedGroup, step: Callable[[], R], *, frame: FrameType | None = None) -> R:
    """Run ``step`` and return its result; record it as a wait for ranks of ``comm`` that need not make this call."""
    return _until_over(record(Plain(name, comm, None), DIRECT, frame=frame), step)


def run_while_others_work(name: str, comm: RecordedGroup, step: Callable[[], R]) -> R:
    """Run ``step`` like ``run_together``, at a point where ranks that train asynchronously wait for each other.

    The fastest rank may wait for hours. So the timeout counts only while no missing rank of this node makes calls, as
    ranks that train do. The timeout does not count at all if ranks of other nodes may be missing, because this rank
    cannot see their calls.
    """
    # A launch never counts as late, so the entry in ``unhurried`` alone decides whether this operation does.
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
    """Record that a launched operation begins to run now."""
    board = status_board.current
    if board is not None and board.words[entry[1]] == entry[0]:  # The record may have been overwritten.
        board.words[entry[1] + status_board.BEGUN] = monotonic_ns()


def end(entry: Entry) -> None:
    """Record the end of an operation. Raise RanksDisagree if the neighbour's operation with this number differs."""
    number, word, end_word, neighbours, fingerprint, _ = entry
    words = status_board.current.words  # type: ignore[union-attr]
    # Do not write the end time if another record has overwritten the record of this operation.
    if not evicted_open or evicted_open.pop(number, None) is None or words[word] == number:
        words[end_word] = monotonic_ns()
    theirs = words[neighbours]  # Compare again, because the neighbour may not have called before the first comparison.
    if theirs != fingerprint and theirs ^ fingerprint < _NEXT:
        break_off(entry)
        raise RanksDisagree(_difference(number))


def break_off(entry: Entry) -> None:
    """Refuse all later operations of the sequence, because some ranks may not have carried out this operation."""
    if entry[5] is not None and not entry[5].is_alone:
        entry[5].is_broken, entry[5].broken_from = True, min(entry[5].broken_from, entry[4])


def end_launched(entry: Entry) -> None:
    """End a launched operation, even if its record was overwritten or ``stop`` has removed the board."""
    board = status_board.current
    if board is not None:
        if board.words[entry[1]] != entry[0]:
            # The word for the end time now belongs to another record, but ``end`` still has to compare the calls.
            entry = entry[0], entry[1], board.scrap_word, *entry[3:]
        end(entry)


def fail(entry: Entry) -> None:
    """Record the failure of an operation that has not ended."""
    number, word, end_word = entry[:3]
    if (board := status_board.current) is None:
        return
    evicted_open.pop(number, None)
    # Skip a record that another operation has overwritten, and an operation for which ``end`` wrote a time and raised.
    if board.words[word] == number and board.words[end_word] < board.words[word + status_board.LAUNCHED]:
        board.words[word + status_board.NAMES] |= status_board.HAS_FAILED
        board.words[end_word] = monotonic_ns()


def _difference(number: int) -> str:
    board = status_board.current
    mine = None if board is None else find_record(board, number)
    text = "" if board is None or mine is None else sequences.difference(board, mine)
    return text or "the ranks call different operations"


def find_record(board: Board, number: int) -> Record | None:
    """Return this rank's record with this number; None if it was overwritten and its operation is not under way."""
    return board.record(number) or evicted_open.get(number)


def under_way(board: Board) -> set[int]:
    """Return the record numbers of the operations that this process carries out or waits for."""
    return called(board).union(tuple(backoff.active.values()))


def called(board: Board) -> set[int]:
    """Return the record numbers of the operations that the program's threads carry out."""
    numbers = {each.number for each in map(board.record, _open(board)) if each and not sequences.is_freed(board, each)}
    numbers.update(number for number, each in tuple(evicted_open.items()) if not sequences.is_passed(board, each))
    late = (number for number, size in tuple(backoff.unhurried.values()) if not _may_arrive(board, number, size))
    return numbers.union(late)


def _may_arrive(board: Board, number: int, size: int) -> bool:
    """Return whether the missing ranks may still call the operation with this number.

    This is possible if a missing rank of this node has made a call lately, or if ranks of other nodes may be missing.
    It is not possible if a missing rank is in ``stop``.
    """
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
    """Return the numbers of the records of operations that have not ended and that no other thread carries out."""
    # Select from all records by one numpy expression, because this code runs within a collective call.
    columns = board.columns
    is_open = (columns[status_board.ENDED] < columns[status_board.LAUNCHED]) & (
        columns[status_board.NAMES] & IS_LAUNCH == 0
    )
    return set(columns[0][is_open].tolist()) if is_open.any() else set()


def _save_open(board: Board) -> None:
    """Copy the records of open operations before they are overwritten.

    Skip an operation if this rank has since called a later operation of the same sequence. Also skip operations without
    a sequence number, such as sends and receives. If an exception ends one of them before its end is recorded, no later
    call shows that it is over. So a hang in a send or receive is no longer visible once its record is overwritten.
    """
    records = [*filter(None, map(board.record, _open(board))), *evicted_open.values()]
    evicted_open.clear()
    evicted_open.update(
        {each.number: each for each in records if sequences.is_numbered(each) and not sequences.is_passed(board, each)}
    )


def _look_up(board: Board, operation: Recorded, sequence: CallSequence, frame: Any) -> tuple[int, int]:
    """Return (the word NAMES of a call's record, the call's checksum); cache both if the program made the call."""
    code, parts = frame.f_code, operation.fingerprint
    text, checksum = _text(board, _without_counterparts(operation) if parts is None else parts)
    site = _site(board, frame)
    # Cache only calls from the program itself, because one line of the package serves many lines of programs.
    names = (sequence.index + 1) << 2 * STRING_BITS | text << STRING_BITS | site
    if board.sites.get((id(code), frame.f_lasti), (0,))[0] == site and parts is not None:
        if len(board.calls) > MOST_CALLS_KEPT:
            board.calls.clear()
        board.calls[id(code) + frame.f_lasti] = code, parts, sequence, names, checksum
    return names, checksum


def _without_counterparts(operation: Recorded) -> tuple[Any, ...]:
    """Return the parts of an operation's text if it has no fingerprint, including a message's source or destination."""
    if isinstance(operation, Plain):
        return (operation.name,)
    parts = operation.name, operation.flavour.name, 0, operation.dtype or "object"
    preposition = {"send": "to", "recv": "from"}.get(operation.name)
    return parts if preposition is None else (*parts, preposition, operation.others[-1])


def _text(board: Board, parts: tuple[Any, ...]) -> tuple[int, int]:
    """Return (number of an operation's text on the board, checksum of the operation).

    The text omits the size, because the record contains the size.
    """
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
    """Return the number of the text that shows the nearest caller outside the package, or else the outermost caller."""
    while (site := (board.sites.get((id(frame.f_code), frame.f_lasti)) or _name_frame(board, frame))[0]) < 0:
        # In a thread of torch's, no caller is outside the package. Do not cache the result, because the same line may
        # have such a caller in another thread.
        if frame.f_back is None:
            return board.keep_string(f"{frame.f_code.co_filename}:{frame.f_lineno}", frame.f_code.co_filename)
        frame = frame.f_back
    return site


def _name_frame(board: Board, frame: Any) -> tuple[int, CodeType]:
    """Return the number of a frame's text (-1 for frames of the package) and the frame's code.

    The cache keeps the code alive, because Python uses the id of freed code again.
    """
    if len(board.sites) > MOST_CALLS_KEPT:
        board.sites.clear()
        board.calls.clear()
    code, name = frame.f_code, frame.f_code.co_filename
    is_own = name.startswith(_PACKAGE) and not name.startswith(_BENCH)
    site = -1 if is_own else board.keep_string(f"{name}:{frame.f_lineno} in {code.co_name}", name)
    board.sites[id(code), frame.f_lasti] = result = site, code
    return result
