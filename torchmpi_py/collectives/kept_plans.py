"""The plans that a communicator keeps for calls that a training loop repeats.

A plan is kept if the tensors of the call, ``x`` and ``out``, are themselves what the flavour reads and writes: flat CPU
tensors without history. A call that differs in anything on which a plan depends, or that must raise an error, finds no
plan and is prepared in full.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, strided
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version

from torchmpi_py.collectives.plan import Operation, Plan
from torchmpi_py.collectives.selector import selector
from torchmpi_py.core import config
from torchmpi_py.core.communicators import Communicator
from torchmpi_py.memory import symmetric

_BY_NAME = frozenset({"op", "comm", "flavour", "out", "root"})  # the arguments of calls whose plans are kept
_MOST_KEPT = 512  # by a communicator


def key_of(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable | None:
    """Return what the plan of a call depends on, besides the communicator; None for a call that is always prepared."""
    x, out = args[0], kwargs.get("out") if kwargs else None
    for each in (x,) if out is None else (x, out):
        if (
            type(each) is not Tensor
            or not each.is_cpu
            or each.layout is not strided
            or each.is_nested
            or not each.is_contiguous()
            or each.requires_grad
            or each.is_neg()
            or each.is_inference()
        ):
            return None
    if (
        forward_ad._current_level >= 0
        or torch._C._are_functorch_transforms_active()
        or config.can_raise  # then a blocking call is launched
    ):
        return None
    if out is not None:
        is_apart = x is out or abs(x.data_ptr() - out.data_ptr()) >= x.nbytes
        if out.dtype is not x.dtype or out.shape != x.shape or not is_apart:
            return None
        kwargs = dict(kwargs)
        del kwargs["out"]
    found = symmetric.find(x if out is None else out)
    is_symmetric = found is not None and found[0].is_declared
    if not kwargs and len(args) == 1:
        return name, x.dtype, x.nbytes, is_symmetric, selector.generation, out is None
    root = args[1] if len(args) == 2 else kwargs.get("root", 0)
    # True and 1.0 equal 1, but are errors.
    if len(args) > 2 or type(root) is not int or not _BY_NAME.issuperset(kwargs):
        return None
    return name, x.dtype, x.nbytes, is_symmetric, selector.generation, out is None, len(args), root, *kwargs.items()


def keep(comm: Communicator, key: Hashable, operation: Operation[Any], tensors: tuple[Tensor, Tensor]) -> None:
    """Keep the plan of a call if its ``tensors``, ``x`` and ``out`` or ``x``, are what the flavour reads and writes."""
    (x, target), (reads, *writes) = tensors, operation.arguments
    is_direct = reads.data_ptr() == x.data_ptr() and all(each is target for each in (*writes, operation.target))
    if is_direct and operation.conclude is None and not x.is_complex():  # which may be conjugate
        add(comm, key, operation.plan)


def add(comm: Communicator, key: Hashable, plan: Plan) -> None:
    """Keep a plan; it replaces the oldest one if the communicator has many."""
    if len(comm.plans) >= _MOST_KEPT:
        comm.plans.pop(next(iter(comm.plans)), None)
    comm.plans[key] = plan


def allreduce(prepare: Callable[..., Operation[Any]], x: Tensor, comm: Communicator, op: str) -> Operation[Any]:
    """Return the operation of an allreduce in place: a call of the kept plan, else what ``prepare`` makes."""
    key = key_of("allreduce", (x,), {"op": op})
    plan = None if key is None else comm.plans.get(key)
    if plan is not None:
        increment_version(x)  # autograd does not see what MPI writes
        return Operation(plan, (x, x), x)
    made = prepare(x, op=op, comm=comm)
    if key is not None:
        keep(comm, key, made, (x, x))
    return made
