"""A line on rank 0's standard output after each epoch of training."""

from __future__ import annotations

import contextlib
import sys
import time

import torch

from torchmpi_py.engine import outcomes
from torchmpi_py.engine.extensions import Extension
from torchmpi_py.engine.state import State


class EpochLines(Extension):
    """After each epoch, print the mean loss of rank 0's samples, the number of steps, and the duration in seconds.

    Every rank adds up its own losses, because rank 0 may die, and another rank then becomes rank 0.

    Examples:
        >>> extensions = [mpi.engine.EpochLines()]  # the default of train(); pass [] for no lines
    """

    def on_start_epoch(self, state: State) -> None:
        """Reset the sum of losses, the counters and the clock.

        Args:
            state (State): state of the run.
        """
        self._total: torch.Tensor | float = 0.0
        self._num_samples, self._first_step, self._begin = 0, state.t, time.perf_counter()

    def on_forward_criterion(self, state: State) -> None:
        """Add the loss of a batch. The sum stays on the loss's device, so the host waits for a GPU only once per epoch.

        Args:
            state (State): state of the run.
        """
        if state.num_samples > 0 and isinstance(state.loss, torch.Tensor):
            self._total = self._total + state.loss.detach() * state.num_samples
            self._num_samples += state.num_samples

    def on_end_epoch(self, state: State) -> None:
        """Print the line of the epoch on rank 0.

        Args:
            state (State): state of the run.
        """
        if not outcomes.is_chief():
            return
        seconds = time.perf_counter() - self._begin
        loss = f"loss {float(self._total) / self._num_samples:.4f}, " if self._num_samples else ""
        steps = state.t - self._first_step
        line = f"epoch {state.epoch}/{state.maxepoch}: {loss}{steps} step{'s' * (steps != 1)}, {seconds:.1f} s\n"
        with contextlib.suppress(OSError, ValueError, AttributeError):  # Standard output may be closed, or None.
            sys.stdout.write(line)
            sys.stdout.flush()
