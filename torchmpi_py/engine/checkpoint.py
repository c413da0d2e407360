"""The extension that saves and resumes a run: the content of its checkpoints, and the moments at which it saves.

A run is saved after the user's hooks, at the end of an epoch or after a number of steps. SIGTERM is a request to end
(``EndRequests``): the run is saved once more, and every rank raises EndRequested.
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
"""The network that this process has trained to the end, for each folder of checkpoints."""


class Checkpoint(Extension):
    """Save a run into a folder, and resume it: a program that is started again ends as if it was never interrupted.

    If the folder holds a checkpoint, the run continues from it, after ``hooks.on_start``. If one rank or all ranks get
    SIGTERM, all ranks save and raise EndRequested, which ends the program with exit code 143. Where steps are
    collective (``AllReduceSGDEngine``, or one rank), this happens after the current step; otherwise at the next save.
    See docs/checkpoints.md.

    The extension runs after all other extensions, whatever its position in the list. The file holds rank 0's network,
    criterion, optimizer and ``maxepoch``, which are equal on all ranks. For each rank it also holds the
    buffers of the modules, because the engine averages batch statistics only at the end. It further holds each rank's
    random generators, counters, position in the epoch, last loss, and objects in ``stateful``. If ranks take local
    steps (``SGDEngine`` without an optimizer that reduces gradients), it holds network, criterion and optimizer for
    each rank, too.

    Args:
        folder (path): folder into which rank 0 writes the files; it is created.
        every (int or str): "epoch" (default) saves after each epoch, a number after that many steps. The end of
            training is always saved.
        keep (int): number of newest checkpoints to keep; default 3.
        stateful (mapping): objects with ``state_dict`` and ``load_state_dict`` whose state belongs to the run, by name,
            such as schedulers and meters; default None.

    Raises:
        ValueError: ``every`` or ``keep`` is out of range. In ``train``: ranks take local steps and ``every`` is a
            number.
        CheckpointError: in ``train``, on every rank, if a checkpoint cannot be written, read or resumed.
        EndRequested: in ``train``, on every rank, after a save that SIGTERM has requested.

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
            raise ValueError(f"every={every!r}: expected a positive number of steps, or 'epoch'")
        self.checkpoints = Checkpoints(folder, keep=keep)
        self.folder = self.checkpoints.directory
        self.every = every
        self.stateful = dict(stateful or {})

    @contextmanager
    def around_run(self, engine: Any, state: State) -> Iterator[None]:
        """Return the context of a run, in which SIGTERM is a request to end and the folder is locked.

        Args:
            engine (SGDEngine): engine that runs.
            state (State): state of the run.
        """
        self.steps_together = engine.steps_together or outcomes.size() == 1
        if self.every != "epoch" and not self.steps_together:
            raise ValueError(
                f"Checkpoint(every={self.every}): all ranks save together, but the ranks of a {type(engine).__name__} "
                "take local steps; use every='epoch'"
            )
        self.asked = 0  # maxepoch before hooks change it during training
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
            CheckpointError: on every rank, if the state cannot be saved, or the checkpoint cannot be read or does not
                fit.
        """
        self.asked = state.maxepoch
        # An error of the first save is raised now, not after the first epoch.
        failure = "training cannot begin"
        outcomes.of_all(lambda: check_collected(*self._collected(state)), failure)
        self.checkpoints.hold()
        saved = self.checkpoints.load()
        if saved is None:
            return
        parts, misfit = saved.parts, f"step {saved.step} of {self.folder} does not fit what is trained now"
        outcomes.of_all(lambda: self._check_network(state), failure)
        outcomes.of_all(lambda: self._restore(state, parts), misfit)
        if outcomes.rank() == 0:
            text = f"{self.folder}: epoch {state.epoch}, position {state.position}, step {state.t}"
            if state.epoch < state.maxepoch:
                logger.info("resumed from %s", text)
            else:
                logger.warning("training is complete and nothing is left to do, says the checkpoint in %s", text)

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
        """Record which network was trained. Every rank must make this call.

        Args:
            state (State): state of the run.

        Raises:
            EndRequested: on every rank, if a rank got SIGTERM since the last save.
        """
        completed[self.folder] = weakref.ref(state.network)
        if self.end_requests.requested(now=True):
            self._end(state)

    def _check_network(self, state: State) -> None:
        """Raise ValueError if this process has trained a different network with this folder. Each rank calls it."""
        before = completed.get(self.folder)
        if before is not None and before() is not state.network:
            raise ValueError(
                f"this process has trained a different network with Checkpoint({str(self.folder)!r}): use "
                "one folder per network, or start the program again to continue with that network"
            )

    def _save(self, state: State, *, is_due: bool, may_end: bool) -> None:
        """Save if it is due, or if a rank got SIGTERM. Every rank calls it with the same arguments."""
        is_end = may_end and self.end_requests.requested()
        if is_due or is_end:
            self.checkpoints.save_collected(state.t, lambda: self._collected(state))
        if is_end:
            self._end(state)

    def _end(self, state: State) -> NoReturn:
        """Raise EndRequested on every rank, after a save."""
        if outcomes.rank() == 0:
            text = "asked to end (SIGTERM): step %d is saved in %s, and the program ends with exit code 143"
            logger.warning(text, state.t, self.folder)
        raise EndRequested

    def _collected(self, state: State) -> Collected:
        modules, optimizer = dict(state.as_one_module().named_children()), state.optimizer
        # This comes first, because it is collective with a sharded optimizer, and later lines may fail on one rank.
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
            raise ValueError(f"it was saved in {saved}, but this run is in {here}; {remedy}")
        trained = parts["trained"]
        for name, module in state.as_one_module().named_children():
            content = trained["modules"].get(name, {})
            content.update(parts["buffers"].get(name, {}))
            module.load_state_dict(content)
        _restore_optimizer(state, trained)
        for name, part in self.stateful.items():
            if name not in parts["stateful"]:
                raise ValueError(f"it has no state of stateful[{name!r}]; omit this object, or use an empty folder")
            part.load_state_dict(parts["stateful"][name])
        samples.restore_generators(state.iterator, parts["generators"])
        is_known = self._has_common_place(state) or parts.get("size", outcomes.size()) == outcomes.size()
        place = parts["iterator"] if is_known else None
        state.place.position = samples.restore_place(state.iterator, place, parts["position"])
        state.epoch, state.t, state.place.is_resumed = parts["epoch"], parts["t"], True
        if parts["loss"] is not None:
            state.loss = parts["loss"].to(next((tensor.device for tensor in state.parameters()), None))
        requested, last = parts["maxepoch"]
        if state.maxepoch == requested:  # Otherwise the program asks for a different number of epochs now.
            # If a hook has lowered maxepoch in the middle of an epoch, the run ends at the end of that epoch.
            state.maxepoch = max(last, state.epoch + (state.position > 0))


def _restore_optimizer(state: State, trained: dict[str, Any]) -> None:
    """Restore the optimizer. Raise ValueError unless it fits the saved one."""
    if (state.optimizer is None) != (trained["optimizer"] is None):
        raise ValueError("only one of the saved run and this run has an optimizer (none with lr=0); use the same one")
    if state.optimizer is None:
        return
    _kind(state).check_saved(OptimizerKind(**trained["optimizer_kind"]))
    state.optimizer.load_state_dict(trained["optimizer"])


def _kind(state: State) -> OptimizerKind:
    """Return the kind of the optimizer, without the wrappers that reduce gradients, so that any ranks can resume."""
    name = name_of_class(state.optimizer, transparent=(ReducingOptimizer, LocalOptimizer))
    return OptimizerKind(name, [tuple(p.shape) for group in state.parameter_groups() for p in group])


def _buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that the module's state_dict holds."""
    state = module.state_dict()
    return {name: state[name] for name, _ in module.named_buffers() if name in state}
