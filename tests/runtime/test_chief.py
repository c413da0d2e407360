"""The one rank that writes, and its summary writer."""

import sys
from unittest import mock

import pytest

from torchmpi_py.launch import group_of_ranks

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(30)]


def test_rank_0_of_the_first_group_is_the_chief(mpi, monkeypatch):
    assert mpi.is_chief() == (mpi.rank() == 0)
    for index in range(2):
        group = group_of_ranks.GroupOfRanks(index, 2, "token", "folder")
        monkeypatch.setenv(group_of_ranks.VARIABLE, group.text)
        assert mpi.is_chief() == (mpi.rank() == 0 and index == 0)


def test_the_chief_alone_writes_summaries(mpi, monkeypatch):
    tensorboard = mock.MagicMock()
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", tensorboard)
    with mpi.summary_writer("runs", flush_secs=5) as writer:
        writer.add_scalar("loss", 0.5, 1)
    if mpi.rank() == 0:
        tensorboard.SummaryWriter.assert_called_once_with("runs", flush_secs=5)
        writer.add_scalar.assert_called_once_with("loss", 0.5, 1)
        tensorboard.SummaryWriter.return_value.__exit__.assert_called_once()
    else:
        assert not tensorboard.mock_calls
