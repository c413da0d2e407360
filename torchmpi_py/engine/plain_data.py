"""What ``torch.load(weights_only=True)`` reads back: data, whose reading runs no code."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Any

import torch

_LEAVES = (
    torch.Tensor,
    torch.nn.Parameter,
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    torch.Size,
    torch.dtype,
    torch.device,
)
_LISTS = (list, tuple, set)
_DICTS = (dict, OrderedDict, Counter)


def check(content: Any, where: str) -> None:
    """TypeError that says where something is which could be written, but not read back."""
    kind = type(content)
    if kind in _DICTS:
        for key, value in content.items():
            check(key, f"the key {key!r} of {where}")
            check(value, f"{where}[{key!r}]")
    elif kind in _LISTS:
        for index, value in enumerate(content):
            check(value, f"{where}[{index}]")
    elif kind not in _LEAVES:
        raise TypeError(
            f"{where} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint does not hold: it holds tensors, "
            "numbers, strings, and lists, tuples, sets and dicts of them (numpy: torch.from_numpy(x), x.item())"
        )
