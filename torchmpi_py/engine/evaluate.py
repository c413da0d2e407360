"""Evaluation of the network during training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchmpi_py.engine.extensions import Extension
from torchmpi_py.engine.state import State, modes_restored


class Evaluate(Extension):
    """Evaluate the network after epochs: call a function on every rank, in evaluation mode and without gradients.

    Training waits for the function. To evaluate without waiting, start a second job that loads the checkpoints
    (``Checkpoints(folder).load()``).

    Args:
        function (callable): called as ``function(network, epoch)``, where ``epoch`` is the number of completed epochs.
            The function may call ``engine.test``.
        every (int): number of epochs between evaluations; default 1. The network is always evaluated after the last
            epoch.

    Attributes:
        results (dict): results of the function on this rank, keyed by the number of completed epochs.

    Raises:
        ValueError: ``every`` is below 1.

    Examples:
        >>> data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
        >>> evaluate = mpi.engine.Evaluate(lambda network, epoch: network.weight.norm().item(), every=2)
        >>> state = mpi.engine.AllReduceSGDEngine().train(
        ...     network=torch.nn.Linear(4, 1),
        ...     criterion=torch.nn.functional.mse_loss,
        ...     iterator=mpi.engine.DatasetIterator(data, batch_size=8),
        ...     lr=0.1,
        ...     maxepoch=3,
        ...     extensions=[evaluate],
        ... )
        >>> list(evaluate.results)
        [2, 3]
    """

    def __init__(self, function: Callable[[torch.nn.Module, int], Any], every: int = 1) -> None:
        if every < 1:
            raise ValueError(f"Evaluate: every={every}; pass a positive number of epochs")
        self.function = function
        self.every = every
        self.results: dict[int, Any] = {}  # results on this rank, keyed by the number of completed epochs

    def on_start(self, state: State) -> None:
        """Remove the results of an earlier run.

        Args:
            state (State): state of the run.
        """
        self.results.clear()

    def on_end_epoch(self, state: State) -> None:
        """Evaluate if the number of completed epochs is a multiple of ``every``.

        Args:
            state (State): state of the run.
        """
        if state.epoch % self.every == 0:
            self._evaluate(state)

    def on_end(self, state: State) -> None:
        """Evaluate the final network, unless ``on_end_epoch`` has already evaluated it.

        Args:
            state (State): state of the run.
        """
        if state.epoch not in self.results:
            self._evaluate(state)

    def _evaluate(self, state: State) -> None:
        with modes_restored(state), torch.no_grad():
            state.network.eval()
            self.results[state.epoch] = self.function(state.network, state.epoch)
