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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from torchmpi_py.collectives import verbs
from torchmpi_py.core.communicators import Communicator, resolve
from torchmpi_py.nn.async_backward import AsyncBackward
from torchmpi_py.nn.buckets import buckets_of
from torchmpi_py.nn.compression import Compression
from torchmpi_py.nn.synchronize import check_module, check_tables
from torchmpi_py.optim.wrapper import ReducingOptimizer


class DistributedOptimizer(ReducingOptimizer):
    """``optimizer``, with gradients averaged over the ranks of ``comm`` (default: the current level).

    Everything else is the optimizer's: ``param_groups``, ``state``, ``state_dict``, hooks, schedulers, GradScaler.
    Every rank makes it alike, and calls ``step`` equally often (``mpi.join``, if some run out of data earlier).

    optimizer: any torch optimizer of parameters of ``module``. Its type decides what an update is.
    module: holds the parameters; those that are not in the optimizer are left alone.
    backward_passes_per_step: gradients of so many passes are added up, and reduced in the last one.
    compression: of what travels, such as ``optim.compression.BF16()``; None: as it is.
    average: mean over the ranks; False: sum.
    sparse_as_dense: make sparse gradients (``Embedding(sparse=True)``) dense, and reduce them so; else the ranks gather
        each other's rows, and gradients stay sparse.

    ``remove()`` ends the averaging. Making it, ``step``
    and, with gradients that are not reduced yet, ``synchronize`` are collective. Parameters start equal on all ranks
    (``nn.synchronize_parameters``), which the first step checks.

    Raises on every rank: RanksDisagree where the ranks' parameters differ in name, shape or dtype, or by the first step
    in value, or where a rank has called ``step`` more often than another since the last reduction (not compared in
    ``mpi.join``); ValueError where the optimizer has parameters that ``module`` has not, where another registration
    reduces them already, or where backward_passes_per_step is no whole number above 0; TypeError for another
    compression.
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
        self.optimizer = optimizer
        self.module = module
        self.backward_passes_per_step = backward_passes_per_step
        self.comm = resolve(comm)
        make_buckets = functools.partial(buckets_of, compression=compression, sparse_as_dense=sparse_as_dense)
        self._options: dict[str, Any] = {"average": average, "make_buckets": make_buckets}
        self._register()

    def _register(self) -> None:
        _check_parameters(self.optimizer, self.module, self.comm)
        self.reduction = AsyncBackward(
            self.module,
            frequency=self.backward_passes_per_step,
            comm=self.comm,
            only={p for group in self.optimizer.param_groups for p in group["params"]},
            before_pass=self._check_pass,
            on_reduction=self._wait,
            **self._options,
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
                self.check_equal()
                loss = self.optimizer.step()
            self.reduction.order.num_updates += 1
            return loss
        finally:
            self._is_reduced = False

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Around ``step()``, after ``synchronize()`` and clipping, in scripts for Horovod. It changes nothing here."""
        yield

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, for parameters of the module, as when layers are unfrozen. Collective."""
        super().add_param_group(param_group)
        self.remove()
        self._is_checked = False
        self._register()

    def _evaluated(self, closure: Callable[[], Any]) -> Any:
        loss = closure()
        self.synchronize()
        self.check_equal()
        if isinstance(loss, Tensor):
            return verbs.allreduce(loss.detach(), out=torch.empty_like(loss), op="avg", comm=self.comm)
        return loss if loss is None else verbs.allreduce(float(loss), op="avg", comm=self.comm)

    def _wait(self) -> None:
        """At the end of the backward pass: gradients become averages."""
        self.reduction.synchronize()
        self._is_reduced = True

    def _check_pass(self) -> None:
        if self._is_reduced and self.reduction.buckets.hold_gradients():
            raise RuntimeError(
                "backward() ran again before step(): it would add to gradients that are averages already. Accumulate "
                "with backward_passes_per_step=..., or zero_grad() of this optimizer. Where a pass for another has "
                "reached these parameters (as a GAN's), set requires_grad_(False) on them for that pass; activation "
                "checkpointing needs checkpoint(..., use_reentrant=False)"
            )
        self._is_reduced = False  # of a step that GradScaler left out, whose gradients the module has dropped


def _check_parameters(optimizer: Any, module: torch.nn.Module, comm: Communicator) -> None:
    """ValueError or RanksDisagree, on all ranks, unless the optimizers have the same parameters of the module."""
    known = {p: name for name, p in module.named_parameters()}
    names = [known.get(p) for group in optimizer.param_groups for p in group["params"]]
    stands: Sequence[tuple[int, list[Any]]] = verbs.allgather_object(
        (names.count(None), [name for name in names if name is not None]), comm=comm
    )
    unknown = {rank: count for rank, (count, _) in enumerate(stands) if count}
    if unknown:
        raise ValueError(
            "the optimizer has parameters that the module has not: "
            + ", ".join(f"{count} on rank {rank}" for rank, count in unknown.items())
            + f" (it has {len(names)} on this one). Make it of this module's parameters, before the module is wrapped "
            "or copied, as torch.optim.SGD(module.parameters(), ...)"
        )
    check_tables("the ranks do not train the same parameters", [own for _, own in stands])
