"""Downpour SGD: workers send accumulated gradients, and now and then replace their parameters by the server's.

Source: Dean et al., Large Scale Distributed Deep Networks (2012); TorchMPI's ``DownpourUpdate`` (reference 5.9), which
counted the steps before the server was seeded once more per worker. As in the paper, the server can do the step of an
optimizer: Adagrad there adapts to what all workers send.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from torchmpi_py.errors import ParameterServerError
from torchmpi_py.nn.elements import is_finite
from torchmpi_py.paramserver import rules, tensor_lists
from torchmpi_py.paramserver.update import Update, copy_all


class DownpourUpdate(Update):
    """Gradients are summed step by step, and sent; every ``update_frequency`` steps the server's parameters are taken.

    Every ``send_frequency`` steps ``local_update(sum)`` turns the sum, in place, into what is added to the server
    (``lambda g: g.mul_(-lr)``), or returns it; and a new sum begins. A sum that is not finite is not sent, but an
    error: leave out the steps that a GradScaler skips, and do not count them.

    Args:
        optimizer: "sgd", "adagrad" or "adam": the server makes one step of this optimizer with each sum that it
            receives. ``local_update`` is then optional, and its result is used as the gradient.
        optimizer_options: options of that optimizer, such as ``{"lr": 0.01}``. They may be changed between steps.

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
            trained = [p for p in network.parameters() if p.requires_grad]
            rules.check_optimizer(optimizer, self.optimizer_options, trained)
        elif self.optimizer_options:
            raise TypeError(f"optimizer_options={self.optimizer_options} are for an optimizer, and none is given")
        super().__init__(network, **options)
        self.local_update = local_update
        self.server_optimizer = optimizer
        self._sums: list[Tensor] = []
        self._num_steps = 0  # in the sums

    def begin(self, served: tensor_lists.ServedTensors) -> None:
        """Start the sums. The server's first values contain the gradients of the steps before."""
        if self.is_root:
            self._sums = [torch.zeros_like(p, requires_grad=False) for p in self.parameters]

    def follow(self, served: tensor_lists.ServedTensors, step: int) -> None:
        """Add the gradients of a step, except the step that seeds the server."""
        if step <= self.timetable.init_delay:
            return
        # A later step may be one in which this rank has no samples.
        if step == self.timetable.init_delay + 1 and self.parameters and all(p.grad is None for p in self.parameters):
            raise ParameterServerError(
                f"update({step}): no parameter has a gradient; call update before optimizer.zero_grad"
            )
        for total, p in zip(self._sums, self.parameters, strict=True):
            if p.grad is not None and p.requires_grad:  # not one from before the parameter was frozen
                total.add_(p.grad)
        self._num_steps += 1

    def integrate(self, served: tensor_lists.ServedTensors) -> None:
        """Replace the parameters by the server's values."""
        self.adopt(served)

    def send(self, served: tensor_lists.ServedTensors) -> None:
        """Send the sums of the steps since the last send. Sums that are not finite are dropped, and an error."""
        has_overflow = not all(is_finite(total) for total in self._sums)
        if not has_overflow:
            rule = self.server_optimizer or "add"
            local = None if self.local_update is None else self._apply_local_update
            tensor_lists.send_tensors(served, self._sums, rule, local, **self.optimizer_options)
        for total in self._sums:
            total.zero_()
        num_steps, self._num_steps = self._num_steps, 0
        if has_overflow:
            raise ParameterServerError(
                f"DownpourUpdate: the sum of the last {num_steps} gradients is not finite, and was dropped; with a "
                "GradScaler leave out the steps that it skips, and do not count them"
            )

    def send_rest(self, served: tensor_lists.ServedTensors) -> None:
        """Send the sums, if they contain a step."""
        if self._num_steps > 0:
            self.send(served)

    def free(self) -> None:
        """Free the server, and the sums."""
        super().free()
        self._sums = []

    def worker_state(self) -> dict[str, Any]:
        """The sums, and the number of steps in them."""
        return {"sums": [total.clone() for total in self._sums], "num_steps": self._num_steps}

    def load_worker_state(self, state: dict[str, Any]) -> None:
        """Go on with saved sums."""
        copy_all(self._sums, state["sums"])
        self._num_steps = state["num_steps"]

    def _apply_local_update(self, part: Tensor) -> None:
        """``local_update`` on a sum that is sent; the function works in place or returns another tensor."""
        assert self.local_update is not None, "asked for only then"
        made = self.local_update(part)
        if isinstance(made, Tensor) and made is not part:
            if made.shape != part.shape:
                raise ValueError(
                    f"local_update returned shape {tuple(made.shape)} for a sum of shape {tuple(part.shape)}; "
                    "change the sum in place, or return as many numbers"
                )
            part.copy_(made)
