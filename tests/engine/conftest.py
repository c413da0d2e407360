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
        with open("/dev/full", "wb", buffering=0) as full, monkeypatch.context() as patch:

            class Full(checkpoint_file.ChecksumStream):
                def __init__(self, file):
                    super().__init__(full)

            patch.setattr(checkpoint_file, "ChecksumStream", Full)
            yield

    return block
