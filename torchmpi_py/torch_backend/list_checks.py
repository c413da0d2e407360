"""Check the lists of tensors that torch.distributed passes, and tensors that are split, on this rank only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from torchmpi_py.core.tensors import check_parts, check_tensor

Tensors = Sequence[Tensor]


def check_list(
    verb: str, what: str, parts: Tensors, x: Tensor | None, size: int, *, of_equal_size: Iterable[int] = ()
) -> None:
    """Raise ValueError unless ``parts`` has a tensor for each of ``size`` ranks, with the dtype and device of ``x``.

    ``of_equal_size`` lists the indices of the tensors that must have as many elements as ``x``. ``what`` is the name of
    the list in error messages.
    """
    if len(parts) != size:
        raise ValueError(f"{verb}: found {len(parts)} {what}, but the group has {size} ranks; pass one tensor per rank")
    x = check_tensor(verb, "tensor", x)
    check_parts(verb, what, parts)
    for rank, part in enumerate(parts):
        if part.dtype != x.dtype or part.device != x.device:
            raise ValueError(
                f"{verb}: expected one dtype and device for all inputs and outputs of this rank, found {x.dtype} on "
                f"{x.device}, and {part.dtype} on {part.device} in {what}[{rank}]; convert one of them"
            )
    for rank in of_equal_size:
        if parts[rank].numel() != x.numel():
            raise ValueError(
                f"{verb}: expected {x.numel()} elements in {what}[{rank}], as many as in this rank's "
                f"{'input' if what == 'outputs' else 'output'}; found {parts[rank].numel()}"
            )


def check_whole(verb: str, what: str, whole: Tensor, part_what: str, part: Tensor, size: int) -> None:
    """Raise ValueError unless ``whole`` has the dtype and device of ``part``, and ``size`` times as many elements.

    ``what`` and ``part_what`` are the names of the two tensors in error messages.
    """
    check_tensor(verb, part_what, part)
    check_tensor(verb, what, whole)
    if whole.dtype != part.dtype or whole.device != part.device:
        raise ValueError(
            f"{verb}: the {what} is {whole.dtype} on {whole.device}, "
            f"but the {part_what} is {part.dtype} on {part.device}; convert one of them"
        )
    if whole.numel() != size * part.numel():
        raise ValueError(
            f"{verb}: expected {size * part.numel()} elements in the {what} ({size} x {part.numel()} elements of the "
            f"{part_what}); found {whole.numel()}"
        )


def rows(what: str, x: Tensor, splits: list[int], size: int) -> list[Tensor]:
    """Return one part of ``x`` for each of ``size`` ranks, split along dim 0. Raise ValueError if that is not possible.

    ``splits`` lists the number of rows of each part. If the list is empty, all parts are equal. ``what`` is the name of
    ``x`` in the error message.
    """
    num_rows = x.shape[0] if x.dim() else 1
    splits = splits or [num_rows // size] * size
    if len(splits) != size or sum(splits) != num_rows:
        raise ValueError(
            f"all_to_all_single: expected {size} {what} split sizes, one per rank, with the sum {num_rows} (rows along "
            f"dim 0); found {splits}"
        )
    return list(torch.split(x, splits))
