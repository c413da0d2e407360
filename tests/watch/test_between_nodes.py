"""The watch between nodes, its parts one at a time: links, rows and their comparison, reports of several nodes."""

import contextlib
import errno
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import types

import pytest

from torchmpi_py.core import config, sequences, status_board
from torchmpi_py.core.channels import Place
from torchmpi_py.core.status_board import CLAIMED_DEATH, CLAIMED_LATE, HAS_LEFT, STOPPING, WORLD_RANK, Record
from torchmpi_py.watch import cross_check, final_check, job_reports, node_links, node_watch, reports
from torchmpi_py.watch.cross_check import Comparison, Desertion, Mismatch, Position, Row
from torchmpi_py.watch.node_links import Link, Nodes
from torchmpi_py.watch.reports import NodeReport

pytestmark = pytest.mark.timeout(240)
WITHIN_SECONDS = 60.0


class _OneRank:
    """A communicator of one rank that shares no memory."""

    rank, size = 0, 1

    def allgather(self, x):
        return [x]

    def Barrier(self):
        pass


class Rank:
    """A rank alone on its node: a board, on which it records calls as the journal does."""

    def __init__(self, rank, ranks="0-1", generation=1):
        self.board = status_board.Board(_OneRank(), [Place(0, 0)], rank)
        self.slot = self.board.acquire_slot()
        self.generation, self.num_calls = generation, 0
        self.board.publish_slot(self.slot, generation, "key", ranks)
        self.board.slots_of[self.slot.number] = {0: self.slot.number}

    def call(self, what, *, is_over=True, site="here.py:1 in f"):
        self.num_calls += 1
        place = self.generation << status_board.SEQUENCE_NUMBER_BITS | self.num_calls
        fingerprint = place << status_board.CHECKSUM_BITS | sum(map(ord, what))
        number, (byte, _, end_word) = self.board.next_record()
        now = time.monotonic_ns()
        text, where = self.board.keep_string(what), self.board.keep_string(site)
        names = (self.slot.number + 1) << 2 * status_board.STRING_BITS | text << status_board.STRING_BITS | where
        status_board.pack(self.board.mapping, byte, number, fingerprint, now, 4 * self.num_calls, names)
        first = self.board.first_fingerprint(0, self.slot.number)
        self.board.words[first + self.num_calls % status_board.FINGERPRINTS_PER_SLOT] = fingerprint
        if is_over:
            self.board.words[end_word] = now
        return Position(self.generation, self.board.group(0, self.slot.number).ranks, place)


def compare(comparison, *ranks):
    """The first trouble, as a hub finds it."""
    found = None
    for rank in ranks:
        rows, stopping = rank_rows(rank)
        sent = json.loads(json.dumps([rows, stopping]))  # as they come over a link
        found = found or comparison.add(rank.board.get(WORLD_RANK), [Row(*row) for row in sent[0]], sent[1])
    return found


def rank_rows(rank):
    if not hasattr(rank, "rows"):
        rank.rows = cross_check.Rows(rank.board)
    return rank.rows.read()


def test_equal_calls_are_no_mismatch():
    first, second = Rank(0), Rank(1)
    comparison = Comparison()
    for number in range(3000):  # boards and histories go round
        for rank in (first, second):
            rank.call(f"allreduce {number % 7}")
        if number % 400 == 0:
            assert compare(comparison, first, second) is None
    for _ in range(900):
        first.call("ahead")
    assert compare(comparison, first, second) is None


@pytest.mark.parametrize("after", [0, 1, 500])
def test_a_mismatch_is_found_when_the_calls_are_over(after):
    first, second, third = Rank(0, "0,3,5"), Rank(3, "0,3,5"), Rank(5, "0,3,5")
    for rank in (first, second, third):
        for number in range(100):
            rank.call(f"allreduce {number}")
    comparison = Comparison()
    assert compare(comparison, first, second, third) is None
    position = first.call("allreduce sum")
    second.call("allreduce sum")
    third.call("allreduce max")
    for rank in (first, second, third):
        for number in range(after):
            rank.call(f"later {number}")
    found = compare(comparison, first, second, third)
    assert found == Mismatch(position, found.nodes)
    assert set(found.nodes) in ({0, 5}, {3, 5})
    assert position.sequence_number == 101


def test_rows_are_read_once_and_open_calls_again():
    rank = Rank(0)
    assert rank_rows(rank) == ([], [])
    rank.call("one")
    rank.call("two", is_over=False)
    ((generation, ranks, delegate, waits, fingerprints),) = rank_rows(rank)[0]
    assert (generation, ranks, delegate, waits, len(fingerprints)) == (1, "0-1", 0, False, 2)
    rank.call("three")
    assert len(rank_rows(rank)[0][0].fingerprints) == 2  # the open one, and what came since


def test_rows_are_of_delegates_alone():
    alone, other = Rank(4, ranks="4"), Rank(4, ranks="0-3")
    for rank in (alone, other):
        rank.call("one")
        assert rank_rows(rank)[0] == []


def test_ranks_behind_the_end_of_a_long_list_have_a_delegate():
    """The board has no room for all ranks: node of rank 0, which is in the list, and node of the last ones."""
    ranks = [0, 1, *(each * each for each in range(2, 80))]
    text = sequences.ranks_as_text(ranks, strides=True)
    first, last = Rank(0, text), Rank(ranks[-1], text)
    assert sequences.is_cut(first.board.group(0, first.slot.number).ranks)
    first.call("allreduce sum")
    last.call("allreduce max")
    assert isinstance(compare(Comparison(), first, last), Mismatch)


def test_of_several_such_ranks_of_a_node_the_lowest_is_the_delegate():
    world = {0: 90, 1: 70, 2: 80}  # by local rank
    board = types.SimpleNamespace(
        indices=list(world),
        get=lambda _, index: world[index],
        find_slot=lambda index, generation, ranks: None if index == 1 else 5,  # it belongs to another communicator
    )
    rows = cross_check.Rows(board)
    assert [index for index in world if index != 1 and rows._is_delegate(index, 3, "0,4,...")] == [2]


def test_a_communicator_that_was_freed_is_not_compared_with_the_next_in_its_slot():
    first, second = Rank(0), Rank(1)
    for rank in (first, second):
        rank.call("barrier")
    first.call("only here")
    first.board.publish_slot(first.slot, 2, "key", "0-1")
    first.generation, first.num_calls = 2, 0
    second.call("only there")
    second.board.publish_slot(second.slot, 2, "key", "0-1")
    second.generation, second.num_calls = 2, 0
    for rank in (first, second):
        rank.call("allreduce")
    assert compare(Comparison(), first, second) is None


def test_a_rank_in_stop_is_a_desertion_when_another_waits(monkeypatch):
    monkeypatch.setattr(cross_check, "_WAITS_NS", 0)
    first, second = Rank(0), Rank(1)
    for rank in (first, second):
        rank.call("one")
    comparison = Comparison()
    position = first.call("two", is_over=False)
    assert compare(comparison, first, second) is None
    second.board.put(HAS_LEFT, STOPPING)
    assert compare(comparison, second, first) == Desertion(position, 0, 1)


def test_a_wait_in_stop_is_no_desertion(monkeypatch):
    monkeypatch.setattr(cross_check, "_WAITS_NS", 0)
    first, second = Rank(0), Rank(1)
    for rank in (first, second):
        rank.call("one")
        rank.board.put(HAS_LEFT, STOPPING)
    first.call("mpi.stop()", is_over=False)
    assert compare(Comparison(), first, second, first) is None


def test_a_desertion_lasts_until_the_rank_waits_no_longer(monkeypatch):
    monkeypatch.setattr(cross_check, "_WAITS_NS", 0)
    first, second = Rank(0), Rank(1)
    for rank in (first, second):
        rank.call("one")
    first.call("two", is_over=False)
    second.board.put(HAS_LEFT, STOPPING)
    comparison = Comparison()
    found = compare(comparison, second, first)
    assert comparison.lasts(found)
    second.call("two")
    compare(comparison, second, first)
    assert not comparison.lasts(found)


def last_calls(rank):
    """As a rank alone on its node brings them to the last comparison."""
    board = rank.board
    return (
        *cross_check.Rows(board).read(),
        {(rank.generation, "0-1"): sequences.last_place(board, 0, rank.slot.number)},
    )


@pytest.mark.parametrize("difference", ["none", "call", "one more", "none at all"])
def test_the_last_comparison(difference):
    first, second = Rank(0), Rank(1)
    for rank in (first, second):
        for step in range(10 if difference != "none at all" else 0):
            position = rank.call("sum" if (rank, step, difference) != (second, 5, "call") else "max")
    if difference in ("one more", "none at all"):
        position = first.call("broadcast")
    for rank in (first, second):
        rank.board.put(HAS_LEFT, STOPPING)
    found = final_check._first_difference([last_calls(first), last_calls(second)])
    expected = {"none": None, "call": position._replace(place=position.place - 4)}.get(difference, position)
    assert found == expected
    if difference in ("one more", "none at all"):
        views = [view for rank in (first, second) for view in reports.views(rank.board, found)]
        sides = reports.sides_of_nodes(views)
        assert sides.startswith("rank 0 calls broadcast, ")
        assert "; rank 1 (process " in sides


def test_views_and_positions():
    rank = Rank(3)
    position = rank.call("allreduce", site="train.py:7 in step")
    assert reports.position_of(rank.board, rank.board.latest(0)) == position
    (view,) = reports.views(rank.board, position)
    assert (view.rank, view.is_missing, view.text) == (3, False, "allreduce, 4 bytes at train.py:7 in step")
    (view,) = reports.views(rank.board, position._replace(place=position.place + 1))
    assert view.is_missing
    assert "rank 3 (process" in view.text
    assert "train.py:7 in step" in view.text
    assert reports.views(rank.board, position._replace(ranks="0-7")) == []
    assert reports.brief(rank.board, 0).endswith("last called allreduce, 4 bytes at train.py:7 in step")
    assert reports.position_of(rank.board, Record(1, 0, -1, 0, 0, 0, 0, 0, "", "", False)) is None


def test_a_part_is_seen_from_the_operation_of_another_node():
    rank = Rank(3)
    position = rank.call("allreduce")
    here = reports.part_of_node(rank.board, position, "allreduce, 4 bytes", ())
    assert "is through with it" in here
    ahead = position._replace(place=position.place + 1)
    assert "has not come to it; its last, allreduce" in reports.part_of_node(rank.board, ahead, "barrier", ())


@contextlib.contextmanager
def a_pair(token=b"right", other=b"right"):
    """Two ends of a connection: that which connects, and that which accepts."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        connecting = socket.create_connection(server.getsockname())
        accepted = Link(server.accept()[0], token, accepts=True)
    link = Link(connecting, other, accepts=False)
    link.node = 7
    try:
        yield link, accepted
    finally:
        link.close()
        accepted.close()


def exchange(*links):
    """All messages that come until nothing more does."""
    found, quiet = [], 0
    while quiet < 20:
        news = [message for link in links for message in link.receive()]
        found, quiet = found + news, 0 if news else quiet + 1
        time.sleep(0.002)
    return found


def test_both_ends_of_a_link_prove_themselves():
    with a_pair() as (link, accepted):
        assert exchange(link, accepted) == []
        assert link.is_proved
        assert accepted.is_proved
        assert accepted.node == 7
        accepted.send({"text": "x" * 3_000_000})
        while accepted.has_output or not (found := link.receive()):
            accepted.flush()
        assert found == [{"text": "x" * 3_000_000}]
        link.send({"leaving": 1})
        link.close()
        with pytest.raises(OSError, match="closed"):
            until(lambda: accepted.receive() and False)
        assert accepted.is_leaving


def until(holds):
    """Wait until ``holds()``."""
    end = time.monotonic() + WITHIN_SECONDS
    while not (found := holds()):
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)
    return found


def test_a_stranger_is_refused():
    with a_pair(other=b"wrong") as (link, accepted), pytest.raises(OSError, match="token"):
        exchange(link, accepted)
    with a_pair() as (link, accepted):
        link.connection.send(struct.pack("!I", 1 << 20))
        with pytest.raises(OSError, match="1048576 bytes"):
            exchange(accepted)


@pytest.mark.parametrize("text", ["[]", "1", "[" * 1000, '{"signed":"\u00e9"}', '{"signed":"\\ud800"}', "{"])
def test_what_is_no_proof_is_refused(text):
    with a_pair() as (link, accepted):
        link.connection.send(struct.pack("!I", len(text.encode())) + text.encode())
        with pytest.raises((OSError, ValueError)):
            until(lambda: accepted.receive() and False)
        assert not accepted.is_proved


def test_little_is_read_before_the_proof():
    with a_pair() as (link, accepted):
        link.connection.send(struct.pack("!I", 1000) + b"x" * 500)
        until(lambda: accepted.receive() or len(accepted._in) > 500)
        link.connection.send(b" " * 100_000)
        with pytest.raises((OSError, ValueError)):
            until(lambda: accepted.receive() and False)
        assert len(accepted._in) < 4096


def test_leaving_is_heard_before_a_reset():
    with a_pair() as (link, accepted):
        exchange(link, accepted)
        link.send({"ping": 1})
        link.send({"leaving": 1})
        link.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        link.close()
        with pytest.raises(OSError, match=r"reset|pipe|closed"):
            until(lambda: accepted.send({"ping": 1}))
        with pytest.raises(OSError, match=r"reset|pipe|closed"):
            until(lambda: accepted.receive() and False)
        assert accepted.is_leaving


def test_a_forked_child_has_no_links():
    with a_pair() as (link, accepted):
        if (child := os.fork()) == 0:
            os._exit(0 if link.fileno() == accepted.fileno() == -1 else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert exchange(link, accepted) == []
        assert link.is_proved


def a_watch_of(link, now):
    """A hub's watch with one link, without its thread."""
    watch = node_watch.NodeWatch.__new__(node_watch.NodeWatch)
    watch._links, watch._others, watch._now, watch._tuning = {7: link}, [], now, config.Tuning()
    watch._gone, watch._unreachable, watch._left, watch._asked_for_rows = {}, {}, set(), {}
    return watch


def test_a_stall_of_the_watch_is_no_silence_of_the_others():
    with a_pair() as (link, accepted):
        exchange(link, accepted)
        link.send({"text": "x" * 20_000_000})  # more than the connection holds: not acknowledged
        watch = a_watch_of(link, now := time.monotonic())
        link.last_heard = link._last_sign = now
        watch._tend(now + 30)
        assert not watch._lost(now + 30)
        assert link.seconds_unheard(now + 30) == pytest.approx(1)
        for turn in range(60):
            watch._tend(now + 30 + turn / 2)
        assert watch._lost(now + 60) == [7]


@pytest.mark.parametrize("number", [errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ECONNRESET])
def test_a_connection_that_the_system_gives_up_is_no_death(number):
    with a_pair() as (link, accepted):
        exchange(link, accepted)
        watch = a_watch_of(link, now := time.monotonic())
        link._failure = OSError(number, os.strerror(number))
        watch._read(link)
        is_death = number == errno.ECONNRESET
        assert (list(watch._gone), list(watch._unreachable)) == (([7], []) if is_death else ([], [7]))
        assert watch._lost(now + 5) == ([7] if is_death else [])
        assert watch._lost(now + 20) == [7]
        watch._tuning = config.Tuning(unreachable_seconds=0)
        assert watch._lost(now + 1000) == ([7] if is_death else [])
        watch._has_come(7, accepted)
        assert not watch._lost(time.monotonic())


def test_a_process_that_is_stopped_is_no_host_that_is_cut():
    """What its system has acknowledged is a sign of life; what it has not is none."""
    with a_pair() as (link, accepted):
        exchange(link, accepted)
        link.last_heard -= 100  # silent for long
        link.tend(time.monotonic())
        time.sleep(0.05)
        link.tend(now := time.monotonic())
        assert link.seconds_unheard(now) == 0
        accepted.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        link.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        link.send({"text": "x" * 10_000_000})  # more than the connection holds
        link.tend(now + 30)
        assert link.seconds_unheard(now + 30) == pytest.approx(30)


def a_hub(rank=0):
    """The nodes of a job of two, whose first listens here, and the socket."""
    listener = socket.create_server(("127.0.0.1", 0))
    hubs = {0: listener.getsockname()}
    return Nodes(rank, {0: "nodea", 1: "nodeb"}, {0: [0], 1: [1]}, hubs, b"token"), listener


@pytest.fixture
def watched(monkeypatch):
    """Two nodes in one process: (nodes' watches, what was printed, codes with which the job was ended)."""
    said, ended, watches, boards = [], [], [], [Rank(0), Rank(1)]
    monkeypatch.setattr(node_watch.abort, "abort", lambda code, report: ended.append(code))
    monkeypatch.setenv("TORCHMPI_DUMP_DIR", os.devnull)
    for name in ("PARTS_SECONDS", "SILENT_SECONDS", "_VIEWS_SECONDS", "_CLAIM_SECONDS"):
        monkeypatch.setattr(job_reports, name, 60.0)  # for a busy machine
    monkeypatch.setattr(reports, "_ANSWER_SECONDS", 60.0)
    monkeypatch.setattr(node_links, "CONNECT_SECONDS", 60.0)
    nodes, listener = a_hub()
    monkeypatch.setattr(node_links, "current", nodes)
    for mine, rank in enumerate(boards):
        view, ear = nodes._replace(mine=mine), listener if mine == 0 else None
        watches.append(node_watch.NodeWatch(rank.board, view, ear, config.Tuning(), said.append))
    until(lambda: 1 in watches[0]._links)
    yield boards, watches, said, ended
    for watch in watches:
        watch.stop()


def test_calls_that_differ_end_the_job_with_both_sides(watched):
    (first, second), _, said, ended = watched
    for rank in (first, second):
        rank.call("barrier")
    first.call("allreduce", site="a.py:3 in f")
    second.call("broadcast", site="b.py:4 in g")
    until(lambda: ended)
    (report,) = said
    what = "operation 2 of the communicator of ranks 0-1 is not the same on all ranks"
    sides = "rank 0 calls allreduce, 8 bytes at a.py:3 in f; rank 1 calls broadcast, 8 bytes at b.py:4 in g"
    assert report.startswith(f"torchmpi_py: report of rank 0: RanksDisagree: {what}: {sides}\nhost nodea (rank 0):\n")
    assert "\nhost nodeb (rank 1):\nrank 1 (process " in report
    assert ended == [1]


def test_a_desertion_is_reported_after_another_look(watched):
    (first, second), _, said, ended = watched
    for rank in (first, second):
        rank.call("barrier")
    first.call("allreduce", is_over=False)
    second.board.put(HAS_LEFT, STOPPING)
    until(lambda: ended)
    assert "rank 1 has come to its end, and will not come to an operation of ranks 0-1 in which rank 0 waits" in said[0]


def test_a_leader_that_fails_to_answer_is_asked_again(watched, monkeypatch):
    (first, second), _, _, ended = watched
    failed, brief = [], reports.brief

    def fails(board, index):
        if board is second.board and not failed:
            failed.append(index)
            raise RuntimeError("once")
        return brief(board, index)

    monkeypatch.setattr(reports, "brief", fails)
    until(lambda: failed)
    first.call("allreduce")
    second.call("broadcast")
    until(lambda: ended)


def test_claims_of_two_nodes_become_one_report(watched, monkeypatch):
    (first, _), _, said, ended = watched
    answers = []
    for node in (0, 1):
        monkeypatch.setattr(node_links, "current", node_links.current._replace(mine=node))
        report = NodeReport(f"heading {node}", f"part {node}", True)
        answers.append(job_reports.claim(first.board, CLAIMED_LATE, report, ends=True)["claimed"])
    assert answers == ["printed", "held"]
    (text,) = said
    assert text.startswith("heading 0\nhost nodea (rank 0):\npart 0\n")
    assert "host nodeb (rank 1):\nrank 1 (process" in text
    assert not ended  # the claimant does that
    job_reports.withdraw()
    report = NodeReport("another", "part", True)
    assert job_reports.claim(first.board, CLAIMED_DEATH, report, ends=True)["claimed"] == "printed"


def test_ranks_ask_for_the_calls_of_other_nodes(watched, monkeypatch):
    (first, second), _, _, _ = watched
    first.call("allreduce")
    second.call("reduce")
    monkeypatch.setattr(status_board, "current", first.board)
    sides = reports.sides((1, 0, 0, 0, 0, None))
    assert sides.differ
    assert "rank 1 calls reduce, 4 bytes at here.py:1 in f" in sides.text
    first.call("gather")
    assert "has not come to it" not in reports.late((1, 0, 0, 0, 0, None))
    assert "rank 1 (process" in reports.late((2, 0, 0, 0, 0, None))
    assert reports.deaths(0) == ""


def test_a_node_that_leaves_in_order_is_not_missed(watched):
    _, watches, said, ended = watched
    watches[1].stop()
    until(lambda: 1 in watches[0]._left)
    assert not watches[0]._lost(time.monotonic())
    assert not said
    assert not ended
    watches.pop()


LEADER = """
import os, socket, sys, time
from torchmpi_py.core import config
from torchmpi_py.watch import node_watch
from torchmpi_py.watch.node_links import Nodes
sys.path.insert(0, sys.argv[2])
from test_between_nodes import Rank
nodes = Nodes(1, {0: "nodea", 1: "nodeb"}, {0: [0], 1: [1]}, {0: ("127.0.0.1", int(sys.argv[1]))}, b"token")
rank = Rank(1)
rank.call("allreduce", site="train.py:7 in step")
watch = node_watch.NodeWatch(rank.board, nodes, None, config.Tuning(), print)
time.sleep(500)
"""


@pytest.fixture
def leader(monkeypatch):
    """A hub in this process, and the leader of the other node as a process: (watch, process, printed, ended)."""
    said, ended = [], []
    monkeypatch.setattr(node_watch.abort, "abort", lambda code, report: ended.append(code))
    monkeypatch.setenv("TORCHMPI_DUMP_DIR", os.devnull)
    nodes, listener = a_hub()
    monkeypatch.setattr(node_links, "current", nodes)
    watch = node_watch.NodeWatch(Rank(0).board, nodes, listener, config.Tuning(), said.append)
    arguments = [str(nodes.hubs[0][1]), os.path.dirname(__file__)]
    process = subprocess.Popen([sys.executable, "-c", LEADER, *arguments])
    until(lambda: watch._briefs.get(1))
    yield watch, process, said, ended
    process.kill()
    process.wait()
    watch.stop()


def test_a_leader_that_dies_is_named_with_its_last_call(leader):
    _, process, said, ended = leader
    process.kill()
    until(lambda: ended)
    (report,) = said
    assert report.startswith("torchmpi_py: report of rank 0: rank 1 on host nodeb died, or left without mpi.stop(). ")
    assert f"rank 1 (process {process.pid}): last called allreduce, 4 bytes at train.py:7 in step" in report
    assert ended == [1]


def test_a_leader_that_is_stopped_is_late_and_not_dead(leader):
    watch, process, said, ended = leader
    process.send_signal(signal.SIGSTOP)
    until(lambda: time.monotonic() - watch._links[1].last_heard > 3)
    assert not watch._lost(time.monotonic())
    late = NodeReport("an operation is late", "part of node 0", True)
    answer = job_reports.claim(watch._board, CLAIMED_LATE, late, ends=True)
    assert answer["claimed"] == "printed"
    assert "host nodeb (rank 1): the host answers, but rank 1 does not: its process is stopped" in said[0]
    assert not ended


def test_strangers_take_few_descriptors_of_a_hub_and_delay_no_leader(monkeypatch):
    """They say nothing, or what is no message; the oldest make room, and each is dropped after some seconds."""
    nodes, listener = a_hub()
    monkeypatch.setattr(node_links, "current", nodes)
    watch = node_watch.NodeWatch(Rank(0).board, nodes, listener, config.Tuning(), print)
    limit, strangers = node_watch._MOST_UNPROVED, []
    try:
        for number in range(3 * limit):
            strangers.append(socket.create_connection(nodes.hubs[0]))
            if number % 3 == 0:
                strangers[-1].sendall(b"\0\0\0\x10xyz")
            assert len(watch._others) <= limit + node_watch._ACCEPTED_PER_TURN
        begin = time.monotonic()
        with contextlib.closing(node_links.connect(nodes, 0, 1)):
            assert time.monotonic() - begin < node_links.CONNECT_SECONDS
            until(lambda: watch._links.get(1))
        monkeypatch.setattr(node_watch, "_PROOF_SECONDS", 0.1)
        until(lambda: not watch._others)
    finally:
        watch.stop()
        for each in strangers:
            each.close()


def test_without_a_hub_a_rank_reports_for_itself(monkeypatch):
    nodes, listener = a_hub()
    listener.close()
    monkeypatch.setattr(node_links, "current", nodes)
    assert job_reports.claim(Rank(0).board, CLAIMED_LATE, NodeReport("late", "part", True), ends=True) is None


def test_one_node_has_no_links():
    """No thread more, and no socket."""
    from torchmpi_py.core.channels import Channel
    from torchmpi_py.watch.watchdog import Watchdog

    channel = Channel.__new__(Channel)
    channel.places = (Place(0, 0), Place(0, 1))
    assert node_links.introduce(channel, "192.0.2.1") == (None, None)
    before = set(threading.enumerate())
    watchdog = Watchdog(Rank(0).board, config.Tuning())
    try:
        assert len(set(threading.enumerate()) - before) == 1
    finally:
        watchdog.stop()
