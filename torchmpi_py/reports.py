"""What the ranks of a node are doing, in words, from the board: for reports, and for errors that name who is late."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback

from torchmpi_py import board, processes, watch
from torchmpi_py.board import (
    CHECKSUM_BITS,
    ENDING,
    HAS_LEFT,
    MARKS_PER_ROW,
    NAMESPACE,
    PROCESS,
    STARTED,
    STOPPED,
    STOPPING,
    WORLD_RANK,
    Board,
    Record,
)
from torchmpi_py.watch import Noted

_MOST_NAMED = 4
_STATES = {"T": "its process is stopped (SIGSTOP)", "t": "a debugger has stopped its process"}
_FRAMES = 8


def is_dead(used: Board, index: int) -> bool:
    """Whether a rank's process has ended, and not by leaving in order."""
    process = _process(used, index)
    if used.get(HAS_LEFT, index) == STOPPED or process is processes.UNKNOWN:
        return False
    return process is None or process.is_dead or process.started != used.get(STARTED, index)


def descriptor(used: Board, index: int) -> int | None:
    """A descriptor that is ready when a rank's process ends; None where there are none."""
    if used.get(NAMESPACE, index) != used.get(NAMESPACE):
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


def stuck(used: Board, number: int) -> Record | None:
    """What this rank waits for: the oldest that has begun and not ended, else the one that is waited for."""
    begun = [record for record in used.records(used.index) if record.begun and not record.ended]
    return begun[-1] if begun else used.record(number)


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
    if late is not None and late.row >= 0 and late.position > 0:
        same = late if index == used.index else used.counterpart(late.row, late.position, index)
        if same is not None:
            state = "is through with it" if same.ended > 0 else "has failed in it" if same.ended else "is there too"
            words = "" if same.what == late.what else f", but as {same.what}"
            return f"{state}{words}, called at {same.site}"
        if index in used.rows_of.get(late.row, {}):
            missing = "has not come to it; "
    return f"{missing}{_last(used, index)}"


def _last(used: Board, index: int) -> str:
    records, now = used.records(index), time.time_ns()
    begun = [record for record in records if record.begun and not record.ended]
    if begun:
        last = begun[-1]
        return f"in {last.what} for {(now - last.begun) / 1e9:.1f} s, called at {last.site}"
    if not records:
        return "has called nothing yet"
    last = records[0]
    how = "launched" if not last.ended else "complete" if last.ended > 0 else "failed"
    ago = (now - abs(last.ended or last.launched)) / 1e9
    return f"its last, {last.what}, was {how} {ago:.1f} s ago, called at {last.site}"


def death(used: Board, index: int) -> str:
    """In what, or after what, a rank has died."""
    records = used.records(index)
    begun = [record for record in records if record.begun and not record.ended]
    if not records:
        return f"{name(used, index)} died before its first operation"
    last = begun[-1] if begun else records[0]
    return f"{name(used, index)} died {'in' if begun else 'after'} {last.what}, called at {last.site}"


def deaths(within_seconds: float) -> str:
    """Which ranks of this node have died; empty if none has, nor does ``within_seconds``.

    What a process has open is closed, and others notice that, some time before it has ended.
    """
    used, until = board.current, time.monotonic() + within_seconds
    while used is not None:
        dead = [index for index in by_rank(used) if is_dead(used, index)]
        if dead or time.monotonic() > until:
            return "; ".join(death(used, index) for index in dead[:_MOST_NAMED])
        time.sleep(0.01)
    return ""


def late(noted: Noted) -> str:
    """Which ranks keep an operation of this rank, as far as can be seen from this node; empty if that is not known."""
    used = board.current
    record = None if used is None else used.record(noted[0])
    if used is None or record is None:
        return ""
    told = []
    others = used.rows_of.get(record.row, {})
    for index in by_rank(used):
        words = doing(used, index, record)
        is_there = words.startswith(("is there too, called", "is through with it, called"))
        if index == used.index or index not in others or is_there:
            continue
        matter = trouble(used, index)
        told.append(f"{name(used, index)}: {matter + '; ' if matter else ''}{words}")
    if len(told) > _MOST_NAMED:
        told[_MOST_NAMED:] = [f"{len(told) - _MOST_NAMED} more"]
    return "; ".join(told) or "The ranks of this node are all there."


def sides(noted: Noted) -> tuple[str, bool]:
    """What the ranks of this node call at the place of an operation, and where; and whether one differs from this one.

    Those that differ are told, or all if none is known to; empty where nothing can be seen.
    """
    number, *_, mark, sequence = noted
    used = board.current
    mine = None if used is None else used.record(number)
    if used is None or mine is None or sequence is None:
        return "", False
    same: list[str] = []
    different: list[str] = []
    for index in by_rank(used):
        row = used.rows_of.get(sequence.index, {}).get(index)
        theirs = None if row is None else used.counterpart(sequence.index, mine.position, index)
        if row is None or theirs is None or index == used.index:
            continue
        their_mark = used.words[used.first_mark(index, row) + mine.position % MARKS_PER_ROW]
        if their_mark >> CHECKSUM_BITS == mark >> CHECKSUM_BITS:
            (same if their_mark == mark else different).append(f"{name(used, index)} {watch.calls(theirs)}")
    told = [f"this rank {watch.calls(mine)}", *(different or same)[:_MOST_NAMED]]
    return "; ".join(told), bool(different)


def disagreement(used: Board, number: int) -> str:
    """In what other ranks of this node differ from this rank's operation; empty if they do not, or none has come."""
    mine = used.record(number)
    if mine is None or mine.row < 0 or not mine.position:
        return ""
    marks = {
        index: used.words[used.first_mark(index, row) + mine.position % MARKS_PER_ROW]
        for index, row in used.rows_of.get(mine.row, {}).items()
    }
    own = marks.get(used.index, 0)
    for index, mark in marks.items():
        if mark != own and mark ^ own < 1 << CHECKSUM_BITS:
            theirs = used.counterpart(mine.row, mine.position, index)
            told = f"{name(used, used.index)} {watch.calls(mine)}; {name(used, index)} {watch.calls(theirs)}"
            return f"operation {mine.position} of this communicator is not the same on all ranks: {told}"
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


def _process(used: Board, index: int) -> processes.Process | None:
    if used.get(NAMESPACE, index) != used.get(NAMESPACE):
        return processes.UNKNOWN  # its number means nothing here
    return processes.look(used.get(PROCESS, index))
