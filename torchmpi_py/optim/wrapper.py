"""Base classes for optimizers that wrap a torch optimizer and can be used in its place."""

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
    """Base class for wrappers around ``optimizer``, which provides the groups, the state and other attributes."""

    optimizer: torch.optim.Optimizer
    _step_supports_amp_scaling = False  # This value makes GradScaler unscale the gradients before ``step``.

    def __init__(self) -> None:
        """Skip Optimizer.__init__, because the wrapped optimizer provides all attributes except ``optimizer``."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of the wrapped optimizer."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # ``optimizer`` is not set yet, or a copy is being created.
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(f"a {type(self).__name__} cannot be copied or pickled; use its state_dict() instead")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, as in torch.

        Args:
            set_to_none (bool): True (default) sets gradients to None; False sets them to zero.
        """
        self.optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as in torch.

        Args:
            param_group (dict): parameters and options of the group.
        """
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the wrapped optimizer, as in torch."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of the wrapped optimizer, as in torch.

        Args:
            state_dict (dict): state to load.
        """
        self.optimizer.load_state_dict(state_dict)


class ReducingOptimizer(OptimizerWrapper):
    """Base class for wrappers that reduce the gradients before ``backward()`` returns."""

    reduction: AsyncBackward
    comm: Communicator
    ends_by = "call remove(), and use the plain optimizer, the attribute .optimizer"

    def __init__(self) -> None:
        super().__init__()
        self._is_checked = False  # whether the parameters have been compared
        self._is_reduced = False  # whether there are reduced gradients that no step has used

    @OptimizerWrapper.param_groups.getter  # type: ignore[attr-defined, untyped-decorator]
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups. If GradScaler reads them to unscale gradients, the gradients are first reduced."""
        # Otherwise a later reduction would add this rank's unscaled gradients to the other ranks' scaled gradients.
        if not self._is_reduced and sys._getframe(1).f_globals.get("__name__", "").endswith("grad_scaler"):
            self.synchronize()
        return self.optimizer.param_groups

    def _register(self, module: torch.nn.Module, **options: Any) -> None:
        """Register hooks that reduce the gradients of ``module`` in backward passes. All ranks must make this call."""
        self.reduction = AsyncBackward(module, comm=self.comm, owner=self, **options)

    def synchronize(self) -> None:
        """Reduce gradients that are not reduced yet. Every rank must reduce, in this call or in a backward pass.

        This call does nothing if a backward pass has reduced the gradients. Before you clip gradients, make this call
        on each rank that ran fewer backward passes than the other ranks in this step. If you do not clip, ``step``
        makes the call.

        Raises:
            RuntimeError: ``remove()`` was called.
            RanksDisagree: on every rank, if the ranks are in different steps.
        """
        if self.reduction.names and not self.reduction._hooks:
            raise RuntimeError(f"{type(self).__name__}: the optimizer cannot be used after remove(); create a new one")
        if not self._is_reduced:
            self.reduction.reduce_now()
            self._end_reduction()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients.

        Args:
            set_to_none (bool): True (default) sets gradients to None; False sets them to zero.

        Raises:
            RuntimeError: some, but not all, backward passes of a step have run, so their gradients would be lost.
        """
        self._check_between_steps("zero_grad")
        self._is_reduced = False
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise TypeError, because the buckets cannot change after the optimizer is created.

        Args:
            param_group (dict): not used.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            f"add_param_group: a {type(self).__name__} cannot take new parameters; {self.ends_by}. Add the group to "
            f"the plain optimizer, and create a new {type(self).__name__} from the plain optimizer"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the wrapped optimizer.

        Raises:
            RuntimeError: some, but not all, backward passes of a step have run. A state contains no gradients.
        """
        self._check_between_steps("state_dict")
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of the wrapped optimizer. Every rank must make this call.

        This call drops the gradients of an unfinished step, and the data that compression keeps between steps.

        Args:
            state_dict (dict): state to load.
        """
        super().load_state_dict(state_dict)
        self.reduction.restart()
        self._is_reduced = False

    def wait_in_pass(self) -> None:
        """Wait for the reduction at the end of a backward pass."""
        self.reduction.synchronize()
        self._end_reduction()

    def _end_reduction(self) -> None:
        self._is_reduced = True
        self.check_equal()

    def check_pass(self) -> None:
        """Raise RuntimeError if the backward pass that starts now would add to reduced gradients."""
        if self._is_reduced and self.reduction.buckets.hold_gradients():
            raise RuntimeError(
                "backward() ran again before step() and would add to reduced gradients. Accumulate gradients with "
                "backward_passes_per_step=, or call zero_grad(). To train another network (GAN), freeze this network "
                "with requires_grad_(False). For activation checkpointing, use checkpoint(..., use_reentrant=False)"
            )
        self._is_reduced = False  # If GradScaler skipped a step, module.zero_grad() may have dropped its gradients.

    def _check_between_steps(self, call: str) -> None:
        if self.reduction.num_passes:
            raise RuntimeError(
                f"{call}() after {self.reduction.num_passes} of {self.reduction.frequency} backward passes of a "
                f"step would lose their gradients; call {call}() after step()"
            )

    def check_equal(self) -> None:
        """Raise RanksDisagree on all ranks if the parameters differ. All ranks must call it.

        Only the first call compares the parameters.
        """
        if not self._is_checked:
            self._is_checked = True
            check_all_with_allreduce({name: p for p, name in self.reduction.names.items()}, comm=self.comm)

    def remove(self) -> None:
        """End the reductions. Afterwards, you can use only ``optimizer``, the plain optimizer."""
        self.reduction.remove()


class LocalOptimizer(OptimizerWrapper):
    """Base class for wrappers that take local steps. Every rank must take the same number of steps.

    If GradScaler finds an overflow on one rank, only that rank skips the update.
    """

    _step_supports_amp_scaling = True  # With this value, GradScaler always calls ``step``, and reports an overflow.

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        if isinstance(optimizer, OptimizerWrapper):
            raise TypeError(f"{type(self).__name__}: found a {type(optimizer).__name__}; pass the plain optimizer")
        self.optimizer = optimizer
        check_whole(type(self).__name__, dict(enumerate(self.parameters())))

    @torch.no_grad()
    def take_own_step(self, closure: Callable[[], Any] | None) -> Any:
        """Evaluate the closure once, take a step of the wrapped optimizer, and return the loss.

        If GradScaler found an overflow, no step is taken.
        """
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
        """Set the parameters to their average over the ranks of ``comm``. All ranks of ``comm`` must call it."""
        fused([p.detach() for p in self.parameters()], lambda flat: verbs.allreduce(flat, op="avg", comm=comm))

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters of all groups."""
        return [p for group in self.param_groups for p in group["params"]]


def evaluated(closure: Callable[[], Any] | None) -> Any:
    """Evaluate a closure once, with gradients enabled, and return the loss; return None without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
