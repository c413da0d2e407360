"""Learning rates for large batches: P ranks train with a batch P times as large, and take larger steps.

Sources: Goyal et al., Accurate, Large Minibatch SGD (2017), for linear scaling and gradual warm-up. Krizhevsky, One
weird trick for parallelizing convolutional neural networks (2014), for the square root.
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
    """Scale the learning rates of ``optimizer`` for a larger batch, with an optional warm-up.

    **Overwrites** the learning rates of ``optimizer``. In a warm-up, each learning rate grows in equal steps from its
    original value to the scaled value. The ranks do not communicate, so call this function with the same arguments on
    every rank.

    Args:
        optimizer (torch.optim.Optimizer): any torch optimizer, plain or wrapped.
        factor (float): ratio of the large batch size to the original batch size, above 0; default None, the number of
            ranks of the current level.
        rule (str): "linear" (default) multiplies the learning rates by ``factor``, "sqrt" by the square root of
            ``factor``.
        warmup_steps (int): number of steps until the scaled learning rate is reached; default 0, no warm-up.

    Returns:
        A torch ``LinearLR``. Call its ``step`` method after each step of the optimizer (with an engine, in
        ``on_update``). You can put it into a SequentialLR, but not together with MultiplicativeLR or with OneCycleLR,
        which contains another warm-up.

    Raises:
        ValueError: ``rule`` is unknown, ``factor`` is not above 0, ``factor`` is below 1 with a warm-up, or
            ``warmup_steps`` is not a whole number of at least 0.

    Examples:
        >>> net = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        >>> warmup = mpi.optim.large_batch(optimizer, 4, warmup_steps=500)
        >>> decay = torch.optim.lr_scheduler.StepLR(optimizer, 3000)  # starts at the full rate
        >>> schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, decay], milestones=[500])

    """
    factor = resolve(None).size if factor is None else factor
    if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 < factor < math.inf:
        raise ValueError(f"large_batch: expected factor > 0, found {factor=}; pass (large batch) / (original batch)")
    if rule not in ("linear", "sqrt"):
        raise ValueError(f"large_batch: rule={rule!r} is unknown; pass 'linear' or 'sqrt'")
    check_count("large_batch: warmup_steps", warmup_steps, 0, "steps")
    if warmup_steps and factor < 1:
        raise ValueError(f"large_batch: a warm-up needs factor >= 1, found factor={factor!r}; use warmup_steps=0")
    scale = factor if rule == "linear" else math.sqrt(factor)
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * scale
        group.pop("initial_lr", None)  # An earlier scheduler may have set it.
    return LinearLR(optimizer, 1 / scale if warmup_steps else 1.0, total_iters=max(1, warmup_steps))
