"""The plans that a communicator keeps for calls that a training loop repeats.

A plan is kept if the flavour works directly on the tensors of the call, ``x`` and ``out``. These must be flat CPU
tensors without autograd history. The key of a plan contains everything on which the plan depends. A call with a new
key, or a call that must raise an error, finds no plan and is prepared in full.
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

_BY_NAME = frozenset({"op", "comm", "flavour", "out", "root"})  # keyword arguments of calls whose plans are kept
_MOST_KEPT = 512  # plans per communicator


def key_of(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable | None:
    """Return the key of a call's plan in ``comm.plans``, or None for a call that is always prepared in full."""
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
        or config.can_raise  # A blocking call is then launched as an operation, so that its wait can time out.
    ):
        return None
    if out is not None:
        is_apart = x is out or abs(x.data_ptr() - out.data_ptr()) >= x.nbytes
        if out.dtype is not x.dtype or out.shape != x.shape or not is_apart:
            return None
        kwargs = dict(kwargs)
        del kwargs["out"]
    location = symmetric.find(x if out is None else out)
    is_symmetric = location is not None and location[0].is_declared
    if not kwargs and len(args) == 1:
        return name, x.dtype, x.nbytes, is_symmetric, selector.generation, out is None
    root = args[1] if len(args) == 2 else kwargs.get("root", 0)
    # Check the type, because True and 1.0 equal 1 but are not valid as ``root``.
    if len(args) > 2 or type(root) is not int or not _BY_NAME.issuperset(kwargs):
        return None
    return name, x.dtype, x.nbytes, is_symmetric, selector.generation, out is None, len(args), root, *kwargs.items()


def keep(comm: Communicator, key: Hashable, operation: Operation[Any], tensors: tuple[Tensor, Tensor]) -> None:
    """Keep the plan of a call if the flavour works directly on the call's tensors.

    ``tensors`` consists of ``x`` and the tensor for the result, which is ``out`` or ``x``.
    """
    (x, target), (reads, *writes) = tensors, operation.arguments
    is_direct = reads.data_ptr() == x.data_ptr() and all(each is target for each in (*writes, operation.target))
    # A later complex tensor may be a conjugate view, which the key does not show.
    if is_direct and operation.conclude is None and not x.is_complex():
        add(comm, key, operation.plan)


def add(comm: Communicator, key: Hashable, plan: Plan) -> None:
    """Keep a plan, and drop the oldest plan if the communicator already has ``_MOST_KEPT`` plans."""
    if len(comm.plans) >= _MOST_KEPT:
        comm.plans.pop(next(iter(comm.plans)), None)
    comm.plans[key] = plan


def allreduce(prepare: Callable[..., Operation[Any]], x: Tensor, comm: Communicator, op: str) -> Operation[Any]:
    """Return the operation of an in-place allreduce, from a kept plan if there is one, else from ``prepare``.

    ``prepare`` is the function that makes the operation of any allreduce.
    """
    key = key_of("allreduce", (x,), {"op": op})
    plan = None if key is None else comm.plans.get(key)
    if plan is not None:
        increment_version(x)  # Autograd does not see that MPI writes to ``x``.
        return Operation(plan, (x, x), x)
    operation = prepare(x, op=op, comm=comm)
    if key is not None:
        keep(comm, key, operation, (x, x))
    return operation
