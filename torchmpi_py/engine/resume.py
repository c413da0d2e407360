"""What of a training run is in its checkpoints, and when they are written."""

from __future__ import annotations

import logging
import os
import pathlib
import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, Protocol

import torch

from torchmpi_py.engine import outcomes, samples
from torchmpi_py.engine.checkpoint import Checkpoints, Collected, check_collected
from torchmpi_py.engine.end_requests import EndRequests
from torchmpi_py.engine.state import State
from torchmpi_py.errors import EndRequested

logger = logging.getLogger("torchmpi_py")

_completed: dict[pathlib.Path, weakref.ref[torch.nn.Module]] = {}
"""Where this process has trained which network to the end."""


class Stateful(Protocol):
    """What has a state of its own: a schedule of the learning rate, a meter (torch.distributed.checkpoint's word)."""

    def state_dict(self) -> Any:
        """The state, as plain data."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Take a state that ``state_dict`` gave."""


class Saving:
    """The checkpoints of one call of ``train``; without a folder it does nothing. All methods are collective.

    Equal on all ranks, and written by rank 0: network, criterion, optimizer, counters. Each rank's own: buffers of the
    modules (batch statistics), random generators, the place in the epoch, the last loss, what is in ``stateful``.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None,
        every: int | Literal["epoch"],
        keep: int,
        stateful: Mapping[str, Stateful] | None,
        steps_together: bool,
    ) -> None:
        self.steps_together = steps_together  # whether ranks can agree on something after every step
        self.checkpoints = None if directory is None else Checkpoints(directory, keep=keep)
        self.every = _checked(every)
        self.stateful = dict(stateful or {})
        self.asked = 0  # maxepoch, before hooks of the epochs change it
        self.saved: tuple[int, ...] | None = None  # where the run stood at the last checkpoint
        self.end_requests = EndRequests()
        for name, part in self.stateful.items():
            if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
                raise TypeError(
                    f"stateful[{name!r}] is a {type(part).__name__}: give objects with state_dict and load_state_dict"
                )
        if self.stateful and self.checkpoints is None:
            raise ValueError("stateful= is what checkpoints hold besides: give checkpoint=DIRECTORY too")

    def heeding(self) -> AbstractContextManager[Any]:
        """What brackets a training that SIGTERM asks to save, and then to end."""
        return nullcontext() if self.checkpoints is None else self.end_requests

    def resume(self, state: State) -> None:
        """Go on from the last complete checkpoint, if there is one."""
        if self.checkpoints is None:
            return
        self.asked = state.maxepoch
        directory = self.checkpoints.directory
        outcomes.of_all(lambda: self._check_begin(state), "training cannot begin", (TypeError, ValueError))
        saved = self.checkpoints.load()
        if saved is None:
            return
        place = (state.iterator, saved.parts["order"], saved.parts["position"], saved.parts["size"])
        misfit = f"step {saved.step} of {directory} does not fit what is trained now"
        outcomes.of_all(lambda: samples.check_place(*place), misfit, (ValueError,))
        outcomes.of_all(lambda: self._restore(state, saved.parts), misfit)
        self.saved = _standing(state)
        is_over = state.epoch >= state.maxepoch
        if is_over:
            _completed[directory] = weakref.ref(state.network)
        if outcomes.rank() == 0:
            place_now = f"epoch {state.epoch}, position {state.position}, step {state.t}"
            if is_over:
                told = "the checkpoint in %s is of a training that is complete: nothing is left to do (%s)"
                logger.warning(told, directory, place_now)
            else:
                logger.info("resumed from %s: %s", directory, place_now)

    def after_step(self, state: State) -> None:
        """Write one if it is time. EndRequested, on all ranks, if one was asked to end; that is saved too."""
        is_due = self.every != "epoch" and state.t % self.every == 0
        if is_due:
            self._save(state)
        self._end_if_asked(state, is_due)

    def after_epoch(self, state: State) -> None:
        """Write one at the end of each epoch, or of the last one; before that, EndRequested as after a step."""
        is_over = state.epoch >= state.maxepoch
        is_due = self.every == "epoch" or is_over
        if is_due:
            self._save(state)
        if not is_over:
            self._end_if_asked(state, is_due)
        if self.checkpoints is not None and is_over:
            _completed[self.checkpoints.directory] = weakref.ref(state.network)

    def _check_begin(self, state: State) -> None:
        """Whether it may be saved there, and can be: asked now, and not when the first epoch is done."""
        assert self.checkpoints is not None
        before = _completed.get(self.checkpoints.directory)
        if before is not None and before() is not state.network:
            raise ValueError(
                f"this process has trained another network with checkpoint={str(self.checkpoints.directory)!r}: give "
                "each a folder of its own, or start the program again to go on with that one"
            )
        check_collected(*self._collected(state))

    def _end_if_asked(self, state: State, has_saved: bool) -> None:
        """Where all ranks come: after each step that they take together, else after a save."""
        all_come = has_saved or self.steps_together or outcomes.size() == 1
        if self.checkpoints is None or not all_come or not self.end_requests.requested():
            return
        self._save(state)
        if outcomes.rank() == 0:
            text = "asked to end (SIGTERM): step %d is saved in %s, and the program ends with exit code 143"
            logger.warning(text, state.t, self.checkpoints.directory)
        raise EndRequested

    def _save(self, state: State) -> None:
        if self.checkpoints is not None and self.saved != _standing(state):
            self.checkpoints.save_collected(state.t, lambda: self._collected(state))
            self.saved = _standing(state)

    def _collected(self, state: State) -> Collected:
        parts = {
            **{name: module.state_dict() for name, module in _modules(state).items()},
            "outside": [tensor.detach() for tensor in _outside(state)],
            "optimizer": None if state.optimizer is None else state.optimizer.state_dict(),
            "epoch": state.epoch,
            "maxepoch": {"asked": self.asked, "now": state.maxepoch},
            "t": state.t,
            "size": outcomes.size(),
        }
        # Rank 0's buffers are in the model.
        modules = _modules(state).items() if outcomes.rank() > 0 else ()
        own = {
            "buffers": {name: _kept_buffers(module) for name, module in modules},
            "position": state.position,
            "order": samples.known(state.iterator),
            "generators": samples.captured(state.iterator),
            "epoch_random": state.epoch_random,
            "loss": state.loss.detach().cpu().clone() if isinstance(state.loss, torch.Tensor) else None,
            "stateful": {name: part.state_dict() for name, part in self.stateful.items()},
        }
        return parts, own

    def _restore(self, state: State, parts: dict[str, Any]) -> None:
        modules = _modules(state)
        for name, module in modules.items():
            module.load_state_dict(parts[name])
        with torch.no_grad():
            for tensor, content in zip(_outside(state), parts["outside"], strict=True):
                tensor.copy_(content)
            for name, buffers in parts["buffers"].items():
                kept = _kept_buffers(modules[name])
                for key, content in buffers.items():
                    kept[key].copy_(content)
        if (state.optimizer is None) != (parts["optimizer"] is None):
            raise ValueError("one of them has no optimizer (lr=0)")
        if state.optimizer is not None:
            state.optimizer.load_state_dict(parts["optimizer"])
        for name, part in self.stateful.items():
            if name not in parts["stateful"]:
                raise ValueError(f"it holds nothing of stateful[{name!r}]")
            part.load_state_dict(parts["stateful"][name])
        state.epoch, state.position, state.t = parts["epoch"], parts["position"], parts["t"]
        state.epoch_random = parts["epoch_random"]
        if parts["loss"] is not None:
            state.loss = parts["loss"].to(next((tensor.device for tensor in state.parameters()), None))
        samples.restore(state.iterator, parts["generators"])
        state.maxepoch = _last_epoch(state, **parts["maxepoch"])


def _last_epoch(state: State, asked: int, now: int) -> int:
    """What ``maxepoch`` is from here on, if it was ``asked`` for when this was saved, and had become ``now``.

    A hook that had ended training early, or prolonged it, has done so for good, unless more is asked for than before.
    """
    if state.position > 0:
        now = max(now, state.epoch + 1)  # one that ended it in this epoch meant its end
    if state.maxepoch == asked:
        return now
    return state.maxepoch if state.maxepoch > asked else min(state.maxepoch, now)


def _modules(state: State) -> dict[str, torch.nn.Module]:
    named = {"network": state.network, "criterion": state.criterion}
    return {name: part for name, part in named.items() if isinstance(part, torch.nn.Module)}


def _outside(state: State) -> Iterator[torch.Tensor]:
    """The parameters that only the optimizer holds."""
    inside = {id(parameter) for module in state.modules() for parameter in module.parameters()}
    return (parameter for parameter in state.parameters() if id(parameter) not in inside)


def _kept_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Those that the module's state_dict holds."""
    kept = module.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in module.named_buffers() if name in kept}


def _standing(state: State) -> tuple[int, ...]:
    # With the number of ranks: after a death, ranks that had saved here save again with those that had not.
    return state.t, state.epoch, state.position, outcomes.size()


def _checked(every: int | Literal["epoch"]) -> int | Literal["epoch"]:
    if every == "epoch" or (isinstance(every, int) and not isinstance(every, bool) and every > 0):
        return every
    raise ValueError(f"every={every!r}: give a positive number of steps, or 'epoch'")
