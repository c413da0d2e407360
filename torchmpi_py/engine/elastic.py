"""Training that goes on when a rank dies, in a job that ``torchmpirun --elastic`` has started.

A step *counts* when one rank has completed it: its gradients were then reduced from what all ranks had brought, the
dead one included. So when the survivors have built their world anew (``survivors.py``), each takes the state of the one
that has come farthest, which is at most a step ahead; the step in which the rank died is done again if nobody has
completed it. What is left of the epoch is shared out among those who are left: every sample is used once.

Of what belongs to the end of an epoch (``hooks.on_end_epoch``, a checkpoint) nothing is left out: if one rank was not
through with it, all do it again.

Averages are over the ranks that there are, and batches have the size that they had per rank, so a global batch is
smaller from then on. Whoever scales the learning rate by the number of ranks does so in ``hooks.on_recovery``.
"""

from __future__ import annotations

from collections.abc import Callable

from torchmpi_py import survivors
from torchmpi_py.collectives.objects import allgather_object
from torchmpi_py.engine.replicas import together
from torchmpi_py.engine.state import State


def check(state: State) -> None:
    """TypeError if the rest of an epoch could not be shared out anew."""
    if not hasattr(state.iterator, "take_place"):
        raise TypeError(
            f"iterator is a {type(state.iterator).__name__}, which cannot share the rest of an epoch out among the "
            "survivors of a death: give a DatasetIterator, or start the job without --elastic"
        )
    state.iterator.take_place()


def go_on(state: State, begin_anew: Callable[[], None]) -> None:
    """Make the survivors equal, and their shares of the epoch; another rank may die meanwhile. Collective."""
    while True:
        with survivors.elastic() as attempt:
            standing = state.epoch, state.position, state.t
            parts = [together(state)] if state.optimizer is None else [together(state), state.optimizer]
            was_ending = (standing, state.is_ending_epoch)
            state.epoch, state.position, state.t = standing = survivors.catch_up(standing, *parts)
            state.is_ending_epoch = (standing, True) in allgather_object(was_ending)
            state.iterator.take_place()  # type: ignore[attr-defined]  # checked before the first epoch
            begin_anew()
        if not attempt.deaths:
            return
