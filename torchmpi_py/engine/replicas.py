"""What is trained on this rank, as one of equal copies."""

from __future__ import annotations

from typing import Any

import torch

from torchmpi_py import nn, recovery
from torchmpi_py.collectives.consistency import check_all_with_allreduce
from torchmpi_py.engine.state import State
from torchmpi_py.nn.synchronize import average_gradients_of


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
            nn.synchronize_parameters(together(self.state))
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
        self.module = together(self.state)
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
            if not recovery.is_death(error):
                raise


def together(state: State) -> torch.nn.Module:
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
