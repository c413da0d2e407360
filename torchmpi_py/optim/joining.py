"""Ranks that run out of data one by one: those that have none left take part in the reductions of the others.

Each reduction of gradients begins with a count of the ranks that have data. A rank that has left its loop repeats:
take part in the count; if any rank has data, bring zeros to its reduction; else leave. Averages are over the ranks that
have data. At the end all ranks get parameters, buffers and optimizer state of a rank that came farthest.

Source: the semantics of torch.distributed.algorithms.Join, which has no way for an optimizer over MPI.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from torchmpi_py.collectives import verbs
from torchmpi_py.nn.async_backward import registered_with
from torchmpi_py.nn.buckets import Joining
from torchmpi_py.nn.optimizer_state import broadcast_optimizer_state
from torchmpi_py.nn.split_parameters import any_split
from torchmpi_py.nn.synchronize import buckets_of, fused
from torchmpi_py.optim.distributed import DistributedOptimizer


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

    module_or_optimizer: a DistributedOptimizer; or a module whose gradients ``register_async_backward`` or
    ``synchronize_gradients`` reduces, once a step. Gradients are averages over the ranks that still have data (sums,
    where sums are asked for). A rank that leaves the loop waits here until all have; then all get parameters, buffers
    and the optimizer's state of the rank that made the most steps (the lowest such). stateful: what else changes in a
    step, and has to be equal afterwards: a scheduler, a GradScaler, with a module its optimizer. Each has
    ``state_dict`` and ``load_state_dict``. Passes after the last whole step (``backward_passes_per_step``) are dropped.

    No other collective may be called in the loop (no SyncBatchNorm, no metrics over ranks, no closure for ``step``),
    for ranks that have left do not call it. An error in the loop is raised as it is. TypeError for anything else,
    ValueError for a module with split parameters.
    """
    optimizer = module_or_optimizer if isinstance(module_or_optimizer, DistributedOptimizer) else None
    module: Any = module_or_optimizer if optimizer is None else optimizer.module
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"join: give a module or an optim.DistributedOptimizer, not a {type(module).__name__}")
    reduction = registered_with(module) if optimizer is None else optimizer.reduction
    buckets = buckets_of(module) if reduction is None else reduction.buckets
    if any_split(buckets.parameters):
        raise ValueError("join: a parameter is split over ranks, which all have to compute with it in every step")
    if optimizer is not None:
        optimizer.check_equal()
    joining = buckets.joining = Joining(buckets.comm.size)
    try:
        yield
        _go_on_without_data(buckets.parameters, buckets.reduce if reduction is None else reduction.reduce_now, joining)
    finally:
        buckets.joining = None
        if reduction is not None:
            reduction.order.num_updates = 0  # which differs by the steps of each rank
    steps = verbs.allgather_object(joining.num_steps, comm=buckets.comm)
    root = steps.index(max(steps))
    tensors = [x.detach() for x in (*module.parameters(), *module.buffers())]
    fused(tensors, lambda flat: verbs.broadcast(flat, root, comm=buckets.comm))
    if optimizer is not None:
        broadcast_optimizer_state(optimizer.optimizer, root, comm=buckets.comm)
    for each in stateful:
        state = verbs.broadcast_object(each.state_dict(), root, comm=buckets.comm)
        if buckets.comm.rank != root:
            each.load_state_dict(state)


def _go_on_without_data(parameters: Iterable[torch.nn.Parameter], reduce: Callable[[], None], joining: Joining) -> None:
    """Take part in the reductions of the ranks that still have data, until none has."""
    joining.has_data = False
    while True:
        for parameter in parameters:  # without a gradient it counts as zero
            parameter.grad = None
        reduce()
        if joining.is_over:  # as this reduction has found out
            return
