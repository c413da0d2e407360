"""BlockSequential: a Sequential divided into blocks of about equal size, each with flat weights and gradients.

The number of blocks sets the granularity of communication, because the gradient of a block is one tensor and is reduced
in one operation. Source: the class BlockSequential of TorchMPI. The empty first block that TorchMPI creates is omitted.
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
    """Consecutive children of a BlockSequential, and their parameters.

    ``BlockSequential.blocks`` creates the blocks. ``weights`` and ``gradients`` return the current values each time, so
    you need not keep a block. Both allocate memory only if the parameters or gradients are not adjacent in memory.

    Args:
        children (tuple of torch.nn.Module): consecutive children of the BlockSequential, in order.
        parameters (list of torch.nn.Parameter): parameters of the children, each listed once.
    """

    children: tuple[torch.nn.Module, ...]
    parameters: list[torch.nn.Parameter]

    @property
    def weights(self) -> Tensor:
        """The parameters as one flat tensor. **Overwrites** ``p.data``: the parameters become views of this tensor."""
        flat = _flat(self.parameters)
        for parameter, view in zip(self.parameters, _views(flat, self.parameters), strict=True):
            parameter.data = view
        return flat

    @property
    def trained(self) -> list[torch.nn.Parameter]:
        """The parameters that require a gradient."""
        return [p for p in self.parameters if p.requires_grad]

    @property
    def gradients(self) -> Tensor:
        """The gradients of ``trained`` as one flat tensor, with zeros where a gradient is None.

        **Overwrites** ``p.grad``: the gradients become views of this tensor.
        """
        flat = _flat([torch.zeros_like(p) if p.grad is None else p.grad for p in self.trained])
        for parameter, view in zip(self.trained, _views(flat, self.trained), strict=True):
            parameter.grad = view
        return flat


def partition(parameters: Sequence[Sequence[torch.nn.Parameter]], partitions: int) -> list[range]:
    """Return consecutive runs of children, each of at most ceil(total / partitions) elements.

    ``parameters`` lists the parameters of each child. Children that share parameters stay in one run, with the children
    between them. A run exceeds the limit only if a single child, or such a group of children, is larger than the limit.
    The number of runs may exceed ``partitions``. No run is empty.
    """
    last = {p: index for index, own in enumerate(parameters) for p in own}
    target = -(-sum(p.numel() for p in last) // partitions)
    runs, begin, num_elements = [], 0, 0
    first = end = 0  # indices of the first and the last child that must stay together
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
    """A Sequential divided into about ``partitions`` blocks, so that gradients can be reduced block by block.

    Use it like ``torch.nn.Sequential``. ``register_async_backward`` reduces each block inside ``loss.backward()``. To
    reduce the blocks in your own loop, use ``backward_blocks``. Children that share parameters stay in one block,
    with the children between them. All parameters of a block must have the same dtype and device. ``block.gradients``
    omits frozen parameters.

    Args:
        partitions (int): approximate number of blocks, at least 1; the network may have more.
        *modules (torch.nn.Module): the children, in order.

    Raises:
        ValueError: ``partitions`` is below 1, or the parameters of a block have several dtypes or devices.

    Examples:
        >>> net = mpi.nn.BlockSequential(2, torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
        >>> output = net(torch.ones(3, 4))
        >>> handles = []
        >>> for block in net.backward_blocks(torch.ones_like(output)):  # from the last block to the first
        ...     handles.append(mpi.allreduce_async(block.gradients, op="avg"))
        >>> reduced = mpi.wait_all(handles)
    """

    def __init__(self, partitions: int, *modules: torch.nn.Module) -> None:
        super().__init__(*modules)
        self.partitions = check_count("BlockSequential: partitions", partitions, 1)
        self._passed: list[tuple[Block, Tensor, Tensor]] = []  # each block with its input and output
        for block in self.blocks:
            _ = block.weights  # This makes the weights flat, and raises ValueError if that is impossible.

    @property
    def blocks(self) -> list[Block]:
        """The blocks of the current children, first to last."""
        children = list(self)  # children() would omit the second occurrence of a module.
        runs = partition([list(child.parameters()) for child in children], self.partitions)
        members = [children[run.start : run.stop] for run in runs]
        return [Block(tuple(modules), _parameters(modules)) for modules in members]

    def __getitem__(self, index: Any) -> Any:
        """Return a child, or a plain Sequential for a slice."""
        return torch.nn.Sequential(*list(self)[index]) if isinstance(index, slice) else super().__getitem__(index)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the output as Sequential does, and keep the tensors between the blocks for ``backward_blocks``.

        Args:
            x (Tensor): input of the first child.

        Returns:
            The output of the last child.
        """
        self._passed = []
        for block in self.blocks:  # Compute the blocks again, because the children may have changed.
            before = x
            for child in block.children:
                x = child(x)
            if torch.is_grad_enabled():
                self._passed.append((block, before, x))
        return x

    def backward_blocks(self, gradient: Tensor) -> Iterator[Block]:
        """Run the backward pass one block at a time, from the last block to the first.

        The gradients of the pass are added to ``block.gradients`` of each block. At the end, the gradient of the
        network's input is added to ``input.grad``, if the input is a leaf that requires a gradient. Each backward pass
        needs a separate forward pass.

        Args:
            gradient (Tensor): gradient of the loss with respect to the output of the last forward pass, with the shape
                of that output.

        Yields:
            Each block, as soon as its ``gradients`` are complete on this rank.

        Raises:
            RuntimeError: no forward pass has run since the last backward pass.
        """
        if not self._passed:
            raise RuntimeError("backward_blocks: no forward pass to use; call forward first, with gradients enabled")
        passed, self._passed = self._passed, []
        for block, before, after in reversed(passed):
            inputs = [*block.trained, *([before] if before.requires_grad else [])]
            # Differentiate this block alone. The gradient of its input is the output gradient of the next block.
            parts = torch.autograd.grad(after, inputs, gradient, allow_unused=True) if inputs else ()
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
        return {**self.__dict__, "_passed": []}  # copy.deepcopy cannot copy the tensors of a forward pass.


def _parameters(modules: Sequence[torch.nn.Module]) -> list[torch.nn.Parameter]:
    return list(dict.fromkeys(p for module in modules for p in module.parameters()))


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    """Return one flat tensor with the values of all tensors.

    The result is a view if the tensors are adjacent in memory, else a copy.
    """
    if not tensors:
        return torch.empty(0)
    if len(kinds := {(x.dtype, x.device) for x in tensors}) > 1:
        raise ValueError(f"BlockSequential: a block has several dtypes or devices, {kinds}; use one dtype and device")
    if _follow_each_other(tensors):  # Hogwild may have moved all parameters, so compare addresses.
        return tensors[0].data.as_strided((sum(x.numel() for x in tensors),), (1,))
    return torch.cat([x.detach().reshape(-1) for x in tensors])


def _follow_each_other(tensors: Sequence[Tensor]) -> bool:
    """Return whether the tensors are adjacent in one storage, in order and without gaps."""
    memory = tensors[0].untyped_storage().data_ptr()
    offsets = itertools.accumulate((x.numel() for x in tensors), initial=tensors[0].storage_offset())
    return all(
        x.is_contiguous() and x.untyped_storage().data_ptr() == memory and x.storage_offset() == offset
        for x, offset in zip(tensors, offsets, strict=False)
    )


def _views(flat: Tensor, parameters: Sequence[torch.nn.Parameter]) -> list[Tensor]:
    parts = torch.split(flat, [p.numel() for p in parameters])
    return [part.view(p.shape) for part, p in zip(parts, parameters, strict=True)]
