"""Training that goes on when a rank dies, in a job that ``torchmpirun --elastic`` has started.

A step *counts* when all ranks have confirmed that all live, once the gradients are reduced: then the reduction was one
of what all had brought, and each rank updates its parameters without the others. A step in which a rank dies before
that is done again. When the survivors have built their world anew (``survivors.py``), what is left of the epoch is
shared out among those who are left: every sample is used once. (Where hooks between update and count have to do with
other ranks, some may be a step ahead; the others then take their state.)

Of what belongs to the end of an epoch (``hooks.on_end_epoch``, a checkpoint) nothing is left out: if one rank was not
through with it, all do it again.

Averages are over the ranks that there are, and batches have the size that they had per rank, so a global batch is
smaller from then on. Whoever scales the learning rate by the number of ranks does so in ``hooks.on_recovery``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchmpi_py import communicators, survivors
from torchmpi_py.collectives.objects import allgather_object
from torchmpi_py.engine.replicas import together
from torchmpi_py.engine.state import State


def check(state: State) -> None:
    """TypeError or ValueError if the survivors could not go on by themselves."""
    iterator: Any = state.iterator
    if not hasattr(iterator, "take_place"):
        raise TypeError(
            f"iterator is a {type(iterator).__name__}, which cannot share the rest of an epoch out among the "
            "survivors of a death: give a DatasetIterator or a DataLoader without a sampler, or start the job without "
            "--elastic"
        )
    if not iterator.follows_place:
        raise ValueError("the DatasetIterator was given rank= and size=, which change when a rank dies: give none")
    if communicators.resolve(None).size < communicators.stack().levels[0].size:
        raise ValueError(
            "in an elastic job train at a level of the whole world: after a death the levels are made anew, and groups "
            "could not be told apart (mpi.set_communicator(0), or start the job without --elastic)"
        )


def go_on(state: State, begin_anew: Callable[[], None]) -> None:
    """Make the survivors equal, and their shares of the epoch; another rank may die meanwhile. Collective."""
    while True:
        with survivors.elastic() as attempt:
            standing = state.epoch, state.position, state.t, -state.maxepoch  # a hook may have lowered it, to stop
            parts = [together(state)] if state.optimizer is None else [together(state), state.optimizer]
            farthest = survivors.catch_up(standing, *parts)
            endings = allgather_object((standing, state.is_ending_epoch))
            attempt.confirm()
            state.epoch, state.position, state.t = farthest[:3]
            state.maxepoch = -farthest[3]
            state.is_ending_epoch = (farthest, True) in endings
            state.iterator.take_place()  # type: ignore[attr-defined]  # checked before the first epoch
            begin_anew()
        if not attempt.has_recovered:
            return
