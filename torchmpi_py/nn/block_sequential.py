"""BlockSequential: a Sequential in blocks of about equal numbers of parameters, each with flat weights and gradients.

The number of blocks chooses the grain of communication: a block's gradient is one tensor, reduced in one operation.
Source: TorchMPI's class of that name, without its empty first block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


@dataclasses.dataclass
class Block:
    """Neighbouring children; their parameters are views into ``weights``, and ``gradients`` holds their gradients."""

    children: tuple[torch.nn.Module, ...]
    parameters: list[torch.nn.Parameter]
    weights: Tensor
    gradients: Tensor

    def flatten(self) -> None:
        """Make the parameters views of ``weights`` again, with their values, where they have other memory now."""
        views = _views(self.weights, self.parameters)
        if all(p.data_ptr() == view.data_ptr() for p, view in zip(self.parameters, views, strict=True)):
            return
        self.weights = _flattened(self.parameters)

    def collect(self) -> Tensor:
        """Make every ``p.grad`` a view of ``gradients``, with its values (zero for None), and return ``gradients``."""
        for parameter, view in zip(self.parameters, _views(self.gradients, self.parameters), strict=True):
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad.data_ptr() != view.data_ptr():
                view.copy_(parameter.grad)
            parameter.grad = view
        return self.gradients


def partition(sizes: Sequence[int], partitions: int) -> list[range]:
    """Cut children of these sizes into runs, none larger than ceil(total / partitions) unless a single child is.

    There may be more runs than ``partitions``; none is empty.
    """
    target = -(-sum(sizes) // partitions)
    runs, begin, filled = [], 0, 0
    for index, size in enumerate(sizes):
        if index > begin and filled + size > target:
            runs.append(range(begin, index))
            begin, filled = index, 0
        filled += size
    return [*runs, range(begin, len(sizes))] if sizes else runs


class BlockSequential(torch.nn.Sequential):
    """A Sequential in about ``partitions`` blocks. Use it as a Sequential, or reduce block after block.

    ::

        output = net(x)
        loss = criterion(output, y)
        (gradient,) = torch.autograd.grad(loss, output)
        for block in net.backward_blocks(gradient):  # from the last block to the first
            handles.append(mpi.allreduce_async(block.gradients, op="avg"))

    ``register_async_backward`` does that inside ``loss.backward()``. Children that share parameters, and those between
    them, stay in one block. All parameters of a block share a dtype and device.
    """

    def __init__(self, partitions: int, *modules: torch.nn.Module) -> None:
        if partitions < 1:
            raise ValueError(f"BlockSequential: partitions={partitions} must be at least 1")
        super().__init__(*modules)
        self.partitions = partitions
        self._boundaries: list[Tensor] = []
        self._blocks: list[Block] = []
        self._cut()

    @property
    def blocks(self) -> list[Block]:
        """The blocks, first to last; cut again when children or parameters were exchanged."""
        self._cut()
        for block in self._blocks:
            block.flatten()
        return self._blocks

    def __getitem__(self, index: Any) -> Any:
        """A child, or for a slice a plain Sequential."""
        return torch.nn.Sequential(*list(self)[index]) if isinstance(index, slice) else super().__getitem__(index)

    def forward(self, x: Tensor) -> Tensor:
        """As Sequential; remembers what passes between the blocks until ``backward_blocks`` or the next forward."""
        self._cut()
        self._boundaries = [x]
        for block in self._blocks:  # wherever their parameters are: an optimizer may have moved them
            for child in block.children:
                x = child(x)
            self._boundaries.append(x)
        return x

    def backward_blocks(self, gradient: Tensor) -> Iterator[Block]:
        """Backward from ``gradient`` (of the last forward's output), a block at a time from the last to the first.

        Yields a block when its ``gradients`` hold what was accumulated so far plus this pass. The gradient of the
        input, if it requires one, is added to its ``grad`` at the end.
        """
        if not self._boundaries:
            raise RuntimeError("backward_blocks: call forward first; each forward serves one backward")
        boundaries, self._boundaries = self._boundaries, []
        for index in reversed(range(len(self._blocks))):
            block, before, after = self._blocks[index], boundaries[index], boundaries[index + 1]
            wanted: list[Tensor] = [p for p in block.parameters if p.requires_grad]
            wanted += [before] * before.requires_grad
            # Through this block alone: its input's gradient is where the block before goes on.
            found = torch.autograd.grad(after, wanted, gradient, allow_unused=True) if wanted else ()
            block.flatten()
            block.collect()
            for tensor, part in zip(wanted, found, strict=True):
                if tensor is not before and part is not None:
                    assert tensor.grad is not None, "collect() gave every parameter a view"
                    tensor.grad.add_(part)
            yield block
            if before.requires_grad:
                gradient = found[-1]
        if boundaries[0].requires_grad and boundaries[0].is_leaf:
            boundaries[0].grad = gradient if boundaries[0].grad is None else boundaries[0].grad + gradient

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_boundaries": []}  # the tensors of a forward pass cannot be copied

    def _is_current(self) -> bool:
        """Whether the blocks still hold this module's children and parameters, of the same dtypes and devices."""
        children = [child for block in self._blocks for child in block.children]
        parameters = [p for block in self._blocks for p in block.parameters]
        if list(map(id, (*self, *_parameters(self)))) != list(map(id, (*children, *parameters))):
            return False
        return all(_kinds(block.parameters) <= _kinds([block.weights]) for block in self._blocks)

    def _cut(self) -> None:
        """Cut the module into blocks, with flat memory, unless the present ones are current."""
        if self._is_current():
            return
        children = list(self)  # not children(), which leaves out a module that comes again
        atoms = inseparable([list(child.parameters()) for child in children])
        owned = [_parameters(children[index] for index in atom) for atom in atoms]
        self._blocks = []
        for run in partition([sum(p.numel() for p in parameters) for parameters in owned], self.partitions):
            parameters = [p for atom in run for p in owned[atom]]
            members = tuple(children[index] for atom in run for index in atoms[atom])
            weights = _flattened(parameters)
            self._blocks.append(Block(members, parameters, weights, torch.zeros_like(weights)))


def inseparable(parameters: Sequence[Sequence[Hashable]]) -> list[range]:
    """Cut children, given the parameters of each, into the shortest runs that share none; a block holds whole runs."""
    last = {p: index for index, own in enumerate(parameters) for p in own}
    runs, begin, end = [], 0, 0
    for index, own in enumerate(parameters):
        end = max([end, *(last[p] for p in own)])
        if index == end:
            runs.append(range(begin, index + 1))
            begin = end = index + 1
    return runs


def _parameters(modules: Iterable[torch.nn.Module]) -> list[torch.nn.Parameter]:
    return list(dict.fromkeys(p for module in modules for p in module.parameters()))


def _kinds(tensors: Iterable[Tensor]) -> set[tuple[torch.dtype, torch.device]]:
    return {(x.dtype, x.device) for x in tensors}


def _flattened(parameters: Sequence[torch.nn.Parameter]) -> Tensor:
    """Flat memory, of which the parameters have become views."""
    kinds = _kinds(parameters)
    if len(kinds) > 1:
        raise ValueError(f"BlockSequential: the parameters of a block have several dtypes or devices: {kinds}")
    if not parameters:
        return torch.empty(0)
    if _follow_each_other(parameters):  # they are flat already, perhaps where Hogwild has moved all of their memory
        return parameters[0].data.as_strided((sum(p.numel() for p in parameters),), (1,))
    flat = torch.cat([p.detach().reshape(-1) for p in parameters])
    for parameter, view in zip(parameters, _views(flat, parameters), strict=True):
        parameter.data = view
    return flat


def _follow_each_other(parameters: Sequence[torch.nn.Parameter]) -> bool:
    """Whether the parameters lie one after another in one memory, without gaps."""
    memory, end = parameters[0].untyped_storage().data_ptr(), parameters[0].storage_offset()
    for p in parameters:
        if not p.is_contiguous() or p.untyped_storage().data_ptr() != memory or p.storage_offset() != end:
            return False
        end += p.numel()
    return True


def _views(flat: Tensor, parameters: Sequence[torch.nn.Parameter]) -> list[Tensor]:
    parts = torch.split(flat, [p.numel() for p in parameters])
    return [part.view(p.shape) for part, p in zip(parts, parameters, strict=True)]
