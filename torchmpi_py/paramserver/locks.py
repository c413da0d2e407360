"""Locks between the processes of a node: one that dies lets go of what it holds, and one that waits sleeps.

They are locks on single bytes of a file (POSIX), which the ranks of a communicator have open together. They are the
process's, not the thread's: one thread alone may take them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator

from torchmpi_py import shared_files
from torchmpi_py.channels import Channel

_NUM_BYTES = 4096  # of the file; locks may lie behind its end


class LockFile:
    """The locks of a channel whose ranks are on one node; kept with the channel. Collective."""

    def __init__(self, channel: Channel) -> None:
        assert channel.num_nodes == 1, channel.places
        self._file, _ = shared_files.share(
            channel.mpi, 0, _NUM_BYTES, lambda path, identity: shared_files.open_file(path, _NUM_BYTES, identity)
        )
        self._num_taken = 0

    def take(self, number: int) -> int:
        """The first of ``number`` locks that nobody uses. Every rank takes alike."""
        first = self._num_taken
        self._num_taken += number
        return first

    @contextlib.contextmanager
    def held(self, lock: int) -> Iterator[None]:
        """Nobody else holds the lock in this block."""
        fcntl.lockf(self._file, fcntl.LOCK_EX, 1, lock)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, lock)

    def free(self) -> None:
        """Close the file."""
        os.close(self._file)
