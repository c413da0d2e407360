"""Fewer messages: ranks take steps of their own, and average their parameters now and then.

Sources: Stich, Local SGD Converges Fast and Communicates Little (2019); Lin et al., Don't Use Large Mini-Batches, Use
Local SGD (2020), for post-local and hierarchical averaging; Wang et al., SlowMo (2020), algorithm 1.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from torchmpi_py.core.communicators import Communicator, resolve
from torchmpi_py.core.tensors import check_count
from torchmpi_py.optim.wrapper import LocalOptimizer, evaluated


class LocalSGD(LocalOptimizer):
    """``optimizer``, on each rank for itself; after every ``period``-th step parameters become their average.

    Any torch optimizer will do; its state stays each rank's own. Gradients are not reduced. Parameters start equal on
    all ranks (``nn.synchronize_parameters``); every rank takes the same number of steps, which are collective.
    ``average`` makes parameters equal in between, as before an evaluation or a checkpoint.

    period: steps between averages over ``comm`` (default: the current level). Or a mapping from communicators to
        periods, for hierarchical averaging: ``{node: 4, world: 32}``. Each is a multiple of the shorter ones, and the
        longest is that of all ranks; of averages that are due together, the one over most ranks is taken.
    start: until so many steps have been made, parameters are averaged over all ranks in each (post-local SGD).
    slow_momentum, slow_lr: b and a of SlowMo. After an average over all ranks u becomes b u + (x0 - x) / lr, where x0
        is what the last one made (at first: the parameters before the first step), x the average and lr the group's
        learning rate, averaged over the steps since; and parameters become x0 - a lr u. Without a step since, or with
        rates of 0 alone, they are the average.

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
        slow_lr: float = 1.0,
        comm: Communicator | None = None,
    ) -> None:
        super().__init__(optimizer)
        self.periods = _checked(period, comm)
        check_count("LocalSGD: start", start, 0, "steps")
        if not 0 <= slow_momentum < 1 or not slow_lr > 0:
            raise ValueError(f"LocalSGD: {slow_momentum=}, {slow_lr=}: give a share below 1, and a number above 0")
        self.start, self.slow_momentum, self.slow_lr = start, slow_momentum, slow_lr
        self.num_steps = 0
        self._is_slow = slow_momentum > 0 or slow_lr != 1
        self._slow: dict[Tensor, tuple[Tensor, Tensor]] = {}  # of each parameter x0 and u, from its first step on
        self._rates: list[list[float]] = []  # the groups' learning rates in each step since the last average of all

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The optimizer's step, and an average if one is due. closure: evaluated once, before."""
        loss = evaluated(closure)
        if self._is_slow:
            fresh = [p for p in self.parameters() if p not in self._slow]
            self._slow |= {p: (p.detach().clone(), torch.zeros_like(p)) for p in fresh}
            self._rates.append([float(group["lr"]) for group in self.param_groups])
        self.take_own_step()
        self.num_steps += 1
        everywhere = next(reversed(self.periods))
        due = [comm for comm, period in self.periods.items() if self.num_steps % period == 0]
        if self.num_steps <= self.start:
            self.average_over(everywhere)
            self._slow.clear()  # SlowMo begins behind ``start``, from the last of these averages
            self._rates.clear()
        elif everywhere in due:
            self.average()
        elif due:
            self.average_over(due[-1])  # the one over most ranks
        return loss

    def average(self) -> None:
        """Make parameters the average over all ranks now, with slow momentum. Collective."""
        self.average_over(next(reversed(self.periods)))
        self._take_slow_step()

    @torch.no_grad()
    def _take_slow_step(self) -> None:
        for index, group in enumerate(self.param_groups):
            rates = [of_groups[index] for of_groups in self._rates if index < len(of_groups)]  # groups may be added
            lr = sum(rates) / max(len(rates), 1)
            for p in group["params"] if lr > 0 else ():
                if p not in self._slow:  # it has had no step yet
                    continue
                before, momentum = self._slow[p]
                momentum.mul_(self.slow_momentum).add_((before - p) / lr)
                before.sub_(self.slow_lr * lr * momentum)
                p.copy_(before)
        self._rates.clear()

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's; under "local_sgd" the number of steps, x0 and u of each parameter, and rates since x0.

        A parameter that has had no step has None in the place of x0 and u.
        """
        slow = [self._slow.get(p) for p in self.parameters()] if self._slow else []
        own = {"num_steps": self.num_steps, "slow": slow, "rates": copy.deepcopy(self._rates)}
        return {**super().state_dict(), "local_sgd": own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what ``state_dict`` has given, or the state of the optimizer alone."""
        own = state_dict.get("local_sgd", {"num_steps": 0, "slow": []})
        super().load_state_dict({name: value for name, value in state_dict.items() if name != "local_sgd"})
        self.num_steps = own["num_steps"]
        self._rates = copy.deepcopy(own.get("rates", []))
        slow = zip(self.parameters(), own["slow"] if self._is_slow else (), strict=False)
        self._slow = {p: (had[0].to(p, copy=True), had[1].to(p, copy=True)) for p, had in slow if had is not None}


def _checked(period: int | Mapping[Communicator, int], comm: Communicator | None) -> dict[Communicator, int]:
    """The periods, the longest last."""
    if isinstance(period, Mapping) and (comm is not None or not period):
        raise ValueError(
            f"LocalSGD: period={period!r}: give some communicators with a period each, and no comm= beside"
        )
    periods = dict(period) if isinstance(period, Mapping) else {resolve(comm): period}
    for each in periods.values():
        check_count("LocalSGD: period", each, 1, "steps")
    in_order = sorted(periods.items(), key=lambda item: item[1])
    for (inner, shorter), (outer, longer) in itertools.pairwise(in_order):
        if longer % shorter or inner.size > outer.size:
            raise ValueError(
                f"LocalSGD: periods {shorter} of {inner.size} ranks and {longer} of {outer.size}: give multiples, such "
                "as 4 and 32, and the more ranks, the longer the period"
            )
    return dict(in_order)
