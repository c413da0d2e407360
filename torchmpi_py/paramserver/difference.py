"""Exchange of weight differences: a worker sends how far its parameters have moved, and adds how far the others' have.

Every worker remembers its *base*, the server's values as it fetched them last. In an exchange it sends the difference
of its parameters from the base, scaled, and then asks for the server's values. It trains on while they are under way.
When they arrive it adds to its parameters what they are beyond the parameters at the time of the send, so what it has
learned since is kept; and the server's values are the new base.

After multi-node Caffe, whose solvers exchanged differences of weights between nodes, each shared by the threads of a
node. Here ranks that share their parameters (``Hogwild``) take the place of the threads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchmpi_py.paramserver import tensor_lists
from torchmpi_py.paramserver.update import Update, copy_all, refuse_options
from torchmpi_py.runtime.process import barrier


class DifferenceUpdate(Update):
    """Differences are sent ``prefetch`` steps before the server's values come in, which is every ``update_frequency``.

    Args:
        scale: factor that the server applies to a difference (default: 1 / number of workers, so that the server moves
            as far as the workers do on average).
        shares_memory: whether the ranks of a group (``dataparallel_communicator``) share their parameters. The root
            then sends nothing to the others, and the changes that the others make meanwhile are kept.

    Other arguments as for ``Update``, without ``send_frequency``: the send belongs to the exchange.
    """

    def __init__(
        self, network: torch.nn.Module, *, scale: float | None = None, shares_memory: bool = False, **options: Any
    ) -> None:
        refuse_options("DifferenceUpdate", options, ["send_frequency"], "it sends when it begins to fetch")
        super().__init__(network, **options)
        if shares_memory and self.group is None:
            raise ValueError(
                "shares_memory=True: give the level whose groups share parameters as dataparallel_communicator"
            )
        self.check_alike(shares_memory=shares_memory)
        self.scale = 1 / self.num_workers if scale is None else scale
        self.shares_memory = shares_memory
        self._base: list[Tensor] = []
        self._when_sent: list[Tensor] = []  # while an exchange is under way

    def begin(self, served: tensor_lists.ServedTensors) -> None:
        """The first base of all workers is the server's first values. Collective."""
        if self.is_root:
            bases: dict[Tensor, Tensor] = {}
            tensor_lists.integrate_tensors(served, lambda fetched, p: bases.update({p: fetched.clone()}))
            self._base = [bases[p] for p in self.parameters]
        barrier(self.sharding)  # nobody sends before all have the base

    def prefetch(self, served: tensor_lists.ServedTensors) -> None:
        """Send the difference, and ask for the values that the server has after that."""
        since = self._when_sent or self._base  # an exchange under way has sent its part already
        self._when_sent = [p.detach().clone() for p in self.parameters]
        moved = [now - then for now, then in zip(self._when_sent, since, strict=True)]
        tensor_lists.send_tensors(served, moved, "scaled_add", scale=self.scale)
        tensor_lists.prefetch_tensors(served)

    def integrate(self, served: tensor_lists.ServedTensors) -> None:
        """Move by what the server's values are beyond the parameters that were sent."""
        if not self._when_sent:  # take_result has ended the exchange
            self.prefetch(served)
        indices: dict[Tensor, int] = {p: index for index, p in enumerate(self.parameters)}

        def move(fetched: Tensor, p: Tensor) -> None:
            index = indices[p]
            p.add_(fetched - self._when_sent[index])
            self._base[index].copy_(fetched)

        tensor_lists.integrate_tensors(served, move)
        self._when_sent = []

    def adopt(self, served: tensor_lists.ServedTensors) -> None:
        """Replace the parameters by the server's values, which are the new base."""
        super().adopt(served)
        copy_all(self._base, self.parameters)
        self._when_sent = []

    def send_rest(self, served: tensor_lists.ServedTensors) -> None:
        """Begin an exchange, if the parameters have moved."""
        since = self._when_sent or self._base
        if not all(torch.equal(p.detach(), then) for p, then in zip(self.parameters, since, strict=True)):
            self.prefetch(served)

    def share(self) -> None:
        """Give the group the root's parameters, unless the group has one copy of them. Collective over the group."""
        if not self.shares_memory:
            super().share()

    def free(self) -> None:
        """Free the server, and the base."""
        super().free()
        self._base, self._when_sent = [], []

    def worker_state(self) -> dict[str, Any]:
        """The base, and the parameters as sent in an exchange that is under way."""
        return {"base": [x.clone() for x in self._base], "when_sent": [x.clone() for x in self._when_sent]}

    def load_worker_state(self, state: dict[str, Any]) -> None:
        """Go on from a saved base; an exchange that was under way is completed."""
        copy_all(self._base, state["base"])
        self._when_sent = [
            p.detach().clone().copy_(x) for p, x in zip(self.parameters, state["when_sent"], strict=False)
        ]
