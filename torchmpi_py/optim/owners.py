"""Which rank of a ShardedOptimizer updates what."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any, Literal

import torch

from torchmpi_py.core.tensors import check_rank

_ELEMENTWISE = {  # every element of a parameter is treated alike, whatever the others are
    getattr(torch.optim, name)
    for name in "ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD".split()  # noqa: SIM905
}

Placement = Literal["size", "round_robin", "hash"] | Callable[[int, torch.nn.Parameter], int]


def owners(
    parameters: list[torch.nn.Parameter], placement: Placement, optimizer_class: Any, size: int
) -> dict[torch.nn.Parameter, int]:
    """The owner of each parameter; empty for slices."""
    if placement == "size":
        return {} if optimizer_class in _ELEMENTWISE else _balanced(parameters, size)
    rules = {"round_robin": lambda n, p: n % size, "hash": lambda n, p: zlib.crc32(str(n).encode()) % size}
    rule = placement if callable(placement) else rules.get(placement)
    if rule is None:
        raise ValueError(f"placement={placement!r}: give 'size', 'round_robin', 'hash', or a function")
    return {
        p: check_rank("ShardedOptimizer", f"placement's owner of parameter {n}", rule(n, p), size)
        for n, p in enumerate(parameters)
    }


def _balanced(parameters: list[torch.nn.Parameter], size: int) -> dict[torch.nn.Parameter, int]:
    """The largest parameters first, each to the rank that has the fewest elements."""
    num_elements, owners = [0] * size, {}
    for p in sorted(parameters, key=lambda p: -p.numel()):
        owners[p] = num_elements.index(min(num_elements))
        num_elements[owners[p]] += p.numel()
    return owners
