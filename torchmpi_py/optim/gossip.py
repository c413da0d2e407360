"""Averages with partners instead of all ranks: no rank waits for more than two others.

After each step a rank's parameters become a weighted mean of its own and its partners'. The weights are symmetric, and
those of a rank sum to 1: so the average over all ranks stays what it is, and what sets the ranks apart shrinks in each
step, on the ring at least by the factor (1 + 2 cos(2 pi / P)) / 3 of P ranks.

Sources: Boyd et al., Randomized Gossip Algorithms (2006); Lian et al., Can Decentralized Algorithms Outperform
Centralized Algorithms? (2017).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from torchmpi_py.collectives import verbs
from torchmpi_py.core.communicators import Communicator, resolve
from torchmpi_py.core.handles import Handle, wait_all
from torchmpi_py.nn.buckets import grouped
from torchmpi_py.optim.wrapper import LocalOptimizer


class Gossip(LocalOptimizer):
    """``optimizer``, on each rank for itself; after each step parameters become a mean with those of partners.

    Any torch optimizer will do; its state stays each rank's own. Gradients are not reduced. Parameters start equal on
    all ranks (``nn.synchronize_parameters``); every rank takes the same number of steps. ``average`` makes parameters
    equal, as before an evaluation or a checkpoint, and is collective.

    partners: "ring": the two neighbours in rank order, each with the weight 1/3. "random": in each step one other rank,
    drawn from ``seed``, with the weight 1/2; of an odd number of ranks one has none.
    asynchronous: partners get what a rank has after a step while the next one is computed, and the difference between
    the two is added after that: the average over all ranks stays what it is. Nobody waits for a partner that is at most
    a step behind.

    ``finish`` waits for what is under way, and ``average`` and ``state_dict`` do so first; ``load_state_dict``, which
    every rank calls, drops it. Raises ValueError for other partners.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        partners: Literal["ring", "random"] = "ring",
        *,
        asynchronous: bool = False,
        seed: int = 0,
        comm: Communicator | None = None,
    ) -> None:
        super().__init__(optimizer)
        if partners not in ("ring", "random"):
            raise ValueError(f"Gossip: partners={partners!r}: give 'ring' or 'random'")
        self.partners, self.asynchronous = partners, asynchronous
        self.comm = resolve(comm)
        self._generator = torch.Generator().manual_seed(seed)
        self._under_way: list[_Exchange] = []

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The optimizer's step, and the mean with partners. closure: evaluated once, before."""
        loss = self.take_own_step(closure)
        self.finish()
        if ranks := self._drawn():
            groups = grouped(p.detach() for p in self.parameters())
            self._under_way = [_Exchange(tensors, ranks, self.comm) for tensors in groups]
        if not self.asynchronous:
            self.finish()
        return loss

    def finish(self) -> None:
        """Wait for what partners have sent, and take it in."""
        while self._under_way:
            self._under_way[0].finish()  # stays if a deadline or a signal interrupts the wait
            del self._under_way[0]

    def average(self) -> None:
        """Make parameters the average over all ranks. Collective."""
        self.finish()
        self.average_over(self.comm)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's, this rank's own; under "gossip" the state of the generator that draws partners."""
        self.finish()
        return {**super().state_dict(), "gossip": {"generator": self._generator.get_state()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what ``state_dict`` has given, or the state of the optimizer alone. Every rank calls it.

        An exchange under way belongs to the steps that the state replaces: it ends here, and changes no parameter.
        """
        wait_all([handle for exchange in self._under_way for handle in exchange.handles])
        self._under_way = []
        super().load_state_dict({name: value for name, value in state_dict.items() if name != "gossip"})
        if "gossip" in state_dict:
            self._generator.set_state(state_dict["gossip"]["generator"].cpu())

    def _drawn(self) -> list[tuple[int, int]]:
        """The partners of this step, as (source, destination). The same draw on every rank."""
        rank, size = self.comm.rank, self.comm.size
        # Neighbours in a permutation that all ranks draw alike are partners. On a ring of two both neighbours are one.
        if self.partners == "random" or size == 2:
            order: list[int] = torch.randperm(size, generator=self._generator, device="cpu").tolist()
            place = order.index(rank)
            partner = order[place ^ 1] if place ^ 1 < size else rank
            return [(partner, partner)] if partner != rank else []
        before, after = (rank - 1) % size, (rank + 1) % size
        return [(before, after), (after, before)] if size > 1 else []


class _Exchange:
    """The parameters of this rank on their way to its partners, and theirs on their way here."""

    def __init__(self, tensors: list[Tensor], ranks: list[tuple[int, int]], comm: Communicator) -> None:
        self.tensors = tensors
        self.sent = torch.cat([tensor.reshape(-1) for tensor in tensors])
        self.received = [self.sent.clone() for _ in ranks]
        self.handles: list[Handle[Any]] = [
            verbs.sendreceive_async(x, source, destination, comm=comm)
            for x, (source, destination) in zip(self.received, ranks, strict=True)
        ]

    def finish(self) -> None:
        """Add the differences, with equal weights of this rank and its partners."""
        wait_all(self.handles)
        difference = torch.stack([x - self.sent for x in self.received]).sum(0) / (1 + len(self.received))
        changes = torch.split(difference, [tensor.numel() for tensor in self.tensors])
        for tensor, change in zip(self.tensors, changes, strict=True):
            tensor += change.view_as(tensor)
