"""The verbs that are measured: the shape of their tensors, what "bytes" counts, and the right result of each.

"bytes" is as in nccl-tests: the bytes of ``x``, but for allgather and gather those of the result. It is the larger of
the two tensors, called ``whole`` here. *Algorithm bandwidth* is bytes / time; *bus bandwidth* multiplies it by a factor
that depends on verb and number of ranks, such that it can be compared with what the hardware moves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from torchmpi_py.bench import exact_values

ROOT = 0
_CPU = torch.device("cpu")


@dataclasses.dataclass(frozen=True)
class Verb:
    """One verb. ``x`` and ``out`` say what each holds: "whole", a "slice" of it (a rank's part), or (out) "" for none.

    ``bus_factor``: bus bandwidth / algorithm bandwidth for n ranks.
    """

    name: str
    x: str
    out: str
    reduces: bool
    bus_factor: Callable[[int], float]

    @property
    def splits(self) -> bool:
        """Whether the elements must divide by the number of ranks."""
        return self.out != ""


def _once(num_ranks: int) -> float:
    return 1.0


def _to_others(num_ranks: int) -> float:
    return (num_ranks - 1) / num_ranks


def _twice_to_others(num_ranks: int) -> float:
    return 2 * _to_others(num_ranks)


VERBS = {
    verb.name: verb
    for verb in (
        Verb("allreduce", "whole", "", True, _twice_to_others),
        Verb("broadcast", "whole", "", False, _once),
        Verb("reduce", "whole", "", True, _once),
        Verb("allgather", "slice", "whole", False, _to_others),
        Verb("reduce_scatter", "whole", "slice", True, _to_others),
        Verb("alltoall", "whole", "whole", False, _to_others),
        Verb("gather", "slice", "whole", False, _to_others),
        Verb("scatter", "whole", "slice", False, _to_others),
    )
}


@dataclasses.dataclass(frozen=True)
class Task:
    """What is measured at every size: a verb on tensors of a dtype and device, as rank ``rank`` of ``size`` sees it."""

    verb: Verb
    dtype: torch.dtype
    op: str
    rank: int
    size: int
    device: torch.device = _CPU

    def rounded(self, num_bytes: int) -> int:
        """The next larger number of bytes that is whole elements, and divides by the ranks where the verb needs it."""
        unit = self.dtype.itemsize * (self.size if self.verb.splits else 1)
        return -(-num_bytes // unit) * unit

    def count(self, part: str, num_bytes: int) -> int:
        """Elements of a "whole" of ``num_bytes``, of a "slice" of it, or of nothing ("")."""
        whole = num_bytes // self.dtype.itemsize
        return {"whole": whole, "slice": whole // self.size, "": 0}[part]

    def pattern(self, rank: int) -> Tensor:
        """What ``rank`` brings, endlessly repeated."""
        return exact_values.pattern(self.dtype, self.op if self.verb.reduces else "sum", rank, self.size)

    def reduced(self) -> Tensor:
        """The reduction of what all ranks bring, endlessly repeated."""
        return exact_values.reduced(self.dtype, self.op, self.size)

    def expected(self, num_bytes: int) -> list[tuple[Tensor, int]]:
        """The right result on this rank, in order: patterns, and how many elements of each. Empty: none to check."""
        whole, part = self.count("whole", num_bytes), self.count("slice", num_bytes)
        begin = self.rank * part
        if self.verb.name in ("reduce", "gather") and self.rank != ROOT:
            return []
        if self.verb.name in ("allreduce", "reduce"):
            return [(self.reduced(), whole)]
        if self.verb.name == "broadcast":
            return [(self.pattern(ROOT), whole)]
        if self.verb.name == "reduce_scatter":
            return [(exact_values.shifted(self.reduced(), begin), part)]
        if self.verb.name == "scatter":
            return [(exact_values.shifted(self.pattern(ROOT), begin), part)]
        if self.verb.name == "alltoall":
            return [(exact_values.shifted(self.pattern(rank), begin), part) for rank in range(self.size)]
        return [(self.pattern(rank), part) for rank in range(self.size)]
