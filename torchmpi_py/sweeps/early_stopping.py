"""Early stopping: an experiment reports values while it trains, and a function decides whether it continues.

``successive_halving`` is the stopping variant of asynchronous successive halving (Li et al., A System for Massively
Parallel Hyperparameter Tuning, 2020, algorithm 2). A *rung* is a step at which experiments are compared. An experiment
that reaches a rung continues if it is among the best 1/factor of the experiments that have reached the rung so far. In
the synchronous variant an experiment waits until all experiments have reached the rung, which leaves ranks idle.
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
"""The values that one experiment has reported, by step."""

Stop = Callable[[Reports, Sequence[Reports]], bool]
"""A function that returns whether an experiment must stop, from its reports and the other experiments' reports."""


class ExperimentStopped(BaseException):
    """Raised by ``report`` to end the experiment early.

    This class does not derive from Exception, so that an ``except Exception`` in a training loop does not catch it.
    """


@dataclass
class Running:
    """The experiment that the group of this process is running."""

    number: int
    ledger: Ledger
    stop: Stop | None
    last_step: int = 0
    last_value: float | None = None


current: Running | None = None
"""The current experiment, or None outside of an experiment. Only `experiments` assigns it."""


def report(value: float, step: int | None = None) -> None:
    """Report a value of the current experiment. ``stop=`` of ``mpi.experiments`` may then end the experiment.

    All ranks of the experiment's group must make this call. Outside of an experiment the call does nothing, so you can
    run a ``train_fn`` without a sweep.

    Args:
        value (float): value of the experiment, such as the validation accuracy. Only the value of the group's rank 0 is
            used.
        step (int): number of epochs, or another number that is comparable between experiments. Default None, one
            more than the step of the last call, starting at 1. Pass ``step`` if the experiment can resume from a
            checkpoint.

    Raises:
        ExperimentStopped: the experiment must end. Raised on every rank of the group. Do not catch it.
        ValueError: the value is not a number, or the function ``stop`` has raised an error. Raised on every rank of
            the group.

    Examples:
        >>> mpi.report(0.5, step=1)  # outside of an experiment: does nothing
    """
    if current is None:
        return
    current.last_step = current.last_step + 1 if step is None else step
    answer = verbs.broadcast_object(_answer(current, value) if process.rank() == 0 else None)
    if isinstance(answer, str):
        raise ValueError(f"mpi.report: rank 0 of the group raised {answer}; check rank 0's value, and stop=")
    if answer:
        raise ExperimentStopped(f"experiment {current.number} was stopped at step {current.last_step}")


def experiment_folder() -> Path:
    """Return the folder of the current experiment, for its checkpoints and other files. Any rank may call it.

    The folder is the same for all ranks of the experiment's group, and no other experiment uses it. A resumed
    sweep keeps the folder, so the experiment can resume from its last checkpoint.

    Returns:
        The path of the folder, which exists.

    Raises:
        ValueError: the call is outside of an experiment.
    """
    if current is None:
        raise ValueError("experiment_folder was called outside of an experiment; call it in train_fn")
    folder = current.ledger.own_folder(current.number)
    folder.mkdir(exist_ok=True)
    return folder


def _answer(running: Running, value: float) -> bool | str:
    """Record the value, and return whether the experiment must stop. If that fails, return the text of the error."""
    try:
        running.last_value = float(value)
        running.ledger.add_report(running.number, running.last_step, running.last_value)
        if running.stop is None:
            return False
        reports = running.ledger.reports()
        return bool(running.stop(reports.pop(running.number), list(reports.values())))
    except Exception as error:
        # The user's function may raise any exception. The other ranks wait for an answer, so return the error as text.
        return f"{type(error).__name__}: {error}"


def successive_halving(first_step: int = 1, factor: int = 3, *, largest: bool = True) -> Stop:
    """Return a function for ``stop=`` of ``mpi.experiments``: at each rung only the best 1/factor experiments continue.

    The rungs are the steps first_step, first_step * factor, first_step * factor^2, and so on. An experiment that
    reports at a rung continues if it is among the best 1/factor of the experiments that have reported at that rung so
    far.

    Args:
        first_step (int): step of the first rung, as passed to ``mpi.report``, at least 1. Default 1.
        factor (int): divisor of the number of experiments at each rung, at least 2. Default 3.
        largest (bool): whether larger values are better. Default True.

    Returns:
        The function for ``stop=``.

    Raises:
        ValueError: ``first_step`` or ``factor`` is too small.

    Examples:
        >>> stop = mpi.sweeps.successive_halving(first_step=1, factor=2)
        >>> stop({1: 0.5}, [{1: 0.9}, {1: 0.7}, {1: 0.1}])  # the third best; only the best two of four continue
        True

    Source: Li et al., A System for Massively Parallel Hyperparameter Tuning (2020), algorithm 2.
    """
    if first_step < 1 or factor < 2:
        raise ValueError(f"first_step={first_step}, factor={factor}: pass first_step >= 1 and factor >= 2")
    sign = 1 if largest else -1

    def stop(own: Reports, others: Sequence[Reports]) -> bool:
        # The step is a rung if it is first_step times a power of the factor.
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
