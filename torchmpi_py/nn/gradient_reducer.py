"""One bucket of gradients, and its reduction. Sparse, compressed and sharded buckets derive from this dense bucket.

A bucket goes through three phases in each step:

1. ``insert``: the backward pass has completed a gradient. The gradient is copied into the bucket's flat memory while it
   is in the cache, and ``p.grad`` becomes an AbsentGradient. (Accumulating into views of flat memory would move more
   data, because the views have to be zeroed and read again.)
2. ``launch``: the reduction starts when the gradients of the bucket are complete or the backward pass is over. A
   parameter without a gradient on this rank counts as zero.
3. ``finish``: the reduction is complete. ``p.grad`` becomes a view of the flat memory, which holds the reduced
   gradients.

A gradient that is alone in its bucket is not copied. The reduction reads this gradient from the memory to which
autograd has written it, and flavour ``shared`` publishes only the slices that other ranks reduce.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from torchmpi_py.collectives import verbs
from torchmpi_py.core.communicators import Communicator
from torchmpi_py.core.handles import Handle
from torchmpi_py.memory.symmetric import find
from torchmpi_py.nn.absent_gradients import AbsentGradient

_live: weakref.WeakSet[GradientReducer] = weakref.WeakSet()


class GradientReducer:
    """Parameters of one dtype and device, and the flat memory for their gradients.

    All ranks of ``comm`` must call ``launch`` or ``reduce``, and then ``finish``. ``op`` is "avg" or "sum".
    """

    absent_kind = AbsentGradient

    has_state = False
    """Whether the bucket keeps state from one step to the next. ``restart`` drops this state."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], flat: Tensor, comm: Communicator) -> None:
        self.parameters = list(parameters)
        self.flat = flat
        self.comm = comm
        self._views = dict(zip(parameters, views_of(flat, parameters), strict=True))
        self._absent = {p: self.absent_kind(p) for p in parameters}
        self._kinds = [(p.shape, p.dtype, p.device) for p in parameters]
        self.reads_in_place = len(self.parameters) == 1 and comm.num_nodes == 1 and find(flat) is not None
        _live.add(self)

    def fits(self) -> bool:
        """Return whether the parameters still have the shapes, dtype and device for which the bucket was created."""
        return [(p.shape, p.dtype, p.device) for p in self.parameters] == self._kinds

    def holds(self, parameter: torch.nn.Parameter) -> bool:
        """Return whether the gradient of a parameter is in the bucket."""
        gradient, view = parameter.grad, self._views[parameter]
        if gradient is None or gradient is self._absent[parameter]:
            return gradient is not None
        return gradient.layout is torch.strided and gradient.data_ptr() == view.data_ptr()

    def insert(self, parameter: torch.nn.Parameter) -> None:
        """Copy a complete gradient into the bucket."""
        if not self.reads_in_place:
            self._insert([parameter])

    def launch(self, op: str) -> list[Handle[Any]]:
        """Start the reduction of all gradients of the bucket, and return the handles to wait for before ``finish``."""
        return [verbs.allreduce_async(self._input(), out=self.flat, op=op, comm=self.comm)]

    def reduce(self, op: str) -> None:
        """Reduce all gradients of the bucket on the calling thread; call ``finish`` next."""
        verbs.allreduce(self._input(), out=self.flat, op=op, comm=self.comm)

    def finish(self, op: str) -> None:
        """Make each ``p.grad`` a view of the reduced gradients."""
        for parameter, view in self._views.items():
            parameter.grad = view.detach()  # Detach the view, because module.to() changes parameter.grad in place.

    def owes(self, parameter: torch.nn.Parameter) -> bool:
        """Return whether a parameter gets a gradient although no rank has computed one.

        The result is the same on all ranks.
        """
        return False

    def restart(self) -> None:
        """Drop the state of earlier steps. All ranks must call this in the same step."""

    def _input(self) -> Tensor:
        """Return the flat values to reduce: the bucket, or a single gradient in place if its layout fits."""
        first = self.parameters[0]
        view = self._views[first]
        if self.reads_in_place and not self.holds(first) and (gradient := dense_gradient(first)) is not None:
            _check_dtype(gradient, view)
            if gradient.stride() == view.stride() and gradient.is_contiguous():
                first.grad = self._absent[first]
                return gradient.detach().view(-1)
        self._insert(self.parameters)
        return self.flat

    def _insert(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Copy the gradients that the bucket does not contain yet, in one call. Write zeros for missing gradients."""
        views, gradients = [], []
        for parameter in parameters:
            gradient, view, absent = dense_gradient(parameter), self._views[parameter], self._absent[parameter]
            if gradient is absent:
                continue
            if gradient is None:
                view.zero_()
            elif gradient.data_ptr() != view.data_ptr() or gradient.stride() != view.stride():
                _check_dtype(gradient, view)
                views.append(view)
                gradients.append(gradient.detach())
            parameter.grad = absent
        if views:
            torch._foreach_copy_(views, gradients)


def views_of(flat: Tensor, parameters: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield a view of ``flat`` for each parameter.

    A view has the shape of the parameter, and the strides of the parameter if the strides leave no gaps.
    """
    sizes = [p.numel() for p in parameters]
    for part, parameter in zip(torch.split(flat[: sum(sizes)], sizes), parameters, strict=True):
        plain = parameter.detach()
        is_dense = plain.numel() == 0 or torch.empty_like(plain).stride() == plain.stride()
        yield part.as_strided(plain.shape, plain.stride()) if is_dense else part.view(plain.shape)


def dense_gradient(parameter: torch.nn.Parameter) -> Tensor | None:
    """Return the gradient of a parameter, or a dense copy if the gradient is sparse."""
    gradient = parameter.grad
    return gradient if gradient is None or gradient.layout is torch.strided else gradient.to_dense()


def _check_dtype(gradient: Tensor, view: Tensor) -> None:
    if gradient.dtype is not view.dtype:
        raise TypeError(
            f"a gradient of shape {tuple(view.shape)} is {gradient.dtype}, but its parameter is {view.dtype}: "
            "gradients are reduced in the dtype of their parameters; do not set the parameter's grad_dtype"
        )


def _leave_gradients() -> None:
    """Drop the gradients in a forked child, because its buckets share memory with the parent."""
    for reducer in list(_live):
        for parameter in filter(reducer.holds, reducer.parameters):
            parameter.grad = None


os.register_at_fork(after_in_child=_leave_gradients)
