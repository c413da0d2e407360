"""Means of whole numbers, which the package's verbs refuse: the sum, divided and rounded towards zero, as NCCL does.

Lightning counts samples in them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torchmpi_py.torch_backend.call import Call

_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)


def averaging(op: str, outputs: Sequence[Tensor], size: int, make: Callable[[str], Call], is_root: bool = True) -> Call:
    """The call that ``make`` makes of the verbs' op for ``op``, with what is left to do to its ``outputs``."""
    if op != "avg" or not any(_is_whole(x) for x in outputs):
        return make(op)

    def divide() -> None:
        for x in outputs if is_root else ():
            plain = x.detach()
            if x.dtype in _UNSIGNED:  # which torch does not divide
                plain.copy_(torch.from_numpy(plain.cpu().numpy() // size))
            else:
                plain.div_(size, rounding_mode="trunc" if _is_whole(x) else None)

    call = make("sum")
    call.afterwards(divide)
    return call


def _is_whole(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)
