"""Locks between the processes of a node: one that dies lets go of what it holds, and one that waits sleeps.

They are locks on single bytes of a file, which the ranks of a node have each opened for themselves. On Linux they
belong to the open file (OFD locks): what else the process opens or closes does not touch them. All threads of a process
have the same open file, so each lock is joined by one between threads. A forked child has the same open file too, and
would keep a lock for a rank that has died: it closes the file at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import threading
import weakref
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
        _open.add(self)

    def take(self, number: int) -> list[Lock]:
        """``number`` locks that nobody uses. Every rank takes alike."""
        first = self._num_taken
        self._num_taken += number
        return [Lock(self._file, byte) for byte in range(first, first + number)]

    def free(self) -> None:
        """Close the file."""
        _open.discard(self)
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    abandon = free


_open: weakref.WeakSet[LockFile] = weakref.WeakSet()


def _close_in_child() -> None:
    for locks in list(_open):
        locks.free()


os.register_at_fork(after_in_child=_close_in_child)


class Lock:
    """One lock."""

    def __init__(self, file: int, byte: int) -> None:
        self._file, self.byte = file, byte
        self._between_threads = threading.Lock()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Nobody else holds the lock in this block."""
        with self._between_threads:
            self._set(fcntl.F_WRLCK)
            try:
                yield
            finally:
                self._set(fcntl.F_UNLCK)

    def _set(self, kind: int) -> None:
        if hasattr(fcntl, "F_OFD_SETLKW"):
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLKW, struct.pack("hhqqi4x", kind, os.SEEK_SET, self.byte, 1, 0))
        else:
            fcntl.lockf(self._file, fcntl.LOCK_EX if kind == fcntl.F_WRLCK else fcntl.LOCK_UN, 1, self.byte)
