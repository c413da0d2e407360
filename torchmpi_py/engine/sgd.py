"""The training loop, which calls a hook after most actions, such as the forward pass.

This is torchnet's SGD engine (the parent class of TorchMPI's AllReduceSGDEngine, reference section 7) for torch
modules. The loop is ``SGDEngine.train`` below, which shows the order of all actions and hooks. The engine does not
handle ranks, devices, clocks, files or logs. Other behaviour is added in one of three ways:

* Users add behaviour with hooks: ``engine.hooks.on_update = lambda state: print(state.loss.item())``.
* Behaviour that has its own state is an ``Extension``, such as ``Checkpoint``.
* Packages add behaviour with a subclass that overrides the small methods of the loop (``AllReduceSGDEngine``), so all
  hooks remain free for the user.
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
    """Train and test a network in one process.

    Add behaviour with ``hooks``, with extensions, or in a subclass that overrides the actions of the loop.

    Source: torchnet, ``SGDEngine``; TorchMPI reference section 7.

    Attributes:
        hooks (Hooks): functions that the loop calls after its actions.

    Examples:
        >>> trainer = mpi.engine.SGDEngine()
        >>> losses = []
        >>> trainer.hooks.on_update = lambda state: losses.append(state.loss.item())
        >>> state = trainer.train(
        ...     network=torch.nn.Linear(4, 1),
        ...     criterion=torch.nn.functional.mse_loss,
        ...     iterator=[(torch.randn(8, 4), torch.randn(8, 1)) for _ in range(3)],
        ...     lr=0.1,
        ...     extensions=[],
        ... )
        >>> state.t, len(losses)
        (3, 3)
    """

    steps_together = False
    """Whether every step is collective. If not, ranks may have different numbers of steps in an epoch."""

    def __init__(self) -> None:
        self.hooks = Hooks()
        self.extensions: list[Extension] = []  # extensions of the current run
        self.calls = self.hooks  # hooks of the current run, each followed by the extensions

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
        """Train for ``maxepoch`` epochs, and return the final state.

        **Overwrites** the parameters and buffers of ``network`` and ``criterion``. With ``AllReduceSGDEngine`` every
        rank must make this call.

        A hook that adds layers must also add their parameters to ``state.optimizer``. An optimizer that reduces
        gradients (``ShardedOptimizer``, ``DistributedOptimizer``) does not accept new parameters.

        If the iterator or its sampler has ``set_epoch``, the engine calls it before each epoch, and the order is drawn
        from (seed, epoch). Each call of ``train`` counts from epoch 0, so several calls with ``maxepoch=1`` use the
        same order. To avoid this, make one call with a larger ``maxepoch``, or set ``state.epoch`` in ``on_start`` to
        the number of epochs of the earlier calls. ``maxepoch`` always counts from epoch 0.

        Args:
            network (torch.nn.Module): module to train.
            criterion (callable): module or function that returns the mean loss of a batch, a scalar, for
                (output, target).
            iterator (iterable): batches of (input, target); iterated once per epoch.
            lr (float): learning rate of plain SGD on the parameters of network and criterion, or 0 for no update;
                default None.
            optimizer (torch.optim.Optimizer or callable): instead of ``lr``, an optimizer, or a function that creates
                an optimizer from the list of parameters; default None.
            maxepoch (int): number of epochs; default 1.
            extensions (sequence of Extension): objects that add behaviour, such as ``Checkpoint(folder)``,
                ``Evaluate(function)``, ``EpochLines()``, ``ProgressBar()``, ``TensorBoard(folder)`` or your own. After
                each hook, the engine calls the extensions in the order of this list. Default None:
                ``[EpochLines()]``, or no extension if the hook ``on_end_epoch`` is set. In an elastic job, the engine
                adds ``Elastic()``.
            **former (object): deprecated keywords of the previous release: checkpoint, every, keep, stateful,
                evaluator, epoch_lines. Each keyword adds the extension that replaces it, with a DeprecationWarning.

        Returns:
            The ``State`` after the last step.

        Raises:
            ValueError: not exactly one of ``lr`` and ``optimizer`` was passed.
            TypeError: the optimizer's step needs a closure (LBFGS), or the iterator can be iterated only once (a
                generator) and ``maxepoch`` is above 1. ``train`` also raises it if a sample is not (input, target), or
                if an extension is not an ``Extension``.
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
                            if sample is not None:  # None means that only other ranks have samples.
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
        """Compute output and loss of every batch, in evaluation mode and without gradients; return the final state.

        ``state.loss`` is the loss of the last batch. To compute the mean, add each loss to an ``Average`` in
        ``hooks.on_forward_criterion``. The loop calls the same hooks as in training, but ``state.training`` is False.
        The mode of each module is restored at the end. With ``AllReduceSGDEngine`` every rank must make this call.

        Args:
            network (torch.nn.Module): module to test.
            criterion (callable): module or function that returns the mean loss of a batch, a scalar, for
                (output, target).
            iterator (iterable): batches of (input, target).
            extensions (sequence of Extension): objects that add behaviour, such as ``ProgressBar()``; default none.

        Returns:
            The ``State`` after the last batch.

        Raises:
            TypeError: an extension works only in training, or a sample is not (input, target).
        """
        for each in extensions:
            if not getattr(each, "serves_tests", True):
                raise TypeError(f"test: the extension {type(each).__name__} works only in training; omit it")
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
        """Yield the hooks of a run, composed with its extensions, within the contexts of the extensions.

        Runs may be nested, because a hook may train a different network with this engine.
        """
        enclosing = self.extensions, self.calls
        try:
            with called(self.hooks, extensions) as self.calls:
                self.extensions = list(extensions)
                with within(each.around_run(self, state) for each in extensions):
                    yield self.calls
        finally:
            self.extensions, self.calls = enclosing

    # The actions of the loop follow, in the order of the loop. Subclasses override them. Each action reads and writes
    # only the state.

    def session(self, state: State) -> AbstractContextManager[None]:
        """Return the context of the whole run. The context also ends when an error ends the run.

        Args:
            state (State): state of the run.
        """
        return nullcontext()

    def make_optimizer(
        self, state: State, lr: float | None, optimizer: OptimizerLike | None
    ) -> torch.optim.Optimizer | None:
        """Return the optimizer of the run. The parameters must already be on their device.

        Args:
            state (State): state of the run.
            lr (float): learning rate of plain SGD, or None.
            optimizer (torch.optim.Optimizer or callable): optimizer, a function that creates it, or None.

        Returns:
            The optimizer, or None with ``lr=0``.

        Raises:
            ValueError: not exactly one of ``lr`` and ``optimizer`` was passed.
            TypeError: ``optimizer`` is neither an optimizer nor a function that returns an optimizer.
        """
        if (lr is None) == (optimizer is None):
            raise ValueError(
                f"train(lr={lr!r}, optimizer={optimizer!r}): pass exactly one of them: lr=0.1 for plain SGD, lr=0 for "
                "no update, or optimizer=torch.optim.Adam(network.parameters())"
            )
        if lr is not None:
            return torch.optim.SGD(state.parameters(), lr=lr) if lr != 0 else None
        result: Any = optimizer
        if callable(result) and (isinstance(result, type) or not hasattr(result, "step")):
            result = result(state.parameters())
        if not hasattr(result, "step"):
            raise TypeError(f"train: optimizer={optimizer!r}; pass a torch optimizer, or a function that returns one")
        return cast(torch.optim.Optimizer, result)

    def set_mode(self, state: State) -> None:
        """Put network and criterion into training or evaluation mode.

        Args:
            state (State): state of the run.
        """
        for module in state.modules():
            module.train(state.training)

    def begin(self, state: State) -> None:
        """Prepare the first epoch of training, after ``hooks.on_start``. Here the method does nothing.

        Args:
            state (State): state of the run.
        """

    def take_sample(self, state: State, sample: Any) -> None:
        """Store a sample, its weight and its number of samples in the state.

        If the iterator has no ``weight``, the weight is 1.0. If it has no ``num_samples``, the number is the length of
        the target.

        Args:
            state (State): state of the run.
            sample (object): (input, target), or None if this rank has no samples.
        """
        state.sample = sample
        state.place.next_position = getattr(state.iterator, "position", state.place.position + 1)
        state.place.weight = getattr(state.iterator, "weight", 1.0)
        state.num_samples = getattr(state.iterator, "num_samples", samples.length(sample))

    def prepare(self, state: State) -> None:
        """Prepare a step of training, with or without samples on this rank. Here the method does nothing.

        Args:
            state (State): state of the run.
        """

    def forward(self, state: State) -> None:
        """Set ``state.output`` to ``network(input)``.

        Args:
            state (State): state of the run.
        """
        state.output = state.network(samples.split(state.sample)[0])

    def forward_criterion(self, state: State) -> None:
        """Set ``state.loss`` to ``criterion(output, target)``.

        Args:
            state (State): state of the run.
        """
        state.loss = state.criterion(state.output, samples.split(state.sample)[1])

    def zero_gradients(self, state: State) -> None:
        """Remove the gradients of the previous sample, even gradients that ``optimizer.zero_grad`` keeps.

        Args:
            state (State): state of the run.
        """
        if state.optimizer is not None:
            state.optimizer.zero_grad()
        members = state.members()
        for parameter in members.parameters:
            parameter.grad = None
        for module in members.with_own_zero_grad:
            module.zero_grad()

    def backward(self, state: State) -> None:
        """Compute the gradients of the loss, scaled by the weight of this rank's batch.

        Args:
            state (State): state of the run.
        """
        weight = state.place.weight
        (state.loss if weight == 1.0 else state.loss * weight).backward()

    def reduce(self, state: State) -> None:
        """Reduce the gradients of all ranks. Here the method does nothing, because this engine does not communicate.

        Args:
            state (State): state of the run.
        """

    def update(self, state: State) -> None:
        """Take a step of the optimizer, if there is one.

        Args:
            state (State): state of the run.
        """
        if state.optimizer is not None:
            state.optimizer.step()

    def complete(self, state: State) -> None:
        """Count the completed step, and advance the position in the epoch.

        Args:
            state (State): state of the run.
        """
        state.t += 1
        state.place.position = state.place.next_position

    def end_epoch(self, state: State) -> None:
        """Count the completed epoch. The loop calls ``hooks.on_end_epoch`` next.

        Args:
            state (State): state of the run.
        """
        state.epoch, state.place.position, state.place.is_ending = state.epoch + 1, 0, True

    def finish(self, state: State) -> None:
        """End the training. The loop calls this method after the last ``on_end_epoch`` and before ``on_end``.

        Args:
            state (State): state of the run.
        """
        state.place.is_finished = True
