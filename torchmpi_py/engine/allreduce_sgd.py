"""Data-parallel SGD: the same loop, with gradients averaged over the ranks.

What it adds to ``SGDEngine``, by overriding the loop's small methods, so that all hooks stay the user's:

* before the first sample, rank 0's parameters and buffers of network and criterion, the parameters that only the
  optimizer holds, and its state are broadcast;
* before a test, and at the end of training, buffers that differ between ranks are averaged;
* after each backward pass, gradients are averaged over the ranks; ``hooks.on_backward`` sees the averages. Synchronous:
  after the pass. Asynchronous: each gradient sets out during the pass, as soon as it is complete, and the end of the
  pass waits for all of them.

Source: TorchMPI, ``AllReduceSGDEngine`` (reference section 7), with these differences: gradients are averaged, not
summed; uneven batches are weighted (``iterators``); a network that grows has its new parameters broadcast too; and
there are no barriers. TorchMPI held two per step, to line the ranks up for its GPU streams; on a CPU the averaging is
itself the meeting point of every step, and a barrier before it only adds its own latency.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch.utils._pytree import tree_map_only

from torchmpi_py import nn
from torchmpi_py.core import ulfm
from torchmpi_py.engine import loaders, replicas
from torchmpi_py.engine.iterators import DatasetIterator
from torchmpi_py.engine.replicas import Replicas, as_one_module
from torchmpi_py.engine.sgd import SGDEngine
from torchmpi_py.engine.state import State
from torchmpi_py.errors import NotStarted
from torchmpi_py.nn.optimizer_state import broadcast_optimizer_state
from torchmpi_py.runtime import process, survivors


class AllReduceSGDEngine(SGDEngine):
    """Train one copy of the network per rank, all copies equal at every step.

    Every rank of the current communicator calls ``train`` and ``test`` alike, with iterators that give the same number
    of samples (``DatasetIterator`` does; a DataLoader that torch orders is divided in its way, see ``loaders``). With
    one rank it is ``SGDEngine``. Raises NotStarted before ``mpi.start()``, and ValueError for ``usegpu`` in a session
    without GPUs, or for a ``DatasetIterator`` whose rank and size were taken before ``mpi.start()``, or at another
    level.

    usegpu: network, criterion and samples are moved to ``mpi.device()``; the batches of a ``DatasetIterator`` ahead of
        their use, from pinned memory, while the step before is computed.
    asynchronous: average gradients during the backward pass instead of after it.
    devicesync: with usegpu, wait for the device at each sample and after the criterion's backward pass, as TorchMPI
        does; without usegpu it does nothing.
    dynamicnetwork: look before each forward pass whether hooks have changed the set of trained parameters (on all ranks
        alike); if so broadcast parameters and buffers and register gradients anew.
    debug: before each forward pass, check that all ranks hold the same parameters; RanksDisagree if not.
    buffers: what becomes of buffers that differ between ranks (BatchNorm's statistics are of each rank's batches)
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
    ) -> None:
        super().__init__()
        if buffers not in ("average", "root", "leave"):
            raise ValueError(f"buffers={buffers!r}: give 'average', 'root' or 'leave'")
        self.usegpu = usegpu
        self.asynchronous = asynchronous
        self.devicesync = devicesync
        self.dynamicnetwork = dynamicnetwork
        self.debug = debug
        self.buffers = buffers
        self._replicas: Replicas | None = None  # of the train() in progress; None with one rank

    @contextmanager
    def session(self, state: State) -> Iterator[None]:
        """Check, then place what is to be computed on, and keep the copies equal while training."""
        if not process.is_started():
            raise NotStarted("AllReduceSGDEngine needs a running session: call mpi.start() first, on every rank")
        state.iterator = loaders.divided(state.iterator)
        if isinstance(state.iterator, DatasetIterator):
            if ulfm.has_lost_ranks():
                state.iterator.take_place()
            state.iterator.check_place()
        if state.training and ulfm.is_elastic():
            replicas.check(state)
        with self._on_gpu(state):
            if state.training:
                with self._replicated(state):
                    yield
            else:
                yield

    @contextmanager
    def epoch(self, state: State) -> Iterator[None]:
        """In an elastic job: let the survivors go on when a rank dies."""
        with survivors.elastic() as attempt:
            yield
        if attempt.has_recovered:
            replicas.go_on(state, lambda: self._begin_anew(state))

    def _begin_anew(self, state: State) -> None:
        former = self._replicas
        if former is not None:
            former.abandon()
            successor = Replicas(state, self.asynchronous) if process.size() > 1 else None
            if successor is not None:
                successor.succeed(former)
            self._replicas = successor
        self.hooks.on_recovery(state)

    @contextmanager
    def _on_gpu(self, state: State) -> Iterator[None]:
        """With usegpu, move the modules there, and let the iterator do so with batches, ahead of their use."""
        if not self.usegpu:
            yield
            return
        _check_device()
        for module in state.modules():
            module.to(process.device())
        iterator = state.iterator if isinstance(state.iterator, DatasetIterator) else None
        given = None if iterator is None else iterator.device
        try:
            if iterator is not None and given is None:
                iterator.device = process.device()
            yield
        finally:
            if iterator is not None:
                iterator.device = given

    @contextmanager
    def _replicated(self, state: State) -> Iterator[None]:
        """Broadcast the parameters, register their gradients; undo the registration at the end."""
        enclosing, self._replicas = self._replicas, None  # a hook may train another network with this engine
        try:
            if process.size() > 1:
                self._replicas = Replicas(state, self.asynchronous)
                self._replicas.follow()
            yield
        finally:
            if self._replicas is not None:
                self._replicas.close()
            self._replicas = enclosing

    def set_mode(self, state: State) -> None:
        """As in ``SGDEngine``; then, for a test, bring the buffers together.

        For training, broadcast what the optimizer alone holds, and its state: it was made after the session began.
        """
        super().set_mode(state)
        if not state.training:
            self._synchronize_buffers(state)
        elif self._replicas is not None:
            self._replicas.follow()
            broadcast_optimizer_state(state.optimizer)

    def take_sample(self, state: State, sample: Any) -> None:
        """As in ``SGDEngine``, after moving the sample to the device."""
        if self.usegpu:
            sample = tree_map_only(torch.Tensor, lambda tensor: tensor.to(process.device()), sample)
        super().take_sample(state, sample)
        self._wait_for_device()

    def prepare(self, state: State) -> None:
        """Follow changes of the network; check that the ranks agree, if asked."""
        super().prepare(state)
        if self._replicas is not None:
            if self.dynamicnetwork:
                self._replicas.follow()
            if self.debug:
                self._replicas.check()
            self._replicas.look()

    def backward_criterion(self, state: State) -> None:
        """As in ``SGDEngine``, then wait for the device, if asked."""
        super().backward_criterion(state)
        self._wait_for_device()

    def backward(self, state: State) -> None:
        """As in ``SGDEngine``, then average the gradients over the ranks; in an elastic job all must live then."""
        super().backward(state)
        if self._replicas is not None:
            self._replicas.average_gradients()
            survivors.confirm()

    def finish(self, state: State) -> None:
        """Bring the buffers together, also if a rank dies meanwhile."""
        super().finish(state)
        while True:
            with survivors.elastic() as attempt:
                self._synchronize_buffers(state)
            if not attempt.has_recovered:
                return

    def _synchronize_buffers(self, state: State) -> None:
        if self.buffers != "leave":
            nn.synchronize_buffers(as_one_module(state), self.buffers)

    def _wait_for_device(self) -> None:
        if self.usegpu and self.devicesync and process.device().type == "cuda":
            torch.cuda.synchronize(process.device())


def _check_device() -> None:
    if process.device().type == "cpu":
        raise ValueError("usegpu=True, but this session computes on the CPU: call mpi.start(with_cuda=True)")
