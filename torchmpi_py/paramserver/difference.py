"""Exchange of weight differences: workers tell the server how far they have come, and take over what others have.

Every worker remembers its *base*, the server's values as it last got them. In an exchange it sends how far its
parameters have moved from the base, scaled; behind that it asks for the server's values. While they are on their way it
trains on. When they are there it adds to its parameters what they are beyond the parameters as they were when it sent,
so what it has learned since is kept; and they are the new base.

After multi-node Caffe, whose solvers exchanged differences of weights between nodes this way, each shared by the
threads of a node. Here those are ranks that share their parameters (``Hogwild``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchmpi_py.paramserver import tensor_lists
from torchmpi_py.paramserver.update import Update
from torchmpi_py.runtime.process import barrier


class DifferenceUpdate(Update):
    """Differences are sent ``prefetch`` steps before the server's values come in, which is every ``update_frequency``.

    scale: a difference counts so many times at the server; by default once over the number of workers, so that it moves
        as far as the workers on average.
    shares_memory: the ranks of a group (``dataparallel_communicator``) share their parameters, so the others need not
        be sent what their root has taken in, and what they do meanwhile is kept.

    Other arguments as for ``Update``, without ``send_frequency``: what is sent belongs to the exchange.
    """

    def __init__(
        self, network: torch.nn.Module, *, scale: float | None = None, shares_memory: bool = False, **options: Any
    ) -> None:
        if "send_frequency" in options:
            raise TypeError("DifferenceUpdate takes no send_frequency: it sends when it begins to fetch")
        super().__init__(network, **options)
        if shares_memory and self.group is None:
            raise ValueError(
                "shares_memory=True: give the level whose groups share parameters as dataparallel_communicator"
            )
        self.check_alike(shares_memory=shares_memory)
        self.scale = 1 / self.num_workers if scale is None else scale
        self.shares_memory = shares_memory
        self._base: list[Tensor] = []
        self._when_sent: list[Tensor] = []  # while an exchange is on its way

    def begin(self, served: tensor_lists.ServedTensors) -> None:
        """The base of all are the values with which the server was seeded."""
        if self.is_root:
            bases: dict[Tensor, Tensor] = {}
            tensor_lists.integrate_tensors(served, lambda fetched, p: bases.update({p: fetched.clone()}))
            self._base = [bases[p] for p in self.parameters]
        barrier(self.sharding)  # nobody sends before all have them

    def prefetch(self, served: tensor_lists.ServedTensors) -> None:
        """Send how far the parameters have come, and ask for what the server has after that."""
        since = self._when_sent or self._base  # what was sent in an exchange that is not over is not sent again
        self._when_sent = [p.detach().clone() for p in self.parameters]
        moved = [now - then for now, then in zip(self._when_sent, since, strict=True)]
        tensor_lists.send_tensors(served, moved, "scaled_add", scale=self.scale)
        tensor_lists.prefetch_tensors(served)

    def integrate(self, served: tensor_lists.ServedTensors) -> None:
        """Move by what the server has beyond what was sent."""
        if not self._when_sent:  # the result was taken in between
            self.prefetch(served)
        places: dict[Tensor, int] = {p: index for index, p in enumerate(self.parameters)}

        def take(fetched: Tensor, p: Tensor) -> None:
            index = places[p]
            p.add_(fetched - self._when_sent[index])
            self._base[index].copy_(fetched)

        tensor_lists.integrate_tensors(served, take)
        self._when_sent = []

    def adopt(self, served: tensor_lists.ServedTensors) -> None:
        """The server's values, which are the new base."""
        super().adopt(served)
        for base, p in zip(self._base, self.parameters, strict=True):
            base.copy_(p.detach())
        self._when_sent = []

    def send_rest(self, served: tensor_lists.ServedTensors) -> None:
        """An exchange, if the parameters have moved."""
        since = self._when_sent or self._base
        if not all(torch.equal(p.detach(), then) for p, then in zip(self.parameters, since, strict=True)):
            self.prefetch(served)

    def share(self) -> None:
        """As for every update, unless the group has one copy of the parameters."""
        if not self.shares_memory:
            super().share()

    def free(self) -> None:
        """Free the server, and what it was compared with."""
        super().free()
        self._base, self._when_sent = [], []

    def worker_state(self) -> dict[str, Any]:
        """The base, and what was sent in an exchange that is not over."""
        return {"base": [x.clone() for x in self._base], "when_sent": [x.clone() for x in self._when_sent]}

    def load_worker_state(self, state: dict[str, Any]) -> None:
        """Go on from the base that was saved; an exchange that was on its way is completed."""
        for base, saved in zip(self._base, state["base"], strict=True):
            base.copy_(saved)
        self._when_sent = [
            p.detach().clone().copy_(x) for p, x in zip(self.parameters, state["when_sent"], strict=False)
        ]
