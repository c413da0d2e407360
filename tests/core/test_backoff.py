"""Pauses of a rank that waits, with a clock of the test's own; fences around barriers."""

import ctypes
import sys
import threading

import pytest

from torchmpi_py.core import backoff


def test_pauses_grow_with_the_time_since_the_last_event(monkeypatch):
    now, pauses = [100.0], []

    def monotonic():
        now[0] += 50e-6
        return now[0]

    def sleep(seconds):
        pauses.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(backoff.time, "monotonic", monotonic)
    monkeypatch.setattr(backoff.time, "sleep", sleep)
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
def test_the_sleeps_of_one_thread_end_in_time_and_those_of_no_other():
    slack = ctypes.CDLL(None).prctl
    before, inside = slack(30, 0, 0, 0, 0), []  # PR_GET_TIMERSLACK, in ns
    thread = threading.Thread(target=lambda: (backoff.end_sleeps_in_time(), inside.append(slack(30, 0, 0, 0, 0))))
    thread.start()
    thread.join()
    assert inside == [1]
    assert slack(30, 0, 0, 0, 0) == before > 1


class Comm:
    def __init__(self, came):
        self.came = came

    def Ibarrier(self):
        self.came.append("barrier")
        return self

    def Test(self):
        return True


@pytest.mark.parametrize("keeps_order", [True, False])
def test_a_barrier_stands_between_fences_where_the_machine_does_not_order_memory(monkeypatch, keeps_order):
    came, fence = [], backoff.fence
    monkeypatch.setattr(backoff, "KEEPS_ORDER", keeps_order)
    monkeypatch.setattr(backoff, "fence", lambda: came.append("fence") or fence())
    backoff.barrier(Comm(came))
    assert came == (["barrier"] if keeps_order else ["fence", "barrier", "fence"])
