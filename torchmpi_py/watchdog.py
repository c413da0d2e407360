"""The watchdog: a thread that notices when an operation takes too long, and reports which rank keeps it.

It sleeps, and looks twice a second at what this process carries out, or waits for. An operation ages by the time
between two looks, but not by more than a second, so that a job that was stopped as a whole, or a clock that was set,
does not make it old. When one is older than ``Tuning.report_seconds``, one rank of the node writes a report to
standard error, from the board: what each rank of the node is doing or did last, whether its process is there, and
where its threads stand, which the watchdogs of the other ranks write down when they are asked. When one is older than
``Tuning.deadline_seconds``, the job ends after the report, unless the operation has completed meanwhile.
"""

from __future__ import annotations

import json
import logging
import os
import pathlib
import sys
import tempfile
import threading
import time
import traceback

from torchmpi_py import board, exits, watch
from torchmpi_py.board import HAS_LEFT, NAMESPACE, PROCESS, REPORTED, TEXT_GIVEN, TEXT_WANTED, WORLD_RANK, Board, Record

logger = logging.getLogger("torchmpi_py")

_LOOK_SECONDS = 0.5
_MOST_A_LOOK_SECONDS = 1.0
_ANSWER_SECONDS = 3.0
_TURN_SECONDS = 0.2
_LONGEST_TURN_SECONDS = 2.0
_AGAIN_SECONDS = 30.0
EXIT_CODE = 1


class Watchdog:
    """Watches this process, from now until ``stop``."""

    def __init__(self, used: Board, report_seconds: int, deadline_seconds: int) -> None:
        self._board = used
        self._report_seconds, self._deadline_seconds = report_seconds, deadline_seconds
        self._ages: dict[int, float] = {}
        self._reported: set[int] = set()
        self._ending = threading.Event()
        watch.active.clear()
        self._thread = threading.Thread(target=self._loop, name="torchmpi_py-watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End it."""
        self._ending.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _loop(self) -> None:
        before = time.monotonic()
        while not self._ending.wait(_LOOK_SECONDS):
            try:
                now = time.monotonic()
                self._grow_older(min(now - before, _MOST_A_LOOK_SECONDS))
                before = now
                self._answer()
                self._judge()
            except Exception:
                logger.exception("the watchdog failed, and goes on")

    def _grow_older(self, seconds: float) -> None:
        self._ages = {number: self._ages.get(number, 0.0) + seconds for number in tuple(watch.active)}

    def _answer(self) -> None:
        """Write down where the threads stand, if somebody has asked for it since the last time."""
        wanted = self._board.get(TEXT_WANTED)
        if wanted != self._board.get(TEXT_GIVEN):
            self._board.write_text(_stacks())
            self._board.put(TEXT_GIVEN, wanted)

    def _judge(self) -> None:
        """Report what is too old, if this rank is the one to do it, and end the job if that is wanted."""
        oldest = max(self._ages, key=self._ages.__getitem__, default=None)
        if oldest is None:
            return
        age = self._ages[oldest]
        is_over = 0 < self._deadline_seconds <= age
        is_due = 0 < self._report_seconds <= age and oldest not in self._reported
        if not (is_over or is_due):
            return
        self._reported.add(oldest)
        if self._is_told_by_another():
            return
        used = self._board
        used.put(REPORTED, time.monotonic_ns())
        why = f"an operation is not complete after {age:.0f} s"
        _say(f"{self._report(why, oldest)}\nthe last {board.NUM_RECORDS} operations of each rank: {_dump(used)}")
        if is_over and not self._ending.is_set():
            if oldest in watch.active:
                exits.abort(EXIT_CODE)
            else:
                _say("torchmpi_py: it has completed meanwhile, and the job goes on")

    def _is_told_by_another(self) -> bool:
        """Wait for this rank's turn; whether a rank of the node has reported shortly before."""
        used = self._board
        until = time.monotonic() + min(_TURN_SECONDS * used.index, _LONGEST_TURN_SECONDS)
        while time.monotonic() < until and not self._ending.wait(0.02):
            self._answer()
        newest = max(used.get(REPORTED, index) for index in used.indices)
        return newest > 0 and time.monotonic_ns() - newest < _AGAIN_SECONDS * 1e9

    def _report(self, why: str, number: int) -> str:
        """What the ranks of this node are doing. Asks them where they stand, and waits some seconds for the answers."""
        used, wanted = self._board, time.monotonic_ns()
        for index in used.indices:
            used.put(TEXT_WANTED, wanted, index)
        until = time.monotonic() + _ANSWER_SECONDS
        while True:
            self._answer()
            silent = [index for index in used.indices if used.get(TEXT_GIVEN, index) < wanted]
            if time.monotonic() > until or all(_trouble(used, index) for index in silent) or self._ending.is_set():
                break
            time.sleep(0.02)
        stuck = _stuck(used, number)
        me = used.get(WORLD_RANK)
        lines = [f"torchmpi_py: report of rank {me}: {why}"]
        if stuck is not None:
            lines.append(f"rank {me} waits in {stuck.what}, called at {stuck.site}")
        for index in sorted(used.indices, key=lambda index: used.get(WORLD_RANK, index)):
            lines += _of_rank(used, index, stuck, is_silent=index in silent)
        return "\n".join(lines)


def _stuck(used: Board, number: int) -> Record | None:
    """What this rank waits for: the oldest that has begun and not ended, else the one that is waited for."""
    records = used.records(used.index)
    begun = [record for record in records if record.begun and not record.ended]
    return begun[-1] if begun else next((record for record in records if record.number == number), None)


def _of_rank(used: Board, index: int, stuck: Record | None, *, is_silent: bool) -> list[str]:
    """What is known of a rank."""
    trouble = _trouble(used, index)
    head = f"rank {used.get(WORLD_RANK, index)} (process {used.get(PROCESS, index)})"
    lines = [f"{head}: {trouble + '; ' if trouble else ''}{_doing(used, index, stuck)}"]
    if not is_silent:
        lines += [f"    {line}" for line in used.read_text(index).splitlines()]
    elif not trouble:
        lines.append("    does not say where it stands: it is in a call that does not let Python's other threads run")
    return lines


def _doing(used: Board, index: int, stuck: Record | None) -> str:
    records, now = used.records(index), time.time_ns()
    if stuck is not None and stuck.row >= 0:
        same = stuck if index == used.index else used.counterpart(stuck.row, stuck.position, index)
        if same is not None:
            state = "is through with it" if same.ended > 0 else "has failed in it" if same.ended else "is there too"
            words = "" if same.what == stuck.what else f", but as {same.what}"
            return f"{state}{words}, called at {same.site}"
    elsewhere = [record for record in records if record.begun and not record.ended]
    if elsewhere:
        last = elsewhere[-1]
        return f"has not come to it; in {last.what} for {(now - last.begun) / 1e9:.1f} s, called at {last.site}"
    if not records:
        return "has called nothing yet"
    last = records[0]
    how = "launched" if not last.ended else "complete" if last.ended > 0 else "failed"
    ago = (now - abs(last.ended or last.launched)) / 1e9
    return f"has not come to it; its last, {last.what}, was {how} {ago:.1f} s ago, called at {last.site}"


def _trouble(used: Board, index: int) -> str:
    """What is the matter with a rank's process, if something is."""
    if used.get(HAS_LEFT, index):
        return "is in mpi.stop()"
    if not os.path.isdir("/proc/self") or used.get(NAMESPACE, index) != used.get(NAMESPACE):
        return ""  # its number means nothing here
    try:
        state = pathlib.Path(f"/proc/{used.get(PROCESS, index)}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "its process is gone"
    return {"T": "its process is stopped (SIGSTOP)", "t": "a debugger has stopped its process", "Z": "it has died"}.get(
        state, ""
    )


def _stacks() -> str:
    """Where the threads of this process stand, the main one first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main, own = threading.main_thread().ident, threading.get_ident()
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != main)
    return "".join(
        f"{names.get(ident, 'thread')}:\n{''.join(traceback.format_stack(frame)[-8:])}"
        for ident, frame in frames
        if ident != own
    )


def _say(text: str) -> None:
    if sys.stderr is not None:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


def _dump(used: Board) -> str:
    """The records of all ranks of the node, in a file."""
    content = {used.get(WORLD_RANK, index): [r._asdict() for r in used.records(index)] for index in used.indices}
    try:
        folder = os.environ.get("TORCHMPI_DUMP_DIR") or tempfile.gettempdir()
        file, path = tempfile.mkstemp(prefix="torchmpi_py-hang-", suffix=".json", dir=folder)
        with open(file, "w", encoding="utf-8") as stream:
            json.dump(content, stream, indent=1)
        return path
    except OSError as error:
        return f"not written ({error})"


_current: Watchdog | None = None


def start(report_seconds: int, deadline_seconds: int) -> None:
    """Watch this process."""
    global _current
    assert board.current is not None, "start has made it"
    _current = Watchdog(board.current, report_seconds, deadline_seconds)


def leaving() -> None:
    """This rank has called ``mpi.stop``; who waits for it in an operation shall know."""
    if board.current is not None:
        board.current.put(HAS_LEFT, 1)


def stop() -> None:
    """End it."""
    global _current
    if _current is not None:
        _current.stop()
        _current = None
