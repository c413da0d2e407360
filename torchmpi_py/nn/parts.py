"""Values between whole and split: what split layers communicate, and the loss of split classes.

Four functions carry values between whole and split, and each one's backward pass is another one's forward pass::

    to_parts      x -> x on every rank            backward: sum of the ranks' gradients
    sum_of_parts  sum of the ranks' terms         backward: dy -> dy on every rank
    join_parts    parts -> the whole              backward: this rank's part
    own_part      the whole -> this rank's part   backward: the whole, from the ranks' parts

They differ from ``nn.functional`` in whose loss they follow: there the sum of the losses of all ranks, here one loss.
Source: Shoeybi et al., Megatron-LM (2019), whose f and g are the first two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from torchmpi_py.collectives import verbs
from torchmpi_py.core import compiling
from torchmpi_py.core.communicators import Communicator
from torchmpi_py.core.tensors import check_tensor
from torchmpi_py.nn.functional import own_communicator
from torchmpi_py.nn.split_parameters import Split

_Map = Callable[[Tensor], Tensor]


class _Carried(Function):
    """A value that is carried by one function; its gradient is carried by another."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: _Map, adjoint: _Map) -> Tensor:
        ctx.adjoint = adjoint
        return value(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.adjoint(dy), None, None


def _carried(x: Tensor, value: _Map, adjoint: _Map) -> Tensor:
    y: Tensor = _Carried.apply(x, value, adjoint)  # type: ignore[no-untyped-call]
    return y


def to_parts(x: Tensor, comm: Communicator) -> Tensor:
    """``x`` as it is, for ranks that each compute a part with it; its gradient is the sum of theirs."""
    return _carried(x, _as_it_is, lambda dy: sum_of_parts(dy, comm))


def sum_of_parts(x: Tensor, comm: Communicator) -> Tensor:
    """The sum of the ranks' ``x``, on every rank; the gradient of each is that of the sum. Collective."""

    def summed(x: Tensor) -> Tensor:
        return verbs.allreduce(x, out=torch.empty_like(x), comm=comm)

    return _carried(x, summed, lambda dy: to_parts(dy, comm))


def join_parts(x: Tensor, split: Split) -> Tensor:
    """The whole of which this rank has the part ``x``; its gradient is this part of the whole's. Collective."""
    return _carried(x, split.whole_of, lambda dy: own_part(dy, split))


def own_part(x: Tensor, split: Split) -> Tensor:
    """This rank's part of ``x``, which is the same on every rank; backward is collective."""
    return _carried(x, lambda x: split.part_of(x).clone(), lambda dy: join_parts(dy, split))


def scale_gradient(x: Tensor, factor: float) -> Tensor:
    """``x`` as it is; its gradient is multiplied."""
    return _carried(x, _as_it_is, lambda dy: dy * factor)


def _as_it_is(x: Tensor) -> Tensor:
    return x.view_as(x)  # a tensor of its own, as autograd wants of a function


def parallel_cross_entropy(
    split_logits: Tensor,
    target: Tensor,
    *,
    comm: Communicator | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """``torch.nn.functional.cross_entropy`` of logits whose classes are split over the ranks of ``comm``. Collective.

    split_logits: (N, this rank's classes), as ``ColumnParallelLinear(gather_output=False)`` gives them; the classes are
    in rank order, and may be unequally many. target: (N,), classes of the whole, the same on every rank. Result: the
    loss, the same on every rank: (N,) with reduction="none", else a number. No rank ever holds the logits of all
    classes; per sample, two numbers and the maximum are reduced. Its backward pass communicates nothing.

    TypeError for targets that are no whole numbers, ValueError for other shapes or another reduction, IndexError for a
    class that does not exist. Source: Megatron-LM.
    """
    check_tensor("parallel_cross_entropy", "split_logits", split_logits)
    check_tensor("parallel_cross_entropy", "target", target)
    _check_loss(split_logits, target, reduction)
    comm = own_communicator(comm)
    counts: list[int] = verbs.allgather(split_logits.shape[1], comm=comm)
    split = Split(comm, 1, tuple(counts))
    is_counted = target != ignore_index
    check_indices("parallel_cross_entropy: target", target[is_counted], sum(counts))
    logits = split_logits.detach()
    largest = logits.amax(1) if split.size else logits.new_full(target.shape, float("-inf"))
    shifted = split_logits - verbs.allreduce(largest, op="max", comm=comm).unsqueeze(1)  # so that exp stays finite
    column = target.long() - split.begin
    (rows,) = (is_counted & (column >= 0) & (column < split.size)).nonzero(as_tuple=True)
    of_target = shifted.new_zeros(target.shape).index_put((rows,), shifted[rows, column[rows]])
    total, of_target = sum_of_parts(torch.stack([shifted.exp().sum(1), of_target]), comm)
    loss: Tensor = (total.log() - of_target).masked_fill(~is_counted, 0)
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.sum() / is_counted.sum()


def check_indices(what: str, indices: Tensor, count: int) -> None:
    """IndexError that names the first index outside 0 to count - 1."""
    outside = indices[(indices < 0) | (indices >= count)]
    if outside.numel():
        raise IndexError(f"{what} {outside[0].item()} is not in 0 to {count - 1}")


def _check_loss(logits: Tensor, target: Tensor, reduction: str) -> None:
    if logits.dim() != 2 or target.shape != logits.shape[:1]:
        raise ValueError(
            f"parallel_cross_entropy: split_logits has shape {tuple(logits.shape)} and target {tuple(target.shape)}; "
            "give (N, this rank's classes) and (N,)"
        )
    if target.is_floating_point() or target.is_complex() or target.dtype is torch.bool:
        raise TypeError(f"parallel_cross_entropy: target is {target.dtype}; give classes, as whole numbers")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"parallel_cross_entropy: reduction={reduction!r}: give 'mean', 'sum' or 'none'")


compiling.leave_alone(to_parts, sum_of_parts, join_parts, own_part, parallel_cross_entropy)
