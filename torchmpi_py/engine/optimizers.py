"""Which optimizer a training run is given."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, cast

import torch

from torchmpi_py.engine.state import State

OptimizerLike = torch.optim.Optimizer | Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


def check_one_given(lr: float | None, optimizer: OptimizerLike | None) -> None:
    """ValueError unless exactly one of them is given."""
    if (lr is None) == (optimizer is None):
        raise ValueError(
            f"train(lr={lr!r}, optimizer={optimizer!r}): give exactly one of them; lr=0.1 for plain SGD, "
            "lr=0 for no update, or optimizer=torch.optim.Adam(network.parameters())"
        )


def make_optimizer(state: State, lr: float | None, optimizer: OptimizerLike | None) -> torch.optim.Optimizer | None:
    """The optimizer asked for. Made after the session has placed the parameters on their device."""
    if lr is not None:
        return torch.optim.SGD(state.parameters(), lr=lr) if lr != 0 else None
    if hasattr(optimizer, "step") and not isinstance(optimizer, type):
        return _checked(optimizer)
    if callable(optimizer):
        return _checked(optimizer(state.parameters()))
    raise TypeError(f"optimizer={optimizer!r} is neither a torch optimizer nor a function from parameters to one")


def _checked(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer, if its ``step`` can be called as the loop calls it: without a closure."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise TypeError(
            f"optimizer: {type(optimizer).__name__}.step needs a closure, to compute several gradients per step; the "
            "engine computes one per sample: give an optimizer that needs none, such as torch.optim.SGD or Adam"
        )
    return cast(torch.optim.Optimizer, optimizer)
