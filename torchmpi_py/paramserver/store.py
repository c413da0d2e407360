"""The shards of a parameter server on this node, in memory that all ranks of the node map, with a lock for each shard.

The kernel releases the locks of a process that dies, and a process sleeps while it waits for a lock. Each lock covers
one byte of a file, which every rank of the node opens separately. A plain mutex in shared memory would be faster, but
if a rank died while it held the mutex, the mutex would stay locked forever. The locks are OFD locks, which belong to
the open file, so opening or closing other files does not affect the locks. All threads of a process share the open
file, so each lock also contains a lock between threads. A forked child also shares the open file, and would keep the
locks of a dead rank, so the child closes the file immediately.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import threading
import weakref
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from torchmpi_py.core import shared_files
from torchmpi_py.core.channels import Channel
from torchmpi_py.memory import symmetric
from torchmpi_py.paramserver import shard
from torchmpi_py.paramserver.shard import Bounds, Shard

_WAIT_FOR_LOCK = 38  # F_OFD_SETLKW on Linux, which fcntl lacks if Python was built with an old libc
_NUM_BYTES = 4096  # size of the lock file. A locked byte may be beyond the end of the file.


class LockFile:
    """The locks of a channel; each node has one lock file. The channel keeps this object between calls.

    All ranks must call the constructor.
    """

    def __init__(self, channel: Channel) -> None:
        node = channel.places[channel.rank].node
        first_here = channel.places.nodes.tolist().index(node)
        self._file, _ = shared_files.share(
            channel.mpi,
            first_here,
            _NUM_BYTES,
            lambda path, identity: shared_files.open_file(path, _NUM_BYTES, identity),
        )
        self._num_allocated = 0
        _open.add(self)

    def allocate(self, number: int) -> list[Lock]:
        """Return ``number`` new locks. Every rank of the channel must allocate the same number."""
        first = self._num_allocated
        self._num_allocated += number
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
    """A lock between the threads and processes of a node. It covers one byte of a lock file."""

    def __init__(self, file: int, byte: int) -> None:
        self._file, self.byte = file, byte
        self._between_threads = threading.Lock()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock during a ``with`` block, excluding all other threads and processes of the node."""
        with self._between_threads:
            self._set(fcntl.F_WRLCK)
            try:
                yield
            finally:
                self._set(fcntl.F_UNLCK)

    def _set(self, kind: int) -> None:
        fcntl.fcntl(self._file, _WAIT_FOR_LOCK, struct.pack("hhqqi4x", kind, os.SEEK_SET, self.byte, 1, 0))


class Store:
    """The shards of one server on this node.

    All ranks must call the constructor, in which each rank fills its shard from its flat ``source``. The ranks must
    synchronize before they use the shards.
    """

    def __init__(self, channel: Channel, source: Tensor, bounds: Sequence[Bounds], num_slots: int) -> None:
        self._locks = channel.keep(LockFile, LockFile).allocate(channel.size)
        self.number = self._locks[0].byte  # The number identifies the server on all ranks.
        largest = shard.num_bytes(bounds[0][1] - bounds[0][0], source.dtype, num_slots)
        with torch.inference_mode(False):  # The shards must be normal tensors, even in the caller's inference mode.
            self._shards = {
                rank: Shard(memory, bounds[rank][1] - bounds[rank][0], source.dtype, num_slots)
                for rank, memory in symmetric.shared_bytes(channel, largest).items()
            }
        begin, end = bounds[channel.rank]
        self._shards[channel.rank].values.copy_(source[begin:end])

    def __contains__(self, rank: int) -> bool:
        """Return whether the shard of a rank is on this node."""
        return rank in self._shards

    @contextlib.contextmanager
    def held(self, rank: int) -> Iterator[Shard]:
        """Hold the lock of the shard of a rank on this node during a ``with`` block, and yield the shard."""
        with self._locks[rank].held():
            yield self._shards[rank]
