"""One rank of several that notice the same tells it: each claims the report on the board, and the earliest one holds.

There is a word on the board for each reason, so that a report that was asked for, say, keeps nobody from another one.

The watchdog's sleep: until it is time, it is woken, or the process of one of two other ranks of its node ends.

The end is noticed by a descriptor of the process, where the system has them; else who is woken has to look.

The watchdog: a thread that notices when an operation takes too long, or a rank has died, and reports it.

It sleeps, and looks twice a second at what this process carries out, or waits for. An operation ages by the time
between two looks, but not by more than a second, so that a job that was stopped as a whole, or a clock that was set,
does not make it old. When one is older than ``Tuning.deadline_seconds``, one rank of the node writes a report to
standard error, from the board: what each rank of the node is doing or did last, whether its process is there, and
where its threads stand, which the watchdogs of the other ranks write down when they are asked. Then the job ends,
unless the operation has completed meanwhile, or ``Tuning.at_deadline`` says something else.

It also waits for the end of the processes of the next two ranks of the node (``neighbours.py``). One that is gone
without having left in order is reported at once, and the job ends, unless it is one that goes on without it
(``recovery.py``).

One rank of several that notice the same does it (``claims.py``). Whatever is wrong with the report, the job ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import sys
import threading
import time
from collections.abc import Iterable

from torchmpi_py.core import backoff, journal, status_board, ulfm
from torchmpi_py.core.config import Tuning
from torchmpi_py.core.status_board import (
    ENDING,
    HAS_LEFT,
    STOPPED,
    STOPPING,
    TEXT_GIVEN,
    TEXT_WANTED,
    Board,
)
from torchmpi_py.watch import abort, death_signals, flight_recorder, reports

LATE = status_board.CLAIMED_LATE
DEATH = status_board.CLAIMED_DEATH
DIFFERENCE = status_board.CLAIMED_DIFFERENCE
ASKED = status_board.CLAIMED_ASKED

_AGAIN_SECONDS = 30.0
_AGAIN_WHEN_ASKED_SECONDS = 1.0
_CLAIM_SECONDS = 0.02


def claim(used: Board, reason: int) -> bool:
    """Whether this rank is the one to report; not if one of the node has done so, for this reason, shortly before."""
    mine = time.monotonic_ns()
    if _recent(used, reason, mine):
        return False
    used.put(reason, mine)
    time.sleep(_CLAIM_SECONDS)
    return min(_recent(used, reason, mine)) == (mine, used.index)


def is_reported(used: Board, number: int) -> bool:
    """Whether another rank has just told of a late operation that is this one of this rank, seen from there."""
    mine = used.record(number)
    if mine is None or not mine.sequence_number:
        return False
    tellers = [index for _, index in _recent(used, LATE, time.monotonic_ns()) if index != used.index]
    theirs = [(used.counterpart(mine.slot, mine.fingerprint, index), index) for index in tellers]
    return any(record is not None and record.number == used.get(LATE_NUMBER, index) for record, index in theirs)


def announce(used: Board, number: int) -> None:
    """Which of this rank's operations it would tell of as late."""
    used.put(LATE_NUMBER, number)


LATE_NUMBER = status_board.LATE_NUMBER


def _recent(used: Board, reason: int, now: int) -> list[tuple[int, int]]:
    """(when, by whom) it was claimed that is not too long ago."""
    again_seconds = _AGAIN_WHEN_ASKED_SECONDS if reason == ASKED else _AGAIN_SECONDS
    claims = [(used.get(reason, index), index) for index in used.indices]
    return [claim for claim in claims if now - claim[0] < again_seconds * 1e9]


_NUM_WATCHED = 2
_LAST_SECONDS = 5.0  # for one that is about to end the job


class Neighbours:
    """The next two ranks of this node, and what is known of their ends."""

    def __init__(self, used: Board, wake: int) -> None:
        others = sorted(used.indices, key=lambda index: (index <= used.index, index))[:-1]
        neighbours = others[: 0 if ulfm.is_elastic() else _NUM_WATCHED]
        self._board, self._wake = used, wake
        self._lives = {file: index for index in neighbours if (file := reports.descriptor(used, index)) is not None}
        self._suspects = [index for index in neighbours if index not in self._lives.values()]
        self._gone: dict[int, float] = {}  # those that are gone, and since when that is known
        self._poll = select.poll()  # unlike select, it has no limit of 1024
        for file in (wake, *self._lives):
            self._poll.register(file, select.POLLIN)

    def sleep(self, seconds: float) -> bool:
        """Until it is time, or a neighbour ends, or the watchdog is woken; whether it was woken."""
        found = dict(self._poll.poll(seconds * 1000))
        for file in self._lives.keys() & found.keys():
            self._suspects.append(self._lives.pop(file))
            self._poll.unregister(file)
            if found[file] != select.POLLNVAL:
                os.close(file)
        if found.get(self._wake) == select.POLLNVAL:  # the program has closed what it does not know
            self._poll.unregister(self._wake)
            return False
        return self._wake in found

    def whose_death_to_tell(self, now: float) -> int | None:
        """One that is dead, if this rank is the one to tell: in a while, if another is about to do that."""
        used = self._board
        for index in self._suspects:
            if not reports.is_dead(used, index):
                continue
            since = self._gone.setdefault(index, now)
            is_expected = used.get(HAS_LEFT, index) == ENDING
            if (not is_expected and claim(used, DEATH)) or now - since >= _LAST_SECONDS:
                return index
        return None

    def close(self) -> None:
        """Watch them no longer."""
        for file in self._lives:
            os.close(file)


logger = logging.getLogger("torchmpi_py")

_LOOK_SECONDS = 0.5
_MOST_A_LOOK_SECONDS = 1.0
_ANSWER_SECONDS = 1.5
_OTHERS_SECONDS = 1.0  # for another node, where the late rank seems to be, to tell
_SHORT_SECONDS = 60  # ages up to this are reported with one decimal
_RAISE_SECONDS = 5.0  # for an operation to raise by itself
EXIT_CODE = 1


class Ages:
    """How long operations have been under way: ``of`` their numbers, in seconds."""

    def __init__(self, now: float) -> None:
        self.of: dict[int, float] = {}
        self._before = now

    def look(self, numbers: Iterable[int], now: float) -> None:
        """These are under way now. A long time between two looks does not count: the job was stopped."""
        seconds, self._before = min(now - self._before, _MOST_A_LOOK_SECONDS), now
        self.of = {number: self.of.get(number, 0.0) + seconds for number in numbers}

    def oldest(self, at_least: float, but_for: Iterable[int]) -> int | None:
        """The oldest that is so old, but for some."""
        old = {number: age for number, age in self.of.items() if age >= at_least and number not in but_for}
        return max(old, key=old.__getitem__, default=None)


class Watchdog:
    """Watches this process, and its neighbours', from now until ``stop``."""

    def __init__(self, used: Board, tuning: Tuning) -> None:
        self._board = used
        self._deadline_seconds, self._at_deadline = tuning.deadline_seconds, tuning.at_deadline
        self._ages = Ages(time.monotonic())
        self._reported: set[int] = set()
        self._ending = threading.Event()
        backoff.active.clear()
        backoff.unhurried.clear()
        journal.evicted_open.clear()
        self._neighbours = Neighbours(used, death_signals.listen())
        self._thread = threading.Thread(target=self._loop, name="torchmpi_py-watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the watch: this rank needs the others no longer."""
        self._board.put(HAS_LEFT, STOPPED)
        self._ending.set()
        death_signals.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()
            self._neighbours.close()

    def _loop(self) -> None:
        while not self._ending.is_set():
            try:
                self._look()
            except Exception:
                with contextlib.suppress(Exception):
                    logger.exception("the watchdog failed, and goes on")
                self._ending.wait(_LOOK_SECONDS)

    def _look(self) -> None:
        is_asked = self._neighbours.sleep(_LOOK_SECONDS)
        if self._ending.is_set():
            return
        self._ages.look(journal.under_way(self._board), now := time.monotonic())
        self._answer()
        if is_asked:
            death_signals.catch_requests()
            if claim(self._board, ASKED):
                say(self._report("asked for by SIGUSR1", None))
        dead = self._neighbours.whose_death_to_tell(now)
        if dead is not None:
            self._end(reports.death(self._board, dead))
        self._compare()
        self._judge()

    def _answer(self) -> None:
        """Write down where the threads stand, if somebody has asked for it since the last time."""
        wanted = self._board.get(TEXT_WANTED)
        if wanted != self._board.get(TEXT_GIVEN):
            self._board.write_text(reports.stacks())
            self._board.put(TEXT_GIVEN, wanted)

    def _judge(self) -> None:
        """Report the oldest operation that is too old, and end the job, or do as ``Tuning.at_deadline`` says."""
        used, at_least = self._board, self._deadline_seconds
        raising: set[int] = set()
        if at_least == 0:
            return
        if self._at_deadline == "raise" and used.get(HAS_LEFT) == 0:  # in stop nobody is told by an exception
            at_least, raising = at_least + _RAISE_SECONDS, set(self._ages.of) - journal.called(used)
        is_end = self._at_deadline != "report"
        oldest = self._ages.oldest(at_least, raising if is_end else self._reported)
        if oldest is None:
            return
        announce(used, oldest)
        if not claim(used, LATE):
            if is_reported(used, oldest):
                self._reported.add(oldest)
            return
        self._reported.add(oldest)
        told = ""
        try:
            age = self._ages.of[oldest]
            seconds = f"{round(age, 1 if age < _SHORT_SECONDS else 0):g}"
            told = self._report(f"an operation is not complete after {seconds} s", oldest)
            say(told)
        finally:
            if is_end:
                self._end_if_late(oldest, 0 if "has not come to it" in told else _OTHERS_SECONDS)

    def _end_if_late(self, number: int, seconds: float) -> None:
        """End the job, after some seconds, unless the operation has completed meanwhile."""
        if self._ending.wait(seconds):
            return
        if number in journal.under_way(self._board):
            abort.abort(EXIT_CODE)
        else:
            say("torchmpi_py: it has completed meanwhile, and the job goes on")

    def _compare(self) -> None:
        """End the job if another rank of the node is in something else at the place of an operation of this one.

        Or has come to its end without it.
        Ranks compare with one neighbour, as they begin; one that came before its neighbours does not see the others.
        """
        for number, age in self._ages.of.items():
            if age < 2 * _LOOK_SECONDS or self._at_deadline == "raise":
                continue  # it may still raise by itself
            told = reports.disagreement(self._board, number) or reports.deserted(self._board, number)
            is_mine = told and claim(self._board, DIFFERENCE)
            if is_mine and number in journal.under_way(self._board):
                self._end(f"RanksDisagree: {told}")

    def _end(self, why: str) -> None:
        """Report in short, and end the job."""
        try:
            say(reports.of_node(self._board, why, has_text=False))
            say(flight_recorder.dump(self._board))  # late: the job's starter may notice, and end this process too
        finally:
            abort.abort(EXIT_CODE)

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
        told = reports.of_node(used, why, number, silent=silent)
        return told if number is None else f"{told}\n{flight_recorder.dump(used)}"


def say(text: str) -> None:
    """On standard error as it was when the program began: what stands in its place may be closed, or kept in memory."""
    line = f"{text}\n"
    try:
        assert sys.__stderr__ is not None
        sys.__stderr__.write(line)
        sys.__stderr__.flush()
    except Exception:
        with contextlib.suppress(OSError):
            os.write(2, line.encode(errors="backslashreplace"))


def leaving() -> None:
    """This rank has called ``mpi.stop``; who waits for it in an operation shall know."""
    if status_board.current is not None:
        status_board.current.put(HAS_LEFT, STOPPING)
