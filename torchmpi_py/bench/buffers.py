"""The buffers of a measurement, and the parser of sizes such as ``4``, ``64K`` and the range ``4:256M:4x``.

*Warm* buffers are in the cache when a call uses them, and *cold* buffers are not. *Pools* contain all tensors of a run:
one pool is ordinary memory, and one is symmetric memory if symmetric tensors are measured. A pool consists of *slots*,
each with the tensors of one call, and the calls use the slots in a cycle. For warm buffers the number of slots is as
small as possible, and each timed call follows an untimed call on the same slot. For cold buffers all slots together are
larger than the last-level cache, so the cache evicts each slot before the next call that uses the slot. The alternative
is to flush the cache before each call, which takes much longer than a small call. On a GPU the pools are GPU memory,
and the cold slots are together larger than the GPU's cache.
"""

from __future__ import annotations

import dataclasses
import re

import torch
from torch import Tensor

from torchmpi_py.bench import UsageError
from torchmpi_py.bench.cases import Task

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([KMG]?)(?:i?B)?", re.IGNORECASE)
_HOW = "write a number of bytes, such as 4, 64K, 1M or 2G"
_PAGE_BYTES = 4096
_LINE_BYTES = 64
_CPU = torch.device("cpu")


def parse_size(text: str) -> int:
    """Return the number of bytes that ``text`` means, such as 65536 for "64K".

    Raise ValueError if ``text`` is not a size of at least one byte.
    """
    match = _SIZE.fullmatch(text.strip())
    num_bytes = int(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
    if num_bytes < 1:
        raise ValueError(f"size {text!r}: {_HOW}")
    return num_bytes


def parse_sizes(text: str) -> list[int]:
    """Return the numbers of bytes in a list such as ``4,64K,1M:64M:4x``, in ascending order and without duplicates.

    A range starts with the first size, multiplies each size by the factor (default 2x), and ends with the last size.
    """
    return sorted({num_bytes for part in text.split(",") for num_bytes in _parse_part(part)})


def _parse_part(text: str) -> list[int]:
    if ":" not in text:
        return [parse_size(text)]
    match = re.fullmatch(r"([^:]+):([^:]+)(?::(\d+)x)?", text.strip())
    if match is None or (factor := int(match[3] or 2)) < 2:
        raise ValueError(f"sizes {text!r}: write a range as 4:256M or 4:256M:4x, with a factor of at least 2")
    first, last = parse_size(match[1]), parse_size(match[2])
    if first > last:
        raise ValueError(f"sizes {text!r}: the range ends before it starts; write the smaller size first")
    sizes = [first]
    while sizes[-1] * factor < last:
        sizes.append(sizes[-1] * factor)
    return [*sizes, last] if sizes[-1] != last else sizes


def format_size(num_bytes: float) -> str:
    """Return a number of bytes as a short text, such as 4 B, 64 KiB or 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024 or unit == "GiB":
            break
        num_bytes /= 1024
    return f"{num_bytes:.4g} {unit}"


@dataclasses.dataclass(frozen=True)
class TaskBuffers:
    """The 1-D tensors of one call. ``out`` is None for an in-place collective. Reports count the bytes of ``whole``."""

    x: Tensor
    out: Tensor | None

    @property
    def result(self) -> Tensor:
        """The tensor that holds the result."""
        return self.x if self.out is None else self.out

    @property
    def whole(self) -> Tensor:
        """The larger of the two tensors."""
        return self.x if self.out is None or self.x.numel() >= self.out.numel() else self.out


class Rotation:
    """The slots of one size in a pool, used in a cycle."""

    def __init__(self, pool: Tensor, task: Task, num_bytes: int, num_slots: int) -> None:
        self.pool = pool
        self.x_count = task.count(task.verb.x, num_bytes)
        self.out_count = task.count(task.verb.out, num_bytes)
        self.dtype = task.dtype
        self.stride_bytes = stride_bytes(task, num_bytes)
        self.num_slots = num_slots
        self._next = 0

    def take(self) -> TaskBuffers:
        """Return the tensors of the next slot.

        Every rank must make the same number of calls, so that symmetric tensors have equal offsets.
        """
        begin = self._next * self.stride_bytes
        self._next = (self._next + 1) % self.num_slots
        x = self._tensor(begin, self.x_count)
        out = self._tensor(begin + _aligned(x.nbytes), self.out_count) if self.out_count else None
        return TaskBuffers(x, out)

    def clear(self) -> None:
        """Set all slots to zero, and start with the first slot.

        Sums of zeros stay zero, but other values would grow from call to call until they overflow.
        """
        self.pool[: self.num_slots * self.stride_bytes].zero_()
        self._next = 0

    def _tensor(self, begin_bytes: int, count: int) -> Tensor:
        return self.pool[begin_bytes : begin_bytes + count * self.dtype.itemsize].view(self.dtype)


@dataclasses.dataclass(frozen=True)
class BufferPlan:
    """The sizes of a rank's pools of ordinary and of symmetric memory (0 for no pool), and of the cache."""

    plain_bytes: int
    symmetric_bytes: int
    cache_bytes: int

    def num_slots(self, task: Task, num_bytes: int, *, is_symmetric: bool, is_cold: bool) -> int:
        """Return the number of slots of one size: as few as possible if warm, more than fit into the cache if cold.

        A small pool may have room for fewer cold slots.
        """
        room = (self.symmetric_bytes if is_symmetric else self.plain_bytes) // stride_bytes(task, num_bytes)
        return min(room, _num_cold(task, num_bytes, self.cache_bytes)) if is_cold else _num_warm(is_symmetric)

    def is_too_small(self, task: Task, num_bytes: int) -> bool:
        """Return whether all cold slots together fit into the cache, and would therefore be warm."""
        slots = self.num_slots(task, num_bytes, is_symmetric=False, is_cold=True)
        return slots * stride_bytes(task, num_bytes) <= self.cache_bytes


def plan(
    task: Task, sizes: list[int], *, max_bytes: int, cache_bytes: int, with_symmetric: bool, with_cold: bool
) -> BufferPlan:
    """Divide ``max_bytes`` of each rank among the pools. Raise UsageError if the largest of ``sizes`` does not fit."""
    kinds = [False, True] if with_symmetric else [False]
    needed = [max(_num_warm(kind) * stride_bytes(task, size) for size in sizes) for kind in kinds]
    if sum(needed) > max_bytes:
        raise UsageError(
            f"{task.verb.name} of {format_size(sizes[-1])} needs buffers of {format_size(sum(needed))} per rank, but "
            f"the limit is {format_size(max_bytes)}; pass a larger --max-memory, or smaller --sizes"
        )
    wanted = [max(_num_cold(task, size, cache_bytes) * stride_bytes(task, size) for size in sizes) for _ in kinds]
    spare = (max_bytes - sum(needed)) // len(kinds)
    cold_bytes = [min(least + spare, max(least, most)) for least, most in zip(needed, wanted, strict=True)]
    plain_bytes, symmetric_bytes = [*(cold_bytes if with_cold else needed), 0][:2]
    return BufferPlan(plain_bytes, symmetric_bytes, cache_bytes)


def stride_bytes(task: Task, num_bytes: int) -> int:
    """Return the bytes from slot to slot: whole pages plus one cache line, so that slots use all sets of the cache."""
    tensors = [task.count(part, num_bytes) * task.dtype.itemsize for part in (task.verb.x, task.verb.out)]
    return -(-sum(map(_aligned, tensors)) // _PAGE_BYTES) * _PAGE_BYTES + _LINE_BYTES


def make_pool(num_bytes: int, device: torch.device = _CPU) -> Tensor:
    """Allocate a pool of ordinary memory."""
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _LINE_BYTES) * _LINE_BYTES


def _num_warm(is_symmetric: bool) -> int:
    return 1 if is_symmetric else 2  # A plain copy needs a source slot and a destination slot.


def _num_cold(task: Task, num_bytes: int, cache_bytes: int) -> int:
    return cache_bytes // stride_bytes(task, num_bytes) + 2
