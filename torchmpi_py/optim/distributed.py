"""An optimizer wrapper that averages gradients over the ranks, for scripts with their own training loop.

The idea: gradients are sent during the backward pass, in the buckets of ``nn.register_async_backward``. ``backward()``
returns when the gradients are reduced. So the gradients that you read, clip or unscale between ``backward()`` and
``step()`` are already averages. Alternative: return from ``backward()`` without waiting, and wait in ``step()``, as
Horovod does. Why not: a script that clips would have to call ``synchronize()`` first. A script without this call would
clip local gradients, and no error would be raised.

Scripts written for Horovod call ``synchronize`` and ``skip_synchronize`` around clipping. Here these calls do nothing
in most steps. A rank that ran fewer backward passes than the other ranks, or none, joins the reduction in ``step``. On
such a rank, call ``synchronize`` before clipping (GradScaler triggers it automatically).

Sources: the names come from Horovod's DistributedOptimizer (Sergeev and Del Balso, 2018). Decision 021 explains why
``backward()`` waits for the reduction.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from torchmpi_py.collectives import verbs
from torchmpi_py.core.communicators import Communicator, resolve
from torchmpi_py.nn.buckets import buckets_of
from torchmpi_py.nn.compression import Compression
from torchmpi_py.nn.synchronize import check_module
from torchmpi_py.optim.wrapper import ReducingOptimizer


class DistributedOptimizer(ReducingOptimizer):
    """Wrap ``optimizer`` so that its gradients are averaged over the ranks.

    ``param_groups``, ``state``, ``state_dict``, hooks, schedulers and GradScaler work as with the plain optimizer.
    Every rank must create the wrapper with the same arguments, and call ``step`` the same number of times. If some
    ranks have fewer batches than others, use ``mpi.join``. Parameters must be equal on all ranks at the start (see
    ``nn.synchronize_parameters``); the first reduction checks this. ``remove()`` ends the averaging.

    Args:
        optimizer (torch.optim.Optimizer): any torch optimizer whose parameters belong to ``module``.
        module (torch.nn.Module): module that holds the parameters. Parameters that are not in the optimizer are not
            reduced.
        backward_passes_per_step (int): number of backward passes per step; default 1. Their gradients are added up,
            and the last pass reduces the sum.
        compression (Compression): compression of the gradients that are sent, such as ``optim.compression.BF16()``, or
            None (default).
        average (bool): True (default) computes the mean over the ranks; False computes the sum.
        sparse_as_dense (bool): True converts sparse gradients (``Embedding(sparse=True)``) to dense gradients before
            the reduction. With False (default) the ranks gather each other's rows, and gradients stay sparse.
        comm (Communicator): ranks to average over; default None, the current level.

    Raises:
        RanksDisagree: on every rank. At creation, the parameters differ in name, shape or dtype. In a reduction, the
            initial parameters differ in value, or a rank has called ``step`` more often than another rank (``mpi.join``
            does not compare these numbers).
        ValueError: ``optimizer`` has parameters that are not in ``module``, another registration already reduces some
            of the parameters, or ``backward_passes_per_step`` is not a whole number above 0.
        TypeError: ``optimizer`` is not a torch optimizer, ``module`` is not a module, or ``compression`` is not a
            ``Compression``.

    Examples:
        >>> net = torch.nn.Linear(4, 1)
        >>> mpi.nn.synchronize_parameters(net)
        >>> optimizer = mpi.optim.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net)
        >>> batches = [(torch.randn(8, 4), torch.randn(8, 1)) for _ in range(3)]  # this rank's share
        >>> for x, y in batches:
        ...     optimizer.zero_grad()
        ...     torch.nn.functional.mse_loss(net(x), y).backward()
        ...     optimizer.step()
        >>> mpi.nn.check_with_allreduce(net)  # the parameters are equal on all ranks
        >>> optimizer.remove()
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        module: torch.nn.Module,
        *,
        backward_passes_per_step: int = 1,
        compression: Compression | None = None,
        average: bool = True,
        sparse_as_dense: bool = False,
        comm: Communicator | None = None,
    ) -> None:
        super().__init__()
        check_module("DistributedOptimizer", module)
        if isinstance(optimizer, type) or not hasattr(optimizer, "param_groups"):
            raise TypeError(f"DistributedOptimizer: expected a torch optimizer, found {optimizer!r}; pass an instance")
        self.optimizer = optimizer
        self.module = module
        self.comm = resolve(comm)
        module_parameters = set(module.parameters())
        others = [p for group in optimizer.param_groups for p in group["params"] if p not in module_parameters]
        counts = verbs.allgather(len(others), comm=self.comm)
        if any(counts):
            raise ValueError(
                "DistributedOptimizer: expected only parameters of the module; found other parameters (number by rank: "
                f"{counts}). Create the optimizer with module.parameters(), and do not copy the module afterwards"
            )
        self._register(
            module,
            make_buckets=functools.partial(buckets_of, compression=compression, sparse_as_dense=sparse_as_dense),
            parameters=functools.partial(_parameters_of, weakref.ref(self)),
            frequency=backward_passes_per_step,
            average=average,
        )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce any gradients that are not reduced yet, and update the parameters. Every rank must make this call.

        **Overwrites** the parameters.

        Args:
            closure (callable): function that computes the loss and its gradients, as in torch; default None. The
                optimizer gets the mean of the loss over the ranks, so that line searches make the same decisions on
                every rank.

        Returns:
            The loss that the optimizer's ``step`` returns; None without a closure.

        Raises:
            RanksDisagree: on every rank, if the ranks are in different steps.
        """
        try:
            loss: Any
            if closure is not None:
                loss = self.optimizer.step(lambda: self._evaluated(closure))
            else:
                self.synchronize()
                loss = self.optimizer.step()
            self.reduction.order.num_updates += 1
            return loss
        finally:
            self._is_reduced = False

    def skip_synchronize(self) -> AbstractContextManager[None]:
        """Return a context manager that does nothing, for compatibility with Horovod.

        Scripts written for Horovod enter it around ``step()``, after ``synchronize()`` and clipping.
        """
        return nullcontext()

    def _evaluated(self, closure: Callable[[], Any]) -> Any:
        loss = closure()
        self.synchronize()
        if isinstance(loss, Tensor):
            return verbs.allreduce(loss.detach(), out=torch.empty_like(loss), op="avg", comm=self.comm)
        return loss if loss is None else verbs.allreduce(float(loss), op="avg", comm=self.comm)


def _parameters_of(reference: weakref.ref[DistributedOptimizer], _: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the current parameters of the optimizer, or no parameters if the optimizer has been deleted.

    The reference is weak, because the registration must not keep the optimizer alive.
    """
    distributed = reference()
    groups = [] if distributed is None else distributed.optimizer.param_groups
    return [p for group in groups for p in group["params"]]
