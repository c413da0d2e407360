"""What the ranks of a node are doing, in words, from the board: for reports, and for errors that name who is late."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Sequence

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


def is_dead(used: Board, index: int) -> bool:
    """Whether a rank's process has ended, and not by leaving in order."""
    process = _process(used, index)
    if used.get(HAS_LEFT, index) == STOPPED or process is status_board.UNKNOWN_PROCESS:
        return False
    started = used.get(STARTED, index)  # 0 where that could not be found out
    return process is None or process.is_dead or (started != 0 and process.started != started)


def descriptor(used: Board, index: int) -> int | None:
    """A descriptor that is ready when a rank's process ends; None where there are none."""
    if not _is_visible(used, index):
        return None
    try:
        return os.pidfd_open(used.get(PROCESS, index))
    except (AttributeError, OSError):
        return None


def trouble(used: Board, index: int) -> str:
    """What is the matter with a rank's process, if something is."""
    if is_dead(used, index):
        return "its process is gone"
    if used.get(HAS_LEFT, index) == STOPPED:
        return "has left by mpi.stop()"
    process = _process(used, index)
    found = "" if process is None else _STATES.get(process.state, "")
    if found:
        return found
    return {STOPPING: "is in mpi.stop()", ENDING: "is ending the job"}.get(used.get(HAS_LEFT, index), "")


def name(used: Board, index: int) -> str:
    """Which rank, and which process."""
    return f"rank {used.get(WORLD_RANK, index)} (process {used.get(PROCESS, index)})"


def by_rank(used: Board) -> list[int]:
    """The local ranks that can be seen, in the order of their ranks."""
    return sorted(used.indices, key=lambda index: used.get(WORLD_RANK, index))


def blocking(used: Board, waited: Record) -> Record | None:
    """What keeps an operation that is queued: the oldest of those before it that the same thread has begun."""
    if not waited.is_queued:
        return None
    before = [record for record in used.records(used.index) if record.is_launch and record.number < waited.number]
    return next((record for record in reversed(before) if record.is_open), None)


def of_node(
    used: Board, why: str, number: int | None = None, *, silent: Sequence[int] = (), has_text: bool = True
) -> str:
    """The report: why, what this rank waits for, if it waits, and what is known of each rank."""
    own, lines = f"rank {used.get(WORLD_RANK)}", []
    late = None if number is None else journal.find_record(used, number)
    if late is not None:
        lines.append(f"{own} waits in {late.what}, called at {late.site}")
        if (first := blocking(used, late)) is not None:
            lines[-1] += f"; before it comes {first.what}, called at {first.site}"
            late = first
    lines += [of_rank(used, i, late, is_silent=i in silent, has_text=has_text) for i in by_rank(used)]
    return "\n".join([f"torchmpi_py: report of {own}: {why}", *lines])


def of_rank(used: Board, index: int, late: Record | None, *, is_silent: bool = False, has_text: bool = True) -> str:
    """What is known of a rank: seen from the operation that is late, if one is."""
    matter = trouble(used, index)
    lines = [f"{name(used, index)}: {matter + '; ' if matter else ''}{doing(used, index, late)}"]
    if has_text and not is_silent:
        lines += [f"    {line}" for line in used.read_text(index).splitlines()]
    elif has_text and not matter:
        lines.append("    does not say where it stands: it is in a call that does not let Python's other threads run")
    return "\n".join(lines)


def doing(used: Board, index: int, late: Record | None) -> str:
    """What a rank does, or did last."""
    missing = ""
    if late is not None and late.slot >= 0 and late.sequence_number > 0:
        theirs = late if index == used.index else used.counterpart(late.slot, late.fingerprint, index)
        if theirs is not None:
            state = "is through with it" if theirs.ended > 0 else "has failed in it" if theirs.ended else "is there too"
            words = "" if theirs.what == late.what else f", but as {theirs.what}"
            return f"{state}{words}, called at {theirs.site}"
        if index in used.slots_of.get(late.slot, {}):
            missing = "has not come to it; "
    return f"{missing}{_last(used, index)}"


def _last(used: Board, index: int) -> str:
    records = used.records(index)
    if (last := _current(records)) is not None:
        return f"in {last.what} for {(used.now(index) - last.begun) / 1e9:.1f} s, called at {last.site}"
    if not records:
        return "has called nothing yet"
    last = records[0]
    how = "launched" if not last.ended else "complete" if last.ended > 0 else "failed"
    ago = (used.now(index) - abs(last.ended or last.launched)) / 1e9
    return f"its last, {last.what}, was {how} {ago:.1f} s ago, called at {last.site}"


def _current(records: Sequence[Record]) -> Record | None:
    """What a rank is in: what it has called, rather than what it has launched, and may not wait for."""
    begun = [record for record in reversed(records) if record.is_open]
    return min(begun, key=lambda record: record.is_launch, default=None)


def death(used: Board, index: int) -> str:
    """In what, or after what, a rank has died."""
    records = used.records(index)
    if not records:
        return f"{name(used, index)} died before its first operation"
    current = _current(records)
    last = current or records[0]
    return f"{name(used, index)} died {'in' if current else 'after'} {last.what}, called at {last.site}"


def deaths(within_seconds: float) -> str:
    """Which ranks of this node have died; empty if none has, nor does ``within_seconds``.

    What a process has open is closed, and others notice that, some time before it has ended.
    """
    used, until = status_board.current, time.monotonic() + within_seconds
    while used is not None:
        dead = [index for index in by_rank(used) if is_dead(used, index)]
        if dead or time.monotonic() > until:
            return "; ".join(death(used, index) for index in dead[:_MOST_NAMED])
        time.sleep(0.01)
    return ""


def late(entry: Entry, only: Sequence[int] | None = None) -> str:
    """Which ranks keep an operation of this rank, as far as can be seen from this node; empty if that is not known.

    Of a message, ``only`` those that it is from or to.
    """
    used = status_board.current
    record = None if used is None else journal.find_record(used, entry[0])
    if used is None or record is None or only == ():
        return ""
    told = []
    others = used.slots_of.get(record.slot, {})
    for index in by_rank(used):
        words = doing(used, index, record)
        is_there = words.startswith(("is there too, called", "is through with it, called"))
        if index == used.index or index not in (others if only is None else only) or is_there:
            continue
        matter = trouble(used, index)
        told.append(f"{name(used, index)}: {matter + '; ' if matter else ''}{words}")
    if len(told) > _MOST_NAMED:
        told[_MOST_NAMED:] = [f"{len(told) - _MOST_NAMED} more"]
    return "; ".join(told) or "The ranks of this node are all there."


def sides(entry: Entry) -> tuple[str, bool]:
    """What the ranks of this node call at the place of an operation, and where; and whether one differs from this one.

    Those that differ are told, or all if none is known to; empty where nothing can be seen.
    """
    used = status_board.current
    mine = None if used is None else journal.find_record(used, entry[0])
    if used is None or mine is None or not mine.sequence_number:
        return "", False
    known = [side for side in sequences.sides(used, mine) if side.record is not None or not side.is_same]
    different = [side for side in known if not side.is_same]
    return sequences.describe_sides(used, mine, different or known), bool(different)


def disagreement(used: Board, number: int) -> str:
    """In what other ranks of this node differ from this rank's operation; empty if they do not, or none has come."""
    mine = journal.find_record(used, number)
    return "" if mine is None else sequences.difference(used, mine)


def deserted(used: Board, number: int) -> str:
    """Which rank of this node will not come to this rank's operation, for it is in ``mpi.stop`` without it; or ""."""
    mine = journal.find_record(used, number)
    if mine is None:
        return ""
    for index in sequences.behind(used, mine):
        if used.get(HAS_LEFT, index) == STOPPING:
            return f"{name(used, index)} has come to its end, and will not come to {mine.what}, called at {mine.site}"
    return ""


def stacks() -> str:
    """Where the threads of this process stand, the main one first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main, own = threading.main_thread().ident, threading.get_ident()
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != main)
    return "".join(
        f"{names.get(ident, 'thread')}:\n{''.join(traceback.format_stack(frame)[-_FRAMES:])}"
        for ident, frame in frames
        if ident != own
    )


def _is_visible(used: Board, index: int) -> bool:
    """Whether the number of a rank's process means anything here."""
    return used.get(NAMESPACE) != 0 and used.get(NAMESPACE, index) == used.get(NAMESPACE)


def _process(used: Board, index: int) -> status_board.Process | None:
    return (
        status_board.find_process(used.get(PROCESS, index))
        if _is_visible(used, index)
        else status_board.UNKNOWN_PROCESS
    )
