"""The watchdog: a thread that reports an operation that takes too long, or a rank that has died, and ends the job.

The thread wakes twice a second. An operation that this process carries out, or waits for, ages by the time between two
looks, but by a second at most: neither a job that was stopped as a whole nor a clock that was set makes it old. When an
operation is older than ``Tuning.deadline_seconds``, one rank of the node writes a report to standard error, from the
board: what each rank of the node does or did last, whether its process is there, and where its threads stand, which the
watchdogs of the other ranks write to the board on request. Then the job ends, unless the operation has completed
meanwhile, or ``Tuning.at_deadline`` says otherwise.

The thread also waits for the end of two other processes of its node (``Neighbours``). A process that ends without
having left in order is reported at once, and the job ends, unless the job is elastic (``core/ulfm.py``).

Several ranks notice the same trouble; each *claims* the report on the board, and the earliest claim holds (``claim``).
The job ends whatever is wrong with the report.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Collection, Iterable

from torchmpi_py.core import backoff, journal, status_board, ulfm
from torchmpi_py.core.config import Tuning
from torchmpi_py.core.status_board import CLAIMED_DIFFERENCE, CLAIMED_LATE, HAS_LEFT, WAITS_ALONE, Board
from torchmpi_py.launch.notices import printable
from torchmpi_py.watch import abort, flight_recorder, job_reports, reports, stacks, wait_cycles
from torchmpi_py.watch.node_links import Nodes
from torchmpi_py.watch.node_watch import NodeWatch
from torchmpi_py.watch.report_requests import requests

logger = logging.getLogger("torchmpi_py")

_LOOK_SECONDS = 0.5
_MOST_A_LOOK_SECONDS = 1.0
_NUM_WATCHED = 2  # neighbours of each rank
_CLAIM_SECONDS = 0.02  # for the claims of other ranks to become visible
_SHORT_SECONDS = 60  # ages up to this are reported with one decimal


class Ages:
    """The ages of the operations that are under way: ``seconds``, by the numbers of their records."""

    def __init__(self, now: float) -> None:
        self.seconds: dict[int, float] = {}
        self._at_wait: dict[object, float] = {}  # when waits with a limit began
        self._before = now

    def look(self, numbers: Iterable[int], now: float) -> None:
        """Age the operations that are under way now; forget the others."""
        passed, self._before = min(now - self._before, _MOST_A_LOOK_SECONDS), now
        self.seconds = {number: self.seconds.get(number, 0.0) + passed for number in numbers}
        limited = tuple(backoff.limited.items())
        self._at_wait = {wait: self._at_wait.get(wait, self.seconds.get(n, 0.0)) for wait, (n, _) in limited}

    def oldest(self, at_least: float, excluded: Collection[int]) -> int | None:
        """The oldest operation of at least this age, for which no wait has more time by its own limit."""
        old = {n: seconds for n, seconds in self.seconds.items() if seconds >= at_least and n not in excluded}
        for wait, (number, limit) in tuple(backoff.limited.items()) if old else ():
            # A shorter limit is no reason: a program may look again and again.
            if limit >= at_least and number in old:
                waited = old[number] - self._at_wait.get(wait, old[number])
                if waited < limit + job_reports.RAISE_SECONDS:
                    del old[number]
        return max(old, key=old.__getitem__, default=None)


Claim = tuple[int, int]
"""The claim of a rank to write a report: its time in ns, and the local rank. The smallest one holds."""


def claim(board: Board, reason: int) -> bool:
    """Whether this rank is the one to report; not if a rank of the node has reported shortly before.

    ``reason`` is the word of the board (``CLAIMED_...``): a report for one reason prevents none for another.
    """
    now = time.monotonic_ns()
    if _recent_claims(board, reason, now):
        return False
    board.put(reason, now)
    time.sleep(_CLAIM_SECONDS)
    return min(_recent_claims(board, reason, now)) == (now, board.index)


def _recent_claims(board: Board, reason: int, now: int) -> list[Claim]:
    seconds = job_reports.hold_seconds(reason)
    claims = [(board.get(reason, index), index) for index in board.indices]
    return [each for each in claims if now - each[0] < seconds * 1e9]


def _is_reported(board: Board, number: int) -> bool:
    """Whether the late operation that another rank has just reported is, on this rank, the operation ``number``."""
    mine = board.record(number)
    if mine is None or not mine.sequence_number:
        return False
    for _, index in _recent_claims(board, CLAIMED_LATE, time.monotonic_ns()):
        theirs = None if index == board.index else board.counterpart(mine.slot, mine.fingerprint, index)
        if theirs is not None and theirs.number == board.get(status_board.LATE_NUMBER, index):
            return True
    return False


class Neighbours:
    """The next two ranks of this node, whose ends this rank waits for.

    The system wakes the waiter by a descriptor of the process, where there are descriptors; else the waiter looks.
    """

    def __init__(self, board: Board, wake: int) -> None:
        others = sorted(board.indices, key=lambda index: (index <= board.index, index))[:-1]
        neighbours = others[: 0 if ulfm.is_elastic() else _NUM_WATCHED]
        self._board, self._wake = board, wake
        self._alive = {file: index for index in neighbours if (file := reports.descriptor(board, index)) is not None}
        self._suspects = [index for index in neighbours if index not in self._alive.values()]
        self._dead_since: dict[int, float] = {}
        self._poll = select.poll()  # unlike select, it has no limit of 1024
        for file in (wake, *self._alive):
            self._poll.register(file, select.POLLIN)

    def sleep(self, seconds: float) -> bool:
        """Sleep until the time is over, a neighbour ends, or ``wake`` is readable; return whether ``wake`` is."""
        found = dict(self._poll.poll(seconds * 1000))
        for file in self._alive.keys() & found.keys():
            self._suspects.append(self._alive.pop(file))
            self._poll.unregister(file)
            if found[file] != select.POLLNVAL:
                os.close(file)
        if found.get(self._wake) == select.POLLNVAL:  # the program has closed files that it did not open
            self._poll.unregister(self._wake)
            return False
        return self._wake in found

    def death_to_report(self, now: float) -> int | None:
        """A dead neighbour, if this rank is the one to report the death."""
        for index in self._suspects:
            if not reports.is_dead(self._board, index):
                continue
            since = self._dead_since.setdefault(index, now)
            # A rank that was ending the job, or that another rank claims, is reported if the job is still here later.
            is_expected = self._board.get(HAS_LEFT, index) == status_board.ENDING
            if (
                not is_expected and claim(self._board, status_board.CLAIMED_DEATH)
            ) or now - since >= job_reports.OTHERS_END_SECONDS:
                return index
        return None

    def close(self) -> None:
        """Close the descriptors."""
        for file in self._alive:
            os.close(file)


class Watchdog:
    """The watchdog of this process, from the construction to ``stop``."""

    def __init__(
        self, board: Board, tuning: Tuning, nodes: Nodes | None = None, listener: socket.socket | None = None
    ) -> None:
        self._board = board
        self._deadline_seconds, self._at_deadline = tuning.deadline_seconds, tuning.at_deadline
        self.least_seconds = 0.0  # of each deadline, while the session is built
        self._ages = Ages(time.monotonic())
        self._reported: set[int] = set()
        self._circle = self._told = wait_cycles.Circle()
        self._is_stopping = False
        self._ending = threading.Event()
        for waits in (backoff.active, backoff.limited, backoff.unhurried):
            waits.clear()
        journal.evicted_open.clear()
        self._neighbours = Neighbours(board, requests.listen())
        self._thread = threading.Thread(target=self._loop, name="torchmpi_py-watchdog", daemon=True)
        self._thread.start()
        self._node_watch = None
        if nodes is not None and board.get(status_board.WORLD_RANK) == nodes.mine:
            self._node_watch = NodeWatch(board, nodes, listener, tuning, print_to_stderr)

    def stop(self) -> None:
        """End the watch: this rank no longer needs the others, nor they this rank."""
        self._board.put(HAS_LEFT, status_board.STOPPED)
        if self._node_watch is not None:
            self._node_watch.stop()
        self._ending.set()
        requests.wake()
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
        """One look: ages of operations, requests for stacks and reports, then troubles."""
        is_asked = self._neighbours.sleep(_LOOK_SECONDS)
        if self._ending.is_set():
            return
        self._ages.look(journal.under_way(self._board), now := time.monotonic())
        # 1. Requests: of other ranks, for the stacks of this one; of the user, for a report.
        stacks.give(self._board)
        if is_asked:
            requests.acknowledge()
            if claim(self._board, status_board.CLAIMED_ASKED):
                report = self._report("asked for by SIGUSR1")
                if job_reports.claim(self._board, status_board.CLAIMED_ASKED, report, ends=False) is None:
                    print_to_stderr(report.text)
        # 2. Troubles, the surest first: a dead rank makes operations late, and so do ranks that disagree.
        dead = self._neighbours.death_to_report(now)
        if dead is not None:
            end_job(self._board, status_board.CLAIMED_DEATH, reports.death(self._board, dead))
        self._check_agreement()
        self._check_circles()
        self._check_deadline()

    def _check_agreement(self) -> None:
        """End the job if a rank of the node is in another operation in the place of one of this rank's, or has left.

        Each rank compares with one neighbour as it begins an operation. Ranks that come before their neighbours do not
        see a difference; here they look again, at all ranks of the node.
        """
        for number, seconds in self._ages.seconds.items():
            if seconds < 2 * _LOOK_SECONDS or self._at_deadline == "raise":
                continue  # the operation may still raise RanksDisagree, or CollectiveTimeout
            difference = reports.disagreement(self._board, number) or reports.deserted(self._board, number)
            is_mine = difference and claim(self._board, CLAIMED_DIFFERENCE)
            if is_mine and number in journal.under_way(self._board):
                end_job(self._board, CLAIMED_DIFFERENCE, f"RanksDisagree: {difference}")

    def _check_circles(self) -> None:
        """End the job if ranks of the node wait for each other in a circle; only report it if another thread may help.

        A circle counts if the look before has found the same one.
        """
        if ulfm.is_elastic():
            return  # a death ends waits
        wait_cycles.publish(self._board, self._ages.seconds)
        before, self._circle = self._circle, wait_cycles.find(self._board)
        if not self._circle or self._circle != before or self._circle <= self._told:
            return
        self._told = self._told | self._circle
        if claim(self._board, CLAIMED_DIFFERENCE):
            text = f"RanksDisagree: no rank can go on: {wait_cycles.describe(self._board, self._circle)}"
            if self._at_deadline != "raise" and all(self._board.get(WAITS_ALONE, index) for index, _ in self._circle):
                end_job(self._board, CLAIMED_DIFFERENCE, text)
            text += "; the job goes on, because another thread of a rank may make the missing call"
            print_to_stderr(reports.of_node(self._board, text, has_text=False).text)

    def _check_deadline(self) -> None:
        """Report the oldest operation that is too old, and end the job, or do as ``Tuning.at_deadline`` says."""
        board, at_least = self._board, max(self._deadline_seconds, self.least_seconds)
        if self._deadline_seconds == 0:
            return
        raising: set[int] = set()
        if self._at_deadline == "raise" and board.get(HAS_LEFT) == 0:
            at_least, raising = at_least + job_reports.RAISE_SECONDS, set(self._ages.seconds) - journal.called(board)
        elif self._at_deadline == "raise" and not self._is_stopping:
            # Nothing raises in mpi.stop(), which waits once more for operations whose lateness was raised before.
            self._is_stopping = True
            self._ages.seconds.clear()
        is_end = self._at_deadline != "report"
        oldest = self._ages.oldest(at_least, raising if is_end else self._reported)
        # An operation that has completed since the look has lost its limit, and is not late.
        if oldest is None or oldest not in journal.under_way(board):
            return
        # Other ranks compare this number with theirs, to know whether the report covers their operation.
        board.put(status_board.LATE_NUMBER, oldest)
        if not claim(board, CLAIMED_LATE):
            if _is_reported(board, oldest):
                self._reported.add(oldest)
            return
        self._reported.add(oldest)
        age = self._ages.seconds[oldest]
        patience_seconds = job_reports.OTHERS_REPORT_SECONDS
        why = f"an operation is not complete after {round(age, 1 if age < _SHORT_SECONDS else 0):g} s"
        try:
            report = self._report(why, oldest)
            why = report.missing or why
            patience_seconds = tell_late(board, report, oldest, ends=is_end)
        finally:
            if is_end:
                self._end_if_incomplete(oldest, patience_seconds, why)

    def _end_if_incomplete(self, number: int, seconds: float, why: str) -> None:
        """End the job, after some seconds, unless the operation has completed meanwhile."""
        if self._ending.wait(seconds):
            return
        if number in journal.under_way(self._board):
            abort.abort(abort.EXIT_CODE, why)
        else:
            withdraw()

    def _report(self, why: str, number: int | None = None) -> reports.NodeReport:
        """The report, with the stacks that the ranks of this node give within some seconds."""
        silent = stacks.gather(self._board, self._ending.is_set)
        return reports.of_node(self._board, why, number, silent=silent)


def tell_late(board: Board, report: reports.NodeReport, number: int | None = None, *, ends: bool) -> float:
    """Print a report on what is late, by way of a hub; for how many seconds others may still report it.

    ``number``: of the operation; ``ends``: whether the job ends after the report.
    """
    answer = job_reports.claim(board, CLAIMED_LATE, report, number, ends=ends)
    if answer is None:  # one node, or no hub that answers
        print_to_stderr(f"{report.text}\n{flight_recorder.dump(board)}")
        return 0 if report.missing else job_reports.OTHERS_REPORT_SECONDS
    return 0 if answer["claimed"] == "printed" else job_reports.OTHERS_END_SECONDS


def withdraw() -> None:
    """Say that what was reported as late has completed."""
    print_to_stderr("torchmpi_py: it has completed meanwhile, and the job goes on")
    job_reports.withdraw()


def end_job(board: Board, reason: int, why: str) -> None:
    """Print a report without stacks, and end the job whatever is wrong with the report."""
    try:
        report = reports.of_node(board, why, has_text=False)
        answer = job_reports.claim(board, reason, report, ends=True)
        if answer is None:
            print_to_stderr(report.text)
            # After the report: the launcher may notice the death, too, and end this process before the files are there.
            print_to_stderr(flight_recorder.dump(board))
        elif answer["claimed"] == "held":
            time.sleep(job_reports.OTHERS_END_SECONDS)  # in which the one that reports ends the job
    finally:
        abort.abort(abort.EXIT_CODE, why)


def print_to_stderr(text: str) -> None:
    """Print to the standard error that the process began with: ``sys.stderr`` may be closed, or be kept in memory."""
    line = f"{printable(text)}\n"
    try:
        assert sys.__stderr__ is not None
        sys.__stderr__.write(line)
        sys.__stderr__.flush()
    except Exception:
        with contextlib.suppress(OSError):
            os.write(2, line.encode(errors="backslashreplace"))


def announce_stop(*, is_drained: bool) -> None:
    """Show on the board that this rank is in ``mpi.stop()``, to ranks that wait for it in an operation.

    ``is_drained``: the rank will come to no further operation, and its entries of ``mpi.stop()`` itself are recorded.
    """
    if status_board.current is not None:
        status_board.current.put(HAS_LEFT, status_board.STOPPING if is_drained else status_board.DRAINING)
