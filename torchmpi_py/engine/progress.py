"""A progress bar for an engine, made of hooks alone. The only file of the engine that shows anything."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

import torch

from torchmpi_py.engine.iterators import DatasetIterator
from torchmpi_py.engine.meters import Accuracy, Average, shapes_fit
from torchmpi_py.engine.sgd import SGDEngine
from torchmpi_py.engine.state import Hook, Hooks, State
from torchmpi_py.runtime import process


def show_progress(engine: SGDEngine) -> None:
    """Show a bar on rank 0 while ``engine`` trains or tests: this rank's running loss, then the means over all ranks.

    Call it on every rank (the means are reduced at the end of each epoch and of each test), after your own hooks are
    set: they are kept, and called after the bar's. Accuracy is shown where the output is scores (N, classes, ...) and
    the target class indices. Raises ImportError when tqdm is missing.
    """
    try:
        from tqdm import tqdm
    except ImportError as error:
        raise ImportError("show_progress needs tqdm: pip install 'torchmpi-py[examples]'") from error
    progress = _Progress(tqdm)
    for moment in ("on_start", "on_start_epoch", "on_forward_criterion", "on_end_epoch", "on_end", "on_recovery"):
        _prepend(engine.hooks, moment, getattr(progress, moment))


def _prepend(hooks: Hooks, moment: str, first: Hook) -> None:
    """Call ``first`` before the hook that is set."""
    then: Hook = getattr(hooks, moment)

    def both(state: State) -> None:
        first(state)
        then(state)

    setattr(hooks, moment, both)


class _Run:
    """One bar and its meters: an epoch of training, or a test."""

    def __init__(self, bar: Any) -> None:
        self.bar = bar
        self.loss = Average()
        self.accuracy = Accuracy()


class _Progress:
    """The hooks. Runs are stacked, because a hook may test in the middle of training."""

    def __init__(self, tqdm: Any) -> None:
        self.tqdm = tqdm
        self.runs: list[_Run] = []

    def on_start(self, state: State) -> None:
        if not state.training:
            self._begin(state, "test")

    def on_start_epoch(self, state: State) -> None:
        self._begin(state, f"epoch {state.epoch + 1}/{state.maxepoch}")

    def on_forward_criterion(self, state: State) -> None:
        run = self.runs[-1]
        run.loss.add(state.loss, state.num_samples)
        target = state.sample[1]
        if _are_scores(state.output, target):
            run.accuracy.add(state.output, target, state.num_samples)
        run.bar.set_postfix_str(f"loss {run.loss.value:.4f}", refresh=False)
        run.bar.update()

    def on_end_epoch(self, state: State) -> None:
        self._end()

    def on_end(self, state: State) -> None:
        if not state.training:
            self._end()

    def on_recovery(self, state: State) -> None:
        while self.runs:  # the rest of the epoch begins with a bar of its own
            self.runs.pop().bar.close()

    def _begin(self, state: State, title: str) -> None:
        rank = process.rank() if process.is_started() else 0
        self.runs.append(_Run(self.tqdm(total=_num_batches(state), desc=title, disable=rank != 0)))

    def _end(self) -> None:
        run = self.runs.pop()
        loss, accuracy = run.loss.reduced(), run.accuracy.reduced()
        shown = "" if accuracy != accuracy else f", accuracy {100 * accuracy:.2f} %"
        run.bar.set_postfix_str(f"loss {loss:.4f}{shown}", refresh=False)
        run.bar.close()  # shows it


def _num_batches(state: State) -> int | None:
    """Those that are left of the epoch, if that is known."""
    iterator = state.iterator
    if isinstance(iterator, DatasetIterator):
        return len(iterator) - state.position // (iterator.batch_size * iterator.size)
    return len(iterator) - state.position if isinstance(iterator, Sized) else None


def _are_scores(output: Any, target: Any) -> bool:
    if not (isinstance(output, torch.Tensor) and isinstance(target, torch.Tensor)):
        return False
    is_class = not (target.is_floating_point() or target.is_complex())
    return is_class and shapes_fit(output, target)
