"""The state of a training loop, and the moments at which hooks are called: the engine's vocabulary, torchnet's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from torchmpi_py.nn.members import parameters_of
from torchmpi_py.nn.optimizer_state import OptimizerKind, name_of_class
from torchmpi_py.optim.sharded import ShardedOptimizer
from torchmpi_py.optim.wrapper import LocalOptimizer, ReducingOptimizer


@dataclass(eq=False)
class State:
    """The state of one run of the loop; hooks read and may write every field."""

    network: torch.nn.Module
    criterion: Callable[..., torch.Tensor]  # a module or a function: criterion(output, target) -> mean loss, a scalar
    iterator: Iterable[Any]  # gives samples; iterated once an epoch
    optimizer: torch.optim.Optimizer | None = None  # None in test(), and in train() with lr=0: no update
    sample: Any = None  # (input, target, ...); None in a step in which other ranks have samples, and this rank has none
    output: Any = None  # of the network; from on_forward_criterion on cut from its graph, so that .grad is kept
    loss: Any = None  # scalar tensor: mean over this rank's samples, never scaled by weight
    epoch: int = 0  # epochs completed; a hook may set it in on_start to resume, or maxepoch to stop after this epoch
    t: int = 0  # samples (batches) completed, over all epochs
    position: int = 0  # where in the epoch the next step begins, counted as the iterator counts: samples, or batches
    is_ending_epoch: bool = False  # the epoch is counted, and on_end_epoch is not yet complete
    training: bool = False
    maxepoch: int = 1
    evaluations: dict[int, Any] = field(default_factory=dict)  # what train(evaluator=) gave, by epochs completed
    weight: float = 1.0  # of this batch in a mean over ranks: the loss is scaled by it for the backward pass only
    num_samples: int = 0  # in this batch; 0: this rank has none in this step, and sample is None
    next_position: int = 0  # where the step after this one begins
    epoch_random: dict[str, Any] | None = field(default=None, repr=False)  # random generators as the epoch began
    _sharded: ShardedOptimizer | None = field(default=None, repr=False)  # made by the engine, for this run
    _gets_state_back: bool = False  # whether its optimizer is the user's
    _is_counted: bool = True  # whether num_samples is known, or may be once on_sample has made a pair
    _batches: Any = field(default=None, repr=False)  # of the epoch, to be closed
    _cuts: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list, repr=False)  # where backward resumes

    def modules(self) -> list[torch.nn.Module]:
        """The network, and the criterion if it is a module."""
        return list(self._named_modules().values())

    def _named_modules(self) -> dict[str, torch.nn.Module]:
        """Like ``modules``, with the names "network" and "criterion"."""
        named = {"network": self.network, "criterion": self.criterion}
        return {name: part for name, part in named.items() if isinstance(part, torch.nn.Module)}

    def parameters(self) -> list[torch.nn.Parameter]:
        """Parameters of network, criterion and optimizer that take a gradient, each once."""
        holders = [*map(parameters_of, self.modules()), *self._groups()]
        return list({id(p): p for holder in holders for p in holder if p.requires_grad}.values())

    def _groups(self) -> list[list[torch.nn.Parameter]]:
        """The parameters of the optimizer's groups; those of a ShardedOptimizer hold shards in their place."""
        if isinstance(self.optimizer, ShardedOptimizer):
            return [self.optimizer.parameters]
        return [] if self.optimizer is None else [group["params"] for group in self.optimizer.param_groups]

    def _parameters_of_optimizer_alone(self) -> list[torch.nn.Parameter]:
        """The parameters that are in no module."""
        inside = {id(parameter) for module in self.modules() for parameter in module.parameters()}
        return [parameter for parameter in self.parameters() if id(parameter) not in inside]

    def _optimizer_kind(self) -> OptimizerKind:
        """What the optimizer's state belongs to, on whatever ranks, and however they reduce gradients."""
        name = name_of_class(self.optimizer, transparent=(ReducingOptimizer, LocalOptimizer))
        return OptimizerKind.of(name, [p for group in self._groups() for p in group])

    def as_one_module(self) -> torch.nn.Module:
        """Everything that is trained as one module: its gradients are reduced in one order, the same on every rank."""
        outside = self._parameters_of_optimizer_alone()
        for tensor in outside:
            if not isinstance(tensor, torch.nn.Parameter):
                raise TypeError(
                    f"the optimizer holds a plain tensor of shape {tuple(tensor.shape)}, which cannot be trained on "
                    "several ranks: make it a torch.nn.Parameter"
                )
        return torch.nn.ModuleDict({**self._named_modules(), "optimizer": torch.nn.ParameterList(outside)})


Hook = Callable[[State], Any]


def _nothing(state: State) -> None:
    """The default of every hook."""


@dataclass(slots=True)
class Hooks:
    """The moments, in their order; each is a function of the state. There are no others: a misspelt one raises."""

    on_start: Hook = _nothing  # once, before the first epoch (test: before the first sample)
    on_start_epoch: Hook = _nothing  # also for the rest of one, when a run goes on: state.position is not 0 then
    on_sample: Hook = _nothing  # state.sample is set, and may be replaced
    on_forward: Hook = _nothing  # state.output
    on_forward_criterion: Hook = _nothing  # state.loss
    on_backward_criterion: Hook = _nothing  # d loss / d output is in state.output.grad; parameters have no gradient yet
    on_backward: Hook = _nothing  # gradients are complete (over all ranks, if the engine averages)
    on_update: Hook = _nothing  # parameters are new, state.t counts this sample
    on_end_epoch: Hook = _nothing  # state.epoch counts this epoch
    on_end: Hook = _nothing
    on_recovery: Hook = _nothing  # ranks have died (torchmpirun --elastic); rank and size are new, the epoch goes on


@contextmanager
def modes_restored(state: State) -> Iterator[None]:
    """The bracket after which every module has its mode again; some may be in evaluation mode during training."""
    modes = [(module, module.training) for part in state.modules() for module in part.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
