"""What ``torch.load(weights_only=True)`` reads back: data, whose reading runs no code."""

from __future__ import annotations

import copy
import operator
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
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
_NUMBERS: dict[type, Callable[[Any], Any]] = {np.floating: float, np.integer: int, np.bool_: bool}


def plain(content: Any, where: str) -> Any:
    """The content, with numpy's numbers as Python's. TypeError that says where something is that is no plain data."""
    kind = type(content)
    if kind in _DICTS:
        return _plain_dict(content, where)
    if kind in _LISTS:
        taken = [plain(value, f"{where}[{index}]") for index, value in enumerate(content)]
        return content if all(map(operator.is_, taken, content)) else kind(taken)
    for numbers, python in _NUMBERS.items():
        if isinstance(content, numbers):
            return python(content)
    if kind in _LEAVES:
        return content
    raise TypeError(
        f"{where} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint does not hold: it holds tensors, "
        "numbers, strings, and lists, tuples, sets and dicts of them (numpy: torch.from_numpy(x))"
    )


def _plain_dict(content: Any, where: str) -> Any:
    taken = {
        plain(key, f"the key {key!r} of {where}"): plain(value, f"{where}[{key!r}]") for key, value in content.items()
    }
    if all(map(operator.is_, taken, content)) and all(map(operator.is_, taken.values(), content.values())):
        return content
    copied = copy.copy(content)  # with what else is known of it: a state_dict's versions
    copied.clear()
    copied.update(taken)
    return copied
