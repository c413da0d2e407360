"""Pauses of a rank that waits: their lengths by the time since the last event, with a clock of the test's own."""

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


def test_no_pause_where_an_event_is_due(pauses):
    nap = backoff.Nap(0.002, eager_seconds=0.0002)
    for _ in range(3):
        nap.take()
    assert pauses == []
    for _ in range(3):
        nap.take()
    assert len(pauses) == 3
    nap.begin()
    nap.take()
    assert len(pauses) == 3
