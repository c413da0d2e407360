"""The shards of one parameter server, in memory that all ranks of the node map, with a lock each."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torchmpi_py import symmetric
from torchmpi_py.channels import Channel
from torchmpi_py.paramserver import client
from torchmpi_py.paramserver.locks import LockFile
from torchmpi_py.paramserver.sharding import Bounds, shards


class Store:
    """Kept with the channel of its ranks. Made collectively: each rank seeds its shard from its own flat ``source``."""

    def __init__(self, channel: Channel, source: Tensor) -> None:
        self.bounds: list[Bounds] = shards(source.numel(), channel.size)
        self.is_free = False
        self._channel = channel
        self._locks = channel.keep(LockFile, LockFile)
        self._first_lock = self._locks.take(channel.size)
        largest = (self.bounds[0][1] - self.bounds[0][0]) * source.itemsize
        self._memory = symmetric.memory(channel, largest, torch.device("cpu"))
        found = symmetric.find(self._memory)
        assert found is not None, "it was just made"
        self._shards = [
            found[0].view(place.local, source.dtype, end - begin)
            for place, (begin, end) in zip(channel.places, self.bounds, strict=True)
        ]
        begin, end = self.bounds[channel.rank]
        self._shards[channel.rank].copy_(source[begin:end])
        channel.mpi.Barrier()

    def visit(self, work: Callable[[Tensor, int, int], object]) -> None:
        """Do ``work(shard, begin, end)`` for each shard that is not empty, under its lock; this rank's own is first.

        In the client's thread alone: the locks know no others.
        """
        for step in range(self._channel.size):
            rank = (self._channel.rank + step) % self._channel.size
            begin, end = self.bounds[rank]
            if begin < end:
                with self._locks.held(self._first_lock + rank):
                    work(self._shards[rank], begin, end)

    def free(self) -> None:
        """When all ranks have done what they were asked, let go of the memory. Collective."""
        client.drain()
        self._channel.mpi.Barrier()
        self.is_free = True
        del self._shards, self._memory
