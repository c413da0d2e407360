"""Evaluation of the network during training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchmpi_py.engine.extensions import Extension
from torchmpi_py.engine.state import State, modes_restored


class Evaluate(Extension):
    """Call a function of the network after epochs, on every rank, in evaluation mode and without gradients.

    For an evaluation that training does not wait for start a second job, which loads the checkpoints
    (``Checkpoints(folder).load()``).

    Args:
        function: ``function(network, epoch)``, with the number of epochs completed; it may call ``engine.test``.
        every: The number of epochs from one evaluation to the next. The last epoch is always evaluated.

    Example:
        >>> evaluate = Evaluate(lambda network, epoch: network.weight.norm().item())
        >>> evaluate.results
        {}
    """

    def __init__(self, function: Callable[[torch.nn.Module, int], Any], every: int = 1) -> None:
        if every < 1:
            raise ValueError(f"every={every}: give a positive number of epochs")
        self.function = function
        self.every = every
        self.results: dict[int, Any] = {}  # what the function returned on this rank, by epochs completed

    def on_start(self, state: State) -> None:
        """Forget the results of a former run."""
        self.results.clear()

    def on_end_epoch(self, state: State) -> None:
        """Evaluate if it is time."""
        if state.epoch % self.every == 0:
            self._evaluate(state)

    def on_end(self, state: State) -> None:
        """Evaluate what the run ends with, also where nothing was left to train."""
        if state.epoch not in self.results:
            self._evaluate(state)

    def _evaluate(self, state: State) -> None:
        with modes_restored(state), torch.no_grad():
            state.network.eval()
            self.results[state.epoch] = self.function(state.network, state.epoch)
