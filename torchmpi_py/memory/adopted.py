"""Memory that was made elsewhere, moved to where all ranks of a node map it.

DistributedDataParallel makes the memory of its buckets itself. ``move`` moves the whole storage of a tensor, in place:
the tensors on it (buckets, their views, gradients) stay what they are, at another address. The ranks then map each
other's, and work there as in symmetric memory.

torch moves a storage into a file in /dev/shm, whose name is removed at once: a killed rank leaves nothing behind.
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

_COUNT_OF_UNUSED = 1  # users of a storage that is this module's alone
_LEAST_LEFT_BYTES = 256 << 20  # of /dev/shm: workers of a DataLoader send batches through the same room


class AdoptedSegment:
    """The moved storages of all ranks of a channel as one rank sees them: like ``symmetric.Segment``.

    This rank's storage lives until ``close``, so that no other memory gets its address meanwhile.
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
        """``count`` elements of the storage of the rank with this index on the node.

        The view keeps another rank's storage mapped, and does not keep this rank's own alive.
        """
        num_bytes = count * dtype.itemsize
        if index in self._others:
            return self._others[index][offset_bytes : offset_bytes + num_bytes].view(dtype)
        memory: Any = (ctypes.c_char * num_bytes).from_address(self.begin + offset_bytes)
        return torch.frombuffer(memory, dtype=dtype)

    @property
    def is_unused(self) -> bool:
        """Whether no tensor lies on this rank's storage any more, as far as torch tells."""
        storage, count = self._storage, getattr(torch._C, "_storage_Use_Count", None)
        return storage is not None and count is not None and count(storage._cdata) <= _COUNT_OF_UNUSED

    def close(self) -> None:
        """Give up this rank's storage, and the others: no operation uses the segment, nor will one."""
        self._storage, self._others = None, {}


class Offered(NamedTuple):
    """The file of a rank's storage; rank 0's ``key`` is the segment's."""

    path: str
    num_bytes: int
    identity: shared_files.Identity
    key: int


def move(channel: Channel, x: Tensor) -> AdoptedSegment:
    """Move the storage of ``x``, a CPU tensor, and map those of the other ranks. Collective over ``channel``, one node.

    Unavailable, on every rank, if one of them cannot. A storage may have moved then, which its tensors do not notice.
    """
    storage, how = x.untyped_storage(), ((Unavailable,), str, agree.first_as(Unavailable))
    agree.run_on_all_ranks(channel.mpi.allgather, lambda: _check_room(storage, channel.size), *how)
    offers = agree.gather_results(channel.mpi.allgather, lambda: _offer(storage), *how)
    others = agree.run_on_all_ranks(channel.mpi.allgather, lambda: _map_others(channel, offers), *how)
    return AdoptedSegment(offers[0].key, storage, channel.places[channel.rank].local, others)


def _check_room(storage: torch.UntypedStorage, num_ranks: int) -> None:
    """Unavailable if the storages of all ranks, which are about as large, would leave too little to others."""
    if storage.is_shared():
        return
    try:
        room, num_open = os.statvfs(shared_files.SHARED_DIRECTORY), len(os.listdir("/proc/self/fd"))
    except OSError as error:
        raise Unavailable(f"no shared memory: {error}") from None
    if num_open > resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2:
        raise Unavailable(f"{num_open} files are open, more than half of what ulimit -n allows")
    if room.f_bavail * room.f_frsize < num_ranks * storage.nbytes() + _LEAST_LEFT_BYTES:
        raise Unavailable(f"{shared_files.SHARED_DIRECTORY} has no room for {storage.nbytes()} bytes of each rank")


def _offer(storage: torch.UntypedStorage) -> Offered:
    """Move a storage into a file of its own."""
    move_here: Any = storage._share_fd_cpu_
    try:
        file, _ = move_here()
        status = os.fstat(file)
    except (OSError, RuntimeError) as error:
        raise Unavailable(f"torch cannot move the storage: {agree.first_line(error)}") from None
    path, identity = f"/proc/{os.getpid()}/fd/{file}", (status.st_dev, status.st_ino)
    return Offered(path, status.st_size, identity, secrets.randbits(62))


def _map_others(channel: Channel, offers: Sequence[Offered]) -> dict[int, Tensor]:
    """The storages of the other ranks, by their index on the node."""
    return {
        place.local: _mapped(offered)
        for rank, (place, offered) in enumerate(zip(channel.places, offers, strict=True))
        if rank != channel.rank
    }


def _mapped(offered: Offered) -> Tensor:
    """The bytes of another rank's storage. No descriptor stays open, for there are many buckets, and many ranks."""
    file = shared_files.open_file(offered.path, offered.num_bytes, offered.identity)
    try:
        path = f"/proc/self/fd/{file}"
        return torch.from_file(path, shared=True, size=offered.num_bytes, dtype=torch.uint8, device="cpu")
    except RuntimeError as error:
        raise Unavailable(f"cannot map {offered.path}: {agree.first_line(error)}") from None
    finally:
        os.close(file)
