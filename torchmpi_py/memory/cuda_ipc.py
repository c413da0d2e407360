"""GPU memory and events that other processes of the node can use, by CUDA's inter-process communication (IPC).

torch.multiprocessing shares the memory. It counts the processes that map the memory, and keeps the memory until all of
these processes have released it. A *segment* consists of one allocation per rank from torch's allocator: this rank's
part, and its peers' parts as mapped in this process. Events order the streams of peers. A stream can wait for an event
that a peer has recorded, if the ranks have synchronized after the recording.
"""

from __future__ import annotations

import contextlib
import secrets
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from torchmpi_py.core import agree
from torchmpi_py.core.channels import Channel, Place
from torchmpi_py.core.mpi_api import MPI
from torchmpi_py.errors import CommunicatorError, Unavailable
from torchmpi_py.memory import devices, gpus

ALIGNMENT = 512  # bytes, as in torch's allocator
_DEVICE = 6  # the index of the sender's device among the arguments of torch's rebuild_cuda_tensor
_COUNTER = slice(11, 13)  # the arguments that identify torch's counter of the processes that map the memory
READY, DONE = 0, 1


class GpuSegment:
    """A segment on GPUs, as mapped in this process. Like ``symmetric.Segment``, it does not own this rank's part."""

    device_type, is_declared, is_live = "cuda", True, True

    def __init__(self, key: int, part_bytes: int, own: int, begin: int, parts: dict[int, Tensor]) -> None:
        self.key = key
        self.part_bytes = part_bytes
        self.begin = begin
        self.parts = parts  # by index on the node: the peers' mapped parts, and an alias of this rank's part
        self.part_of = {index: index for index in (own, *parts)}

    def view(self, index: int, dtype: torch.dtype, count: int, offset_bytes: int = 0) -> Tensor:
        """Return a view of ``count`` elements in the part of the rank with this index on the node.

        A view of this rank's own part does not keep the part's memory alive.
        """
        return self.parts[index][offset_bytes : offset_bytes + count * dtype.itemsize].view(dtype)


class _Memory:
    """GPU memory with CUDA's array interface, from which torch makes a tensor. The tensor keeps this object alive."""

    def __init__(self, address: int, num_bytes: int, owner: object) -> None:
        self._owner = owner
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 2,
        }


def allocate(
    comm: MPI.Comm,
    places: Sequence[Place],
    num_bytes: int,
    device: torch.device,
    on_end: Callable[[GpuSegment], object],
) -> tuple[Tensor, GpuSegment]:
    """Create a segment with at least ``num_bytes`` for each rank of this IPC group. All ranks of ``comm`` must call it.

    Return this rank's part, as a tensor of bytes, and the segment. ``on_end`` is called before the part's memory is
    freed. Raise Unavailable on every rank if the memory cannot be allocated or shared.
    """
    me = places[comm.rank]
    mine = [rank for rank, place in enumerate(places) if gpus.group(place) == gpus.group(me)]
    peers = [rank for rank in mine if rank != comm.rank]
    part_bytes = -(-max(1, num_bytes) // ALIGNMENT) * ALIGNMENT
    base, handles, failure = _offer(part_bytes, peers, device)
    offers = comm.allgather((secrets.randbits(62), handles, failure))
    parts: dict[int, Tensor] = {}

    def map_peers() -> Tensor:
        if failure := next((text for _, _, text in offers if text), ""):
            raise RuntimeError(failure)
        parts.update(_open_all({rank: offers[rank][1][comm.rank] for rank in peers}, places, device))
        assert base is not None, "no rank has failed"
        return base

    failed = agree.first_as(Unavailable, f"cannot share GPU memory of {num_bytes} bytes per rank: ")
    try:
        base = agree.run_on_all_ranks(comm.allgather, map_peers, (RuntimeError,), agree.first_line, failed)
    except Unavailable:
        _decline([offers[rank][1].get(comm.rank) for rank in peers if places[rank].local not in parts])
        raise
    memory = _Memory(base.data_ptr(), part_bytes, base)
    parts[me.local] = torch.as_tensor(_Memory(base.data_ptr(), part_bytes, None), device=device)
    segment = GpuSegment(offers[mine[0]][0], part_bytes, me.local, base.data_ptr(), parts)
    weakref.finalize(memory, _end, segment, device, on_end).atexit = False
    return torch.as_tensor(memory, device=device), segment


def _end(segment: GpuSegment, device: torch.device, on_end: Callable[[GpuSegment], object]) -> None:
    devices.of(device).synchronize()  # Work on any stream may still use this rank's part or the peers' parts.
    on_end(segment)


def _offer(part_bytes: int, peers: Sequence[int], device: torch.device) -> tuple[Tensor | None, dict[int, object], str]:
    """Allocate this rank's part. Return (memory, a handle for each peer, ""), or (None, {}, the error) after a failure.

    torch counts each handle as one process that maps the memory.
    """
    share: Any = reductions.reduce_tensor
    try:
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]  # Free the memory that peers have released.
        with without_expandable_segments():
            base = torch.empty(part_bytes, dtype=torch.uint8, device=device)
        return base, {rank: share(base) for rank in peers}, ""
    except RuntimeError as error:  # No memory is left, or the memory cannot be shared.
        return None, {}, agree.first_line(error)


@contextlib.contextmanager
def without_expandable_segments() -> Iterator[None]:
    """Let torch's allocator return memory that can be shared, even if the user has enabled expandable segments.

    In general, memory of expandable segments cannot be shared. While expandable segments are disabled, the allocator
    does not use existing ones either, so the memory is new.
    """
    settings = torch.cuda.memory._snapshot().get("allocator_settings", {})
    if not settings.get("expandable_segments"):
        yield
        return
    # Torch replaces all settings together, so the user's settings are repeated.
    former = settings.get("last_allocator_settings") or "expandable_segments:True"
    # The last occurrence of a setting counts. A setting that is omitted gets its default.
    _set_allocator(f"{former},expandable_segments:False")
    try:
        yield
    finally:
        _set_allocator(former)


def _set_allocator(settings: str) -> None:
    change: Any = getattr(torch._C, "_accelerator_setAllocatorSettings", None)  # the name in newer versions of torch
    (change or torch.cuda.memory._set_allocator_settings)(settings)


def _open_all(handles: dict[int, Any], places: Sequence[Place], device: torch.device) -> dict[int, Tensor]:
    """Map the peers' memory, on whichever GPU it is, as tensors on this rank's GPU.

    Return the tensors by the peers' index on the node. A kernel needs all its tensors on one device.
    """
    opened = {}
    try:
        # A handle is torch's call that rebuilds the tensor, with the sender's device among its arguments.
        for rank, (rebuild, arguments) in handles.items():
            opened[places[rank].local] = rebuild(*arguments[:_DEVICE], device.index, *arguments[_DEVICE + 1 :])
    except RuntimeError as error:
        raise RuntimeError(f"cannot map a peer's GPU memory: {agree.first_line(error)}") from None
    return opened


def _decline(handles: Sequence[Any]) -> None:
    """Release memory that peers have offered but this rank has not mapped.

    torch counts each offered handle as a mapping, and keeps the memory until every mapping has been released.
    """
    release: Any = torch.UntypedStorage._release_ipc_counter_cuda
    for handle in handles:
        if handle is not None:
            release(*handle[1][_COUNTER])


class PeerEvents:
    """A READY and a DONE event of this rank, and the events of its peers.

    All ranks of the channel must construct this object together.
    """

    def __init__(self, channel: Channel, device: torch.device) -> None:
        self._device = devices.of(device)
        self._over = self._device.event()
        self._own: list[Any] = []
        failed = agree.first_as(CommunicatorError, "cannot open the CUDA events of other ranks through CUDA IPC: ")
        allgather, how = channel.mpi.allgather, ((RuntimeError,), agree.first_line, failed)
        handles = agree.gather_results(allgather, lambda: self._make(device), *how)
        del handles[channel.rank]
        open_event: Any = torch.cuda.Event.from_ipc_handle

        def open_all() -> list[list[Any]]:
            return [[open_event(device, handle) for handle in theirs] for theirs in handles]

        self._peers = list(zip(*agree.run_on_all_ranks(allgather, open_all, *how), strict=True)) or [(), ()]

    def _make(self, device: torch.device) -> list[bytes]:
        kind: Any = torch.cuda.Event
        self._own = [kind(interprocess=True) for _ in (READY, DONE)]
        with torch.cuda.device(device):
            for event in self._own:
                event.record(self._device.current())  # The first recording creates the event.
            return [event.ipc_handle() for event in self._own]

    def enter(self) -> None:
        """Make the current stream wait for the last exchange, which may have used another stream."""
        self._device.current().wait_event(self._over)

    def leave(self) -> None:
        """Record the end of an exchange in the current stream."""
        self._over.record(self._device.current())

    def record(self, which: int) -> None:
        """Record READY or DONE in the current stream."""
        self._own[which].record(self._device.current())

    def follow(self, which: int) -> None:
        """Make the current stream wait for the peers' READY or DONE events.

        Each peer must have recorded its event before the ranks last synchronized.
        """
        stream = self._device.current()
        for event in self._peers[which]:
            stream.wait_event(event)


class NoEvents:
    """A replacement for ``PeerEvents`` on the host.

    Its methods do nothing, because a rank's work on the host is complete when the ranks synchronize.
    """

    def enter(self) -> None:
        """Do nothing, because the last exchange is complete."""

    def leave(self) -> None:
        """Do nothing, because this exchange is complete."""

    def record(self, which: int) -> None:
        """Do nothing, because this rank's work is complete."""

    def follow(self, which: int) -> None:
        """Do nothing, because the peers' work is complete."""


def peer_events(channel: Channel, device: torch.device) -> PeerEvents | NoEvents:
    """Return the events for a device. All ranks of the channel must call it."""
    return PeerEvents(channel, device) if device.type == "cuda" else NoEvents()
