"""Downpour SGD: workers send accumulated gradients, and periodically replace their parameters by the server's values.

As in the paper, the server can run an optimizer. So Adagrad, for example, adapts to the gradients of all workers.

Source: Dean et al., Large Scale Distributed Deep Networks (2012). TorchMPI's ``DownpourUpdate`` (reference 5.9) adds
the gradients from before the server's creation once per worker. Here, the server's first values already contain these
gradients.
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
    """Train with Downpour SGD: send sums of gradients, and fetch the parameters every ``update_frequency`` steps.

    Every ``send_frequency`` steps, a worker sends the sum of its gradients since the last send. The server adds the
    result of ``local_update``, or takes a step of the server's optimizer. All ranks of the sharding level must call the
    constructor. A sum that is not finite is not sent, and ``update`` raises ParameterServerError. If a GradScaler skips
    a step, do not call ``update`` for this step, and do not count it.

    Args:
        network (torch.nn.Module): network to train. The server holds its trainable parameters.
        local_update (callable): function that computes the value that the server adds from a sum of gradients, such as
            ``lambda g: g.mul_(-lr)``. It changes the sum in place, or returns another tensor. Without ``optimizer``, it
            is required. With ``optimizer``, its result is the gradient. Default None, the sum itself.
        optimizer (str): optimizer of the server, which takes one step with each sum: "sgd", "adagrad", "adam", or a
            name that ``register_rule`` registered with ``num_slots``. Default None: the server adds.
        optimizer_options (dict): options of the server's optimizer, such as ``{"lr": 0.01}``. Default None, torch's
            defaults. You may change them between steps, in the attribute ``optimizer_options``.
        **options: other arguments of ``Update``: ``update_frequency``, ``init_delay``, ``prefetch``,
            ``send_frequency``, ``sharding_communicator`` and ``dataparallel_communicator``.

    Raises:
        TypeError: ``local_update`` is not callable, or the optimizer does not accept the options.
        ValueError: the optimizer is unknown, or a number is out of range.
        RanksDisagree: the ranks pass different settings, or train different parameters.

    Examples:
        >>> network = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        >>> downpour = mpi.paramserver.DownpourUpdate(
        ...     network, local_update=lambda g: g.mul_(-0.1), init_delay=1, update_frequency=2
        ... )
        >>> for step in range(6):
        ...     optimizer.zero_grad()
        ...     loss = network(torch.randn(8, 4)).square().mean()
        ...     loss.backward()
        ...     optimizer.step()
        ...     downpour.update(step)
        >>> downpour.take_result()
        >>> downpour.free()

    Source: Dean et al., Large Scale Distributed Deep Networks (2012).
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
                f"DownpourUpdate: expected a function, found local_update={local_update!r}; pass a function such as "
                'lambda g: g.mul_(-lr), or omit local_update and choose an optimizer, such as optimizer="adagrad"'
            )
        if optimizer is not None:
            trained = [p for p in network.parameters() if p.requires_grad]
            rules.check_optimizer(optimizer, self.optimizer_options, trained)
        elif self.optimizer_options:
            raise TypeError(f"DownpourUpdate: optimizer_options={optimizer_options} need an optimizer; pass optimizer=")
        super().__init__(network, **options)
        self.local_update = local_update
        self.server_optimizer = optimizer
        self._sums: list[Tensor] = []
        self._num_steps = 0  # number of steps whose gradients are in the sums

    def begin(self, served: tensor_lists.ServedTensors) -> None:
        """Start the sums at zero, because the server's first values contain the gradients of all earlier steps."""
        if self.is_root:
            self._sums = [torch.zeros_like(p, requires_grad=False) for p in self.parameters]

    def follow(self, served: tensor_lists.ServedTensors, step: int) -> None:
        """Add the gradients of a step to the sums, except in the step that creates the server."""
        if step <= self.timetable.init_delay:
            return
        # Check only the first step, because a rank without samples in a later step has no gradients in that step.
        if step == self.timetable.init_delay + 1 and self.parameters and all(p.grad is None for p in self.parameters):
            raise ParameterServerError(
                f"update({step}): no parameter has a gradient; call update after backward and before zero_grad"
            )
        for total, p in zip(self._sums, self.parameters, strict=True):
            if p.grad is not None and p.requires_grad:  # A frozen parameter may still have an old gradient.
                total.add_(p.grad)
        self._num_steps += 1

    def integrate(self, served: tensor_lists.ServedTensors) -> None:
        """Replace the parameters by the server's values."""
        self.adopt(served)

    def send(self, served: tensor_lists.ServedTensors) -> None:
        """Send the sums of the gradients since the last send, and start new sums.

        If a sum is not finite, drop the sums, send nothing, and raise ParameterServerError.
        """
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
                f"DownpourUpdate: the sum of the gradients since the last send (number of steps: {num_steps}) is not "
                "finite, and was dropped. If a GradScaler skips a step, do not call update, and do not count the step"
            )

    def send_rest(self, served: tensor_lists.ServedTensors) -> None:
        """Send the sums if they contain the gradients of at least one step."""
        if self._num_steps > 0:
            self.send(served)

    def free(self) -> None:
        """Free the server and the sums. All ranks of the sharding level must call it; repeated calls have no effect."""
        super().free()
        self._sums = []

    def worker_state(self) -> dict[str, Any]:
        """Return copies of the sums, and the number of steps whose gradients the sums contain."""
        return {"sums": [total.clone() for total in self._sums], "num_steps": self._num_steps}

    def load_worker_state(self, state: dict[str, Any]) -> None:
        """Restore the saved sums and number of steps."""
        copy_all(self._sums, state["sums"])
        self._num_steps = state["num_steps"]

    def _apply_local_update(self, part: Tensor) -> None:
        """Overwrite ``part``, a copy of a sum, with the result of ``local_update``."""
        assert self.local_update is not None, "send passes this function only with a local_update"
        result = self.local_update(part)
        if isinstance(result, Tensor) and result is not part:
            if result.shape != part.shape:
                raise ValueError(
                    f"local_update returned shape {tuple(result.shape)} for a sum of shape {tuple(part.shape)}; "
                    "change the sum in place, or return a tensor of the same shape"
                )
            part.copy_(result)
