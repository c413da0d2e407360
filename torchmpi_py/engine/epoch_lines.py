"""A line of the chief on standard output after each epoch of training."""

from __future__ import annotations

import contextlib
import inspect
import sys
import time
from typing import Any

import torch

from torchmpi_py.engine.resume import RunHooks
from torchmpi_py.engine.state import Hook, Hooks, State
from torchmpi_py.runtime import chief, process


def followed_by_lines(hooks: RunHooks, users: Hooks, are_wanted: bool) -> Any:
    """The hooks of a run, followed by lines if they are wanted, and the user has no hook ``on_end_epoch``."""
    has_own = inspect.unwrap(users.on_end_epoch) is not Hooks().on_end_epoch
    return EpochLines(hooks) if are_wanted and not has_own else hooks


class EpochLines:
    """The hooks of one training run; after each epoch the mean loss of this rank's samples, steps and seconds.

    Every rank counts, and the one that is chief when the epoch ends writes: rank 0 may have died meanwhile.
    """

    def __init__(self, hooks: RunHooks) -> None:
        self.hooks = hooks
        self._total: torch.Tensor | float = 0.0
        self._num_samples = self._first_step = 0
        self._begin = time.perf_counter()

    def __getattr__(self, moment: str) -> Hook:
        hook: Hook = getattr(self.hooks, moment)
        return hook

    def on_start_epoch(self, state: State) -> None:
        self._total, self._num_samples = 0.0, 0
        self._first_step, self._begin = state.t, time.perf_counter()
        self.hooks.on_start_epoch(state)

    def on_forward_criterion(self, state: State) -> None:
        # The sum stays on the loss's device: the host waits for a GPU once an epoch.
        if state.num_samples > 0 and isinstance(state.loss, torch.Tensor):
            self._total = self._total + state.loss.detach() * state.num_samples
            self._num_samples += state.num_samples
        self.hooks.on_forward_criterion(state)

    def on_end_epoch(self, state: State) -> None:
        seconds = time.perf_counter() - self._begin
        self.hooks.on_end_epoch(state)
        if process.is_started() and not chief.is_chief():
            return
        loss = f"loss {float(self._total) / self._num_samples:.4f}, " if self._num_samples else ""
        steps = state.t - self._first_step
        line = f"epoch {state.epoch}/{state.maxepoch}: {loss}{steps} step{'s' * (steps != 1)}, {seconds:.1f} s\n"
        with contextlib.suppress(OSError, ValueError, AttributeError):  # a closed standard output, or none
            sys.stdout.write(line)
            sys.stdout.flush()
