"""An extension that shows the progress of training and tests as a bar."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sized
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torchmpi_py.engine import outcomes
from torchmpi_py.engine.extensions import Extension
from torchmpi_py.engine.meters import Accuracy, Average, are_scores
from torchmpi_py.engine.state import State


class ProgressBar(Extension):
    """Show a progress bar on rank 0 for each epoch of ``train``, and for ``test``.

    The bar shows the mean loss of rank 0, and at the end the mean loss and accuracy over all ranks. Pass a
    ``ProgressBar`` on every rank, because the ranks reduce these means. Accuracy is shown if the output contains scores
    (N, classes, ...) and the target contains class indices.

    Raises:
        ImportError: tqdm is not installed.

    Examples:
        >>> extensions = [mpi.engine.ProgressBar()]  # for engine.train or engine.test
    """

    serves_tests = True

    def __init__(self) -> None:
        try:
            from tqdm import tqdm
        except ImportError as error:
            raise ImportError("ProgressBar needs tqdm; run: pip install tqdm") from error
        self._tqdm = tqdm
        # Each run has its own bar, loss and accuracy, because a hook may call test() with this object during training.
        self._runs: list[tuple[Any, Average, Accuracy]] = []

    def around_run(self, engine: Any, state: State) -> AbstractContextManager[None]:
        """Return the context of a run. In a test, the context shows the bar.

        Args:
            engine (SGDEngine): engine that runs.
            state (State): state of the run.
        """
        return nullcontext() if state.training else self._shown(state, "test")

    def around_epoch(self, state: State) -> AbstractContextManager[None]:
        """Return the context of an epoch. The context shows a bar, unless the epoch has no remaining steps.

        Args:
            state (State): state of the run.
        """
        is_over = state.place.is_ending or state.epoch >= state.maxepoch
        return nullcontext() if is_over else self._shown(state, f"epoch {state.epoch + 1}/{state.maxepoch}")

    def on_forward_criterion(self, state: State) -> None:
        """Add the loss and accuracy of a batch, and advance the bar.

        Args:
            state (State): state of the run.
        """
        bar, loss, accuracy = self._runs[-1]
        loss.add(state.loss, state.num_samples)
        if are_scores(state.output, state.sample[1]):
            accuracy.add(state.output, state.sample[1], state.num_samples)
        bar.set_postfix_str(f"loss {loss.value:.4f}", refresh=False)
        bar.update()

    def on_end_epoch(self, state: State) -> None:
        """Show the means of the epoch or test over all ranks. Every rank must make this call.

        Args:
            state (State): state of the run.
        """
        if self._runs:
            bar, loss, accuracy = self._runs[-1]
            share = accuracy.reduced()
            text = "" if math.isnan(share) else f", accuracy {100 * share:.2f} %"
            bar.set_postfix_str(f"loss {loss.reduced():.4f}{text}", refresh=False)

    def on_end(self, state: State) -> None:
        """Show the means of a test. Every rank must make this call.

        Args:
            state (State): state of the run.
        """
        if not state.training:
            self.on_end_epoch(state)

    @contextmanager
    def _shown(self, state: State, title: str) -> Iterator[None]:
        total = len(state.iterator) if isinstance(state.iterator, Sized) and state.position == 0 else None
        bar = self._tqdm(total=total, desc=title, disable=not outcomes.is_chief())
        self._runs.append((bar, Average(), Accuracy()))
        try:
            yield
        finally:
            self._runs.pop()
            bar.close()  # This call draws the final bar.
