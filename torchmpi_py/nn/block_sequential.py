"""BlockSequential: a Sequential in blocks of about equal numbers of parameters, each with flat weights and gradients.

The number of blocks chooses the grain of communication: a block's gradient is one tensor, reduced in one operation.
Source: TorchMPI's class of that name, without its empty first block.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from torchmpi_py.core.tensors import check_count


@dataclasses.dataclass(eq=False)
class Block:
    """Neighbouring children, and their parameters.

    ``weights`` and ``gradients`` have memory of their own only where the parameters or gradients lie apart. So both
    follow whatever is done to the parameters, and blocks of one BlockSequential need not be kept.
    """

    children: tuple[torch.nn.Module, ...]
    parameters: list[torch.nn.Parameter]

    @property
    def weights(self) -> Tensor:
        """The parameters as one flat tensor. They become views of it, if they are not."""
        flat = _flat(self.parameters)
        for parameter, view in zip(self.parameters, _views(flat, self.parameters), strict=True):
            parameter.data = view
        return flat

    @property
    def trained(self) -> list[torch.nn.Parameter]:
        """The parameters that take a gradient."""
        return [p for p in self.parameters if p.requires_grad]

    @property
    def gradients(self) -> Tensor:
        """The gradients of ``trained`` as one flat tensor, zero for None. They become views of it, if they are not."""
        flat = _flat([torch.zeros_like(p) if p.grad is None else p.grad for p in self.trained])
        for parameter, view in zip(self.trained, _views(flat, self.trained), strict=True):
            parameter.grad = view
        return flat


def partition(parameters: Sequence[Sequence[torch.nn.Parameter]], partitions: int) -> list[range]:
    """Cut children, given the parameters of each, into runs, none larger than ceil(total / partitions) elements.

    Children that share parameters, and those between them, stay together. A run is larger only if such children, or a
    single one, are. There may be more runs than ``partitions``; none is empty.
    """
    last = {p: index for index, own in enumerate(parameters) for p in own}
    target = -(-sum(p.numel() for p in last) // partitions)
    runs, begin, num_elements = [], 0, 0
    first = end = 0  # of the children that stay together
    for index, own in enumerate(parameters):
        end = max([end, *(last[p] for p in own)])
        if index < end:
            continue
        size = sum(p.numel() for p in {p for each in parameters[first : index + 1] for p in each})
        if first > begin and num_elements + size > target:
            runs.append(range(begin, first))
            begin, num_elements = first, 0
        num_elements += size
        first = end = index + 1
    return [*runs, range(begin, len(parameters))] if parameters else runs


class BlockSequential(torch.nn.Sequential):
    """A Sequential in about ``partitions`` blocks. Use it as a Sequential, or reduce block after block.

    ::

        output = net(x)
        loss = criterion(output, y)
        (gradient,) = torch.autograd.grad(loss, output)
        for block in net.backward_blocks(gradient):  # from the last block to the first
            handles.append(mpi.allreduce_async(block.gradients, op="avg"))

    ``register_async_backward`` does that inside ``loss.backward()``. Children that share parameters, and those between
    them, stay in one block. All parameters of a block share a dtype and device. A frozen parameter has no place in
    ``block.gradients``.
    """

    def __init__(self, partitions: int, *modules: torch.nn.Module) -> None:
        super().__init__(*modules)
        self.partitions = check_count("BlockSequential: partitions", partitions, 1)
        self._passed: list[tuple[Block, Tensor, Tensor]] = []  # with input and output in the last forward pass
        for block in self.blocks:
            _ = block.weights  # flat from the start; ValueError if they cannot be

    @property
    def blocks(self) -> list[Block]:
        """The blocks of the present children, first to last."""
        children = list(self)  # not children(), which leaves out a module that comes again
        runs = partition([list(child.parameters()) for child in children], self.partitions)
        members = [children[run.start : run.stop] for run in runs]
        return [Block(tuple(modules), _parameters(modules)) for modules in members]

    def __getitem__(self, index: Any) -> Any:
        """A child, or for a slice a plain Sequential."""
        return torch.nn.Sequential(*list(self)[index]) if isinstance(index, slice) else super().__getitem__(index)

    def forward(self, x: Tensor) -> Tensor:
        """Compute what Sequential computes; keep what passes between the blocks for ``backward_blocks``."""
        self._passed = []
        for block in self.blocks:  # wherever their parameters are: an optimizer may have moved them
            before = x
            for child in block.children:
                x = child(x)
            if torch.is_grad_enabled():
                self._passed.append((block, before, x))
        return x

    def backward_blocks(self, gradient: Tensor) -> Iterator[Block]:
        """Run backward from ``gradient`` (of the last forward's output), a block at a time from the last to the first.

        Yields a block when its ``gradients`` hold what was accumulated so far plus this pass. The gradient of the
        input, if it requires one, is added to its ``grad`` at the end.
        """
        if not self._passed:
            raise RuntimeError("backward_blocks: call forward first; each forward serves one backward")
        passed, self._passed = self._passed, []
        for block, before, after in reversed(passed):
            wanted = [*block.trained, *([before] if before.requires_grad else [])]
            # Through this block alone: its input's gradient is where the block before goes on.
            parts = torch.autograd.grad(after, wanted, gradient, allow_unused=True) if wanted else ()
            for view, part in zip(_views(block.gradients, block.trained), parts, strict=False):
                if part is not None:
                    view.add_(part)
            yield block
            if before.requires_grad:
                gradient = parts[-1]
        x = passed[0][1]
        if x.requires_grad and x.is_leaf:
            x.grad = gradient if x.grad is None else x.grad + gradient

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_passed": []}  # the tensors of a forward pass cannot be copied


def _parameters(modules: Sequence[torch.nn.Module]) -> list[torch.nn.Parameter]:
    return list(dict.fromkeys(p for module in modules for p in module.parameters()))


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    """One flat tensor with the values of all: their memory, if they lie one after another in it, else a copy."""
    if not tensors:
        return torch.empty(0)
    if len(kinds := {(x.dtype, x.device) for x in tensors}) > 1:
        raise ValueError(f"BlockSequential: the parameters of a block have several dtypes or devices: {kinds}")
    if _follow_each_other(tensors):  # perhaps where Hogwild has moved all of their memory
        return tensors[0].data.as_strided((sum(x.numel() for x in tensors),), (1,))
    return torch.cat([x.detach().reshape(-1) for x in tensors])


def _follow_each_other(tensors: Sequence[Tensor]) -> bool:
    """Whether the tensors lie one after another in one memory, without gaps."""
    memory = tensors[0].untyped_storage().data_ptr()
    offsets = itertools.accumulate((x.numel() for x in tensors), initial=tensors[0].storage_offset())
    return all(
        x.is_contiguous() and x.untyped_storage().data_ptr() == memory and x.storage_offset() == offset
        for x, offset in zip(tensors, offsets, strict=False)
    )


def _views(flat: Tensor, parameters: Sequence[torch.nn.Parameter]) -> list[Tensor]:
    parts = torch.split(flat, [p.numel() for p in parameters])
    return [part.view(p.shape) for part, p in zip(parts, parameters, strict=True)]
