"""Data-parallel SGD: the same loop, with gradients averaged over the ranks.

What it adds to ``SGDEngine``, by overriding the loop's small methods, so that all hooks stay the user's:

* before the first sample, rank 0's parameters and buffers of network and criterion, the parameters that only the
  optimizer holds, and its state are broadcast, again if ``hooks.on_start`` has changed them on some rank;
* before a test, and at the end of training, buffers that differ between ranks are averaged;
* after each backward pass, gradients are averaged over the ranks; ``hooks.on_backward`` sees the averages. Synchronous:
  after the pass. Asynchronous: a gradient is reduced during the pass, as soon as it is complete, and the end of the
  pass waits for all of them.

Training goes on when a rank dies, in a job that ``torchmpirun --elastic`` has started. A step *counts* when all ranks
have confirmed, once the gradients are reduced, that all live: then every rank's gradients are in the result, and each
rank updates its parameters without the others. A step in which a rank dies before that is repeated. The survivors build
a smaller world (``runtime.survivors``), and the rest of the epoch is divided among them: every sample is used once.
(Where hooks between update and count have to do with other ranks, some may be a step ahead; the others then take their
state.) Of the end of an epoch (``hooks.on_end_epoch``, a checkpoint) nothing is left out: if one rank has not completed
it, all repeat it. Averages are over the present ranks, and batches keep their size per rank, so a global batch is
smaller from then on. ``hooks.on_recovery`` is the place to scale the learning rate by the number of ranks.

Source: TorchMPI, ``AllReduceSGDEngine`` (reference section 7), with these differences: gradients are averaged, not
summed; uneven batches are weighted (``iterators``); a network that grows has its new parameters broadcast too; and
there are no barriers. TorchMPI held two per step, to line the ranks up for its GPU streams; on a CPU the averaging
synchronizes the ranks in every step, and a barrier before it only adds its own latency.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch.utils._pytree import tree_map_only

from torchmpi_py import nn
from torchmpi_py.collectives.verbs import allgather_object
from torchmpi_py.core import communicators, ulfm
from torchmpi_py.engine import loaders
from torchmpi_py.engine.batches import BatchIterator, check_equal
from torchmpi_py.engine.replicas import Replicas
from torchmpi_py.engine.sgd import OptimizerLike, SGDEngine
from torchmpi_py.engine.state import State
from torchmpi_py.errors import NotStarted
from torchmpi_py.nn.compression import Compression, check_compression
from torchmpi_py.nn.members import modules_of
from torchmpi_py.nn.optimizer_state import broadcast_optimizer_state
from torchmpi_py.nn.sync_batch_norm import SyncBatchNorm
from torchmpi_py.optim.sharded import ShardedOptimizer
from torchmpi_py.runtime import process, survivors


class AllReduceSGDEngine(SGDEngine):
    """Train one copy of the network per rank; all copies are equal at every step.

    Every rank of the current communicator calls ``train`` and ``test`` alike, with iterators that give the same number
    of batches (``DatasetIterator`` and ``StreamIterator`` do; a DataLoader that torch orders is divided, see
    ``loaders``). With one rank it is ``SGDEngine``. Raises NotStarted before ``mpi.start()``, and ValueError for
    ``usegpu`` in a session without GPUs, for an iterator whose rank and size were taken before ``mpi.start()`` or at
    another level, and, on all ranks, for one that iterates over something else on another rank.

    usegpu: network, criterion and samples are moved to ``mpi.device()``; the batches of a ``DatasetIterator`` ahead of
        their use, from pinned memory, while the step before is computed.
    asynchronous: average gradients during the backward pass instead of after it.
    devicesync: with usegpu, wait for the device at each sample and after the criterion's backward pass, as TorchMPI
        does; without usegpu it does nothing.
    dynamicnetwork: look before each forward pass whether hooks have changed the set of trained parameters (on all ranks
        alike); if so broadcast parameters and buffers and register gradients again.
    debug: before each forward pass, check that all ranks hold the same parameters; RanksDisagree if not.
    compression: of the gradients that travel, such as ``optim.compression.BF16()``; None: they go as they are.
    sharded: divide the optimizer's state among the ranks: ``state.optimizer`` is an ``optim.ShardedOptimizer``.
        Gradients are reduced during the backward pass, asynchronous or not, and using ``p.grad`` in
        ``hooks.on_backward`` raises RuntimeError; clip by ``state.optimizer.clip_grad_norm_``. An optimizer that was
        made before ``train`` gets its whole state back at the end (none, if an error ends training); the state of one
        that a function makes, or ``lr``, stays divided.
    buffers: how buffers that differ between ranks (BatchNorm's statistics are of each rank's batches) become equal
        before a test and at the end of training: "average" (whole numbers: rank 0's), "root": rank 0's, or "leave".
    """

    steps_together = True

    def __init__(
        self,
        usegpu: bool = False,
        asynchronous: bool = False,
        devicesync: bool = True,
        dynamicnetwork: bool = True,
        debug: bool = False,
        buffers: Literal["average", "root", "leave"] = "average",
        compression: Compression | None = None,
        sharded: bool = False,
    ) -> None:
        super().__init__()
        check_compression(compression)
        if buffers not in ("average", "root", "leave"):
            raise ValueError(f"buffers={buffers!r}: give 'average', 'root' or 'leave'")
        self.usegpu = usegpu
        self.asynchronous = asynchronous
        self.devicesync = devicesync
        self.dynamicnetwork = dynamicnetwork
        self.debug = debug
        self.buffers = buffers
        self.compression = compression
        self.sharded = sharded
        self._replicas: Replicas | None = None  # of the train() in progress; None with one rank

    @contextmanager
    def session(self, state: State) -> Iterator[None]:
        """Check; divide the iterator; move network and samples to the device; keep the copies equal while training."""
        if not process.is_started():
            raise NotStarted("AllReduceSGDEngine needs a running session: call mpi.start() first, on every rank")
        state.iterator = loaders.divided(state.iterator)
        if isinstance(state.iterator, BatchIterator):
            if ulfm.has_lost_ranks():
                state.iterator.take_place()
            state.iterator.check_alike()
        if state.training and ulfm.is_elastic():
            _check_elastic(state, self.sharded)
        with self._on_gpu(state):
            if state.training:
                with self._replicated(state):
                    yield
            else:
                yield

    @contextmanager
    def epoch(self, state: State) -> Iterator[None]:
        """In an elastic job: when a rank dies the others recover, and the loop goes on with the rest of the epoch.

        If the epoch was counted already, its end is repeated here.
        """
        with survivors.elastic() as attempt:
            yield
        while attempt.has_recovered:
            self._recover(state)
            if not state.is_ending_epoch:
                return
            with survivors.elastic() as attempt:
                self._run_hooks.on_end_epoch(state)
                state.is_ending_epoch = False

    def _recover(self, state: State) -> None:
        """Make the survivors equal, and divide the rest of the epoch. Collective; another rank may die meanwhile."""
        while True:
            with survivors.elastic() as attempt:
                # The state of the rank that has come farthest becomes everyone's.
                standing = state.epoch, state.position, state.t, -state.maxepoch  # a hook may have lowered it, to stop
                endings = allgather_object((standing, state.is_ending_epoch))
                schedules = self._schedules()
                # Of ranks that were in one hook some have made the step of a schedule there, and others have not.
                steps = [getattr(schedule, "last_epoch", 0) for schedule in schedules]
                optimizers = [] if state.optimizer is None else [state.optimizer]
                parts = [state.as_one_module(), *optimizers, *schedules]
                farthest = survivors.catch_up((*standing, *steps), *parts)[:4]
                # This rank has come as far, also if that rank dies before the others have.
                state.epoch, state.position, state.t = farthest[:3]
                state.maxepoch = -farthest[3]
                state.is_ending_epoch = (farthest, True) in endings
                attempt.confirm()
                # From here on the survivors stand at the same step, and share the rest of the epoch.
                state.iterator.take_place()  # type: ignore[attr-defined]  # checked before the first epoch
                if self._replicas is not None:
                    self._replicas = self._replicas.successor()
                self.hooks.on_recovery(state)
            if not attempt.has_recovered:
                return

    def _schedules(self) -> list[torch.optim.lr_scheduler.LRScheduler]:
        """Torch's schedules in ``stateful``, which without checkpoints is empty."""
        stateful = getattr(self._run_hooks, "stateful", {}).values()
        return [part for part in stateful if isinstance(part, torch.optim.lr_scheduler.LRScheduler)]

    @contextmanager
    def _on_gpu(self, state: State) -> Iterator[None]:
        """With usegpu, move the modules there, and let the iterator do so with batches, ahead of their use."""
        if not self.usegpu:
            yield
            return
        if process.device().type == "cpu":
            raise ValueError("usegpu=True, but this session computes on the CPU: call mpi.start(with_cuda=True)")
        for module in state.modules():
            module.to(process.device())
        iterator = state.iterator
        if not isinstance(iterator, BatchIterator) or iterator.device is not None:
            yield
            return
        iterator.device = process.device()
        try:
            yield
        finally:
            iterator.device = None

    @contextmanager
    def _replicated(self, state: State) -> Iterator[None]:
        """Broadcast the parameters, register their gradients; undo the registration at the end."""
        enclosing, self._replicas = self._replicas, None  # a hook may train another network with this engine
        try:
            if process.size() > 1:
                self._replicas = Replicas(state, self.asynchronous and not self.sharded, self.compression)
                self._replicas.follow()
            yield
        finally:
            if self._replicas is not None:
                self._replicas.close()
            self._replicas = enclosing
            if state._sharded is not None:
                state._sharded.remove()
                if state._gets_state_back and state.optimizer is state._sharded:  # an error has ended training
                    state._sharded.optimizer.state.clear()

    def make_optimizer(
        self, state: State, lr: float | None, optimizer: OptimizerLike | None
    ) -> torch.optim.Optimizer | None:
        """As in ``SGDEngine``; with ``sharded`` its state is divided. Collective."""
        made = super().make_optimizer(state, lr, optimizer)
        if isinstance(made, ShardedOptimizer):
            _check_sharded(made, self.sharded, self.compression)
            return made
        if made is None or not self.sharded:
            return made
        broadcast_optimizer_state(made)
        state._sharded = ShardedOptimizer.from_optimizer(made, compression=self.compression)
        state._gets_state_back = made is optimizer
        return state._sharded

    def set_mode(self, state: State) -> None:
        """As in ``SGDEngine``; then, for a test, make the buffers equal.

        For training, broadcast what the optimizer alone holds, and its state: it was made after the session began.
        """
        super().set_mode(state)
        if not state.training:
            self._synchronize_buffers(state)
        elif self._replicas is not None:
            self._replicas.follow()
            broadcast_optimizer_state(state.optimizer)

    def begin(self, state: State) -> None:
        """As in ``SGDEngine``; then broadcast what rank 0 alone has loaded in ``hooks.on_start``.

        ValueError, on all ranks, where they would begin or end with another epoch each, or where a rank may have no
        samples in a step and the network has SyncBatchNorm.
        """
        super().begin(state)
        if self._replicas is not None:
            _check_every_rank_computes(state)
            check_equal("states", allgather_object({"epoch": state.epoch, "maxepoch": state.maxepoch}))
            is_resumed = getattr(self._run_hooks, "saved", None) is not None  # with each rank's own buffers
            self._replicas.make_equal(with_buffers=not is_resumed)
            broadcast_optimizer_state(state.optimizer)

    def take_sample(self, state: State, sample: Any) -> None:
        """As in ``SGDEngine``, after moving the sample to the device."""
        if self.usegpu:
            sample = tree_map_only(torch.Tensor, lambda tensor: tensor.to(process.device()), sample)
        super().take_sample(state, sample)
        self._wait_for_device()

    def prepare(self, state: State) -> None:
        """Follow changes of the network; with ``debug`` check that the ranks agree."""
        super().prepare(state)
        if self._replicas is not None:
            if self.dynamicnetwork:
                self._replicas.follow()
            if self.debug:
                self._replicas.check()
            self._replicas.look()

    def backward_criterion(self, state: State) -> None:
        """As in ``SGDEngine``, then with ``devicesync`` wait for the device."""
        super().backward_criterion(state)
        self._wait_for_device()

    def backward(self, state: State) -> None:
        """As in ``SGDEngine``, then average the gradients over the ranks."""
        super().backward(state)
        self.reduce(state)

    def reduce(self, state: State) -> None:
        """Average the gradients over the ranks; in an elastic job confirm that all live."""
        if self._replicas is not None:
            self._replicas.average_gradients()
            survivors.confirm()

    def finish(self, state: State) -> None:
        """Give a sharded optimizer of the user's its state back; make the buffers equal, also if a rank dies."""
        super().finish(state)
        if state._sharded is not None and state._gets_state_back:
            state.optimizer = state._sharded.to_optimizer()
        while True:
            with survivors.elastic() as attempt:
                self._synchronize_buffers(state)
            if not attempt.has_recovered:
                return

    def _synchronize_buffers(self, state: State) -> None:
        if self.buffers != "leave":
            nn.synchronize_buffers(state.as_one_module(), self.buffers)

    def _wait_for_device(self) -> None:
        if self.usegpu and self.devicesync and process.device().type == "cuda":
            torch.cuda.synchronize(process.device())


def _check_every_rank_computes(state: State) -> None:
    """ValueError if a layer needs all ranks in each forward pass, and a rank may have no samples in a step."""
    parts = [part for module in state.modules() for part in modules_of(module)]
    has_none = isinstance(state.iterator, BatchIterator) and state.iterator.may_give_none()
    if has_none and any(isinstance(part, SyncBatchNorm) for part in parts):
        raise ValueError(
            "train: SyncBatchNorm needs every rank in each forward pass, and with this iterator a rank may have no "
            f"samples in the last steps of an epoch: give the {type(state.iterator).__name__} drop_last=True"
        )


def _check_sharded(optimizer: ShardedOptimizer, sharded: bool, compression: Compression | None) -> None:
    """ValueError unless the engine leaves the gradients to a sharded optimizer of the user's."""
    reduces = "optimizer is a ShardedOptimizer, which reduces gradients itself:"
    if not sharded:
        raise ValueError(f"{reduces} give the engine sharded=True")
    if compression not in (None, optimizer.compression):
        raise ValueError(f"{reduces} give it compression={compression!r}, not the engine")


def _check_elastic(state: State, sharded: bool) -> None:
    """TypeError or ValueError if the survivors of a death could not go on without a restart."""
    iterator: Any = state.iterator
    if not hasattr(iterator, "take_place"):
        raise TypeError(
            f"iterator is a {type(iterator).__name__}, which cannot share the rest of an epoch out among the "
            "survivors of a death: give a DatasetIterator, a StreamIterator or a DataLoader without a sampler, or "
            "start the job without --elastic"
        )
    if not iterator.follows_place:
        raise ValueError("the DatasetIterator was given rank= and size=, which change when a rank dies: give none")
    if sharded:
        raise ValueError(
            "the optimizer's state is divided among the ranks, and the survivors of a death would lack the dead rank's "
            "part: start the job without --elastic, and resume from a checkpoint"
        )
    if communicators.resolve(None).size < communicators.stack().levels[0].size:
        raise ValueError(
            "in an elastic job train at a level of the whole world: after a death the levels are made anew, and groups "
            "could not be told apart (mpi.set_communicator(0), or start the job without --elastic)"
        )
