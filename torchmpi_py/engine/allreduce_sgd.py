"""Data-parallel SGD: the same loop, with gradients averaged over the ranks.

What it adds to ``SGDEngine``, by overriding the loop's small methods, so that all hooks stay the user's:

* before the first sample, rank 0's parameters and buffers of network and criterion, the parameters that only the
  optimizer holds, and its state are broadcast, and again after ``hooks.on_start``, which may change them on a rank;
* before a test, and at the end of training, buffers that differ between ranks are averaged;
* after each backward pass, gradients are averaged over the ranks; ``hooks.on_backward`` sees the averages. Synchronous:
  after the pass. Asynchronous: a gradient is reduced during the pass, as soon as it is complete, and the end of the
  pass waits for all of them.

In a job that ``torchmpirun --elastic`` has started, training goes on when a rank dies (``elastic``).

Source: TorchMPI, ``AllReduceSGDEngine`` (reference section 7), with these differences: gradients are averaged, not
summed; uneven batches are weighted (``iterators``); a network that grows has its new parameters broadcast too; and
there are no barriers. TorchMPI held two per step, to line the ranks up for its GPU streams; on a CPU the averaging
synchronizes the ranks in every step, and a barrier before it only adds its own latency.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils._pytree import tree_map_only

from torchmpi_py import nn
from torchmpi_py.collectives.verbs import allgather_object
from torchmpi_py.core import ulfm
from torchmpi_py.core.communicators import resolve
from torchmpi_py.engine import loaders
from torchmpi_py.engine.batches import BatchIterator, check_equal
from torchmpi_py.engine.replicas import Replicas
from torchmpi_py.engine.sgd import OptimizerLike, SGDEngine
from torchmpi_py.engine.state import State
from torchmpi_py.errors import NotStarted
from torchmpi_py.nn.buckets import buckets_of
from torchmpi_py.nn.compression import Compression, check_compression
from torchmpi_py.nn.members import modules_of
from torchmpi_py.nn.optimizer_state import broadcast_optimizer_state
from torchmpi_py.nn.sync_batch_norm import SyncBatchNorm
from torchmpi_py.optim.sharded import ShardedOptimizer
from torchmpi_py.optim.wrapper import ReducingOptimizer
from torchmpi_py.runtime import process


@dataclass(eq=False)
class AllReduceSGDEngine(SGDEngine):
    """Train one copy of the network per rank; all copies are equal at every step.

    Every rank of the current communicator calls ``train`` and ``test`` alike, with iterators that give the same number
    of batches (``DatasetIterator`` and ``StreamIterator`` do; a DataLoader that torch orders is divided, see
    ``loaders``). With one rank it is ``SGDEngine``. Raises NotStarted before ``mpi.start()``, and ValueError for
    ``usegpu`` in a session without GPUs, for an iterator whose rank and size were taken before ``mpi.start()`` or at
    another level, and, on all ranks, for one that iterates over something else on another rank.

    Args:
        usegpu: move network, criterion and samples to ``mpi.device()``. Batches of a ``DatasetIterator`` are moved
            ahead of their use, from pinned memory, while the previous step is computed.
        asynchronous: average gradients during the backward pass instead of after it.
        devicesync: with ``usegpu``, wait for the device at each sample, as TorchMPI does; without it, do nothing.
        dynamicnetwork: before each forward pass, look whether hooks have changed the set of trained parameters (with
            the same change on every rank). If so, broadcast parameters and buffers and register gradients again.
        debug: before each forward pass, check that all ranks hold the same parameters; raises RanksDisagree if not.
        compression: how gradients are compressed, such as ``optim.compression.BF16()`` (default: not at all).
        sharded: shard the optimizer's state: ``state.optimizer`` becomes an ``optim.ShardedOptimizer``. Gradients are
            then always reduced during the backward pass, and reading ``p.grad`` in ``hooks.on_backward`` raises
            RuntimeError; clip with ``state.optimizer.clip_grad_norm_``. An optimizer that was created before ``train``
            gets its whole state back at the end, except when an error ends training. If ``lr`` or a function creates
            the optimizer, its state stays sharded. Your own ``optim.ShardedOptimizer`` or ``DistributedOptimizer``
            needs no option here. It reduces the gradients itself until you call its ``remove``.
        buffers: how to make buffers equal before a test and at the end of training when they differ between ranks, as
            the statistics of BatchNorm do. "average" averages them (rank 0's whole numbers are used), "root" uses rank
            0's, "leave" keeps each rank's own.
    """

    steps_together = True

    usegpu: bool = False
    asynchronous: bool = False
    devicesync: bool = True
    dynamicnetwork: bool = True
    debug: bool = False
    buffers: Literal["average", "root", "leave"] = "average"
    compression: Compression | None = None
    sharded: bool = False

    def __post_init__(self) -> None:
        super().__init__()
        check_compression(self.compression)
        if self.buffers not in ("average", "root", "leave"):
            raise ValueError(f"buffers={self.buffers!r}: give 'average', 'root' or 'leave'")
        # Of the train() in progress:
        self._replicas: Replicas | None = None  # None with one rank
        self._sharded: ShardedOptimizer | None = None  # if the engine has made it
        self._gets_state_back = False  # whether the optimizer in it is the user's

    @contextmanager
    def session(self, state: State) -> Iterator[None]:
        """Check; divide the iterator; move network and samples to the device; keep the copies equal while training."""
        if not process.is_started():
            raise NotStarted("AllReduceSGDEngine needs a running session: call mpi.start() first, on every rank")
        state.iterator = iterator = loaders.divided(state.iterator)
        if isinstance(iterator, BatchIterator):
            if ulfm.has_lost_ranks():
                iterator.take_place()
            iterator.check_alike()
        device_of_user = getattr(iterator, "device", None)
        enclosing = self._replicas, self._sharded, self._gets_state_back  # a hook may train another network, or test
        self._replicas = self._sharded = None
        try:
            if self.usegpu:
                self._move(state)
            if state.training and process.size() > 1:
                make_buckets = functools.partial(buckets_of, compression=self.compression)
                self._replicas = Replicas(state, self.asynchronous, make_buckets)
                self._replicas.renew()
            yield
        finally:
            if isinstance(iterator, BatchIterator):
                iterator.device = device_of_user
            if self._replicas is not None:
                self._replicas.close()
            if self._sharded is not None:
                self._sharded.remove()
                if self._gets_state_back and state.optimizer is self._sharded:  # an error has ended training
                    self._sharded.optimizer.state.clear()
            self._replicas, self._sharded, self._gets_state_back = enclosing

    def _move(self, state: State) -> None:
        """Move the modules to the device, and let the iterator do so with batches, ahead of their use."""
        if process.device().type == "cpu":
            raise ValueError("usegpu=True, but this session computes on the CPU: call mpi.start(with_cuda=True)")
        for module in state.modules():
            module.to(process.device())
        if isinstance(state.iterator, BatchIterator):
            state.iterator.device = state.iterator.device or process.device()

    def regroup(self) -> None:
        """Keep the copies of the survivors of a death equal. Collective."""
        if self._replicas is not None:
            self._replicas.regroup()

    def make_optimizer(
        self, state: State, lr: float | None, optimizer: OptimizerLike | None
    ) -> torch.optim.Optimizer | None:
        """As in ``SGDEngine``; with ``sharded`` its state is divided. Collective."""
        plain = super().make_optimizer(state, lr, optimizer)
        if isinstance(plain, ReducingOptimizer):
            is_other = self.compression is not None or (self.sharded and not isinstance(plain, ShardedOptimizer))
            if is_other or plain.reduction.frequency > 1 or plain.comm is not resolve(None):
                raise ValueError(
                    f"optimizer is a {type(plain).__name__}, which reduces gradients: leave out compression= and "
                    "sharded= of the engine, and backward_passes_per_step= and comm= of the optimizer"
                )
        elif plain is not None and self.sharded:
            broadcast_optimizer_state(plain)
            self._sharded = ShardedOptimizer.from_optimizer(plain, compression=self.compression)
            self._gets_state_back = plain is optimizer
            return self._sharded
        return plain

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
            self._replicas.renew(with_buffers=not state.place.is_resumed)
            broadcast_optimizer_state(state.optimizer)

    def take_sample(self, state: State, sample: Any) -> None:
        """As in ``SGDEngine``, after moving the sample to the device."""
        if self.usegpu:
            sample = tree_map_only(torch.Tensor, lambda tensor: tensor.to(process.device()), sample)
        super().take_sample(state, sample)
        if self.usegpu and self.devicesync and process.device().type == "cuda":
            torch.cuda.synchronize(process.device())

    def prepare(self, state: State) -> None:
        """Follow changes of the network; with ``debug`` check that the ranks agree."""
        super().prepare(state)
        if self._replicas is not None:
            if self.dynamicnetwork:
                self._replicas.follow()
            self._replicas.register()
            if self.debug:
                self._replicas.check()

    def reduce(self, state: State) -> None:
        """Average the gradients over the ranks."""
        if self._replicas is not None:
            self._replicas.average_gradients()

    def finish(self, state: State) -> None:
        """Give a sharded optimizer of the user's its state back; make the buffers equal."""
        super().finish(state)
        if self._sharded is not None and self._gets_state_back:
            state.optimizer = self._sharded.to_optimizer()
        self._synchronize_buffers(state)

    def _synchronize_buffers(self, state: State) -> None:
        if self.buffers != "leave":
            nn.synchronize_buffers(state.as_one_module(), self.buffers)


def _check_every_rank_computes(state: State) -> None:
    """ValueError if a layer needs all ranks in each forward pass, and a rank may have no samples in a step."""
    parts = [part for module in state.modules() for part in modules_of(module)]
    has_none = isinstance(state.iterator, BatchIterator) and state.iterator.may_give_none()
    if has_none and any(isinstance(part, SyncBatchNorm) for part in parts):
        raise ValueError(
            "train: SyncBatchNorm needs every rank in each forward pass, and with this iterator a rank may have no "
            f"samples in the last steps of an epoch: give the {type(state.iterator).__name__} drop_last=True"
        )
