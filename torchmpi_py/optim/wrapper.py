"""Optimizers around an optimizer: they pass for the torch optimizer that they hold."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from torchmpi_py.collectives import verbs
from torchmpi_py.collectives.check import check_all_with_allreduce
from torchmpi_py.core.communicators import Communicator
from torchmpi_py.nn.async_backward import AsyncBackward
from torchmpi_py.nn.synchronize import check_whole, fused


class OptimizerWrapper(torch.optim.Optimizer):
    """An optimizer around ``optimizer``, whose groups, state and other attributes are its own."""

    optimizer: torch.optim.Optimizer
    _step_supports_amp_scaling = False  # GradScaler unscales gradients before ``step``, whatever the optimizer can do

    def __init__(self) -> None:
        """Not Optimizer.__init__: what it would make is the optimizer's own. A subclass sets ``optimizer``."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the optimizer."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # not made yet, or a copy in the making
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(f"a {type(self).__name__} cannot be copied or pickled; keep its state_dict()")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's."""
        self.optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's."""
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The state of the optimizer, as torch gives it."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's."""
        self.optimizer.load_state_dict(state_dict)


class ReducingOptimizer(OptimizerWrapper):
    """One that reduces gradients: they are there when ``backward()`` returns."""

    reduction: AsyncBackward
    comm: Communicator
    ends_by = "remove() it, and use the plain optimizer, its .optimizer"

    def __init__(self) -> None:
        super().__init__()
        self._is_checked = False  # whether parameters have been compared
        self._is_reduced = False  # whether there are reduced gradients, which no step has used

    @OptimizerWrapper.param_groups.getter  # type: ignore[attr-defined, untyped-decorator]
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the optimizer. To GradScaler, which unscales gradients there, they are reduced first."""
        # What it unscales before a reduction would meet scaled gradients of other ranks in it.
        if not self._is_reduced and sys._getframe(1).f_globals.get("__name__", "").endswith("grad_scaler"):
            self.synchronize()
        return self.optimizer.param_groups

    def _register(self, module: torch.nn.Module, **options: Any) -> None:
        """Reduce the gradients of a module in its backward passes. Collective."""
        self.reduction = AsyncBackward(module, comm=self.comm, owner=self, **options)

    def synchronize(self) -> None:
        """Reduce gradients that are not reduced yet, as after no backward pass, or fewer than on other ranks."""
        if self.reduction.names and not self.reduction._hooks:
            raise RuntimeError(f"{type(self).__name__}: remove() has ended it; make another one")
        if not self._is_reduced:
            self.reduction.reduce_now()
            self._end_reduction()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients. RuntimeError between the backward passes of one step, whose gradients would be lost."""
        self._check_between_steps("zero_grad")
        self._is_reduced = False
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """TypeError: buckets are made with the optimizer."""
        raise TypeError(
            f"add_param_group: a {type(self).__name__} takes no more parameters; {self.ends_by}: add them to it, and "
            "make another one of it"
        )

    def state_dict(self) -> dict[str, Any]:
        """The state of the optimizer. RuntimeError between the backward passes of one step: no state has gradients."""
        self._check_between_steps("state_dict")
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, on every rank. Drops the gradients of a step under way, and what compression has kept."""
        super().load_state_dict(state_dict)
        self.reduction.restart()
        self._is_reduced = False

    def wait_in_pass(self) -> None:
        """At the end of a backward pass whose gradients are reduced."""
        self.reduction.synchronize()
        self._end_reduction()

    def _end_reduction(self) -> None:
        self._is_reduced = True
        self.check_equal()

    def check_pass(self) -> None:
        """At the start of a backward pass."""
        if self._is_reduced and self.reduction.buckets.hold_gradients():
            raise RuntimeError(
                "backward() ran again before step(): it would add to gradients that are reduced already. Accumulate "
                "with backward_passes_per_step=, or call zero_grad(). Set requires_grad_(False) for a pass that is for "
                "other parameters (a GAN's). Activation checkpointing needs checkpoint(..., use_reentrant=False)"
            )
        self._is_reduced = False  # of a step that GradScaler left out, whose gradients the module has dropped

    def _check_between_steps(self, call: str) -> None:
        if self.reduction.num_passes:
            raise RuntimeError(
                f"{call}() after {self.reduction.num_passes} of {self.reduction.frequency} backward passes of a "
                "step would lose their gradients; call it after step()"
            )

    def check_equal(self) -> None:
        """Once, after a reduction: RanksDisagree, on all ranks, unless all train the same parameters. Collective."""
        if not self._is_checked:
            self._is_checked = True
            check_all_with_allreduce({name: p for p, name in self.reduction.names.items()}, comm=self.comm)

    def remove(self) -> None:
        """End the reductions; only a plain optimizer can go on."""
        self.reduction.remove()


class LocalOptimizer(OptimizerWrapper):
    """One whose ranks take steps of their own, and equally many.

    A rank on which GradScaler finds an overflow leaves out the update alone.
    """

    _step_supports_amp_scaling = True  # GradScaler calls ``step`` in any case, and says what it has found

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        if isinstance(optimizer, LocalOptimizer) or hasattr(optimizer, "whole_groups"):
            raise TypeError(f"{type(self).__name__}: give it a plain optimizer, not a {type(optimizer).__name__}")
        self.optimizer = optimizer
        check_whole(type(self).__name__, dict(enumerate(self.parameters())))

    @torch.no_grad()
    def take_own_step(self, closure: Callable[[], Any] | None) -> Any:
        """Take the optimizer's step, after one evaluation of the closure, whose loss is returned."""
        loss, set_by_scaler = evaluated(closure), vars(self)
        if float(set_by_scaler.get("found_inf", 0.0)) > 0:
            return loss
        if (scale := set_by_scaler.get("grad_scale")) is not None:
            for p in self.parameters():
                if p.grad is not None:
                    p.grad.div_(scale.to(p.grad.device))
        self.optimizer.step()
        return loss

    def average_over(self, comm: Communicator) -> None:
        """Make parameters their average over the ranks of ``comm``. Collective."""
        fused([p.detach() for p in self.parameters()], lambda flat: verbs.allreduce(flat, op="avg", comm=comm))

    def parameters(self) -> list[torch.Tensor]:
        """The parameters of all groups."""
        return [p for group in self.param_groups for p in group["params"]]


def evaluated(closure: Callable[[], Any] | None) -> Any:
    """The loss of a closure that is evaluated once, with gradients; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
