"""A shard, the part of a parameter server that one rank holds: its bounds, its memory, and its saved form.

In memory: two counters, then the values, then the slots of the server's optimizer, each of as many elements as there
are values, each aligned to 64 bytes. A copy of the memory is a copy of the shard. Saved shards are joined into whole
tensors, so that any number of ranks can load them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchmpi_py.paramserver.rules import Memory, Rule

Bounds = tuple[int, int]  # begin, end
_ALIGNMENT = 64  # bytes


def shards(count: int, size: int) -> list[Bounds]:
    """``count`` elements over ``size`` ranks in order, as equal as can be: the first ``count % size`` get one more.

    There may be fewer elements than ranks. TorchMPI's layout (reference 5.2).
    """
    least, more = divmod(count, size)
    begins = [least * rank + min(more, rank) for rank in range(size + 1)]
    return list(itertools.pairwise(begins))


def num_bytes(count: int, dtype: torch.dtype, num_slots: int) -> int:
    """The memory of a shard of ``count`` elements."""
    return _ALIGNMENT + (1 + num_slots) * _aligned(count * dtype.itemsize)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class Shard:
    """``values``, flat, and what the rule "average" (``mean``) and the server's ``optimizer`` keep from send to send.

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

    @classmethod
    def zeros(cls, count: int, dtype: torch.dtype, num_slots: int) -> Shard:
        """A shard in memory of its own, all zero."""
        memory = torch.zeros(num_bytes(count, dtype, num_slots), dtype=torch.uint8, device="cpu")
        return cls(memory, count, dtype, num_slots)

    def apply(self, rule: Rule, payload: Tensor, options: dict[str, Any]) -> None:
        """Carry out a rule. Under the shard's lock."""
        if rule.memory != "mean":
            self.mean.times.zero_()
        if rule.memory is None:
            rule.fn(self.values, payload, **options)
        else:
            rule.fn(self.values, payload, self.mean if rule.memory == "mean" else self.optimizer, **options)


def joined(parts: Sequence[Shard], shape: torch.Size, dtype: torch.dtype, optimizer: str | None) -> dict[str, Any]:
    """One dictionary of all shards that are not empty."""

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
    """The shards that are not empty. ValueError if the dictionary is of another kind of server."""
    keys = {"values", "optimizer", "slots", "num_averaged", "num_steps"}
    if not keys <= set(state) or not isinstance(state["values"], Tensor):
        raise ValueError(f"load_state_dict: this is no state_dict() of a parameter server, which has {sorted(keys)}")
    values: Tensor = state["values"]
    num_saved = len(state["slots"]) if values.numel() else num_slots
    saved = (tuple(values.shape), values.dtype, state["optimizer"], num_saved)
    if saved != (tuple(shape), dtype, optimizer, num_slots):
        raise ValueError(
            f"load_state_dict: saved from a server of shape {saved[0]}, {saved[1]}, optimizer {saved[2]!r} with "
            f"{saved[3]} slots, but this one has {tuple(shape)}, {dtype}, optimizer {optimizer!r} with {num_slots}"
        )
    filled = [(begin, end) for begin, end in bounds if begin < end]
    averaged, steps = (_counts(state[key], len(filled)) for key in ("num_averaged", "num_steps"))
    parts = []
    for index, (begin, end) in enumerate(filled):
        part = Shard.zeros(end - begin, dtype, num_slots)
        for line, whole in zip([part.values, *part.optimizer.slots], [values, *state["slots"]], strict=True):
            line.copy_(whole.reshape(-1)[begin:end])
        part.mean.times.fill_(averaged[index])
        part.optimizer.times.fill_(steps[index])
        parts.append(part)
    return parts


def _counts(saved: Sequence[float], number: int) -> list[float]:
    """The counter of each shard; on another number of shards each gets the greatest: they differ only amid sends."""
    return list(saved) if len(saved) == number else [max(saved, default=0.0)] * number
