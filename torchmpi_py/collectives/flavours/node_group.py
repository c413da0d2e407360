"""The ranks of a channel that all run on one node, and the shared memory through which they work together.

The channel has a segment of shared memory that no other channel uses: two communicators, or two threads, at work at
the same time never write where the other reads. Each rank's part of the segment holds its *header* and four *slots*.

Every operation begins with an exchange of headers:

1. each rank writes into its header what it is about to do, with which sizes, and where its tensors lie
2. barrier
3. each rank reads the headers of the others, and knows whether all can work in place on each other's tensors, or else
   where to read them; ranks that disagree find out before any data is touched

A rank has two headers, which alternate between operations. A rank overwrites the header of the operation before last:
all ranks have read that one, because all have announced the last operation since. An operation ends with a barrier,
until which no rank may change its slots or its tensors. Only an allreduce whose values come with the headers needs
none: its slots alternate with the headers (``staging.allreduce_at_once``).

Staging: two of a rank's slots are *in* slots (the rank's values), two are *out* slots (what the rank has reduced); both
kinds alternate between chunks. Where nothing is reduced for others, a chunk may take *two slots*, in or out.
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

_HEADER = struct.Struct("<6q")  # code, count; segment and offset (or address) of what is read, of what is written
_LINE_BYTES = 64  # a cache line: the header of a turn and, in the first line, the flag of the barrier
_HEADER_ROOM_BYTES = 4096  # a page, so that slots are aligned
_NUM_SLOTS = 4
_LEAST_SLOT_BYTES = 64 << 10
_ORDINARY, _ADOPTABLE, _UNREAD = 0, -1, -2  # in place of a segment: read where it lies; may be moved; neither


class Headers(NamedTuple):
    """The headers of all ranks: the offsets of what each reads and writes in a segment that all have in common.

    None for tensors that do not all lie in one segment. ``read_at`` and ``written_at``: the addresses of tensors that
    are ordinary on all ranks, that all can read, and that are larger than a chunk; else None.
    """

    read: list[int] | None
    written: list[int] | None
    read_at: list[int] | None
    written_at: list[int] | None
    are_adoptable: bool  # whether all ranks may move their tensors (``symmetric.adopt``)


class Exchange(NamedTuple):
    """What a rank gives and gets where each rank gives row s of its ``rows``, of shape (size, n), to rank s.

    With ``how`` all rows for a rank are reduced into its single ``outs[0]``; without, ``outs[s]`` becomes what rank s
    gave. With ``root`` only that rank gives, and ``outs`` has its one row; the others have no ``rows``.
    """

    rows: Tensor | None
    outs: list[Tensor]
    how: Kernel | None = None
    root: int | None = None


class NodeGroup:
    """A channel within a node; kept with the channel."""

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
        self.prepared: dict[Hashable, Any] = {}  # what prepared_allreduce.py keeps
        self.can_adopt = True  # until the ranks have failed to
        self.chunk_bytes = min(config.current.chunk_bytes, self._slot_bytes)

    def header(self, what: str, x: Tensor, out: Tensor | None = None, count: int | None = None) -> bytes:
        """The header of this rank's operation. ``count``: the number of elements, where ``x`` has not all of them."""
        count = x.numel() if count is None else count
        can_be_read = self.peers is not None and count * x.itemsize > self.chunk_bytes
        read = _where(x, can_be_read)
        written = read if out is None or out is x else _where(out, can_be_read)
        return _HEADER.pack(_code(what, x.dtype), count, *read, *written)

    def adoptable_header(self, what: str, x: Tensor) -> bytes:
        """The header of an operation in place on ordinary memory that this rank may move."""
        return _HEADER.pack(_code(what, x.dtype), x.numel(), _ADOPTABLE, 0, _ADOPTABLE, 0)

    def announce(self, header: bytes) -> bool:
        """Show the others this rank's header, and return whether all headers are equal. Collective: one barrier."""
        memory, places = self._memory, self._headers[self.turn]
        memory[places[self.rank]] = header
        self.barrier()
        self.turn = 1 - self.turn
        for place in places:  # noqa: SIM110 - small messages have no time for a generator
            if memory[place] != header:
                return False
        return True

    def exchange_headers(self, what: str, x: Tensor, out: Tensor | None = None, count: int | None = None) -> Headers:
        """Announce this rank's header and read the others'. Collective.

        RanksDisagree, on all ranks, if they are about to do different things.
        """
        self.announce(self.header(what, x, out, count))
        return self.read_headers(what, x, count)

    def read_headers(self, what: str, x: Tensor, count: int | None = None) -> Headers:
        """The headers that the ranks have announced. RanksDisagree, on all ranks, if codes or counts differ."""
        texts = [self._memory[place] for place in self._headers[1 - self.turn]]
        # Columns of the table of headers: codes and counts must be equal, places need not.
        kinds, counts, *places = zip(*(_HEADER.unpack(text) for text in texts), strict=True)
        if len(set(kinds)) > 1 or len(set(counts)) > 1:
            # All ranks come here, for all read the same headers.
            calls = self.channel.mpi.allgather(
                f"{what} of {x.numel() if count is None else count} elements of {x.dtype}"
            )
            raise RanksDisagree("; ".join(f"rank {rank} calls {call}" for rank, call in enumerate(calls)))
        reads, writes = places[:2], places[2:]
        are_adoptable = set(reads[0]) == {_ADOPTABLE}
        return Headers(_common(*reads), _common(*writes), _addresses(*reads), _addresses(*writes), are_adoptable)

    def is_within(self, segment: symmetric.AnySegment) -> bool:
        """Whether all these ranks have a part of the segment."""
        return all(local in segment.part_of for local in self._indices)

    def staged(self, what: str, x: Tensor, turn: int) -> tuple[bytes, list[Tensor]]:
        """The header of an operation on ordinary tensors that are staged in two slots, and the slots of a turn."""
        header = _HEADER.pack(_code(what, x.dtype), x.numel(), _UNREAD, 0, _UNREAD, 0)
        return header, [self.two_slots(rank, turn, x.dtype, x.numel()) for rank in range(self.size)]

    def views(self, x: Tensor, offsets: Sequence[int], counts: Sequence[int] | None = None) -> list[Tensor]:
        """Views of the symmetric tensors of all ranks, with dtype of ``x`` and its size, or counts of their own.

        Views keep no memory alive.
        """
        counts = [x.numel()] * self.size if counts is None else counts
        found = symmetric.find(x)
        assert found is not None, "all ranks met with symmetric tensors"
        return [
            found[0].view(local, x.dtype, count, offset)
            for local, offset, count in zip(self._indices, offsets, counts, strict=True)
        ]

    def given(self, rank: int, chunk: int, dtype: torch.dtype, count: int) -> Tensor:
        """The in slot of a rank for a chunk."""
        return self._slot(rank, chunk % 2, dtype, count)

    def reduced(self, rank: int, chunk: int, dtype: torch.dtype, count: int) -> Tensor:
        """The out slot of a rank for a chunk."""
        return self._slot(rank, 2 + chunk % 2, dtype, count)

    def two_slots(self, rank: int, chunk: int, dtype: torch.dtype, count: int) -> Tensor:
        """The slots of a rank for a chunk that takes two of them."""
        return self._slot(rank, 2 * (chunk % 2), dtype, count)

    def _slot(self, rank: int, slot: int, dtype: torch.dtype, count: int) -> Tensor:
        num_bytes = (2 - slot % 2) * self._slot_bytes  # the first of a kind may go on in the second
        assert count * dtype.itemsize <= num_bytes, (count, dtype, num_bytes)
        whole = self._slots.get((rank, slot, dtype))
        if whole is None:
            offset = _HEADER_ROOM_BYTES + slot * self._slot_bytes
            with torch.inference_mode(False):  # it is kept, for calls outside of that mode too
                whole = self._segment.view(self._indices[rank], dtype, num_bytes // dtype.itemsize, offset)
            self._slots[rank, slot, dtype] = whole
        return whole[:count]

    def free(self) -> None:
        """Give the channel's segment back."""
        self.prepared.clear()
        self._slots.clear()
        self._flags.release()
        self._memory.release()
        del self._mapping


def part_bytes() -> int:
    """The size of a rank's part of a channel's segment."""
    return _HEADER_ROOM_BYTES + _NUM_SLOTS * _slot_bytes()


def _slot_bytes() -> int:
    """The size of a slot: a chunk, as far as ``Tuning.staging_bytes`` allows."""
    most = (config.current.staging_bytes - _HEADER_ROOM_BYTES) // _NUM_SLOTS
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


def _of_turn(offset: int, turn: int) -> slice:
    """Where a rank, whose part begins at ``offset``, has its header of a turn."""
    begin = offset + turn * _LINE_BYTES
    return slice(begin, begin + _HEADER.size)


def _where(x: Tensor, can_be_read: bool) -> tuple[int, int]:
    found = symmetric.find(x)
    if found is not None:
        return found[0].key, found[1]
    return (_ORDINARY, x.data_ptr()) if can_be_read and is_readable(x) else (_UNREAD, 0)


def _common(segments: Sequence[int], offsets: Sequence[int]) -> list[int] | None:
    return list(offsets) if segments[0] > 0 and len(set(segments)) == 1 else None


def _addresses(segments: Sequence[int], addresses: Sequence[int]) -> list[int] | None:
    return list(addresses) if set(segments) == {_ORDINARY} else None


@functools.cache
def _code(what: str, dtype: torch.dtype) -> int:
    return zlib.crc32(f"{what} {dtype}".encode())
