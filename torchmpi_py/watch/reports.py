"""Describe the operations of a node's ranks from the board, for reports and for errors about late or dead ranks.

In all functions ``index`` is the local rank of any rank of the node. ``number`` is the number of a record of the rank
that calls the function.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from torchmpi_py.core import journal, sequences, status_board
from torchmpi_py.core.journal import Entry
from torchmpi_py.core.status_board import CHECKSUM_BITS, HAS_LEFT, NAMESPACE, PROCESS, WORLD_RANK, Board, Record
from torchmpi_py.watch import node_links
from torchmpi_py.watch.cross_check import Position

_MOST_NAMED, _MOST_RANGES = 4, 20  # Up to 4 ranks with equal texts have separate rows.
_STATES = {"T": "its process is stopped (SIGSTOP)", "t": "a debugger has stopped its process"}
_ANSWER_SECONDS = 2.0  # A hub first collects the answers of the other nodes.


def is_dead(board: Board, index: int) -> bool:
    """Return whether a rank's process has ended without ``mpi.stop()``."""
    process = _process(board, index)
    if board.get(HAS_LEFT, index) == status_board.STOPPED or process is status_board.UNKNOWN_PROCESS:
        return False
    started = board.get(status_board.STARTED, index)  # 0 if the system does not report it
    return process is None or process.is_dead or (started != 0 and process.started != started)


def descriptor(board: Board, index: int) -> int | None:
    """Return a descriptor that becomes readable when a rank's process ends, or None if the system provides none."""
    if not _is_visible(board, index):
        return None
    try:
        return os.pidfd_open(board.get(PROCESS, index))
    except (AttributeError, OSError):
        return None


def trouble(board: Board, index: int) -> str:
    """Return the reason why a rank may be unable to continue, or "" if no reason is known."""
    if is_dead(board, index):
        return "its process is gone"
    if board.get(HAS_LEFT, index) == status_board.STOPPED:
        return "has completed mpi.stop()"
    process = _process(board, index)
    if process is not None and process.state in _STATES:
        return _STATES[process.state]
    if board.get(HAS_LEFT, index) in (status_board.DRAINING, status_board.STOPPING):
        return "is in mpi.stop()"
    return "is ending the job" * (board.get(HAS_LEFT, index) == status_board.ENDING)


def rank_name(board: Board, index: int) -> str:
    """Return the name of a rank and its process for reports."""
    return f"rank {board.get(WORLD_RANK, index)} (process {board.get(PROCESS, index)})"


def _by_rank(board: Board) -> list[int]:
    """Return the local ranks on this board, ordered by their world ranks."""
    return sorted(board.indices, key=lambda index: board.get(WORLD_RANK, index))


def _blocking(board: Board, waited: Record) -> Record | None:
    """Return the oldest open operation that was launched before a queued operation and so blocks it, or None."""
    if not waited.is_queued:
        return None
    before = [record for record in board.records(board.index) if record.is_launch and record.number < waited.number]
    return next((record for record in reversed(before) if record.is_open), None)


def limited(texts: Sequence[str], what: str = "more", most: int = _MOST_NAMED) -> list[str]:
    """Return the first ``most`` texts, and if there are more, a text with the number of omitted texts."""
    return [*texts[:most], *[f"{len(texts) - most} {what}"] * (len(texts) > most)]


class Line(NamedTuple):
    """A row of a report: the state of one rank, or of many ranks. ``name`` identifies the rank or the ranks."""

    ranks: list[int]
    name: str
    text: str

    def __str__(self) -> str:
        return f"{self.name}: {self.text}"


def folded(rows: Iterable[Line]) -> list[Line]:
    """Return the rows, with many rows of equal texts merged into one row. Times in the texts may differ."""
    alike, merged = dict[str, list[Line]](), list[Line]()
    for row in rows:
        alike.setdefault(re.sub(r"\d+\.\d s", "", row.text), []).append(row)
    for each in alike.values():
        ranks = sorted(rank for row in each for rank in row.ranks)
        if len(ranks) > (2 if "\n" in each[0].text else _MOST_NAMED):  # Three copies of a stack do not help.
            ranges = limited(sequences.ranks_as_text(ranks, strides=True).split(","), "more ranges", _MOST_RANGES)
            each = [Line(ranks, f"{len(ranks)} ranks ({', '.join(ranges)})", each[0].text)]
        merged += each
    return sorted(merged)


class NodeReport(NamedTuple):
    """A report on a node. ``missing`` lists the ranks that have not called the late operation; "" if none is known."""

    heading: str
    rows: list[Line]
    missing: str

    @property
    def text(self) -> str:
        """The report as one text."""
        return "\n".join([self.heading, *map(str, self.rows)])


def of_node(
    board: Board, why: str, number: int | None = None, *, silent: Collection[int] = (), has_text: bool = True
) -> NodeReport:
    """Return a report: the reason ``why``, this rank's late operation ``number`` (if any), and each rank's state.

    ``silent`` lists the ranks that have not written their stacks. ``has_text`` states whether to show stacks.
    """
    own, late = f"rank {board.get(WORLD_RANK)}", waited_for(board, number)
    heading = f"torchmpi_py: report of {own}: {why}"
    waiting = None if number is None else journal.find_record(board, number)
    if waiting is not None and late is not None:
        heading += f"\n{own} waits in {waiting.what}, called at {waiting.site}"
        if late.number != waiting.number:
            heading += f"; this operation is queued behind {late.what}, called at {late.site}"
    return NodeReport(heading, *_of_ranks(board, late, silent, has_text))


def waited_for(board: Board, number: int | None) -> Record | None:
    """Return the operation that blocks operation ``number`` in the queue, or else operation ``number`` itself.

    Return None if ``number`` is None or the operation has no record.
    """
    waiting = None if number is None else journal.find_record(board, number)
    return None if waiting is None else _blocking(board, waiting) or waiting


def part_of_node(board: Board, position: Position | None, called: str, silent: Collection[int]) -> list[Line]:
    """Return this node's part of a report on a late operation of another node.

    ``called`` is the text of the late call.
    """
    late, slot = None, None
    if position is not None:
        slot = board.find_slot(board.index, position.generation, position.ranks)
    if position is not None and slot is not None:
        fingerprint = position.place << CHECKSUM_BITS
        late = Record(0, fingerprint, slot, position.sequence_number, 0, 0, 0, 0, called, "", False)
    return _of_ranks(board, late, silent, True)[0]


def _of_ranks(board: Board, late: Record | None, silent: Collection[int], has_text: bool) -> tuple[list[Line], str]:
    """Return the state of each rank, and a clause with the ranks that have not called the late operation."""
    rows, activities = [], {index: _activity(board, index, late) for index in _by_rank(board)}
    for index, each in activities.items():
        lines = [_troubled(board, index, each.text)]
        if has_text and index not in silent:
            lines += [f"    {line}" for line in board.read_text(index).splitlines()]
        elif has_text and not trouble(board, index):
            lines.append("    has sent no stack: it is in a call that does not let Python's other threads run")
        rows.append(Line([board.get(WORLD_RANK, index)], rank_name(board, index), "\n".join(lines)))
    names = limited([rank_name(board, index) for index, each in activities.items() if each.is_missing])
    missing = f"{', '.join(names)} did not call {late.what}, called at {late.site}" if names and late else ""
    return folded(rows), missing


class _Activity(NamedTuple):
    """The current or last operation of a rank, compared with a late operation of this rank."""

    text: str
    is_there: bool = False  # The rank has called the same operation without failing.
    is_missing: bool = False  # The rank is in the communicator, but has not called the operation.


def _activity(board: Board, index: int, late: Record | None) -> _Activity:
    """Return the operation of a rank, compared with the late operation unless ``late`` is None."""
    if late is None or late.slot < 0 or late.sequence_number == 0:
        return _Activity(_last(board, index))
    is_own = index == board.index and late.number > 0
    theirs = late if is_own else board.counterpart(late.slot, late.fingerprint, index)
    if theirs is not None:
        state = "has completed it" if theirs.ended > 0 else "has failed in it" if theirs.ended else "is in it too"
        is_same = theirs.what == late.what
        call = "" if is_same else f", but with a different call: {theirs.what}"
        return _Activity(f"{state}{call}, called at {theirs.site}", is_there=is_same and theirs.ended >= 0)
    if index in board.slots_of.get(late.slot, {}):
        return _Activity(f"has not called it; {_last(board, index)}", is_missing=True)
    return _Activity(_last(board, index))


def _last(board: Board, index: int) -> str:
    records = board.records(index)
    if (last := _current(records)) is not None:
        return f"in {last.what} for {(board.now(index) - last.begun) / 1e9:.1f} s, called at {last.site}"
    if not records:
        return "has called nothing yet"
    last = records[0]
    how = "was launched" if not last.ended else "completed" if last.ended > 0 else "failed"
    ago = (board.now(index) - abs(last.ended or last.launched)) / 1e9
    return f"its last call, {last.what}, {how} {ago:.1f} s ago, called at {last.site}"


def _current(records: Sequence[Record]) -> Record | None:
    """Return a rank's oldest open operation, preferably a blocking call, in which the rank certainly waits."""
    open_records = [record for record in reversed(records) if record.is_open]
    return min(open_records, key=lambda record: record.is_launch, default=None)


def _troubled(board: Board, index: int, text: str) -> str:
    matter = trouble(board, index)
    return f"{matter + '; ' if matter else ''}{text}"


def _with_trouble(board: Board, index: int, text: str) -> str:
    return f"{rank_name(board, index)}: {_troubled(board, index, text)}"


def death(board: Board, index: int) -> str:
    """Return a clause with the operation in which, or after which, a rank has died."""
    records = board.records(index)
    if not records:
        return f"{rank_name(board, index)} died before its first operation"
    current = _current(records)
    last = current or records[0]
    return f"{rank_name(board, index)} died {'in' if current else 'after'} {last.what}, called at {last.site}"


def deaths(within_seconds: float) -> str:
    """Return a text about the dead ranks of this node or about lost nodes, or "" if none are found in time.

    Search for ``within_seconds``, because the system closes the connections of a dying process before the
    process ends. Other ranks notice the closed connections first.
    """
    board, until = status_board.current, time.monotonic() + within_seconds
    while board is not None:
        dead = [index for index in _by_rank(board) if is_dead(board, index)]
        if dead:
            return "; ".join(death(board, index) for index in dead[:_MOST_NAMED])
        if (answer := node_links.ask({"lost": 1}, _ANSWER_SECONDS)) is not None and answer["lost"]:
            return str(answer["lost"])
        if time.monotonic() > until:
            break
        time.sleep(0.01)
    return ""


def late(entry: Entry, only: Sequence[int] | None = None) -> str:
    """Return the ranks that this rank's operation waits for, as far as known, or "" if nothing is known.

    ``only`` restricts the result to these local ranks: for a message, its sender and its receiver.
    """
    board = status_board.current
    record = None if board is None else journal.find_record(board, entry[0])
    if board is None or record is None or only == ():
        return ""
    candidates = board.slots_of.get(record.slot, {}) if only is None else only
    others = [index for index in _by_rank(board) if index != board.index and index in candidates]
    activities = {index: _activity(board, index, record) for index in others}
    waits = [_with_trouble(board, index, each.text) for index, each in activities.items() if not each.is_there]
    elsewhere = _elsewhere(board, record)
    waits += [
        each.text if each.is_missing else f"rank {each.rank} is in another call: {each.text}"
        for each in elsewhere
        if each.fingerprint != record.fingerprint
    ]
    all_there = f"All ranks of {'the nodes that answer' if elsewhere else 'this node'} have called it."
    return "; ".join(limited(waits)) or all_there


class View(NamedTuple):
    """A rank's call of the operation at a position, or the rank's state if there is no call yet (``is_missing``)."""

    rank: int
    fingerprint: int  # 0 if the rank is missing
    text: str

    @property
    def is_missing(self) -> bool:
        """Whether the rank has not called the operation at the position."""
        return self.fingerprint == 0


def position_of(board: Board, record: Record | None) -> Position | None:
    """Return the position of this rank's operation, or None if the operation has no counterparts."""
    if record is None or record.slot < 0 or not record.sequence_number:
        return None
    group = board.group(board.index, record.slot)
    return Position(group.generation, group.ranks, record.fingerprint >> CHECKSUM_BITS)


def views(board: Board, position: Position) -> list[View]:
    """Return the views of this node's ranks at a position, for at most four ranks with the same call.

    Skip ranks that are not in the communicator, and ranks whose record has been overwritten.
    """
    by_call: dict[int, list[View]] = {}
    for index in _by_rank(board):
        rank, slot = board.get(WORLD_RANK, index), board.find_slot(index, position.generation, position.ranks)
        if slot is None:
            continue
        records = (each for each in board.records(index) if each.slot == slot)
        record = next((each for each in records if each.fingerprint >> CHECKSUM_BITS == position.place), None)
        if record is not None:
            view = View(rank, record.fingerprint, record.call)
        elif sequences.last_place(board, index, slot) < position.place:
            view = View(rank, 0, _with_trouble(board, index, _last(board, index)))
        else:
            continue
        if len(alike := by_call.setdefault(view.fingerprint, [])) < _MOST_NAMED:
            alike.append(view)
    return [view for alike in by_call.values() for view in alike]


def sides_of_nodes(seen: Sequence[View]) -> str:
    """Return the different calls of ranks at a position, or "" if the calls are not known to differ."""
    sides: dict[tuple[bool, str], list[str]] = {}
    for view in seen:
        sides.setdefault((view.is_missing, view.text), []).append(str(view.rank))
    texts = [
        f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)} call{'s' * (len(ranks) == 1)} {text}"
        for (is_missing, text), ranks in sides.items()
        if not is_missing
    ]
    texts += limited([text for is_missing, text in sides if is_missing])
    return "; ".join(texts) if len(texts) > 1 else ""


def _elsewhere(board: Board, record: Record) -> list[View]:
    """Return the views of ranks on other nodes at the position of this rank's operation, as far as known."""
    position = position_of(board, record)
    here = {board.get(WORLD_RANK, index) for index in board.indices}
    if position is None or node_links.current is None:
        return []
    if not sequences.is_cut(position.ranks) and here.issuperset(sequences.ranks_from_text(position.ranks)):
        return []
    answer = node_links.ask({"views": position}, _ANSWER_SECONDS)
    seen = [] if answer is None else [View(*each) for each in answer["views"]]
    return [view for view in seen if view.rank not in here]


def brief(board: Board, index: int) -> str:
    """Return a line about a rank's last operation. The line has no times, because it may be read later."""
    last = board.latest(index)
    what = "has called nothing yet" if last is None else f"last called {last.what} at {last.site}"
    return f"{rank_name(board, index)}: {what}"


class Sides(NamedTuple):
    """The calls of ranks at the place of an operation. ``differ`` states whether any call differs."""

    text: str
    differ: bool


def sides(entry: Entry) -> Sides:
    """Return the other ranks' calls at the place of an operation, and their call sites, as far as known.

    The text lists the ranks whose call differs, or all ranks if no call is known to differ. The text is "" if no call
    of another rank is known.
    """
    board = status_board.current
    mine = None if board is None else journal.find_record(board, entry[0])
    if board is None or mine is None or not mine.sequence_number:
        return Sides("", False)
    known = [side for side in sequences.sides(board, mine) if side.record is not None or not side.is_same]
    different = [side for side in known if not side.is_same]
    elsewhere = [] if different else [view for view in _elsewhere(board, mine) if not view.is_missing]
    differ = [view for view in elsewhere if view.fingerprint != mine.fingerprint]
    text = sequences.describe_sides(board, mine, different or known)
    others = [f"rank {view.rank} calls {view.text}" for view in (differ or elsewhere)[:_MOST_NAMED]]
    return Sides("; ".join([text, *others]), bool(different or differ))


def disagreement(board: Board, number: int) -> str:
    """Return a text about the ranks of this node whose call differs from operation ``number``, or "" if none does."""
    mine = journal.find_record(board, number)
    return "" if mine is None else sequences.difference(board, mine)


def deserted(board: Board, number: int) -> str:
    """Return a clause about a rank of this node that is in ``mpi.stop()`` but has not called this operation.

    Return "" if there is no such rank.
    """
    mine = journal.find_record(board, number)
    if mine is None:
        return ""
    for index in sequences.behind(board, mine):
        if board.get(HAS_LEFT, index) == status_board.STOPPING:
            rank = rank_name(board, index)
            return f"{rank} is in mpi.stop() and will not call {mine.what}, called at {mine.site}"
    return ""


def _is_visible(board: Board, index: int) -> bool:
    """Return whether a rank shares this rank's process namespace, so that its process id is valid here."""
    return board.get(NAMESPACE) != 0 and board.get(NAMESPACE, index) == board.get(NAMESPACE)


def _process(board: Board, index: int) -> status_board.Process | None:
    if not _is_visible(board, index):
        return status_board.UNKNOWN_PROCESS
    return status_board.find_process(board.get(PROCESS, index))
