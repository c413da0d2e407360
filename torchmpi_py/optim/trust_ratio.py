"""Steps as long as parameters are large: LARS and LAMB, around any torch optimizer, for very large batches.

Each parameter's step is scaled by a trust ratio, the norm of the parameter over that of its gradient or update, so that
no layer's step is too long for it. Ratios come from reduced gradients, so they are the same on every rank, and need no
communication. With ``optim.ShardedOptimizer.from_optimizer`` parameters keep whole owners.

Sources: You et al., Large Batch Training of Convolutional Networks (2017), algorithm 1; You et al., Large Batch
Optimization for Deep Learning: Training BERT in 76 minutes (2020), algorithm 2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchmpi_py.optim.wrapper import OptimizerWrapper, evaluated


def is_matrix(p: Tensor) -> bool:
    """Whether a parameter has several dimensions, as biases and the scales of normalisations have not."""
    return p.dim() > 1


class LARS(OptimizerWrapper):
    """``optimizer``, of which each gradient g of a parameter w is scaled to a length of w's.

    In place of g the optimizer gets c |w| / (|g| + d |w| + eps) (g + d w), where d is its own weight decay. Around
    ``torch.optim.SGD(..., momentum=m, weight_decay=d)`` that is LARS, as long as the learning rate is constant: torch
    applies it after the momentum, the paper before. ``p.grad`` is overwritten by ``step``.

    trust_coefficient: c. only: the parameters that are scaled; default: those of several dimensions. A parameter or a
    gradient of zeros is not scaled.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        trust_coefficient: float = 0.001,
        eps: float = 0.0,
        only: Callable[[Tensor], bool] = is_matrix,
    ) -> None:
        super().__init__()
        _check_optimizer("LARS", optimizer)
        if not trust_coefficient > 0:
            raise ValueError(f"LARS: trust_coefficient={trust_coefficient!r}: give a number above 0, such as 0.001")
        self.optimizer, self.trust_coefficient, self.eps, self.only = optimizer, trust_coefficient, eps, only

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Scale the gradients, and update. closure: evaluated once, before."""
        loss = evaluated(closure)
        decays = [group.get("weight_decay", 0.0) for group in self.param_groups]
        for group, decay in zip(self.param_groups, decays, strict=True):
            for p in group["params"]:
                if p.grad is not None and self.only(p):
                    self._scale(p, decay)
                elif p.grad is not None and decay:
                    p.grad.add_(p, alpha=decay)
            group["weight_decay"] = 0.0  # it is in the gradients
        try:
            self.optimizer.step()
        finally:
            for group, decay in zip(self.param_groups, decays, strict=True):
                group["weight_decay"] = decay
        return loss

    def _scale(self, p: Tensor, decay: float) -> None:
        gradient: Any = p.grad
        size, slope = torch.linalg.vector_norm(p), torch.linalg.vector_norm(gradient)
        ratio = self.trust_coefficient * size / (slope + decay * size + self.eps)
        gradient.add_(p, alpha=decay).mul_(torch.where((size > 0) & (slope > 0), ratio, 1.0))


class LAMB(OptimizerWrapper):
    """``optimizer``, of which each step of a parameter w becomes as long as lr |w|.

    The update u that the optimizer makes, lr times a direction, becomes lr |w| u / |u|. Around
    ``torch.optim.AdamW(..., weight_decay=d)`` that is LAMB.

    most: |w| counts as at most so much, as the paper allows; default: no limit. only: the parameters whose steps are
    scaled; default: those of several dimensions. Where w or u is zero, the update stays as it is. Holds a copy of the
    parameters during ``step``.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, most: float | None = None, only: Callable[[Tensor], bool] = is_matrix
    ) -> None:
        super().__init__()
        _check_optimizer("LAMB", optimizer)
        if most is not None and not most > 0:
            raise ValueError(f"LAMB: most={most!r}: give a number above 0, or None")
        self.optimizer, self.most, self.only = optimizer, most, only

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update, and scale the updates. closure: evaluated once, before."""
        loss = evaluated(closure)
        # What the optimizer does to a parameter is known by comparison alone.
        before = [
            (p, p.clone(), group["lr"])
            for group in self.param_groups
            for p in group["params"]
            if p.grad is not None and self.only(p)
        ]
        self.optimizer.step()
        for p, old, lr in before:
            update = p - old
            size, length = torch.linalg.vector_norm(old), torch.linalg.vector_norm(update)
            wanted = lr * (size if self.most is None else size.clamp(max=self.most))
            p.copy_(old.add_(update.mul_(torch.where((size > 0) & (length > 0), wanted / length, 1.0))))
        return loss


def _check_optimizer(what: str, optimizer: object) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError(
            f"{what}: give a torch optimizer without closures, such as torch.optim.SGD(...), not a "
            f"{type(optimizer).__name__}"
        )
