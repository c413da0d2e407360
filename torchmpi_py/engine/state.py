"""The state of a training loop, and the hooks that the loop calls. The names come from torchnet."""

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
    position: int = 0  # start of the next step, in samples or batches
    next_position: int = 0  # position after the current step
    weight: float = 1.0  # factor of the loss in backward()
    is_ending: bool = False  # The epoch is counted, but on_end_epoch is not yet complete.
    is_finished: bool = False  # The last epoch is complete, and all ranks have equal copies.
    is_resumed: bool = False  # A checkpoint has restored the buffers of each rank.
    batches: Any = None  # generator of the epoch's batches, to be closed
    members: ParameterSnapshot | None = None  # last snapshot of the trained parameters


@dataclass(eq=False)
class State:
    """The state of one run of the loop. Hooks may read and write every field except ``place``.

    Args:
        network (torch.nn.Module): the module that is trained or tested.
        criterion (callable): module or function that returns the mean loss, a scalar, for (output, target).
        iterator (iterable): the batches; iterated once per epoch.
        optimizer (torch.optim.Optimizer): the optimizer; default None, as in ``test``, and in ``train`` with ``lr=0``.
        sample (object): the current batch, (input, target, ...); default None.
        num_samples (int): number of samples in the batch; default 0. A rank without samples has 0, and its
            ``sample`` is None. None means that ``hooks.on_sample`` must replace the sample by a pair.
        output (object): the output of the network; default None.
        loss (Tensor): mean loss over this rank's samples, a scalar, without the weight of the batch; default None.
        epoch (int): number of completed epochs; default 0. ``on_start`` may set it to resume a run.
        t (int): number of completed batches, over all epochs; default 0.
        maxepoch (int): number of epochs; default 1. A hook may set it to ``epoch`` to stop after the current epoch.
        place (EpochPlace): position within the epoch, which hooks must not change; default: a new one.
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

        In ``on_start_epoch`` the position is above 0 if the run continues in the middle of an epoch.
        """
        return self.place.position

    @property
    def training(self) -> bool:
        """Whether the run is a call of ``train``, not of ``test``."""
        return self.place.is_training

    def modules(self) -> list[torch.nn.Module]:
        """Return the network, and the criterion if it is a module."""
        return list(self.named_modules().values())

    def named_modules(self) -> dict[str, torch.nn.Module]:
        """Return the network, and the criterion if it is a module, keyed by "network" and "criterion"."""
        named = {"network": self.network, "criterion": self.criterion}
        return {name: part for name, part in named.items() if isinstance(part, torch.nn.Module)}

    def members(self) -> ParameterSnapshot:
        """Return a snapshot of the parameters of network, criterion and optimizer.

        If nothing has changed, the result is the previous snapshot.
        """
        snapshot = self.place.members
        if snapshot is None or not snapshot.are_current(self.network, self.criterion, self.optimizer):
            groups = self.parameter_groups()
            snapshot = self.place.members = ParameterSnapshot(self.network, self.criterion, self.optimizer, groups)
        return snapshot

    def parameters(self) -> list[torch.nn.Parameter]:
        """Return the parameters of network, criterion and optimizer that require a gradient, each once."""
        return self.members().trained

    def parameter_groups(self) -> list[list[torch.nn.Parameter]]:
        """Return the parameters of the optimizer's groups; whole parameters, even if the groups contain shards."""
        groups = [group["params"] for group in getattr(self.optimizer, "param_groups", ())]
        return getattr(self.optimizer, "whole_groups", groups)

    def as_one_module(self) -> torch.nn.Module:
        """Return all trained modules and parameters as one module, so gradients have the same order on every rank.

        Raises:
            TypeError: the optimizer has a tensor that is not a torch.nn.Parameter.
        """
        inside = {id(parameter) for module in self.modules() for parameter in module.parameters()}
        outside = [parameter for parameter in self.parameters() if id(parameter) not in inside]
        for tensor in outside:
            if not isinstance(tensor, torch.nn.Parameter):
                raise TypeError(
                    f"the optimizer has a plain tensor of shape {tuple(tensor.shape)}, which cannot be broadcast or "
                    "saved in a checkpoint; make it a torch.nn.Parameter"
                )
        return torch.nn.ModuleDict({**self.named_modules(), "optimizer": torch.nn.ParameterList(outside)})


Hook = Callable[[State], Any]


def nothing(state: State) -> None:
    """Do nothing; the default of every hook."""


@dataclass(eq=False)
class Hooks:
    """The hooks of the loop, in the order in which they are called.

    Each hook is a function of the ``State``, and does nothing by default. Set a hook as an attribute, such as
    ``engine.hooks.on_update = function``.

    Args:
        on_start (callable): called once, before the first epoch, or before the first sample of a test.
        on_start_epoch (callable): called before each epoch. If a run continues in the middle of an epoch,
            ``state.position`` is above 0.
        on_sample (callable): called when ``state.sample`` is set. The hook may replace the sample.
        on_forward (callable): called when ``state.output`` is set.
        on_forward_criterion (callable): called when ``state.loss`` is set.
        on_backward (callable): called when the gradients are complete. ``AllReduceSGDEngine`` has averaged them over
            all ranks.
        on_update (callable): called when the parameters are updated. ``state.t`` includes this batch.
        on_end_epoch (callable): called at the end of each epoch. ``state.epoch`` includes this epoch.
        on_end (callable): called once, at the end of the run.
        on_recovery (callable): called after ranks have died (``torchmpirun --elastic``). Rank and size may have
            changed, and the epoch continues.

    Raises:
        AttributeError: an attribute with a different name is set.
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
        self.__dict__["followers"] = []  # functions that are called with the name of a hook when the hook is set

    def __setattr__(self, moment: str, hook: Hook) -> None:
        if moment not in MOMENTS:
            raise AttributeError(f"hooks.{moment} is not a hook; set one of {', '.join(MOMENTS)}")
        self.__dict__[moment] = hook
        for follow in self.__dict__.get("followers", ()):
            follow(moment)


MOMENTS = tuple(Hooks.__dataclass_fields__)


@contextmanager
def modes_restored(state: State) -> Iterator[None]:
    """Restore the mode of every module after the block. Modules may have different modes during training."""
    modes = [(module, module.training) for part in state.modules() for module in part.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
