"""Pinned host memory through which GPU tensors pass, chunk by chunk, and the streams that carry the chunks.

Three *slots*, each with a part for what is given and one for what is received, take turns. While the host works on
chunk k, chunk k+1 comes down from the GPU and chunk k-1 goes up to it, on a stream each. A slot is filled again only
when what was received in it has gone up. The slots lie in symmetric memory, which CUDA pins as any other: where a
flavour of the host reduces such memory in place, a chunk is copied twice in all, down and up.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torchmpi_py import config, devices, symmetric
from torchmpi_py.channels import Channel
from torchmpi_py.errors import Unavailable

NUM_SLOTS = 3


class HostSlots:
    """The slots for the tensors of a channel's ranks on ``device``; kept with the channel."""

    def __init__(self, channel: Channel, device: torch.device) -> None:
        self.chunk_bytes = config.current.gpu_chunk_bytes
        self._device = devices.of(device)
        self._part_bytes = -(-self.chunk_bytes // 64) * 64
        num_bytes = 2 * NUM_SLOTS * self._part_bytes
        host = torch.device("cpu")
        try:
            self._memory = symmetric.memory(channel, num_bytes, host)
        except Unavailable:  # on every rank
            self._memory = torch.empty(num_bytes, dtype=torch.uint8, device=host)
        self._device.pin(self._memory)
        self._down, self._up = self._device.stream(), self._device.stream()
        self._came = [self._device.event() for _ in range(NUM_SLOTS)]
        self._left = [self._device.event() for _ in range(NUM_SLOTS)]

    def given(self, chunk: int, dtype: torch.dtype, count: int) -> Tensor:
        """Where a chunk that comes down is put: ``count`` elements, flat."""
        return self._part(2 * (chunk % NUM_SLOTS), dtype, count)

    def received(self, chunk: int, dtype: torch.dtype, count: int) -> Tensor:
        """Where what goes up is put, unless it is where the chunk was given."""
        return self._part(2 * (chunk % NUM_SLOTS) + 1, dtype, count)

    def pipeline(
        self,
        num_chunks: int,
        fetch: Callable[[int], object],
        work: Callable[[int], object],
        put: Callable[[int], object],
    ) -> None:
        """``fetch`` chunks (down), ``work`` on them on the host, ``put`` results (up), in order of the current stream.

        Work that is queued after this call sees the results; the host does not wait for the last ones to go up.
        """
        current, begin = self._device.current(), self._device.event()
        begin.record(current)
        self._down.wait_event(begin)  # and what comes up has come down before
        for chunk in range(num_chunks + 1):
            if chunk < num_chunks:
                self._fetch(chunk, fetch)
            if chunk > 0:
                self._came[(chunk - 1) % NUM_SLOTS].synchronize()
                work(chunk - 1)
                self._put(chunk - 1, put)
        for event in self._left:
            current.wait_event(event)

    def _fetch(self, chunk: int, fetch: Callable[[int], object]) -> None:
        slot = chunk % NUM_SLOTS
        with self._device.on(self._down):
            self._down.wait_event(self._left[slot])
            fetch(chunk)
            self._came[slot].record(self._down)

    def _put(self, chunk: int, put: Callable[[int], object]) -> None:
        with self._device.on(self._up):
            put(chunk)
            self._left[chunk % NUM_SLOTS].record(self._up)

    def _part(self, part: int, dtype: torch.dtype, count: int) -> Tensor:
        begin = part * self._part_bytes
        return self._memory[begin : begin + count * dtype.itemsize].view(dtype)

    def free(self) -> None:
        """Wait for what is under way, and let go of the memory."""
        self._device.synchronize()
        self._device.unpin(self._memory)
        del self._memory
