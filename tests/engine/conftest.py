import contextlib
import os

import pytest

from torchmpi_py.engine import checkpoint_file, folder_lock


@pytest.fixture
def no_waiting(monkeypatch):
    """For another job, or for the disk."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(folder_lock, "SECONDS", 0.0)


@pytest.fixture
def folder(mpi, tmp_path, monkeypatch):
    """Rank 0's, on a disk that need not be waited for."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    return mpi.broadcast_object(tmp_path)


@pytest.fixture
def full_disk(monkeypatch):
    """In this block what a checkpoint writes finds no space."""

    @contextlib.contextmanager
    def block():
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint_file, "open", lambda *_: open("/dev/full", "wb"), raising=False)  # noqa: SIM115
            yield

    return block
