"""Communicators as they are, and as if their ranks were on several nodes; a test's servers are freed behind it."""

import pytest

from torchmpi_py import paramserver as ps
from torchmpi_py.core import communicators
from torchmpi_py.core.channels import Place


@pytest.fixture(autouse=True)
def _no_server_stays(request, monkeypatch):
    """Ends before the patches of a test do: other ranks may still send what it is about."""
    yield
    free_all(request)


def free_all(request):
    """Free a test's servers, before their communicator is freed. After a failure nobody would come."""
    if not request.session.testsfailed:
        ps.free_all()


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
            free_all(request)
        return
    if mpi.size() == 1 or mpi.num_nodes() > 1:
        pytest.skip("only ranks of one node can be divided into two")
    with divided(lambda rank: (rank % 2, rank // 2), "as if on two nodes") as made:
        assert made.num_nodes == 2
        yield made
        free_all(request)


@pytest.fixture
def nodes(request, mpi):
    """All ranks, each on a node of its own."""
    with divided(lambda rank: (rank, 0), "nodes of one rank") as made:
        yield made
        free_all(request)
