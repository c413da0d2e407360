"""The watch between nodes: a thread of each node's leader, which serves the links to the other nodes.

Once a second the first hub that can be reached asks each leader for the rows of its node, and compares them
(``cross_check.py``): calls that differ end the job with a report of both sides, a second later, for MPI may notice too,
and the rank where it does raises an error with both sides. The reports of all nodes go through a hub
(``job_reports.py``).

A link that ends without a word means that the leader's process has ended: its program did not come to ``mpi.stop()``.
The other ranks of its node notice that as well, and have a second to report it. A link on which nothing is acknowledged
for ``Tuning.unreachable_seconds`` means that the host cannot be reached. Both end the job, unless it is elastic.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
from typing import Any

from torchmpi_py.core import ulfm
from torchmpi_py.core.config import Tuning
from torchmpi_py.core.status_board import CLAIMED_DEATH, CLAIMED_DIFFERENCE, ENDING, HAS_LEFT, WORLD_RANK, Board
from torchmpi_py.watch import abort, cross_check, flight_recorder, node_links, reports, stacks
from torchmpi_py.watch.cross_check import Comparison, Desertion, Mismatch, Position, Row
from torchmpi_py.watch.job_reports import Answers, ReportDesk
from torchmpi_py.watch.node_links import Link, Message, Nodes

logger = logging.getLogger("torchmpi_py")

_TURN_SECONDS = 0.25
_ROWS_SECONDS = 1.0  # between two comparisons
_CONNECT_AGAIN_SECONDS = 2.0
_WARN_SECONDS = 30.0  # without a connection to a hub
_OTHERS_REPORT_SECONDS = 1.0  # for the ranks that see a trouble themselves
_OTHERS_END_SECONDS = 5.0  # for a rank that is about to end the job
_RAISE_SECONDS = 5.0
_VIEWS_SECONDS = 1.0


class NodeWatch:
    """The thread, from the construction to ``stop``."""

    def __init__(self, board: Board, nodes: Nodes, listener: socket.socket | None, tuning: Tuning, say: Any) -> None:
        self._board, self._nodes, self._listener, self._tuning = board, nodes, listener, tuning
        self._links: dict[int, Link] = {}
        self._others: list[Link] = []  # short ones, and those that have not proved themselves
        self._desk = ReportDesk(nodes, self._links, self._answer, self._absence, say)
        self._rows, self._comparison = cross_check.Rows(board), Comparison()
        self._briefs: dict[int, list[str]] = {}  # by node: what its ranks did when last heard of
        self._asked_for_rows: dict[int, bool] = {}  # by node: whether the answer is due
        self._gone: dict[int, float] = {}  # nodes whose links have ended without a word: since when
        self._left: set[int] = set()
        self._reported: set[int] = set()  # nodes whose loss was reported
        self._trouble: tuple[Mismatch | Desertion, float] | None = None
        self._begun = self._last_rows = time.monotonic()
        self._last_connect = 0.0
        self._has_warned = self._has_announced = False
        self._ending = threading.Event()
        self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._loop, name="torchmpi_py-nodes", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the watch: this node leaves in order."""
        self._ending.set()
        os.write(self._wake[1], b"x")
        if threading.current_thread() is not self._thread:
            self._thread.join()
            for end in self._wake:
                os.close(end)

    def _loop(self) -> None:
        while not self._ending.is_set():
            try:
                self._turn()
            except Exception:
                with contextlib.suppress(Exception):
                    logger.exception("the watch between nodes failed, and goes on")
                self._ending.wait(_TURN_SECONDS)
        for link in (*self._links.values(), *self._others):
            with contextlib.suppress(OSError):
                link.send({"leaving": 1})
            link.close()
        if self._listener is not None:
            self._listener.close()

    def _turn(self) -> None:
        self._serve()
        now = time.monotonic()
        if now - self._last_connect > _CONNECT_AGAIN_SECONDS:
            self._last_connect = now
            self._connect_to_hubs()
        self._announce_end()
        for node, link in list(self._links.items()):
            try:
                link.tend(now)
            except OSError:
                self._lose(node)
        self._desk.turn()
        if self._is_in_charge(now):
            self._ask_for_rows(now)
            self._check_trouble(now)
            self._check_losses(now)

    # Links

    def _connect_to_hubs(self) -> None:
        """Connect to the hubs before this node, where there is no link yet."""
        for hub in self._nodes.hubs:
            if hub >= self._nodes.mine or hub in self._links or hub in self._left:
                continue
            try:
                link = node_links.connect(self._nodes, hub, self._nodes.mine)
            except (OSError, ValueError) as error:
                if not self._has_warned and hub not in self._gone and time.monotonic() - self._begun > _WARN_SECONDS:
                    self._has_warned = True
                    where = ", port ".join(map(str, self._nodes.hubs[hub]))
                    logger.warning(
                        "the watch of %s cannot connect to %s (%s): ranks of different nodes are not compared. Name "
                        "the network interface through which all nodes reach each other in GLOO_SOCKET_IFNAME",
                        self._nodes.name(self._nodes.mine),
                        where,
                        error,
                    )
                continue
            self._links[hub] = link
            self._gone.pop(hub, None)
            for message in link.unread:
                self._handle(link, message)

    def _serve(self) -> None:
        """Wait for messages, and handle them."""
        ends = [*self._links.values(), *self._others]
        poll = select.poll()
        poll.register(self._wake[0], select.POLLIN)
        if self._listener is not None:
            poll.register(self._listener, select.POLLIN)
        for link in ends:
            poll.register(link, select.POLLIN | (select.POLLOUT if link.has_output else 0))
        ready = dict(poll.poll(_TURN_SECONDS * 1000))
        if self._listener is not None and self._listener.fileno() in ready:
            with contextlib.suppress(OSError):
                self._others.append(Link(self._listener.accept()[0], self._nodes.token, accepts=True))
        for link in ends:
            if link.fileno() in ready:
                self._read(link)

    def _read(self, link: Link) -> None:
        try:
            link.flush()
            messages = link.receive()
        except (OSError, ValueError):  # it has ended, or does not speak as a part of the job does
            self._drop(link)
            return
        if link in self._others and link.node is not None:  # a leader has proved itself
            self._others.remove(link)
            former = self._links.pop(link.node, None)
            if former is not None:
                former.close()
            self._links[link.node] = link
            self._gone.pop(link.node, None)
        for message in messages:
            self._handle(link, message)

    def _drop(self, link: Link) -> None:
        if link in self._others:
            self._others.remove(link)
        elif link.node is not None and self._links.get(link.node) is link:
            self._lose(link.node)
            return
        link.close()

    def _lose(self, node: int) -> None:
        """A leader's link has ended."""
        link = self._links.pop(node)
        link.close()
        self._asked_for_rows.pop(node, None)
        if link.is_leaving:
            self._left.add(node)
        else:
            # A rank that is ending the job has some seconds more: what ended it was said there.
            self._gone[node] = time.monotonic() + (_OTHERS_END_SECONDS if link.is_ending else 0)

    def _handle(self, link: Link, message: Message) -> None:
        if "ask" in message:
            with contextlib.suppress(OSError):
                link.send({"answer": message["ask"], "value": self._answer(message)})
        elif "answer" in message and link.node is not None:
            if message["answer"] == 0:
                self._asked_for_rows[link.node] = False
                self._compare(link.node, message["value"])
            else:
                self._desk.answered(link.node, message["answer"], message["value"])
        else:
            self._desk.handle(link, message, "; ".join(self._loss(node, time.monotonic()) for node in self._lost()))

    def _answer(self, question: Message) -> Any:
        """This node's answer to a hub."""
        board, where = self._board, question.get("position")
        position = None if where is None else Position(*where)
        if question["what"] == "rows":
            briefs = [reports.brief(board, index) for index in board.indices[:8]]
            return [*self._rows.read(), briefs]
        if question["what"] == "views":
            return [] if position is None else reports.views(board, position)
        silent = stacks.gather(board, self._ending.is_set)
        part = reports.part_of_node(board, position, question["called"], silent)
        return f"{part}\n{flight_recorder.dump(board)}"

    def _announce_end(self) -> None:
        """Say to the other nodes that a rank of this one is ending the job, and has said why."""
        board = self._board
        if not self._has_announced and any(board.get(HAS_LEFT, index) == ENDING for index in board.indices):
            self._has_announced = True
            for link in self._links.values():
                with contextlib.suppress(OSError):
                    link.send({"ending": 1})

    # The hub in charge

    def _is_in_charge(self, now: float) -> bool:
        """Whether no hub before this node can be reached."""
        before = [hub for hub in self._nodes.hubs if hub < self._nodes.mine]
        return not any(hub in self._links and not self._is_cut(hub, now) for hub in before)

    def _is_cut(self, node: int, now: float) -> bool:
        limit = self._tuning.unreachable_seconds
        return limit > 0 and self._links[node].seconds_unheard(now) >= limit

    def _ask_for_rows(self, now: float) -> None:
        if now - self._last_rows < _ROWS_SECONDS:
            return
        self._last_rows = now
        self._compare(self._nodes.mine, self._answer({"what": "rows"}))
        for node, link in list(self._links.items()):
            # A leader that is stopped gets no more questions than one.
            if not self._asked_for_rows.get(node):
                self._asked_for_rows[node] = True
                with contextlib.suppress(OSError):
                    link.send({"ask": 0, "what": "rows"})

    def _compare(self, node: int, value: Any) -> None:
        rows, stopping, self._briefs[node] = value
        trouble = self._comparison.add(node, [Row(*row) for row in rows], stopping)
        if trouble is not None and self._trouble is None:
            self._trouble = trouble, time.monotonic()

    def _check_trouble(self, now: float) -> None:
        """Report calls that differ, if nobody else does within a second, or may still raise an error."""
        if self._trouble is None or not self._desk.is_idle:
            return
        trouble, since = self._trouble
        is_ending = self._has_announced or any(link.is_ending for link in self._links.values())
        patience = _OTHERS_END_SECONDS if is_ending else _OTHERS_REPORT_SECONDS
        if self._tuning.at_deadline == "raise" and self._tuning.deadline_seconds > 0:
            patience += self._tuning.deadline_seconds + _RAISE_SECONDS
        if now - since < patience:
            return
        self._trouble = None
        if isinstance(trouble, Desertion):
            what = f"rank {trouble.stopping} has come to its end, and will not come to an operation of ranks "
            self._end_job(CLAIMED_DIFFERENCE, f"{what}{trouble.position.ranks} in which rank {trouble.waiting} waits")
            return
        self._desk.ask_all(
            {"what": "views", "position": trouble.position},
            _VIEWS_SECONDS,
            lambda answers: self._report_mismatch(trouble, answers),
        )

    def _report_mismatch(self, mismatch: Mismatch, answers: Answers) -> None:
        calls: dict[str, list[int]] = {}
        for node in sorted(answers):
            for view in map(reports.View._make, answers[node]):
                if not view.is_missing:
                    calls.setdefault(view.text, []).append(view.rank)
        sides = "; ".join(
            f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} call{'s' * (len(ranks) == 1)} {text}"
            for text, ranks in calls.items()
        )
        if len(calls) < 2:  # too long ago to be on the boards still
            first, second = (self._nodes.name(node) for node in mismatch.nodes)
            sides = f"{first} and {second} differ; their records were overwritten meanwhile"
        number, ranks = mismatch.position.sequence_number, mismatch.position.ranks
        why = f"RanksDisagree: operation {number} of the communicator of ranks {ranks} is not the same on all ranks"
        self._end_job(CLAIMED_DIFFERENCE, f"{why}: {sides}")

    def _lost(self) -> list[int]:
        """The nodes that are lost, and were not reported."""
        now = time.monotonic()
        cut = [node for node in self._links if self._is_cut(node, now)]
        return [node for node in sorted([*self._gone, *cut]) if node not in self._reported]

    def _check_losses(self, now: float) -> None:
        """Report the nodes that are lost, if the other ranks there do not, and end the job."""
        if ulfm.is_elastic() or not self._desk.is_idle:
            return
        is_hub = self._nodes.mine in self._nodes.hubs
        patience = _OTHERS_REPORT_SECONDS * (1 if is_hub else 2)
        lost = self._lost()
        if not any(now - self._gone.get(node, now - patience) >= patience for node in lost):
            return
        self._reported.update(lost)
        goes_on = self._tuning.at_deadline == "report" and not any(node in self._gone for node in lost)
        self._end_job(CLAIMED_DEATH, "; ".join(self._loss(node, now) for node in lost), ends=not goes_on)

    def _end_job(self, reason: int, why: str, *, ends: bool = True) -> None:
        def end() -> None:
            if ends:
                abort.abort(abort.EXIT_CODE)

        self._desk.begin(reason, f"torchmpi_py: report of rank {self._board.get(WORLD_RANK)}: {why}", end, ends=ends)

    def _loss(self, node: int, now: float) -> str:
        """What has become of a node that is lost."""
        if node in self._links:
            seconds = self._links[node].seconds_unheard(now)
            return f"{self._nodes.name(node)} has not been heard of for {seconds:.0f} s"
        leader = self._nodes.ranks[node][0]
        last = f". When last heard of: {'; '.join(self._briefs[node])}" if self._briefs.get(node) else ""
        return f"rank {leader} on host {self._nodes.hosts[node]} died, or left without mpi.stop(){last}"

    def _absence(self, node: int) -> str:
        """Why a node has not given its part of a report."""
        now, link = time.monotonic(), self._links.get(node)
        leader = self._nodes.ranks[node][0]
        if link is None and node not in self._gone:
            left = " has left by mpi.stop()" if node in self._left else ": no connection, nothing is known of it here"
            return f"{self._nodes.name(node)}{left}"
        if link is None:
            text = self._loss(node, now).partition(". When")[0]
        elif link.seconds_unheard(now) >= _TURN_SECONDS * 4:
            text = self._loss(node, now)
        else:
            text = (
                f"{self._nodes.name(node)}: the host answers, but rank {leader} does not: its process is stopped, or "
                "in a call that does not let Python's other threads run"
            )
        return "\n    ".join([text, *(f"when last heard of: {each}" for each in self._briefs.get(node, []))])
