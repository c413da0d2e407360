"""Watch this process: a thread reports operations that exceed the timeout and ranks that died, and ends the job.

The thread wakes twice a second. It then adds the time since it last woke, at most one second, to the age of every
operation that this process is carrying out or waiting for. So neither a suspended job nor a changed clock makes an
operation old. When an operation is older than ``Tuning.deadline_seconds``, one rank of the node writes a report to
standard error, from the board. The report shows the current or last operation of each rank of the node, whether the
rank's process exists, and the stacks of its threads. Each rank's watchdog writes these stacks to the board on request.
Then the job ends, unless the operation has completed in the meantime or ``Tuning.at_deadline`` specifies otherwise.

The thread also waits for the end of two other processes of its node (``Neighbours``). A process that ends without
``mpi.stop()`` is reported immediately, and the job ends, unless the job is elastic (``core/ulfm.py``).

Several ranks may notice the same fault. Each *claims* the report on the board, and the earliest claim wins (``claim``).
The job ends even if writing the report fails.
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
_CLAIM_SECONDS = 0.02  # time for the claims of other ranks to become visible
_SHORT_SECONDS = 60  # Shorter ages are reported with one decimal.


class Ages:
    """The ages of the operations under way: ``seconds`` maps the record number of an operation to its age."""

    def __init__(self, now: float) -> None:
        self.seconds: dict[int, float] = {}
        self._at_wait: dict[object, float] = {}  # wait with a time limit -> the operation's age at the wait's start
        self._before = now

    def look(self, numbers: Iterable[int], now: float) -> None:
        """Increase the ages of the operations that are under way now, and forget all other operations."""
        passed, self._before = min(now - self._before, _MOST_A_LOOK_SECONDS), now
        self.seconds = {number: self.seconds.get(number, 0.0) + passed for number in numbers}
        limited = tuple(backoff.limited.items())
        self._at_wait = {wait: self._at_wait.get(wait, self.seconds.get(n, 0.0)) for wait, (n, _) in limited}

    def oldest(self, at_least: float, excluded: Collection[int]) -> int | None:
        """Return the oldest operation that is at least ``at_least`` seconds old and not ``excluded``, or None.

        Ignore operations with a wait whose own limit allows more time.
        """
        old = {n: seconds for n, seconds in self.seconds.items() if seconds >= at_least and n not in excluded}
        for wait, (number, limit) in tuple(backoff.limited.items()) if old else ():
            # Ignore a wait with a shorter limit, because a program may poll with short waits indefinitely.
            if limit >= at_least and number in old:
                waited = old[number] - self._at_wait.get(wait, old[number])
                if waited < limit + job_reports.RAISE_SECONDS:
                    del old[number]
        return max(old, key=old.__getitem__, default=None)


Claim = tuple[int, int]
"""The claim of a rank to write a report: its time in ns, and the local rank. The smallest claim wins."""


def claim(board: Board, reason: int) -> bool:
    """Claim a report, and return whether this rank has to write the report.

    Return False if a rank of the node has an earlier claim or reported shortly before. ``reason`` is a field of the
    board (``CLAIMED_...``). Claims for different reasons do not affect each other.
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
    """Return whether another rank has just reported this rank's operation ``number`` as late."""
    mine = board.record(number)
    if mine is None or not mine.sequence_number:
        return False
    for _, index in _recent_claims(board, CLAIMED_LATE, time.monotonic_ns()):
        theirs = None if index == board.index else board.counterpart(mine.slot, mine.fingerprint, index)
        if theirs is not None and theirs.number == board.get(status_board.LATE_NUMBER, index):
            return True
    return False


class Neighbours:
    """The next two ranks of this node. This rank watches whether their processes end.

    The system wakes this rank through a descriptor of the other process. Without descriptors this rank polls.
    """

    def __init__(self, board: Board, wake: int) -> None:
        others = sorted(board.indices, key=lambda index: (index <= board.index, index))[:-1]
        neighbours = others[: 0 if ulfm.is_elastic() else _NUM_WATCHED]
        self._board, self._wake = board, wake
        self._alive = {file: index for index in neighbours if (file := reports.descriptor(board, index)) is not None}
        self._suspects = [index for index in neighbours if index not in self._alive.values()]
        self._dead_since: dict[int, float] = {}
        self._poll = select.poll()  # Unlike select, poll has no limit of 1024 descriptors.
        for file in (wake, *self._alive):
            self._poll.register(file, select.POLLIN)

    def sleep(self, seconds: float) -> bool:
        """Sleep for ``seconds``, or until a neighbour ends or ``wake`` is readable.

        Return whether ``wake`` is readable.
        """
        events = dict(self._poll.poll(seconds * 1000))
        for file in self._alive.keys() & events.keys():
            self._suspects.append(self._alive.pop(file))
            self._poll.unregister(file)
            if events[file] != select.POLLNVAL:
                os.close(file)
        if events.get(self._wake) == select.POLLNVAL:  # The program has closed files that it did not open.
            self._poll.unregister(self._wake)
            return False
        return self._wake in events

    def death_to_report(self, now: float) -> int | None:
        """Return a dead neighbour if this rank has to report the death, else None."""
        for index in self._suspects:
            if not reports.is_dead(self._board, index):
                continue
            since = self._dead_since.setdefault(index, now)
            # The dead rank may have been ending the job, or another rank may have claimed the report. Then report only
            # if the job still runs some seconds later.
            is_expected = self._board.get(HAS_LEFT, index) == status_board.ENDING
            if (
                not is_expected and claim(self._board, status_board.CLAIMED_DEATH)
            ) or now - since >= job_reports.OTHERS_END_SECONDS:
                return index
        return None

    def close(self) -> None:
        """Close the descriptors of the neighbours."""
        for file in self._alive:
            os.close(file)


class Watchdog:
    """The watchdog of this process. It runs from construction to ``stop``."""

    def __init__(
        self, board: Board, tuning: Tuning, nodes: Nodes | None = None, listener: socket.socket | None = None
    ) -> None:
        self._board = board
        self._deadline_seconds, self._at_deadline = tuning.deadline_seconds, tuning.at_deadline
        self.least_seconds = 0.0  # lower limit of the timeout while the session is being built
        self._ages = Ages(time.monotonic())
        self._reported: set[int] = set()
        self._circle = self._reported_circle = wait_cycles.Circle()
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
        """Stop the thread. Call this when this rank and the other ranks no longer need each other."""
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
                    logger.exception("the watchdog raised an error, but continues")
                self._ending.wait(_LOOK_SECONDS)

    def _look(self) -> None:
        """Increase the ages of operations, serve requests for stacks and reports, and search for faults."""
        is_asked = self._neighbours.sleep(_LOOK_SECONDS)
        if self._ending.is_set():
            return
        self._ages.look(journal.under_way(self._board), now := time.monotonic())
        # 1. Serve requests: other ranks request the stacks of this rank, and the user requests a report.
        stacks.give(self._board)
        if is_asked:
            requests.acknowledge()
            if claim(self._board, status_board.CLAIMED_ASKED):
                report = self._report("requested by SIGUSR1")
                if job_reports.claim(self._board, status_board.CLAIMED_ASKED, report, ends=False) is None:
                    print_to_stderr(report.text)
        # 2. Search for faults, causes first: dead ranks and ranks that disagree make operations late.
        dead = self._neighbours.death_to_report(now)
        if dead is not None:
            end_job(self._board, status_board.CLAIMED_DEATH, reports.death(self._board, dead))
        self._check_agreement()
        self._check_circles()
        self._check_deadline()

    def _check_agreement(self) -> None:
        """End the job if ranks of the node call different operations, or if a rank that must call is in ``stop``.

        Each rank compares its call with one neighbour when it starts an operation. A rank that calls before its
        neighbour sees no difference then, so the watchdog compares again, with all ranks of the node.
        """
        for number, seconds in self._ages.seconds.items():
            if seconds < 2 * _LOOK_SECONDS or self._at_deadline == "raise":
                continue  # The operation may still raise RanksDisagree or CollectiveTimeout.
            difference = reports.disagreement(self._board, number) or reports.deserted(self._board, number)
            is_mine = difference and claim(self._board, CLAIMED_DIFFERENCE)
            if is_mine and number in journal.under_way(self._board):
                end_job(self._board, CLAIMED_DIFFERENCE, f"RanksDisagree: {difference}")

    def _check_circles(self) -> None:
        """End the job if ranks of the node wait for each other in a cycle.

        Only report the cycle if another thread may make a missing call, or if operations raise CollectiveTimeout. A
        cycle counts only if the previous look has found the same cycle.
        """
        if ulfm.is_elastic():
            return  # A death may end the waits.
        wait_cycles.publish(self._board, self._ages.seconds)
        before, self._circle = self._circle, wait_cycles.find(self._board)
        if not self._circle or self._circle != before or self._circle <= self._reported_circle:
            return
        self._reported_circle = self._reported_circle | self._circle
        if claim(self._board, CLAIMED_DIFFERENCE):
            text = f"RanksDisagree: the ranks wait for each other: {wait_cycles.describe(self._board, self._circle)}"
            if self._at_deadline != "raise" and all(self._board.get(WAITS_ALONE, index) for index, _ in self._circle):
                end_job(self._board, CLAIMED_DIFFERENCE, text)
            text += "; the job continues, because another thread may make a missing call, or a call may time out"
            print_to_stderr(reports.of_node(self._board, text, has_text=False).text)

    def _check_deadline(self) -> None:
        """Report the oldest operation beyond the timeout. End the job unless ``Tuning.at_deadline`` forbids it."""
        board, at_least = self._board, max(self._deadline_seconds, self.least_seconds)
        if self._deadline_seconds == 0:
            return
        raising: set[int] = set()
        if self._at_deadline == "raise" and board.get(HAS_LEFT) == 0:
            at_least, raising = at_least + job_reports.RAISE_SECONDS, set(self._ages.seconds) - journal.called(board)
        elif self._at_deadline == "raise" and not self._is_stopping:
            # mpi.stop() waits again for operations that have raised CollectiveTimeout before, but it does not raise. So
            # count their ages from here on, and end the job at the timeout.
            self._is_stopping = True
            self._ages.seconds.clear()
        is_end = self._at_deadline != "report"
        oldest = self._ages.oldest(at_least, raising if is_end else self._reported)
        # An operation that has completed since the ages were updated is not late.
        if oldest is None or oldest not in journal.under_way(board):
            return
        # Other ranks look this number up, to find out whether the report covers their own late operation.
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
        """End the job after ``seconds``, unless the operation has completed in the meantime."""
        if self._ending.wait(seconds):
            return
        if number in journal.under_way(self._board):
            abort.abort(abort.EXIT_CODE, why)
        else:
            withdraw()

    def _report(self, why: str, number: int | None = None) -> reports.NodeReport:
        """Return the report, with the stacks that the ranks of this node write within some seconds."""
        silent = stacks.gather(self._board, self._ending.is_set)
        return reports.of_node(self._board, why, number, silent=silent)


def tell_late(board: Board, report: reports.NodeReport, number: int | None = None, *, ends: bool) -> float:
    """Print a report on a late operation, if possible through a hub. Return the seconds to wait for other reports.

    ``number`` is the number of the operation. ``ends`` states whether the job ends after the report.
    """
    answer = job_reports.claim(board, CLAIMED_LATE, report, number, ends=ends)
    if answer is None:  # The job has only one node, or no hub has answered.
        print_to_stderr(f"{report.text}\n{flight_recorder.dump(board)}")
        return 0 if report.missing else job_reports.OTHERS_REPORT_SECONDS
    return 0 if answer["claimed"] == "printed" else job_reports.OTHERS_END_SECONDS


def withdraw() -> None:
    """Report that the late operation has completed, and inform a hub that the job continues."""
    print_to_stderr("torchmpi_py: the late operation has completed; the job continues")
    job_reports.withdraw()


def end_job(board: Board, reason: int, why: str) -> None:
    """Print a report without stacks, and end the job even if the report fails."""
    try:
        report = reports.of_node(board, why, has_text=False)
        answer = job_reports.claim(board, reason, report, ends=True)
        if answer is None:
            print_to_stderr(report.text)
            # Dump after the report, because the launcher may notice the death too and end this process during the dump.
            print_to_stderr(flight_recorder.dump(board))
        elif answer["claimed"] == "held":
            time.sleep(job_reports.OTHERS_END_SECONDS)  # The rank that reports ends the job during this time.
    finally:
        abort.abort(abort.EXIT_CODE, why)


def print_to_stderr(text: str) -> None:
    """Print to the process's original standard error, because ``sys.stderr`` may be closed or replaced."""
    line = f"{printable(text)}\n"
    try:
        assert sys.__stderr__ is not None
        sys.__stderr__.write(line)
        sys.__stderr__.flush()
    except Exception:
        with contextlib.suppress(OSError):
            os.write(2, line.encode(errors="backslashreplace"))


def announce_stop(*, is_drained: bool) -> None:
    """Show on the board that this rank is in ``mpi.stop()``, for ranks that wait for this rank in an operation.

    ``is_drained`` means that the rank will call no further operation, and has recorded the entries of ``mpi.stop()``.
    """
    if status_board.current is not None:
        status_board.current.put(HAS_LEFT, status_board.STOPPING if is_drained else status_board.DRAINING)
