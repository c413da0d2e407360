"""Fewer messages: ranks take steps of their own, and average their parameters now and then.

Sources: Stich, Local SGD Converges Fast and Communicates Little (2019); Lin et al., Don't Use Large Mini-Batches, Use
Local SGD (2020), for post-local and hierarchical averaging; Wang et al., SlowMo (2020), algorithm 1 with a slow
learning rate of 1; Chen and Huo, Scalable Training by Blockwise Model-Update Filtering (2016), for momentum in the
units of parameters, which no learning rate divides: the rate may change between averages, and may be 0.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from torchmpi_py.core.communicators import Communicator, resolve
from torchmpi_py.core.tensors import check_count
from torchmpi_py.optim.wrapper import LocalOptimizer


class LocalSGD(LocalOptimizer):
    """``optimizer``, on each rank for itself; after every ``period``-th step parameters become their average.

    Any torch optimizer will do; its state stays each rank's own. Gradients are not reduced. Parameters start equal on
    all ranks (``nn.synchronize_parameters``); every rank takes the same number of steps, which are collective.
    ``average`` makes parameters equal in between, as before an evaluation or a checkpoint.

    Args:
        period: number of steps between averages over ``comm`` (default: the current level). For hierarchical averaging
            give a mapping from communicators to periods, such as ``{node: 4, world: 32}``. Each period must be a
            multiple of the shorter ones, and the longest must belong to all ranks. If several averages are due in one
            step, only the one over most ranks is computed.
        start: number of first steps that average over all ranks in every step (post-local SGD).
        slow_momentum: factor b of SlowMo. After an average over all ranks, the momentum v becomes ``b * v + x0 - x``
            and the parameters become ``x0 - v``. Here x is the average and x0 holds the parameters before the first
            step since the last average. Without a step since then, the parameters are the average.

    ``state_dict`` is the optimizer's, this rank's own, with "local_sgd" beside it. Raises ValueError for another period
    or start.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        period: int | Mapping[Communicator, int] = 8,
        *,
        start: int = 0,
        slow_momentum: float = 0.0,
        comm: Communicator | None = None,
    ) -> None:
        super().__init__(optimizer)
        self.periods = _checked(period, comm)
        check_count("LocalSGD: start", start, 0, "steps")
        if not 0 <= slow_momentum < 1:
            raise ValueError(f"LocalSGD: {slow_momentum=}: give a share from 0 and below 1")
        self.start, self.slow_momentum = start, slow_momentum
        self.num_steps = 0
        self._before: dict[Tensor, Tensor] = {}  # x0 of each parameter that has had a step since the last average
        self._momentum: dict[Tensor, Tensor] = {}  # v of each parameter, from its first average on

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The optimizer's step, and an average if one is due. closure: evaluated once, before."""
        if self.slow_momentum:
            self._before |= {p: p.detach().clone() for p in self.parameters() if p not in self._before}
        loss = self.take_own_step(closure)
        self.num_steps += 1
        everywhere = next(reversed(self.periods))
        due = [comm for comm, period in self.periods.items() if self.num_steps % period == 0]
        if self.num_steps <= self.start:
            self.average_over(everywhere)
            self._before.clear()  # SlowMo begins behind ``start``, from the last of these averages
        elif everywhere in due:
            self.average()
        elif due:
            self.average_over(due[-1])  # the one over most ranks
        return loss

    @torch.no_grad()
    def average(self) -> None:
        """Make parameters the average over all ranks now, with slow momentum. Collective."""
        self.average_over(next(reversed(self.periods)))
        for p, before in self._before.items():
            momentum = self._momentum.setdefault(p, torch.zeros_like(p))
            momentum.mul_(self.slow_momentum).add_(before - p)
            p.copy_(before.sub_(momentum))
        self._before.clear()

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's; under "local_sgd" the number of steps, and x0 and v of each parameter, or None for them."""
        slow = [(self._before.get(p), self._momentum.get(p)) for p in self.parameters()]
        return {**super().state_dict(), "local_sgd": {"num_steps": self.num_steps, "slow": slow}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what ``state_dict`` has given, or the state of the optimizer alone."""
        own = state_dict.get("local_sgd", {"num_steps": 0, "slow": []})
        if "rates" in own:
            raise ValueError("LocalSGD: the slow momentum is of an earlier version; leave out the entry 'local_sgd'")
        super().load_state_dict({name: value for name, value in state_dict.items() if name != "local_sgd"})
        self.num_steps = own["num_steps"]
        slow = list(zip(self.parameters(), own["slow"] if self.slow_momentum else (), strict=False))
        self._before = {p: before.to(p, copy=True) for p, (before, _) in slow if before is not None}
        self._momentum = {p: momentum.to(p, copy=True) for p, (_, momentum) in slow if momentum is not None}


def _checked(period: int | Mapping[Communicator, int], comm: Communicator | None) -> dict[Communicator, int]:
    """The periods, the longest last."""
    if not isinstance(period, Mapping):
        period = {resolve(comm): period}
    elif comm is not None or not period:
        raise ValueError(f"LocalSGD: period={period!r}: give communicators with a period each, and no comm= beside")
    for each in period.values():
        check_count("LocalSGD: period", each, 1, "steps")
    in_order = sorted(period.items(), key=lambda item: item[1])
    for (inner, shorter), (outer, longer) in itertools.pairwise(in_order):
        if longer % shorter or inner.size > outer.size:
            raise ValueError(
                f"LocalSGD: periods {shorter} of {inner.size} ranks and {longer} of {outer.size}: give multiples, such "
                "as 4 and 32, and the more ranks, the longer the period"
            )
    return dict(in_order)
