"""Batch normalization over the batches of all ranks, on any device.

torch.nn.SyncBatchNorm refuses tensors on the CPU, and needs torch.distributed.

Forward, in training: each rank has the number n of its values per channel, their mean m, and the sum q of their squared
distances from m. The ranks gather these 1 + 2 C numbers in float64 and combine them in the order of ranks, which gives
all ranks the same bits, and no cancellation where the mean is large against the spread::

    N = sum n    mean = sum n m / N    var = sum (q + n (m - mean)^2) / N

Backward: with x' = (x - mean) / sqrt(var + eps), the sums over all ranks of dy and of dy x' are reduced (2 C numbers)::

    dx = weight / sqrt(var + eps) * (dy - sum(dy) / N - x' sum(dy x') / N)

The gradients of weight and bias are this rank's own, as of any layer, and averaged with the others.
Source: Chan, Golub, LeVeque (1983) for the combination; torch.nn.SyncBatchNorm for what the layer is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.functional import batch_norm
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from torchmpi_py.collectives import verbs
from torchmpi_py.core import communicators
from torchmpi_py.core.communicators import Communicator
from torchmpi_py.nn.functional import own_communicator
from torchmpi_py.nn.synchronize import check_module


class SyncBatchNorm(_BatchNorm):
    """torch.nn.SyncBatchNorm over MPI: the statistics are those of the batches of all ranks.

    The arguments are torch's, with ``comm`` (default: the current level) in the place of ``process_group``. Inputs are
    (N, C, ...); N may differ between ranks, and be 0. All ranks run the same layers forward and backward, in the same
    order: in training both are collective. In evaluation, with one rank, and without ``mpi.start()`` it is BatchNorm.

    Raises ValueError, on all ranks, where all batches together have fewer than 2 values per channel, as BatchNorm does
    on one process: with inputs (N, C) where the last batch of an epoch has one sample in all.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        comm: Communicator | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self.comm = comm

    def forward(self, x: Tensor) -> Tensor:
        """Normalize, in training with the statistics of all ranks' batches; then update the running ones."""
        comm = communicators.resolve(self.comm) if self.training and communicators.is_started() else None
        if comm is None or comm.size == 1:
            return super().forward(x)
        self._check_input_dim(x)
        layer: Any = self  # for mypy each buffer may be None
        y: Tensor
        y, mean, var = _Normalize.apply(x, self.weight, self.bias, self.eps, own_communicator(comm))  # type: ignore[no-untyped-call]
        if self.track_running_stats:
            layer.num_batches_tracked.add_(1)
            share = 1.0 / layer.num_batches_tracked.item() if self.momentum is None else self.momentum
            layer.running_mean.lerp_(mean.to(layer.running_mean.dtype), share)
            layer.running_var.lerp_(var.to(layer.running_var.dtype), share)
        return y

    @classmethod
    def convert_sync_batchnorm(cls, module: torch.nn.Module, comm: Communicator | None = None) -> torch.nn.Module:
        """Make every BatchNorm layer of a module, or the module itself, one of this class, and return the module.

        Each layer stays the same object, with its parameters, buffers and hooks. ValueError for a lazy layer that was
        not called yet.
        """
        check_module("convert_sync_batchnorm", module)
        for layer in module.modules():
            name = type(layer).__name__
            if isinstance(layer, LazyModuleMixin) and layer.has_uninitialized_params():
                raise ValueError(f"convert_sync_batchnorm: a {name} has no features yet; call the network once before")
            if isinstance(layer, _BatchNorm):
                if type(layer).forward not in (_BatchNorm.forward, torch.nn.SyncBatchNorm.forward, cls.forward):
                    raise ValueError(f"convert_sync_batchnorm: {name} has a forward of its own; replace it by hand")
                layer.__class__ = cls
                vars(layer)["comm"] = comm
        return module

    def _check_input_dim(self, x: Tensor) -> None:
        if x.dim() < 2 or x.shape[1] != self.num_features:
            raise ValueError(f"SyncBatchNorm: expected (N, {self.num_features}, ...), not {tuple(x.shape)}")


class _Normalize(Function):
    """The input normalized by the statistics of all ranks; also the mean, and the variance without bias."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, comm: Communicator
    ) -> tuple[Tensor, Tensor, Tensor]:
        exact_mean, exact_var, count = _statistics(x, comm)
        unbiased = exact_var * (count / (count - 1))
        mean, var = (values.to(torch.promote_types(x.dtype, torch.float32)) for values in (exact_mean, exact_var))
        ctx.save_for_backward(x, weight, mean, (var + eps).rsqrt())
        ctx.count, ctx.comm = count, comm
        ctx.mark_non_differentiable(exact_mean, unbiased)
        if x.dtype != mean.dtype:  # torch normalizes 16-bit floats with float32 parameters only
            weight, bias = (None if p is None else p.to(mean.dtype) for p in (weight, bias))
        y = torch.empty_like(x) if x.numel() == 0 else batch_norm(x, mean, var, weight, bias, eps=eps)
        return y, exact_mean, unbiased

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, scale = ctx.saved_tensors
        normalized = (x.to(mean.dtype) - _along(mean, x)) * _along(scale, x)
        dims = _all_but_channels(x)
        sum_dy = dy.sum(dims, dtype=torch.float64)
        sum_dy_x = (dy * normalized).sum(dims, dtype=torch.float64)
        dx = None
        if ctx.needs_input_grad[0]:
            sums = verbs.allreduce(torch.stack([sum_dy, sum_dy_x]), comm=ctx.comm) / ctx.count
            of_mean, of_spread = (_along(part, x) for part in sums.to(mean.dtype))
            factor = scale if weight is None else scale * weight
            dx = ((dy - of_mean - normalized * of_spread) * _along(factor, x)).to(x.dtype)
        dweight = sum_dy_x.to(weight.dtype) if ctx.needs_input_grad[1] else None
        dbias = sum_dy.to(weight.dtype) if ctx.needs_input_grad[2] else None
        return dx, dweight, dbias, None, None


def _statistics(x: Tensor, comm: Communicator) -> tuple[Tensor, Tensor, float]:
    """Mean and variance of each channel over all ranks, in float64, and the number of values in a channel."""
    dims, channels = _all_but_channels(x), x.shape[1]
    number = x.numel() // channels
    mean = x.sum(dims, dtype=torch.float64) / max(number, 1)
    dtype = torch.promote_types(x.dtype, torch.float32)
    squares = (x.to(dtype) - _along(mean.to(dtype), x)).square_().sum(dims, dtype=torch.float64)
    # One exchange of 1 + 2 C numbers; combined in the order of ranks, they give the same bits everywhere.
    gathered = verbs.allgather(torch.cat([mean.new_tensor([number]), mean, squares]).unsqueeze(0), comm=comm)
    numbers, means, all_squares = gathered.split([1, channels, channels], dim=1)
    count = numbers.sum().item()
    if count < 2:
        raise ValueError(
            f"SyncBatchNorm: expected at least 2 values per channel when training, not {count:.0f} on all ranks; "
            "drop_last=True of an iterator leaves out an incomplete last batch"
        )
    mean = (numbers * means).sum(0) / count
    return mean, (all_squares + numbers * (means - mean).square()).sum(0) / count, count


def _all_but_channels(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def _along(values: Tensor, x: Tensor) -> Tensor:
    """One value per channel, in a shape that broadcasts against ``x``."""
    return values.view(-1, *[1] * (x.dim() - 2))
