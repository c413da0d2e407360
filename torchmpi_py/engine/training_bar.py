"""A bar that shows the progress of training and of tests."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any, NamedTuple

from torchmpi_py.engine.extensions import Extension
from torchmpi_py.engine.meters import Accuracy, Average, are_scores
from torchmpi_py.engine.state import State
from torchmpi_py.runtime import process


class _Run(NamedTuple):
    """One bar and its meters: an epoch of training, or a test."""

    bar: Any
    loss: Average
    accuracy: Accuracy


class ProgressBar(Extension):
    """Show a bar on rank 0 for each epoch of ``train``, and for a ``test``: rank 0's loss, then means over all ranks.

    Every rank gives one, because the means are reduced at the end. Accuracy is shown where the output is scores
    (N, classes, ...) and the target class indices. Raises ImportError when tqdm is missing.
    """

    serves_tests = True

    def __init__(self) -> None:
        try:
            from tqdm import tqdm
        except ImportError as error:
            raise ImportError("ProgressBar needs tqdm: pip install tqdm") from error
        self._tqdm = tqdm
        self._runs: list[_Run] = []  # a hook may test, with the same bar, in the middle of training

    def on_start(self, state: State) -> None:
        """Begin the bar of a test."""
        if not state.training:
            self._begin(state, "test")

    def on_start_epoch(self, state: State) -> None:
        """Begin the bar of an epoch."""
        self._begin(state, f"epoch {state.epoch + 1}/{state.maxepoch}")

    def on_forward_criterion(self, state: State) -> None:
        """Count a batch."""
        run, target = self._runs[-1], state.sample[1]
        run.loss.add(state.loss, state.num_samples)
        if are_scores(state.output, target):
            run.accuracy.add(state.output, target, state.num_samples)
        run.bar.set_postfix_str(f"loss {run.loss.value:.4f}", refresh=False)
        run.bar.update()

    def on_end_epoch(self, state: State) -> None:
        """End the bar of the epoch."""
        self._end()

    def on_end(self, state: State) -> None:
        """End the bar of a test."""
        if not state.training:
            self._end()

    def on_recovery(self, state: State) -> None:
        """Give up the bars: the rest of the epoch begins with a bar of its own."""
        while self._runs:
            self._runs.pop().bar.close()

    def _begin(self, state: State, title: str) -> None:
        is_hidden = process.is_started() and process.rank() != 0
        bar = self._tqdm(total=_num_batches(state), desc=title, disable=is_hidden)
        self._runs.append(_Run(bar, Average(), Accuracy()))

    def _end(self) -> None:
        run = self._runs.pop()
        loss, accuracy = run.loss.reduced(), run.accuracy.reduced()
        shown = "" if accuracy != accuracy else f", accuracy {100 * accuracy:.2f} %"
        run.bar.set_postfix_str(f"loss {loss:.4f}{shown}", refresh=False)
        run.bar.close()  # shows it


def _num_batches(state: State) -> int | None:
    """The number of batches from ``state.position`` to the end of the epoch, if it is known."""
    if not isinstance(state.iterator, Sized):
        return None
    per_step = getattr(state.iterator, "batch_size", 1) * getattr(state.iterator, "size", 1)
    done = state.position // per_step if hasattr(state.iterator, "set_position") else state.position
    return len(state.iterator) - done
