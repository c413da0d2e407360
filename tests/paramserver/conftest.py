"""Communicators as they are, and as if their ranks were on several nodes."""

import pytest

from torchmpi_py.core import communicators
from torchmpi_py.core.channels import Place


def divided(place, name):
    """All ranks, as if each were at another place: (node, rank on it)."""
    world = communicators.communicator(0).direct.mpi
    return communicators.Communicator(world.Dup(), Place(*place(world.rank)), name)


@pytest.fixture(params=["nodes-as-they-are", "as-if-on-two-nodes"])
def comm(request, mpi):
    """All ranks; and again, as if the even ranks were on one node, and the odd ones on another."""
    if request.param == "nodes-as-they-are":
        with mpi.split(0) as made:
            yield made
        return
    if mpi.size() == 1 or mpi.num_nodes() > 1:
        pytest.skip("only ranks of one node can be divided into two")
    with divided(lambda rank: (rank % 2, rank // 2), "as if on two nodes") as made:
        assert made.num_nodes == 2
        yield made


@pytest.fixture
def nodes(mpi):
    """All ranks, each on a node of its own."""
    with divided(lambda rank: (rank, 0), "nodes of one rank") as made:
        yield made
