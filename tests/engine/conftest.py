import contextlib
import os

import pytest

from torchmpi_py.engine import checkpoint, checkpoint_files


@pytest.fixture
def no_waiting(monkeypatch):
    """For a file system that shows things later, or writes them."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(checkpoint, "SEEN_WITHIN_SECONDS", 0.0)


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

            class Full(checkpoint_files.ChecksumStream):
                def __init__(self, file):
                    super().__init__(full)

            patch.setattr(checkpoint_files, "ChecksumStream", Full)
            yield

    return block
