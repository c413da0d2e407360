"""A shard: the part of a parameter server that one rank holds, with what rules remember about it from send to send.

In memory: two counters, then the values, then the slots of the server's optimizer, each of as many elements as there
are values, each aligned to 64 bytes. A copy of the memory is a copy of the shard.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchmpi_py.paramserver.rules import Memory, Rule

_ALIGNMENT = 64


def num_bytes(count: int, dtype: torch.dtype, num_slots: int) -> int:
    """The memory of a shard of ``count`` elements."""
    return _ALIGNMENT + (1 + num_slots) * _aligned(count * dtype.itemsize)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class Shard:
    """``values``, flat; what the rule "average" and the server's optimizer remember of earlier sends.

    ``memory`` is a flat tensor of bytes, zero for a new shard.
    """

    def __init__(self, memory: Tensor, count: int, dtype: torch.dtype, num_slots: int) -> None:
        self.memory = memory[: num_bytes(count, dtype, num_slots)]
        stride, size = _aligned(count * dtype.itemsize), count * dtype.itemsize
        begins = [_ALIGNMENT + stride * index for index in range(1 + num_slots)]
        self.values, *slots = (self.memory[begin : begin + size].view(dtype) for begin in begins)
        counters = self.memory[:16].view(torch.float64)
        self.mean = Memory([], counters[0])
        self.optimizer = Memory(slots, counters[1])

    def apply(self, rule: Rule, payload: Tensor, options: dict[str, Any]) -> None:
        """Carry out a rule. Under the shard's lock."""
        if rule.memory != "mean":
            self.mean.times.zero_()
        if rule.memory is None:
            rule.fn(self.values, payload, **options)
        else:
            rule.fn(self.values, payload, self.mean if rule.memory == "mean" else self.optimizer, **options)
