"""Exchange of weight differences: a worker sends the change of its parameters, and adds the other workers' changes.

Every worker keeps a *base*: the server's values at the worker's last fetch. In an exchange, the worker sends the scaled
difference between its parameters and the base, starts to fetch the server's values, and continues to train. When the
values arrive, the worker adds to its parameters the difference between the values and the parameters at the time of the
send. So the steps since the send are not lost. The fetched values become the new base. The alternative, replacing the
parameters by the server's values, would lose the steps between the send and the arrival.

The method comes from multi-node Caffe, whose solvers exchange weight differences between nodes, while the threads of a
node share the weights. Here, ranks that share their parameters with ``Hogwild`` replace the threads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchmpi_py.paramserver import tensor_lists
from torchmpi_py.paramserver.update import Update, copy_all, refuse_options
from torchmpi_py.runtime.process import barrier


class DifferenceUpdate(Update):
    """Exchange weight differences with the server every ``update_frequency`` steps, while training continues.

    A worker sends its difference ``prefetch`` steps before it integrates the server's values, and keeps the steps that
    it takes in between. All ranks of the sharding level must call the constructor. Call ``update(step)`` after each
    optimizer step, as described for ``Update``.

    Args:
        network (torch.nn.Module): network to train. The server holds its trainable parameters.
        scale (float): factor that the server applies to a difference. Default None, 1 / number of workers, which moves
            the server by the mean of the workers' changes.
        shares_memory (bool): whether the ranks of a group (``dataparallel_communicator``) share their parameters, for
            example with ``Hogwild``. If they do, the root sends no parameters to the group, and the steps of the other
            ranks during an exchange are not lost. Default False.
        **options: other arguments of ``Update``: ``update_frequency``, ``init_delay``, ``prefetch``,
            ``sharding_communicator`` and ``dataparallel_communicator``. ``send_frequency`` is not accepted, because
            every exchange sends.

    Raises:
        TypeError: ``send_frequency`` was passed.
        ValueError: ``shares_memory`` is True without a ``dataparallel_communicator``, or a number of steps is out of
            range.
        RanksDisagree: the ranks pass different settings, or train different parameters.

    Examples:
        >>> network = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        >>> difference = mpi.paramserver.DifferenceUpdate(network, init_delay=0, update_frequency=3, prefetch=1)
        >>> for step in range(7):
        ...     optimizer.zero_grad()
        ...     loss = network(torch.randn(8, 4)).square().mean()
        ...     loss.backward()
        ...     optimizer.step()
        ...     difference.update(step)
        >>> difference.take_result()
        >>> difference.free()
    """

    def __init__(
        self, network: torch.nn.Module, *, scale: float | None = None, shares_memory: bool = False, **options: Any
    ) -> None:
        refuse_options("DifferenceUpdate", options, ["send_frequency"], "every exchange sends")
        super().__init__(network, **options)
        if shares_memory and self.group is None:
            raise ValueError(
                "DifferenceUpdate: shares_memory=True needs a dataparallel_communicator; pass the level of the groups"
            )
        self.check_alike(shares_memory=shares_memory)
        self.scale = 1 / self.num_workers if scale is None else scale
        self.shares_memory = shares_memory
        self._base: list[Tensor] = []
        self._when_sent: list[Tensor] = []  # parameters at the time of the send; empty unless an exchange is pending

    def begin(self, served: tensor_lists.ServedTensors) -> None:
        """Fetch the server's first values as the base of this worker. All ranks of the sharding level must call it."""
        if self.is_root:
            bases: dict[Tensor, Tensor] = {}
            tensor_lists.integrate_tensors(served, lambda fetched, p: bases.update({p: fetched.clone()}))
            self._base = [bases[p] for p in self.parameters]
        barrier(self.sharding)  # No rank may send before all ranks have the same base.

    def prefetch(self, served: tensor_lists.ServedTensors) -> None:
        """Send the difference, and then start to fetch the server's values."""
        since = self._when_sent or self._base  # A pending exchange has already sent the difference up to _when_sent.
        self._when_sent = [p.detach().clone() for p in self.parameters]
        changes = [now - then for now, then in zip(self._when_sent, since, strict=True)]
        tensor_lists.send_tensors(served, changes, "scaled_add", scale=self.scale)
        tensor_lists.prefetch_tensors(served)

    def integrate(self, served: tensor_lists.ServedTensors) -> None:
        """Add to the parameters the difference between the server's values and the parameters at the last send."""
        if not self._when_sent:  # take_result may have ended the exchange.
            self.prefetch(served)
        indices: dict[Tensor, int] = {p: index for index, p in enumerate(self.parameters)}

        def move(fetched: Tensor, p: Tensor) -> None:
            index = indices[p]
            p.add_(fetched - self._when_sent[index])
            self._base[index].copy_(fetched)

        tensor_lists.integrate_tensors(served, move)
        self._when_sent = []

    def adopt(self, served: tensor_lists.ServedTensors) -> None:
        """Replace the parameters by the server's values, which become the new base."""
        super().adopt(served)
        copy_all(self._base, self.parameters)
        self._when_sent = []

    def send_rest(self, served: tensor_lists.ServedTensors) -> None:
        """Start an exchange if the parameters have changed since the last send."""
        since = self._when_sent or self._base
        if not all(torch.equal(p.detach(), then) for p, then in zip(self.parameters, since, strict=True)):
            self.prefetch(served)

    def share(self) -> None:
        """Copy the root's parameters to the other ranks of the group, unless the ranks share memory.

        All ranks of the group must call it.
        """
        if not self.shares_memory:
            super().share()

    def free(self) -> None:
        """Free the server and the base. All ranks of the sharding level must call it; repeated calls have no effect."""
        super().free()
        self._base, self._when_sent = [], []

    def worker_state(self) -> dict[str, Any]:
        """Return the base and, if an exchange is pending, the parameters at the time of the send."""
        return {"base": [x.clone() for x in self._base], "when_sent": [x.clone() for x in self._when_sent]}

    def load_worker_state(self, state: dict[str, Any]) -> None:
        """Restore the saved base. A later step completes an exchange that was pending."""
        copy_all(self._base, state["base"])
        self._when_sent = [
            p.detach().clone().copy_(x) for p, x in zip(self.parameters, state["when_sent"], strict=False)
        ]
