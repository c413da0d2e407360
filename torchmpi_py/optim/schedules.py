"""Learning rates for large batches: k ranks take batches k times as large, and larger steps.

Sources: Goyal et al., Accurate, Large Minibatch SGD (2017): linear scaling, gradual warm-up. Krizhevsky, One weird
trick for parallelizing convolutional neural networks (2014): the square root.
"""

from __future__ import annotations

import math
from typing import Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LinearLR

from torchmpi_py.core.communicators import resolve
from torchmpi_py.core.tensors import check_count


def large_batch(
    optimizer: Optimizer,
    factor: float | None = None,
    *,
    rule: Literal["linear", "sqrt"] = "linear",
    warmup_steps: int = 0,
) -> LinearLR:
    """Scale the learning rates of ``optimizer`` for a batch ``factor`` times as large, and reach them gradually.

    The learning rate grows by equal amounts from what it is now to ``factor`` times as much ("sqrt": the root of that).
    No rank communicates; call it with the same arguments on every rank.

    Args:
        optimizer: any optimizer of torch, wrapped or not. **Its learning rates are overwritten.**
        factor: by how much the batch is larger; default: the number of ranks of the current level.
        rule: "linear" multiplies the learning rate by the factor, "sqrt" by its square root.
        warmup_steps: steps until the full learning rate is reached; 0: at once.

    Returns:
        A scheduler of torch; call its ``step`` after each step of the optimizer (in an engine: in ``on_update``).

    Raises:
        ValueError: an unknown rule, a factor that is not above 0, or below 1 with a warm-up, or a ``warmup_steps`` that
            is not a whole number from 0.

    Example:
        A warm-up, then a scheduler of torch, which starts at the full rate. OneCycleLR, which has a warm-up of its own,
        and MultiplicativeLR do not work in a SequentialLR::

            warmup = optim.large_batch(optimizer, warmup_steps=500)
            schedule = SequentialLR(optimizer, [warmup, StepLR(optimizer, 3000)], milestones=[500])
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
    return LinearLR(optimizer, 1 / scale if warmup_steps else 1.0, total_iters=max(1, warmup_steps))
