"""Operations kept from one call to the next one alike, so that nothing is checked and chosen twice.

A training loop makes the same calls again and again. What the preparation of a call finds out depends on the verb, the
communicator, the selector's table, and of a flat CPU tensor on dtype, size, and whether the tensor is symmetric: an
operation is kept under these. Calls that differ in anything else, and calls that are to raise an error, find nothing
here, and are prepared as if they were the first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version

from torchmpi_py.collectives.operation import Operation
from torchmpi_py.collectives.selector import selector
from torchmpi_py.core import config
from torchmpi_py.core.communicators import Communicator
from torchmpi_py.memory import symmetric

VERBS = frozenset({"allreduce", "broadcast"})
"""The verbs whose flavours work on the tensor of the call itself, on every rank."""

_ARGUMENTS = frozenset({"op", "comm", "flavour"})  # by name, of calls whose operations are kept
_MOST_KEPT = 256  # by a communicator
_STRIDED = torch.strided


def key_of(verb: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable | None:
    """What the preparation of a call depends on, beside the communicator; None for a call that is always prepared."""
    x = args[0]
    if (
        len(args) > 1
        or type(x) is not Tensor
        or not x.is_cpu
        or x.layout is not _STRIDED
        or x.is_nested
        or not x.is_contiguous()
        or x.requires_grad
        or x.is_neg()
        or x.is_inference()
        or forward_ad._current_level >= 0
        or torch._C._are_functorch_transforms_active()
        or config.can_raise  # then a blocking call is launched
    ):
        return None
    found = symmetric.find(x)
    is_symmetric = found is not None and found[0].is_declared
    if not kwargs:
        return verb, x.dtype, x.nbytes, is_symmetric, selector.generation
    if not _ARGUMENTS.issuperset(kwargs):
        return None
    return verb, x.dtype, x.nbytes, is_symmetric, selector.generation, *kwargs.items()


class KeptOperation:
    """An operation without its tensor, which stands ``num_tensors`` times in front of the other arguments."""

    __slots__ = ("_num_tensors", "_others", "operation")

    def __init__(self, operation: Operation[Any], num_tensors: int) -> None:
        again = operation.flavour.again(operation, num_tensors)
        self.operation = dataclasses.replace(operation, arguments=(), target=None, again=again)
        self._num_tensors, self._others = num_tensors, operation.arguments[num_tensors:]

    def to_run(self, x: Tensor) -> Operation[Any]:
        """The operation itself, for ``x``, which is to run in this thread."""
        operation = self.operation
        increment_version(x)  # autograd does not see what MPI writes
        operation.target, operation.entry = x, None
        return operation

    def to_launch(self, x: Tensor) -> Operation[Any]:
        """An operation like the one kept, for ``x``, which is to be launched; it outlives the call."""
        kept, arguments = self.operation, (x,) * self._num_tensors + self._others
        increment_version(x)
        return Operation(
            kept.name, kept.method, kept.flavour, kept.comm, arguments, None, kept.num_bytes, x,
            fingerprint=kept.fingerprint, again=kept.again,
        )  # fmt: skip


def keep(comm: Communicator, key: Hashable, operation: Operation[Any]) -> None:
    """Keep a new operation for calls alike, if the call's tensor is all that the flavour reads and writes."""
    x: Any = operation.target
    num_tensors = sum(isinstance(each, Tensor) for each in operation.arguments)
    if operation.conclude is not None or any(each is not x for each in operation.arguments[:num_tensors]):
        return
    if not x.is_complex():  # which may be conjugate
        put_back(comm, key, KeptOperation(operation, num_tensors))


def put_back(comm: Communicator, key: Hashable, kept: KeptOperation) -> None:
    """Keep an operation that is over, or launched.

    While in use an operation is not in the table: a call in another thread prepares one of its own.
    """
    kept.operation.target = None
    if len(comm.kept) >= _MOST_KEPT:
        comm.kept.clear()
    comm.kept[key] = kept
