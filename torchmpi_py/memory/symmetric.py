"""Symmetric memory: memory of equal size on every rank of a node, which all ranks of the node map.

On the host a *segment* is one file (``shared_files.py``) with one part per rank. Every rank maps the whole file, so a
rank can read and write the other ranks' parts like its own part. On GPUs each part is a separate allocation, which the
ranks of the same IPC group map (``cuda_ipc.py``).

``symmetric_empty`` returns this rank's part of a new segment as a tensor. ``find`` returns the segment of a tensor, by
a bisection over the addresses of live parts. A rank unmaps a segment when the last tensor in its part is freed,
whatever the other ranks do. The memory is freed when no rank maps the segment any more.

Alternative: MPI's shared windows (MPI_Win_allocate_shared). They are not used because MPI often puts them into
/dev/shm, which is small in containers, and because all ranks must free a window together (docs/decisions/005).

``adopt`` turns existing memory of each rank into a segment (``adopted.py``). The program has not *declared* these
tensors symmetric, so it may pass an adopted tensor on this rank and an ordinary tensor on another rank.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import math
import mmap
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchmpi_py.core import journal, shared_files
from torchmpi_py.core.channels import Channel, Place
from torchmpi_py.core.communicators import Communicator, resolve
from torchmpi_py.core.mpi_api import MPI
from torchmpi_py.errors import RanksDisagree, Unavailable
from torchmpi_py.memory import adopted, cuda_ipc, devices, gpus
from torchmpi_py.memory.adopted import AdoptedSegment

NOT_STARTED = "call mpi.start() first"
unavailable_because = NOT_STARTED
"""The reason why the ranks of this node cannot share memory, or "" if they can. Only a session assigns it."""


class Segment:
    """A segment on the host, as mapped in this process. The object does not keep the memory alive.

    ``key`` identifies the segment on all ranks. ``indices`` lists, for each part, the index of its rank on the node.
    ``is_declared`` is true if the program created the tensors as symmetric tensors, on all ranks. ``is_live`` is true
    while this rank's part is in use.
    """

    device_type, is_declared, is_live = "cpu", True, True

    def __init__(self, mapping: mmap.mmap, key: int, part_bytes: int, indices: Sequence[int], own: int) -> None:
        self.key = key
        self.part_bytes = part_bytes
        # This is the address of the whole file, which begins with the part of the first rank.
        self.address = torch.frombuffer(mapping, dtype=torch.uint8).data_ptr()
        self.part_of = {index: part for part, index in enumerate(indices)}
        self.begin = self.address + self.part_of[own] * part_bytes

    def view(
        self, index: int, dtype: torch.dtype, count: int, offset_bytes: int = 0, owner: Tensor | None = None
    ) -> Tensor:
        """Return a view of ``count`` elements in the part of the rank with this index on the node.

        The segment must outlive the view. To ensure this, pass a tensor of this rank's part as ``owner``. The view then
        keeps this tensor alive, and with it the segment.
        """
        begin = self.address + self.part_of[index] * self.part_bytes + offset_bytes
        if count == 0:
            return torch.empty(0, dtype=dtype, device="cpu")
        # The view keeps the ctypes object alive, and the ctypes object keeps ``owner`` alive.
        memory: Any = (ctypes.c_char * (count * dtype.itemsize)).from_address(begin)
        memory.owner = owner
        return torch.frombuffer(memory, dtype=dtype)


AnySegment = Segment | cuda_ipc.GpuSegment | AdoptedSegment


class LiveSegments:
    """The segments in use by this process."""

    def __init__(self) -> None:
        self.now: tuple[list[int], list[AnySegment]] = ([], [])
        """The sorted start addresses of this rank's parts, and their segments.

        The tuple is always replaced as a whole, because other threads may read it at any time.
        """

    def clear(self) -> None:
        """Remove all segments."""
        for segment in self.now[1]:
            self.remove(segment)

    def add(self, segment: AnySegment) -> None:
        """Add a segment, so that ``find`` can return it."""
        self._replace(added=segment)

    def remove(self, segment: AnySegment) -> None:
        """Remove a segment, so that ``find`` no longer returns it."""
        segment.is_live = False
        self._replace(gone=segment)

    def _replace(self, *, added: AnySegment | None = None, gone: AnySegment | None = None) -> None:
        """Add and remove segments, even if the garbage collector calls this function while it is already running."""
        while True:
            before = self.now
            segments = [segment for segment in (*before[1], added) if segment is not None and segment is not gone]
            segments.sort(key=lambda segment: segment.begin)
            after = [segment.begin for segment in segments], segments
            if self.now is before:  # This line and the next neither call nor allocate, so nothing can interrupt them.
                self.now = after
                return


live = LiveSegments()


def find(x: Tensor) -> tuple[AnySegment, int] | None:
    """Return the segment whose part on this rank contains the flat tensor ``x``, and its offset in bytes; or None."""
    begins, segments = live.now
    if not begins:
        return None
    address = x.data_ptr()
    index = bisect.bisect_right(begins, address) - 1
    if index < 0:
        return None
    segment = segments[index]
    offset = address - segment.begin
    is_inside = offset + x.nbytes <= segment.part_bytes and x.device.type == segment.device_type
    return (segment, offset) if is_inside else None


def adopt(channel: Channel, x: Tensor) -> bool:
    """Make the ordinary CPU tensor ``x``, and all tensors that share its storage, symmetric.

    All ranks of ``channel`` must call it, and must be on one node. Return False on all ranks if it fails on any rank.
    When no tensor uses the storage any more, the next call of this function or of ``drop_unused`` releases the memory.
    """
    drop_unused()
    try:
        live.add(adopted.move(channel, x))
    except Unavailable:
        return False
    return True


def drop_unused() -> None:
    """Release all adopted memory that no tensor uses any more."""
    for segment in live.now[1]:
        if isinstance(segment, AdoptedSegment) and segment.is_unused:
            live.remove(segment)
            segment.close()


def symmetric_empty(
    *size: int | Sequence[int],
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    comm: Communicator | None = None,
) -> Tensor:
    """Return a new, uninitialized tensor that the other ranks on this node can read and write.

    Every rank of ``comm`` must make this call with the same arguments. Each rank gets its own tensor, and can use it
    like any other tensor. If all ranks pass such tensors, reductions, broadcast, scatter, and alltoall with ``out=``
    work in place, without a copy. Contiguous parts (``x[10:20]``) work like whole tensors.

    The memory is freed with its last view. Until then each tensor needs a file descriptor (before Python 3.13), or a
    mapping of every peer's GPU memory. Create one large tensor and use parts of it, instead of hundreds of small
    tensors.

    Args:
        size (int): sizes of the dimensions, as numbers or as one sequence.
        dtype (torch.dtype): dtype of the tensor; default None, torch's default dtype.
        device (torch.device or str): the CPU, or "cuda" for the GPU of this rank; default None, the CPU.
        comm (Communicator): communicator whose ranks make this call; default None, the current level.

    Returns:
        This rank's tensor.

    Raises:
        TypeError: ``dtype`` is not a torch dtype.
        ValueError: a size or the device is not valid.
        RanksDisagree: the ranks request different tensors.
        Unavailable: the memory cannot be shared or is too large.
        NotStarted: ``mpi.start()`` was not called.

    Examples:
        >>> x = mpi.symmetric_empty(2, 3).fill_(1)
        >>> mpi.allreduce(x).eq(mpi.size()).all().item()
        True
    """
    comm = resolve(comm)
    shape = _shape(size)
    dtype = dtype or torch.get_default_dtype()
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"symmetric_empty: dtype={dtype!r}: pass a torch dtype, such as torch.float32")
    where = _device(device)
    return journal.run_together("symmetric_empty", comm, lambda: _make(shape, dtype, where, comm))


def _make(shape: torch.Size, dtype: torch.dtype, where: torch.device, comm: Communicator) -> Tensor:
    # Every rank compares all requests before any memory is allocated, so either all ranks raise or no rank raises.
    requests = comm.direct.mpi.allgather((tuple(shape), str(dtype), where.type))
    if any(other != requests[0] for other in requests):
        texts = ", ".join(f"rank {rank}: {list(s)} {d} on {kind}" for rank, (s, d, kind) in enumerate(requests))
        raise RanksDisagree(f"symmetric_empty: the ranks request different tensors ({texts}); pass equal arguments")
    num_bytes = math.prod(shape) * dtype.itemsize
    return memory(comm.direct, num_bytes, where)[:num_bytes].view(dtype).view(shape)


def memory(channel: Channel, num_bytes: int, device: torch.device) -> Tensor:
    """Return this rank's part, of at least ``num_bytes``, of a new segment. All ranks of the channel must call it.

    Raise Unavailable on every rank if the memory of any rank cannot be allocated.
    """
    if device.type == "cuda":
        if reason := gpus.why_no_ipc():
            raise Unavailable(f"cannot allocate symmetric memory on {device}: {reason}")
        part, gpu_segment = cuda_ipc.allocate(channel.mpi, channel.places, num_bytes, device, live.remove)
        live.add(gpu_segment)
        return part
    mapping, segment = allocate(channel.mpi, channel.places, num_bytes)
    live.add(segment)
    # The finalizer is attached to an object that is freed before the mapping. A finalizer of the mapping itself would
    # run only after the memory is unmapped. Before it ran, another thread could get the same addresses for ordinary
    # memory, and ``find`` would treat this memory as symmetric.
    owner: Any = (ctypes.c_char * segment.part_bytes).from_buffer(mapping, segment.begin - segment.address)
    weakref.finalize(owner, live.remove, segment).atexit = False
    return torch.frombuffer(owner, dtype=torch.uint8)


def shared_bytes(channel: Channel, num_bytes: int) -> dict[int, Tensor]:
    """Allocate host memory for each rank of this node, and return it by rank, as tensors of bytes.

    All ranks of the channel must call it. All ranks of the node can read and write the memory, which lives as long as
    one of the tensors. Raise Unavailable on every rank if the memory of any rank cannot be allocated.
    """
    own = memory(channel, num_bytes, torch.device("cpu"))
    location = find(own)
    assert location is not None, "memory() has just created it"
    node, segment = channel.places[channel.rank].node, location[0]
    assert isinstance(segment, Segment), "memory() on the CPU creates a host segment"
    return {
        rank: segment.view(place.local, torch.uint8, own.nbytes, owner=own)
        for rank, place in enumerate(channel.places)
        if place.node == node
    }


def allocate(comm: MPI.Comm, places: Sequence[Place], num_bytes: int) -> tuple[mmap.mmap, Segment]:
    """Create a segment with at least ``num_bytes`` for each rank of this node. All ranks of ``comm`` must call it.

    The segment lives as long as the mapping. Raise Unavailable on every rank if the memory of any node cannot be
    allocated.
    """
    mine = [rank for rank, place in enumerate(places) if place.node == places[comm.rank].node]
    part_bytes = -(-max(1, num_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE  # Parts begin at page boundaries.
    try:
        mapping, key = shared_files.share(
            comm,
            mine[0],
            part_bytes * len(mine),
            lambda path, identity: shared_files.map_file(path, part_bytes * len(mine), identity),
        )
    except Unavailable as error:
        raise Unavailable(f"cannot share memory of {num_bytes} bytes per rank: {error}") from None
    indices = [places[rank].local for rank in mine]
    return mapping, Segment(mapping, key, part_bytes, indices, places[comm.rank].local)


def unmap_peers(node: MPI.Comm) -> None:
    """Turn symmetric GPU memory into ordinary memory, and unmap the peers' parts. All ranks of ``node`` must call it.

    A process must not end before this call, because its memory would be freed while other processes map it. In that
    case torch logs a warning.
    """
    segments = [segment for segment in live.now[1] if isinstance(segment, cuda_ipc.GpuSegment)]
    for device in {part.device for segment in segments for part in segment.parts.values()}:
        # CUDA may report an error from earlier work here. Ignore it, because the other ranks wait at the barrier below.
        with contextlib.suppress(RuntimeError):
            devices.of(device).synchronize()  # Work of a broken communicator may still be running.
    for segment in segments:
        live.remove(segment)
        segment.parts.clear()
    node.Barrier()
    torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]  # Free the memory that peers have unmapped.


def _shape(size: Sequence[int | Sequence[int]]) -> torch.Size:
    extents = size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size
    if any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in extents):
        raise ValueError(f"symmetric_empty: size {size!r}: pass whole numbers >= 0, as in symmetric_empty(3, 4)")
    return torch.Size(extents)  # type: ignore[arg-type]


def _device(name: torch.device | str | None) -> torch.device:
    """Return the device with this name. Raise ValueError unless it is the CPU or this process's GPU."""
    device = torch.device(name or "cpu")
    if device.type == "cuda":
        if gpus.table() is None:
            raise ValueError(f"symmetric_empty: device={name!r}: {gpus.why_no_ipc()}")
        current = torch.device("cuda", torch.cuda.current_device())
        device = current if device.index is None else device
        if device == current:
            return device
    if device.type != "cpu":
        raise ValueError(f'symmetric_empty: device={name!r}: pass "cpu", or "cuda" for the GPU of this rank')
    return device


def try_out(comm: MPI.Comm, places: Sequence[Place], num_bytes: int) -> str:
    """Return why the ranks of a node cannot share ``num_bytes`` per rank, or "". All ranks of ``comm`` must call it."""
    try:
        allocate(comm, places, num_bytes)
    except Unavailable as error:
        return str(error)
    return ""
