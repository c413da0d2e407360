"""The training loop: one action, one hook.

This is torchnet's SGD engine (the parent of TorchMPI's AllReduceSGDEngine, reference section 7) on torch modules. The
loop is ``SGDEngine.train`` below, and it is the documentation: every line that does something is followed by the hook
that is called after it. The engine does not know of ranks, devices, clocks or logs:

* users add behaviour by hooks: ``engine.hooks.on_update = lambda state: print(state.loss.item())``;
* packages add behaviour by a subclass that overrides the small methods the loop calls (``AllReduceSGDEngine``), so that
  the hooks stay the user's;
* checkpoints, and SIGTERM as a request to end, follow the user's hooks (``resume.Saving``).
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, cast

import torch
from torch.utils._pytree import tree_map_only

from torchmpi_py.engine import evaluation, samples
from torchmpi_py.engine.epoch_lines import followed_by_lines
from torchmpi_py.engine.evaluation import Evaluator
from torchmpi_py.engine.resume import RunHooks, Stateful, hooks_of_run
from torchmpi_py.engine.state import Hooks, State, modes_restored
from torchmpi_py.nn.members import parameters_of

OptimizerLike = torch.optim.Optimizer | Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


def check_one_given(lr: float | None, optimizer: OptimizerLike | None) -> None:
    """ValueError unless exactly one of ``lr`` and ``optimizer`` is given."""
    if (lr is None) == (optimizer is None):
        raise ValueError(
            f"train(lr={lr!r}, optimizer={optimizer!r}): give exactly one of them; lr=0.1 for plain SGD, "
            "lr=0 for no update, or optimizer=torch.optim.Adam(network.parameters())"
        )


def _checked(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer; a TypeError if its ``step`` needs a closure, which the loop does not give."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise TypeError(
            f"optimizer: {type(optimizer).__name__}.step needs a closure, to compute several gradients per step; the "
            "engine computes one per sample: give an optimizer that needs none, such as torch.optim.SGD or Adam"
        )
    return cast(torch.optim.Optimizer, optimizer)


def _leaves(loss: Any) -> list[torch.Tensor]:
    """The tensors whose gradients ``loss.backward()`` would accumulate; none for what is no such loss."""
    if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
        return []
    if loss.grad_fn is None:
        return [loss]
    found: list[torch.Tensor] = []
    seen: set[Any] = set()
    left: list[Any] = [loss.grad_fn]
    while left:
        node = left.pop()
        if node not in seen:
            seen.add(node)
            if type(node).__name__ == "AccumulateGrad":  # a class of torch's; those of users' functions end in Backward
                found.append(node.variable)
            left += [function for function, _ in node.next_functions if function is not None]
    return found


class SGDEngine:
    """Train and test a network; the module docstring tells how behaviour is added.

    Source: torchnet, ``SGDEngine``; TorchMPI reference section 7.
    """

    steps_together = False
    """Whether every step has a collective operation; else a rank may have more steps in an epoch than another."""

    def __init__(self) -> None:
        self.hooks = Hooks()
        self._run_hooks: RunHooks = self.hooks  # those that the loop calls: with a checkpoint, more than the user's

    def train(
        self,
        *,
        network: torch.nn.Module,
        criterion: Callable[..., torch.Tensor],
        iterator: Iterable[Any],
        lr: float | None = None,
        optimizer: OptimizerLike | None = None,
        maxepoch: int = 1,
        checkpoint: str | os.PathLike[str] | None = None,
        every: int | Literal["epoch"] = "epoch",
        keep: int = 3,
        stateful: Mapping[str, Stateful] | None = None,
        evaluator: Evaluator | None = None,
        epoch_lines: bool = True,
    ) -> State:
        """Train for ``maxepoch`` epochs and return the last state.

        Give either ``lr`` (plain SGD on network and criterion; 0 means no update) or ``optimizer``: a torch optimizer,
        or a function from the list of parameters to one. A hook that adds layers adds their parameters to
        ``state.optimizer`` too, as anywhere in torch.

        An iterator, or a sampler that it draws from, with ``set_epoch`` gets the epoch, and draws its order from (seed,
        epoch). Each call counts from epoch 0: several calls with ``maxepoch=1`` all see the same order. Make one call
        with a larger ``maxepoch``, or go on where the last one ended: ``on_start`` may set ``state.epoch``
        (``maxepoch`` counts from the very first epoch).

        With ``checkpoint``, a folder that all hosts share, the run is saved there after each epoch (or ``every`` N
        steps) and at its end; the last ``keep`` are kept. If the folder holds a checkpoint the run goes on from it,
        after ``on_start``: a program that is started again ends as if it had not been interrupted. Objects of your own
        that have a state (schedules of the learning rate, meters) are given in ``stateful``, by name. SIGTERM, at one
        rank or at all, then has all of them save and raise ``EndRequested``, which ends the program with exit code 143:
        after the step where steps are collective (``AllReduceSGDEngine``, or a world of one), else at the next save.
        See docs/checkpoints.md.

        ``evaluator(network, epoch)`` is called on a rank of its own, the last one, while the others train (`evaluation`
        says how), if steps are collective (``AllReduceSGDEngine``) and there are several ranks; else on each rank after
        each epoch. ``state.evaluations`` has what it returned, by epoch.

        After each epoch rank 0 prints a line with the mean loss of its samples, unless ``epoch_lines`` is False, or
        there is a hook ``on_end_epoch``.

        Raises ValueError or TypeError for an ambiguous optimizer, ValueError for ``stateful`` without ``checkpoint``,
        TypeError for one that needs a closure (LBFGS), for an iterator that can be run through only once (a generator)
        with ``maxepoch`` > 1, and for a sample that is not (input, target).
        """
        if evaluator is not None:
            again: dict[str, Any] = {"lr": lr, "optimizer": optimizer, "maxepoch": maxepoch, "checkpoint": checkpoint}
            again |= {"every": every, "keep": keep, "stateful": stateful, "epoch_lines": epoch_lines}
            train = functools.partial(self.train, **again)
            state = State(network, criterion, iterator, maxepoch=maxepoch)
            return evaluation.train_and_evaluate(train, self.hooks, state, evaluator, beside=self.steps_together)
        state = State(network, criterion, iterator, training=True, maxepoch=maxepoch)
        check_one_given(lr, optimizer)
        samples.check_repeatable(iterator, maxepoch)
        run_hooks = hooks_of_run(self.hooks, checkpoint, every, keep, stateful, self.steps_together)
        with self.session(state), run_hooks as saving, self._calling(saving, epoch_lines) as hooks:
            state.optimizer = self.make_optimizer(state, lr, optimizer)
            self.set_mode(state)
            hooks.on_start(state)
            self.begin(state)
            while state.epoch < state.maxepoch:
                with self.epoch(state), samples.closed(state):
                    hooks.on_start_epoch(state)
                    for sample in self.samples(state):
                        self.take_sample(state, sample)
                        hooks.on_sample(state)
                        self.prepare(state)
                        self.forward(state)
                        hooks.on_forward(state)
                        self.forward_criterion(state)
                        hooks.on_forward_criterion(state)
                        self.zero_gradients(state)
                        self.backward_criterion(state)
                        hooks.on_backward_criterion(state)
                        self.backward(state)
                        hooks.on_backward(state)
                        self.update(state)
                        self.complete(state)
                        hooks.on_update(state)
                    self.end_epoch(state)
                    hooks.on_end_epoch(state)
                    state.is_ending_epoch = False
            self.finish(state)
            hooks.on_end(state)
        return state

    def test(
        self, *, network: torch.nn.Module, criterion: Callable[..., torch.Tensor], iterator: Iterable[Any]
    ) -> State:
        """Run every sample forward, without gradients and in evaluation mode, and return the last state.

        Its loss is that of the last batch: for the mean add each to an ``Average`` in ``hooks.on_forward_criterion``.
        The hooks are those of training (``state.training`` tells them apart); each module's mode is restored.
        """
        state = State(network, criterion, iterator, training=False)
        with self.session(state), torch.no_grad(), modes_restored(state):
            self.set_mode(state)
            self.hooks.on_start(state)
            for sample in self.samples(state):
                self.take_sample(state, sample)
                self.hooks.on_sample(state)
                self.forward(state)
                self.hooks.on_forward(state)
                self.forward_criterion(state)
                self.hooks.on_forward_criterion(state)
                state.t += 1
            self.hooks.on_end(state)
        return state

    # The actions of the loop, in its order. Subclasses override these; each reads and writes the state only.

    def session(self, state: State) -> AbstractContextManager[None]:
        """The bracket around the whole run, also when an error ends the run."""
        return nullcontext()

    @contextmanager
    def _calling(self, hooks: RunHooks, epoch_lines: bool) -> Iterator[RunHooks]:
        """A block whose loop calls ``hooks``, and prints lines: a hook may train another network with this engine."""
        enclosing, self._run_hooks = self._run_hooks, followed_by_lines(hooks, self.hooks, epoch_lines)
        try:
            yield self._run_hooks
        finally:
            self._run_hooks = enclosing

    def make_optimizer(
        self, state: State, lr: float | None, optimizer: OptimizerLike | None
    ) -> torch.optim.Optimizer | None:
        """The optimizer that ``lr`` or ``optimizer`` stands for, or None; the parameters are on their device by now."""
        if lr is not None:
            return torch.optim.SGD(state.parameters(), lr=lr) if lr != 0 else None
        if hasattr(optimizer, "step") and not isinstance(optimizer, type):
            return _checked(optimizer)
        if callable(optimizer):
            return _checked(optimizer(state.parameters()))
        raise TypeError(f"optimizer={optimizer!r} is neither a torch optimizer nor a function from parameters to one")

    def epoch(self, state: State) -> AbstractContextManager[bool | None]:
        """The bracket around an epoch, or the rest of one; it may swallow an error: the loop goes on from the state."""
        return nullcontext()

    def set_mode(self, state: State) -> None:
        """Put network and criterion into training or evaluation mode."""
        for module in state.modules():
            module.train(state.training)

    def begin(self, state: State) -> None:
        """The last action before the first epoch, of training: ``hooks.on_start`` may have changed the state."""

    def samples(self, state: State) -> Iterator[Any]:
        """The samples of one epoch, from ``state.position`` on; this rank takes part in the steps without any."""
        for sample in samples.of_epoch(state):
            if sample is not None:
                yield sample
            elif state.training:
                self.take_part(state)

    def take_sample(self, state: State, sample: Any) -> None:
        """Set the sample, its weight and number of samples (the iterator's, else 1.0 and the target's length, or 1)."""
        state.sample = sample
        state.next_position = getattr(state.iterator, "position", state.position + 1)
        state.weight = getattr(state.iterator, "weight", 1.0)
        num_samples = getattr(state.iterator, "num_samples", None)
        if num_samples is None:
            num_samples = samples.length(sample)
        state._is_counted = num_samples is not None
        state.num_samples = 1 if num_samples is None else num_samples

    def take_part(self, state: State) -> None:
        """A step of the other ranks, in which this rank has no samples: ``state.sample`` is None.

        Nothing is computed. The gradients of this rank count as zero, so that its parameters stay equal to those of
        the others. Of the hooks only ``on_backward`` and ``on_update`` are called.
        """
        self.take_sample(state, None)
        self.prepare(state)
        self.zero_gradients(state)
        self.reduce(state)
        self._run_hooks.on_backward(state)
        self.update(state)
        self.complete(state)
        self._run_hooks.on_update(state)

    def prepare(self, state: State) -> None:
        """The last action before the forward pass, in training only: none here."""

    def forward(self, state: State) -> None:
        """``state.output = network(input)``; the samples are counted now if ``hooks.on_sample`` has made the pair."""
        if not state._is_counted and state.num_samples == 1:
            state.num_samples = samples.length(state.sample) or 1
        state.output = state.network(samples.split(state.sample)[0])

    def forward_criterion(self, state: State) -> None:
        """``state.loss = criterion(output, target)``, on outputs that are cut from the network's graph.

        Each tensor of the output (alone, or inside tuples, lists, dicts) is replaced by a leaf that shares its memory.
        So the backward pass has two halves, as in torchnet: the criterion's stops at these leaves, and the network's
        starts there. The loss must therefore reach the network's layers through the network's output: an auxiliary
        loss that a layer computes is part of what the network returns. And the criterion must not modify its input in
        place, as it is a leaf that takes a gradient (torch refuses).
        """
        state._cuts = []

        def cut(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.requires_grad:
                return tensor
            leaf = tensor.detach().requires_grad_()
            state._cuts.append((tensor, leaf))
            return leaf

        state.output = tree_map_only(torch.Tensor, cut, state.output)
        state.loss = state.criterion(state.output, samples.split(state.sample)[1])

    def zero_gradients(self, state: State) -> None:
        """Forget the gradients of the previous sample."""
        if state.optimizer is not None:
            state.optimizer.zero_grad()
        for module in state.modules():
            if type(module).zero_grad is torch.nn.Module.zero_grad:
                for parameter in parameters_of(module):  # the same, but for the names that torch makes on its way
                    parameter.grad = None
            else:
                module.zero_grad()

    def backward_criterion(self, state: State) -> None:
        """Gradients of the weighted loss at the cut outputs, and at parameters that the loss reaches without them.

        The latter (the criterion's own, or a penalty on the network's) are held back until ``backward``, so that every
        parameter's gradient is accumulated once: hooks of autograd that reduce a gradient then reduce the whole of it.
        """
        loss = state.loss if state.weight == 1.0 else state.loss * state.weight
        outputs = {leaf: output for output, leaf in state._cuts}
        leaves = _leaves(loss)
        if not leaves or any(leaf not in outputs for leaf in leaves):
            trained = dict.fromkeys([*outputs, *state.parameters()])
            # If the loss reaches none of them, torch says what is wrong with it.
            leaves = [leaf for leaf in leaves if leaf in trained] or list(trained)
        grads = torch.autograd.grad(loss, leaves, allow_unused=True) if leaves else ()  # (): all is frozen
        for leaf, grad in zip(leaves, grads, strict=True):
            if leaf in outputs:
                leaf.grad = grad
        state._cuts = [(outputs.get(x, x), grad) for x, grad in zip(leaves, grads, strict=True) if grad is not None]

    def backward(self, state: State) -> None:
        """Gradients of all parameters, in one pass of autograd that begins where ``backward_criterion`` stopped."""
        cuts, state._cuts = state._cuts, []  # frees the network's graph before the update, not at the next sample
        torch.autograd.backward([tensor for tensor, _ in cuts], [grad for _, grad in cuts])

    def reduce(self, state: State) -> None:
        """Bring the gradients of the ranks together: none here."""

    def update(self, state: State) -> None:
        """One step of the optimizer, if there is one."""
        if state.optimizer is not None:
            state.optimizer.step()

    def complete(self, state: State) -> None:
        """Count the step."""
        state.t += 1
        state.position = state.next_position

    def end_epoch(self, state: State) -> None:
        """Count the epoch. In an elastic job the survivors of a death repeat the end of the epoch from here on."""
        state.epoch, state.position, state.is_ending_epoch = state.epoch + 1, 0, True

    def finish(self, state: State) -> None:
        """The last action of training, after the last checkpoint and before ``hooks.on_end``: none here."""
