"""The one rank that writes, and its summary writer."""

import json
import sys
import types
from dataclasses import asdict

import pytest

from torchmpi_py.launch import group_jobs

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(30)]


def test_rank_0_of_the_first_group_is_the_chief(mpi, monkeypatch):
    assert mpi.is_chief() == (mpi.rank() == 0)
    for index in range(2):
        group = group_jobs.GroupOfRanks(index, 2, "token", "folder")
        monkeypatch.setenv(group_jobs.VARIABLE, json.dumps(asdict(group)))
        assert mpi.is_chief() == (mpi.rank() == 0 and index == 0)


def test_the_chief_alone_writes_summaries(mpi, monkeypatch):
    class Writer:
        """In place of TensorBoard's."""

        def __init__(self, log_dir, **options):
            self.calls = [(log_dir, options)]

        def add_scalar(self, *values):
            self.calls.append(values)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.calls.append("closed")

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=Writer))
    with mpi.summary_writer("runs", flush_secs=5) as writer:
        writer.add_scalar("loss", 0.5, 1)
    if mpi.rank() == 0:
        assert writer.calls == [("runs", {"flush_secs": 5}), ("loss", 0.5, 1), "closed"]
    else:
        assert not isinstance(writer, Writer)
        assert not hasattr(writer, "__len__")
