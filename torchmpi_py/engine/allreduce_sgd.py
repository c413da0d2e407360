"""Data-parallel SGD: the loop of ``SGDEngine``, with gradients averaged over the ranks.

The engine overrides the small methods of the loop, so all hooks remain free for the user. It adds three actions:

* Before the first sample, rank 0 broadcasts the parameters and buffers of network and criterion, the parameters that
  only the optimizer holds, and the optimizer's state. The broadcast is repeated after ``hooks.on_start``, because the
  hook may change these values on one rank.
* Before a test, and at the end of training, the engine makes the buffers of all ranks equal (see ``buffers``).
* After each backward pass, the engine averages the gradients over the ranks, and then calls ``hooks.on_backward``. With
  ``asynchronous``, each gradient is reduced as soon as the backward pass has computed it. After the pass the engine
  waits for all reductions.

In a job started by ``torchmpirun --elastic``, training continues when a rank dies (see ``elastic``).

Source: TorchMPI, ``AllReduceSGDEngine`` (reference section 7). There are four differences. Gradients are averaged, not
summed. Uneven batches are weighted (see ``iterators``). If the network grows, its new parameters are broadcast too.
There are no barriers: TorchMPI had two per step, to synchronize the ranks for its GPU streams. On a CPU the averaging
synchronizes the ranks in every step, and a barrier before it only adds latency.
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
    """Train one copy of the network per rank; all copies are equal after every step.

    Every rank of the current level must call ``train`` and ``test`` with the same arguments. The iterators must yield
    the same number of batches on every rank. ``DatasetIterator`` and ``StreamIterator`` ensure this, and the engine
    divides a DataLoader that uses torch's own order (see ``loaders``). With one rank the engine works like
    ``SGDEngine``.

    Args:
        usegpu (bool): True moves network, criterion and samples to ``mpi.device()``; default False. Batches of a
            ``DatasetIterator`` are moved in advance, from pinned memory, while the previous step is computed.
        asynchronous (bool): True averages gradients during the backward pass, False (default) after it.
        devicesync (bool): with ``usegpu``, True (default) synchronizes with the GPU after moving each sample, as
            TorchMPI does; False does not synchronize.
        dynamicnetwork (bool): True (default) checks before each forward pass whether hooks have changed the set of
            trained parameters. If they have, the engine broadcasts parameters and buffers and registers gradients
            again. Hooks must make the same change on every rank.
        debug (bool): True checks before each forward pass that all ranks have the same parameters; default False.
        buffers (str): how buffers that differ between ranks, such as BatchNorm's statistics, become equal before a test
            and at the end of training. "average" (default) averages them, but copies buffers of integers from rank 0.
            "root" copies all buffers from rank 0. "leave" does not change them.
        compression (Compression): compression of gradients, such as ``optim.compression.BF16()``, or None (default).
        sharded (bool): True shards the optimizer's state; default False. ``state.optimizer`` becomes an
            ``optim.ShardedOptimizer``, which reduces gradients during the backward pass. Reading ``p.grad`` in
            ``hooks.on_backward`` raises RuntimeError, so clip with ``state.optimizer.clip_grad_norm_``. An optimizer
            that you created before ``train`` gets its whole state back at the end, unless an error ends training. If
            ``lr`` or a function creates the optimizer, the optimizer's state stays sharded. If you pass an
            ``optim.ShardedOptimizer`` or ``DistributedOptimizer`` to ``train``, omit ``sharded``. The optimizer then
            reduces the gradients until you call its ``remove``.

    Raises:
        NotStarted: ``train`` or ``test`` was called before ``mpi.start()``.
        ValueError: ``buffers`` is unknown. ``train`` and ``test`` raise it for ``usegpu`` in a session without GPUs,
            and for an iterator created before ``mpi.start()`` or at another level. They also raise it, on every rank,
            if the ranks iterate over different data.
        RanksDisagree: with ``debug``, the parameters differ between ranks. Every rank raises the error.

    Examples:
        >>> data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
        >>> trainer = mpi.engine.AllReduceSGDEngine(asynchronous=True)
        >>> state = trainer.train(
        ...     network=torch.nn.Linear(4, 1),
        ...     criterion=torch.nn.functional.mse_loss,
        ...     iterator=mpi.engine.DatasetIterator(data, batch_size=8),
        ...     lr=0.1,
        ...     maxepoch=2,
        ...     extensions=[],
        ... )
        >>> state.epoch
        2
        >>> mpi.nn.check_with_allreduce(state.network)
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
            raise ValueError(f"AllReduceSGDEngine: buffers={self.buffers!r}; pass 'average', 'root' or 'leave'")
        # These attributes belong to the current call of train().
        self._replicas: Replicas | None = None  # None in a test or with one rank
        self._sharded: ShardedOptimizer | None = None  # wrapper created for ``sharded``
        self._gets_state_back = False  # whether the user created the wrapped optimizer

    @contextmanager
    def session(self, state: State) -> Iterator[None]:
        """Return the context of a run. The context divides a DataLoader, moves modules, and keeps the replicas equal.

        Args:
            state (State): state of the run; its iterator may be replaced.
        """
        if not process.is_started():
            raise NotStarted("AllReduceSGDEngine needs a running session: call mpi.start() first, on every rank")
        state.iterator = iterator = loaders.divided(state.iterator)
        if isinstance(iterator, BatchIterator):
            if ulfm.has_lost_ranks():
                iterator.take_place()
            iterator.check_alike()
        device_of_user = getattr(iterator, "device", None)
        enclosing = self._replicas, self._sharded, self._gets_state_back  # A hook may call train() or test().
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
                if self._gets_state_back and state.optimizer is self._sharded:  # An error has prevented finish().
                    self._sharded.optimizer.state.clear()
            self._replicas, self._sharded, self._gets_state_back = enclosing

    def _move(self, state: State) -> None:
        """Move the modules to the device, and set the iterator to move batches in advance."""
        if process.device().type == "cpu":
            raise ValueError("usegpu=True, but this session uses no GPU; call mpi.start(with_cuda=True) or omit usegpu")
        for module in state.modules():
            module.to(process.device())
        if isinstance(state.iterator, BatchIterator):
            state.iterator.device = state.iterator.device or process.device()

    def regroup(self) -> None:
        """Make the parameters of the survivors equal after a rank has died. Every survivor must make this call."""
        if self._replicas is not None:
            self._replicas.regroup()

    def make_optimizer(
        self, state: State, lr: float | None, optimizer: OptimizerLike | None
    ) -> torch.optim.Optimizer | None:
        """Create the optimizer as ``SGDEngine`` does; with ``sharded``, shard it. Every rank must make this call.

        Args:
            state (State): state of the run.
            lr (float): learning rate of plain SGD, or None.
            optimizer (torch.optim.Optimizer or callable): optimizer, a function that creates it, or None.

        Returns:
            The optimizer, or None with ``lr=0``.

        Raises:
            ValueError: ``optimizer`` reduces gradients, and conflicts with ``compression`` or ``sharded`` of the
                engine. Or ``optimizer`` has ``backward_passes_per_step`` above 1, or a ``comm`` that is not the current
                level.
        """
        plain = super().make_optimizer(state, lr, optimizer)
        if isinstance(plain, ReducingOptimizer):
            is_other = self.compression is not None or (self.sharded and not isinstance(plain, ShardedOptimizer))
            if is_other or plain.reduction.frequency > 1 or plain.comm is not resolve(None):
                raise ValueError(
                    f"train: optimizer is a {type(plain).__name__}, which reduces gradients; omit compression= and "
                    "sharded= from the engine, and backward_passes_per_step= and comm= from the optimizer"
                )
        elif plain is not None and self.sharded:
            broadcast_optimizer_state(plain)
            self._sharded = ShardedOptimizer.from_optimizer(plain, compression=self.compression)
            self._gets_state_back = plain is optimizer
            return self._sharded
        return plain

    def set_mode(self, state: State) -> None:
        """Put the modules into training or evaluation mode, and make the replicas equal.

        Before a test, the buffers become equal. Before training, rank 0 broadcasts the optimizer's state, and the
        parameters that only the optimizer has, because the optimizer was created after the session began.

        Args:
            state (State): state of the run.
        """
        super().set_mode(state)
        if not state.training:
            self._synchronize_buffers(state)
        elif self._replicas is not None:
            self._replicas.follow()
            broadcast_optimizer_state(state.optimizer)

    def begin(self, state: State) -> None:
        """Broadcast the values that ``hooks.on_start`` may have changed, and check that the ranks agree on the epochs.

        Args:
            state (State): state of the run.

        Raises:
            ValueError: on every rank, if the first or the last epoch differs between ranks, or if the network has
                SyncBatchNorm and a rank may have no samples in a step.
        """
        super().begin(state)
        if self._replicas is not None:
            _check_every_rank_computes(state)
            check_equal("states", allgather_object({"epoch": state.epoch, "maxepoch": state.maxepoch}))
            self._replicas.renew(with_buffers=not state.place.is_resumed)
            broadcast_optimizer_state(state.optimizer)

    def take_sample(self, state: State, sample: Any) -> None:
        """Move the sample to the device, and store it in the state.

        Args:
            state (State): state of the run.
            sample (object): (input, target), or None if this rank has no samples.
        """
        if self.usegpu:
            sample = tree_map_only(torch.Tensor, lambda tensor: tensor.to(process.device()), sample)
        super().take_sample(state, sample)
        if self.usegpu and self.devicesync and process.device().type == "cuda":
            torch.cuda.synchronize(process.device())

    def prepare(self, state: State) -> None:
        """Broadcast the network if hooks have changed it; with ``debug``, compare the parameters of all ranks.

        Args:
            state (State): state of the run.
        """
        super().prepare(state)
        if self._replicas is not None:
            if self.dynamicnetwork:
                self._replicas.follow()
            self._replicas.register()
            if self.debug:
                self._replicas.check()

    def reduce(self, state: State) -> None:
        """Average the gradients over the ranks.

        Args:
            state (State): state of the run.
        """
        if self._replicas is not None:
            self._replicas.average_gradients()

    def finish(self, state: State) -> None:
        """Restore the whole state of the user's optimizer if it was sharded, and make the buffers equal.

        Args:
            state (State): state of the run.
        """
        super().finish(state)
        if self._sharded is not None and self._gets_state_back:
            state.optimizer = self._sharded.to_optimizer()
        self._synchronize_buffers(state)

    def _synchronize_buffers(self, state: State) -> None:
        if self.buffers != "leave":
            nn.synchronize_buffers(state.as_one_module(), self.buffers)


def _check_every_rank_computes(state: State) -> None:
    """Raise ValueError if a layer needs all ranks in each forward pass, and a rank may have no samples in a step."""
    parts = [part for module in state.modules() for part in modules_of(module)]
    has_none = isinstance(state.iterator, BatchIterator) and state.iterator.may_give_none()
    if has_none and any(isinstance(part, SyncBatchNorm) for part in parts):
        raise ValueError(
            "train: SyncBatchNorm needs every rank in each forward pass. With this iterator a rank may have no "
            "samples in the last steps of an epoch; pass drop_last=True to the iterator, or to the DataLoader"
        )
