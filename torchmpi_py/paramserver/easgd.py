"""Elastic averaging SGD: workers and a centre, the server's values, attract each other.

In an exchange of worker i with the centre c, with a = beta / number of workers: d = a (c - x_i), x_i += d, c -= d.
The sum of all workers and the centre does not change. Between exchanges each worker trains alone.

EAMSGD is the form in which workers train with Nesterov's momentum: v' = m v - lr g(x + m v), x' = x + v'. Elastic is x.
torch's optimizer keeps p = x + m v as the parameters, for the next gradient is taken there, and
b = -v / lr as its ``momentum_buffer``. So x = p + lr m b, and p and x move by the same amount.

Source: Zhang, Choromanska, LeCun: Deep learning with elastic averaging SGD (2015). TorchMPI's ``EASGDUpdate``
(reference 5.10) computed what to send, and never sent it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchmpi_py.paramserver import tensor_lists
from torchmpi_py.paramserver.update import Update, refuse_options


class EASGDUpdate(Update):
    """An exchange every ``update_frequency`` steps, with the centre as it was ``prefetch`` steps before.

    beta: how far all workers together move the centre towards their mean, 0 < beta < 1. Other arguments as for
    ``Update``, without ``send_frequency``: the send belongs to the exchange.
    """

    def __init__(self, network: torch.nn.Module, *, beta: float = 0.9, **options: Any) -> None:
        refuse_options(type(self).__name__, options, ["send_frequency"], "it sends whenever it integrates")
        if not 0 < beta < 1:
            raise ValueError(f"beta={beta}: give a number between 0 and 1")
        super().__init__(network, **options)
        self.beta = beta

    def integrate(self, served: tensor_lists.ServedTensors) -> None:
        """Move towards the centre, and let the centre move as far towards this worker."""
        differences: dict[Tensor, Tensor] = {}

        def attract(centre: Tensor, p: Tensor) -> None:
            step = (centre - self.position(p)).mul_(self.beta / self.num_workers)
            p.add_(step)
            differences[p] = step.neg_()

        tensor_lists.integrate_tensors(served, attract)
        tensor_lists.send_tensors(served, [differences[p] for p in served.tensors], "add")

    def position(self, p: Tensor) -> Tensor:
        """The part of a parameter that the centre attracts."""
        return p


class EAMSGDUpdate(EASGDUpdate):
    """EASGD for workers that train with momentum, which is taken off the parameters in an exchange with the centre.

    optimizer: the ``torch.optim.SGD(..., momentum=m, nesterov=True)`` that trains all of the network and nothing else.
    Each worker keeps its own momentum. The learning rate may change from step to step. Other arguments as for
    ``EASGDUpdate``.
    """

    def __init__(self, network: torch.nn.Module, optimizer: torch.optim.SGD, **options: Any) -> None:
        _check_optimizer(optimizer, network)
        super().__init__(network, **options)
        self.optimizer = optimizer
        self._group_of: dict[Tensor, dict[str, Any]] = {}

    def integrate(self, served: tensor_lists.ServedTensors) -> None:
        """As for EASGD, with the learning rate and momentum of this step."""
        self._group_of = {p: group for group in self.optimizer.param_groups for p in group["params"]}
        super().integrate(served)

    def position(self, p: Tensor) -> Tensor:
        """The worker's position without the look-ahead of Nesterov's momentum."""
        buffer = self.optimizer.state[p].get("momentum_buffer") if p in self.optimizer.state else None
        if buffer is None:  # no gradient so far
            return p
        group = self._group_of[p]
        return p.add(buffer, alpha=float(group["lr"] * group["momentum"]))


def _check_optimizer(optimizer: object, network: torch.nn.Module) -> None:
    """TypeError or ValueError unless ``optimizer`` is SGD with Nesterov's momentum for the trained parameters alone."""
    remedy = "give the torch.optim.SGD(network.parameters(), lr=..., momentum=..., nesterov=True) that trains it"
    if not isinstance(optimizer, torch.optim.SGD):
        raise TypeError(f"EAMSGDUpdate: optimizer={optimizer!r}: {remedy}")
    for group in optimizer.param_groups:
        if not group["nesterov"]:
            raise ValueError(
                f"EAMSGDUpdate: the optimizer has momentum={group['momentum']} and nesterov=False: {remedy}; for other "
                "optimizers there is EASGDUpdate"
            )
    held = {p for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    trained = {p: name for name, p in network.named_parameters() if p.requires_grad}
    if missing := [name for p, name in trained.items() if p not in held]:
        raise ValueError(
            f"EAMSGDUpdate: the optimizer lacks parameters of the network ({', '.join(missing)}): {remedy}"
        )
    if others := len(held - set(trained)):
        raise ValueError(
            f"EAMSGDUpdate: the optimizer holds {others} parameters that are not the network's, and which would not be "
            f"exchanged: {remedy}"
        )
