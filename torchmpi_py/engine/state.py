"""The state of a training loop, and the moments at which hooks are called: the engine's vocabulary, torchnet's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from torchmpi_py.nn.members import ParameterSnapshot


@dataclass(eq=False)
class EpochPlace:
    """Where a run stands within its epoch: for the loop itself, and for extensions that save or repeat steps."""

    is_training: bool = False
    position: int = 0  # where in the epoch the next step begins, counted as the iterator counts: samples, or batches
    next_position: int = 0  # where the step after this one begins
    weight: float = 1.0  # of this batch in a mean over ranks: the loss is scaled by it for the backward pass only
    is_ending: bool = False  # the epoch is counted, and on_end_epoch is not yet complete
    is_finished: bool = False  # the last epoch is complete, and the ranks are equal
    is_resumed: bool = False  # each rank has its own buffers, from a checkpoint
    batches: Any = None  # of the epoch, to be closed
    members: ParameterSnapshot | None = None  # of the last look at what is trained


@dataclass(eq=False)
class State:
    """The state of one run of the loop; hooks read and may write every field."""

    network: torch.nn.Module
    criterion: Callable[..., torch.Tensor]  # a module or a function: criterion(output, target) -> mean loss, a scalar
    iterator: Iterable[Any]  # gives samples; iterated once an epoch
    optimizer: torch.optim.Optimizer | None = None  # None in test(), and in train() with lr=0: no update
    sample: Any = None  # (input, target, ...)
    num_samples: Any = 0  # in this batch; 0: this rank has none, and sample is None; None: on_sample makes the pair
    output: Any = None  # of the network
    loss: Any = None  # scalar tensor: mean over this rank's samples, never scaled by the batch's weight
    epoch: int = 0  # epochs completed; a hook may set it in on_start to resume, or maxepoch to stop after this epoch
    t: int = 0  # samples (batches) completed, over all epochs
    maxepoch: int = 1
    place: EpochPlace = field(default_factory=EpochPlace, repr=False)  # within the epoch; hooks leave it alone

    @property
    def position(self) -> int:
        """Where in the epoch the next step begins: not 0 in ``on_start_epoch`` where the rest of an epoch begins."""
        return self.place.position

    @property
    def training(self) -> bool:
        """Whether this is a run of ``train``, and not of ``test``."""
        return self.place.is_training

    def modules(self) -> list[torch.nn.Module]:
        """The network, and the criterion if it is a module."""
        return list(self.named_modules().values())

    def named_modules(self) -> dict[str, torch.nn.Module]:
        """Like ``modules``, with the names "network" and "criterion"."""
        named = {"network": self.network, "criterion": self.criterion}
        return {name: part for name, part in named.items() if isinstance(part, torch.nn.Module)}

    def members(self) -> ParameterSnapshot:
        """What network, criterion and optimizer hold; the same object as the last time if nothing has changed."""
        snapshot = self.place.members
        if snapshot is None or not snapshot.are_current(self.network, self.criterion, self.optimizer):
            groups = self.parameter_groups()
            snapshot = self.place.members = ParameterSnapshot(self.network, self.criterion, self.optimizer, groups)
        return snapshot

    def parameters(self) -> list[torch.nn.Parameter]:
        """Parameters of network, criterion and optimizer that take a gradient, each once."""
        return self.members().trained

    def parameter_groups(self) -> list[list[torch.nn.Parameter]]:
        """The parameters of the optimizer's groups; an optimizer whose groups hold shards has ``whole_groups`` too."""
        groups = [group["params"] for group in getattr(self.optimizer, "param_groups", ())]
        return getattr(self.optimizer, "whole_groups", groups)

    def as_one_module(self) -> torch.nn.Module:
        """Everything that is trained as one module: its gradients are reduced in one order, the same on every rank."""
        inside = {id(parameter) for module in self.modules() for parameter in module.parameters()}
        outside = [parameter for parameter in self.parameters() if id(parameter) not in inside]
        for tensor in outside:
            if not isinstance(tensor, torch.nn.Parameter):
                raise TypeError(
                    f"the optimizer holds a plain tensor of shape {tuple(tensor.shape)}, which has no name for the "
                    "other ranks, or for a checkpoint: make it a torch.nn.Parameter"
                )
        return torch.nn.ModuleDict({**self.named_modules(), "optimizer": torch.nn.ParameterList(outside)})


Hook = Callable[[State], Any]


def nothing(state: State) -> None:
    """The default of every hook."""


@dataclass(eq=False)
class Hooks:
    """The moments, in their order; each is a function of the state. There are no others: a misspelt one raises."""

    on_start: Hook = nothing  # once, before the first epoch (test: before the first sample)
    on_start_epoch: Hook = nothing  # also for the rest of one, when a run goes on: state.position is not 0 then
    on_sample: Hook = nothing  # state.sample is set, and may be replaced
    on_forward: Hook = nothing  # state.output
    on_forward_criterion: Hook = nothing  # state.loss
    on_backward: Hook = nothing  # gradients are complete (over all ranks, if the engine averages)
    on_update: Hook = nothing  # parameters are new, state.t counts this sample
    on_end_epoch: Hook = nothing  # state.epoch counts this epoch
    on_end: Hook = nothing
    on_recovery: Hook = nothing  # ranks have died (torchmpirun --elastic); rank and size are new, the epoch goes on

    def __post_init__(self) -> None:
        self.__dict__["followers"] = []  # functions of a moment's name, called when its hook is set

    def __setattr__(self, moment: str, hook: Hook) -> None:
        if moment not in MOMENTS:
            raise AttributeError(f"hooks.{moment}: there is no such moment; there are {', '.join(MOMENTS)}")
        self.__dict__[moment] = hook
        for follow in self.__dict__.get("followers", ()):
            follow(moment)


MOMENTS = tuple(Hooks.__dataclass_fields__)


@contextmanager
def modes_restored(state: State) -> Iterator[None]:
    """The bracket after which every module has its mode again; some may be in evaluation mode during training."""
    modes = [(module, module.training) for part in state.modules() for module in part.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
