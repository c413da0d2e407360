"""The watch between nodes: its links, and its reports on several nodes."""

import contextlib
import errno
import os
import signal
import socket
import struct
import subprocess
import sys
import time

import pytest
from lone_ranks import Rank
from support.jobs import until

from torchmpi_py.core import config, status_board
from torchmpi_py.core.status_board import CLAIMED_DEATH, CLAIMED_LATE, HAS_LEFT, STOPPING
from torchmpi_py.watch import job_reports, node_links, node_watch, reports
from torchmpi_py.watch.node_links import Link, Nodes
from torchmpi_py.watch.reports import Line, NodeReport

pytestmark = pytest.mark.timeout(240)


# Links.


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


@pytest.fixture
def proved():
    """Two ends of a connection that have proved themselves."""
    with a_pair() as (link, accepted):
        assert exchange(link, accepted) == []
        yield link, accepted


def test_both_ends_of_a_link_prove_themselves(proved):
    link, accepted = proved
    assert (link.is_proved, accepted.is_proved, accepted.node) == (True, True, 7)
    accepted.send({"text": "x" * 3_000_000})
    while accepted.has_output or not (found := link.receive()):
        accepted.flush()
    assert found == [{"text": "x" * 3_000_000}]
    if (child := os.fork()) == 0:  # which has no links
        os._exit(0 if link.fileno() == accepted.fileno() == -1 else 1)
    assert os.waitpid(child, 0)[1] == 0
    link.send({"leaving": 1})
    link.close()
    with pytest.raises(OSError, match="closed"):
        until(lambda: accepted.receive() and False)
    assert accepted.is_leaving


def test_a_stranger_is_refused():
    with a_pair(other=b"wrong") as (link, accepted), pytest.raises(OSError, match="token"):
        exchange(link, accepted)
    with a_pair() as (link, accepted):  # and little is read before the proof
        link.connection.send(struct.pack("!I", 1000) + b"x" * 500)
        until(lambda: accepted.receive() or len(accepted._in) > 500)
        link.connection.send(b" " * 100_000)
        with pytest.raises((OSError, ValueError)):
            until(lambda: accepted.receive() and False)
        assert len(accepted._in) < 4096


@pytest.mark.parametrize("text", ["[]", "1", "[" * 1000, '{"signed":"\u00e9"}', '{"signed":"\\ud800"}', "{", ""])
def test_what_is_no_proof_is_refused(text):
    with a_pair() as (link, accepted):
        link.connection.send(struct.pack("!I", len(text.encode()) or 1 << 20) + text.encode())
        with pytest.raises((OSError, ValueError)):
            until(lambda: accepted.receive() and False)
        assert not accepted.is_proved


def test_leaving_is_heard_before_a_reset(proved):
    link, accepted = proved
    link.send({"ping": 1})
    link.send({"leaving": 1})
    link.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    link.close()
    for use in (lambda: accepted.send({"ping": 1}), lambda: accepted.receive() and False):
        with pytest.raises(OSError, match=r"reset|pipe|closed"):
            until(use)
    assert accepted.is_leaving


def a_watch_of(link, now):
    """A hub's watch with one link, without its thread."""
    watch = node_watch.NodeWatch.__new__(node_watch.NodeWatch)
    watch._links, watch._others, watch._now, watch._tuning = {7: link}, [], now, config.Tuning()
    watch._gone, watch._unreachable, watch._left, watch._asked_for_rows = {}, {}, set(), {}
    return watch


def test_a_stall_of_the_watch_is_no_silence_of_the_others(proved):
    link, _ = proved
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
def test_a_connection_that_the_system_gives_up_is_no_death(proved, number):
    link, accepted = proved
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


def test_a_process_that_is_stopped_is_no_host_that_is_cut(proved):
    """What its system has acknowledged is a sign of life; what it has not is none."""
    link, accepted = proved
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


# Two nodes.


@pytest.fixture
def hub(monkeypatch):
    """The nodes of a job of two, whose first listens here; the socket; reports that were printed; codes of ends."""
    said, ended = [], []
    monkeypatch.setattr(node_watch.abort, "abort", lambda code, report: ended.append(code))
    monkeypatch.setenv("TORCHMPI_DUMP_DIR", os.devnull)
    for name in ("PARTS_SECONDS", "_VIEWS_SECONDS", "_CLAIM_SECONDS"):
        monkeypatch.setattr(job_reports, name, 60.0)  # for a busy machine
    monkeypatch.setattr(reports, "_ANSWER_SECONDS", 60.0)
    monkeypatch.setattr(node_links, "CONNECT_SECONDS", 60.0)
    for module, name in ((job_reports, "OTHERS_REPORT_SECONDS"), (node_watch, "_ROWS_SECONDS")):
        monkeypatch.setattr(module, name, 0.2)
    listener = socket.create_server(("127.0.0.1", 0))
    hubs = {0: listener.getsockname()}
    nodes = Nodes(0, {0: "nodea", 1: "nodeb"}, {0: [0], 1: [1]}, hubs, b"token")
    monkeypatch.setattr(node_links, "current", nodes)
    return nodes, listener, said, ended


@pytest.fixture
def watched(hub, monkeypatch):
    """Two nodes in one process: (ranks, nodes' watches, what was printed, codes with which the job was ended)."""
    monkeypatch.setattr(job_reports, "SILENT_SECONDS", 60.0)
    nodes, listener, said, ended = hub
    ranks, watches = [Rank(0), Rank(1)], []
    for mine, rank in enumerate(ranks):
        view, ear = nodes._replace(mine=mine), listener if mine == 0 else None
        watches.append(node_watch.NodeWatch(rank.board, view, ear, config.Tuning(), said.append))
    until(lambda: 1 in watches[0]._links)
    yield ranks, watches, said, ended
    for watch in watches:
        watch.stop()


def test_calls_that_differ_end_the_job_with_both_sides(watched, monkeypatch):
    """Also where a leader once fails to answer: it is asked again."""
    (first, second), _, said, ended = watched
    failed, brief = [], reports.brief

    def fails(board, index):
        if board is second.board and not failed:
            failed.append(index)
            raise RuntimeError("once")
        return brief(board, index)

    monkeypatch.setattr(reports, "brief", fails)
    until(lambda: failed)
    for rank in (first, second):
        rank.call("barrier")
    first.call("allreduce", site="a.py:3 in f")
    second.call("broadcast", site="b.py:4 in g")
    until(lambda: ended)
    (report,) = said
    begin = "torchmpi_py: report of rank 0: RanksDisagree: operation 2 of the communicator of ranks 0-1 "
    assert report.startswith(begin)
    assert "rank 0 calls allreduce, 8 bytes at a.py:3 in f; rank 1 calls broadcast, 8 bytes at b.py:4 in g" in report
    assert "\nhost nodea (rank 0):\n" in report
    assert "\nhost nodeb (rank 1):\nrank 1 (process " in report
    assert ended == [1]


def test_a_desertion_is_reported_after_another_look(watched):
    (first, second), _, said, ended = watched
    for rank in (first, second):
        rank.call("barrier")
    first.call("allreduce", is_over=False)
    second.board.put(HAS_LEFT, STOPPING)
    until(lambda: ended)
    assert "rank 1 is in mpi.stop() and will not call an operation of ranks 0-1 in which rank 0 waits" in said[0]


def test_claims_of_two_nodes_become_one_report(watched, monkeypatch):
    (first, _), _, said, ended = watched
    answers = []
    for node in (0, 1):
        monkeypatch.setattr(node_links, "current", node_links.current._replace(mine=node))
        report = NodeReport(f"heading {node}", [Line([node], f"part {node}", "a text")], True)
        answers.append(job_reports.claim(first.board, CLAIMED_LATE, report, ends=True)["claimed"])
    assert answers == ["printed", "held"]
    (text,) = said
    assert text.startswith("heading 0\nhost nodea (rank 0):\npart 0: a text\n")
    assert "host nodeb (rank 1):\nrank 1 (process" in text
    assert not ended  # the claimant does that
    job_reports.withdraw()
    report = NodeReport("another", [], True)
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
    assert "has not called it" not in reports.late((1, 0, 0, 0, 0, None))
    assert "rank 1 (process" in reports.late((2, 0, 0, 0, 0, None))
    assert reports.deaths(0) == ""


def test_a_node_that_leaves_in_order_is_not_missed(watched):
    _, watches, said, ended = watched
    watches[1].stop()
    until(lambda: 1 in watches[0]._left)
    assert not watches[0]._lost(time.monotonic())
    assert not said + ended
    watches.pop()


LEADER = """
import sys, time
from torchmpi_py.core import config
from torchmpi_py.watch import node_watch
from torchmpi_py.watch.node_links import Nodes
sys.path.insert(0, sys.argv[2])
from lone_ranks import Rank
nodes = Nodes(1, {0: "nodea", 1: "nodeb"}, {0: [0], 1: [1]}, {0: ("127.0.0.1", int(sys.argv[1]))}, b"token")
rank = Rank(1)
rank.call("allreduce", site="train.py:7 in step")
watch = node_watch.NodeWatch(rank.board, nodes, None, config.Tuning(), print)
time.sleep(500)
"""


def test_a_leader_that_is_stopped_is_late_and_one_that_dies_is_dead(hub, monkeypatch):
    monkeypatch.setattr(job_reports, "SILENT_SECONDS", 1.2)
    monkeypatch.setattr(node_watch, "_COME_BACK_SECONDS", 0.2)
    nodes, listener, said, ended = hub
    watch = node_watch.NodeWatch(Rank(0).board, nodes, listener, config.Tuning(), said.append)
    process = subprocess.Popen([sys.executable, "-c", LEADER, str(nodes.hubs[0][1]), os.path.dirname(__file__)])
    try:
        until(lambda: watch._briefs.get(1))
        process.send_signal(signal.SIGSTOP)
        until(lambda: time.monotonic() - watch._links[1].last_heard > 1.5)
        assert not watch._lost(time.monotonic())
        late = NodeReport("an operation is late", [], True)
        assert job_reports.claim(watch._board, CLAIMED_LATE, late, ends=True)["claimed"] == "printed"
        assert "host nodeb (rank 1): the host answers, but rank 1 does not: its process is stopped" in said[0]
        assert not ended
        job_reports.withdraw()
        process.kill()
        until(lambda: ended)
        died = "torchmpi_py: report of rank 0: rank 1 on host nodeb died, or exited without mpi.stop(). "
        assert said[1].startswith(died)
        assert f"rank 1 (process {process.pid}): last called allreduce, 4 bytes at train.py:7 in step" in said[1]
        assert ended == [1]
    finally:
        process.kill()
        process.wait()
        watch.stop()


def test_strangers_take_few_descriptors_of_a_hub_and_delay_no_leader(hub, monkeypatch):
    """They say nothing, or what is no message; the oldest make room, and each is dropped after some seconds."""
    nodes, listener, _, _ = hub
    watch = node_watch.NodeWatch(Rank(0).board, nodes, listener, config.Tuning(), print)
    limit, strangers = node_watch._MOST_UNPROVED, []
    try:
        for number in range(3 * limit):
            strangers.append(socket.create_connection(nodes.hubs[0]))
            if number % 3 == 0:
                strangers[-1].sendall(b"\0\0\0\x10xyz")
            assert len(watch._others) <= limit + node_watch._ACCEPTED_PER_TURN
        with contextlib.closing(node_links.connect(nodes, 0, 1)):
            until(lambda: watch._links.get(1))
        monkeypatch.setattr(node_watch, "_PROOF_SECONDS", 0.1)
        until(lambda: not watch._others)
    finally:
        watch.stop()
        for each in strangers:
            each.close()


def test_without_a_hub_a_rank_reports_for_itself(hub, monkeypatch):
    monkeypatch.setattr(job_reports, "_KILLED_SECONDS", 0.0)
    hub[1].close()
    assert job_reports.claim(Rank(0).board, CLAIMED_LATE, NodeReport("late", [], True), ends=True) is None
