"""Communicators that look as if their ranks were on several nodes."""

import pytest

from torchmpi_py import communicators
from torchmpi_py.channels import Place


@pytest.fixture(params=[1, 2], ids=["one-node", "two-nodes"])
def comm(request, mpi):
    """All ranks, on one node and as if on two: the even ranks on one, the odd ones on the other."""
    num_nodes = request.param
    if mpi.size() < num_nodes:
        pytest.skip("one rank cannot be on two nodes")
    world = communicators.communicator(0).direct.mpi
    place = Place(world.rank % num_nodes, world.rank // num_nodes)
    with communicators.Communicator(world.Dup(), place, f"{num_nodes} nodes") as made:
        assert made.num_nodes == num_nodes
        yield made
