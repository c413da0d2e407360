"""An optimizer whose gradients are averages over the ranks: one line for a script with a loop of its own.

Gradients travel during the backward pass, in the buckets of ``nn.register_async_backward``, and ``backward()`` returns
when they are there: what is read, clipped or unscaled between ``backward()`` and ``step()`` is the average. So
``synchronize`` and ``skip_synchronize``, which scripts for Horovod have around clipping, have nothing left to do; a
rank that had no backward pass, or fewer than the others, meets their reduction in ``step`` (or ``synchronize``, which
goes before clipping then; GradScaler calls for it).

Source: Horovod's DistributedOptimizer (Sergeev and Del Balso, 2018) for the names; decision 021 for when it waits.
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
    """Average the gradients of ``optimizer`` over the ranks; everything else is the optimizer's own.

    ``param_groups``, ``state``, ``state_dict``, hooks, schedulers and GradScaler work as with the plain optimizer.
    Every rank makes it with the same arguments, and calls ``step`` equally often (``mpi.join``, if some ranks run out
    of data earlier). Making it and ``step`` are collective; ``synchronize`` is too, if gradients are not reduced yet.
    Parameters start equal on all ranks (``nn.synchronize_parameters``), which the first reduction checks.
    ``remove()`` ends the averaging.

    Args:
        optimizer: any torch optimizer of parameters of ``module``. Its type decides what an update is.
        module: holds the parameters; parameters that are not in the optimizer are left alone.
        backward_passes_per_step: gradients of so many passes are added up, and reduced in the last one; default: 1.
        compression: of what travels, such as ``optim.compression.BF16()``; None: gradients travel as they are.
        average: mean over the ranks; False: sum.
        sparse_as_dense: make sparse gradients (``Embedding(sparse=True)``) dense before they are reduced; otherwise the
            ranks gather each other's rows, and gradients stay sparse.
        comm: the ranks to average over; default: the current level.

    Raises:
        RanksDisagree: on every rank, where the parameters differ in name, shape or dtype, or, in the first reduction,
            in value; or where a rank has called ``step`` more often than another since the last reduction (not compared
            in ``mpi.join``).
        ValueError: the optimizer has parameters that ``module`` has not, another registration reduces them already, or
            backward_passes_per_step is not a whole number above 0.
        TypeError: ``optimizer`` is not a torch optimizer, or ``compression`` is not a compression.

    Example:
        ::

            optimizer = optim.DistributedOptimizer(torch.optim.SGD(net.parameters(), 0.1), net)
            for x, y in batches:
                optimizer.zero_grad()
                criterion(net(x), y).backward()
                optimizer.step()
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
            raise TypeError(f"DistributedOptimizer: expected a torch optimizer, found {optimizer!r}")
        self.optimizer = optimizer
        self.module = module
        self.comm = resolve(comm)
        known = set(module.parameters())
        others = [p for group in optimizer.param_groups for p in group["params"] if p not in known]
        counts = verbs.allgather(len(others), comm=self.comm)
        if any(counts):
            raise ValueError(
                f"DistributedOptimizer: expected parameters of the module; the ranks' optimizers have {counts} others. "
                "Make them of its parameters, before it is copied, such as torch.optim.SGD(module.parameters())"
            )
        self._register(
            module,
            make_buckets=functools.partial(buckets_of, compression=compression, sparse_as_dense=sparse_as_dense),
            parameters=functools.partial(_parameters_of, weakref.ref(self)),
            frequency=backward_passes_per_step,
            average=average,
        )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters by the averages; first reduce what is not reduced yet. Collective.

        closure: as torch's; a rank's loss becomes the mean over the ranks, so that line searches decide alike.
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
        """Around ``step()``, after ``synchronize()`` and clipping, in scripts for Horovod. It changes nothing here."""
        return nullcontext()

    def _evaluated(self, closure: Callable[[], Any]) -> Any:
        loss = closure()
        self.synchronize()
        if isinstance(loss, Tensor):
            return verbs.allreduce(loss.detach(), out=torch.empty_like(loss), op="avg", comm=self.comm)
        return loss if loss is None else verbs.allreduce(float(loss), op="avg", comm=self.comm)


def _parameters_of(reference: weakref.ref[DistributedOptimizer], _: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The parameters that the optimizer holds now; the registration must not keep the optimizer alive."""
    distributed = reference()
    groups = [] if distributed is None else distributed.optimizer.param_groups
    return [p for group in groups for p in group["params"]]
