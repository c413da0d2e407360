"""Ranks that run out of data one by one: those that have none left take part in the reductions of the others.

Each reduction of gradients begins with a count of the ranks that have data. A rank that has left its loop repeats:
take part in the count; if any rank has data, bring zeros to its reduction; else leave. Averages are over the ranks that
have data. At the end all ranks get parameters, buffers and optimizer state of a rank that came farthest.

Source: the semantics of torch.distributed.algorithms.Join, which has no way for an optimizer over MPI.
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
    """A registration within the block of ``join``: each reduction begins with a count of the ranks that have data."""

    compares_steps = False

    def begin(self) -> None:
        """Begin the block, with data on this rank."""
        self.has_data = True  # on this rank
        self.num_present = torch.zeros(1, dtype=torch.int64, device="cpu")  # ranks with data, in the last reduction
        self.num_steps = 0  # with data, on this rank

    def go_on_without_data(self) -> None:
        """Bring zeros to the reductions of the ranks that still have data, until none has."""
        self.has_data, self.num_passes = False, 0
        while True:
            for parameter in self.names:  # without a gradient it counts as zero
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
        # Averages over all ranks become averages over the ranks that have data.
        num_present = int(self.num_present)
        if self.op == "avg" and num_present < self.buckets.comm.size:
            for bucket in self.buckets.all:
                bucket.flat *= self.buckets.comm.size / num_present


@contextmanager
def join(module_or_optimizer: torch.nn.Module | DistributedOptimizer, *stateful: Any) -> Iterator[None]:
    """A training loop that some ranks leave earlier than others, for they have fewer batches. Collective.

    ::

        with mpi.join(optimizer, scheduler):
            for x, y in batches_of_this_rank:  # as many as there are, or none
                optimizer.zero_grad()
                criterion(network(x), y).backward()
                optimizer.step()
                scheduler.step()

    Gradients are averages over the ranks that still have data (sums, where sums are asked for). A rank that leaves the
    loop waits here until all have left it. Then all ranks get parameters, buffers and the optimizer's state of the rank
    that made the most steps (the lowest such rank). Passes after the last whole step (``backward_passes_per_step``) are
    dropped. Call no other collective in the loop (no SyncBatchNorm, no metrics over ranks, no closure for ``step``):
    ranks that have left do not call it. An error in the loop is raised as it is.

    Args:
        module_or_optimizer: a DistributedOptimizer, or a module whose gradients ``register_async_backward`` reduces,
            once a step.
        stateful: objects with ``state_dict`` and ``load_state_dict`` that change in a step, and have to be equal
            afterwards: a scheduler, a GradScaler, with a module its optimizer.

    Raises:
        TypeError: for anything but a module or a DistributedOptimizer.
        ValueError: for a module without a registration.
    """
    optimizer = module_or_optimizer if isinstance(module_or_optimizer, DistributedOptimizer) else None
    module: Any = module_or_optimizer if optimizer is None else optimizer.module
    if not isinstance(module, torch.nn.Module):
        raise TypeError(
            f"join: give a module or an optim.DistributedOptimizer, not a {type(module).__name__}; a ShardedOptimizer "
            "needs equally many batches on every rank, such as mpi.shard or drop_last=True give"
        )
    own = [each for each in registered.get(module, []) if each._owner() is each]  # of register_async_backward
    reduction: Any = optimizer.reduction if optimizer is not None else own[-1] if own else None
    if reduction is None:
        raise ValueError(
            "join: expected reduced gradients; call register_async_backward or give a DistributedOptimizer"
        )
    if optimizer is not None:
        optimizer.check_equal()
    # The same hooks, and the same object for the user.
    plain, reduction.__class__ = reduction.__class__, JoiningBackward
    reduction.begin()
    try:
        yield
        reduction.go_on_without_data()
    finally:
        reduction.__class__ = plain
        reduction.order.num_updates = 0  # which differs by the steps of each rank
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
