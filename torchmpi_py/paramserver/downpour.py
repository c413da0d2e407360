"""Downpour SGD: workers send accumulated gradient steps, and now and then take the server's parameters for their own.

Source: Dean et al., Large Scale Distributed Deep Networks (2012); TorchMPI's ``DownpourUpdate`` (reference 5.9), which
counted the steps before the server was seeded once more per worker. As in the paper, the step can also be the server's:
Adagrad there adapts to what all workers send.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from torchmpi_py.paramserver import lists, rules
from torchmpi_py.paramserver.update import Update


class DownpourUpdate(Update):
    """Gradients are summed step by step, and sent; every ``update_frequency`` steps the server's parameters are taken.

    Every ``send_frequency`` steps ``local_update(sum)`` turns the sum, in place, into what is added to the server
    (``lambda g: g.mul_(-lr)``), and the sum begins anew.

    optimizer: let the server do a step of this optimizer ("sgd", "adagrad", "adam") with each sum that it is sent, by
        ``optimizer_options`` (such as ``{"lr": 0.01}``; may be changed between steps). ``local_update`` then is
        optional, and what it makes is taken for a gradient.

    Other arguments as for ``Update``.
    """

    def __init__(
        self,
        network: torch.nn.Module,
        *,
        local_update: Callable[[Tensor], object] | None = None,
        optimizer: str | None = None,
        optimizer_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.optimizer_options = dict(optimizer_options or {})
        if not callable(local_update) and (local_update is not None or optimizer is None):
            raise TypeError(
                f"local_update={local_update!r}: give a function, such as lambda g: g.mul_(-lr), or "
                'optimizer="adagrad" for the server to do the step'
            )
        if optimizer is not None:
            rules.optimizer(optimizer)
            for dtype in {p.dtype for p in network.parameters() if p.requires_grad}:
                rules.checked(optimizer, self.optimizer_options, dtype, optimizer)
        elif self.optimizer_options:
            raise TypeError(f"optimizer_options={self.optimizer_options} are for an optimizer, and none is given")
        super().__init__(network, **options)
        self.local_update = local_update
        self.server_optimizer = optimizer
        self._sums: list[Tensor] = []

    def begin(self, served: lists.ServedTensors) -> None:
        """What was computed before the server was seeded is in its values already."""
        self._sums = [torch.zeros_like(p, requires_grad=False) for p in self.parameters]

    def follow(self, served: lists.ServedTensors, step: int) -> None:
        """Add the gradients of a step, but those of the step in which the server was seeded."""
        if step > self.timetable.init_delay:
            for total, p in zip(self._sums, self.parameters, strict=True):
                if p.grad is not None:
                    total.add_(p.grad)

    def integrate(self, served: lists.ServedTensors) -> None:
        """The server's values take the place of the parameters."""
        lists.integrate_tensors(served, lambda fetched, p: p.copy_(fetched))

    def send(self, served: lists.ServedTensors) -> None:
        """Send what the steps since the last time amount to."""
        rule = self.server_optimizer or "add"
        lists.send_tensors(served, self._sums, rule, self.local_update, **self.optimizer_options)
        for total in self._sums:
            total.zero_()
