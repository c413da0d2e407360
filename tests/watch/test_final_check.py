"""The last comparison of ranks of different nodes, where the ranks are of one; see also test_between_nodes.py."""

from types import SimpleNamespace

import pytest
import torch

from torchmpi_py.core import communicators, journal, status_board
from torchmpi_py.errors import RanksDisagree
from torchmpi_py.watch import final_check, node_links


@pytest.fixture
def channel(monkeypatch):
    """As if the ranks were of several nodes, of which rank 0 speaks for all."""
    monkeypatch.setattr(node_links, "current", SimpleNamespace(mine=0))
    return communicators.stack().levels[0].background


@pytest.mark.mpi(min_size=2)
def test_a_call_that_one_rank_has_made_more(mpi, channel):
    def call_alone():
        journal.end(journal.record_plain("more", group))

    with mpi.split(0) as group:
        for _ in range(3):
            mpi.barrier(group)
        final_check.run(channel)
        if mpi.rank() == 1:
            call_alone()
        with pytest.raises(RanksDisagree, match="operation 4 of the communicator") as caught:
            final_check.run(channel)
        assert "rank 1 calls more at " in str(caught.value)
        assert "; rank 0 (process " in str(caught.value)
        if mpi.rank() != 1:
            call_alone()
        final_check.run(channel)


@pytest.mark.mpi
def test_communicators_that_are_freed_or_broken_are_left_out(mpi, channel):
    board, before = status_board.current, final_check._last_places(status_board.current)
    group = mpi.split(0)
    mpi.allreduce(torch.ones(3), comm=group)
    assert final_check._last_places(board).keys() > before.keys()
    group.sequences[0].is_broken = True
    assert final_check._last_places(board).keys() == before.keys()
    group.sequences[0].is_broken = False
    group.free()
    assert final_check._last_places(board).keys() == before.keys()
    final_check.run(channel)
