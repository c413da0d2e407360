"""What of a training run is in its checkpoints, and when they are written."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Protocol

import torch

from torchmpi_py.engine import outcomes
from torchmpi_py.engine.checkpoint import Checkpoints, check_parts
from torchmpi_py.engine.state import State
from torchmpi_py.errors import CheckpointError

logger = logging.getLogger("torchmpi_py")


class Stateful(Protocol):
    """What has a state of its own: a schedule of the learning rate, a meter (torch.distributed.checkpoint's word)."""

    def state_dict(self) -> Any:
        """The state, as plain data."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Take a state that ``state_dict`` gave."""


class Saving:
    """The checkpoints of one call of ``train``; without a folder it does nothing. All methods are collective.

    Equal on all ranks, and written by rank 0: network, criterion, optimizer, counters. Each rank's own: buffers of the
    modules (batch statistics), random generators, what is in ``stateful``.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None,
        every: int | Literal["epoch"],
        keep: int,
        stateful: Mapping[str, Stateful] | None,
    ) -> None:
        self.checkpoints = None if directory is None else Checkpoints(directory, keep=keep)
        self.every = _checked(every)
        self.stateful = dict(stateful or {})
        self.saved: tuple[int, ...] | None = None  # where the run stood at the last checkpoint
        for name, part in self.stateful.items():
            if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
                raise TypeError(
                    f"stateful[{name!r}] is a {type(part).__name__}: give objects with state_dict and load_state_dict"
                )
        if self.stateful and self.checkpoints is None:
            raise ValueError("stateful= is what checkpoints hold besides: give checkpoint=DIRECTORY too")

    def resume(self, state: State) -> None:
        """Go on from the last complete checkpoint, if there is one."""
        if self.checkpoints is None:
            return
        saved = self.checkpoints.load()
        if saved is None:
            check_parts(_parts(state), self._own(state))  # now, and not when the first epoch is done
            return
        _check_place(state, saved.parts)
        try:
            self._restore(state, saved.parts)
        except (RuntimeError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"step {saved.step} of {self.checkpoints.directory} does not fit what is trained now: {error}"
            ) from error
        self.saved = _standing(state)
        if outcomes.rank() == 0:
            place = f"epoch {state.epoch}, position {state.position}, step {state.t}"
            logger.info("resumed from %s: %s", self.checkpoints.directory, place)

    def after_step(self, state: State) -> None:
        """Write one if it is time."""
        if self.every != "epoch" and state.t % self.every == 0:
            self._save(state)

    def after_epoch(self, state: State) -> None:
        """Write one at the end of each epoch, or of the last one."""
        if self.every == "epoch" or state.epoch >= state.maxepoch:
            self._save(state)

    def _save(self, state: State) -> None:
        if self.checkpoints is not None and self.saved != _standing(state):
            self.checkpoints.save(state.t, _parts(state), own=self._own(state))
            self.saved = _standing(state)

    def _own(self, state: State) -> dict[str, Any]:
        # Rank 0's buffers are in the model.
        modules = _modules(state).items() if outcomes.rank() > 0 else ()
        return {
            "buffers": {name: _kept_buffers(module) for name, module in modules},
            "epoch_random": state.epoch_random,
            "stateful": {name: part.state_dict() for name, part in self.stateful.items()},
        }

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


def _parts(state: State) -> dict[str, Any]:
    return {
        **{name: module.state_dict() for name, module in _modules(state).items()},
        "outside": [tensor.detach() for tensor in _outside(state)],
        "optimizer": None if state.optimizer is None else state.optimizer.state_dict(),
        "epoch": state.epoch,
        "position": state.position,
        "t": state.t,
        "size": outcomes.size(),
        "order": _order(state),
    }


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


def _order(state: State) -> list[int]:
    """What the order of samples follows from, as far as it is known (``DatasetIterator``)."""
    told = [getattr(state.iterator, name, None) for name in ("total", "seed", "shuffle")]
    return [value for value in told if isinstance(value, int)]


def _standing(state: State) -> tuple[int, ...]:
    # With the number of ranks: after a death, ranks that had saved here save again with those that had not.
    return state.t, state.epoch, state.position, outcomes.size()


def _check_place(state: State, parts: dict[str, Any]) -> None:
    """ValueError if the place in the middle of an epoch is no place in this run's epochs."""
    if parts["position"] == 0:
        return
    if not hasattr(state.iterator, "set_position") and parts["size"] != outcomes.size():
        raise ValueError(
            f"the checkpoint is of {parts['size']} ranks after {parts['position']} batches of an epoch; on "
            f"{outcomes.size()} ranks that would be other samples: use a DatasetIterator, or every='epoch'"
        )
    if parts["order"] != _order(state):
        raise ValueError(
            f"the checkpoint is in the middle of an epoch over {_described(parts['order'])}; "
            f"this is another order: {_described(_order(state))}"
        )


def _described(order: list[int]) -> str:
    return "samples of an unknown order" if len(order) < 3 else "{} samples, seed {}, shuffle {}".format(*order)


def _checked(every: int | Literal["epoch"]) -> int | Literal["epoch"]:
    if every == "epoch" or (isinstance(every, int) and not isinstance(every, bool) and every > 0):
        return every
    raise ValueError(f"every={every!r}: give a positive number of steps, or 'epoch'")
