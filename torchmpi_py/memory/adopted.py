"""Memory that was made elsewhere, moved to where all ranks of a node map it.

DistributedDataParallel makes the memory of its buckets itself. ``move`` moves the whole storage of a tensor, in place:
the tensors on it (buckets, their views, gradients) stay what they are, at another address. The ranks then map each
other's, and work there as in symmetric memory.

torch moves a storage into a file in /dev/shm, whose name is removed at once: a killed rank leaves nothing behind.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchmpi_py.core import agree, shared_files
from torchmpi_py.core.channels import Channel
from torchmpi_py.errors import Unavailable

_LEAST_FREE = 2  # times the size of the storage: other processes take from the same room


class AdoptedSegment:
    """The moved storages of all ranks of a channel as one rank sees them: like ``symmetric.Segment``.

    This rank's storage lives until ``close``, so that no other memory gets its address meanwhile.
    """

    device_type = "cpu"

    def __init__(self, key: int, storage: torch.UntypedStorage, own: int, mappings: dict[int, mmap.mmap]) -> None:
        self.key = key
        self.part_bytes = storage.nbytes()
        self.begin = storage.data_ptr()
        self._storage: torch.UntypedStorage | None = storage
        self._mappings = mappings
        addresses = {index: torch.frombuffer(each, dtype=torch.uint8).data_ptr() for index, each in mappings.items()}
        self.part_of = {own: self.begin} | addresses

    def view(self, index: int, dtype: torch.dtype, count: int, offset_bytes: int = 0) -> Tensor:
        """``count`` elements of the storage of the rank with this index on the node, good until ``close``."""
        memory: Any = (ctypes.c_char * (count * dtype.itemsize)).from_address(self.part_of[index] + offset_bytes)
        return torch.frombuffer(memory, dtype=dtype)

    @property
    def is_unused(self) -> bool:
        """Whether no tensor lies on this rank's storage any more, as far as torch tells."""
        count = getattr(torch._C, "_storage_Use_Count", None)
        return self._storage is not None and count is not None and count(self._storage._cdata) == 1

    def close(self) -> None:
        """Give up this rank's storage, and unmap the others: no operation uses the segment, nor will one."""
        self._storage, self._mappings = None, {}


class Offered(NamedTuple):
    """The file of a rank's storage; rank 0's ``key`` is the segment's."""

    path: str
    num_bytes: int
    identity: shared_files.Identity
    key: int


def move(channel: Channel, x: Tensor) -> AdoptedSegment:
    """Move the storage of ``x``, a CPU tensor, and map those of the other ranks. Collective over ``channel``, one node.

    Unavailable, on every rank, if one of them cannot; the storage may have moved then, which its tensors do not notice.
    """
    storage, how = x.untyped_storage(), ((Unavailable,), str, agree.first_as(Unavailable))
    offers = agree.gather_results(channel.mpi.allgather, lambda: _offer(storage), *how)
    mappings = agree.run_on_all_ranks(channel.mpi.allgather, lambda: _map_others(channel, offers), *how)
    return AdoptedSegment(offers[0].key, storage, channel.places[channel.rank].local, mappings)


def _map_others(channel: Channel, offers: Sequence[Offered]) -> dict[int, mmap.mmap]:
    """The storages of the other ranks, by their index on the node."""
    return {
        place.local: shared_files.map_file(offered.path, offered.num_bytes, offered.identity)
        for rank, (place, offered) in enumerate(zip(channel.places, offers, strict=True))
        if rank != channel.rank
    }


def _offer(storage: torch.UntypedStorage) -> Offered:
    """Move a storage into a file of its own."""
    room = os.statvfs(shared_files.SHARED_DIRECTORY)
    if not storage.is_shared() and room.f_bavail * room.f_frsize < _LEAST_FREE * storage.nbytes():
        raise Unavailable(f"{shared_files.SHARED_DIRECTORY} has no room for {storage.nbytes()} bytes")
    move_here: Any = storage._share_fd_cpu_
    try:
        file, _ = move_here()
        status = os.fstat(file)
    except (OSError, RuntimeError) as error:
        raise Unavailable(f"torch cannot move the storage: {agree.first_line(error)}") from None
    path, identity = f"/proc/{os.getpid()}/fd/{file}", (status.st_dev, status.st_ino)
    return Offered(path, status.st_size, identity, secrets.randbits(62))
