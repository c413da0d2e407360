"""What some tests of flavours ask of the machine."""

import pytest


@pytest.fixture
def one_node(mpi):
    """Skips the test where ranks are on several nodes: they have no memory in common, other flavours serve them."""
    if mpi.num_nodes() > 1:
        pytest.skip("this is so on one node alone")
