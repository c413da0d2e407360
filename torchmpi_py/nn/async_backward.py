"""Gradients that are reduced while backward is still computing others.

A hook marks a gradient when autograd has accumulated it. Gradients are launched in one fixed order, the reverse of the
parameters', whatever order they come in, so that ranks whose networks differ in a step still make the same calls. At
the end of the backward pass the rest follows, with zeros for what got no gradient on this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from torchmpi_py.collectives import verbs
from torchmpi_py.handles import Handle, wait_all
from torchmpi_py.nn.block_sequential import BlockSequential
from torchmpi_py.nn.synchronize import check_dense, trainable


class Unit(Protocol):
    """What is reduced in one operation."""

    parameters: list[torch.nn.Parameter]

    def collect(self) -> Tensor:
        """Give every parameter a gradient (zero for None), and return the tensor that holds all of them."""


class _Single:
    """A parameter by itself."""

    def __init__(self, parameter: torch.nn.Parameter) -> None:
        self.parameters = [parameter]

    def collect(self) -> Tensor:
        (parameter,) = self.parameters
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return parameter.grad


class AsyncBackward:
    """Reduces the gradients of a module during ``backward``; made by ``register_async_backward``.

    Call ``synchronize()`` after each ``backward()`` and before reading gradients. A second backward pass before it
    would add to gradients that are being reduced, and raises RuntimeError; to accumulate, use ``frequency``. Every
    rank's loss has to reach at least one parameter. Activation checkpointing works with ``use_reentrant=False``.
    """

    def __init__(self, module: torch.nn.Module, *, frequency: int = 1, average: bool = True) -> None:
        if isinstance(frequency, bool) or not isinstance(frequency, int) or frequency < 1:
            raise ValueError(f"frequency={frequency!r}: give a whole number of backward passes, at least 1")
        self.frequency = frequency
        self.op = "avg" if average else "sum"
        self.names = {p: name for name, p in trainable(module).items()}
        self._units = _units(module, list(self.names))
        self._unit_of = {p: index for index, unit in enumerate(self._units) for p in unit.parameters}
        self._passes = 0  # complete ones since the last reduction
        self._pass_id = -1  # autograd's number for the backward pass under way
        self._ready = [0] * len(self._units)  # gradients there, per unit
        self._handles: list[Handle[Tensor]] = []
        self._anywhere: Handle[Tensor] | None = None
        self._hooks = [_after_gradient(p, self._on_gradient) for p in self.names]

    def synchronize(self) -> None:
        """Wait until the gradients of the last backward pass are reduced. Collective.

        Does nothing after a pass that only accumulates. A parameter that got no gradient on any rank keeps None.
        """
        if self._anywhere is None:
            return
        handles, anywhere = [*self._handles, self._anywhere], self._anywhere
        self._reset()
        wait_all(handles)
        for parameter, received in zip(self.names, anywhere.wait().tolist(), strict=True):
            if not received:
                parameter.grad = None

    def remove(self) -> None:
        """Wait for what is under way, and leave the module as it was."""
        self.synchronize()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _on_gradient(self, parameter: Any) -> None:
        check_dense(self.names[parameter], parameter)
        if self._pass_id != torch._C._current_graph_task_id():
            self._begin_pass()
        if self._passes + 1 < self.frequency:
            return
        self._ready[self._unit_of[parameter]] += 1
        self._launch(only_ready=True)

    def _begin_pass(self) -> None:
        if self._anywhere is not None:
            raise RuntimeError(
                "backward() ran again before synchronize(): it would add to gradients that are being reduced. Call "
                "synchronize() after each backward(), or accumulate with register_async_backward(frequency=...)"
            )
        wait_all(self._handles)  # none, unless the last pass broke off
        self._handles, self._ready = [], [0] * len(self._units)
        self._pass_id = torch._C._current_graph_task_id()
        torch.autograd.Variable._execution_engine.queue_callback(self._end_pass)

    def _end_pass(self) -> None:
        self._pass_id = -1
        self._passes += 1
        if self._passes < self.frequency:
            return
        here = torch.tensor([p.grad is not None for p in self.names], dtype=torch.uint8, device="cpu")
        self._launch(only_ready=False)
        self._anywhere = verbs.allreduce_async(here, op="max")

    def _launch(self, *, only_ready: bool) -> None:
        """Launch the next units, in order, as long as their gradients are there."""
        while len(self._handles) < len(self._units):
            index = len(self._handles)
            if only_ready and self._ready[index] < len(self._units[index].parameters):
                return
            self._handles.append(verbs.allreduce_async(self._units[index].collect(), op=self.op))

    def _reset(self) -> None:
        self._passes = 0
        self._ready = [0] * len(self._units)
        self._handles = []
        self._anywhere = None


def register_async_backward(module: torch.nn.Module, *, frequency: int = 1, average: bool = True) -> AsyncBackward:
    """Reduce gradients while ``backward`` is still computing others.

    Every ``frequency``-th backward pass launches the allreduce of each gradient (of each block, in a BlockSequential)
    when it is there; the passes between accumulate. Call ``synchronize()`` on the result after each ``backward()``,
    before the optimizer; ``remove()`` ends it. Every rank registers the same module and runs the same number of
    backward passes.
    """
    return AsyncBackward(module, frequency=frequency, average=average)


def _after_gradient(parameter: torch.nn.Parameter, hook: Callable[[Any], None]) -> RemovableHandle:
    return parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-any-return, no-untyped-call]


def _units(module: torch.nn.Module, parameters: list[torch.nn.Parameter]) -> list[Unit]:
    """Blocks of the BlockSequentials inside, and every other parameter by itself, in the order of backward."""
    blocks = [b for m in module.modules() if isinstance(m, BlockSequential) for b in m.blocks]
    whole = [block for block in blocks if block.parameters and all(p.requires_grad for p in block.parameters)]
    unit_of: dict[torch.nn.Parameter, Unit] = {p: block for block in whole for p in block.parameters}
    units: dict[int, Unit] = {}
    for parameter in reversed(parameters):
        unit = unit_of.get(parameter) or _Single(parameter)
        units.setdefault(id(unit), unit)
    return list(units.values())
