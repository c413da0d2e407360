"""The limits: copies of as many bytes, of private buffers, by all ranks at the same time.

``copy``, on CPU, and ``device copy``, on a GPU, are what a collective costs that only had to write its result. ``host
copy`` takes the bytes off the GPU into pinned host memory and back: the least for a way through the host. A large one
goes in *chunks* through a few *slots* of pinned memory, off and back at the same time, as such a way would do it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from torchmpi_py.bench.contestants import COPY, DEVICE_COPY, HOST_COPY, Call, Contestant, Take

_CHUNK_BYTES = 4 << 20
_NUM_SLOTS = 8


def limits(device: torch.device) -> list[Contestant]:
    """Those that mean something for collectives of tensors on ``device``."""
    if device.type == "cpu":
        return [copy(COPY)]
    return [copy(DEVICE_COPY), host_copy(device)]


def copy(name: str) -> Contestant:
    """From one buffer to another, where they are."""

    def bind(take: Take) -> Call:
        source, destination = take().whole, take().whole
        return functools.partial(destination.copy_, source)

    return Contestant(name, bind)


def host_copy(device: torch.device, chunk_bytes: int = _CHUNK_BYTES) -> Contestant:
    """From one buffer to another, through the host."""
    is_gpu = device.type == "cuda"
    slots = torch.empty(_NUM_SLOTS, chunk_bytes, dtype=torch.uint8, pin_memory=is_gpu)
    overlapping = _Overlapping(slots, device) if is_gpu else None

    def bind(take: Take) -> Call:
        source, destination = (take().whole.view(torch.uint8) for _ in range(2))
        if overlapping is None or source.numel() <= chunk_bytes:
            return functools.partial(_in_order, slots, source, destination)
        return functools.partial(overlapping.copy, source, destination)

    return Contestant(HOST_COPY, bind)


def _in_order(slots: Tensor, source: Tensor, destination: Tensor) -> None:
    """Chunk by chunk."""
    for index, (x, y) in enumerate(_chunks(slots, source, destination)):
        host = slots[index % len(slots)][: x.numel()]
        host.copy_(x, non_blocking=True)
        y.copy_(host, non_blocking=True)


class _Overlapping:
    """Two streams: one takes chunks off the GPU, the other takes them back; an event a slot for each says how far."""

    def __init__(self, slots: Tensor, device: torch.device) -> None:
        self.slots = slots
        self.device = device
        self.off, self.back = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]
        self.filled, self.emptied = ([_event() for _ in slots] for _ in range(2))

    def copy(self, source: Tensor, destination: Tensor) -> None:
        """Queue everything; the current stream waits for the last chunk."""
        current = torch.cuda.current_stream(self.device)
        self.off.wait_stream(current)
        self.back.wait_stream(current)
        for index, (x, y) in enumerate(_chunks(self.slots, source, destination)):
            slot = index % len(self.slots)
            host = self.slots[slot][: x.numel()]
            with torch.cuda.stream(self.off):
                self.off.wait_event(self.emptied[slot])  # never recorded: nothing to wait for
                host.copy_(x, non_blocking=True)
                self.filled[slot].record(self.off)
            with torch.cuda.stream(self.back):
                self.back.wait_event(self.filled[slot])
                y.copy_(host, non_blocking=True)
                self.emptied[slot].record(self.back)
        current.wait_stream(self.back)


def _chunks(slots: Tensor, *tensors: Tensor) -> Any:
    """Corresponding parts of the tensors, no larger than a slot."""
    return zip(*(torch.split(x, slots.shape[1]) for x in tensors), strict=True)


def _event() -> Any:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]
