"""Reduce the sparse gradient of one parameter, such as the weight of an ``Embedding(sparse=True)``.

Each rank gathers the rows of all ranks. So the reduced gradient is sparse too, and only rows with values are sent.

If another layer on a rank also uses the weight, that rank's gradient is dense, and the reduced gradient is dense on
every rank. A rank with a dense gradient reports it by an additional row, whose number is one past the last row.
``sparse_as_dense`` is faster in this case.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchmpi_py.collectives import verbs
from torchmpi_py.core.communicators import Communicator
from torchmpi_py.core.handles import Handle, wait_all
from torchmpi_py.nn.gradient_reducer import GradientReducer
from torchmpi_py.nn.members import modules_of


class SparseReducer(GradientReducer):
    """A bucket that reduces one sparse gradient by gathering rows and values. ``flat`` holds the reduced values."""

    def __init__(self, parameter: torch.nn.Parameter, comm: Communicator) -> None:
        super().__init__([parameter], torch.empty(parameter.numel(), device="meta"), comm)  # The views need no memory.
        self.flat = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
        self._result: Tensor | None = None
        self._handles: list[Handle[Any]] = []

    def holds(self, parameter: torch.nn.Parameter) -> bool:
        return self._result is not None and parameter.grad is self._result

    def insert(self, parameter: torch.nn.Parameter) -> None:
        """Do nothing, because ``launch`` reads the gradient from ``p.grad``."""

    def launch(self, op: str) -> list[Handle[Any]]:
        (p,) = self.parameters
        gradient, p.grad = p.grad, self._absent[p]
        rows, values = torch.empty(0, dtype=torch.int64, device=p.device), self.flat.new_empty(0)
        if gradient is not None:
            sparse = gradient.detach()
            is_dense = not sparse.is_sparse
            sparse = sparse.to_sparse(1) if is_dense else sparse
            total = _added(sparse._indices(), sparse._values(), p.shape)
            rows, values = total.indices()[0], total.values().to(p.dtype)
            if is_dense:
                rows = torch.cat([rows, rows.new_tensor([p.shape[0]])])
                values = torch.cat([values, values.new_zeros(1, *p.shape[1:])])
        columns = values.reshape(-1, *p.shape[1:])
        self._handles = [verbs.allgather_async(x, comm=self.comm) for x in (rows, columns)]
        return self._handles

    def reduce(self, op: str) -> None:
        wait_all(self.launch(op))

    def finish(self, op: str) -> None:
        (p,) = self.parameters
        rows, values = (handle.wait() for handle in self._handles)
        self._handles = []
        is_row = rows < p.shape[0]
        total = _added(rows[is_row][None], values[is_row], p.shape)
        if op == "avg":
            total.values().div_(self.comm.size)
        self._result = total.to(p.dtype).coalesce()
        self.flat = self._result.values()
        if not is_row.all():
            self._result = self._result.to_dense()
            self.flat = self._result.view(-1)
        p.grad = self._result


def _added(indices: Tensor, values: Tensor, shape: torch.Size) -> Tensor:
    """Return a coalesced tensor, in which values of the same row are added. 16-bit values become float32."""
    values = values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
    return torch.sparse_coo_tensor(indices, values, shape, device=values.device, check_invariants=False).coalesce()


def sparse_parameters(module: torch.nn.Module) -> set[torch.nn.Parameter]:
    """Return the parameters of a module that have sparse gradients."""
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    embeddings = [part for part in modules_of(module) if isinstance(part, kinds) and part.sparse]
    return {m.weight for m in embeddings if isinstance(m.weight, torch.nn.Parameter)}
