"""A shard: the part of a parameter server that one rank holds, with what rules remember about it from send to send.

In memory: two counters, then the values, then the slots of the server's optimizer, each of as many elements as there
are values, each aligned to 64 bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchmpi_py.paramserver.rules import Memory, Rule

_ALIGNMENT = 64
View = Callable[[torch.dtype, int, int], Tensor]  # dtype, count, offset in bytes


def num_bytes(count: int, dtype: torch.dtype, num_slots: int) -> int:
    """The memory of a shard of ``count`` elements."""
    return _ALIGNMENT + (1 + num_slots) * _aligned(count * dtype.itemsize)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class ShardState(NamedTuple):
    """A copy of a shard."""

    values: Tensor
    slots: list[Tensor]
    num_averaged: float
    num_steps: float


class Shard:
    """``values``, flat; what the rule "average" and the server's optimizer remember of earlier sends.

    ``view`` gives tensors in its memory, which is zero at first.
    """

    def __init__(self, view: View, count: int, dtype: torch.dtype, num_slots: int) -> None:
        stride = _aligned(count * dtype.itemsize)
        self.values, *slots = (view(dtype, count, _ALIGNMENT + stride * index) for index in range(1 + num_slots))
        self._mean = Memory([], view(torch.float64, 1, 0)[0])
        self._optimizer = Memory(slots, view(torch.float64, 1, 8)[0])

    def apply(self, rule: Rule, payload: Tensor, options: dict[str, Any]) -> None:
        """Carry out a rule. Under the shard's lock."""
        if rule.begins_anew:
            self._mean.times.zero_()
        if rule.memory is None:
            rule.fn(self.values, payload, **options)
        else:
            rule.fn(self.values, payload, self._mean if rule.memory == "mean" else self._optimizer, **options)

    def state(self) -> ShardState:
        """A copy. Under the shard's lock."""
        slots = [slot.clone() for slot in self._optimizer.slots]
        return ShardState(self.values.clone(), slots, self._mean.times.item(), self._optimizer.times.item())

    def restore(self, state: ShardState) -> None:
        """Become what was copied. Under the shard's lock."""
        self.values.copy_(state.values)
        for slot, saved in zip(self._optimizer.slots, state.slots, strict=True):
            slot.copy_(saved)
        self._mean.times.fill_(state.num_averaged)
        self._optimizer.times.fill_(state.num_steps)
