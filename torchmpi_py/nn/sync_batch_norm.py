"""Batch normalization over the batches of all ranks, on any device.

The idea: the ranks exchange the statistics of their batches, not the batches. An alternative is torch.nn.SyncBatchNorm.
It was rejected because it refuses tensors on the CPU and needs torch.distributed.

Forward pass in training: each rank computes, per channel, the number n of its values, their mean m, and the sum q of
their squared distances from m. The ranks gather these 1 + 2 C numbers in float64 and combine them in rank order. So all
ranks get the same bits, and no precision is lost if the mean is large compared to the standard deviation::

    N = sum n    mean = sum n m / N    var = sum (q + n (m - mean)^2) / N

Backward pass: with x' = (x - mean) / sqrt(var + eps), the ranks reduce the sums of dy and of dy x' (2 C numbers)::

    dx = weight / sqrt(var + eps) * (dy - sum(dy) / N - x' sum(dy x') / N)

The gradients of weight and bias are computed from this rank's batch, as in any layer, and averaged with the other
gradients.

Sources: Chan, Golub, LeVeque (1983) for the combination; torch.nn.SyncBatchNorm for the interface.
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
    """Batch normalization with the statistics of the batches of all ranks, like torch.nn.SyncBatchNorm, but over MPI.

    Inputs have the shape (N, C, ...), where N may differ between ranks and may be 0. In training, both passes
    communicate, so all ranks must run the same layers in the same order, forward and backward. In evaluation, with one
    rank, or without ``mpi.start()``, the layer is an ordinary BatchNorm.

    Args:
        num_features (int): number of channels C.
        eps (float): number added to the variance; default 1e-5.
        momentum (float): weight of a new batch in the running statistics, or None for a cumulative mean; default 0.1.
        affine (bool): whether the layer has a trainable weight and bias; default True.
        track_running_stats (bool): whether the layer keeps running statistics for evaluation; default True.
        comm (Communicator): ranks whose batches are normalized together; default None, the current level.
        device (torch.device or str): device of the parameters; default None, torch's default device.
        dtype (torch.dtype): dtype of the parameters; default None, torch's default dtype.

    Raises:
        ValueError: in ``forward``, on every rank, if all batches together have fewer than 2 values per channel, or if
            the input does not have ``num_features`` channels.

    Examples:
        >>> layer = mpi.nn.SyncBatchNorm(3)
        >>> y = layer(torch.randn(4, 3))  # normalized over the batches of all ranks
        >>> bool(mpi.allreduce(y.detach().sum(0)).abs().max() < 1e-4)
        True
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
        """Normalize ``x``. In training, use the batches of all ranks, and update the running statistics.

        In training, every rank of ``comm`` must make this call.

        Args:
            x (Tensor): input of shape (N, C, ...).

        Returns:
            The normalized tensor, of the shape and dtype of ``x``.
        """
        comm = communicators.resolve(self.comm) if self.training and communicators.is_started() else None
        if comm is None or comm.size == 1:
            return super().forward(x)
        self._check_input_dim(x)
        layer: Any = self  # For mypy, each buffer may be None.
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
        """Convert every BatchNorm layer of a module, or the module itself, to this class.

        **Changes** the layers in place: each layer stays the same object, with its parameters, buffers and hooks. Call
        it on every rank; the ranks do not communicate.

        Args:
            module (torch.nn.Module): module to convert.
            comm (Communicator): ranks whose batches are normalized together; default None, the current level.

        Returns:
            The module.

        Raises:
            TypeError: ``module`` is not a module.
            ValueError: a lazy layer has not been called yet, or a BatchNorm layer overrides ``forward``.
        """
        check_module("convert_sync_batchnorm", module)
        for layer in module.modules():
            name = type(layer).__name__
            if isinstance(layer, LazyModuleMixin) and layer.has_uninitialized_params():
                raise ValueError(f"convert_sync_batchnorm: a {name} is not initialized; first call the network once")
            if isinstance(layer, _BatchNorm):
                if type(layer).forward not in (_BatchNorm.forward, torch.nn.SyncBatchNorm.forward, cls.forward):
                    raise ValueError(f"convert_sync_batchnorm: {name} overrides forward; replace the layer by hand")
                layer.__class__ = cls
                vars(layer)["comm"] = comm
        return module

    def _check_input_dim(self, x: Tensor) -> None:
        if x.dim() < 2 or x.shape[1] != self.num_features:
            raise ValueError(f"SyncBatchNorm: pass x of shape (N, {self.num_features}, ...), not {tuple(x.shape)}")


class _Normalize(Function):
    """The autograd function of the layer.

    It returns the normalized input, and the mean and the unbiased variance of the batches of all ranks.
    """

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
        if x.dtype != mean.dtype:  # torch normalizes 16-bit floats only with float32 parameters.
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
    """Return the mean and variance of each channel over all ranks, in float64, and the number of values per channel."""
    dims, channels = _all_but_channels(x), x.shape[1]
    number = x.numel() // channels
    mean = x.sum(dims, dtype=torch.float64) / max(number, 1)
    dtype = torch.promote_types(x.dtype, torch.float32)
    squares = (x.to(dtype) - _along(mean.to(dtype), x)).square_().sum(dims, dtype=torch.float64)
    # Combining the 1 + 2 C numbers of each rank in rank order gives all ranks the same bits.
    gathered = verbs.allgather(torch.cat([mean.new_tensor([number]), mean, squares]).unsqueeze(0), comm=comm)
    numbers, means, all_squares = gathered.split([1, channels, channels], dim=1)
    count = numbers.sum().item()
    if count < 2:
        raise ValueError(
            f"SyncBatchNorm: expected at least 2 values per channel in training, found {count:.0f} on all ranks; "
            "to omit an incomplete last batch, pass drop_last=True to the iterator or the DataLoader"
        )
    mean = (numbers * means).sum(0) / count
    return mean, (all_squares + numbers * (means - mean).square()).sum(0) / count, count


def _all_but_channels(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def _along(values: Tensor, x: Tensor) -> Tensor:
    """Return one value per channel, in a shape that can be broadcast to the shape of ``x``."""
    return values.view(-1, *[1] * (x.dim() - 2))
