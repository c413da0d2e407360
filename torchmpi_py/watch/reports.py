"""What the ranks of a node do, read from the board: for reports, and for errors that name the late or dead ranks.

``index`` is the local rank of a rank on its node, ``number`` the number of one of this rank's records.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Collection, Sequence
from typing import NamedTuple

from torchmpi_py.core import journal, sequences, status_board
from torchmpi_py.core.journal import Entry
from torchmpi_py.core.status_board import (
    ENDING,
    HAS_LEFT,
    NAMESPACE,
    PROCESS,
    STARTED,
    STOPPED,
    STOPPING,
    WORLD_RANK,
    Board,
    Record,
)

_MOST_NAMED = 4
_STATES = {"T": "its process is stopped (SIGSTOP)", "t": "a debugger has stopped its process"}
_FRAMES = 8


def is_dead(board: Board, index: int) -> bool:
    """Whether a rank's process has ended without leaving in order."""
    process = _process(board, index)
    if board.get(HAS_LEFT, index) == STOPPED or process is status_board.UNKNOWN_PROCESS:
        return False
    started = board.get(STARTED, index)  # 0 where the system does not say
    return process is None or process.is_dead or (started != 0 and process.started != started)


def descriptor(board: Board, index: int) -> int | None:
    """A descriptor that becomes readable when a rank's process ends; None where the system has none."""
    if not _is_visible(board, index):
        return None
    try:
        return os.pidfd_open(board.get(PROCESS, index))
    except (AttributeError, OSError):
        return None


def trouble(board: Board, index: int) -> str:
    """Why a rank's process may not go on; empty if nothing is known to be wrong."""
    if is_dead(board, index):
        return "its process is gone"
    if board.get(HAS_LEFT, index) == STOPPED:
        return "has left by mpi.stop()"
    process = _process(board, index)
    if process is not None and process.state in _STATES:
        return _STATES[process.state]
    return {STOPPING: "is in mpi.stop()", ENDING: "is ending the job"}.get(board.get(HAS_LEFT, index), "")


def _name(board: Board, index: int) -> str:
    """A rank and its process, as reports name them."""
    return f"rank {board.get(WORLD_RANK, index)} (process {board.get(PROCESS, index)})"


def _by_rank(board: Board) -> list[int]:
    """The local ranks that can be seen, ordered by their ranks in the world."""
    return sorted(board.indices, key=lambda index: board.get(WORLD_RANK, index))


def _blocking(board: Board, waited: Record) -> Record | None:
    """The operation that keeps a queued one: the oldest open operation that was launched before it."""
    if not waited.is_queued:
        return None
    before = [record for record in board.records(board.index) if record.is_launch and record.number < waited.number]
    return next((record for record in reversed(before) if record.is_open), None)


class NodeReport(NamedTuple):
    """A report on a node. ``names_missing``: whether it names a rank that has not come to the late operation."""

    text: str
    names_missing: bool


def of_node(
    board: Board, why: str, number: int | None = None, *, silent: Collection[int] = (), has_text: bool = True
) -> NodeReport:
    """The report: the reason, the late operation of this rank (``number``), if there is one, and each rank's activity.

    ``silent``: the ranks that have not given their stacks. ``has_text``: whether the report shows stacks.
    """
    own, lines = f"rank {board.get(WORLD_RANK)}", []
    late = None if number is None else journal.find_record(board, number)
    if late is not None:
        lines.append(f"{own} waits in {late.what}, called at {late.site}")
        if (first := _blocking(board, late)) is not None:
            lines[-1] += f"; before it comes {first.what}, called at {first.site}"
            late = first
    activities = {index: _activity(board, index, late) for index in _by_rank(board)}
    for index, each in activities.items():
        lines.append(_with_trouble(board, index, each.text))
        if has_text and index not in silent:
            lines += [f"    {line}" for line in board.read_text(index).splitlines()]
        elif has_text and not trouble(board, index):
            lines.append(
                "    does not say where it stands: it is in a call that does not let Python's other threads run"
            )
    names_missing = any(each.is_missing for each in activities.values())
    return NodeReport("\n".join([f"torchmpi_py: report of {own}: {why}", *lines]), names_missing)


class _Activity(NamedTuple):
    """What a rank does, or did last, seen from a late operation of this rank."""

    text: str
    is_there: bool = False  # in the same operation, or through with it
    is_missing: bool = False  # of the operation's communicator, and not come to it


def _activity(board: Board, index: int, late: Record | None) -> _Activity:
    """What a rank does; seen from the operation that is late, if one is."""
    if late is None or late.slot < 0 or late.sequence_number == 0:
        return _Activity(_last(board, index))
    theirs = late if index == board.index else board.counterpart(late.slot, late.fingerprint, index)
    if theirs is not None:
        state = "is through with it" if theirs.ended > 0 else "has failed in it" if theirs.ended else "is there too"
        is_same = theirs.what == late.what
        call = "" if is_same else f", but as {theirs.what}"
        return _Activity(f"{state}{call}, called at {theirs.site}", is_there=is_same and theirs.ended >= 0)
    if index in board.slots_of.get(late.slot, {}):
        return _Activity(f"has not come to it; {_last(board, index)}", is_missing=True)
    return _Activity(_last(board, index))


def _last(board: Board, index: int) -> str:
    records = board.records(index)
    if (last := _current(records)) is not None:
        return f"in {last.what} for {(board.now(index) - last.begun) / 1e9:.1f} s, called at {last.site}"
    if not records:
        return "has called nothing yet"
    last = records[0]
    how = "launched" if not last.ended else "complete" if last.ended > 0 else "failed"
    ago = (board.now(index) - abs(last.ended or last.launched)) / 1e9
    return f"its last, {last.what}, was {how} {ago:.1f} s ago, called at {last.site}"


def _current(records: Sequence[Record]) -> Record | None:
    """The open operation of a rank: a call rather than a launched operation, which the rank may not wait for."""
    begun = [record for record in reversed(records) if record.is_open]
    return min(begun, key=lambda record: record.is_launch, default=None)


def _with_trouble(board: Board, index: int, text: str) -> str:
    matter = trouble(board, index)
    return f"{_name(board, index)}: {matter + '; ' if matter else ''}{text}"


def death(board: Board, index: int) -> str:
    """In which operation, or after which, a rank has died."""
    records = board.records(index)
    if not records:
        return f"{_name(board, index)} died before its first operation"
    current = _current(records)
    last = current or records[0]
    return f"{_name(board, index)} died {'in' if current else 'after'} {last.what}, called at {last.site}"


def deaths(within_seconds: float) -> str:
    """The dead ranks of this node; empty if none has died, nor dies ``within_seconds``.

    The system closes the connections of a dying process, and other ranks notice it, some time before the process ends.
    """
    board, until = status_board.current, time.monotonic() + within_seconds
    while board is not None:
        dead = [index for index in _by_rank(board) if is_dead(board, index)]
        if dead or time.monotonic() > until:
            return "; ".join(death(board, index) for index in dead[:_MOST_NAMED])
        time.sleep(0.01)
    return ""


def late(entry: Entry, only: Sequence[int] | None = None) -> str:
    """The ranks that this rank's operation waits for, as far as this node shows; empty if nothing is known.

    ``only``: for a message, the local ranks of its sender and its receiver.
    """
    board = status_board.current
    record = None if board is None else journal.find_record(board, entry[0])
    if board is None or record is None or only == ():
        return ""
    candidates = board.slots_of.get(record.slot, {}) if only is None else only
    others = [index for index in _by_rank(board) if index != board.index and index in candidates]
    activities = {index: _activity(board, index, record) for index in others}
    found = [_with_trouble(board, index, each.text) for index, each in activities.items() if not each.is_there]
    if len(found) > _MOST_NAMED:
        found[_MOST_NAMED:] = [f"{len(found) - _MOST_NAMED} more"]
    return "; ".join(found) or "The ranks of this node are all there."


class Sides(NamedTuple):
    """What ranks of this node call in the place of an operation. ``differ``: whether one differs from this rank's."""

    text: str
    differ: bool


def sides(entry: Entry) -> Sides:
    """The calls of the ranks of this node in the place of an operation, and where the calls are.

    The text has the ranks that differ, or all ranks if none is known to; it is empty where nothing can be seen.
    """
    board = status_board.current
    mine = None if board is None else journal.find_record(board, entry[0])
    if board is None or mine is None or not mine.sequence_number:
        return Sides("", False)
    known = [side for side in sequences.sides(board, mine) if side.record is not None or not side.is_same]
    different = [side for side in known if not side.is_same]
    return Sides(sequences.describe_sides(board, mine, different or known), bool(different))


def disagreement(board: Board, number: int) -> str:
    """The ranks of this node that call something else in the place of an operation; empty if none is known to."""
    mine = journal.find_record(board, number)
    return "" if mine is None else sequences.difference(board, mine)


def deserted(board: Board, number: int) -> str:
    """The rank of this node that is in ``mpi.stop()`` without having come to an operation; empty if there is none."""
    mine = journal.find_record(board, number)
    if mine is None:
        return ""
    for index in sequences.behind(board, mine):
        if board.get(HAS_LEFT, index) == STOPPING:
            return f"{_name(board, index)} has come to its end, and will not come to {mine.what}, called at {mine.site}"
    return ""


def stacks() -> str:
    """The innermost frames of the threads of this process, the main thread first, but for the calling thread."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main, own = threading.main_thread().ident, threading.get_ident()
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != main)
    return "".join(
        f"{names.get(ident, 'thread')}:\n{''.join(traceback.format_stack(frame)[-_FRAMES:])}"
        for ident, frame in frames
        if ident != own
    )


def _is_visible(board: Board, index: int) -> bool:
    """Whether a rank is in the process namespace of this one, so that its process id has a meaning here."""
    return board.get(NAMESPACE) != 0 and board.get(NAMESPACE, index) == board.get(NAMESPACE)


def _process(board: Board, index: int) -> status_board.Process | None:
    return (
        status_board.find_process(board.get(PROCESS, index))
        if _is_visible(board, index)
        else status_board.UNKNOWN_PROCESS
    )
