"""Locks between the processes of a node: one that dies lets go of what it holds, and one that waits sleeps.

They are locks on single bytes of a file (POSIX), which the ranks of a node have open together. Those are the process's,
not the thread's, so each is joined by one between the threads of the process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections.abc import Iterator

from torchmpi_py import shared_files
from torchmpi_py.channels import Channel

_NUM_BYTES = 4096  # of the file; locks may lie behind its end


class LockFile:
    """The locks of a channel, one file a node; kept with the channel. Collective."""

    def __init__(self, channel: Channel) -> None:
        node = channel.places[channel.rank].node
        first_here = next(rank for rank, place in enumerate(channel.places) if place.node == node)
        self._file, _ = shared_files.share(
            channel.mpi,
            first_here,
            _NUM_BYTES,
            lambda path, identity: shared_files.open_file(path, _NUM_BYTES, identity),
        )
        self._num_taken = 0

    def take(self, number: int) -> list[Lock]:
        """``number`` locks that nobody uses. Every rank takes alike."""
        first = self._num_taken
        self._num_taken += number
        return [Lock(self._file, first + index) for index in range(number)]

    def free(self) -> None:
        """Close the file."""
        os.close(self._file)


class Lock:
    """One lock."""

    def __init__(self, file: int, byte: int) -> None:
        self._file, self._byte = file, byte
        self._between_threads = threading.Lock()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Nobody else holds the lock in this block."""
        with self._between_threads:
            fcntl.lockf(self._file, fcntl.LOCK_EX, 1, self._byte)
            try:
                yield
            finally:
                fcntl.lockf(self._file, fcntl.LOCK_UN, 1, self._byte)
