"""The measured collectives: the shapes of their tensors, the meaning of "bytes", and values with exact results.

"bytes" has the same meaning as in nccl-tests: the size of ``x``, or of the result for allgather and gather. This tensor
is the larger of the two, and is called ``whole`` here. *Algorithm bandwidth* is bytes / time. *Bus bandwidth* is
algorithm bandwidth times a factor, which depends on the collective and the number of ranks. It is comparable with the
bandwidth of the hardware.

The *pattern* of a rank is a tensor of PERIOD whole numbers, which is repeated over a buffer of any size. So a buffer is
checked at the speed of memory, which an element-by-element formula would not reach. The numbers depend on the element
and the rank. The period is a prime, because the sizes of pieces, slices and blocks are mostly powers of two. So a
misplaced block does not match the pattern. The numbers are small enough that sums are exact in the dtype.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch
from torch import Tensor

ROOT = 0
PERIOD = 65521
_PERIODS_AT_ONCE_ON_GPU = 64  # A kernel for one period takes less time than its launch.
_CPU = torch.device("cpu")

_REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "prod": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
    "land": torch.logical_and,
    "lor": torch.logical_or,
}
_ANDS = ("land", "band", "prod", "min")  # ops that mean "and" for bool


@dataclasses.dataclass(frozen=True)
class Verb:
    """One collective. ``x`` and ``out`` are "whole", "slice" (one rank's part), or "" for a missing ``out``.

    ``trips`` is how many times each rank sends all slices except one, or 0 if ranks forward the whole tensor.
    """

    name: str
    x: str
    out: str
    reduces: bool
    trips: int

    def bus_factor(self, num_ranks: int) -> float:
        """Return bus bandwidth / algorithm bandwidth."""
        return self.trips * (num_ranks - 1) / num_ranks if self.trips else 1.0


VERBS = {
    verb.name: verb
    for verb in (
        Verb("allreduce", "whole", "", True, 2),
        Verb("broadcast", "whole", "", False, 0),
        Verb("reduce", "whole", "", True, 0),
        Verb("allgather", "slice", "whole", False, 1),
        Verb("reduce_scatter", "whole", "slice", True, 1),
        Verb("alltoall", "whole", "whole", False, 1),
        Verb("gather", "slice", "whole", False, 1),
        Verb("scatter", "whole", "slice", False, 1),
    )
}


@dataclasses.dataclass(frozen=True)
class Task:
    """The work that is measured at every size: a collective on tensors of a dtype and device, as one rank sees it."""

    verb: Verb
    dtype: torch.dtype
    op: str
    rank: int
    size: int
    device: torch.device = _CPU

    def rounded(self, num_bytes: int) -> int:
        """Return ``num_bytes`` rounded up to whole elements, and to equal slices if the task has slices."""
        unit = self.dtype.itemsize * (self.size if self.verb.out else 1)
        return -(-num_bytes // unit) * unit

    def count(self, part: str, num_bytes: int) -> int:
        """Return the number of elements of a tensor if the whole tensor has ``num_bytes``.

        ``part`` is "whole", "slice", or "" for a missing tensor, which has 0 elements.
        """
        whole = num_bytes // self.dtype.itemsize
        return {"whole": whole, "slice": whole // self.size, "": 0}[part]

    def pattern(self, rank: int) -> Tensor:
        """Return one period of the input of ``rank``."""
        return pattern(self.dtype, self.op if self.verb.reduces else "sum", rank, self.size)

    def reduced(self) -> Tensor:
        """Return one period of the reduction over all ranks."""
        return reduced(self.dtype, self.op, self.size)

    def expected(self, num_bytes: int) -> list[tuple[Tensor, int]]:
        """Return the right result on this rank: a list of patterns, each with its number of elements.

        The list is empty if this rank has no result.
        """
        whole, part = self.count("whole", num_bytes), self.count("slice", num_bytes)
        begin = self.rank * part
        if self.verb.name in ("reduce", "gather") and self.rank != ROOT:
            return []
        if self.verb.name in ("allreduce", "reduce"):
            return [(self.reduced(), whole)]
        if self.verb.name == "broadcast":
            return [(self.pattern(ROOT), whole)]
        if self.verb.name == "reduce_scatter":
            return [(shifted(self.reduced(), begin), part)]
        if self.verb.name == "scatter":
            return [(shifted(self.pattern(ROOT), begin), part)]
        if self.verb.name == "alltoall":
            return [(shifted(self.pattern(rank), begin), part) for rank in range(self.size)]
        return [(self.pattern(rank), part) for rank in range(self.size)]


def pattern(dtype: torch.dtype, op: str, rank: int, size: int) -> Tensor:
    """Return PERIOD elements of ``dtype``: the input of ``rank`` to a reduction with ``op`` over ``size`` ranks."""
    return _whole_numbers(dtype, op, rank, size).to(dtype)


@functools.lru_cache(maxsize=4)
def reduced(dtype: torch.dtype, op: str, size: int) -> Tensor:
    """Return the exact reduction of the patterns of all ranks, in ``dtype``."""
    inputs = (_whole_numbers(dtype, op, rank, size) for rank in range(size))
    if dtype == torch.bool or op in ("land", "lor"):
        inputs = (numbers.bool() for numbers in inputs)  # For bool, torch's sum is "or", and its product is "and".
    result = functools.reduce(_REDUCTIONS[op], inputs)
    return (result.double() / size).to(dtype) if op == "avg" else result.to(dtype)


def tolerance(dtype: torch.dtype, op: str) -> float:
    """Return the largest relative error of a right result.

    Only averages are rounded, and candidates round differently.
    """
    return 2 * torch.finfo(dtype).eps if op == "avg" else 0.0


def shifted(numbers: Tensor, begin: int) -> Tensor:
    """Return the pattern rotated so that it starts at element ``begin``."""
    return numbers.roll(-(begin % PERIOD))


def write(x: Tensor, numbers: Tensor) -> None:
    """Fill the 1-D tensor ``x`` with the pattern."""
    numbers = _beside(x, numbers)
    for part in torch.split(x, numbers.numel()):
        part.copy_(numbers[: part.numel()])


def first_wrong(x: Tensor, numbers: Tensor, tolerance: float) -> int | None:
    """Return the index of the first element of the 1-D tensor ``x`` that differs from the pattern, or None.

    NaN is always wrong.
    """
    numbers = _beside(x, numbers)
    for index, part in enumerate(torch.split(x, numbers.numel())):
        right = numbers[: part.numel()]
        is_right = (part - right).abs() <= tolerance * right.abs() if tolerance else part == right
        if not is_right.all():
            return index * numbers.numel() + int((~is_right).nonzero()[0])
    return None


def _beside(x: Tensor, numbers: Tensor) -> Tensor:
    """Return the pattern on the device of ``x``. On a GPU, repeat the pattern, but not beyond the size of ``x``."""
    if x.device.type == "cpu":
        return numbers
    return numbers.to(x.device).repeat(max(1, min(_PERIODS_AT_ONCE_ON_GPU, -(-x.numel() // PERIOD))))


def _whole_numbers(dtype: torch.dtype, op: str, rank: int, size: int) -> Tensor:
    places = torch.arange(PERIOD) * 40503 % PERIOD  # a permutation of all places
    at_most_once = ((places + rank) % (size + 1) == 0).long()  # At most one rank has 1, so "or" gives both 0 and 1.
    if dtype == torch.bool or op in ("land", "lor"):
        return 1 - at_most_once if op in _ANDS else at_most_once
    if op == "prod":
        return 1 + at_most_once  # At most one factor is 2, so the product fits every dtype.
    # The numbers are small enough that the sum over all ranks is exact in the dtype, in any order of the additions.
    mixed = (places + rank * 9973) % PERIOD
    return mixed % (_largest(dtype) // size + 1) if _largest(dtype) >= size else mixed % 2


def _largest(dtype: torch.dtype) -> int:
    """Return the largest number up to which ``dtype`` represents every whole number."""
    if dtype.is_floating_point or dtype.is_complex:
        return int(2 / torch.finfo(dtype).eps)
    return torch.iinfo(dtype).max
