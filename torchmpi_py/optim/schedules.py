"""Learning rates for large batches: k ranks take batches k times as large, and larger steps.

Sources: Goyal et al., Accurate, Large Minibatch SGD (2017): linear scaling, gradual warm-up. Krizhevsky, One weird
trick for parallelizing convolutional neural networks (2014): the square root.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LinearLR, LRScheduler, ReduceLROnPlateau, SequentialLR

from torchmpi_py.core.communicators import resolve
from torchmpi_py.core.tensors import check_count


def large_batch(
    optimizer: Optimizer,
    factor: float | None = None,
    *,
    rule: Literal["linear", "sqrt"] = "linear",
    warmup_steps: int = 0,
    then: Callable[[Optimizer], LRScheduler] | None = None,
) -> LRScheduler:
    """Scale the learning rates of ``optimizer`` for a batch ``factor`` times as large, and reach them gradually.

    Returns a scheduler of torch, whose ``step`` is called after each step of the optimizer: the learning rate grows
    from what it was, by equal amounts, to ``factor`` times as much ("sqrt": the root of that), in ``warmup_steps``.
    Any loop, engine (``on_update``) or framework takes it. The same on every rank, without communication.

    factor: default: the number of ranks of the current level. then: makes the scheduler after the warm-up, such as
    ``lambda optimizer: StepLR(optimizer, 30)``, which counts from there as if it started at the full rate. ValueError
    for another rule, a factor that is not above 0, or below 1 with a warm-up, and warmup_steps that is no whole number,
    0 or above. TypeError where, with a warm-up, ``then`` makes a ReduceLROnPlateau, or no scheduler of torch.
    """
    factor = resolve(None).size if factor is None else factor
    if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 < factor < math.inf:
        raise ValueError(f"large_batch: factor={factor!r}: give a number above 0, by which the batch is larger")
    if rule not in ("linear", "sqrt"):
        raise ValueError(f"large_batch: rule={rule!r}: give 'linear' or 'sqrt'")
    check_count("large_batch: warmup_steps", warmup_steps, 0, "steps")
    if warmup_steps and factor < 1:
        raise ValueError(f"large_batch: factor={factor!r}: a warm-up grows; give a factor from 1, or warmup_steps=0")
    scale = factor if rule == "linear" else math.sqrt(factor)
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * scale
        group.pop("initial_lr", None)  # of a scheduler before
    if then is None:
        return LinearLR(optimizer, 1 / scale if warmup_steps else 1.0, total_iters=max(1, warmup_steps))
    if not warmup_steps:
        return then(optimizer)
    return _WarmUpThen(optimizer, scale, warmup_steps, then)


class _WarmUpThen(SequentialLR):
    """A linear warm-up to the learning rates of ``optimizer``, and the scheduler that ``then`` makes.

    Torch's SequentialLR resets what its schedulers did when they were made. Those which go from the current rate, or
    are made of others, do not start anew after that. So here ``then`` meets the full rates, and what it makes of them
    is kept until the warm-up is over.
    """

    def __init__(
        self, optimizer: Optimizer, scale: float, warmup_steps: int, then: Callable[[Optimizer], LRScheduler]
    ) -> None:
        full = _rates(optimizer)
        after = then(optimizer)
        if not isinstance(after, LRScheduler) or isinstance(after, ReduceLROnPlateau):
            _set_rates(optimizer, full)
            raise TypeError(
                f"large_batch: then made a {type(after).__name__}; give a function that makes a scheduler of torch "
                "whose step() takes no measure, such as lambda optimizer: StepLR(optimizer, 30)"
            )
        self.optimizer = optimizer
        self.first_rates = _rates(optimizer)  # of ``after``
        _set_rates(optimizer, full)
        self._schedulers = [LinearLR(optimizer, 1 / scale, total_iters=warmup_steps), after]
        self._milestones = [warmup_steps]
        self.last_epoch = 0
        self._last_lr = _rates(optimizer)

    def step(self) -> None:  # type: ignore[override]
        """Take the next learning rates."""
        self.last_epoch += 1
        if self.last_epoch == self._milestones[0]:
            _set_rates(self.optimizer, self.first_rates)
        else:
            self._schedulers[self.last_epoch > self._milestones[0]].step()
        self._last_lr = _rates(self.optimizer)


def _rates(optimizer: Optimizer) -> list[float | Tensor]:
    return [lr.clone() if isinstance(lr := group["lr"], Tensor) else lr for group in optimizer.param_groups]


def _set_rates(optimizer: Optimizer, rates: list[float | Tensor]) -> None:
    for group, lr in zip(optimizer.param_groups, rates, strict=True):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr
