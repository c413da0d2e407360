"""Steps as long as parameters are large: LARS and LAMB, around any torch optimizer, for very large batches.

Each parameter's step is scaled by a trust ratio, the norm of the parameter over that of its gradient or update, so that
no layer's step is too long for it. Ratios come from reduced gradients, so they are the same on every rank, and need no
communication. Those of split layers come from the norms of whole parameters: there ``step`` is collective over the
ranks that hold the parts, in one small allreduce. With ``optim.ShardedOptimizer.from_optimizer`` parameters keep whole
owners.

Sources: You et al., Large Batch Training of Convolutional Networks (2017), algorithm 1; You et al., Large Batch
Optimization for Deep Learning: Training BERT in 76 minutes (2020), algorithm 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.linalg import vector_norm

from torchmpi_py.collectives import verbs
from torchmpi_py.core.communicators import Communicator
from torchmpi_py.nn.split_parameters import split_of
from torchmpi_py.optim.wrapper import OptimizerWrapper, evaluated

# Optimizers that shrink parameters by their weight decay always; others say so in ``decoupled_weight_decay``.
_DECOUPLED = tuple(getattr(torch.optim, name) for name in ("AdamW", "Adafactor", "Muon") if hasattr(torch.optim, name))


def is_matrix(p: Tensor) -> bool:
    """Whether a parameter has several dimensions, as biases and the scales of normalisations have not."""
    return p.dim() > 1


class LARS(OptimizerWrapper):
    """``optimizer``, of which each gradient g of a parameter w is scaled to a length of w's.

    In place of g the optimizer gets c |w| / (|g| + d |w| + eps) (g + d w), where d is its own weight decay (g - d w
    with ``maximize=True``, for the optimizer turns the sign). Around ``torch.optim.SGD(..., momentum=m,
    weight_decay=d)`` that is LARS, as long as the learning rate is constant: torch applies it after the momentum, the
    paper before. ``p.grad`` is overwritten by ``step``.

    trust_coefficient: c. only: the parameters that are scaled; default: those of several dimensions. A parameter or a
    gradient of zeros is not scaled. With split layers ``step`` is collective; ValueError on all ranks where only some
    scale a parameter.

    ValueError for a decoupled weight decay, as AdamW's, which is no part of the gradient. An optimizer of another
    package has to add its ``weight_decay`` to the gradient, as SGD and Adam do.
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
        self._check_decays()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Scale the gradients, and update. closure: evaluated once, before."""
        self._check_decays()  # groups may have changed
        loss = evaluated(closure)
        decays = [group.get("weight_decay", 0.0) for group in self.param_groups]
        lengths = {
            p: [vector_norm(p), vector_norm(p.grad)]
            for group in self.param_groups
            for p in group["params"]
            if _is_chosen(p, self.only)
        }
        norms = _whole_norms("LARS", self.param_groups, lengths)
        for group, decay in zip(self.param_groups, decays, strict=True):
            for p in group["params"]:
                if p.grad is not None and decay:
                    p.grad.add_(p, alpha=-decay if group.get("maximize") else decay)
                if p in norms:
                    size, slope = norms[p]
                    ratio = self.trust_coefficient * size / (slope + decay * size + self.eps)
                    p.grad.mul_(torch.where((size > 0) & (slope > 0), ratio, 1.0))
            group["weight_decay"] = 0.0  # it is in the gradients
        try:
            self.optimizer.step()
        finally:
            for group, decay in zip(self.param_groups, decays, strict=True):
                group["weight_decay"] = decay
        return loss

    def _check_decays(self) -> None:
        for group in self.param_groups:
            is_decoupled = group.get("decoupled_weight_decay") or isinstance(self.optimizer, _DECOUPLED)
            if is_decoupled and (decay := group["weight_decay"]):
                raise ValueError(
                    f"LARS: {type(self.optimizer).__name__} has a decoupled weight_decay={decay!r}, which is no part "
                    "of the gradient that LARS scales: give weight_decay=0, or an optimizer that adds it to the "
                    "gradient, such as torch.optim.SGD(...) or Adam(...), or take optim.LAMB"
                )


class LAMB(OptimizerWrapper):
    """``optimizer``, of which each step of a parameter w becomes as long as lr |w|.

    The update u that the optimizer makes, lr times a direction, becomes lr |w| u / |u|. Around
    ``torch.optim.AdamW(..., weight_decay=d)`` that is LAMB.

    most: |w| counts as at most so much, as the paper allows; default: no limit. only: the parameters whose steps are
    scaled; default: those of several dimensions. Where w or u is zero, the update stays as it is. Holds a copy of the
    parameters during ``step``. With split layers ``step`` is collective; ValueError on all ranks where only some scale
    a parameter.
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
        rates = {p: group["lr"] for group in self.param_groups for p in group["params"] if _is_chosen(p, self.only)}
        before = {p: p.clone() for p in rates}
        self.optimizer.step()
        lengths = {p: [vector_norm(old), vector_norm(p - old)] for p, old in before.items()}
        norms = _whole_norms("LAMB", self.param_groups, lengths)
        for p, old in before.items():
            update, (size, length) = p - old, norms[p]
            wanted = rates[p] * (size if self.most is None else size.clamp(max=self.most))
            p.copy_(old.add_(update.mul_(torch.where((size > 0) & (length > 0), wanted / length, 1.0))))
        return loss


def _is_chosen(p: Tensor, only: Callable[[Tensor], bool]) -> bool:
    """Whether a parameter has a gradient and is one of those to scale."""
    return p.grad is not None and only(p)


def _whole_norms(
    what: str, groups: list[dict[str, Any]], norms: dict[Tensor, list[Tensor]]
) -> dict[Tensor, list[Tensor]]:
    """``norms``, two for each parameter; of a split parameter those of the whole, from those of this rank's part.

    Collective over the ranks that share split layers. ValueError on all of them where only some scale a parameter.
    """
    parts: dict[Communicator, list[tuple[int, Tensor]]] = {}
    for number, p in enumerate(p for group in groups for p in group["params"]):
        if (split := split_of(p)) is not None:
            parts.setdefault(split.comm, []).append((number, p))  # all, so that all ranks make the same calls
    whole = dict(norms)
    for comm, members in parts.items():
        rows = [[1.0, *(float(x) ** 2 for x in norms[p])] if p in norms else [0.0] * 3 for _, p in members]
        total = verbs.allreduce(torch.tensor(rows, dtype=torch.double, device="cpu"), comm=comm).tolist()
        for (number, p), (count, *squares) in zip(members, total, strict=True):
            if 0 < count < comm.size:
                raise ValueError(
                    f"{what}: the split parameter {number} is scaled on {count:.0f} of the {comm.size} ranks that hold "
                    "its parts: only= has to choose alike on all ranks, and all of them or none have a gradient"
                )
            if count:
                whole[p] = [x.new_tensor(math.sqrt(square)) for x, square in zip(norms[p], squares, strict=True)]
    return whole


def _check_optimizer(what: str, optimizer: object) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError(
            f"{what}: give a torch optimizer without closures, such as torch.optim.SGD(...), not a "
            f"{type(optimizer).__name__}"
        )
    if isinstance(optimizer, OptimizerWrapper):
        raise TypeError(
            f"{what}: give the torch optimizer that the {type(optimizer).__name__} holds, and put this around {what}, "
            f"as in DistributedOptimizer(optim.{what}(...), module): what is scaled has to be whole and reduced"
        )
