"""Training that goes on when a rank dies, in a job that ``torchmpirun --elastic`` has started.

A step *counts* when all ranks have confirmed, once the gradients are reduced, that all live: then every rank's
gradients are in the result, and each rank updates its parameters without the others. A step in which a rank dies before
that is repeated. The survivors build a smaller world (``runtime.survivors``), and the rest of the epoch is divided
among them: every sample is used once. Of a hook that a death has interrupted, some ranks may have completed more than
others, which then take their state. Of the end of an epoch (``on_end_epoch``, a checkpoint) nothing is left
out: if one rank has not completed it, all repeat it. Averages are over the present ranks, and batches keep their size
per rank, so a global batch is smaller from then on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from torchmpi_py.core import communicators, ulfm
from torchmpi_py.engine.extensions import Extension
from torchmpi_py.engine.state import State
from torchmpi_py.optim.wrapper import ReducingOptimizer
from torchmpi_py.runtime import survivors


class Elastic(Extension):
    """Let the other ranks go on when one dies, in an elastic job; in other jobs do nothing.

    ``AllReduceSGDEngine`` adds it in an elastic job, before the other extensions. ``hooks.on_recovery`` is the place to
    scale the learning rate by the number of ranks.

    Raises TypeError or ValueError, when training begins, where the survivors of a death could not go on.
    """

    def around_run(self, engine: Any, state: State) -> AbstractContextManager[None]:
        """Take the engine, which the survivors of a death need."""
        self.engine = engine
        return nullcontext()

    def on_start(self, state: State) -> None:
        """Check, on every rank, that survivors could go on."""
        if ulfm.is_elastic():
            _check(self.engine, state)

    @contextmanager
    def around_epoch(self, state: State) -> Iterator[None]:
        """When a rank dies the others recover, and the loop goes on with the rest of the epoch, or with its end."""
        with survivors.elastic() as attempt:
            yield
        while attempt.has_recovered:
            with survivors.elastic() as attempt:  # another rank may die meanwhile
                self._recover(state, attempt)

    def on_backward(self, state: State) -> None:
        """Confirm that all live, before the gradients are used."""
        survivors.confirm()

    def _recover(self, state: State, attempt: survivors.Attempt) -> None:
        """Make the survivors equal, and divide the rest of the epoch. Collective."""
        place = state.place
        schedules = self._schedules()
        parts = [state.as_one_module(), *schedules, *([] if state.optimizer is None else [state.optimizer])]
        # The state of the rank that has come farthest becomes everyone's. Of ranks at the end of an epoch a rank that
        # has not completed it counts as farthest, because all repeat it. Of ranks that were in one hook some have
        # lowered maxepoch there, to stop, or made the step of a schedule, and others have not.
        standing = state.epoch, place.position, state.t, place.is_ending, -state.maxepoch
        farthest = survivors.catch_up((*standing, *(schedule.last_epoch for schedule in schedules)), *parts)
        # This rank has come as far, also if that rank dies before the others have.
        state.epoch, place.position, state.t, place.is_ending, end = farthest[: len(standing)]
        state.maxepoch, place.is_finished = -end, False
        attempt.confirm()
        # From here on the survivors stand at the same step, and share the rest of the epoch.
        state.iterator.take_place()  # type: ignore[attr-defined]  # checked before the first epoch
        self.engine.regroup()
        self.engine.calls.on_recovery(state)

    def _schedules(self) -> list[torch.optim.lr_scheduler.LRScheduler]:
        """Torch's schedules among the objects that the extensions keep the state of."""
        parts = [part for each in self.engine.extensions for part in getattr(each, "stateful", {}).values()]
        return [part for part in parts if isinstance(part, torch.optim.lr_scheduler.LRScheduler)]


def _check(engine: Any, state: State) -> None:
    """TypeError or ValueError if the survivors of a death could not go on without a restart."""
    iterator: Any = state.iterator
    if not hasattr(engine, "regroup"):
        raise TypeError(f"Elastic: expected an AllReduceSGDEngine, found {type(engine).__name__}; leave Elastic() out")
    if not getattr(iterator, "follows_place", False):
        raise TypeError(
            f"iterator is a {type(iterator).__name__} that cannot share the rest of an epoch out among the survivors "
            "of a death: give a StreamIterator, a DatasetIterator without rank= and size=, or a DataLoader without a "
            "sampler, or start the job without --elastic"
        )
    if isinstance(state.optimizer, ReducingOptimizer):
        raise ValueError(
            f"optimizer is a {type(state.optimizer).__name__}, which needs all the ranks that it was made for: leave "
            "sharded=True out or give a plain optimizer, or start the job without --elastic"
        )
    if communicators.resolve(None).size < communicators.stack().levels[0].size:
        raise ValueError(
            "in an elastic job train at a level of the whole world: after a death the levels are made anew, and groups "
            "could not be told apart (mpi.set_communicator(0), or start the job without --elastic)"
        )
