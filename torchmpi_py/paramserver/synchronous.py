"""Synchronous training with parameter servers: in every exchange, all ranks wait for the slowest rank.

This method is the baseline for asynchronous training. ``SynchronousUpdate`` distributes the work and the state of one
optimizer over n ranks. All ranks add their gradients, divided by n, to a server. Each rank takes the optimizer's step
for its own shard of the parameters, and only this rank keeps the state for this shard. Then all ranks fetch the new
parameters. So every rank sends each gradient once, receives each parameter once, and keeps 1/n of the optimizer's
state. The alternative, an allreduce and a whole optimizer on every rank, needs the whole state on every rank.

Source: Li et al.: Scaling distributed machine learning with the parameter server (2014), and the synchronous replicas
of TensorFlow.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchmpi_py.core.communicators import Communicator, resolve
from torchmpi_py.core.handles import wait_all
from torchmpi_py.errors import ParameterServerError
from torchmpi_py.paramserver import rules, tensor_lists
from torchmpi_py.paramserver.update import check_alike, check_trained, wait_for_all


class SynchronousUpdate:
    """Train synchronously with parameter servers: ``update()`` after ``backward`` replaces ``optimizer.step()``.

    All ranks of ``comm`` must call the constructor, ``update`` and ``free``. The constructor **overwrites** the
    parameters with rank 0's values. If a parameter has no gradient on a rank, this rank sends zeros. A sparse gradient
    is sent as a dense tensor. Buffers, such as the statistics of BatchNorm, stay separate on each rank.

    Args:
        network (torch.nn.Module): network to train, with the same parameters on every rank.
        optimizer (str): optimizer of the server: "sgd" (default), "adagrad", "adam", or a name that ``register_rule``
            registered with ``num_slots``.
        comm (Communicator): communicator whose ranks train together. Default None, the current level.
        **options: options of the optimizer, such as ``lr=0.1``. To change an option between steps, set the same value
            in the attribute ``options`` on all ranks.

    Raises:
        TypeError: the optimizer does not accept the options.
        ValueError: the optimizer is unknown, or an option has an invalid value.
        RanksDisagree: the ranks pass different arguments, or train different parameters. Raised on every rank.

    Examples:
        >>> network = torch.nn.Linear(4, 2)
        >>> optimizer = mpi.paramserver.SynchronousUpdate(network, optimizer="adam", lr=0.01)
        >>> for step in range(3):
        ...     network.zero_grad()
        ...     loss = network(torch.randn(8, 4)).square().mean()
        ...     loss.backward()
        ...     optimizer.update()
        >>> optimizer.free()

    Source: Li et al.: Scaling distributed machine learning with the parameter server (2014).
    """

    def __init__(
        self, network: torch.nn.Module, *, optimizer: str = "sgd", comm: Communicator | None = None, **options: Any
    ) -> None:
        self._comm = resolve(comm)
        self.parameters: list[Tensor] = [p for p in network.parameters() if p.requires_grad]
        self.optimizer, self.options = optimizer, options
        check_alike(self._comm, "SynchronousUpdate", {"optimizer": f"{optimizer!r}, {options}"})
        check_trained(self._comm, "SynchronousUpdate", network)
        rules.check_optimizer(optimizer, options, self.parameters)
        self.is_free = False
        self.served = tensor_lists.init_tensors(self.parameters, comm=self._comm, optimizer=optimizer)
        self._gradients = tensor_lists.init_tensors(
            [torch.zeros_like(p, requires_grad=False) for p in self.parameters], comm=self._comm
        )
        self._fetch()

    def update(self, step: int | None = None) -> None:
        """Take one step of the optimizer with the mean of all ranks' gradients. All ranks must call it.

        **Overwrites** the parameters of the network.

        Args:
            step (int): ignored. With this argument, the method can replace ``Update.update``.

        Raises:
            ParameterServerError: this object was freed.
            RuntimeError: a parameter was frozen after this object was created.
        """
        if self.is_free:
            raise ParameterServerError("update: this SynchronousUpdate was freed; create a new one")
        if frozen := [number for number, p in enumerate(self.parameters) if not p.requires_grad]:
            raise RuntimeError(
                f"update: parameter {frozen[0]} was frozen after this SynchronousUpdate was created, but the state of "
                "the optimizer would still change the parameter; call free(), and create a new SynchronousUpdate"
            )
        gradients = [_gradient(p) for p in self.parameters]
        wait_all(tensor_lists.send_tensors(self._gradients, gradients, "scaled_add", scale=1 / self._comm.size))
        wait_for_all(self._comm, "SynchronousUpdate.update")  # The sums must contain all ranks' gradients.
        wait_all(
            [
                pack.server.take_in(sums.server, self.optimizer, **self.options)
                for pack, sums in zip(self.served.packs, self._gradients.packs, strict=True)
            ]
        )
        wait_for_all(self._comm, "SynchronousUpdate.update")  # All shards must have taken the step.
        self._fetch()

    def free(self) -> None:
        """Free the servers. All ranks must call it. Repeated calls have no effect."""
        self.is_free = True
        self._gradients.free()
        self.served.free()

    def _fetch(self) -> None:
        tensor_lists.integrate_tensors(self.served, lambda fetched, p: p.copy_(fetched))


def _gradient(p: Tensor) -> Tensor:
    """Return the dense gradient of a parameter, or zeros if it has no gradient."""
    if p.grad is None:
        return torch.zeros_like(p)
    return p.grad if p.grad.layout is torch.strided else p.grad.to_dense()
