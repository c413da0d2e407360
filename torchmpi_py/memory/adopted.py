"""Memory of existing tensors, moved to where all ranks of a node can map it.

DistributedDataParallel allocates the memory of its buckets itself. ``move`` moves the whole storage of a tensor in
place: the tensors on it (buckets, their views, gradients) stay the same objects, at another address. The ranks then map
each other's storages and use them as symmetric memory.

torch moves a storage into a file in /dev/shm and removes the name at once, so a killed rank leaves nothing behind.
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

_COUNT_OF_UNUSED = 1  # users of a storage that only this module refers to
_LEAST_LEFT_BYTES = 256 << 20  # in /dev/shm, through which workers of a DataLoader send their batches too


class AdoptedSegment:
    """The moved storages of all ranks of a channel as one rank sees them; the interface is ``symmetric.Segment``'s.

    This rank's storage lives until ``close``, so that no other memory gets its address before that.
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
        """Return ``count`` elements of the storage of the rank with this index on the node.

        The view keeps another rank's storage mapped, but it does not keep this rank's own storage alive.
        """
        num_bytes = count * dtype.itemsize
        if index in self._others:
            return self._others[index][offset_bytes : offset_bytes + num_bytes].view(dtype)
        memory: Any = (ctypes.c_char * num_bytes).from_address(self.begin + offset_bytes)
        return torch.frombuffer(memory, dtype=dtype)

    @property
    def is_unused(self) -> bool:
        """Whether no tensor uses this rank's storage any more; False if torch cannot tell."""
        storage, count = self._storage, getattr(torch._C, "_storage_Use_Count", None)
        return storage is not None and count is not None and count(storage._cdata) <= _COUNT_OF_UNUSED

    def close(self) -> None:
        """Release this rank's storage and the others; no operation may use the segment now or later."""
        self._storage, self._others = None, {}


class Offered(NamedTuple):
    """The file of a rank's storage. The ``key`` from rank 0 becomes the segment's key."""

    path: str
    num_bytes: int
    identity: shared_files.Identity
    key: int


def move(channel: Channel, x: Tensor) -> AdoptedSegment:
    """Move the storage of the CPU tensor ``x``, and map the other ranks' storages. Collective over ``channel``.

    All ranks of ``channel`` are on one node. Raise Unavailable on every rank if one of them fails. A storage may have
    moved even then, which its tensors do not notice.
    """
    storage, how = x.untyped_storage(), ((Unavailable,), str, agree.first_as(Unavailable))
    agree.run_on_all_ranks(channel.mpi.allgather, lambda: _check_room(storage, channel.size), *how)
    offers = agree.gather_results(channel.mpi.allgather, lambda: _offer(storage), *how)
    others = agree.run_on_all_ranks(channel.mpi.allgather, lambda: _map_others(channel, offers), *how)
    return AdoptedSegment(offers[0].key, storage, channel.places[channel.rank].local, others)


def _check_room(storage: torch.UntypedStorage, num_ranks: int) -> None:
    """Raise Unavailable if the storages of all ranks, of about equal size, would leave too little shared memory."""
    if storage.is_shared():
        return
    try:
        room, num_open = os.statvfs(shared_files.SHARED_DIRECTORY), len(os.listdir("/proc/self/fd"))
    except OSError as error:
        raise Unavailable(f"shared memory cannot be examined: {error}") from None
    if num_open > resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2:
        raise Unavailable(f"{num_open} files are open, more than half of the limit of ulimit -n")
    if room.f_bavail * room.f_frsize < num_ranks * storage.nbytes() + _LEAST_LEFT_BYTES:
        raise Unavailable(f"{shared_files.SHARED_DIRECTORY} has no space for {storage.nbytes()} bytes per rank")


def _offer(storage: torch.UntypedStorage) -> Offered:
    """Move a storage into its own file, and return the file."""
    move_here: Any = storage._share_fd_cpu_
    try:
        file, _ = move_here()
        status = os.fstat(file)
    except (OSError, RuntimeError) as error:
        raise Unavailable(f"torch cannot move the storage: {agree.first_line(error)}") from None
    path, identity = f"/proc/{os.getpid()}/fd/{file}", (status.st_dev, status.st_ino)
    return Offered(path, status.st_size, identity, secrets.randbits(62))


def _map_others(channel: Channel, offers: Sequence[Offered]) -> dict[int, Tensor]:
    """Return the storages of the other ranks by their index on the node."""
    return {
        place.local: _map(offered)
        for rank, (place, offered) in enumerate(zip(channel.places, offers, strict=True))
        if rank != channel.rank
    }


def _map(offered: Offered) -> Tensor:
    """Return the bytes of another rank's storage. Close the descriptor, because there are many buckets and ranks."""
    file = shared_files.open_file(offered.path, offered.num_bytes, offered.identity)
    try:
        path = f"/proc/self/fd/{file}"
        return torch.from_file(path, shared=True, size=offered.num_bytes, dtype=torch.uint8, device="cpu")
    except RuntimeError as error:
        raise Unavailable(f"cannot map {offered.path}: {agree.first_line(error)}") from None
    finally:
        os.close(file)
