"""Report on a job with several nodes: a hub collects one part from each node, and prints a single report.

A rank that has found a fault *claims* the report from a hub, and sends the part of its node with the claim. The hub
requests the parts of the other nodes, waits at most two seconds, prints the report, and answers "printed". If another
claim arrives before this answer or shortly afterwards, the hub answers that claim with "held". After the answer, the
rank that made the claim ends the job or lets the job continue. A hub that finds a fault itself starts a report without
a claim.

If no hub answers a claim, the rank prints the report of its own node.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable
from typing import Any

from torchmpi_py.core.status_board import CLAIMED_ASKED, Board
from torchmpi_py.watch import flight_recorder, node_links, reports
from torchmpi_py.watch.cross_check import Position
from torchmpi_py.watch.node_links import Link, Message, Nodes
from torchmpi_py.watch.reports import Line, NodeReport

CLAIM_HOLDS_SECONDS = 30.0
CLAIM_HOLDS_SECONDS_WHEN_ASKED = 1.0
PARTS_SECONDS = 2.0  # A node waits 1.5 s for its ranks' stacks.
OTHERS_REPORT_SECONDS = 1.0  # Within this time, other ranks report a fault that they have found themselves.
OTHERS_END_SECONDS = 5.0  # A rank ends the job within this time after its announcement.
RAISE_SECONDS = 5.0  # An operation raises CollectiveTimeout within this time after its timeout.
SILENT_SECONDS = 2.5  # A leader answers at shorter intervals.
_VIEWS_SECONDS = 1.0
_CLAIM_SECONDS = 6.0
_KILLED_SECONDS = 2.0  # If no hub answers because the job ends, this rank is killed within this time.

Answers = dict[int, Any]
Part = tuple[list[Line], str]  # a node's part of a report: the rows of its ranks, and a line about its dump
_MOST_NODES_APART = 8  # A report on more nodes merges the rows of all ranks.
_MOST_ROWS = 64


def hold_seconds(reason: int) -> float:
    """Return for how many seconds a claim prevents other reports for the same reason."""
    return CLAIM_HOLDS_SECONDS_WHEN_ASKED if reason == CLAIMED_ASKED else CLAIM_HOLDS_SECONDS


def claim(board: Board, reason: int, report: NodeReport, number: int | None = None, *, ends: bool) -> Message | None:
    """Claim a report on the job from a hub, and return the hub's answer, or None if no hub answers.

    ``reason`` is a field of the board (``CLAIMED_...``). ``report`` becomes this node's part. ``number`` is the number
    of the late operation, if any. ``ends`` states whether the job ends after the report. The answer has ``claimed``
    ("printed" or "held") and ``position`` (the late operation that was reported last).
    """
    if node_links.current is None:
        return None
    late = reports.waited_for(board, number)
    question = {
        "claim": reason,
        "node": node_links.current.mine,
        "heading": report.heading,
        "part": [report.rows, flight_recorder.dump(board)],
        "position": reports.position_of(board, late),
        "called": "" if late is None else late.what,
        "ends": ends,
    }
    answer = node_links.ask(question, _CLAIM_SECONDS)
    if answer is None:
        time.sleep(_KILLED_SECONDS)
    return answer


def withdraw() -> None:
    """Inform a hub that the job, which was about to end, continues."""
    node_links.ask({"withdraw": 1}, 1.0)


@dataclasses.dataclass
class _Question:
    """A question to all nodes, which ends when all nodes in ``waiting`` have answered, or at the time ``until``.

    ``then`` is called with the answers when the question ends.
    """

    waiting: set[int]
    answers: Answers
    until: float
    then: Callable[[Answers], None]


@dataclasses.dataclass
class _Report:
    """A report that waits for the parts of the nodes. ``then`` is called when the report is printed."""

    reason: int
    heading: str
    position: Position | None
    ends: bool
    parts: dict[int, Part]
    then: Callable[[], None]


class ReportDesk:
    """The reports of one hub. Only the thread that serves the links may call the methods.

    ``links`` maps each other node to the link to its leader. ``answer`` computes this node's own answer to a question.
    ``absence`` returns the reason why a node has not sent its part. ``say`` prints a report.
    """

    def __init__(
        self,
        nodes: Nodes,
        links: dict[int, Link],
        answer: Callable[[Message], Any],
        absence: Callable[[int], str],
        say: Callable[[str], None],
    ) -> None:
        self._nodes, self._links, self._answer, self._absence, self._say = nodes, links, answer, absence, say
        self._numbers = itertools.count(1)
        self._questions: dict[int, _Question] = {}
        self._report: _Report | None = None
        self._claimed: dict[int, float] = {}  # reason -> time of its last report
        self._is_ending = False
        self._last_position: Position | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no report is under way, and no report has announced the end of the job."""
        return self._report is None and not self._is_ending

    def ask_all(self, question: Message, seconds: float, then: Callable[[Answers], None], skip: int = -1) -> None:
        """Send a question to the leaders of all nodes except ``skip``.

        Call ``then`` with the answers when all have arrived, or after ``seconds`` with the answers until then.
        """
        number = next(self._numbers)
        peers: set[int] = set()
        now = time.monotonic()
        for node, link in list(self._links.items()):
            if node != skip:
                with contextlib.suppress(OSError):  # A later turn handles a lost link.
                    link.send({"ask": number, **question})
                    if now - link.last_heard < SILENT_SECONDS:
                        peers.add(node)
        own = None if skip == self._nodes.mine else self._answer(question)
        self._questions[number] = _Question(peers, {} if own is None else {self._nodes.mine: own}, now + seconds, then)

    def ask_views(self, position: Any, then: Callable[[list[Any]], None]) -> None:
        """Request the views (``reports.View``) of a position from all nodes, and call ``then`` with a list of them."""
        question = {"what": "views", "position": position}
        self.ask_all(
            question, _VIEWS_SECONDS, lambda answers: then([view for node in sorted(answers) for view in answers[node]])
        )

    def answered(self, node: int, number: int, value: Any) -> None:
        """Store a node's answer to a question. ``value`` is None if the node could not find an answer."""
        question = self._questions.get(number)
        if question is not None:
            if value is not None:
                question.answers[node] = value
            question.waiting.discard(node)

    def turn(self) -> None:
        """End each question that all nodes have answered or whose time is over, and call its ``then``."""
        now = time.monotonic()
        done = [number for number, each in self._questions.items() if not each.waiting or now > each.until]
        for number in done:
            question = self._questions.pop(number)
            question.then(question.answers)

    def handle(self, link: Link, message: Message, lost: str) -> None:
        """Answer a rank's claim, withdrawal or request. ``lost`` is a text about the lost nodes."""
        if "claim" in message:
            self._handle_claim(link, message)
        elif "views" in message:
            self.ask_views(message["views"], lambda views: _reply(link, {"views": views}))
        elif "withdraw" in message:
            self._is_ending = False
            _reply(link, {"withdrawn": 1})
        elif "lost" in message:
            _reply(link, {"lost": lost})

    def _handle_claim(self, link: Link, message: Message) -> None:
        """Start the report that a rank claims, unless a report is under way or was printed shortly before."""
        reason, node = message["claim"], message["node"]
        if self._report is not None:
            # Keep this part, because the leader of the same node may be stopped and unable to send a part. No other
            # rank of the node sends a part, because two ranks of a node do not claim at the same time.
            self._report.parts.setdefault(node, message["part"])
        recent = time.monotonic() - self._claimed.get(reason, -CLAIM_HOLDS_SECONDS) < hold_seconds(reason)
        if not self.is_idle or recent:
            _reply(link, {"claimed": "held", "position": self._last_position})
            return
        position = None if message["position"] is None else Position(*message["position"])

        def printed() -> None:
            _reply(link, {"claimed": "printed", "position": position})

        parts = {node: message["part"]}
        self.begin(reason, message["heading"], printed, position, message["called"], ends=message["ends"], parts=parts)

    def begin(
        self,
        reason: int,
        heading: str,
        then: Callable[[], None],
        position: Position | None = None,
        called: str = "",
        *,
        ends: bool = True,
        parts: dict[int, Part] | None = None,
    ) -> None:
        """Request the parts of all nodes, print the report when the parts arrive, and then call ``then``.

        ``called`` is the text of the late call at ``position``. ``parts`` contains the part that a claim already sent.
        """
        parts = parts or {}
        self._report = _Report(reason, heading, position, ends, parts, then)
        skip = next(iter(parts), -1)
        self.ask_all({"what": "part", "position": position, "called": called}, PARTS_SECONDS, self._print, skip)

    def _print(self, answers: Answers) -> None:
        """Print the report from the parts that have arrived, then call the report's ``then``."""
        report, self._report = self._report, None
        assert report is not None, "begin() sets the report before it requests the parts"
        parts = {node: ([Line(*row) for row in rows], dump) for node, (rows, dump) in (answers | report.parts).items()}
        try:
            self._say("\n".join([report.heading, *self._lines(parts)]))
        finally:
            self._claimed[report.reason], self._is_ending = time.monotonic(), report.ends
            self._last_position = report.position
            report.then()

    def _lines(self, parts: dict[int, Part]) -> list[str]:
        """Return the lines of a report, with a section for each node.

        With many nodes, merged rows of all ranks precede the sections. The row with the most ranks is the first.
        """
        lines, nodes = list[str](), sorted(self._nodes.ranks)
        if len(nodes) > _MOST_NODES_APART:
            rows = reports.folded(row for here, _ in parts.values() for row in here)
            rows.sort(key=lambda row: -len(row.ranks))
            lines = reports.limited([str(row) for row in rows], "more rows", _MOST_ROWS)
            parts = {node: ([], dump) for node, (_, dump) in parts.items()}
            nodes.sort(key=parts.__contains__)  # Put nodes without an answer first.
        sections = {node: [f"{self._nodes.name(node)}:", *map(str, here), dump] for node, (here, dump) in parts.items()}
        texts = ["\n".join(sections.get(node) or [self._absence(node)]) for node in nodes]
        return [*lines, *reports.limited(texts, "more hosts", _MOST_NODES_APART)]


def _reply(link: Link, message: Message) -> None:
    with contextlib.suppress(OSError):  # The process that sent the message may have ended.
        link.send(message)
