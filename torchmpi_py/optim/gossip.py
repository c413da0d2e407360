"""Gossip averaging: each rank averages its parameters with one or two partners instead of with all ranks.

The idea: after each step, the parameters of a rank become a weighted mean of the rank's and the partners' parameters.
The weights are symmetric, and the weights of a rank sum to 1. So the average over all ranks does not change, and the
differences between ranks shrink in each step. On a ring of P ranks, each step multiplies the differences by at most
(1 + 2 cos(2 pi / P)) / 3. Alternative: an allreduce in each step. Why not: every rank would wait for the slowest rank.

Sources: Boyd et al., Randomized Gossip Algorithms (2006). Lian et al., Can Decentralized Algorithms Outperform
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
    """Take local steps with ``optimizer``, and average the parameters with the partners' parameters after each step.

    Gradients are not reduced, and the optimizer's state is local to each rank. Parameters must be equal on all ranks at
    the start (see ``nn.synchronize_parameters``), and every rank must take the same number of steps. Before an
    evaluation or a checkpoint, call ``average`` on every rank.

    Args:
        optimizer (torch.optim.Optimizer): any plain torch optimizer.
        partners (str): "ring" (default) selects the two neighbours in rank order, with weight 1/3 each. "random" draws
            one partner for each step, with weight 1/2. If the number of ranks is odd, one rank then has no partner in
            each step.
        asynchronous (bool): False (default) waits for the partners in each step. True sends the parameters while the
            next step is computed, and after that step moves the parameters towards the partners' parameters. So a rank
            does not wait for a partner that is at most one step behind.
        seed (int): seed for drawing "random" partners; default 0. Pass the same seed on every rank.
        comm (Communicator): ranks that exchange parameters; default None, the current level.

    Raises:
        TypeError: ``optimizer`` is not a plain torch optimizer.
        ValueError: ``partners`` is neither "ring" nor "random".

    Examples:
        >>> net = torch.nn.Linear(4, 1)
        >>> mpi.nn.synchronize_parameters(net)
        >>> optimizer = mpi.optim.Gossip(torch.optim.SGD(net.parameters(), lr=0.1))
        >>> net(torch.randn(8, 4)).square().mean().backward()
        >>> optimizer.step()
        >>> optimizer.average()  # before an evaluation or a checkpoint
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
            raise ValueError(f"Gossip: partners={partners!r} is unknown; pass 'ring' or 'random'")
        self.partners, self.asynchronous = partners, asynchronous
        self.comm = resolve(comm)
        self._generator = torch.Generator().manual_seed(seed)
        self._under_way: list[_Exchange] = []

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step of the optimizer, and average the parameters with the partners' parameters.

        Every rank must make this call.

        Args:
            closure (callable): function that computes the loss and its gradients, evaluated once before the step, or
                None (default).

        Returns:
            The loss that the closure returned, or None without a closure.
        """
        loss = self.take_own_step(closure)
        self.finish()
        if ranks := self._drawn():
            groups = grouped(p.detach() for p in self.parameters())
            self._under_way = [_Exchange(tensors, ranks, self.comm) for tensors in groups]
        if not self.asynchronous:
            self.finish()
        return loss

    def finish(self) -> None:
        """Wait for the partners' parameters, and average them with this rank's parameters.

        ``step`` does this unless ``asynchronous`` is set.
        """
        while self._under_way:
            self._under_way[0].finish()  # If a timeout or a signal interrupts the wait, the exchange stays in the list.
            del self._under_way[0]

    def average(self) -> None:
        """Set the parameters to their average over all ranks. Every rank must make this call."""
        self.finish()
        self.average_over(self.comm)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's optimizer state. If an exchange is pending, this call first completes the exchange.

        The entry "gossip" contains the state of the random generator that draws the partners.
        """
        self.finish()
        return {**super().state_dict(), "gossip": {"generator": self._generator.get_state()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class, or of the plain optimizer. Every rank must make this call.

        The result of a pending exchange is dropped, because it belongs to the steps that the state replaces.

        Args:
            state_dict (dict): state to load.
        """
        wait_all([handle for exchange in self._under_way for handle in exchange.handles])
        self._under_way = []
        super().load_state_dict({name: value for name, value in state_dict.items() if name != "gossip"})
        if "gossip" in state_dict:
            self._generator.set_state(state_dict["gossip"]["generator"].cpu())

    def _drawn(self) -> list[tuple[int, int]]:
        """Draw the partners for one step, and return this rank's (source, destination) pairs.

        All ranks draw the same partners.
        """
        rank, size = self.comm.rank, self.comm.size
        # All ranks draw the same permutation, and its elements 0 and 1, 2 and 3, and so on are partners. A ring of two
        # ranks is also a pair, because both neighbours of a rank are the same rank.
        if self.partners == "random" or size == 2:
            order: list[int] = torch.randperm(size, generator=self._generator, device="cpu").tolist()
            place = order.index(rank)
            partner = order[place ^ 1] if place ^ 1 < size else rank
            return [(partner, partner)] if partner != rank else []
        before, after = (rank - 1) % size, (rank + 1) % size
        return [(before, after), (after, before)] if size > 1 else []


class _Exchange:
    """An exchange of parameters between this rank and its partners."""

    def __init__(self, tensors: list[Tensor], ranks: list[tuple[int, int]], comm: Communicator) -> None:
        self.tensors = tensors
        self.sent = torch.cat([tensor.reshape(-1) for tensor in tensors])
        self.received = [self.sent.clone() for _ in ranks]
        self.handles: list[Handle[Any]] = [
            verbs.sendreceive_async(x, source, destination, comm=comm)
            for x, (source, destination) in zip(self.received, ranks, strict=True)
        ]

    def finish(self) -> None:
        """Wait for the partners' parameters, and move this rank's parameters towards them.

        The change that is added would turn the sent parameters into the mean over this rank and its partners.
        """
        wait_all(self.handles)
        difference = torch.stack([x - self.sent for x in self.received]).sum(0) / (1 + len(self.received))
        changes = torch.split(difference, [tensor.numel() for tensor in self.tensors])
        for tensor, change in zip(self.tensors, changes, strict=True):
            tensor += change.view_as(tensor)
