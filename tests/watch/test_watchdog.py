"""The parts of the watchdog, one at a time."""

import faulthandler
import os
import resource
import signal
import subprocess
import sys
import time

import pytest
from lone_ranks import make_board

from torchmpi_py.core import backoff, journal, sequences, status_board
from torchmpi_py.core.config import Tuning
from torchmpi_py.core.handles import ThreadHandle
from torchmpi_py.core.status_board import CLAIMED_ASKED, CLAIMED_DEATH, CLAIMED_DIFFERENCE, CLAIMED_LATE
from torchmpi_py.watch import reports, watchdog
from torchmpi_py.watch.report_requests import ReportRequests
from torchmpi_py.watch.watchdog import Neighbours

pytestmark = pytest.mark.timeout(240)


def test_a_job_that_was_stopped_is_not_late():
    ages = watchdog.Ages(0)
    ages.look([1], 0.5)
    ages.look([1, 2], 1000)
    assert ages.seconds == {1: 1.5, 2: 1.0}
    assert ages.oldest(1, ()) == 1
    assert ages.oldest(1, {1}) == 2
    assert ages.oldest(2, ()) is None
    ages.look([2], 1001)
    assert ages.seconds == {2: 2.0}


def test_a_wait_with_a_longer_limit_is_not_late(monkeypatch):
    monkeypatch.setattr(backoff, "limited", {"one": (1, 96.0), "other": (2, 30.0)})
    ages = watchdog.Ages(0)
    for now in range(1, 102):
        ages.look([1, 2], now)
    assert ages.oldest(50, ()) == 2
    assert ages.oldest(50, {2}) is None
    ages.look([1, 2], 102)
    assert ages.oldest(50, {2}) == 1
    backoff.limited["again"] = 1, 96.0
    assert ages.oldest(50, {2}) is None
    for now in range(103, 204):
        ages.look([1, 2], now)
    assert ages.oldest(50, {2}) is None
    ages.look([1, 2], 204)
    assert ages.oldest(50, {2}) == 1


def test_an_operation_that_completes_after_a_look_is_not_late(monkeypatch):
    claims = []
    monkeypatch.setattr(watchdog.Watchdog, "_loop", lambda self: None)
    monkeypatch.setattr(watchdog, "claim", lambda board, reason: claims.append(reason))
    monkeypatch.setattr(backoff, "active", {})
    watched = watchdog.Watchdog(used := make_board(), Tuning(deadline_seconds=1))
    backoff.active["wait"] = 7
    watched._ages.look(journal.under_way(used), time.monotonic() + 5)
    for _ in range(2):
        watched._check_deadline()
        assert claims == [CLAIMED_LATE]
        backoff.active.clear()
    watched.stop()


def test_a_report_for_one_reason_prevents_none_for_another():
    used = make_board()
    for reason in (CLAIMED_ASKED, CLAIMED_LATE, CLAIMED_DIFFERENCE, CLAIMED_DEATH):
        assert watchdog.claim(used, reason)
        assert not watchdog.claim(used, reason)


def test_a_report_is_printed_without_sys_stderr(monkeypatch, capfd):
    monkeypatch.setattr(sys, "stderr", None)
    monkeypatch.setattr(sys, "__stderr__", None)
    watchdog.print_to_stderr("words\n\tof a \x1b[2Jlabel")
    assert capfd.readouterr().err == "words\n\tof a \\x1b[2Jlabel\n"


def test_the_job_ends_whatever_is_wrong_with_its_report(monkeypatch):
    ended = []
    monkeypatch.setattr(watchdog.abort, "abort", lambda code, report: ended.append(code))
    monkeypatch.setattr(watchdog.reports, "of_node", lambda *args, **options: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        watchdog.end_job(make_board(), CLAIMED_DEATH, "why")
    assert ended == [watchdog.abort.EXIT_CODE]


def test_more_open_files_than_select_takes():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2000:
        pytest.skip("no more files may be open")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2000), hard))
    end, other = os.pipe()
    high = os.dup2(end, 1500)
    try:
        neighbours = Neighbours(make_board(), high)
        assert not neighbours.sleep(0)
        os.write(other, b"x")
        assert neighbours.sleep(1)
        os.close(high)
        assert not neighbours.sleep(0)
    finally:
        os.close(end)
        os.close(other)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_requests_for_reports(tmp_path):
    """Before, between and after sessions; in a forked child; where the program registers a handler of its own."""
    faulthandler.unregister(signal.SIGUSR1)  # that of another test's watchdog
    requests = ReportRequests()
    with open(tmp_path / "stacks", "wb") as file:
        try:
            end = requests.listen()
            os.kill(os.getpid(), signal.SIGUSR1)
            assert os.read(end, 9)
            os.kill(os.getpid(), signal.SIGUSR1)
            assert requests.listen() == end
            if (child := os.fork()) == 0:
                requests.disown()
                os.kill(os.getpid(), signal.SIGUSR1)
                os._exit(0)
            assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGUSR1
            faulthandler.register(signal.SIGUSR1, file=file)
            assert requests.listen() == end
            os.kill(os.getpid(), signal.SIGUSR1)
            assert file.tell() > 0
        finally:
            faulthandler.unregister(signal.SIGUSR1)


def test_two_threads_that_wait_for_one_handle():
    class Work:
        label, entry = "work", (7,)

    handle = ThreadHandle(Work())
    with handle._waited_for():
        with handle._waited_for():
            pass
        assert list(backoff.active.values()) == [7]
    assert not backoff.active


def test_slots():
    used = make_board(3)
    slot = used.acquire_slot()
    first = used.first_fingerprint(used.index, slot.number)
    used.words[first] = 5
    used.publish_slot(slot, slot.generation, "key" * 200, ",".join(str(rank) for rank in range(0, 900, 7)))
    group = used.group(used.index, slot.number)
    assert group.generation == slot.generation
    assert group.ranks.endswith(",...")
    assert group.key.endswith("...")
    used.release_slot(slot)
    again = used.acquire_slot()
    assert again.number == slot.number
    assert again.generation != slot.generation
    assert used.words[first] == 0


def test_ranks_as_text():
    for ranks, words in (([0, 2, 4, 6, 7], "0-6/2,7"), ([0, 2], "0,2"), ([5, 0, 1], "5,0-1"), ([0, 1, 2, 9], "0-2,9")):
        assert sequences.ranks_as_text(ranks, strides=True) == words
        assert sequences.ranks_from_text(words) == ranks


def test_a_death():
    """What is said of it, and who is taken for dead: a process that is gone without having left in order."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    used = make_board(7)
    assert not reports.is_dead(used, 0)
    process.wait()
    used.put(status_board.PROCESS, process.pid)
    assert reports.is_dead(used, 0)
    assert reports.death(used, 0) == f"rank 7 (process {process.pid}) died before its first operation"
    used.put(status_board.HAS_LEFT, status_board.STOPPED)
    assert not reports.is_dead(used, 0)
    used.put(status_board.HAS_LEFT, 0)
    used.put(status_board.PROCESS, os.getpid())
    used.put(status_board.STARTED, 1)  # the number was used again
    assert reports.is_dead(used, 0)
    used.put(status_board.STARTED, 0)  # it could not be found out
    assert not reports.is_dead(used, 0)
    used.put(status_board.PROCESS, process.pid)
    used.put(status_board.NAMESPACE, 0)  # nor could this: numbers mean nothing
    assert not reports.is_dead(used, 0)
    assert status_board.find_process(process.pid) is None
