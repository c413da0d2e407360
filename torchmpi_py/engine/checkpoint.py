"""The extension that saves and resumes a run. This module defines the content of a checkpoint, and when to save.

The extension saves after the user's hooks, at the end of an epoch or after a number of steps. SIGTERM is a request to
end (see ``EndRequests``): the extension saves the run once more, and every rank raises EndRequested.
"""

from __future__ import annotations

import logging
import os
import pathlib
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, NoReturn

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
"""The networks that this process has trained to the end, keyed by the folder of their checkpoints."""


class Checkpoint(Extension):
    """Save a run into a folder, and resume it. A restarted program produces the same result as an uninterrupted run.

    If the folder contains a checkpoint, the run continues from the newest one, after ``hooks.on_start``. If any rank
    gets SIGTERM, all ranks save and raise EndRequested, which ends the program with exit code 143. With collective
    steps (``AllReduceSGDEngine``, or one rank) the run ends after one of the next steps. Otherwise it ends after the
    current epoch. See docs/checkpoints.md.

    The extension runs after all other extensions, whatever its position in the list. A checkpoint contains rank 0's
    network, criterion, optimizer and ``maxepoch``, which are equal on all ranks. It contains the buffers of every rank,
    because the engine averages batch statistics only at the end. It also contains every rank's random generators,
    counters, position in the epoch, last loss, and objects in ``stateful``. If ranks take local steps (``SGDEngine``
    without an optimizer that reduces gradients), it contains the network, criterion and optimizer of every rank.

    Args:
        folder (path): folder into which rank 0 writes the files; rank 0 creates it.
        every (int or str): "epoch" (default) saves after each epoch, a number n after every n steps. The end of
            training is always saved.
        keep (int): number of newest checkpoints to keep; default 3.
        stateful (mapping): objects to save with the run, such as schedulers and meters, keyed by name; default None.
            Each object has ``state_dict`` and ``load_state_dict``.

    Raises:
        ValueError: ``every`` or ``keep`` is out of range. ``train`` also raises it if ranks take local steps and
            ``every`` is a number.
        CheckpointError: a checkpoint cannot be written, read or resumed. ``train`` raises it on every rank.
        EndRequested: a rank got SIGTERM, and the run was saved. ``train`` raises it on every rank.

    Examples:
        >>> import tempfile
        >>> folder = mpi.broadcast_object(tempfile.mkdtemp())
        >>> data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
        >>> state = mpi.engine.AllReduceSGDEngine().train(
        ...     network=torch.nn.Linear(4, 1),
        ...     criterion=torch.nn.functional.mse_loss,
        ...     iterator=mpi.engine.DatasetIterator(data, batch_size=8),
        ...     lr=0.1,
        ...     extensions=[mpi.engine.Checkpoint(folder, every=2)],
        ... )
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
            raise ValueError(f"Checkpoint(every={every!r}): pass a positive number of steps, or 'epoch'")
        self.checkpoints = Checkpoints(folder, keep=keep)
        self.folder = self.checkpoints.directory
        self.every = every
        self.stateful = dict(stateful or {})

    @contextmanager
    def around_run(self, engine: Any, state: State) -> Iterator[None]:
        """Return the context of a run, in which SIGTERM requests the end of the run. Unlock the folder at the end.

        Args:
            engine (SGDEngine): engine that runs.
            state (State): state of the run.
        """
        self.steps_together = engine.steps_together or outcomes.size() == 1
        if self.every != "epoch" and not self.steps_together:
            raise ValueError(
                f"Checkpoint(every={self.every}): all ranks save together, but with {type(engine).__name__} each rank "
                "takes its own steps; use every='epoch'"
            )
        self.asked = 0  # maxepoch that the program has passed to train()
        try:
            with EndRequests() as self.end_requests:
                yield
        finally:
            self.checkpoints.release()

    def on_start(self, state: State) -> None:
        """Resume from the last complete checkpoint, if there is one. Every rank must make this call.

        Args:
            state (State): state of the run; it is overwritten.

        Raises:
            CheckpointError: on every rank, if the state cannot be saved, or if the checkpoint cannot be read or does
                not match the run.
        """
        self.asked = state.maxepoch
        # Check now whether the state can be saved. Otherwise an error would appear only after the first epoch.
        failure = "training cannot begin"
        outcomes.of_all(lambda: check_collected(*self._collected(state)), failure)
        self.checkpoints.hold()
        saved = self.checkpoints.load()
        if saved is None:
            return
        parts, misfit = saved.parts, f"step {saved.step} of {self.folder} does not match this run"
        outcomes.of_all(lambda: self._check_network(state), failure)
        outcomes.of_all(lambda: self._restore(state, parts), misfit)
        if outcomes.rank() == 0:
            text = f"{self.folder}: epoch {state.epoch}, position {state.position}, step {state.t}"
            if state.epoch < state.maxepoch:
                logger.info("resumed from %s", text)
            else:
                logger.warning("training is complete in %s; to train further, pass a larger maxepoch", text)

    def on_update(self, state: State) -> None:
        """Save if a save is due after this step. Every rank must make this call.

        Args:
            state (State): state of the run.

        Raises:
            EndRequested: on every rank, after a save, if a rank got SIGTERM.
        """
        is_due = self.every != "epoch" and state.t % self.every == 0
        self._save(state, is_due=is_due, may_end=self.steps_together)

    def on_end_epoch(self, state: State) -> None:
        """Save if a save is due after this epoch. Every rank must make this call.

        Args:
            state (State): state of the run.

        Raises:
            EndRequested: on every rank, after a save, if a rank got SIGTERM and epochs remain.
        """
        is_over = state.epoch >= state.maxepoch
        self._save(state, is_due=self.every == "epoch" or is_over, may_end=not is_over)

    def on_end(self, state: State) -> None:
        """Record that the network was trained with this folder. Every rank must make this call.

        Args:
            state (State): state of the run.

        Raises:
            EndRequested: on every rank, if a rank got SIGTERM since the last save.
        """
        completed[self.folder] = weakref.ref(state.network)
        if self.end_requests.requested(now=True):
            self._end(state)

    def _check_network(self, state: State) -> None:
        """Raise ValueError if this process has trained a different network with this folder."""
        before = completed.get(self.folder)
        if before is not None and before() is not state.network:
            raise ValueError(
                f"this process has trained a different network with Checkpoint({str(self.folder)!r}): use "
                "one folder per network, or start the program again to continue with that network"
            )

    def _save(self, state: State, *, is_due: bool, may_end: bool) -> None:
        """Save if a save is due, or if a rank got SIGTERM. Every rank must make this call with the same arguments.

        If ``may_end`` is False, the method does not check for SIGTERM.
        """
        is_end = may_end and self.end_requests.requested()
        if is_due or is_end:
            self.checkpoints.save_collected(state.t, lambda: self._collected(state))
        if is_end:
            self._end(state)

    def _end(self, state: State) -> NoReturn:
        """Raise EndRequested on every rank. The caller must have saved the run."""
        if outcomes.rank() == 0:
            text = "a rank received SIGTERM: step %d is saved in %s, and the program ends with exit code 143"
            logger.warning(text, state.t, self.folder)
        raise EndRequested

    def _collected(self, state: State) -> Collected:
        modules, optimizer = dict(state.as_one_module().named_children()), state.optimizer
        # Read the optimizer's state first: with a sharded optimizer this is collective, and later lines may fail on
        # one rank.
        optimizer_state = None if optimizer is None else optimizer.state_dict()
        trained = {
            "modules": {name: module.state_dict() for name, module in modules.items()},
            "optimizer": optimizer_state,
            "optimizer_kind": _kind(state)._asdict(),
        }
        is_own = not self.steps_together and not isinstance(optimizer, ReducingOptimizer)
        parts: dict[str, Any] = {"maxepoch": (self.asked, state.maxepoch), "size": outcomes.size()}
        parts["experiment"] = os.environ.get(config.EXPERIMENT)
        own = {
            "buffers": {name: _buffers(module) for name, module in modules.items()},
            "epoch": state.epoch,
            "t": state.t,
            "position": state.position,
            "generators": samples.generator_states(state.iterator),
            "loss": state.loss.detach().cpu().clone() if isinstance(state.loss, torch.Tensor) else None,
            "stateful": {name: part.state_dict() for name, part in self.stateful.items()},
        }
        (own if is_own else parts)["trained"] = trained
        (parts if self._has_common_place(state) else own)["iterator"] = samples.place_of(state.iterator)
        return parts, own

    def _has_common_place(self, state: State) -> bool:
        """Return whether all ranks share one position in the epoch, so that any number of ranks can continue there."""
        return self.steps_together and getattr(state.iterator, "follows_place", False)

    def _restore(self, state: State, parts: dict[str, Any]) -> None:
        experiment, now = parts["experiment"], os.environ.get(config.EXPERIMENT)
        if experiment != now:
            saved, here = (f"experiment {each} of a sweep" if each else "no experiment" for each in (experiment, now))
            remedy = "use one folder per experiment, such as Checkpoint(mpi.experiment_folder())"
            raise ValueError(f"the checkpoint was saved in {saved}, but this run is in {here}; {remedy}")
        trained = parts["trained"]
        for name, module in state.as_one_module().named_children():
            content = trained["modules"].get(name, {})
            content.update(parts["buffers"].get(name, {}))
            module.load_state_dict(content)
        _restore_optimizer(state, trained)
        for name, part in self.stateful.items():
            if name not in parts["stateful"]:
                raise ValueError(f"no state of stateful[{name!r}] was saved; omit {name!r}, or use another folder")
            part.load_state_dict(parts["stateful"][name])
        samples.restore_generators(state.iterator, parts["generators"])
        is_known = self._has_common_place(state) or parts.get("size", outcomes.size()) == outcomes.size()
        place = parts["iterator"] if is_known else None
        state.place.position = samples.restore_place(state.iterator, place, parts["position"])
        state.epoch, state.t, state.place.is_resumed = parts["epoch"], parts["t"], True
        if parts["loss"] is not None:
            state.loss = parts["loss"].to(next((tensor.device for tensor in state.parameters()), None))
        requested, last = parts["maxepoch"]
        if state.maxepoch == requested:  # Otherwise the maxepoch of this run applies.
            # If a hook has lowered maxepoch in the middle of an epoch, the run ends at the end of that epoch.
            state.maxepoch = max(last, state.epoch + (state.position > 0))


def _restore_optimizer(state: State, trained: dict[str, Any]) -> None:
    """Restore the optimizer's state. Raise ValueError if the optimizer does not match the saved one."""
    if (state.optimizer is None) != (trained["optimizer"] is None):
        raise ValueError("only one of the saved run and this run has an optimizer; pass lr= or optimizer= as before")
    if state.optimizer is None:
        return
    _kind(state).check_saved(OptimizerKind(**trained["optimizer_kind"]))
    state.optimizer.load_state_dict(trained["optimizer"])


def _kind(state: State) -> OptimizerKind:
    """Return the class of the optimizer, and the shapes of its parameters.

    Wrappers that reduce gradients are ignored, so a run may resume without them.
    """
    name = name_of_class(state.optimizer, transparent=(ReducingOptimizer, LocalOptimizer))
    return OptimizerKind(name, [tuple(p.shape) for group in state.parameter_groups() for p in group])


def _buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that the module's state_dict contains."""
    state = module.state_dict()
    return {name: state[name] for name, _ in module.named_buffers() if name in state}
