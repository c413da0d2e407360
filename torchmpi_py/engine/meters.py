"""Running means over samples, on this rank and over all ranks (torchnet's meters), and a progress bar that shows them.

A meter adds up sums and numbers of samples, not batch means, so that ``reduced()`` is exact when the ranks hold
different numbers of samples, or none. The bar is made of hooks alone.
"""

from __future__ import annotations

from collections.abc import Sized
from typing import Any, NamedTuple

import torch

from torchmpi_py.collectives import verbs
from torchmpi_py.engine.iterators import DatasetIterator
from torchmpi_py.engine.sgd import SGDEngine
from torchmpi_py.engine.state import Hook, Hooks, State
from torchmpi_py.runtime import process


class _Mean:
    """Mean over samples. NaN while there is none."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin again without samples."""
        self.total = 0.0
        self.num_samples = 0

    def _add(self, mean: torch.Tensor | float, num_samples: int) -> None:
        if num_samples > 0:
            self.total += float(mean.detach() if isinstance(mean, torch.Tensor) else mean) * num_samples
            self.num_samples += num_samples

    @property
    def value(self) -> float:
        """The mean over this rank's samples."""
        return self.total / self.num_samples if self.num_samples else float("nan")

    def state_dict(self) -> dict[str, float]:
        """This rank's sum and number of samples, for a checkpoint."""
        return {"total": self.total, "num_samples": self.num_samples}

    def load_state_dict(self, state_dict: dict[str, float]) -> None:
        """Take what ``state_dict`` gave."""
        self.total, self.num_samples = state_dict["total"], int(state_dict["num_samples"])

    def reduced(self) -> float:
        """The mean over the samples of all ranks, the same number on each; every rank must call it.

        When the package is not started there is one rank, this one.
        """
        if not process.is_started():
            return self.value
        sums = torch.tensor([self.total, self.num_samples], dtype=torch.float64, device="cpu")
        total, num_samples = verbs.allreduce(sums).tolist()
        return total / num_samples if num_samples else float("nan")


class Average(_Mean):
    """Mean of a quantity over samples. NaN while there is none."""

    def add(self, value: torch.Tensor | float, num_samples: int = 1) -> None:
        """Add ``value``, a mean over ``num_samples`` samples; a mean over 0 samples does not count, whatever it is.

        The host waits for a value on a GPU.
        """
        self._add(value, num_samples)


class Accuracy(_Mean):
    """Share of targets that are the class of the highest score (top 1), from 0 to 1. NaN while there is none."""

    def add(self, output: torch.Tensor, target: torch.Tensor, num_samples: int | None = None) -> None:
        """``output``: scores (N, classes, ...); ``target``: class indices (N, ...); the first ``num_samples`` count.

        Raises ValueError when the shapes do not fit each other.
        """
        if not _shapes_fit(output, target):
            raise ValueError(
                f"output of shape {tuple(output.shape)} and target of shape {tuple(target.shape)}: "
                "give scores (N, classes, ...) and class indices (N, ...)"
            )
        num_samples = len(target) if num_samples is None else num_samples
        hits = (output.argmax(1) == target)[:num_samples]
        self._add(hits.double().mean(), num_samples)


def _shapes_fit(output: torch.Tensor, target: torch.Tensor) -> bool:
    """Whether the shapes are (N, classes, ...) and (N, ...): those of scores, and of class indices."""
    return output.ndim >= 2 and output.shape[:1] + output.shape[2:] == target.shape


def show_progress(engine: SGDEngine) -> None:
    """Show a bar on rank 0 while ``engine`` trains or tests: this rank's running loss, then the means over all ranks.

    Call it on every rank (the means are reduced at the end of each epoch and of each test), after your own hooks are
    set: they are kept, and called after the bar's. Accuracy is shown where the output is scores (N, classes, ...) and
    the target class indices. Raises ImportError when tqdm is missing.
    """
    try:
        from tqdm import tqdm
    except ImportError as error:
        raise ImportError("show_progress needs tqdm: pip install tqdm") from error
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


class _Run(NamedTuple):
    """One bar and its meters: an epoch of training, or a test."""

    bar: Any
    loss: Average
    accuracy: Accuracy


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
        bar = self.tqdm(total=_num_batches(state), desc=title, disable=rank != 0)
        self.runs.append(_Run(bar, Average(), Accuracy()))

    def _end(self) -> None:
        run = self.runs.pop()
        loss, accuracy = run.loss.reduced(), run.accuracy.reduced()
        shown = "" if accuracy != accuracy else f", accuracy {100 * accuracy:.2f} %"
        run.bar.set_postfix_str(f"loss {loss:.4f}{shown}", refresh=False)
        run.bar.close()  # shows it


def _num_batches(state: State) -> int | None:
    """The number of batches from ``state.position`` to the end of the epoch, if it is known."""
    iterator = state.iterator
    if isinstance(iterator, DatasetIterator):
        return len(iterator) - state.position // (iterator.batch_size * iterator.size)
    return len(iterator) - state.position if isinstance(iterator, Sized) else None


def _are_scores(output: Any, target: Any) -> bool:
    if not (isinstance(output, torch.Tensor) and isinstance(target, torch.Tensor)):
        return False
    is_class = not (target.is_floating_point() or target.is_complex())
    return is_class and _shapes_fit(output, target)
