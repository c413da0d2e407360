"""The fences around barriers, where the machine does not order memory."""

import pytest

from torchmpi_py.core import backoff

pytestmark = pytest.mark.timeout(20)


class Comm:
    def __init__(self, came):
        self.came = came

    def Barrier(self):
        self.came.append("barrier")

    def Ibarrier(self):
        self.Barrier()
        return self

    def Test(self):
        return True


@pytest.mark.parametrize("keeps_order", [True, False])
def test_a_barrier_stands_between_fences(monkeypatch, keeps_order):
    came = []
    monkeypatch.setattr(backoff, "KEEPS_ORDER", keeps_order)
    monkeypatch.setattr(backoff, "fence", lambda: came.append("fence"))
    backoff.fenced(Comm(came).Barrier)()
    backoff.barrier(Comm(came))
    assert came == (["barrier"] if keeps_order else ["fence", "barrier", "fence"]) * 2


def test_where_the_machine_keeps_order_nothing_is_added(monkeypatch):
    monkeypatch.setattr(backoff, "KEEPS_ORDER", True)
    assert backoff.fenced(backoff.fence) is backoff.fence


def test_a_fence_returns():
    assert backoff.fence() is None
