"""The shards of one parameter server on this node, in memory that all ranks of the node map, with a lock each."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from torchmpi_py import symmetric
from torchmpi_py.channels import Channel
from torchmpi_py.paramserver import shard
from torchmpi_py.paramserver.locks import LockFile
from torchmpi_py.paramserver.shard import Shard
from torchmpi_py.paramserver.sharding import Bounds


class Store:
    """Made collectively: each rank seeds its shard from its own flat ``source``. The ranks have to meet after it."""

    def __init__(self, channel: Channel, source: Tensor, bounds: Sequence[Bounds], num_slots: int) -> None:
        locks = channel.keep(LockFile, LockFile).take(channel.size)
        largest = shard.num_bytes(bounds[0][1] - bounds[0][0], source.dtype, num_slots)
        self._memory = symmetric.memory(channel, largest, torch.device("cpu"))
        found = symmetric.find(self._memory)
        assert found is not None, "it was just made"
        assert isinstance(found[0], symmetric.Segment), "on the host"
        segment, node = found[0], channel.places[channel.rank].node
        self._shards: dict[int, Shard] = {}
        with torch.inference_mode(False):  # ordinary tensors, whatever mode this is made in
            for rank, (place, (begin, end)) in enumerate(zip(channel.places, bounds, strict=True)):
                if place.node == node:
                    memory = segment.view(place.local, torch.uint8, self._memory.nbytes, owner=self._memory)
                    self._shards[rank] = Shard(memory, end - begin, source.dtype, num_slots)
        self._locks = locks
        self.number = locks[0].byte  # the same on all ranks of the channel, and no other server's
        begin, end = bounds[channel.rank]
        self._shards[channel.rank].values.copy_(source[begin:end])

    def __contains__(self, rank: int) -> bool:
        """Whether the shard of this rank is here."""
        return rank in self._shards

    @contextlib.contextmanager
    def held(self, rank: int) -> Iterator[Shard]:
        """The shard of a rank of this node; nobody else looks at it or changes it in this block."""
        with self._locks[rank].held():
            yield self._shards[rank]
