"""Means of whole numbers, which the verbs refuse: Lightning counts samples in such tensors.

A mean is the sum, divided and rounded towards zero, as in NCCL. Sums are those of int64, or uint64, so that no mean of
shorter numbers is lost where their sum would wrap around.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchmpi_py.core.tensors import WHOLE_NUMBERS, check_tensor, check_writable
from torchmpi_py.torch_backend.call_queue import Call
from torchmpi_py.torch_backend.extra_operations import ExtraOperations, copy_all
from torchmpi_py.torch_backend.group_calls import one_after_another
from torchmpi_py.torch_backend.list_checks import Tensors

Copies = list[tuple[Tensor, Tensor]]


def averaging(
    extra: ExtraOperations,
    op: str,
    outputs: Tensors,
    inputs: Any,
    make: Callable[[str, Any, Any], Call],
    *,
    is_root: bool = True,
    of_lists: bool = False,
) -> Call:
    """The call that ``make`` makes for ``op``, outputs and inputs; a mean of whole numbers as a sum and a division.

    ``inputs``: tensors, or lists of them; the outputs themselves where the call works in place. Only root has outputs
    to divide, where there is one. ``of_lists``: ``make`` copies tensors into one.
    """
    if op != "avg" or not any(x.dtype in WHOLE_NUMBERS for x in outputs):
        return make(op, outputs, inputs)
    for x in outputs:
        check_writable("avg", check_tensor("avg", "tensor", x))
    copies: Copies = []
    sums = _widened(outputs, copies)
    summands = sums if inputs is outputs else _widened(inputs, copies)
    wide, narrow = [x for x, _ in copies], [x for _, x in copies]
    if of_lists:
        copy_all(wide, narrow)

    def divide() -> None:
        for x, total in zip(outputs, sums, strict=True) if is_root else ():
            _divide(total.detach(), extra.comm.size)
            if total is not x:
                copy_all([x], [total])

    operations, _, last_step = make("sum", sums, summands)
    if copies and not of_lists:
        # In its turn: an earlier call, not waited for, may write what this one reads.
        operations = [extra.operation("widen", *wide, *narrow), *operations]
    return operations, list(outputs), one_after_another([last_step, divide])


def _widened(given: Any, copies: Copies) -> Any:
    """Room for whole numbers, in tensors or lists of them, as int64; others, and uint64, as they are.

    ``copies`` gets each room, and what is to be copied there.
    """
    if not isinstance(given, Tensor):
        return [_widened(x, copies) for x in given]
    if given.dtype not in WHOLE_NUMBERS or given.itemsize == 8:
        return given
    copies.append((torch.empty(given.shape, dtype=torch.int64, device=given.device), given.detach()))
    return copies[-1][0]


def _divide(total: Tensor, size: int) -> None:
    if total.dtype == torch.uint64:  # which torch does not divide; without dimensions numpy's quotient is no array
        total.copy_(torch.from_numpy(total.cpu()[None].numpy() // size)[0])
    else:
        total.div_(size, rounding_mode="trunc" if total.dtype in WHOLE_NUMBERS else None)
