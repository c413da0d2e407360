"""Learning rates for large batches: k ranks take batches k times as large, and larger steps.

Sources: Goyal et al., Accurate, Large Minibatch SGD (2017): linear scaling, gradual warm-up. Krizhevsky, One weird
trick for parallelizing convolutional neural networks (2014): the square root.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LinearLR, LRScheduler, SequentialLR

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
    ``lambda optimizer: StepLR(optimizer, 30)``, which counts from there. ValueError for another rule, a factor that is
    not above 0, or warmup_steps that is no whole number, 0 or above.
    """
    factor = resolve(None).size if factor is None else factor
    if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 < factor < math.inf:
        raise ValueError(f"large_batch: factor={factor!r}: give a number above 0, by which the batch is larger")
    if rule not in ("linear", "sqrt"):
        raise ValueError(f"large_batch: rule={rule!r}: give 'linear' or 'sqrt'")
    check_count("large_batch: warmup_steps", warmup_steps, 0, "steps")
    scale = factor if rule == "linear" else math.sqrt(factor)
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * scale
        group.pop("initial_lr", None)  # of a scheduler before
    if then is None:
        return LinearLR(optimizer, 1 / scale if warmup_steps else 1.0, total_iters=max(1, warmup_steps))
    if not warmup_steps:
        return then(optimizer)
    warmup = LinearLR(optimizer, 1 / scale, total_iters=warmup_steps)
    return SequentialLR(optimizer, [warmup, then(optimizer)], [warmup_steps])
