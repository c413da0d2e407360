"""What a parameter server is saved as: its tensors whole, so that any number of ranks can take it up again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchmpi_py.paramserver import shard
from torchmpi_py.paramserver.shard import Shard
from torchmpi_py.paramserver.sharding import Bounds


def joined(parts: Sequence[Shard], shape: torch.Size, dtype: torch.dtype, optimizer: str | None) -> dict[str, Any]:
    """One dictionary of all shards, those that are empty left out."""

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
    """The shards that are not empty. ValueError if the dictionary is of another server's kind."""
    values: Tensor = state["values"]
    saved = (
        tuple(values.shape),
        values.dtype,
        state["optimizer"],
        len(state["slots"]) if values.numel() else num_slots,
    )
    if saved != (tuple(shape), dtype, optimizer, num_slots):
        raise ValueError(
            f"load_state_dict: saved from a server of shape {saved[0]}, {saved[1]}, optimizer {saved[2]!r} with "
            f"{saved[3]} slots, but this one has {tuple(shape)}, {dtype}, optimizer {optimizer!r} with {num_slots}"
        )
    filled = [(begin, end) for begin, end in bounds if begin < end]
    averaged, steps = (_counts(state[key], len(filled)) for key in ("num_averaged", "num_steps"))
    parts = []
    for index, (begin, end) in enumerate(filled):
        size = shard.num_bytes(end - begin, dtype, num_slots)
        part = Shard(torch.zeros(size, dtype=torch.uint8, device="cpu"), end - begin, dtype, num_slots)
        for line, whole in zip([part.values, *part.optimizer.slots], [values, *state["slots"]], strict=True):
            line.copy_(whole.reshape(-1)[begin:end])
        part.mean.times.fill_(averaged[index])
        part.optimizer.times.fill_(steps[index])
        parts.append(part)
    return parts


def _counts(saved: Sequence[float], number: int) -> list[float]:
    """Those of the shards; on another number of shards each gets the greatest, for all are equal but amid sends."""
    return list(saved) if len(saved) == number else [max(saved, default=0.0)] * number
