"""Training that continues when a rank dies, in a job started by ``torchmpirun --elastic``.

The idea: after the reduction of gradients, all ranks confirm that all ranks are alive. A confirmed step *counts*,
because the result contains every rank's gradients, and each rank can update its parameters without communication. If a
rank dies before the confirmation, the step is repeated. The survivors build a smaller world (see ``runtime.survivors``)
and divide the rest of the epoch among themselves, so every sample is used once.

If a death interrupts a hook, some ranks may have completed more of the hook than others. All survivors then continue
from the state of the most advanced rank. The end of an epoch (``on_end_epoch``, with its checkpoint) is never skipped:
if one rank has not completed it, all ranks repeat it. Averages are computed over the surviving ranks. Batches keep
their size per rank, so a global batch is smaller after a death.

Alternative: restart the job from the last checkpoint. Why not: all processes would start again, and repeat the steps
since that checkpoint.
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
    """Let the surviving ranks continue training when a rank dies in an elastic job. Do nothing in other jobs.

    In an elastic job, ``AllReduceSGDEngine`` adds this extension automatically, before all other extensions. Use
    ``hooks.on_recovery`` to scale the learning rate by the number of ranks.

    Raises:
        TypeError: the engine or the iterator does not support a recovery. ``train`` raises it on every rank.
        ValueError: the optimizer or the level does not support a recovery. ``train`` raises it on every rank.

    Examples:
        >>> data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
        >>> trainer = mpi.engine.AllReduceSGDEngine()
        >>> def scale_rate(state):  # called after a death; size() is the number of survivors
        ...     for group in state.optimizer.param_groups:
        ...         group["lr"] = 0.1 * mpi.size()
        >>> trainer.hooks.on_recovery = scale_rate
        >>> state = trainer.train(
        ...     network=torch.nn.Linear(4, 1),
        ...     criterion=torch.nn.functional.mse_loss,
        ...     iterator=mpi.engine.DatasetIterator(data, batch_size=8),
        ...     lr=0.1,
        ...     extensions=[mpi.engine.Elastic()],
        ... )
    """

    def around_run(self, engine: Any, state: State) -> AbstractContextManager[None]:
        """Store the engine for a recovery, and return an empty context.

        Args:
            engine (SGDEngine): engine that runs.
            state (State): state of the run.
        """
        self.engine = engine
        return nullcontext()

    def on_start(self, state: State) -> None:
        """Check, in an elastic job, that the run supports a recovery.

        Args:
            state (State): state of the run.

        Raises:
            TypeError: the engine or the iterator does not support a recovery.
            ValueError: the optimizer or the level does not support a recovery.
        """
        if ulfm.is_elastic():
            _check(self.engine, state)

    @contextmanager
    def around_epoch(self, state: State) -> Iterator[None]:
        """Return the context of an epoch. If a rank dies, the survivors recover, and the loop continues the epoch.

        Args:
            state (State): state of the run.
        """
        with survivors.elastic() as attempt:
            yield
        while attempt.has_recovered:
            with survivors.elastic() as attempt:  # Another rank may die during the recovery.
                self._recover(state, attempt)

    def on_backward(self, state: State) -> None:
        """Confirm that all ranks are alive before the gradients are used. Every rank must make this call.

        Args:
            state (State): state of the run.
        """
        survivors.confirm()

    def _recover(self, state: State, attempt: survivors.Attempt) -> None:
        """Give all survivors the same state, and divide the rest of the epoch. Every survivor must make this call."""
        place = state.place
        schedules = self._schedules()
        parts = [state.as_one_module(), *schedules, *([] if state.optimizer is None else [state.optimizer])]
        # All survivors get the state of the most advanced rank. At the end of an epoch, a rank that has not completed
        # on_end_epoch counts as the most advanced one, because all ranks repeat on_end_epoch. Compare maxepoch and the
        # schedules too: if a death interrupts a hook, some ranks may already have changed them.
        standing = state.epoch, place.position, state.t, place.is_ending, -state.maxepoch
        farthest = survivors.catch_up((*standing, *(schedule.last_epoch for schedule in schedules)), *parts)
        # Store the progress before the confirmation, because another rank may die before all survivors have the state.
        state.epoch, place.position, state.t, place.is_ending, end = farthest[: len(standing)]
        state.maxepoch, place.is_finished = -end, False
        attempt.confirm()
        # All survivors are now at the same step. Divide the rest of the epoch among them.
        state.iterator.take_place()  # type: ignore[attr-defined]  # _check has tested the iterator.
        self.engine.regroup()
        self.engine.calls.on_recovery(state)

    def _schedules(self) -> list[torch.optim.lr_scheduler.LRScheduler]:
        """Return torch's schedulers among the ``stateful`` objects of the extensions."""
        parts = [part for each in self.engine.extensions for part in getattr(each, "stateful", {}).values()]
        return [part for part in parts if isinstance(part, torch.optim.lr_scheduler.LRScheduler)]


def _check(engine: Any, state: State) -> None:
    """Raise TypeError or ValueError if the run does not support a recovery."""
    iterator: Any = state.iterator
    if not hasattr(engine, "regroup"):
        raise TypeError(f"Elastic: expected an AllReduceSGDEngine, found {type(engine).__name__}; omit Elastic()")
    if not getattr(iterator, "follows_place", False):
        raise TypeError(
            f"iterator is a {type(iterator).__name__}, which cannot divide the rest of an epoch among the survivors. "
            "Use a StreamIterator, a DatasetIterator without rank= and size=, or a DataLoader without a sampler; or "
            "start the job without --elastic"
        )
    if isinstance(state.optimizer, ReducingOptimizer):
        raise ValueError(
            f"optimizer is a {type(state.optimizer).__name__}, which does not work after the death of a rank; pass a "
            "plain torch optimizer without sharded=True, or start the job without --elastic"
        )
    if communicators.resolve(None).size < communicators.stack().levels[0].size:
        raise ValueError(
            "an elastic job must train at a level that contains all ranks, because smaller groups do not survive the "
            "death of a rank. Call mpi.set_communicator(0), or start the job without --elastic"
        )
