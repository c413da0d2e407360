"""A shard, the part of a parameter server that one rank holds: its bounds, its memory, and its saved form.

The memory contains two counters, the values, and the slots of the server's optimizer, so a copy of the memory is a copy
of the shard. Each slot has as many elements as the values, and each part of the memory is aligned to 64 bytes. A saved
state joins the shards into whole tensors, so that any number of ranks can load it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchmpi_py.paramserver.rules import Memory, Rule

Bounds = tuple[int, int]  # (begin, end) in the flat tensor
_ALIGNMENT = 64  # bytes


def shards(count: int, size: int) -> list[Bounds]:
    """Divide ``count`` elements among ``size`` ranks in order, and return the bounds of each shard.

    Each of the first ``count % size`` ranks gets one element more than the other ranks. If there are fewer elements
    than ranks, some shards are empty. The layout is TorchMPI's (reference 5.2).
    """
    least, more = divmod(count, size)
    begins = [least * rank + min(more, rank) for rank in range(size + 1)]
    return list(itertools.pairwise(begins))


def num_bytes(count: int, dtype: torch.dtype, num_slots: int) -> int:
    """Return the number of bytes that a shard of ``count`` elements needs."""
    return _ALIGNMENT + (1 + num_slots) * _aligned(count * dtype.itemsize)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class Shard:
    """A shard: the flat ``values``, the state of the rule "average" (``mean``), and the state of the ``optimizer``.

    ``memory`` is a flat tensor of bytes, which must be zero for a new shard.
    """

    def __init__(self, memory: Tensor, count: int, dtype: torch.dtype, num_slots: int) -> None:
        self.memory = memory[: num_bytes(count, dtype, num_slots)]
        stride, size = _aligned(count * dtype.itemsize), count * dtype.itemsize
        begins = [_ALIGNMENT + stride * index for index in range(1 + num_slots)]
        self.values, *slots = (self.memory[begin : begin + size].view(dtype) for begin in begins)
        counters = self.memory[:16].view(torch.float64)
        self.mean = Memory([], counters[0])
        self.optimizer = Memory(slots, counters[1])

    @classmethod
    def zeros(cls, count: int, dtype: torch.dtype, num_slots: int) -> Shard:
        """Create a shard of zeros in new memory."""
        memory = torch.zeros(num_bytes(count, dtype, num_slots), dtype=torch.uint8, device="cpu")
        return cls(memory, count, dtype, num_slots)

    def apply(self, rule: Rule, payload: Tensor, options: dict[str, Any]) -> None:
        """Apply a rule to the values. The caller must hold the lock of the shard."""
        if rule.memory != "mean":
            self.mean.times.zero_()
        if rule.memory is None:
            rule.fn(self.values, payload, **options)
        else:
            rule.fn(self.values, payload, self.mean if rule.memory == "mean" else self.optimizer, **options)


def joined(parts: Sequence[Shard], shape: torch.Size, dtype: torch.dtype, optimizer: str | None) -> dict[str, Any]:
    """Return the dictionary of a saved state from ``parts``, the shards that are not empty."""

    def whole(lines: Sequence[Tensor]) -> Tensor:
        return (torch.cat(list(lines)) if lines else torch.empty(0, dtype=dtype, device="cpu")).view(shape)

    slots = list(zip(*(part.optimizer.slots for part in parts), strict=True))
    return {
        "values": whole([part.values for part in parts]),
        "optimizer": optimizer,
        "slots": [whole(lines) for lines in slots],
        "num_averaged": [part.mean.times.item() for part in parts],
        "num_steps": [part.optimizer.times.item() for part in parts],
    }


def parted(
    state: dict[str, Any],
    bounds: Sequence[Bounds],
    shape: torch.Size,
    dtype: torch.dtype,
    optimizer: str | None,
    num_slots: int,
) -> list[Shard]:
    """Cut a saved state into shards, and return the shards that are not empty.

    Raise ValueError if the state belongs to a server of a different shape, dtype or optimizer.
    """
    keys = {"values", "optimizer", "slots", "num_averaged", "num_steps"}
    if not keys <= set(state) or not isinstance(state["values"], Tensor):
        raise ValueError(f"load_state_dict: invalid state; pass a server's state_dict() with the keys {sorted(keys)}")
    values: Tensor = state["values"]
    num_saved = len(state["slots"]) if values.numel() else num_slots
    saved = (tuple(values.shape), values.dtype, state["optimizer"], num_saved)
    if saved != (tuple(shape), dtype, optimizer, num_slots):
        raise ValueError(
            f"load_state_dict: expected shape {tuple(shape)}, {dtype}, optimizer {optimizer!r}, num_slots={num_slots}, "
            f"found {saved[0]}, {saved[1]}, {saved[2]!r}, {saved[3]}; pass the state of a server with equal settings"
        )
    nonempty = [(begin, end) for begin, end in bounds if begin < end]
    averaged, steps = (_counts(state[key], len(nonempty)) for key in ("num_averaged", "num_steps"))
    parts = []
    for index, (begin, end) in enumerate(nonempty):
        part = Shard.zeros(end - begin, dtype, num_slots)
        for line, whole in zip([part.values, *part.optimizer.slots], [values, *state["slots"]], strict=True):
            line.copy_(whole.reshape(-1)[begin:end])
        part.mean.times.fill_(averaged[index])
        part.optimizer.times.fill_(steps[index])
        parts.append(part)
    return parts


def _counts(saved: Sequence[float], number: int) -> list[float]:
    """Return one counter per shard. If the number of shards has changed, all shards get the largest saved counter.

    The counters of different shards are equal unless a send is in progress.
    """
    return list(saved) if len(saved) == number else [max(saved, default=0.0)] * number
