"""Downpour SGD: workers send accumulated gradient steps, and now and then take the server's parameters for their own.

Source: Dean et al., Large Scale Distributed Deep Networks (2012); TorchMPI's ``DownpourUpdate`` (reference 5.9), which
counted the steps before the server was seeded once more per worker.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchmpi_py.paramserver import lists
from torchmpi_py.paramserver.update import Update


class DownpourUpdate(Update):
    """Gradients are summed step by step, and sent; every ``update_frequency`` steps the server's parameters are taken.

    Every ``send_frequency`` steps ``local_update(sum)`` turns the sum, in place, into what is added to the server
    (``lambda g: g.mul_(-lr)``), and the sum begins anew. Other arguments as for ``Update``.
    """

    def __init__(self, network: torch.nn.Module, *, local_update: Callable[[Tensor], object], **options: Any) -> None:
        super().__init__(network, **options)
        if not callable(local_update):
            raise TypeError(f"local_update={local_update!r}: give a function, such as lambda g: g.mul_(-lr)")
        self.local_update = local_update
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
        """Add what the steps since the last time amount to."""
        lists.send_tensors(served, self._sums, "add", self.local_update)
        for total in self._sums:
            total.zero_()
