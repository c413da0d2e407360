"""Training in step: all ranks wait for the slowest one in every exchange. The baseline for asynchronous training.

``SynchronousUpdate`` spreads one step of one optimizer, its work and its state, over the ranks: all ranks add their
gradients, divided by the number of ranks, to a server; each rank does the optimizer's step on its own part of the
parameters, with the state that it alone keeps; all fetch the new parameters. So every rank sends and receives each
number once, and keeps 1/n of the optimizer's state. Source: Li et al.: Scaling distributed machine learning with the
parameter server (2014), and TensorFlow's synchronous replicas.
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
    """``update()`` after ``backward`` takes the place of ``optimizer.step()``. Made, called and freed collectively.

    optimizer: "sgd", "adagrad", "adam", or a registered rule with slots.
    comm: the ranks that train together; by default those of the current level.
    options: the optimizer's, such as ``lr=0.1``. They may be changed between steps, alike on all ranks, in ``options``.

    The constructor gives all ranks rank 0's parameters. A parameter without gradient on a rank counts as zero there,
    and a sparse gradient is sent as a dense one. Buffers (of BatchNorm, say) stay each rank's own.

    Raises, on every rank, RanksDisagree for arguments or parameters that differ between ranks, ValueError or TypeError
    for an unknown optimizer, or options that it does not take.
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
        """One step with the mean of all ranks' gradients. Collective. The number of the step is not needed."""
        if self.is_free:
            raise ParameterServerError("update: this SynchronousUpdate was freed; make another")
        if frozen := [number for number, p in enumerate(self.parameters) if not p.requires_grad]:
            raise RuntimeError(
                f"trained parameter {frozen[0]} was frozen after the SynchronousUpdate was made, which would still "
                "move it by its moments: free() this one, and make another"
            )
        gradients = [_gradient(p) for p in self.parameters]
        wait_all(tensor_lists.send_tensors(self._gradients, gradients, "scaled_add", scale=1 / self._comm.size))
        wait_for_all(self._comm, "SynchronousUpdate.update")  # all gradients are there
        wait_all(
            [
                pack.server.take_in(sums.server, self.optimizer, **self.options)
                for pack, sums in zip(self.served.packs, self._gradients.packs, strict=True)
            ]
        )
        wait_for_all(self._comm, "SynchronousUpdate.update")  # all parts have done the step
        self._fetch()

    def free(self) -> None:
        """Free the servers. Collective; idempotent."""
        self.is_free = True
        self._gradients.free()
        self.served.free()

    def _fetch(self) -> None:
        tensor_lists.integrate_tensors(self.served, lambda fetched, p: p.copy_(fetched))


def _gradient(p: Tensor) -> Tensor:
    """The dense gradient of a parameter; zero if it has none."""
    if p.grad is None:
        return torch.zeros_like(p)
    return p.grad if p.grad.layout is torch.strided else p.grad.to_dense()
