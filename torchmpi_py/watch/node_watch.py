"""Detect hangs between nodes: a thread of each node's leader serves the links to the other nodes.

Once a second the first reachable hub requests the rows of all nodes from their leaders, and compares the rows
(``cross_check.py``). Calls that differ end the job with a report of both sides. The hub waits a second before it
reports, because MPI may also detect the difference, and then a rank raises an error with both sides. The reports of all
nodes go through a hub (``job_reports.py``).

If the other end closes a link without a "leaving" message and does not connect again, the leader's process has ended
without ``mpi.stop()``. The other ranks of the node have some seconds to report this first. If a link carries no
acknowledgement for ``Tuning.unreachable_seconds``, the host is unreachable, even if the system closes the connection
earlier. Both cases end the job, but if ``Tuning.at_deadline`` is "report", an unreachable host is only reported. An
elastic job survives dead ranks, even all ranks of a node. It does not survive the loss of a host, because Open MPI's
mpirun does not.
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
from torchmpi_py.watch import abort, cross_check, flight_recorder, job_reports, node_links, reports, stacks
from torchmpi_py.watch.cross_check import Comparison, Desertion, Mismatch, Position, Row
from torchmpi_py.watch.job_reports import ReportDesk
from torchmpi_py.watch.node_links import Link, Message, Nodes

logger = logging.getLogger("torchmpi_py")

_TURN_SECONDS = 0.25
_ROWS_SECONDS = 1.0  # The rows are compared at this interval.
_CONNECT_AGAIN_SECONDS = 2.0
_WARN_SECONDS = 30.0  # A warning follows if a hub cannot be reached for this time.
_COME_AGAIN_SECONDS = 1.5  # A leader whose link ended may connect again within this time plus OTHERS_REPORT_SECONDS.
_COME_BACK_SECONDS = 4.0  # This replaces _COME_AGAIN_SECONDS if the host was silent.
_STALL_SECONDS = 1.0  # A slower turn means that this thread stalled, not that the peers are silent.
_PROOF_SECONDS = 5.0
_SLOW_SECONDS = 0.5  # time for a proof while other connections wait
_ACCEPT_SOON_SECONDS, _ACCEPT_AGAIN_SECONDS = 0.01, 1.0
_MOST_UNPROVED = 64  # Connections without a proof are limited, because each of them needs a descriptor.
_ACCEPTED_PER_TURN = 16


class NodeWatch:
    """The thread that serves the links of a node's leader. It runs from construction to ``stop``.

    ``listener`` is None if this rank is not a hub, or cannot listen. ``say`` prints a report.
    """

    def __init__(self, board: Board, nodes: Nodes, listener: socket.socket | None, tuning: Tuning, say: Any) -> None:
        self._board, self._nodes, self._listener, self._tuning = board, nodes, listener, tuning
        self._links: dict[int, Link] = {}
        self._others: list[Link] = []  # short links, and links without a proof
        self._desk = ReportDesk(nodes, self._links, self._answer, self._absence, say)
        self._rows, self._comparison = cross_check.Rows(board), Comparison()
        self._briefs: dict[int, list[str]] = {}  # by node: its ranks' last known operations
        self._asked_for_rows: dict[int, bool] = {}  # by node: whether an answer is pending
        self._gone: dict[int, float] = {}  # node whose link ended without "leaving" -> time from which it is lost
        self._unreachable: dict[int, float] = {}  # node whose link the system closed -> last sign of life
        self._left: set[int] = set()
        self._reported: set[int] = set()  # nodes whose loss was reported
        self._trouble: tuple[Mismatch | Desertion, float] | None = None
        if listener is not None:
            listener.setblocking(False)
        self._begun = self._last_rows = self._now = time.monotonic()  # ``_now`` is when links were last checked.
        self._last_connect = self._accept_after = 0.0
        self._heard_rows: dict[int, float] = {}  # the time at which the rows of each node last arrived
        self._has_warned = self._has_announced = False
        self._ending = threading.Event()
        self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._loop, name="torchmpi_py-nodes", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread, and inform the other nodes that this node leaves normally."""
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
                    logger.exception("hang detection between nodes raised an error, but continues")
                self._ending.wait(_TURN_SECONDS)
        for link in (*self._links.values(), *self._others):
            with contextlib.suppress(OSError):
                link.send({"leaving": 1})
            link.close()
        if self._listener is not None:
            self._listener.close()

    def _turn(self) -> None:
        """Connect to hubs, and handle messages. If this node is in charge, also compare rows and find lost nodes."""
        if time.monotonic() - self._last_connect > _CONNECT_AGAIN_SECONDS:
            self._connect_to_hubs()
            self._last_connect = time.monotonic()
        self._serve()
        self._announce_end()
        self._desk.turn()
        now = time.monotonic()  # Read the time after all slow steps, so that a stall does not look like silence.
        if now - self._now < _TURN_SECONDS / 2:  # Checking thousands of links takes too long for every turn.
            return
        self._tend(now)
        if self._is_in_charge(now):
            self._ask_for_rows(now)
            self._check_trouble(now)
            self._check_losses(now)

    def _tend(self, now: float) -> None:
        """Check the links for signs of life, and drop connections that have not sent a proof in time."""
        stalled, self._now = now - self._now - _STALL_SECONDS, now
        for node, link in list(self._links.items()):
            if stalled > 0:
                link.forgive(stalled, now)
            try:
                link.tend(now)
            except OSError:
                self._lose(node)
        for link in [each for each in self._others if not each.is_proved and now - each.begun > _PROOF_SECONDS]:
            self._drop(link)

    def _connect_to_hubs(self) -> None:
        """Connect to each hub of lower rank to which this node has no link."""
        for hub in self._nodes.hubs:
            if hub >= self._nodes.mine or hub in self._links or hub in self._left:
                continue
            try:
                link = node_links.connect(self._nodes, hub, self._nodes.mine, is_again=self._last_connect > 0)
            except (OSError, ValueError) as error:
                if not self._has_warned and hub not in self._gone and time.monotonic() - self._begun > _WARN_SECONDS:
                    self._has_warned = True
                    where = ", port ".join(map(str, self._nodes.hubs[hub]))
                    logger.warning(
                        "hang detection of %s cannot connect to %s (%s), so calls may not be compared between nodes. "
                        "Set GLOO_SOCKET_IFNAME to the network interface through which the nodes reach each other",
                        self._nodes.name(self._nodes.mine),
                        where,
                        error,
                    )
                continue
            self._has_come(hub, link)
            for message in link.unread:
                self._handle(link, message)

    def _serve(self) -> None:
        """Wait for messages and connections, and handle them."""
        ends = [*self._links.values(), *self._others]
        poll = select.poll()
        poll.register(self._wake[0], select.POLLIN)
        if self._listener is not None and time.monotonic() >= self._accept_after:
            poll.register(self._listener, select.POLLIN)
        for link in ends:
            poll.register(link, select.POLLIN | (select.POLLOUT if link.has_output else 0))
        ready = dict(poll.poll(_TURN_SECONDS * 1000))
        for link in ends:
            if link.fileno() in ready:
                self._read(link)
        if self._listener is not None and self._listener.fileno() in ready:
            self._accept(self._listener)

    def _accept(self, listener: socket.socket) -> None:
        """Accept connections. If too many lack a proof, drop the slow ones, because a proof takes only a round trip."""
        unproved, now = [link for link in self._others if not link.is_proved], time.monotonic()
        if len(unproved) >= _MOST_UNPROVED:  # The system queues further connections.
            self._accept_after = now + _ACCEPT_SOON_SECONDS
            for link in (each for each in unproved if now - each.begun > _SLOW_SECONDS):
                self._drop(link)
            return
        try:
            for _ in range(_ACCEPTED_PER_TURN):
                self._others.append(Link(listener.accept()[0], self._nodes.token, accepts=True))
        except BlockingIOError:
            pass
        except OSError:  # For example, too many files are open. Without a pause the thread would loop.
            self._accept_after = now + _ACCEPT_AGAIN_SECONDS

    def _read(self, link: Link) -> None:
        try:
            messages = link.receive()  # Receive first, because messages that arrived count even if sending fails.
            with contextlib.suppress(OSError):  # The next turn detects the end of the link.
                link.flush()
        except (OSError, ValueError):  # The link has ended, or the other end does not belong to the job.
            self._drop(link)
            return
        if link in self._others and link.node is not None:  # The other end has proved that it is a leader.
            self._others.remove(link)
            self._has_come(link.node, link)
        for message in messages:
            self._handle(link, message)

    def _has_come(self, node: int, link: Link) -> None:
        former = self._links.pop(node, None)
        if former is not None:
            former.close()
        self._links[node] = link
        for since in (self._gone, self._unreachable, self._asked_for_rows):
            since.pop(node, None)

    def _drop(self, link: Link) -> None:
        if link in self._others:
            self._others.remove(link)
        elif link.node is not None and self._links.get(link.node) is link:
            self._lose(link.node)
            return
        link.close()

    def _lose(self, node: int) -> None:
        """Close the link to a node, and record whether the node has left, is unreachable, or may be dead."""
        link, now = self._links.pop(node), time.monotonic()
        with contextlib.suppress(OSError, ValueError):
            link.receive()  # The last message may be "leaving".
        link.close()
        self._asked_for_rows.pop(node, None)
        if link.is_leaving:
            self._left.add(node)
        elif link.is_unreachable:
            self._unreachable[node] = now - link.seconds_unheard(now)
        else:
            # A node that announced the end of the job gets more time, because it has printed the reason already.
            was_silent = link.seconds_unheard(now) > job_reports.SILENT_SECONDS
            again = _COME_BACK_SECONDS if was_silent else _COME_AGAIN_SECONDS
            self._gone[node] = now + (job_reports.OTHERS_END_SECONDS if link.is_ending else again)

    def _handle(self, link: Link, message: Message) -> None:
        """Handle a hub's question, a leader's answer, or a message of a rank that claims a report or has a question."""
        if "ask" in message:
            with contextlib.suppress(OSError):
                link.send({"answer": message["ask"], "value": self._answer(message)})
        elif "answer" in message and link.node is not None:
            if message["answer"] == 0:
                self._asked_for_rows[link.node] = False
                self._heard_rows[link.node] = time.monotonic()
                self._compare(link.node, message["value"])
            else:
                self._desk.answered(link.node, message["answer"], message["value"])
        else:
            lost = [node for node in self._lost(self._now) if node not in self._reported]
            self._desk.handle(link, message, "; ".join(reports.limited([self._loss(node, self._now) for node in lost])))

    def _answer(self, question: Message) -> Any:
        """Return this node's answer to a hub's question, or None if this node cannot find an answer."""
        try:
            return self._find_answer(question)
        except Exception:
            logger.exception("hang detection between nodes cannot answer the request for %r", question.get("what"))
            return None

    def _find_answer(self, question: Message) -> Any:
        """Return the rows since the last question, the views at a position, or this node's part of a report."""
        board, where = self._board, question.get("position")
        position = None if where is None else Position(*where)
        if question["what"] == "rows":
            briefs = [reports.brief(board, index) for index in board.indices[:8]]
            return [*self._rows.read(), briefs]
        if question["what"] == "views":
            return [] if position is None else reports.views(board, position)
        silent = stacks.gather(board, self._ending.is_set)
        return [reports.part_of_node(board, position, question["called"], silent), flight_recorder.dump(board)]

    def _announce_end(self) -> None:
        """Inform the other nodes once when a rank of this node has printed a reason and is ending the job."""
        board = self._board
        if not self._has_announced and any(board.get(HAS_LEFT, index) == ENDING for index in board.indices):
            self._has_announced = True
            for link in self._links.values():
                with contextlib.suppress(OSError):
                    link.send({"ending": 1})

    def _is_in_charge(self, now: float) -> bool:
        """Return whether this node has to compare the calls: no hub of lower rank exists, or none can be reached."""
        before = [hub for hub in self._nodes.hubs if hub < self._nodes.mine]
        return not any(hub in self._links and not self._is_cut(hub, now) for hub in before)

    def _is_cut(self, node: int, now: float) -> bool:
        return 0 < self._tuning.unreachable_seconds <= self._seconds_unheard(node, now)

    def _seconds_unheard(self, node: int, now: float) -> float:
        link = self._links.get(node)
        return now - self._unreachable[node] if link is None else link.seconds_unheard(now)

    def _ask_for_rows(self, now: float) -> None:
        """Once a second, compare this node's rows, and request the rows of the other nodes."""
        if now - self._last_rows < _ROWS_SECONDS:
            return
        self._last_rows = now
        self._compare(self._nodes.mine, self._answer({"what": "rows"}))
        self._heard_rows[self._nodes.mine] = now
        for node, link in list(self._links.items()):
            # A stopped leader gets only one question, because more questions would fill the connection.
            if not self._asked_for_rows.get(node):
                self._asked_for_rows[node] = True
                with contextlib.suppress(OSError):
                    link.send({"ask": 0, "what": "rows"})

    def _compare(self, node: int, value: Any) -> None:
        if value is None:
            return
        rows, stopping, self._briefs[node] = value
        trouble = self._comparison.add(node, [Row(*row) for row in rows], stopping)
        if trouble is not None and self._trouble is None:
            self._trouble = trouble, time.monotonic()

    def _check_trouble(self, now: float) -> None:
        """Report a fault that the comparison found, unless another rank reports it first or may still raise."""
        if self._trouble is None or not self._desk.is_idle:
            return
        trouble, since = self._trouble
        is_ending = self._has_announced or any(link.is_ending for link in self._links.values())
        patience = job_reports.OTHERS_END_SECONDS if is_ending else job_reports.OTHERS_REPORT_SECONDS
        if self._tuning.at_deadline == "raise" and self._tuning.deadline_seconds > 0:
            patience += self._tuning.deadline_seconds + job_reports.RAISE_SECONDS
        if now - since < patience:
            return
        if isinstance(trouble, Desertion) and not self._is_fresh(trouble, since + patience):
            return
        self._trouble = None
        if isinstance(trouble, Desertion):
            if not self._comparison.lasts(trouble):
                return
            what = f"rank {trouble.stopping} is in mpi.stop() and will not call an operation of ranks "
            self._end_job(CLAIMED_DIFFERENCE, f"{what}{trouble.position.ranks} in which rank {trouble.waiting} waits")
            return
        self._desk.ask_views(trouble.position, lambda views: self._report_mismatch(trouble, views))

    def _is_fresh(self, trouble: Desertion, since: float) -> bool:
        """Return whether the nodes of both ranks have sent rows after the time ``since``."""
        both = {trouble.waiting, trouble.stopping}
        nodes = [node for node, ranks in self._nodes.ranks.items() if both.intersection(ranks)]
        return all(self._heard_rows.get(node, 0.0) > since for node in nodes)

    def _report_mismatch(self, mismatch: Mismatch, views: list[Any]) -> None:
        """End the job with a report of both sides; ``views`` holds the calls of all nodes' ranks at the position."""
        first, second = (self._nodes.name(node) for node in mismatch.nodes)
        sides = reports.sides_of_nodes([view for view in map(reports.View._make, views) if not view.is_missing])
        sides = sides or f"the calls of {first} and {second} differ, but their records have been overwritten"
        self._end_job(CLAIMED_DIFFERENCE, f"RanksDisagree: {mismatch.position} is not the same on all ranks: {sides}")

    def _lost(self, now: float) -> list[int]:
        """Return all lost nodes, including the nodes whose loss has been reported."""
        cut = [node for node in (*self._links, *self._unreachable) if self._is_cut(node, now)]
        return sorted([*self._gone, *cut])

    def _check_losses(self, now: float) -> None:
        """Report the lost nodes and end the job, unless other ranks of these nodes report first."""
        if not self._desk.is_idle:
            return
        is_hub = self._nodes.mine in self._nodes.hubs
        patience = job_reports.OTHERS_REPORT_SECONDS * (1 if is_hub else 2)
        lost = self._lost(now)
        self._reported.intersection_update(lost)  # A node that has connected again may be lost again.
        lost = [node for node in lost if node not in self._reported and not (ulfm.is_elastic() and node in self._gone)]
        if not any(now - self._gone.get(node, now - patience) >= patience for node in lost):
            return
        self._reported.update(lost)
        goes_on = self._tuning.at_deadline == "report" and not any(node in self._gone for node in lost)
        why = "; ".join(reports.limited([self._loss(node, now) for node in lost], "more hosts"))
        why += "; an elastic job survives lost ranks, but not lost hosts" * (ulfm.is_elastic() and not goes_on)
        self._end_job(CLAIMED_DEATH, why, ends=not goes_on)

    def _end_job(self, reason: int, why: str, *, ends: bool = True) -> None:
        def end() -> None:
            if ends:
                abort.abort(abort.EXIT_CODE, why)

        self._desk.begin(reason, f"torchmpi_py: report of rank {self._board.get(WORLD_RANK)}: {why}", end, ends=ends)

    def _loss(self, node: int, now: float) -> str:
        """Return a clause about the loss of a node."""
        if node in self._links or node in self._unreachable:
            return f"{self._nodes.name(node)} has not answered for {self._seconds_unheard(node, now):.0f} s"
        leader = self._nodes.ranks[node][0]
        last = f". Last known: {'; '.join(self._briefs[node])}" if self._briefs.get(node) else ""
        return f"rank {leader} on host {self._nodes.hosts[node]} died, or exited without mpi.stop(){last}"

    def _absence(self, node: int) -> str:
        """Return the reason why a node has not sent its part of a report, with the last known state of its ranks."""
        now, link = self._now, self._links.get(node)
        leader = self._nodes.ranks[node][0]
        if link is None and node not in self._gone and node not in self._unreachable:
            reason = " has completed mpi.stop()" if node in self._left else ": no connection, so its state is unknown"
            return f"{self._nodes.name(node)}{reason}"
        if link is None:
            text = self._loss(node, now).partition(". Last known")[0]
        elif link.seconds_unheard(now) >= _TURN_SECONDS * 4:
            text = self._loss(node, now)
        else:
            text = (
                f"{self._nodes.name(node)}: the host answers, but rank {leader} does not: its process is stopped, or "
                "it is in a call that does not let Python's other threads run"
            )
        return "\n    ".join([text, *(f"last known: {each}" for each in self._briefs.get(node, []))])
