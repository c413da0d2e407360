"""Values that tell every element and rank apart, and their exact reductions.

The *pattern* of a rank is a tensor of PERIOD whole numbers, repeated over a buffer of any size: so it is checked at the
speed of memory. The period is a prime: pieces, slices and blocks, whose sizes are mostly powers of two, do not coincide
with it, and one in the wrong place shows. The numbers are so small that sums are exact in the dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

PERIOD = 65521
_PERIODS_AT_ONCE_ON_GPU = 64  # there a step takes longer to launch than to carry out

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
_ANDS = ("land", "band", "prod", "min")  # on bool


def pattern(dtype: torch.dtype, op: str, rank: int, size: int) -> Tensor:
    """PERIOD elements of ``dtype`` that ``rank`` of ``size`` brings to a reduction with ``op``."""
    return _whole_numbers(dtype, op, rank, size).to(dtype)


@functools.lru_cache(maxsize=4)
def reduced(dtype: torch.dtype, op: str, size: int) -> Tensor:
    """The exact reduction of the patterns of all ranks, as ``dtype``."""
    brought = (_whole_numbers(dtype, op, rank, size) for rank in range(size))
    if dtype == torch.bool or op in ("land", "lor"):
        brought = (numbers.bool() for numbers in brought)  # torch's sum and product of bool are "or" and "and"
    result = functools.reduce(_REDUCTIONS[op], brought)
    return (result.double() / size).to(dtype) if op == "avg" else result.to(dtype)


def tolerance(dtype: torch.dtype, op: str) -> float:
    """How far a right result may be off, relative: only averages are rounded, and differently by different ways."""
    return 2 * torch.finfo(dtype).eps if op == "avg" else 0.0


def shifted(numbers: Tensor, begin: int) -> Tensor:
    """The pattern as it goes on at element ``begin``."""
    return numbers.roll(-(begin % PERIOD))


def write(x: Tensor, numbers: Tensor) -> None:
    """Fill the 1-D tensor ``x`` with the pattern."""
    numbers = _beside(x, numbers)
    for part in torch.split(x, numbers.numel()):
        part.copy_(numbers[: part.numel()])


def first_wrong(x: Tensor, numbers: Tensor, tolerance: float) -> int | None:
    """The index of the first element of the 1-D tensor ``x`` that is not the pattern's, or None. NaN is wrong."""
    numbers = _beside(x, numbers)
    for index, part in enumerate(torch.split(x, numbers.numel())):
        right = numbers[: part.numel()]
        is_right = (part - right).abs() <= tolerance * right.abs() if tolerance else part == right
        if not is_right.all():
            return index * numbers.numel() + int((~is_right).nonzero()[0])
    return None


def _beside(x: Tensor, numbers: Tensor, periods_on_gpu: int = _PERIODS_AT_ONCE_ON_GPU) -> Tensor:
    """The pattern on the device of ``x``; on a GPU several periods of it, as many as ``x`` has use for."""
    if x.device.type == "cpu":
        return numbers
    return numbers.to(x.device).repeat(max(1, min(periods_on_gpu, -(-x.numel() // PERIOD))))


def _whole_numbers(dtype: torch.dtype, op: str, rank: int, size: int) -> Tensor:
    places = torch.arange(PERIOD) * 40503 % PERIOD  # all of them, well mixed
    at_most_once = ((places + rank) % (size + 1) == 0).long()  # 1 on one rank or none: "or" and "and" are 0 and 1
    if dtype == torch.bool or op in ("land", "lor"):
        return 1 - at_most_once if op in _ANDS else at_most_once
    if op == "prod":
        return 1 + at_most_once  # the product fits any dtype
    mixed = (places + rank * 9973) % PERIOD
    return mixed % (_largest(dtype) // size + 1) if _largest(dtype) >= size else mixed % 2


def _largest(dtype: torch.dtype) -> int:
    """The largest whole number up to which all are exact in ``dtype``."""
    if dtype.is_floating_point or dtype.is_complex:
        return int(2 / torch.finfo(dtype).eps)
    return torch.iinfo(dtype).max
