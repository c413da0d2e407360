"""Training when ranks run out of data at different times.

The idea: each reduction of gradients begins by counting the ranks that have data. A rank that has left its loop still
contributes to these counts. If no rank has data, the rank stops; otherwise it contributes zeros to the reduction.
Gradients are averaged over the ranks that have data. At the end, all ranks get the parameters, buffers and optimizer
state of a rank that took the most steps. Alternative: stop all ranks after the same number of batches. Why not: the
surplus batches would be lost.

Source: torch.distributed.algorithms.Join has the same semantics, but does not support an optimizer over MPI.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from torchmpi_py.collectives import verbs
from torchmpi_py.core.handles import wait_all
from torchmpi_py.nn.async_backward import AsyncBackward, registered
from torchmpi_py.nn.optimizer_state import broadcast_optimizer_state
from torchmpi_py.nn.synchronize import fused
from torchmpi_py.optim.distributed import DistributedOptimizer


class JoiningBackward(AsyncBackward):
    """A registration inside ``join``. Each reduction begins by counting the ranks that have data."""

    compares_steps = False

    def begin(self) -> None:
        """Initialize the counts at the start of a ``join`` block."""
        self.has_data = True  # whether this rank is still in the loop
        self.num_present = torch.zeros(1, dtype=torch.int64, device="cpu")  # ranks with data in the last reduction
        self.num_steps = 0  # number of steps that this rank has taken with data

    def go_on_without_data(self) -> None:
        """Contribute zeros to the reductions of the ranks that still have data, until no rank has data."""
        self.has_data, self.num_passes = False, 0
        while True:
            for parameter in self.names:  # A parameter without a gradient contributes zeros.
                parameter.grad = None
            self._start_reduction()
            wait_all(self._handles)
            if int(self.num_present) == 0:
                self._handles = []
                return
            self._end_reduction()
            self._finish()

    def _start_reduction(self) -> None:
        super()._start_reduction()
        self.num_steps += self.has_data
        self.num_present[0] = self.has_data
        self.order.add()
        self._handles = [verbs.allreduce_async(self.num_present, comm=self.buckets.comm)]

    def _finish(self) -> None:
        super()._finish()
        # Turn averages over all ranks into averages over the ranks that have data.
        num_present = int(self.num_present)
        if self.op == "avg" and num_present < self.buckets.comm.size:
            for bucket in self.buckets.all:
                bucket.flat *= self.buckets.comm.size / num_present


@contextmanager
def join(module_or_optimizer: torch.nn.Module | DistributedOptimizer, *stateful: Any) -> Iterator[None]:
    """Run a training loop in which some ranks have fewer batches than others.

    Every rank of the optimizer's ``comm`` must enter the block. Gradients are averaged (with ``average=False``, summed)
    over the ranks that still have data. A rank that leaves the loop waits at the end of the block until all ranks have
    left the loop. Then all ranks get the parameters, buffers and optimizer state of the rank that took the most steps.
    If several ranks took the most steps, the lowest of these ranks is the source.

    Gradients of backward passes after the last complete step (see ``backward_passes_per_step``) are dropped. Do not
    call other collectives in the loop (SyncBatchNorm, metrics over ranks, a closure for ``step``), because the ranks
    that have left the loop do not make these calls. An error in the loop is raised unchanged.

    Args:
        module_or_optimizer (DistributedOptimizer or torch.nn.Module): optimizer, or a module whose gradients
            ``register_async_backward`` reduces once per step.
        *stateful (object): objects with ``state_dict`` and ``load_state_dict`` that change in each step, such as a
            scheduler or a GradScaler. They get the state of the same rank. If you pass a module, pass its optimizer
            here.

    Yields:
        None.

    Raises:
        TypeError: ``module_or_optimizer`` is neither a module nor a DistributedOptimizer.
        ValueError: ``register_async_backward`` was not called for the module.

    Examples:
        >>> net = torch.nn.Linear(4, 1)
        >>> mpi.nn.synchronize_parameters(net)
        >>> optimizer = mpi.optim.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net)
        >>> with mpi.join(optimizer):
        ...     for x in torch.randn(1 + mpi.rank(), 8, 4):  # each rank has a different number of batches
        ...         optimizer.zero_grad()
        ...         net(x).square().mean().backward()
        ...         optimizer.step()
        >>> mpi.nn.check_with_allreduce(net)
        >>> optimizer.remove()
    """
    optimizer = module_or_optimizer if isinstance(module_or_optimizer, DistributedOptimizer) else None
    module: Any = module_or_optimizer if optimizer is None else optimizer.module
    if not isinstance(module, torch.nn.Module):
        raise TypeError(
            f"join: expected a torch.nn.Module or an optim.DistributedOptimizer, found {type(module).__name__}. For a "
            "ShardedOptimizer, give every rank the same number of batches (use mpi.shard or drop_last=True)"
        )
    # Only a registration by register_async_backward is its own owner.
    own = [each for each in registered.get(module, []) if each._owner() is each]
    reduction: Any = optimizer.reduction if optimizer is not None else own[-1] if own else None
    if reduction is None:
        raise ValueError(
            "join: gradients of the module are not reduced; call register_async_backward or pass a DistributedOptimizer"
        )
    if optimizer is not None:
        optimizer.check_equal()
    # Change the class of the object, so that its hooks and the user's reference stay valid.
    plain, reduction.__class__ = reduction.__class__, JoiningBackward
    reduction.begin()
    try:
        yield
        reduction.go_on_without_data()
    finally:
        reduction.__class__ = plain
        # Reset the count of updates, because the ranks have taken different numbers of steps in the block.
        reduction.order.num_updates = 0
    steps = verbs.allgather_object(reduction.num_steps, comm=reduction.buckets.comm)
    root = steps.index(max(steps))
    tensors = [x.detach() for x in (*module.parameters(), *module.buffers())]
    fused(tensors, lambda flat: verbs.broadcast(flat, root, comm=reduction.buckets.comm))
    if optimizer is not None:
        broadcast_optimizer_state(optimizer.optimizer, root, comm=reduction.buckets.comm)
    for each in stateful:
        state = verbs.broadcast_object(each.state_dict(), root, comm=reduction.buckets.comm)
        if reduction.buckets.comm.rank != root:
            each.load_state_dict(state)
