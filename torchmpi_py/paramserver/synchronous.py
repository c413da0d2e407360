"""A synchronous parameter server: one step of one optimizer, whose work and whose state are spread over the ranks.

A step: all add their gradients, divided by the number of ranks, to a server; they meet; each rank does the optimizer's
step of its own part of the parameters, with the state that it alone keeps; they meet; all fetch the new parameters. So
every rank sends and receives each number once, and keeps 1/n of the optimizer's state.

Source: Li et al.: Scaling distributed machine learning with the parameter server (2014), and TensorFlow's synchronous
replicas.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchmpi_py.core.communicators import Communicator, resolve
from torchmpi_py.core.handles import wait_all
from torchmpi_py.errors import ParameterServerError
from torchmpi_py.paramserver import agreement, rules, tensor_lists


class SynchronousUpdate:
    """``update()`` after ``backward`` takes the place of ``optimizer.step()``. Made, called and freed collectively.

    optimizer: "sgd", "adagrad", "adam", or a rule with slots that was registered.
    comm: the ranks that train together; by default those of the current level.
    options: the optimizer's, such as ``lr=0.1``. They may be changed between steps, alike on all ranks, in ``options``.

    All ranks get rank 0's parameters when it is made. A parameter without gradient on a rank counts as zero there,
    and a sparse one is sent as a dense one. Buffers (of BatchNorm, say) stay each rank's own.
    """

    def __init__(
        self,
        network: torch.nn.Module,
        *,
        optimizer: str = "sgd",
        comm: Communicator | None = None,
        **options: Any,
    ) -> None:
        self._comm = resolve(comm)
        self.parameters: list[Tensor] = [p for p in network.parameters() if p.requires_grad]
        self.optimizer, self.options = optimizer, options
        self._check(network)
        self.is_free = False
        self.served = tensor_lists.init_tensors(self.parameters, comm=self._comm, optimizer=optimizer)
        self._gradients = tensor_lists.init_tensors(
            [torch.zeros_like(p, requires_grad=False) for p in self.parameters], comm=self._comm
        )
        self._fetch()

    def update(self, step: int | None = None) -> None:
        """One step with the mean of all ranks' gradients. Collective. The number of the step is not needed."""
        if self.is_free:
            raise ParameterServerError("update: this SynchronousUpdate was freed; make another")
        gradients = [_gradient(p) for p in self.parameters]
        wait_all(tensor_lists.send_tensors(self._gradients, gradients, "scaled_add", scale=1 / self._comm.size))
        agreement.wait_for_all(self._comm, "SynchronousUpdate.update")  # all gradients are there
        wait_all(
            [
                pack.server.take_in(sums.server, self.optimizer, **self.options)
                for pack, sums in zip(self.served.packs, self._gradients.packs, strict=True)
            ]
        )
        agreement.wait_for_all(self._comm, "SynchronousUpdate.update")  # all parts have done the step
        self._fetch()

    def free(self) -> None:
        """Free the servers. Collective; idempotent."""
        self.is_free = True
        self._gradients.free()
        self.served.free()

    def _fetch(self) -> None:
        tensor_lists.integrate_tensors(self.served, lambda fetched, p: p.copy_(fetched))

    def _check(self, network: torch.nn.Module) -> None:
        """RanksDisagree, ValueError or TypeError, on every rank, unless all give the same, and it will do."""
        agreement.check_alike(self._comm, "SynchronousUpdate", {"optimizer": f"{self.optimizer!r}, {self.options}"})
        agreement.check_trained(self._comm, "SynchronousUpdate", network)
        rules.optimizer(self.optimizer)
        for dtype in {p.dtype for p in self.parameters}:
            rules.checked(self.optimizer, self.options, dtype, self.optimizer)


def _gradient(p: Tensor) -> Tensor:
    """As it is sent."""
    if p.grad is None:
        return torch.zeros_like(p)
    return p.grad if p.grad.layout is torch.strided else p.grad.to_dense()
