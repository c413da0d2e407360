"""The state of a training loop, and the moments at which hooks are called; the names are torchnet's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from torchmpi_py.nn.members import ParameterSnapshot


@dataclass(eq=False)
class EpochPlace:
    """The position of a run within its epoch, for the loop and for extensions that save or repeat steps."""

    is_training: bool = False
    position: int = 0  # The next step begins here in the epoch, in the iterator's unit: samples or batches.
    next_position: int = 0  # The step after the next one begins here.
    weight: float = 1.0  # The loss is scaled by this weight of the batch, but only for the backward pass.
    is_ending: bool = False  # The epoch is counted, but on_end_epoch is not yet complete.
    is_finished: bool = False  # The last epoch is complete, and the ranks are equal.
    is_resumed: bool = False  # Each rank has its own buffers, from a checkpoint.
    batches: Any = None  # This generator of the epoch's batches has to be closed.
    members: ParameterSnapshot | None = None  # This is the last snapshot of the trained parameters.


@dataclass(eq=False)
class State:
    """The state of one run of the loop. Hooks may read and write every field except ``place``.

    Attributes:
        network (torch.nn.Module): the module that is trained or tested.
        criterion (callable): module or function; ``criterion(output, target)`` is the mean loss, a scalar.
        iterator (iterable): the batches; iterated once per epoch.
        optimizer (torch.optim.Optimizer): the optimizer; None in ``test``, and in ``train`` with ``lr=0``.
        sample (object): the present batch, (input, target, ...).
        num_samples (int): number of samples in the batch. 0 means that this rank has no samples, and ``sample`` is
            None. None means that ``hooks.on_sample`` still has to make the pair.
        output (object): the output of the network.
        loss (Tensor): mean loss over this rank's samples, a scalar that is never scaled by the batch's weight.
        epoch (int): number of completed epochs. A hook may set it in ``on_start`` to resume.
        t (int): number of completed samples (batches), over all epochs.
        maxepoch (int): number of epochs. A hook may set it to ``epoch`` to stop after the present epoch.
        place (EpochPlace): position within the epoch; hooks must not change it.
    """

    network: torch.nn.Module
    criterion: Callable[..., torch.Tensor]
    iterator: Iterable[Any]
    optimizer: torch.optim.Optimizer | None = None
    sample: Any = None
    num_samples: Any = 0
    output: Any = None
    loss: Any = None
    epoch: int = 0
    t: int = 0
    maxepoch: int = 1
    place: EpochPlace = field(default_factory=EpochPlace, repr=False)

    @property
    def position(self) -> int:
        """The position in the epoch where the next step begins.

        In ``on_start_epoch`` it is above 0 if the run continues in the middle of an epoch.
        """
        return self.place.position

    @property
    def training(self) -> bool:
        """Whether this is a run of ``train``, not of ``test``."""
        return self.place.is_training

    def modules(self) -> list[torch.nn.Module]:
        """Return the network, and the criterion if it is a module."""
        return list(self.named_modules().values())

    def named_modules(self) -> dict[str, torch.nn.Module]:
        """Return the same modules as ``modules``, by the names "network" and "criterion"."""
        named = {"network": self.network, "criterion": self.criterion}
        return {name: part for name, part in named.items() if isinstance(part, torch.nn.Module)}

    def members(self) -> ParameterSnapshot:
        """Return the parameters of network, criterion and optimizer; the same object if nothing has changed."""
        snapshot = self.place.members
        if snapshot is None or not snapshot.are_current(self.network, self.criterion, self.optimizer):
            groups = self.parameter_groups()
            snapshot = self.place.members = ParameterSnapshot(self.network, self.criterion, self.optimizer, groups)
        return snapshot

    def parameters(self) -> list[torch.nn.Parameter]:
        """Return the parameters of network, criterion and optimizer that require a gradient, each once."""
        return self.members().trained

    def parameter_groups(self) -> list[list[torch.nn.Parameter]]:
        """Return the parameters of the optimizer's groups, the whole parameters even if the groups hold shards."""
        groups = [group["params"] for group in getattr(self.optimizer, "param_groups", ())]
        return getattr(self.optimizer, "whole_groups", groups)

    def as_one_module(self) -> torch.nn.Module:
        """Return everything that is trained as one module, so that gradients have one order, the same on every rank.

        Raises:
            TypeError: the optimizer holds a tensor that is not a torch.nn.Parameter.
        """
        inside = {id(parameter) for module in self.modules() for parameter in module.parameters()}
        outside = [parameter for parameter in self.parameters() if id(parameter) not in inside]
        for tensor in outside:
            if not isinstance(tensor, torch.nn.Parameter):
                raise TypeError(
                    f"the optimizer holds a plain tensor of shape {tuple(tensor.shape)}, which has no name for the "
                    "other ranks, or for a checkpoint; make it a torch.nn.Parameter"
                )
        return torch.nn.ModuleDict({**self.named_modules(), "optimizer": torch.nn.ParameterList(outside)})


Hook = Callable[[State], Any]


def nothing(state: State) -> None:
    """Do nothing; the default of every hook."""


@dataclass(eq=False)
class Hooks:
    """The moments of the loop, in their order. Each attribute is a function of the ``State``; the default does nothing.

    Attributes:
        on_start (callable): once, before the first epoch; in a test before the first sample.
        on_start_epoch (callable): before each epoch, or the rest of one, where ``state.position`` is above 0.
        on_sample (callable): ``state.sample`` is set, and may be replaced.
        on_forward (callable): ``state.output`` is set.
        on_forward_criterion (callable): ``state.loss`` is set.
        on_backward (callable): the gradients are complete, and averaged over all ranks if the engine averages.
        on_update (callable): the parameters are updated, and ``state.t`` counts this sample.
        on_end_epoch (callable): ``state.epoch`` counts this epoch.
        on_end (callable): once, at the end.
        on_recovery (callable): ranks have died (``torchmpirun --elastic``). Rank and size are new, and the epoch
            continues.

    Raises:
        AttributeError: when another attribute is set.
    """

    on_start: Hook = nothing
    on_start_epoch: Hook = nothing
    on_sample: Hook = nothing
    on_forward: Hook = nothing
    on_forward_criterion: Hook = nothing
    on_backward: Hook = nothing
    on_update: Hook = nothing
    on_end_epoch: Hook = nothing
    on_end: Hook = nothing
    on_recovery: Hook = nothing

    def __post_init__(self) -> None:
        self.__dict__["followers"] = []  # functions that are called with the name of a moment when its hook is set

    def __setattr__(self, moment: str, hook: Hook) -> None:
        if moment not in MOMENTS:
            raise AttributeError(f"hooks.{moment}: there is no such moment; expected {', '.join(MOMENTS)}")
        self.__dict__[moment] = hook
        for follow in self.__dict__.get("followers", ()):
            follow(moment)


MOMENTS = tuple(Hooks.__dataclass_fields__)


@contextmanager
def modes_restored(state: State) -> Iterator[None]:
    """Restore the mode of every module after the block; some may be in evaluation mode during training."""
    modes = [(module, module.training) for part in state.modules() for module in part.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
