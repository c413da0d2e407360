"""What a parameter server is saved as: its tensors whole, so that any number of ranks can take it up again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchmpi_py.paramserver.shard import ShardState
from torchmpi_py.paramserver.sharding import Bounds


def joined(
    shards: Sequence[ShardState], shape: torch.Size, dtype: torch.dtype, optimizer: str | None
) -> dict[str, Any]:
    """One dictionary of all shards, those that are empty left out."""

    def whole(parts: Sequence[Tensor]) -> Tensor:
        return (torch.cat(list(parts)) if parts else torch.empty(0, dtype=dtype)).view(shape)

    slots = list(zip(*(shard.slots for shard in shards), strict=True))
    return {
        "values": whole([shard.values for shard in shards]),
        "optimizer": optimizer,
        "slots": [whole(parts) for parts in slots],
        "num_averaged": [shard.num_averaged for shard in shards],
        "num_steps": [shard.num_steps for shard in shards],
    }


def parted(
    state: dict[str, Any], bounds: Sequence[Bounds], shape: torch.Size, dtype: torch.dtype, optimizer: str | None
) -> list[ShardState]:
    """The shards that are not empty. ValueError if the dictionary is of another server's kind."""
    values: Tensor = state["values"]
    saved = (tuple(values.shape), values.dtype, state["optimizer"])
    if saved != (tuple(shape), dtype, optimizer):
        raise ValueError(
            f"load_state_dict: saved from a server of shape {saved[0]}, {saved[1]}, optimizer {saved[2]!r}, but this "
            f"one has {tuple(shape)}, {dtype}, optimizer {optimizer!r}"
        )
    filled = [(begin, end) for begin, end in bounds if begin < end]
    averaged, steps = (_counts(state[key], len(filled)) for key in ("num_averaged", "num_steps"))
    return [
        ShardState(
            values.reshape(-1)[begin:end],
            [slot.reshape(-1)[begin:end] for slot in state["slots"]],
            averaged[i],
            steps[i],
        )
        for i, (begin, end) in enumerate(filled)
    ]


def _counts(saved: Sequence[float], number: int) -> list[float]:
    """Those of the shards; on another number of shards each gets the greatest, for all are equal but amid sends."""
    return list(saved) if len(saved) == number else [max(saved, default=0.0)] * number
