"""The extension that saves and resumes a run: what of a run is in its checkpoints, and when one is written.

A run is saved after the hooks of its user: at the end of an epoch, or after so many steps. SIGTERM is a request to end
(``EndRequests``): the run is saved once more, and every rank raises EndRequested.
"""

from __future__ import annotations

import logging
import os
import pathlib
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch

from torchmpi_py.core import config
from torchmpi_py.engine import outcomes, samples
from torchmpi_py.engine.checkpoints import Checkpoints, Collected, check_collected
from torchmpi_py.engine.end_requests import EndRequests
from torchmpi_py.engine.extensions import Extension, Stateful
from torchmpi_py.engine.state import State
from torchmpi_py.errors import EndRequested
from torchmpi_py.nn.optimizer_state import OptimizerKind, name_of_class
from torchmpi_py.optim.wrapper import LocalOptimizer, ReducingOptimizer

logger = logging.getLogger("torchmpi_py")

completed: dict[pathlib.Path, weakref.ref[torch.nn.Module]] = {}
"""The network that this process has trained to the end, by folder of checkpoints."""


class Checkpoint(Extension):
    """Save a run into a folder, and go on from there: a program that is started again ends as if not interrupted.

    If the folder holds a checkpoint, the run goes on from it, after ``hooks.on_start``. SIGTERM, at one rank or at all,
    has all ranks save and raise EndRequested, which ends the program with exit code 143: after the step where steps
    are collective (``AllReduceSGDEngine``, or a world of one), otherwise at the next save. See docs/checkpoints.md.

    It is called after all other extensions, wherever it stands in the list. Equal on all ranks, and rank 0's in the
    file: network, criterion, optimizer, ``maxepoch``. Each rank's own: buffers of the modules (batch statistics, before
    the engine averages them at the end), random generators, counters, the place in the epoch, the last loss, the
    objects in ``stateful``. Where ranks take steps of their own (``SGDEngine``, without an optimizer that reduces
    gradients), network, criterion and optimizer are each rank's own as well.

    Args:
        folder: Where rank 0 writes the files; it is made.
        every: Save after each "epoch", or after so many steps; always at the end of training too.
        keep: The number of checkpoints to keep, the newest ones.
        stateful: Objects with ``state_dict`` and ``load_state_dict`` whose state belongs to the run, by name:
            schedules of the learning rate, meters.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        every: int | Literal["epoch"] = "epoch",
        keep: int = 3,
        stateful: Mapping[str, Stateful] | None = None,
    ) -> None:
        if every != "epoch" and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
            raise ValueError(f"every={every!r}: give a positive number of steps, or 'epoch'")
        self.checkpoints = Checkpoints(folder, keep=keep)
        self.folder = self.checkpoints.directory
        self.every = every
        self.stateful = dict(stateful or {})

    @contextmanager
    def around_run(self, engine: Any, state: State) -> Iterator[None]:
        """Heed SIGTERM, and hold the folder, while the run lasts."""
        self.steps_together = engine.steps_together or outcomes.size() == 1
        if self.every != "epoch" and not self.steps_together:
            raise ValueError(
                f"Checkpoint(every={self.every}): all ranks save together, and those of a {type(engine).__name__} take "
                "steps of their own; give every='epoch'"
            )
        self.asked = 0  # maxepoch, before hooks of the epochs change it
        self.saved: tuple[int, ...] | None = None  # where the run stood at the last checkpoint
        try:
            with EndRequests() as self.end_requests:
                yield
        finally:
            self.checkpoints.release()

    def on_start(self, state: State) -> None:
        """Go on from the last complete checkpoint, if there is one."""
        self.asked = state.maxepoch
        # An error that the first save would have is raised now, and not when the first epoch is done.
        begun = "training cannot begin"
        outcomes.of_all(lambda: check_collected(*self._collected(state)), begun, (TypeError, ValueError))
        self.checkpoints.hold()
        saved = self.checkpoints.load()
        if saved is None:
            return
        parts, misfit = saved.parts, f"step {saved.step} of {self.folder} does not fit what is trained now"
        outcomes.of_all(lambda: self._check_network(state), begun, (ValueError,))
        outcomes.of_all(lambda: self._restore(state, parts), misfit)
        self.saved = _standing(state)
        if outcomes.rank() == 0:
            text = f"{self.folder}: epoch {state.epoch}, position {state.position}, step {state.t}"
            if state.epoch < state.maxepoch:
                logger.info("resumed from %s", text)
            else:
                logger.warning("training is complete and nothing is left to do, says the checkpoint in %s", text)

    def on_update(self, state: State) -> None:
        """Save if it is time. EndRequested, on all ranks and saved too, if one was asked to end."""
        if self.every != "epoch" and state.t % self.every == 0:
            self._save(state)
        if self.steps_together:
            self._end_if_requested(state)

    def on_end_epoch(self, state: State) -> None:
        """Save each epoch, or the last one. EndRequested as after a step, unless all is done."""
        is_over = state.epoch >= state.maxepoch
        if self.every == "epoch" or is_over:
            self._save(state)
        if not is_over:
            self._end_if_requested(state)

    def on_end(self, state: State) -> None:
        """Remember what this process has trained. EndRequested if a rank was asked to end meanwhile."""
        completed[self.folder] = weakref.ref(state.network)
        self._end_if_requested(state, now=True)

    def _check_network(self, state: State) -> None:
        """Each rank: ValueError if this process has trained another network into the folder."""
        before = completed.get(self.folder)
        if before is not None and before() is not state.network:
            raise ValueError(
                f"this process has trained another network with Checkpoint({str(self.folder)!r}): give "
                "each a folder of its own, or start the program again to go on with that one"
            )

    def _end_if_requested(self, state: State, *, now: bool = False) -> None:
        """Every rank calls it: after each step if steps are collective, otherwise after a save."""
        if not self.end_requests.requested(now=now):
            return
        self._save(state)
        if outcomes.rank() == 0:
            text = "asked to end (SIGTERM): step %d is saved in %s, and the program ends with exit code 143"
            logger.warning(text, state.t, self.folder)
        raise EndRequested

    def _save(self, state: State) -> None:
        if self.saved != _standing(state):
            self.checkpoints.save_collected(state.t, lambda: self._collected(state))
            self.saved = _standing(state)

    def _collected(self, state: State) -> Collected:
        modules, optimizer, rank = state.named_modules(), state.optimizer, outcomes.rank()
        # First, because it is collective with a sharded optimizer: what follows may fail on one rank.
        optimizer_state = None if optimizer is None else optimizer.state_dict()
        trained = {
            "modules": {name: module.state_dict() for name, module in modules.items()},
            "outside": [tensor.detach() for tensor in state.parameters_of_optimizer_alone()],
            "optimizer": optimizer_state,
            "optimizer_kind": _kind(state)._asdict(),
        }
        place = samples.place_of(state.iterator)
        is_common = self.steps_together and getattr(state.iterator, "follows_place", False)
        is_own = rank > 0 and not self.steps_together and not isinstance(optimizer, ReducingOptimizer)
        parts = {
            "trained": trained,
            "maxepoch": {"asked": self.asked, "now": state.maxepoch},
            "iterator": place if is_common else None,
            "experiment": os.environ.get(config.EXPERIMENT, ""),
        }
        own = {
            "trained_alone": trained if is_own else None,
            "buffers": {name: _kept_buffers(module) for name, module in modules.items() if rank > 0 and not is_own},
            "epoch": state.epoch,
            "t": state.t,
            "position": state.position,
            "iterator_alone": None if is_common else place,
            "generators": samples.generator_states(state.iterator),
            "loss": state.loss.detach().cpu().clone() if isinstance(state.loss, torch.Tensor) else None,
            "stateful": {name: part.state_dict() for name, part in self.stateful.items()},
        }
        return parts, own

    def _restore(self, state: State, parts: dict[str, Any]) -> None:
        _check_experiment(parts["experiment"])
        modules, trained = state.named_modules(), parts["trained_alone"] or parts["trained"]
        for name, module in modules.items():
            module.load_state_dict(trained["modules"].get(name, {}))
        for name, buffers in parts["buffers"].items():
            kept = _kept_buffers(modules[name])
            for key, content in buffers.items():
                _copy(f"buffer {key} of {name}", kept[key], content)
        _restore_optimizer(state, trained)
        for name, part in self.stateful.items():
            if name not in parts["stateful"]:
                raise ValueError(f"it holds nothing of stateful[{name!r}]")
            part.load_state_dict(parts["stateful"][name])
        samples.restore_generators(state.iterator, parts["generators"])
        place = parts["iterator"] or parts["iterator_alone"]
        state.place.position = samples.restore_place(state.iterator, place, parts["position"])
        state.epoch, state.t, state.place.is_resumed = parts["epoch"], parts["t"], True
        if parts["loss"] is not None:
            state.loss = parts["loss"].to(next((tensor.device for tensor in state.parameters()), None))
        state.maxepoch = _last_epoch(state, **parts["maxepoch"])


def _restore_optimizer(state: State, trained: dict[str, Any]) -> None:
    """Restore the optimizer, and the parameters that it alone holds; ValueError unless it is as it was saved."""
    if (state.optimizer is None) != (trained["optimizer"] is None):
        raise ValueError("one of them has no optimizer (lr=0)")
    if state.optimizer is None:
        return
    outside = state.parameters_of_optimizer_alone()
    for number, (tensor, content) in enumerate(zip(outside, trained["outside"], strict=True)):
        _copy(f"parameter {number} of those that only the optimizer holds", tensor, content)
    _kind(state).check_saved(OptimizerKind(**trained["optimizer_kind"]))
    state.optimizer.load_state_dict(trained["optimizer"])


def _kind(state: State) -> OptimizerKind:
    """What the optimizer's state belongs to, on whatever ranks, and however they reduce gradients."""
    name = name_of_class(state.optimizer, transparent=(ReducingOptimizer, LocalOptimizer))
    return OptimizerKind(name, [tuple(p.shape) for group in state.parameter_groups() for p in group])


@torch.no_grad()
def _copy(name: str, tensor: torch.Tensor, content: torch.Tensor) -> None:
    """Copy; ValueError for another shape, which torch would broadcast."""
    if tensor.shape != content.shape:
        raise ValueError(f"{name} has shape {tuple(content.shape)} in it, and is trained with {tuple(tensor.shape)}")
    tensor.copy_(content)


def _last_epoch(state: State, asked: int, now: int) -> int:
    """``maxepoch`` from here on, of a run that was ``asked`` for so many epochs, and had ``now`` when it was saved.

    A hook that has ended training early, or prolonged it, has done so for good, unless the program now asks for more.
    """
    if state.position > 0:
        now = max(now, state.epoch + 1)  # a hook that ended it in this epoch meant the end of the epoch
    if state.maxepoch == asked:
        return now
    return state.maxepoch if state.maxepoch > asked else min(state.maxepoch, now)


def _kept_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that the module's state_dict holds."""
    kept = module.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in module.named_buffers() if name in kept}


def _standing(state: State) -> tuple[int, ...]:
    # With the number of ranks: after a death, ranks that had saved here save again with those that had not.
    return state.t, state.epoch, state.position, outcomes.size()


def _check_experiment(saved: str) -> None:
    """ValueError if a checkpoint is of another experiment of a sweep."""
    now = os.environ.get(config.EXPERIMENT, "")
    if saved != now:
        raise ValueError(
            f"it is of experiment {saved or 'none'}, and this is {now or 'none'}: Checkpoint(mpi.experiment_folder()) "
            "gives each experiment its own"
        )
