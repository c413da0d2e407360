"""Clocks that are known to be apart, and how far apart they are measured to be."""

import time

import pytest

from torchmpi_py.watch import tracing

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("per_node", [1, 2, 100])
def test_clocks_that_are_apart(mpi, per_node):
    skew = 10**12  # far more from node to node than the test can take
    nodes = [rank - rank % per_node for rank in range(mpi.size())]
    mine = nodes[mpi.rank()] * skew
    reading = tracing.read(mpi.communicator().background.mpi, nodes, lambda: time.time_ns() + mine)
    assert abs(reading.offset_ns - mine) <= reading.uncertainty_ns
    assert abs(reading.at_ns - time.time_ns() - mine) < skew // 2
    if nodes[mpi.rank()] == 0:
        assert (reading.offset_ns, reading.uncertainty_ns) == (0, 0)
    else:
        assert 0 < reading.uncertainty_ns < skew // 2
