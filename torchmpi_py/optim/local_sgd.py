"""Local SGD: to send fewer messages, ranks take local steps and average their parameters periodically.

Sources: Stich, Local SGD Converges Fast and Communicates Little (2019). Lin et al., Don't Use Large Mini-Batches, Use
Local SGD (2020), for post-local and hierarchical averaging. Wang et al., SlowMo (2020), algorithm 1 with a slow
learning rate of 1. Chen and Huo, Scalable Training by Blockwise Model-Update Filtering (2016), for a momentum in units
of the parameters. This momentum is not divided by the learning rate, so the learning rate may change between averages,
and may be 0.
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
    """Take local steps with ``optimizer``, and average the parameters over the ranks after every ``period`` steps.

    Gradients are not reduced, and the optimizer's state is local to each rank. Parameters must be equal on all ranks at
    the start (see ``nn.synchronize_parameters``). Every rank must take the same number of steps, because a step that
    averages is collective. Before an evaluation or a checkpoint, call ``average`` on every rank.

    Args:
        optimizer (torch.optim.Optimizer): any plain torch optimizer.
        period (int or mapping): number of steps between averages over ``comm``; default 8. For hierarchical averaging,
            pass a mapping from communicators to periods, such as ``{node: 4, world: 32}``. Each period must be a
            multiple of every shorter period, and the longest period must belong to the communicator of all ranks. If
            several averages are due in one step, only the average over the most ranks is computed.
        start (int): number of initial steps after each of which all ranks average (post-local SGD); default 0.
        slow_momentum (float): factor b of SlowMo, at least 0 and below 1; default 0. After an average over all ranks,
            the momentum v becomes ``b * v + x0 - x``, and the parameters become ``x0 - v``. Here x is the average, and
            x0 are the parameters before the first step since the last average.
        comm (Communicator): ranks to average over; default None, the current level. Not allowed with a mapping.

    Raises:
        TypeError: ``optimizer`` is not a plain torch optimizer.
        ValueError: ``period``, ``start`` or ``slow_momentum`` is out of range.

    Examples:
        >>> net = torch.nn.Linear(4, 1)
        >>> mpi.nn.synchronize_parameters(net)
        >>> optimizer = mpi.optim.LocalSGD(torch.optim.SGD(net.parameters(), lr=0.1), period=2)
        >>> for x in torch.randn(4, 8, 4):
        ...     optimizer.zero_grad()
        ...     net(x).square().mean().backward()
        ...     optimizer.step()  # the second and the fourth step average the parameters
        >>> mpi.nn.check_with_allreduce(net)
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
            raise ValueError(f"LocalSGD: {slow_momentum=} is out of range; pass a number of at least 0 and below 1")
        self.start, self.slow_momentum = start, slow_momentum
        self.num_steps = 0
        self._before: dict[Tensor, Tensor] = {}  # x0 of each parameter that was updated since the last average
        self._momentum: dict[Tensor, Tensor] = {}  # v of each parameter that was averaged

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step of the optimizer; if an average is due, average the parameters. Every rank must make this call.

        Args:
            closure (callable): function that computes the loss and its gradients, evaluated once before the step, or
                None (default).

        Returns:
            The loss that the closure returned, or None without a closure.
        """
        if self.slow_momentum:
            self._before |= {p: p.detach().clone() for p in self.parameters() if p not in self._before}
        loss = self.take_own_step(closure)
        self.num_steps += 1
        everywhere = next(reversed(self.periods))
        due = [comm for comm, period in self.periods.items() if self.num_steps % period == 0]
        if self.num_steps <= self.start:
            self.average_over(everywhere)
            self._before.clear()  # Slow momentum starts from the last of these averages.
        elif everywhere in due:
            self.average()
        elif due:
            self.average_over(due[-1])  # The last communicator has the most ranks.
        return loss

    @torch.no_grad()
    def average(self) -> None:
        """Average the parameters over all ranks, and apply slow momentum. Every rank must make this call.

        **Overwrites** the parameters. If no step was taken since the last average, slow momentum is not applied.
        """
        self.average_over(next(reversed(self.periods)))
        for p, before in self._before.items():
            momentum = self._momentum.setdefault(p, torch.zeros_like(p))
            momentum.mul_(self.slow_momentum).add_(before - p)
            p.copy_(before.sub_(momentum))
        self._before.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's optimizer state, with LocalSGD's own state under "local_sgd".

        Returns:
            A dict in the format of ``torch.optim``. Its entry "local_sgd" contains the number of steps and, for each
            parameter, x0 and v (or None).
        """
        slow = [(self._before.get(p), self._momentum.get(p)) for p in self.parameters()]
        return {**super().state_dict(), "local_sgd": {"num_steps": self.num_steps, "slow": slow}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class, or of the plain optimizer. Every rank must make this call.

        Args:
            state_dict (dict): state to load.

        Raises:
            ValueError: the state contains the slow momentum of an earlier version of this package.
        """
        own = state_dict.get("local_sgd", {"num_steps": 0, "slow": []})
        if "rates" in own:
            raise ValueError("LocalSGD: the state is from an earlier version; delete its entry 'local_sgd'")
        super().load_state_dict({name: value for name, value in state_dict.items() if name != "local_sgd"})
        self.num_steps = own["num_steps"]
        slow = list(zip(self.parameters(), own["slow"] if self.slow_momentum else (), strict=False))
        self._before = {p: before.to(p, copy=True) for p, (before, _) in slow if before is not None}
        self._momentum = {p: momentum.to(p, copy=True) for p, (_, momentum) in slow if momentum is not None}


def _checked(period: int | Mapping[Communicator, int], comm: Communicator | None) -> dict[Communicator, int]:
    """Return the period of each communicator, the shortest first. Raise ValueError if the periods are not valid."""
    if not isinstance(period, Mapping):
        period = {resolve(comm): period}
    elif comm is not None or not period:
        raise ValueError(f"LocalSGD: period= as a mapping excludes comm= and is not empty; found {period=}, {comm=}")
    for each in period.values():
        check_count("LocalSGD: period", each, 1, "steps")
    in_order = sorted(period.items(), key=lambda item: item[1])
    for (inner, shorter), (outer, longer) in itertools.pairwise(in_order):
        if longer % shorter or inner.size > outer.size:
            raise ValueError(
                f"LocalSGD: found period {shorter} for {inner.size} ranks, and period {longer} for {outer.size}; "
                "pass multiples (such as 4 and 32), and the longer period for more ranks"
            )
    return dict(in_order)
