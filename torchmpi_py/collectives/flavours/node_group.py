"""The ranks of a channel that all run on one node, and the shared memory through which they work together.

The channel has a segment of shared memory that no other channel uses: two communicators, or two threads, at work at
the same time never write where the other reads. Each rank's part of the segment holds its *record* and four *slots*.

Every operation begins with a *meeting* (but gathers, whose ranks have exchanged their sizes before): each rank writes
into its record what it is about to do, with which sizes, and where its tensors lie if they are symmetric; after a
barrier it reads the records of the others. So all ranks know whether they can work in place on each other's tensors,
and ranks that disagree find out before any data is touched. Every operation ends with a barrier; until then no rank may
change its record, its slots or its tensors.

Staging: two of a rank's slots are *in* slots (what the rank gives), two are *out* slots (what it has reduced); both
kinds alternate between chunks.
"""

from __future__ import annotations

import functools
import mmap
import struct
import zlib
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchmpi_py.core import backoff, config
from torchmpi_py.core.channels import Channel
from torchmpi_py.errors import RanksDisagree, Unavailable
from torchmpi_py.memory import symmetric

_RECORD = struct.Struct("<6q")  # code, count; then segment and offset of what is read, and of what is written
_HEADER_BYTES = 4096
_NUM_SLOTS = 4
_LEAST_SLOT_BYTES = 64 << 10
_NOWHERE = (0, 0)
MOST_PREPARED = 1024


class Headers(NamedTuple):
    """What the ranks told each other: the offsets of what each reads and writes in a segment that all have in common.

    None for tensors that are not all in one: those have to be staged.
    """

    read: list[int] | None
    written: list[int] | None


class Prepared(NamedTuple):
    """What an operation on symmetric tensors needs when it comes again: good while its segment lives."""

    segment: symmetric.AnySegment
    record: bytes
    work: Any


class NodeGroup:
    """A channel within a node; kept with the channel."""

    def __init__(self, channel: Channel) -> None:
        assert channel.num_nodes == 1, channel.places
        self.rank, self.size = channel.rank, channel.size
        self.barrier = backoff.fenced(channel.mpi.Barrier)
        self._mpi = channel.mpi
        self._indices = [place.local for place in channel.places]
        self._slot_bytes = _slot_bytes()
        self._mapping, self._segment = _allocate(channel, part_bytes())
        self._memory = memoryview(self._mapping).cast("B")
        self._records = [self._segment.part_of[index] * self._segment.part_bytes for index in self._indices]
        self._slots: dict[tuple[int, int, torch.dtype], Tensor] = {}
        self.prepared: dict[Hashable, Prepared] = {}
        self.chunk_bytes = min(config.current.chunk_bytes, self._slot_bytes)

    def record(self, what: str, x: Tensor, out: Tensor | None = None, count: int | None = None) -> bytes:
        """What this rank is about to do, to be announced. ``count``: of elements, where ``x`` has not all of them."""
        read = _where(x)
        written = read if out is None or out is x else _where(out)
        return _RECORD.pack(_code(what, x.dtype), x.numel() if count is None else count, *read, *written)

    def announce(self, record: bytes) -> bool:
        """Tell the others, meet them, and return whether all said the same."""
        begin = self._records[self.rank]
        memory, length = self._memory, _RECORD.size
        memory[begin : begin + length] = record
        self.barrier()
        return all(memory[at : at + length] == record for at in self._records)

    def meet(self, what: str, x: Tensor, out: Tensor | None = None, count: int | None = None) -> Headers:
        """Announce, and read what the others said. RanksDisagree, on all ranks, if they are to do different things."""
        self.announce(self.record(what, x, out, count))
        return self.read(what, x, count)

    def read(self, what: str, x: Tensor, count: int | None = None) -> Headers:
        """What the ranks have announced."""
        texts = [self._memory[at : at + _RECORD.size] for at in self._records]
        kinds, counts, *places = zip(*(_RECORD.unpack(text) for text in texts), strict=True)
        if len(set(kinds)) > 1 or len(set(counts)) > 1:
            self._disagree(f"{what} of {x.numel() if count is None else count} elements of {x.dtype}")
        return Headers(_common(*places[:2]), _common(*places[2:]))

    def _disagree(self, text: str) -> None:
        told = self._mpi.allgather(text)
        raise RanksDisagree("; ".join(f"rank {rank} calls {text}" for rank, text in enumerate(told)))

    def is_within(self, segment: symmetric.AnySegment) -> bool:
        """Whether all these ranks have a part of the segment."""
        return all(local in segment.part_of for local in self._indices)

    def keep_prepared(self, key: Hashable, prepared: Prepared) -> None:
        """Remember it for the next time; all is forgotten when it has become much."""
        if key not in self.prepared and len(self.prepared) >= MOST_PREPARED:
            self.prepared.clear()
        self.prepared[key] = prepared

    def views(self, x: Tensor, offsets: Sequence[int]) -> list[Tensor]:
        """The symmetric tensors of all ranks, of the dtype and size of this rank's ``x``; they keep no memory alive."""
        found = symmetric.find(x)
        assert found is not None, "all ranks met with symmetric tensors"
        return [
            found[0].view(local, x.dtype, x.numel(), offset)
            for local, offset in zip(self._indices, offsets, strict=True)
        ]

    def given(self, rank: int, chunk: int, dtype: torch.dtype, count: int) -> Tensor:
        """The in slot of a rank for a chunk."""
        return self._slot(rank, chunk % 2, dtype, count)

    def reduced(self, rank: int, chunk: int, dtype: torch.dtype, count: int) -> Tensor:
        """The out slot of a rank for a chunk."""
        return self._slot(rank, 2 + chunk % 2, dtype, count)

    def _slot(self, rank: int, slot: int, dtype: torch.dtype, count: int) -> Tensor:
        assert count * dtype.itemsize <= self._slot_bytes, (count, dtype, self._slot_bytes)
        whole = self._slots.get((rank, slot, dtype))
        if whole is None:
            offset = _HEADER_BYTES + slot * self._slot_bytes
            whole = self._segment.view(self._indices[rank], dtype, self._slot_bytes // dtype.itemsize, offset)
            self._slots[rank, slot, dtype] = whole
        return whole[:count]

    def free(self) -> None:
        """Let go of the channel's segment."""
        self.prepared.clear()
        self._slots.clear()
        self._memory.release()
        del self._mapping


def part_bytes() -> int:
    """What a channel takes of each rank."""
    return _HEADER_BYTES + _NUM_SLOTS * _slot_bytes()


def _slot_bytes() -> int:
    """Room for a chunk, as far as ``Tuning.staging_bytes`` allows."""
    most = (config.current.staging_bytes - _HEADER_BYTES) // _NUM_SLOTS
    return min(max(config.current.chunk_bytes, _LEAST_SLOT_BYTES), most) // 64 * 64


def _allocate(channel: Channel, num_bytes: int) -> tuple[mmap.mmap, symmetric.Segment]:
    """Collective over the channel. Unavailable, on every rank, if the memory cannot be had."""
    try:
        return symmetric.allocate(channel.mpi, channel.places, num_bytes)
    except Unavailable as error:
        raise Unavailable(
            f"flavours that work in memory of the node need some for each communicator, here of {channel.size} ranks: "
            f'{error}. Use fewer communicators, set TORCHMPI_CHUNK_BYTES to less, or use another flavour, such as "mpi"'
        ) from None


def _where(x: Tensor) -> tuple[int, int]:
    found = symmetric.find(x)
    return _NOWHERE if found is None else (found[0].key, found[1])


def _common(segments: Sequence[int], offsets: Sequence[int]) -> list[int] | None:
    return list(offsets) if segments[0] and len(set(segments)) == 1 else None


@functools.cache
def _code(what: str, dtype: torch.dtype) -> int:
    return zlib.crc32(f"{what} {dtype}".encode())
