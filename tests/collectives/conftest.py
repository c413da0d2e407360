"""What some tests of flavours ask of the machine."""

import pytest

from torchmpi_py.collectives.flavours import ring


@pytest.fixture
def one_node(mpi):
    """Skips the test where ranks are on several nodes: they have no memory in common, other flavours serve them."""
    if mpi.num_nodes() > 1:
        pytest.skip("this is so on one node alone")


@pytest.fixture
def posted(monkeypatch):
    """Bytes of each step of flavour ring on this rank: (sent, received)."""
    lengths, post = [], ring.post

    def noted(comm, step, given, received):
        lengths.append((len(given), len(received)))
        return post(comm, step, given, received)

    monkeypatch.setattr(ring, "post", noted)
    return lengths
