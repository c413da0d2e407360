"""Averages with partners instead of all ranks: a rank waits for at most two others.

The idea: after each step, the parameters of a rank become a weighted mean of its own parameters and its partners'. The
weights are symmetric, and the weights of a rank sum to 1. So the average over all ranks does not change, and the
differences between ranks shrink in each step. On the ring of P ranks they shrink at least by the factor
(1 + 2 cos(2 pi / P)) / 3. Alternative: an allreduce in each step. Why not: every rank then waits for the slowest one.

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
    """Take local steps with ``optimizer``; after each step, average the parameters with those of partners.

    Gradients are not reduced, and the optimizer's state is local to each rank. Parameters must be equal on all ranks at
    the start (see ``nn.synchronize_parameters``), and every rank must take the same number of steps. Call ``average``,
    which is collective, before an evaluation or a checkpoint.

    Args:
        optimizer (torch.optim.Optimizer): any plain torch optimizer.
        partners (str): "ring" (default): the two neighbours in rank order, with weight 1/3 each. "random": in each step
            one other rank, drawn from ``seed``, with weight 1/2; if the number of ranks is odd, one rank has no
            partner.
        asynchronous (bool): False (default) waits for the partners in each step. True sends the parameters while the
            next step is computed, and adds the difference to the partners' parameters after that step. So a rank does
            not wait for a partner that is at most one step behind.
        seed (int): seed of "random" partners, the same on every rank; default 0.
        comm (Communicator): ranks that take part; default None, the current level.

    Raises:
        TypeError: ``optimizer`` is not a plain optimizer.
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
            raise ValueError(f"Gossip: partners={partners!r}: expected 'ring' or 'random'")
        self.partners, self.asynchronous = partners, asynchronous
        self.comm = resolve(comm)
        self._generator = torch.Generator().manual_seed(seed)
        self._under_way: list[_Exchange] = []

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step of the optimizer, and average the parameters with the partners'. Every rank must make this call.

        Args:
            closure (callable): function that computes the loss and its gradients, evaluated once before the step, or
                None (default).

        Returns:
            The loss of the closure; None without a closure.
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
        """Wait for the parameters of the partners, and average them with this rank's parameters.

        Unless ``asynchronous`` is set, ``step`` does this.
        """
        while self._under_way:
            self._under_way[0].finish()  # The exchange stays in the list if a timeout or a signal interrupts the wait.
            del self._under_way[0]

    def average(self) -> None:
        """Make the parameters equal to their average over all ranks. Every rank must make this call."""
        self.finish()
        self.average_over(self.comm)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state of the optimizer, with the random generator of the partners under "gossip".

        Waits for a pending exchange first.
        """
        self.finish()
        return {**super().state_dict(), "gossip": {"generator": self._generator.get_state()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that ``state_dict()``, or the plain optimizer, has returned. Every rank must make this call.

        A pending exchange belongs to the steps that the state replaces, so its result is dropped.

        Args:
            state_dict (dict): state to load.
        """
        wait_all([handle for exchange in self._under_way for handle in exchange.handles])
        self._under_way = []
        super().load_state_dict({name: value for name, value in state_dict.items() if name != "gossip"})
        if "gossip" in state_dict:
            self._generator.set_state(state_dict["gossip"]["generator"].cpu())

    def _drawn(self) -> list[tuple[int, int]]:
        """Return the (source, destination) pairs of this step. Every rank draws the same partners."""
        rank, size = self.comm.rank, self.comm.size
        # All ranks draw the same permutation; its neighbours are partners. On a ring of two, both neighbours are one.
        if self.partners == "random" or size == 2:
            order: list[int] = torch.randperm(size, generator=self._generator, device="cpu").tolist()
            place = order.index(rank)
            partner = order[place ^ 1] if place ^ 1 < size else rank
            return [(partner, partner)] if partner != rank else []
        before, after = (rank - 1) % size, (rank + 1) % size
        return [(before, after), (after, before)] if size > 1 else []


class _Exchange:
    """An exchange of this rank's parameters with its partners'."""

    def __init__(self, tensors: list[Tensor], ranks: list[tuple[int, int]], comm: Communicator) -> None:
        self.tensors = tensors
        self.sent = torch.cat([tensor.reshape(-1) for tensor in tensors])
        self.received = [self.sent.clone() for _ in ranks]
        self.handles: list[Handle[Any]] = [
            verbs.sendreceive_async(x, source, destination, comm=comm)
            for x, (source, destination) in zip(self.received, ranks, strict=True)
        ]

    def finish(self) -> None:
        """Add the differences to the partners, with equal weights for this rank and each partner."""
        wait_all(self.handles)
        difference = torch.stack([x - self.sent for x in self.received]).sum(0) / (1 + len(self.received))
        changes = torch.split(difference, [tensor.numel() for tensor in self.tensors])
        for tensor, change in zip(self.tensors, changes, strict=True):
            tensor += change.view_as(tensor)
