"""Pauses of a rank that waits: their lengths by the time since the last event, with a clock of the test's own."""

import ctypes
import sys
import threading

import pytest

from torchmpi_py.core import backoff


@pytest.fixture
def pauses(monkeypatch):
    """What is slept, in order; the clock goes on by that and 50 us a look."""
    now, slept = [100.0], []

    def monotonic():
        now[0] += 50e-6
        return now[0]

    def sleep(seconds):
        slept.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(backoff.time, "monotonic", monotonic)
    monkeypatch.setattr(backoff.time, "sleep", sleep)
    return slept


def test_pauses_grow_with_the_time_since_the_last_event(pauses):
    nap = backoff.Nap(0.002, share=0.005)
    for _ in range(3000):
        nap.take()
    assert pauses[0] == 0
    assert pauses == sorted(pauses)
    assert max(pauses) == 0.002
    assert sum(pauses[: pauses.index(0.002)]) > 0.3  # 2 ms are half a percent of 0.4 s
    nap.begin()
    nap.take()
    assert pauses[-1] == 0
    for _ in range(3000):
        nap.take(0.0001)
    assert pauses[-1] == 0.0001


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone has the setting")
def test_the_sleeps_of_one_thread_end_in_time():
    """And those of no other thread."""
    slack = ctypes.CDLL(None).prctl
    before, inside = slack(30, 0, 0, 0, 0), []  # PR_GET_TIMERSLACK, in ns

    def of_the_thread():
        backoff.end_sleeps_in_time()
        inside.append(slack(30, 0, 0, 0, 0))

    thread = threading.Thread(target=of_the_thread)
    thread.start()
    thread.join()
    assert inside == [1]
    assert slack(30, 0, 0, 0, 0) == before > 1
