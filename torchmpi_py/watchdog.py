"""The watchdog: a thread that notices when an operation takes too long, or a rank has died, and reports it.

It sleeps, and looks twice a second at what this process carries out, or waits for. An operation ages by the time
between two looks, but not by more than a second, so that a job that was stopped as a whole, or a clock that was set,
does not make it old. When one is older than ``Tuning.deadline_seconds``, one rank of the node writes a report to
standard error, from the board: what each rank of the node is doing or did last, whether its process is there, and
where its threads stand, which the watchdogs of the other ranks write down when they are asked. Then the job ends,
unless the operation has completed meanwhile, or ``Tuning.at_deadline`` says something else.

It also waits for the end of the processes of the next two ranks of the node (by a descriptor of the process, where the
system has them; else it looks). One that is gone without having left in order is reported at once, and the job ends,
unless it is one that goes on without it (``recovery.py``).

One rank of several that notice the same does it: each claims the report on the board, and the earliest claim holds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import select
import sys
import threading
import time

from torchmpi_py import (
    board,
    communication_thread,
    config,
    exits,
    flight_recorder,
    recovery,
    reports,
    signals,
    waiting,
    watch,
)
from torchmpi_py.board import HAS_LEFT, TEXT_GIVEN, TEXT_WANTED, WORLD_RANK, Board
from torchmpi_py.config import Tuning

logger = logging.getLogger("torchmpi_py")

_LOOK_SECONDS = 0.5
_MOST_A_LOOK_SECONDS = 1.0
_ANSWER_SECONDS = 1.5
_CLAIM_SECONDS = 0.02
_AGAIN_SECONDS = 30.0
_AGAIN_WHEN_ASKED_SECONDS = 1.0
_LAST_SECONDS = 5.0  # for one that is about to end the job
_OTHERS_SECONDS = 1.0  # for another node, where the late rank seems to be, to tell
_NUM_WATCHED = 2
EXIT_CODE = 1


class Watchdog:
    """Watches this process, and its neighbours', from now until ``stop``."""

    def __init__(self, used: Board, tuning: Tuning) -> None:
        self._board = used
        self._deadline_seconds, self._at_deadline = tuning.deadline_seconds, tuning.at_deadline
        self._ages: dict[int, float] = {}
        self._reported: set[int] = set()
        self._gone: dict[int, float] = {}  # neighbours that are gone, and since when that is known
        others = sorted(used.indices, key=lambda index: (index <= used.index, index))[:-1]
        neighbours = others[: 0 if recovery.is_elastic() else _NUM_WATCHED]
        self._lives = {file: index for index in neighbours if (file := reports.descriptor(used, index)) is not None}
        self._suspects = [index for index in neighbours if index not in self._lives.values()]
        self._ending = threading.Event()
        self._wake, self._waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        waiting.active.clear()
        signals.listen(self._waker)
        self._thread = threading.Thread(target=self._loop, name="torchmpi_py-watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End it."""
        self._ending.set()
        signals.ignore()
        with contextlib.suppress(BlockingIOError):
            os.write(self._waker, b"\n")
        if threading.current_thread() is not self._thread:
            self._thread.join()
            for file in (self._wake, self._waker, *self._lives):
                os.close(file)

    def _loop(self) -> None:
        before = time.monotonic()
        while True:
            is_asked = self._sleep(_LOOK_SECONDS)
            if self._ending.is_set():
                return
            try:
                now = time.monotonic()
                self._grow_older(min(now - before, _MOST_A_LOOK_SECONDS))
                before = now
                self._answer()
                if is_asked and self._claim(_AGAIN_WHEN_ASKED_SECONDS):
                    _say(self._report("asked for by SIGUSR1", None))
                self._look_at_neighbours(now)
                self._compare()
                self._judge()
            except Exception:
                logger.exception("the watchdog failed, and goes on")

    def _sleep(self, seconds: float) -> bool:
        """Until it is time, a neighbour ends, or the watchdog is woken; whether the signal woke it, or its end."""
        ready = select.select([self._wake, *self._lives], [], [], seconds)[0]
        for file in self._lives.keys() & ready:
            self._suspects.append(self._lives.pop(file))
            os.close(file)
        if self._wake not in ready:
            return False
        time.sleep(_CLAIM_SECONDS)  # it writes in many small pieces
        with contextlib.suppress(BlockingIOError):
            while os.read(self._wake, 1 << 16):
                pass
        return True

    def _grow_older(self, seconds: float) -> None:
        numbers = watch.under_way(self._board)
        self._ages = {number: self._ages.get(number, 0.0) + seconds for number in numbers}

    def _answer(self) -> None:
        """Write down where the threads stand, if somebody has asked for it since the last time."""
        wanted = self._board.get(TEXT_WANTED)
        if wanted != self._board.get(TEXT_GIVEN):
            self._board.write_text(reports.stacks())
            self._board.put(TEXT_GIVEN, wanted)

    def _judge(self) -> None:
        """Report what is too old, if this rank is the one to do it, and end the job if that is wanted."""
        oldest = max(self._ages, key=self._ages.__getitem__, default=None)
        if oldest is None or not 0 < self._deadline_seconds <= self._ages[oldest]:
            return
        is_stopping = self._board.get(HAS_LEFT) != 0  # nobody there to be told by an exception
        if self._at_deadline == "raise" and not is_stopping:
            return
        is_end = self._at_deadline != "report"
        was_reported = oldest in self._reported
        self._reported.add(oldest)
        if (was_reported and not is_end) or not self._claim(_AGAIN_SECONDS):
            return
        _say(text := self._report(f"an operation is not complete after {self._ages[oldest]:.0f} s", oldest))
        self._ending.wait(0 if "has not come to it" in text else _OTHERS_SECONDS)
        if is_end and not self._ending.is_set():
            if oldest in watch.under_way(self._board):
                exits.abort(EXIT_CODE)
            else:
                _say("torchmpi_py: it has completed meanwhile, and the job goes on")

    def _look_at_neighbours(self, now: float) -> None:
        """Report one that is dead, and end the job; in a while, if another is about to do that."""
        used = self._board
        for index in self._suspects:
            if not reports.is_dead(used, index):
                continue
            since = self._gone.setdefault(index, now)
            is_expected = used.get(HAS_LEFT, index) == board.ENDING
            if (not is_expected and self._claim(_AGAIN_SECONDS)) or now - since >= _LAST_SECONDS:
                self._end(reports.death(used, index))

    def _compare(self) -> None:
        """End the job if another rank of the node is in something else at the place of an operation of this one.

        Ranks compare with one neighbour, as they begin; one that came before its neighbours does not see the others.
        """
        for number, age in self._ages.items():
            if age < 2 * _LOOK_SECONDS or self._at_deadline == "raise":
                continue  # it may still raise by itself
            told = reports.disagreement(self._board, number)
            if told and self._claim(_AGAIN_SECONDS) and number in watch.under_way(self._board):
                self._end(f"RanksDisagree: {told}")

    def _end(self, why: str) -> None:
        """Report in short, and end the job."""
        used = self._board
        lines = [f"torchmpi_py: report of rank {used.get(WORLD_RANK)}: {why}"]
        lines += [reports.of_rank(used, index, None, has_text=False) for index in reports.by_rank(used)]
        _say("\n".join(lines))  # before the starter of the job notices, and ends this process too
        _say(flight_recorder.dump(used))
        exits.abort(EXIT_CODE)

    def _claim(self, again_seconds: float) -> bool:
        """Whether this rank is the one to report; not if one of the node has done so shortly before."""
        used, mine = self._board, time.monotonic_ns()
        if any(mine - used.get(board.REPORTED, index) < again_seconds * 1e9 for index in used.indices):
            return False
        used.put(board.REPORTED, mine)
        time.sleep(_CLAIM_SECONDS)
        claims = [(used.get(board.REPORTED, index), index) for index in used.indices]
        return min(claim for claim in claims if mine - claim[0] < again_seconds * 1e9) == (mine, used.index)

    def _report(self, why: str, number: int | None) -> str:
        """What the ranks of this node are doing. Asks them where they stand, and waits some seconds for the answers."""
        used, wanted = self._board, time.monotonic_ns()
        for index in used.indices:
            used.put(TEXT_WANTED, wanted, index)
        until = time.monotonic() + _ANSWER_SECONDS
        while True:
            self._answer()
            silent = [index for index in used.indices if used.get(TEXT_GIVEN, index) < wanted]
            is_late = time.monotonic() > until or self._ending.is_set()
            if is_late or all(reports.trouble(used, index) for index in silent):
                break
            time.sleep(0.02)
        late, lines = None, [f"torchmpi_py: report of rank {used.get(WORLD_RANK)}: {why}"]
        if number is not None and (late := reports.stuck(used, number)) is not None:
            lines.append(f"rank {used.get(WORLD_RANK)} waits in {late.what}, called at {late.site}")
        lines += [reports.of_rank(used, i, late, is_silent=i in silent) for i in reports.by_rank(used)]
        return "\n".join(lines if number is None else [*lines, flight_recorder.dump(used)])


def _say(text: str) -> None:
    if sys.stderr is not None:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


_current: Watchdog | None = None


def start() -> None:
    """Watch this process, as ``config.current`` has it."""
    global _current
    assert board.current is not None, "start has made it"
    if config.can_raise and communication_thread.current().inline:
        config.install(dataclasses.replace(config.current, at_deadline="abort"))
        if board.current.get(WORLD_RANK) == 0:
            logger.warning(
                "this MPI does not give MPI_THREAD_MULTIPLE: a late operation cannot raise, and ends the job"
            )
    _current = Watchdog(board.current, config.current)


def leaving() -> None:
    """This rank has called ``mpi.stop``; who waits for it in an operation shall know."""
    if board.current is not None:
        board.current.put(HAS_LEFT, board.STOPPING)


def stop() -> None:
    """End it; this rank needs the others no longer."""
    global _current
    if _current is not None:
        if board.current is not None:
            board.current.put(HAS_LEFT, board.STOPPED)
        _current.stop()
        _current = None
