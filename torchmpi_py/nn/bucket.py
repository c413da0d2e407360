"""One bucket of gradients: dense ones, reduced at once in flat memory, or a sparse one, whose rows are gathered."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from torchmpi_py.collectives import verbs
from torchmpi_py.core.communicators import Communicator
from torchmpi_py.core.handles import Handle, wait_all
from torchmpi_py.memory.symmetric import find
from torchmpi_py.nn.absent_gradients import AbsentGradient
from torchmpi_py.nn.compression import Compression, Compressor
from torchmpi_py.nn.members import modules_of
from torchmpi_py.nn.split_parameters import split_of

_live: weakref.WeakSet[Bucket] = weakref.WeakSet()


class Bucket:
    """Parameters of one dtype and device, and the flat memory for their gradients.

    ``comm``: the ranks that hold the same parameters. ``publishes``: the reduction may read the one gradient where
    backward has left it, without a copy into the bucket. From the time that a gradient is in the bucket until
    ``finish``, ``p.grad`` is an AbsentGradient.
    """

    absent_kind = AbsentGradient

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        flat: Tensor,
        comm: Communicator,
        compression: Compression | None = None,
    ) -> None:
        self.parameters = list(parameters)
        self.comm = comm
        self.flat = flat
        split = split_of(self.parameters[0])
        self.num_parts = 1 if split is None else split.comm.size
        parts = torch.split(self.flat, [p.numel() for p in parameters])
        self._views = {p: shaped(part, p) for p, part in zip(parameters, parts, strict=True)}
        self.compressor: Compressor | None = None
        if compression is not None and comm.size > 1:
            self.compressor = compression.compressor(flat, list(self._views.values()), comm)
        is_lone = len(self.parameters) == 1 and self.num_parts == 1 and self.compressor is None
        self.publishes = is_lone and comm.num_nodes == 1 and find(flat) is not None
        self._absent = {p: self.absent_kind(p) for p in parameters}
        _live.add(self)
        self._kinds = [(view.shape, view.dtype, view.device) for view in self._views.values()]

    def fits(self, parameters: Sequence[torch.nn.Parameter]) -> bool:
        """Whether these parameters have the shapes, dtype and device for which the bucket was made."""
        return [(p.shape, p.dtype, p.device) for p in parameters] == self._kinds

    def adopt(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Serve other parameters, which fit, in place of the present ones."""
        self.parameters = list(parameters)
        self._views = dict(zip(parameters, self._views.values(), strict=True))
        self._absent = dict(zip(parameters, self._absent.values(), strict=True))

    def insert(self, parameter: torch.nn.Parameter) -> None:
        """Copy a gradient into the bucket, unless it lies there; zero for None. ``p.grad`` is absent from then on."""
        view, gradient, absent = self._views[parameter], parameter.grad, self._absent[parameter]
        if gradient is absent:
            return
        if gradient is None:
            view.zero_()
        elif _lies_elsewhere(gradient, view):
            _check_takable(gradient, view)
            view.copy_(gradient.detach())
        parameter.grad = absent

    def holds_gradient(self) -> bool:
        """Whether the gradient of one of its parameters lies in it."""
        return next(self.held(), None) is not None

    def owes(self, parameter: torch.nn.Parameter) -> bool:
        """Whether the reduced gradient has a part of earlier ones, which error feedback has kept; on all ranks alike.

        Of a parameter that no rank has used. Of a part of a split one always, for other parts may have some.
        """
        is_kept = self.compressor is not None and self.compressor.has_error_feedback
        return is_kept and (self.num_parts > 1 or bool(self._views[parameter].any()))

    def held(self) -> Iterator[torch.nn.Parameter]:
        """The parameters whose gradients lie in it."""
        for parameter, view in self._views.items():
            gradient, absent = parameter.grad, self._absent[parameter]
            if gradient is not None and (gradient is absent or gradient.data_ptr() == view.data_ptr()):
                yield parameter

    def launch(self, op: str) -> list[Handle[Any]]:
        """Start the reduction of all gradients of the bucket; those that are not in it are inserted now."""
        x = self._input(op)
        if self.compressor is not None:
            return self.compressor.launch(op)
        return [verbs.allreduce_async(x, out=self.flat, op=op, comm=self.comm)]

    def finish(self, op: str) -> None:
        """Once what was launched is done: ``p.grad`` are views of the reduced gradients in the bucket. Collective."""
        if self.compressor is not None:
            self.compressor.finish(op)
        for parameter, view in self._views.items():
            parameter.grad = view.detach()  # a tensor of its own: module.to() changes what is in parameter.grad

    def reduce(self, op: str) -> None:
        """Reduce all gradients of the bucket; ``finish`` is still to be called. Collective."""
        if self.compressor is None:
            verbs.allreduce(self._input(op), out=self.flat, op=op, comm=self.comm)
        else:
            wait_all(self.launch(op))

    def _input(self, op: str) -> Tensor:
        """The values to reduce, flat: the bucket itself, or the one gradient that is reduced into it."""
        first = self.parameters[0]
        gradient, view, absent = first.grad, self._views[first], self._absent[first]
        # A lone gradient in the layout of its view is read where it is; the result lands in the bucket.
        if (
            self.publishes
            and gradient is not None
            and gradient is not absent
            and gradient.data_ptr() != view.data_ptr()
            and gradient.stride() == view.stride()
            and gradient.is_contiguous()
        ):
            _check_takable(gradient, view)
            first.grad = absent
            return gradient.detach().view(-1)
        self._insert_all()
        if op == "sum" and self.num_parts > 1:
            self.flat.mul_(self.num_parts)  # each of the ranks that share a whole counts, as with unsplit parameters
        return self.flat

    def _insert_all(self) -> None:
        """Insert the gradients of all parameters: with many, in a fraction of the time that each alone would take."""
        views, gradients = [], []
        with torch.no_grad():
            for parameter, view in self._views.items():
                absent = self._absent[parameter]
                if (gradient := parameter.grad) is absent:
                    continue
                if gradient is None:
                    view.zero_()
                elif _lies_elsewhere(gradient, view):
                    _check_takable(gradient, view)
                    views.append(view)
                    gradients.append(gradient)
                parameter.grad = absent
            if views:
                torch._foreach_copy_(views, gradients)


class SparseBucket(Bucket):
    """One parameter whose gradients are sparse, such as the weight of an ``Embedding(sparse=True)``.

    All ranks gather the rows of all, so that the reduced gradient is sparse too, with the bytes of the rows alone.
    Where another layer uses the weight too, its gradient is dense; from the first time that it is on any rank it is
    reduced as a dense one on all.
    """

    def __init__(self, parameter: torch.nn.Parameter, comm: Communicator) -> None:
        self.parameters = [parameter]
        self.comm = comm
        self.num_parts = 1
        self.compressor = None
        self.publishes = True
        self.flat = torch.empty(0, dtype=parameter.dtype, device=parameter.device)  # the reduced values
        self._shape = parameter.shape
        self._is_dense = False
        self._result: Tensor | None = None
        self._absent = {parameter: AbsentGradient(parameter)}
        self._handles: list[Handle[Any]] = []

    def fits(self, parameters: Sequence[torch.nn.Parameter]) -> bool:
        (p,) = parameters
        return p.shape == self._shape and p.dtype == self.flat.dtype and p.device == self.flat.device

    def adopt(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self._absent = {p: AbsentGradient(p) for p in parameters}

    def insert(self, parameter: torch.nn.Parameter) -> None:
        """Nothing: the gradient stays where it is."""

    def holds_gradient(self) -> bool:
        return self._result is not None and self.parameters[0].grad is self._result

    def launch(self, op: str) -> list[Handle[Any]]:
        (p,) = self.parameters
        gradient, p.grad = p.grad, self._absent[p]
        # Once a rank has brought a dense gradient, all ranks reduce dense ones.
        if self._is_dense:
            dense = self.flat.new_zeros(self._shape) if gradient is None else gradient.detach().to_dense()
            self._handles = [verbs.allreduce_async(dense.contiguous(), op=op, comm=self.comm)]
            return self._handles
        rows, values = torch.empty(0, dtype=torch.int64, device=self.flat.device), self.flat.new_empty(0)
        if gradient is not None:
            sparse = gradient.detach().to_sparse(1) if gradient.layout is torch.strided else gradient.detach()
            total = self._added(sparse._indices(), sparse._values())
            rows, values = total.indices()[0], total.values().to(self.flat.dtype)
            if gradient.layout is torch.strided:  # which a row past the last one tells the others
                rows = torch.cat([rows, rows.new_tensor([self._shape[0]])])
                values = torch.cat([values, values.new_zeros(1, *self._shape[1:])])
        self._handles = [
            verbs.allgather_async(rows, comm=self.comm),
            verbs.allgather_async(values.reshape(-1, *self._shape[1:]), comm=self.comm),
        ]
        return self._handles

    def finish(self, op: str) -> None:
        (p,) = self.parameters
        if self._is_dense:
            (handle,) = self._handles
            self._result = handle.wait()
            self.flat = self._result.view(-1)
        else:
            rows, values = (handle.wait() for handle in self._handles)
            # A row past the last one: some rank's gradient is dense.
            is_row = rows < self._shape[0]
            self._is_dense = not bool(is_row.all())
            total = self._added(rows[is_row][None], values[is_row])
            if op == "avg":
                total.values().div_(self.comm.size)
            total = total.to(self.flat.dtype)
            self._result = total.to_dense() if self._is_dense else total.coalesce()
            self.flat = self._result.view(-1) if self._is_dense else self._result.values()
        self._handles = []
        p.grad = self._result

    def reduce(self, op: str) -> None:
        wait_all(self.launch(op))

    def _added(self, indices: Tensor, values: Tensor) -> Tensor:
        """A coalesced tensor; values of equal rows are added, those of 16 bits in float32."""
        values = values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
        return torch.sparse_coo_tensor(
            indices, values, self._shape, device=values.device, check_invariants=False
        ).coalesce()


def sparse_parameters(module: torch.nn.Module) -> set[torch.nn.Parameter]:
    """The parameters of a module whose gradients are sparse."""
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    embeddings = [part for part in modules_of(module) if isinstance(part, kinds) and part.sparse]
    return {m.weight for m in embeddings if isinstance(m.weight, torch.nn.Parameter)}


def _lies_elsewhere(gradient: Tensor, view: Tensor) -> bool:
    return gradient.data_ptr() != view.data_ptr() or gradient.stride() != view.stride()


def _check_takable(gradient: Tensor, view: Tensor) -> None:
    """TypeError for a gradient of another dtype than its parameter."""
    if gradient.dtype is not view.dtype:
        raise TypeError(
            f"a gradient of shape {tuple(view.shape)} is {gradient.dtype}, and its parameter {view.dtype}: gradients "
            "are reduced in the dtype of their parameters; leave grad_dtype= of the parameter as it is"
        )


def _leave_gradients() -> None:
    """In a forked child: its gradients are no longer those in the buckets, which are the memory of the parent, too."""
    for bucket in list(_live):
        for parameter in bucket.held():
            parameter.grad = None


os.register_at_fork(after_in_child=_leave_gradients)


def shaped(part: Tensor, parameter: Tensor) -> Tensor:
    """A part of flat memory in the shape of a parameter, and in its layout where that leaves no gaps."""
    plain = parameter.detach()
    is_dense = plain.numel() == 0 or torch.empty_like(plain).stride() == plain.stride()
    return part.as_strided(plain.shape, plain.stride()) if is_dense else part.view(plain.shape)
