"""The training loop: one action, one hook.

This is torchnet's SGD engine (the parent of TorchMPI's AllReduceSGDEngine, reference section 7) on torch modules. The
loop is ``SGDEngine.train`` below, and it is the documentation: every line that does something is followed by the hook
that is called after it. The engine does not know of ranks, devices, clocks, files or logs:

* users add behaviour by hooks: ``engine.hooks.on_update = lambda state: print(state.loss.item())``;
* what has a state of its own is an ``Extension``, such as ``Checkpoint``;
* packages add behaviour by a subclass that overrides the small methods the loop calls (``AllReduceSGDEngine``), so that
  the hooks stay the user's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch

from torchmpi_py.engine import samples
from torchmpi_py.engine.extensions import Extension, called, within
from torchmpi_py.engine.extensions_of_run import extensions_of_run
from torchmpi_py.engine.state import EpochPlace, Hooks, State, modes_restored

OptimizerLike = torch.optim.Optimizer | Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


class SGDEngine:
    """Train and test a network; the module docstring tells how behaviour is added.

    Source: torchnet, ``SGDEngine``; TorchMPI reference section 7.
    """

    steps_together = False
    """Whether every step has a collective operation; else a rank may have more steps in an epoch than another."""

    def __init__(self) -> None:
        self.hooks = Hooks()
        self.extensions: list[Extension] = []  # of the run in progress
        self.calls = self.hooks  # what that run calls at each moment

    def train(
        self,
        *,
        network: torch.nn.Module,
        criterion: Callable[..., torch.Tensor],
        iterator: Iterable[Any],
        lr: float | None = None,
        optimizer: OptimizerLike | None = None,
        maxepoch: int = 1,
        extensions: Sequence[Extension] | None = None,
        **former: Any,
    ) -> State:
        """Train for ``maxepoch`` epochs and return the last state.

        A hook that adds layers adds their parameters to ``state.optimizer`` too, as anywhere in torch. An optimizer
        that reduces gradients (``ShardedOptimizer``, ``DistributedOptimizer``) takes no more parameters.

        An iterator, or a sampler that it draws from, with ``set_epoch`` gets the epoch, and draws its order from (seed,
        epoch). Each call counts from epoch 0: several calls with ``maxepoch=1`` all see the same order. Make one call
        with a larger ``maxepoch``, or go on where the last one ended: ``on_start`` may set ``state.epoch``
        (``maxepoch`` counts from the very first epoch).

        Args:
            network: The module that is trained.
            criterion: A module or a function; ``criterion(output, target)`` is the mean loss of a batch, a scalar.
            iterator: Gives the batches, (input, target) each; iterated once an epoch.
            lr: The learning rate of plain SGD on the parameters of network and criterion; 0 for no update.
            optimizer: In place of ``lr``: a torch optimizer, or a function from the list of parameters to one.
            maxepoch: The number of epochs.
            extensions: Objects that take part, such as ``Checkpoint(folder)``, ``Evaluate(function)``,
                ``EpochLines()``, ``ProgressBar()``, ``TensorBoard(folder)`` or your own (``Extension``); at each
                moment they are called after the hook, in their order. Default: ``[EpochLines()]``, or none with a hook
                ``on_end_epoch``. In an elastic job ``Elastic()`` is added.
            **former: The keywords of the release before: checkpoint, every, keep, stateful, evaluator, epoch_lines.
                Each builds its extension, with a DeprecationWarning.

        Raises:
            ValueError: Not exactly one of ``lr`` and ``optimizer`` is given.
            TypeError: The optimizer's step needs a closure (LBFGS); the iterator can be run through only once (a
                generator) with ``maxepoch`` > 1; a sample is not (input, target); an extension is not an ``Extension``.
        """
        place = EpochPlace(is_training=True)
        state = State(network, criterion, iterator, maxepoch=maxepoch, place=place)
        samples.check_repeatable(iterator, maxepoch)
        extensions = extensions_of_run(self, extensions, former)
        with self.session(state), self._taking_part(state, extensions) as hooks:
            state.optimizer = self.make_optimizer(state, lr, optimizer)
            self.set_mode(state)
            hooks.on_start(state)
            self.begin(state)
            while not place.is_finished:
                with within(each.around_epoch(state) for each in self.extensions), samples.closed(state):
                    if not place.is_ending and state.epoch < state.maxepoch:
                        hooks.on_start_epoch(state)
                        for sample in samples.of_epoch(state):
                            self.take_sample(state, sample)
                            if sample is not None:  # otherwise other ranks have samples, and gradients are zero here
                                hooks.on_sample(state)
                                samples.count(state)
                            self.prepare(state)
                            if sample is not None:
                                self.forward(state)
                                hooks.on_forward(state)
                                self.forward_criterion(state)
                                hooks.on_forward_criterion(state)
                            self.zero_gradients(state)
                            if sample is not None:
                                self.backward(state)
                            self.reduce(state)
                            hooks.on_backward(state)
                            self.update(state)
                            self.complete(state)
                            hooks.on_update(state)
                        self.end_epoch(state)
                    if place.is_ending:
                        hooks.on_end_epoch(state)
                        place.is_ending = False
                    if state.epoch >= state.maxepoch:
                        self.finish(state)
            hooks.on_end(state)
        return state

    def test(
        self,
        *,
        network: torch.nn.Module,
        criterion: Callable[..., torch.Tensor],
        iterator: Iterable[Any],
        extensions: Sequence[Extension] = (),
    ) -> State:
        """Run every sample forward, without gradients and in evaluation mode, and return the last state.

        Its loss is that of the last batch: for the mean add each to an ``Average`` in ``hooks.on_forward_criterion``.
        The hooks are those of training (``state.training`` tells them apart); each module's mode is restored.
        """
        for each in extensions:
            if not getattr(each, "serves_tests", True):
                raise TypeError(
                    f"test(extensions=...): {type(each).__name__} takes part in training only; leave it out"
                )
        state = State(network, criterion, iterator)
        with self.session(state), self._taking_part(state, extensions) as hooks, torch.no_grad(), modes_restored(state):
            self.set_mode(state)
            hooks.on_start(state)
            for sample in samples.of_epoch(state):
                if sample is None:
                    continue
                self.take_sample(state, sample)
                hooks.on_sample(state)
                samples.count(state)
                self.forward(state)
                hooks.on_forward(state)
                self.forward_criterion(state)
                hooks.on_forward_criterion(state)
                state.t += 1
            hooks.on_end(state)
        return state

    @contextmanager
    def _taking_part(self, state: State, extensions: Sequence[Extension]) -> Iterator[Hooks]:
        """The block of a run, within the brackets of its extensions; gives what to call at each moment.

        A hook may train another network with this engine.
        """
        enclosing = self.extensions, self.calls
        try:
            with called(self.hooks, extensions) as self.calls:
                self.extensions = list(extensions)
                with within(each.around_run(self, state) for each in extensions):
                    yield self.calls
        finally:
            self.extensions, self.calls = enclosing

    # The actions of the loop, in its order. Subclasses override these; each reads and writes the state only.

    def session(self, state: State) -> AbstractContextManager[None]:
        """The bracket around the whole run, also when an error ends the run."""
        return nullcontext()

    def make_optimizer(
        self, state: State, lr: float | None, optimizer: OptimizerLike | None
    ) -> torch.optim.Optimizer | None:
        """The optimizer that ``lr`` or ``optimizer`` stands for, or None; the parameters are on their device by now."""
        if (lr is None) == (optimizer is None):
            raise ValueError(
                f"train(lr={lr!r}, optimizer={optimizer!r}): give exactly one of them; lr=0.1 for plain SGD, "
                "lr=0 for no update, or optimizer=torch.optim.Adam(network.parameters())"
            )
        if lr is not None:
            return torch.optim.SGD(state.parameters(), lr=lr) if lr != 0 else None
        chosen: Any = optimizer
        if callable(chosen) and (isinstance(chosen, type) or not hasattr(chosen, "step")):
            chosen = chosen(state.parameters())
        if not hasattr(chosen, "step"):
            raise TypeError(f"optimizer={optimizer!r} is neither a torch optimizer nor a function that returns one")
        return cast(torch.optim.Optimizer, chosen)

    def set_mode(self, state: State) -> None:
        """Put network and criterion into training or evaluation mode."""
        for module in state.modules():
            module.train(state.training)

    def begin(self, state: State) -> None:
        """The last action before the first epoch, of training: ``hooks.on_start`` may have changed the state."""

    def take_sample(self, state: State, sample: Any) -> None:
        """Set the sample, its weight and number of samples (the iterator's, else 1.0 and the target's length, or 1)."""
        state.sample = sample
        state.place.next_position = getattr(state.iterator, "position", state.place.position + 1)
        state.place.weight = getattr(state.iterator, "weight", 1.0)
        state.num_samples = getattr(state.iterator, "num_samples", samples.length(sample))

    def prepare(self, state: State) -> None:
        """The last action before the forward pass, or before a step without samples, in training only: none here."""

    def forward(self, state: State) -> None:
        """``state.output = network(input)``."""
        state.output = state.network(samples.split(state.sample)[0])

    def forward_criterion(self, state: State) -> None:
        """``state.loss = criterion(output, target)``."""
        state.loss = state.criterion(state.output, samples.split(state.sample)[1])

    def zero_gradients(self, state: State) -> None:
        """Forget the gradients of the previous sample, whatever ``optimizer.zero_grad`` keeps of them."""
        if state.optimizer is not None:
            state.optimizer.zero_grad()
        members = state.members()
        for parameter in members.parameters:
            parameter.grad = None
        for module in members.with_own_zero_grad:
            module.zero_grad()

    def backward(self, state: State) -> None:
        """Compute the gradients of the loss, scaled by this batch's weight among the batches of all ranks."""
        weight = state.place.weight
        (state.loss if weight == 1.0 else state.loss * weight).backward()

    def reduce(self, state: State) -> None:
        """Bring the gradients of the ranks together: there are no other ranks here."""

    def update(self, state: State) -> None:
        """One step of the optimizer, if there is one."""
        if state.optimizer is not None:
            state.optimizer.step()

    def complete(self, state: State) -> None:
        """Count the step."""
        state.t += 1
        state.place.position = state.place.next_position

    def end_epoch(self, state: State) -> None:
        """Count the epoch; ``hooks.on_end_epoch`` follows."""
        state.epoch, state.place.position, state.place.is_ending = state.epoch + 1, 0, True

    def finish(self, state: State) -> None:
        """The last action of training, after the last ``on_end_epoch`` and before ``hooks.on_end``."""
        state.place.is_finished = True
