"""What is trained on this rank, as one of equal copies.

Training that goes on when a rank dies, in a job that ``torchmpirun --elastic`` has started.

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

import torch

from torchmpi_py import nn
from torchmpi_py.collectives.check import check_all_with_allreduce
from torchmpi_py.collectives.verbs import allgather_object
from torchmpi_py.core import communicators, ulfm
from torchmpi_py.engine.state import State
from torchmpi_py.nn.synchronize import average_gradients_of
from torchmpi_py.runtime import survivors


class Replicas:
    """This rank's copy of what a state trains, and how it is kept equal to the others'. All methods are collective.

    It covers parameters and buffers of network and criterion, and the parameters that only the optimizer holds.
    """

    def __init__(self, state: State, asynchronous: bool) -> None:
        self.state = state
        self.asynchronous = asynchronous
        self.module: torch.nn.Module = torch.nn.ModuleDict()
        self.trained: list[torch.nn.Parameter] | None = None  # when last broadcast
        self.registration: Any = None

    def follow(self) -> None:
        """Broadcast and register, if the set of trained parameters is not the one of the last time."""
        if not self._is_the_set(self.trained):
            self.close()
            nn.synchronize_parameters(as_one_module(self.state))
            self._register()

    def succeed(self, former: Replicas) -> None:
        """Register what another one, of a world of which ranks have died, has kept equal."""
        if former._is_the_set(former.trained):
            self._register()
        else:
            self.follow()

    def _is_the_set(self, trained: list[torch.nn.Parameter] | None) -> bool:
        return trained is not None and [id(p) for p in self.state.parameters()] == [id(p) for p in trained]

    def _register(self) -> None:
        self.module = as_one_module(self.state)
        if self.asynchronous:
            self.registration = nn.register_async_backward(self.module)
        self.trained = self.state.parameters()

    def look(self) -> None:
        """Before the backward pass: note its batch; one without samples of this rank is a stand-in."""
        if self.registration is not None:
            self.registration.look(self._batch())

    def average_gradients(self) -> None:
        """Every gradient becomes its mean over the ranks."""
        if self.registration is not None:
            self.registration.synchronize()
        else:
            average_gradients_of(self.module, self._batch())

    def _batch(self) -> Any:
        return self.state.sample if self.state.num_samples > 0 else None

    def check(self) -> None:
        """RanksDisagree if the parameters differ between ranks. Buffers may, until the end: each has its batches."""
        check_all_with_allreduce(dict(self.module.named_parameters()))

    def close(self) -> None:
        """Undo the registration."""
        if self.registration is not None:
            registration, self.registration = self.registration, None
            registration.remove()

    def abandon(self) -> None:
        """Undo the registration after a death, which has ended what was under way."""
        try:
            self.close()
        except Exception as error:
            if not ulfm.is_death(error):
                raise


def as_one_module(state: State) -> torch.nn.Module:
    """All of it as one module: gradients then set out in one order, the same on every rank."""
    named = {"network": state.network, "criterion": state.criterion}
    modules = {name: part for name, part in named.items() if isinstance(part, torch.nn.Module)}
    inside = {id(parameter) for module in modules.values() for parameter in module.parameters()}
    outside = [parameter for parameter in state.parameters() if id(parameter) not in inside]
    for tensor in outside:
        if not isinstance(tensor, torch.nn.Parameter):
            raise TypeError(
                f"the optimizer holds a plain tensor of shape {tuple(tensor.shape)}, which cannot be trained on "
                "several ranks: make it a torch.nn.Parameter"
            )
    return torch.nn.ModuleDict({**modules, "optimizer": torch.nn.ParameterList(outside)})


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
            parts = [as_one_module(state)] if state.optimizer is None else [as_one_module(state), state.optimizer]
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
