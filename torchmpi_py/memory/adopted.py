"""Move the memory of existing tensors into files, so that all ranks of a node can map this memory.

DistributedDataParallel allocates the memory of its buckets itself. ``move`` moves the whole storage of a tensor. The
tensors that share the storage (buckets, their views, gradients) stay the same Python objects, but at another address.
The ranks then map each other's storages and use them as symmetric memory.

torch moves a storage into a file in /dev/shm, and immediately removes the name of the file. So a killed rank leaves
nothing behind.
"""

from __future__ import annotations

import ctypes
import os
import resource
import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchmpi_py.core import agree, shared_files
from torchmpi_py.core.channels import Channel
from torchmpi_py.errors import Unavailable

_COUNT_OF_UNUSED = 1  # torch's use count of a storage to which only this module refers
_LEAST_LEFT_BYTES = 256 << 20  # This space in /dev/shm stays free, because workers of a DataLoader send batches there.


class AdoptedSegment:
    """The moved storages of all ranks of a channel, as mapped in this process.

    The class has the interface of ``symmetric.Segment``. This rank's storage lives until ``close``, so that no other
    memory gets the same address before ``close``.
    """

    device_type, is_declared, is_live = "cpu", False, True

    def __init__(self, key: int, storage: torch.UntypedStorage, own: int, others: dict[int, Tensor]) -> None:
        self.key = key
        self.part_bytes = storage.nbytes()
        self.begin = storage.data_ptr()
        self.part_of = dict.fromkeys((own, *others), 0)
        self._storage: torch.UntypedStorage | None = storage
        self._others = others

    def view(self, index: int, dtype: torch.dtype, count: int, offset_bytes: int = 0) -> Tensor:
        """Return a view of ``count`` elements in the storage of the rank with this index on the node.

        A view of another rank's storage keeps the storage mapped. A view of this rank's own storage does not keep the
        storage alive.
        """
        num_bytes = count * dtype.itemsize
        if index in self._others:
            return self._others[index][offset_bytes : offset_bytes + num_bytes].view(dtype)
        memory: Any = (ctypes.c_char * num_bytes).from_address(self.begin + offset_bytes)
        return torch.frombuffer(memory, dtype=dtype)

    @property
    def is_unused(self) -> bool:
        """Whether no tensor uses this rank's storage any more. False if torch does not provide the use count."""
        storage, count = self._storage, getattr(torch._C, "_storage_Use_Count", None)
        return storage is not None and count is not None and count(storage._cdata) <= _COUNT_OF_UNUSED

    def close(self) -> None:
        """Release this rank's storage, and unmap the other storages. No operation may use the segment any more."""
        self._storage, self._others = None, {}


class Offered(NamedTuple):
    """The file of a rank's storage, as announced to the other ranks. Rank 0's ``key`` becomes the segment's key."""

    path: str
    num_bytes: int
    identity: shared_files.Identity
    key: int


def move(channel: Channel, x: Tensor) -> AdoptedSegment:
    """Move the storage of the CPU tensor ``x``, and map the other ranks' storages.

    All ranks of ``channel`` must call it, and must be on one node. Raise Unavailable on every rank if any rank fails.
    After a failure some storages may have moved; their tensors are still valid.
    """
    storage, how = x.untyped_storage(), ((Unavailable,), str, agree.first_as(Unavailable))
    agree.run_on_all_ranks(channel.mpi.allgather, lambda: _check_room(storage, channel.size), *how)
    offers = agree.gather_results(channel.mpi.allgather, lambda: _offer(storage), *how)
    others = agree.run_on_all_ranks(channel.mpi.allgather, lambda: _map_others(channel, offers), *how)
    return AdoptedSegment(offers[0].key, storage, channel.places[channel.rank].local, others)


def _check_room(storage: torch.UntypedStorage, num_ranks: int) -> None:
    """Raise Unavailable if the storages of all ranks would leave too little free shared memory.

    The storages of all ranks are assumed to have the same size.
    """
    if storage.is_shared():
        return
    try:
        room, num_open = os.statvfs(shared_files.SHARED_DIRECTORY), len(os.listdir("/proc/self/fd"))
    except OSError as error:
        raise Unavailable(f"cannot find out how much shared memory is free: {error}") from None
    if num_open > resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2:
        raise Unavailable(f"{num_open} files are open, more than half of the limit; raise ulimit -n")
    if room.f_bavail * room.f_frsize < num_ranks * storage.nbytes() + _LEAST_LEFT_BYTES:
        raise Unavailable(f"{shared_files.SHARED_DIRECTORY} has no space for {storage.nbytes()} bytes per rank")


def _offer(storage: torch.UntypedStorage) -> Offered:
    """Move a storage into its own file, and return the description of the file."""
    move_here: Any = storage._share_fd_cpu_
    try:
        file, _ = move_here()
        status = os.fstat(file)
    except (OSError, RuntimeError) as error:
        raise Unavailable(f"torch cannot move the storage: {agree.first_line(error)}") from None
    path, identity = f"/proc/{os.getpid()}/fd/{file}", (status.st_dev, status.st_ino)
    return Offered(path, status.st_size, identity, secrets.randbits(62))


def _map_others(channel: Channel, offers: Sequence[Offered]) -> dict[int, Tensor]:
    """Map the storages of the other ranks, and return them by the ranks' index on the node."""
    return {
        place.local: _map(offered)
        for rank, (place, offered) in enumerate(zip(channel.places, offers, strict=True))
        if rank != channel.rank
    }


def _map(offered: Offered) -> Tensor:
    """Map another rank's storage, and return it as a tensor of bytes.

    The file descriptor is closed, because there may be many buckets and ranks.
    """
    file = shared_files.open_file(offered.path, offered.num_bytes, offered.identity)
    try:
        path = f"/proc/self/fd/{file}"
        return torch.from_file(path, shared=True, size=offered.num_bytes, dtype=torch.uint8, device="cpu")
    except RuntimeError as error:
        raise Unavailable(f"cannot map {offered.path}: {agree.first_line(error)}") from None
    finally:
        os.close(file)
