"""The rules of parameter servers that the bench knows, and the same done locally, on a private tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

Local = Callable[[Tensor], Callable[[Tensor], object]]  # a private tensor: a function that takes a payload into it


class ServerRule(NamedTuple):
    """A rule with options. commutes: whether the sends of several ranks may come in any order, exactly."""

    name: str
    local: Local
    options: dict[str, Any]
    commutes: bool = False
    optimizer: str | None = None
    tolerance: float = 0.0  # relative


def _average(x: Tensor) -> Callable[[Tensor], object]:
    times = 0

    def take(payload: Tensor) -> None:
        nonlocal times
        times += 1
        x.lerp_(payload, 1 / times)

    return take


def _optimizer(name: str, make: Callable[..., torch.optim.Optimizer], **options: Any) -> ServerRule:
    def local(x: Tensor) -> Callable[[Tensor], object]:
        parameter = torch.nn.Parameter(x)
        optimizer = make([parameter], foreach=False, **options)

        def take(payload: Tensor) -> None:
            parameter.grad = payload
            optimizer.step()

        return take

    return ServerRule(name, local, options, optimizer=name, tolerance=1e-4)


RULES = {
    rule.name: rule
    for rule in (
        ServerRule("zero", lambda x: lambda payload: x.zero_(), {}, commutes=True),
        ServerRule("copy", lambda x: x.copy_, {}),
        ServerRule("add", lambda x: x.add_, {}, commutes=True),
        ServerRule("scaled_add", lambda x: lambda payload: x.add_(payload, alpha=-2.0), {"scale": -2.0}, commutes=True),
        ServerRule("average", _average, {}, tolerance=1e-5),
        ServerRule("elastic", lambda x: lambda payload: x.lerp_(payload, 0.5), {"weight": 0.5}, tolerance=1e-5),
        _optimizer("sgd", torch.optim.SGD, lr=0.1, momentum=0.5),
        _optimizer("adagrad", torch.optim.Adagrad, lr=0.1),
        _optimizer("adam", torch.optim.Adam, lr=0.1),
    )
}
