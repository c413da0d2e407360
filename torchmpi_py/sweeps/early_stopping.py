"""Early stopping: an experiment reports values while it trains, and a function decides whether it goes on.

``successive_halving`` is the stopping form of asynchronous successive halving (Li et al., A System for Massively
Parallel Hyperparameter Tuning, 2020, algorithm 2): nobody waits for a rung to fill up. An experiment that comes to a
rung goes on if it is among the best 1/factor of those that have been there so far.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchmpi_py.collectives import verbs
from torchmpi_py.runtime import process
from torchmpi_py.sweeps.ledger import Ledger

Reports = dict[int, float]
"""Values by step, as one experiment has reported them."""

Stop = Callable[[Reports, Sequence[Reports]], bool]
"""Whether an experiment is to stop, from its own reports and those of the others."""


class ExperimentStopped(BaseException):
    """``report`` ends an experiment early. No Exception, so that ``except Exception`` in a loop lets it through."""


@dataclass
class Running:
    """The experiment under way in this process's group."""

    number: int
    ledger: Ledger
    stop: Stop | None
    last_step: int = 0
    last_value: float | None = None


current: Running | None = None
"""`experiments` alone assigns it."""


def report(value: float, step: int | None = None) -> None:
    """Report a value of the experiment under way, for ``stop=`` of ``mpi.experiments``. Collective over its group.

    Rank 0's value counts. ``step``: epochs, or whatever is comparable between experiments; default: one more than the
    last, from 1 also in an experiment that goes on from its checkpoint, which should give ``step``. Raises
    ExperimentStopped on every rank of the group if the experiment is to end; nothing need be caught.
    ValueError on every rank if the value is no number, or ``stop=`` raises. Does nothing outside of an experiment, so
    that a ``train_fn`` can be called alone.
    """
    if current is None:
        return
    current.last_step = current.last_step + 1 if step is None else step
    answer = verbs.broadcast_object(_answer(current, value) if process.rank() == 0 else None)
    if isinstance(answer, str):
        raise ValueError(f"report({value!r}): {answer}")
    if answer:
        raise ExperimentStopped(f"experiment {current.number} was stopped at step {current.last_step}")


def experiment_folder() -> Path:
    """A folder for files of the experiment under way, such as its checkpoints; of all its ranks, and of no other.

    Kept when a sweep that was killed goes on, so that the experiment goes on from its last checkpoint. ValueError
    outside of an experiment.
    """
    if current is None:
        raise ValueError("experiment_folder was called outside of an experiment: call it in the train_fn")
    folder = current.ledger.own_folder(current.number)
    folder.mkdir(exist_ok=True)
    return folder


def _answer(running: Running, value: float) -> bool | str:
    """Record the value, and return whether the experiment is to stop, or why that could not be decided."""
    try:
        running.last_value = float(value)
        running.ledger.add_report(running.number, running.last_step, running.last_value)
        if running.stop is None:
            return False
        reports = running.ledger.reports()
        return bool(running.stop(reports.pop(running.number), list(reports.values())))
    except Exception as error:  # the user's function may raise anything; the other ranks wait for an answer
        return f"{type(error).__name__}: {error}"


def successive_halving(first_step: int = 1, factor: int = 3, *, largest: bool = True) -> Stop:
    """A function for ``stop=``: at steps first_step, first_step * factor, ... the best 1/factor go on.

    ``largest``: whether larger values are better. ValueError for a first step below 1 or a factor below 2.
    """
    if first_step < 1 or factor < 2:
        raise ValueError(f"first_step={first_step}, factor={factor}: at least 1, and at least 2")
    sign = 1 if largest else -1

    def stop(own: Reports, others: Sequence[Reports]) -> bool:
        # The step is a rung if a power of the factor leads there.
        step, rung = max(own), first_step
        while rung < step:
            rung *= factor
        if rung != step:
            return False
        values = [sign * reports[step] for reports in (own, *others) if step in reports]
        here = sorted((value for value in values if not math.isnan(value)), reverse=True)
        num_going_on = max(1, len(here) // factor)
        return math.isnan(own[step]) or sign * own[step] < here[num_going_on - 1]

    return stop
