"""Elastic averaging SGD: the workers and the centre, which is stored on the server, attract each other.

In an exchange of worker i with the centre c, d = a (c - x_i), x_i += d and c -= d, where a = beta / number of workers.
The sum of all workers and the centre does not change. Between two exchanges, each worker trains alone. The alternative,
replacing a worker's parameters by the server's as Downpour does, would end the worker's exploration at every exchange.

EAMSGD is the version for workers that train with Nesterov's momentum: v' = m v - lr g(x + m v), x' = x + v'. The centre
attracts x. torch's optimizer keeps p = x + m v as the parameters, because the next gradient is computed at p, and keeps
b = -v / lr as its ``momentum_buffer``. So x = p + lr m b, and p and x move by the same amount.

Source: Zhang, Choromanska, LeCun: Deep learning with elastic averaging SGD (2015). TorchMPI's ``EASGDUpdate``
(reference 5.10) computes the difference for the server, but does not send it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchmpi_py.paramserver import tensor_lists
from torchmpi_py.paramserver.update import Update, refuse_options


class EASGDUpdate(Update):
    """Train with elastic averaging SGD: every ``update_frequency`` steps, a worker and the centre attract each other.

    The server holds the centre. An exchange uses the centre's values of ``prefetch`` steps before. All ranks of the
    sharding level must call the constructor. Call ``update(step)`` after each optimizer step, as described for
    ``Update``.

    Args:
        network (torch.nn.Module): network to train. The server holds its trainable parameters.
        beta (float): fraction of the distance to the workers' mean by which all workers together move the centre,
            between 0 and 1. Default 0.9.
        **options: other arguments of ``Update``: ``update_frequency``, ``init_delay``, ``prefetch``,
            ``sharding_communicator`` and ``dataparallel_communicator``. ``send_frequency`` is not accepted, because
            every exchange sends.

    Raises:
        TypeError: ``send_frequency`` was passed.
        ValueError: ``beta`` or a number of steps is out of range.
        RanksDisagree: the ranks pass different settings, or train different parameters.

    Examples:
        >>> network = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        >>> easgd = mpi.paramserver.EASGDUpdate(network, beta=0.9, init_delay=0, update_frequency=2)
        >>> for step in range(5):
        ...     optimizer.zero_grad()
        ...     loss = network(torch.randn(8, 4)).square().mean()
        ...     loss.backward()
        ...     optimizer.step()
        ...     easgd.update(step)
        >>> easgd.take_result()
        >>> easgd.free()

    Source: Zhang, Choromanska, LeCun: Deep learning with elastic averaging SGD (2015).
    """

    def __init__(self, network: torch.nn.Module, *, beta: float = 0.9, **options: Any) -> None:
        refuse_options(type(self).__name__, options, ["send_frequency"], "every exchange sends")
        if not 0 < beta < 1:
            raise ValueError(f"{type(self).__name__}: expected 0 < beta < 1, found beta={beta}; pass 0.9, for example")
        super().__init__(network, **options)
        self.beta = beta

    def integrate(self, served: tensor_lists.ServedTensors) -> None:
        """Move the parameters towards the centre, and the centre towards this worker by the same amount."""
        differences: dict[Tensor, Tensor] = {}

        def attract(centre: Tensor, p: Tensor) -> None:
            step = (centre - self.position(p)).mul_(self.beta / self.num_workers)
            p.add_(step)
            differences[p] = step.neg_()

        tensor_lists.integrate_tensors(served, attract)
        tensor_lists.send_tensors(served, [differences[p] for p in served.tensors], "add")

    def position(self, p: Tensor) -> Tensor:
        """Return the values of a parameter that the centre attracts.

        Args:
            p (Tensor): parameter of the network.

        Returns:
            The parameter itself.
        """
        return p


class EAMSGDUpdate(EASGDUpdate):
    """Train with elastic averaging SGD and Nesterov's momentum.

    An exchange with the centre uses the parameters without the look-ahead of the momentum. Each worker keeps its own
    momentum, and learning rates may change between steps. All ranks of the sharding level must call the
    constructor. Call ``update(step)`` after each optimizer step, as described for ``Update``.

    Args:
        network (torch.nn.Module): network to train. The server holds its trainable parameters.
        optimizer (torch.optim.SGD): optimizer that trains exactly the parameters of ``network``, with ``momentum=`` and
            ``nesterov=True``.
        **options: other arguments of ``EASGDUpdate``: ``beta``, ``update_frequency``, ``init_delay``, ``prefetch``,
            ``sharding_communicator`` and ``dataparallel_communicator``.

    Raises:
        TypeError: ``optimizer`` is not a ``torch.optim.SGD``, or ``send_frequency`` was passed.
        ValueError: ``optimizer`` lacks Nesterov's momentum or has other parameters than the network, or a number is
            out of range.
        RanksDisagree: the ranks pass different settings, or train different parameters.

    Source: Zhang, Choromanska, LeCun: Deep learning with elastic averaging SGD (2015).
    """

    def __init__(self, network: torch.nn.Module, optimizer: torch.optim.SGD, **options: Any) -> None:
        _check_optimizer(optimizer, network)
        super().__init__(network, **options)
        self.optimizer = optimizer
        self._group_of: dict[Tensor, dict[str, Any]] = {}

    def integrate(self, served: tensor_lists.ServedTensors) -> None:
        """Move the worker and the centre towards each other, using the current learning rate and momentum."""
        self._group_of = {p: group for group in self.optimizer.param_groups for p in group["params"]}
        super().integrate(served)

    def position(self, p: Tensor) -> Tensor:
        """Return a parameter without the look-ahead of Nesterov's momentum.

        Args:
            p (Tensor): parameter of the network.

        Returns:
            A new tensor, or the parameter itself before its first gradient.
        """
        buffer = self.optimizer.state[p].get("momentum_buffer") if p in self.optimizer.state else None
        if buffer is None:  # The parameter has had no gradient so far.
            return p
        group = self._group_of[p]
        return p.add(buffer, alpha=float(group["lr"] * group["momentum"]))


def _check_optimizer(optimizer: object, network: torch.nn.Module) -> None:
    """Raise an error unless ``optimizer`` is SGD with Nesterov's momentum for exactly the trained parameters.

    The error is a TypeError for another class, and a ValueError otherwise.
    """
    remedy = "pass torch.optim.SGD(network.parameters(), lr=..., momentum=..., nesterov=True), or use EASGDUpdate"
    if not isinstance(optimizer, torch.optim.SGD):
        raise TypeError(f"EAMSGDUpdate: expected a torch.optim.SGD, found {type(optimizer).__name__}; {remedy}")
    for group in optimizer.param_groups:
        if not group["nesterov"]:
            raise ValueError(
                f"EAMSGDUpdate: the optimizer has momentum={group['momentum']} and nesterov=False; {remedy}"
            )
    optimized = {p for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    trained = {p: name for name, p in network.named_parameters() if p.requires_grad}
    if missing := [name for p, name in trained.items() if p not in optimized]:
        raise ValueError(
            f"EAMSGDUpdate: the optimizer lacks parameters of the network ({', '.join(missing)}); {remedy}"
        )
    if others := len(optimized - set(trained)):
        raise ValueError(
            f"EAMSGDUpdate: the server would not contain all parameters of the optimizer (number of parameters "
            f"outside the network: {others}); {remedy}"
        )
