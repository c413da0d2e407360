"""GPU memory and events that other processes of the node can use, by CUDA's inter-process communication (IPC).

Memory is passed on with what torch.multiprocessing has for it, which counts the processes that have it mapped, and
keeps it until all have let go. It is taken from torch's allocator in parts of their own, that a *segment* knows: the
memory of a rank, and that of its peers as mapped here. Events order the streams of peers: one that is recorded here can
be waited for there, once the recording has been told (a meeting of the ranks).
"""

from __future__ import annotations

import contextlib
import secrets
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from torchmpi_py.core import agree
from torchmpi_py.core.channels import Channel, Place
from torchmpi_py.core.mpi_api import MPI
from torchmpi_py.errors import CommunicatorError, Unavailable
from torchmpi_py.memory import devices, gpus

ALIGNMENT = 512  # bytes; as torch's allocator
READY, DONE = 0, 1


class GpuSegment:
    """A segment on GPUs, as one rank sees it, without owning this rank's part. As ``symmetric.Segment``."""

    device_type = "cuda"

    def __init__(self, key: int, part_bytes: int, own: int, begin: int, parts: dict[int, Tensor]) -> None:
        self.key = key
        self.part_bytes = part_bytes
        self.begin = begin
        self.parts = parts  # by the index on the node; the others', which stay mapped, and an alias of this rank's
        self.part_of = {index: index for index in (own, *parts)}

    def view(self, index: int, dtype: torch.dtype, count: int, offset_bytes: int = 0) -> Tensor:
        """``count`` elements of the part of the rank with this index on the node. The segment must outlive it."""
        return self.parts[index][offset_bytes : offset_bytes + count * dtype.itemsize].view(dtype)


class _Memory:
    """GPU memory under the protocol by which torch takes over that of others: a tensor made of it keeps it alive."""

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
    """A segment with a part of at least ``num_bytes`` per rank of this IPC group in ``comm``. Collective over ``comm``.

    This rank's part is the tensor, of bytes; ``on_end`` is called when its memory is about to go. Unavailable, on
    every rank, if the memory cannot be had.
    """
    me = places[comm.rank]
    mine = [rank for rank, place in enumerate(places) if gpus.group(place) == gpus.group(me)]
    peers = [rank for rank in mine if rank != comm.rank]
    part_bytes = -(-max(1, num_bytes) // ALIGNMENT) * ALIGNMENT
    base, handles, failure = _offer(part_bytes, peers, device)
    told = comm.allgather((secrets.randbits(62), handles, failure))
    parts: dict[int, Tensor] = {}

    def map_peers() -> Tensor:
        if failure := next((text for _, _, text in told if text), ""):
            raise RuntimeError(failure)
        parts.update(_open_all({rank: told[rank][1][comm.rank] for rank in peers}, places, device))
        assert base is not None, "no rank has failed"
        return base

    def failed(failures: Mapping[int, str]) -> Unavailable:
        return Unavailable(f"no symmetric GPU memory of {num_bytes} bytes a rank: {agree.first_text(failures)}")

    try:
        base = agree.run_on_all_ranks(comm.allgather, map_peers, (RuntimeError,), agree.first_line, failed)
    except Unavailable:
        _decline([told[rank][1].get(comm.rank) for rank in peers if places[rank].local not in parts])
        raise
    memory = _Memory(base.data_ptr(), part_bytes, base)
    parts[me.local] = torch.as_tensor(_Memory(base.data_ptr(), part_bytes, None), device=device)
    segment = GpuSegment(told[mine[0]][0], part_bytes, me.local, base.data_ptr(), parts)
    weakref.finalize(memory, _end, segment, device, on_end).atexit = False
    return torch.as_tensor(memory, device=device), segment


def _end(segment: GpuSegment, device: torch.device, on_end: Callable[[GpuSegment], object]) -> None:
    """Work on this rank's part, and on the views of the others', may still be queued on any stream."""
    devices.of(device).synchronize()
    on_end(segment)


def _offer(part_bytes: int, peers: Sequence[int], device: torch.device) -> tuple[Tensor | None, dict[int, object], str]:
    """(memory, a handle of it for each peer, why not). Each handle counts as one process that maps it."""
    share: Any = reductions.reduce_tensor
    try:
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]  # what peers have let go of can be used again
        with _plain_memory():
            base = torch.empty(part_bytes, dtype=torch.uint8, device=device)
        return base, {rank: share(base) for rank in peers}, ""
    except RuntimeError as error:  # out of memory; or memory that cannot be shared
        return None, {}, agree.first_line(error)


@contextlib.contextmanager
def _plain_memory() -> Iterator[None]:
    """Let torch's allocator take memory that can be passed on, also where the user has it use expandable segments.

    Those cannot be, in general. While they are off the allocator leaves out what it has of them, so the memory is new.
    """
    settings = torch.cuda.memory._snapshot().get("allocator_settings", {})
    if not settings.get("expandable_segments"):
        yield
        return
    given = settings.get("last_allocator_settings") or "expandable_segments:True"
    _set_allocator(f"{given},expandable_segments:False")  # the last one counts; what is not named gets its default
    try:
        yield
    finally:
        _set_allocator(given)


def _set_allocator(settings: str) -> None:
    """Under its new name where torch has that."""
    change: Any = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    (change or torch.cuda.memory._set_allocator_settings)(settings)


def _open_all(handles: dict[int, Any], places: Sequence[Place], device: torch.device) -> dict[int, Tensor]:
    """The peers' memory by their index on the node."""
    try:
        return {places[rank].local: _open(handle, device) for rank, handle in handles.items()}
    except RuntimeError as error:
        raise RuntimeError(f"cannot map a peer's GPU memory: {agree.first_line(error)}") from None


_DEVICE = 6  # which argument of torch's rebuild_cuda_tensor is the index of the device, as the sender calls it
_COUNTER = slice(11, 13)  # and which ones tell where it counts who has the memory


def _open(handle: Any, device: torch.device) -> Tensor:
    """Mapped for this rank's GPU, also when the memory is another one's: kernels want all tensors on one device."""
    rebuild, arguments = handle
    made: Tensor = rebuild(*arguments[:_DEVICE], device.index, *arguments[_DEVICE + 1 :])
    return made


def _decline(handles: Sequence[Any]) -> None:
    """Let peers have memory back that this rank was offered and has not mapped: they wait for it to let go."""
    release: Any = torch.UntypedStorage._release_ipc_counter_cuda
    for handle in handles:
        if handle is not None:
            release(*handle[1][_COUNTER])


class PeerEvents:
    """Two events a rank, READY and DONE, and those of the peers. Made collectively over a channel, kept with it."""

    def __init__(self, channel: Channel, device: torch.device) -> None:
        self._device = devices.of(device)
        self._over = self._device.event()
        self._own: list[Any] = []
        allgather, how = channel.mpi.allgather, ((RuntimeError,), agree.first_line, _no_events)
        handles = agree.gather_results(allgather, lambda: self._make(device), *how)
        del handles[channel.rank]
        opened = agree.run_on_all_ranks(allgather, lambda: [_opened(device, theirs) for theirs in handles], *how)
        self._peers = list(zip(*opened, strict=True)) or [(), ()]

    def _make(self, device: torch.device) -> list[bytes]:
        kind: Any = torch.cuda.Event
        self._own = [kind(interprocess=True) for _ in (READY, DONE)]
        with torch.cuda.device(device):
            for event in self._own:
                event.record(self._device.current())  # which makes it
            return [event.ipc_handle() for event in self._own]

    def enter(self) -> None:
        """Let the current stream wait for the exchange before, which may have been on another one."""
        self._device.current().wait_event(self._over)

    def leave(self) -> None:
        """This is where an exchange ends."""
        self._over.record(self._device.current())

    def record(self, which: int) -> None:
        """Mark this point in the current stream."""
        self._own[which].record(self._device.current())

    def follow(self, which: int) -> None:
        """Let the current stream wait for the points that the peers marked, before the ranks last met."""
        stream = self._device.current()
        for event in self._peers[which]:
            stream.wait_event(event)


def _opened(device: torch.device, handles: Sequence[bytes]) -> list[Any]:
    kind: Any = torch.cuda.Event
    return [kind.from_ipc_handle(device, handle) for handle in handles]


def _no_events(failures: Mapping[int, str]) -> CommunicatorError:
    return CommunicatorError(f"cannot open the events of other ranks by CUDA IPC: {agree.first_text(failures)}")


class NoEvents:
    """The same on the host, where all is done when the ranks meet."""

    def enter(self) -> None:
        """It is over."""

    def leave(self) -> None:
        """It is over."""

    def record(self, which: int) -> None:
        """It is past."""

    def follow(self, which: int) -> None:
        """They are."""


def peer_events(channel: Channel, device: torch.device) -> PeerEvents | NoEvents:
    """The events for a device. Collective over the channel."""
    return PeerEvents(channel, device) if device.type == "cuda" else NoEvents()
