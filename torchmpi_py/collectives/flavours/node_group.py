"""The shared memory through which the ranks of a channel within a node exchange data, and the protocol for its use.

Idea: every operation begins with an exchange of *headers*, because shared memory does not match the ranks' calls as MPI
matches messages:

1. Each rank writes its header: the operation, the dtype, the number of elements, and the places of its tensors.
2. The ranks synchronize in a barrier.
3. Each rank reads all headers. If the ranks make different calls, all ranks raise RanksDisagree before any tensor has
   changed. Otherwise the headers show whether the ranks can work in place on each other's tensors, or how else the data
   can move.

Alternative: no headers. It is not used, although it would save a barrier in each operation. If one rank passed more
elements than another, or a different op, the results would be wrong without an error. Besides, a rank must learn from
the headers where its peers' tensors are, and whether they are symmetric (docs/decisions/006).

Each channel has its own segment of shared memory, so that two communicators, or two threads, never overwrite each
other's data. A rank's part of the segment contains the rank's two headers and four *slots*.

The two headers of a rank alternate between operations. So a rank overwrites its header of the operation before the last
one. All ranks have read that header, because all ranks have announced the last operation since then. An operation ends
with a barrier, and no rank may change its slots or tensors before this barrier. There is one exception: an allreduce
whose values travel with the headers (``staging.allreduce_at_once``) needs no barrier at its end, because its slots
alternate with the headers.

Two of a rank's slots are *in* slots, for the rank's own values. The other two are *out* slots, for the values that the
rank has reduced. The slots of each kind alternate between chunks. If no rank reduces values for its peers, a chunk may
occupy *two slots*: both in slots, or both out slots.
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

# The code of the operation, the number of elements, and the segment and offset (or address) of the input and output.
_HEADER = struct.Struct("<6q")
_LINE_BYTES = 64  # Each header has its own cache line. The first line also contains the flag of the barrier.
_HEADER_ROOM_BYTES = 4096  # The headers occupy a page, so that the slots are aligned.
_NUM_SLOTS = 4
_LEAST_SLOT_BYTES = 64 << 10
# These values replace the segment of a tensor that is not symmetric: peers may read the tensor directly, the rank may
# move the tensor, or neither is possible.
_ORDINARY, _ADOPTABLE, _UNREAD = 0, -1, -2


class Headers(NamedTuple):
    """The headers of all ranks: the places of the input (``read``) and of the output (``written``) of each rank.

    ``read`` and ``written`` list offsets in a segment that is common to all ranks, and are None without such a segment.
    ``read_at`` and ``written_at`` list addresses in ordinary memory. They are None unless all these tensors are
    ordinary, readable for all ranks, and larger than a chunk.
    """

    read: list[int] | None
    written: list[int] | None
    read_at: list[int] | None
    written_at: list[int] | None
    are_adoptable: bool  # whether all ranks may move their tensors (``symmetric.adopt``)


class Exchange(NamedTuple):
    """One rank's tensors in a collective in which each rank sends row s of its ``rows``, of shape (size, n), to rank s.

    With ``how``, a rank reduces all rows that it receives into ``outs[0]``, its only output. Without ``how``, the row
    from rank s is copied into ``outs[s]``. With ``root``, only the root has ``rows``, and ``outs`` is a list of one
    tensor.
    """

    rows: Tensor | None
    outs: list[Tensor]
    how: Kernel | None = None
    root: int | None = None


class NodeGroup:
    """The shared memory of a channel whose ranks are all on one node. The channel keeps this object between calls."""

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
        self.turn = 0  # index of the header, and of the slots that belong to it, for the next operation
        self._slots: dict[tuple[int, int, torch.dtype], Tensor] = {}
        self.peers = peer_memory(channel)  # It is None if the ranks cannot read each other's ordinary memory.
        self.trials = Trials(channel.mpi.allgather)
        self.prepared: dict[Hashable, Any] = {}  # operations that prepared_allreduce.py keeps for later calls
        self.can_adopt = True  # It becomes False when the ranks fail to adopt a tensor.
        self.chunk_bytes = min(config.current.chunk_bytes, self._slot_bytes)

    def header(self, what: str, x: Tensor, out: Tensor | None = None, count: int | None = None) -> bytes:
        """Return the header of an operation that reads ``x`` and writes ``out`` (default: ``x``).

        ``count`` is the number of elements that must be equal on all ranks; default: the size of ``x``.
        """
        count = x.numel() if count is None else count
        can_be_read = self.peers is not None and count * x.itemsize > self.chunk_bytes
        read = _where(x, can_be_read)
        written = read if out is None or out is x else _where(out, can_be_read)
        return _HEADER.pack(_code(what, x.dtype), count, *read, *written)

    def adoptable_header(self, what: str, x: Tensor) -> bytes:
        """Return the header of an in-place operation on ordinary memory that this rank may move."""
        return _HEADER.pack(_code(what, x.dtype), x.numel(), _ADOPTABLE, 0, _ADOPTABLE, 0)

    def announce(self, header: bytes) -> bool:
        """Publish this rank's header, wait in a barrier, and return whether the headers of all ranks are equal.

        All ranks of the channel must call it.
        """
        memory, places = self._memory, self._headers[self.turn]
        memory[places[self.rank]] = header
        self.barrier()
        self.turn = 1 - self.turn
        for place in places:  # noqa: SIM110 - A generator would take too long for small messages.
            if memory[place] != header:
                return False
        return True

    def exchange_headers(self, what: str, x: Tensor, out: Tensor | None = None, count: int | None = None) -> Headers:
        """Publish this rank's header, and return the headers of all ranks. All ranks of the channel must call it.

        Raise RanksDisagree on all ranks if the ranks start different operations.
        """
        self.announce(self.header(what, x, out, count))
        return self.read_headers(what, x, count)

    def read_headers(self, what: str, x: Tensor, count: int | None = None) -> Headers:
        """Return the headers that all ranks have published in the last ``announce``.

        Raise RanksDisagree on all ranks if codes or counts differ. All ranks of the channel must call this method.
        """
        texts = [self._memory[place] for place in self._headers[1 - self.turn]]
        # Turn one header per rank into one tuple per field. Codes and counts must be equal on all ranks; places may
        # differ.
        kinds, counts, *places = zip(*(_HEADER.unpack(text) for text in texts), strict=True)
        if len(set(kinds)) > 1 or len(set(counts)) > 1:
            # All ranks reach this allgather, because all ranks read the same headers.
            own = f"{what} of {x.numel() if count is None else count} elements of {x.dtype}"
            calls = "; ".join(f"rank {rank} calls {call}" for rank, call in enumerate(self.channel.mpi.allgather(own)))
            raise RanksDisagree(f"all ranks must make the same call with the same sizes, but {calls}")
        reads, writes = places[:2], places[2:]
        are_adoptable = set(reads[0]) == {_ADOPTABLE}
        return Headers(_common(*reads), _common(*writes), _addresses(*reads), _addresses(*writes), are_adoptable)

    def is_within(self, segment: symmetric.AnySegment) -> bool:
        """Return whether all ranks of the channel have a part of the segment."""
        return all(local in segment.part_of for local in self._indices)

    def staged(self, what: str, x: Tensor, turn: int) -> tuple[bytes, list[Tensor]]:
        """Return the header of an operation whose tensors fit into two slots each, and the slots of all ranks.

        ``turn`` determines which of their slots the ranks use.
        """
        header = _HEADER.pack(_code(what, x.dtype), x.numel(), _UNREAD, 0, _UNREAD, 0)
        return header, [self.two_slots(rank, turn, x.dtype, x.numel()) for rank in range(self.size)]

    def views(self, x: Tensor, offsets: Sequence[int], counts: Sequence[int] | None = None) -> list[Tensor]:
        """Return a view of each rank's symmetric tensor in the segment of ``x``, which is this rank's tensor.

        ``offsets`` (in bytes) and ``counts`` (in elements) are by rank; without ``counts`` all views have the size of
        ``x``. The views do not keep the memory alive.
        """
        counts = [x.numel()] * self.size if counts is None else counts
        location = symmetric.find(x)
        assert location is not None, "all ranks announced symmetric tensors"
        return [
            location[0].view(local, x.dtype, count, offset)
            for local, offset, count in zip(self._indices, offsets, counts, strict=True)
        ]

    def given(self, rank: int, chunk: int, dtype: torch.dtype, count: int) -> Tensor:
        """Return the first ``count`` elements of a rank's in slot for a chunk."""
        return self._slot(rank, chunk % 2, dtype, count)

    def reduced(self, rank: int, chunk: int, dtype: torch.dtype, count: int) -> Tensor:
        """Return the first ``count`` elements of a rank's out slot for a chunk."""
        return self._slot(rank, 2 + chunk % 2, dtype, count)

    def two_slots(self, rank: int, chunk: int, dtype: torch.dtype, count: int) -> Tensor:
        """Return the first ``count`` elements of a rank's two slots for a chunk."""
        return self._slot(rank, 2 * (chunk % 2), dtype, count)

    def _slot(self, rank: int, slot: int, dtype: torch.dtype, count: int) -> Tensor:
        """Return ``count`` elements from the start of a slot."""
        num_bytes = (2 - slot % 2) * self._slot_bytes  # The first slot of a kind may extend into the second one.
        assert count * dtype.itemsize <= num_bytes, (count, dtype, num_bytes)
        whole = self._slots.get((rank, slot, dtype))
        if whole is None:
            offset = _HEADER_ROOM_BYTES + slot * self._slot_bytes
            with torch.inference_mode(False):  # Later calls outside of this mode use the view too.
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
    """Return the size of a slot: a chunk, but at least 64 KiB, or less if ``Tuning.staging_bytes`` requires it."""
    most = (config.current.staging_bytes - _HEADER_ROOM_BYTES) // _NUM_SLOTS
    return min(max(config.current.chunk_bytes, _LEAST_SLOT_BYTES), most) // 64 * 64


def _allocate(channel: Channel, num_bytes: int) -> tuple[mmap.mmap, symmetric.Segment]:
    """Allocate the channel's segment. All ranks of the channel must call it.

    Raise Unavailable on every rank if the memory cannot be allocated.
    """
    try:
        return symmetric.allocate(channel.mpi, channel.places, num_bytes)
    except Unavailable as error:
        raise Unavailable(
            f"cannot allocate shared memory for a communicator of {channel.size} ranks: {error}. "
            f'Use fewer communicators, a smaller TORCHMPI_CHUNK_BYTES, or a different flavour, such as "mpi"'
        ) from None


def _of_turn(offset: int, turn: int) -> slice:
    """Return the position of a rank's header for a turn; ``offset`` is the start of the rank's part."""
    begin = offset + turn * _LINE_BYTES
    return slice(begin, begin + _HEADER.size)


def _where(x: Tensor, can_be_read: bool) -> tuple[int, int]:
    """Return the place of a tensor for the header: (segment, offset), (_ORDINARY, address), or (_UNREAD, 0)."""
    location = symmetric.find(x)
    if location is not None:
        return location[0].key, location[1]
    return (_ORDINARY, x.data_ptr()) if can_be_read and is_readable(x) else (_UNREAD, 0)


def _common(segments: Sequence[int], offsets: Sequence[int]) -> list[int] | None:
    """Return the offsets if all tensors are in one segment, else None."""
    return list(offsets) if segments[0] > 0 and len(set(segments)) == 1 else None


def _addresses(segments: Sequence[int], addresses: Sequence[int]) -> list[int] | None:
    """Return the addresses if all tensors are in ordinary memory that peers can read, else None."""
    return list(addresses) if set(segments) == {_ORDINARY} else None


@functools.cache
def _code(what: str, dtype: torch.dtype) -> int:
    """Return the number that identifies an operation and a dtype in headers."""
    return zlib.crc32(f"{what} {dtype}".encode())
