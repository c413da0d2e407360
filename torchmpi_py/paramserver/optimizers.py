"""Optimizers that run at a parameter server: rules whose payload is a gradient, and which keep their state there.

They are torch's own: one send of a gradient is one step of ``torch.optim``'s optimizer of that name on the shard, with
the same options and the same defaults. Every worker's send is a step, so with n workers there are n times as many.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim.adagrad import adagrad
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from torchmpi_py.paramserver.rules import Memory, Rule, build_in


def _sgd(
    shard: Tensor,
    grad: Tensor,
    memory: Memory,
    *,
    lr: float = 1e-3,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
) -> None:
    """A step of ``torch.optim.SGD``; the slot is the momentum buffer, which begins as the first gradient."""
    (buffer,) = memory.slots
    buffers: list[Any] = [buffer if momentum and memory.times.item() else None]
    sgd(
        [shard],
        [grad],
        buffers,
        foreach=False,
        lr=lr,
        momentum=momentum,
        dampening=dampening,
        weight_decay=weight_decay,
        nesterov=nesterov,
        maximize=False,
    )
    if momentum:
        if buffers[0] is not buffer:
            buffer.copy_(buffers[0])
        memory.times.add_(1)


def _adagrad(
    shard: Tensor,
    grad: Tensor,
    memory: Memory,
    *,
    lr: float = 1e-2,
    lr_decay: float = 0.0,
    weight_decay: float = 0.0,
    eps: float = 1e-10,
) -> None:
    """A step of ``torch.optim.Adagrad``; the slot is the sum of squares."""
    adagrad(
        [shard],
        [grad],
        memory.slots,
        [memory.times],
        foreach=False,
        lr=lr,
        lr_decay=lr_decay,
        weight_decay=weight_decay,
        eps=eps,
        maximize=False,
    )


def _adam(
    shard: Tensor,
    grad: Tensor,
    memory: Memory,
    *,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> None:
    """A step of ``torch.optim.Adam``; the slots are the mean of gradients and of their squares."""
    mean, square = memory.slots
    adam(
        [shard],
        [grad],
        [mean],
        [square],
        [],
        [memory.times],
        foreach=False,
        amsgrad=False,
        lr=lr,
        beta1=betas[0],
        beta2=betas[1],
        eps=eps,
        weight_decay=weight_decay,
        maximize=False,
    )


build_in("sgd", Rule(_sgd, "optimizer", 1, needs_bits=1))
build_in("adagrad", Rule(_adagrad, "optimizer", 1, needs_bits=1))
build_in("adam", Rule(_adam, "optimizer", 2, needs_bits=1))
