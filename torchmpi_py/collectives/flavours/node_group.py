"""The ranks of a channel that all run on one node, and the shared memory through which they work together.

The channel has a segment of shared memory that no other channel uses, so that two communicators, or two threads, never
write where the other reads. Each rank's part of the segment holds its *headers* and four *slots*.

Every operation begins with an exchange of headers:

1. Each rank writes into its header which operation it starts, with which sizes, and where its tensors lie.
2. All ranks make a barrier.
3. Each rank reads the headers of the others. It then knows whether all can work in place on each other's tensors, or
   else where to read them. Ranks that disagree find out before any data is touched.

A rank has two headers, which alternate between operations. A rank overwrites the header of the operation before last.
All ranks have read that header, because all have announced the last operation since. An operation ends with a barrier,
until which no rank may change its slots or its tensors. Only an allreduce whose values travel with the headers needs no
such barrier, because its slots alternate with the headers (``staging.allreduce_at_once``).

Two of a rank's slots are *in* slots, for the rank's values, and two are *out* slots, for the values that the rank has
reduced. Both kinds alternate between chunks. If no rank reduces for others, a chunk may use *two slots*, in or out.
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

from torchmpi_py.collectives.flavours.flag_barrier import FlagBarrier
from torchmpi_py.collectives.flavours.trials import Trials
from torchmpi_py.collectives.reductions import Kernel
from torchmpi_py.core import backoff, config
from torchmpi_py.core.channels import Channel
from torchmpi_py.errors import RanksDisagree, Unavailable
from torchmpi_py.memory import symmetric
from torchmpi_py.memory.peer_memory import is_readable, peer_memory

# The code, the count, and the segment and offset (or address) of the tensor that is read, and of the one written.
_HEADER = struct.Struct("<6q")
_LINE_BYTES = 64  # A cache line holds the header of a turn. The first line also holds the flag of the barrier.
_HEADER_ROOM_BYTES = 4096  # A page, so that slots are aligned.
_NUM_SLOTS = 4
_LEAST_SLOT_BYTES = 64 << 10
# These values replace a segment for memory that peers may read where it lies, that the rank may move, and any other.
_ORDINARY, _ADOPTABLE, _UNREAD = 0, -1, -2


class Headers(NamedTuple):
    """The headers of all ranks.

    ``read`` and ``written`` are the offsets of the ranks' tensors in their common segment, or None without a common
    segment. ``read_at`` and ``written_at`` are the addresses of the tensors, if these are ordinary on all ranks,
    readable for all, and larger than a chunk; otherwise None.
    """

    read: list[int] | None
    written: list[int] | None
    read_at: list[int] | None
    written_at: list[int] | None
    are_adoptable: bool  # whether all ranks may move their tensors (``symmetric.adopt``)


class Exchange(NamedTuple):
    """The tensors of a collective in which each rank sends row s of its ``rows``, of shape (size, n), to rank s.

    With ``how``, all rows for a rank are reduced into its single ``outs[0]``. Without it, the row of rank s is copied
    into ``outs[s]``. With ``root`` only this rank has ``rows``, and ``outs`` is a list of one tensor.
    """

    rows: Tensor | None
    outs: list[Tensor]
    how: Kernel | None = None
    root: int | None = None


class NodeGroup:
    """The shared memory of a channel within a node; kept with the channel."""

    def __init__(self, channel: Channel) -> None:
        assert channel.num_nodes == 1, channel.places
        self.channel = channel
        self.rank, self.size = channel.rank, channel.size
        self._indices = [place.local for place in channel.places]
        self._slot_bytes = _slot_bytes()
        self._mapping, self._segment = _allocate(channel, part_bytes())
        self._memory = memoryview(self._mapping).cast("B")
        parts = [self._segment.part_of[index] * self._segment.part_bytes for index in self._indices]
        self._headers = [[_of_turn(begin, turn) for begin in parts] for turn in (0, 1)]
        self._flags = FlagBarrier(channel.mpi, self._memory, [begin + _HEADER.size for begin in parts])
        self.barrier = backoff.fenced(self._flags.wait)
        self.turn = 0  # the header, and the slots beside it, of the next announcement
        self._slots: dict[tuple[int, int, torch.dtype], Tensor] = {}
        self.peers = peer_memory(channel)  # None if ranks cannot read each other's ordinary memory
        self.trials = Trials(channel.mpi.allgather)
        self.prepared: dict[Hashable, Any] = {}  # the operations that prepared_allreduce.py keeps
        self.can_adopt = True  # false after the ranks have failed to adopt a tensor
        self.chunk_bytes = min(config.current.chunk_bytes, self._slot_bytes)

    def header(self, what: str, x: Tensor, out: Tensor | None = None, count: int | None = None) -> bytes:
        """Return the header of this rank's operation; ``count``: number of elements, if ``x`` does not have all."""
        count = x.numel() if count is None else count
        can_be_read = self.peers is not None and count * x.itemsize > self.chunk_bytes
        read = _where(x, can_be_read)
        written = read if out is None or out is x else _where(out, can_be_read)
        return _HEADER.pack(_code(what, x.dtype), count, *read, *written)

    def adoptable_header(self, what: str, x: Tensor) -> bytes:
        """Return the header of an operation in place on ordinary memory that this rank may move."""
        return _HEADER.pack(_code(what, x.dtype), x.numel(), _ADOPTABLE, 0, _ADOPTABLE, 0)

    def announce(self, header: bytes) -> bool:
        """Publish this rank's header, and return whether all headers are equal. Collective: one barrier."""
        memory, places = self._memory, self._headers[self.turn]
        memory[places[self.rank]] = header
        self.barrier()
        self.turn = 1 - self.turn
        for place in places:  # noqa: SIM110 - small messages have no time for a generator
            if memory[place] != header:
                return False
        return True

    def exchange_headers(self, what: str, x: Tensor, out: Tensor | None = None, count: int | None = None) -> Headers:
        """Announce this rank's header, and read the headers of the others. Collective.

        Raise RanksDisagree on all ranks if the ranks start different operations.
        """
        self.announce(self.header(what, x, out, count))
        return self.read_headers(what, x, count)

    def read_headers(self, what: str, x: Tensor, count: int | None = None) -> Headers:
        """Return the headers that the ranks have announced.

        Raise RanksDisagree on all ranks if codes or counts differ.
        """
        texts = [self._memory[place] for place in self._headers[1 - self.turn]]
        # The columns of the table of headers. Codes and counts must be equal on all ranks; places may differ.
        kinds, counts, *places = zip(*(_HEADER.unpack(text) for text in texts), strict=True)
        if len(set(kinds)) > 1 or len(set(counts)) > 1:
            # All ranks get here, because all read the same headers.
            calls = self.channel.mpi.allgather(
                f"{what} of {x.numel() if count is None else count} elements of {x.dtype}"
            )
            raise RanksDisagree("; ".join(f"rank {rank} calls {call}" for rank, call in enumerate(calls)))
        reads, writes = places[:2], places[2:]
        are_adoptable = set(reads[0]) == {_ADOPTABLE}
        return Headers(_common(*reads), _common(*writes), _addresses(*reads), _addresses(*writes), are_adoptable)

    def is_within(self, segment: symmetric.AnySegment) -> bool:
        """Return whether all ranks of the channel have a part of the segment."""
        return all(local in segment.part_of for local in self._indices)

    def staged(self, what: str, x: Tensor, turn: int) -> tuple[bytes, list[Tensor]]:
        """Return the header of an operation on ordinary tensors in two slots each, and the slots of a turn."""
        header = _HEADER.pack(_code(what, x.dtype), x.numel(), _UNREAD, 0, _UNREAD, 0)
        return header, [self.two_slots(rank, turn, x.dtype, x.numel()) for rank in range(self.size)]

    def views(self, x: Tensor, offsets: Sequence[int], counts: Sequence[int] | None = None) -> list[Tensor]:
        """Return a view of each rank's symmetric tensor, with the dtype of ``x``.

        A view has the rank's number of elements in ``counts``; without ``counts``, as many elements as ``x``. The views
        do not keep the memory alive.
        """
        counts = [x.numel()] * self.size if counts is None else counts
        location = symmetric.find(x)
        assert location is not None, "all ranks announced symmetric tensors"
        return [
            location[0].view(local, x.dtype, count, offset)
            for local, offset, count in zip(self._indices, offsets, counts, strict=True)
        ]

    def given(self, rank: int, chunk: int, dtype: torch.dtype, count: int) -> Tensor:
        """Return the in slot of a rank for a chunk."""
        return self._slot(rank, chunk % 2, dtype, count)

    def reduced(self, rank: int, chunk: int, dtype: torch.dtype, count: int) -> Tensor:
        """Return the out slot of a rank for a chunk."""
        return self._slot(rank, 2 + chunk % 2, dtype, count)

    def two_slots(self, rank: int, chunk: int, dtype: torch.dtype, count: int) -> Tensor:
        """Return the memory of a rank for a chunk that uses two slots."""
        return self._slot(rank, 2 * (chunk % 2), dtype, count)

    def _slot(self, rank: int, slot: int, dtype: torch.dtype, count: int) -> Tensor:
        """Return ``count`` elements from the start of a slot."""
        num_bytes = (2 - slot % 2) * self._slot_bytes  # the first slot of a kind may extend into the second one
        assert count * dtype.itemsize <= num_bytes, (count, dtype, num_bytes)
        whole = self._slots.get((rank, slot, dtype))
        if whole is None:
            offset = _HEADER_ROOM_BYTES + slot * self._slot_bytes
            with torch.inference_mode(False):  # later calls outside of this mode use the view too
                whole = self._segment.view(self._indices[rank], dtype, num_bytes // dtype.itemsize, offset)
            self._slots[rank, slot, dtype] = whole
        return whole[:count]

    def free(self) -> None:
        """Release the channel's segment."""
        self.prepared.clear()
        self._slots.clear()
        self._flags.release()
        self._memory.release()
        del self._mapping


def part_bytes() -> int:
    """Return the size of a rank's part of a channel's segment."""
    return _HEADER_ROOM_BYTES + _NUM_SLOTS * _slot_bytes()


def _slot_bytes() -> int:
    """Return the size of a slot: a chunk, or less if ``Tuning.staging_bytes`` requires it."""
    most = (config.current.staging_bytes - _HEADER_ROOM_BYTES) // _NUM_SLOTS
    return min(max(config.current.chunk_bytes, _LEAST_SLOT_BYTES), most) // 64 * 64


def _allocate(channel: Channel, num_bytes: int) -> tuple[mmap.mmap, symmetric.Segment]:
    """Allocate the segment. Collective over the channel. Raise Unavailable on every rank if memory is missing."""
    try:
        return symmetric.allocate(channel.mpi, channel.places, num_bytes)
    except Unavailable as error:
        raise Unavailable(
            f"cannot allocate shared memory for a communicator of {channel.size} ranks: {error}. "
            f'Use fewer communicators, a smaller TORCHMPI_CHUNK_BYTES, or a different flavour, such as "mpi"'
        ) from None


def _of_turn(offset: int, turn: int) -> slice:
    """Return the position of a rank's header of a turn; the rank's part begins at ``offset``."""
    begin = offset + turn * _LINE_BYTES
    return slice(begin, begin + _HEADER.size)


def _where(x: Tensor, can_be_read: bool) -> tuple[int, int]:
    """Return the place of a tensor for the header: (segment, offset), or a kind of memory and the address."""
    location = symmetric.find(x)
    if location is not None:
        return location[0].key, location[1]
    return (_ORDINARY, x.data_ptr()) if can_be_read and is_readable(x) else (_UNREAD, 0)


def _common(segments: Sequence[int], offsets: Sequence[int]) -> list[int] | None:
    """Return the offsets if all tensors lie in one segment, else None."""
    return list(offsets) if segments[0] > 0 and len(set(segments)) == 1 else None


def _addresses(segments: Sequence[int], addresses: Sequence[int]) -> list[int] | None:
    """Return the addresses if all tensors are ordinary and readable, else None."""
    return list(addresses) if set(segments) == {_ORDINARY} else None


@functools.cache
def _code(what: str, dtype: torch.dtype) -> int:
    """Return a number that represents an operation and a dtype in headers."""
    return zlib.crc32(f"{what} {dtype}".encode())
