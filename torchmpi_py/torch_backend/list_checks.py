"""Checks of the lists of tensors that torch.distributed gives, on this rank alone, and of tensors that are cut."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from torchmpi_py.core.tensors import check_parts, check_tensor

Tensors = Sequence[Tensor]


def check_list(
    verb: str, what: str, parts: Tensors, x: Tensor | None, size: int, *, of_equal_size: Iterable[int] = ()
) -> None:
    """ValueError unless there is a tensor for each of ``size`` ranks, of the dtype and on the device of ``x``.

    ``of_equal_size``: the numbers of the tensors that must have as many elements as ``x``.
    """
    if len(parts) != size:
        raise ValueError(f"{verb}: {len(parts)} {what}, but the group has {size} ranks; give a tensor for each")
    x = check_tensor(verb, "tensor", x)
    check_parts(verb, what, parts)
    for rank, part in enumerate(parts):
        if part.dtype != x.dtype or part.device != x.device:
            raise ValueError(
                f"{verb}: number {rank} of the {what} is {part.dtype} on {part.device}, "
                f"but the other tensor is {x.dtype} on {x.device}"
            )
    for rank in of_equal_size:
        if parts[rank].numel() != x.numel():
            raise ValueError(
                f"{verb}: number {rank} of the {what} has {parts[rank].numel()} elements, but the other tensor has "
                f"{x.numel()}"
            )


def check_whole(verb: str, what: str, whole: Tensor, part_what: str, part: Tensor, size: int) -> None:
    """ValueError unless ``whole`` is as long as ``size`` times ``part``, of the same dtype, on the same device."""
    check_tensor(verb, part_what, part)
    check_tensor(verb, what, whole)
    if whole.dtype != part.dtype or whole.device != part.device:
        raise ValueError(
            f"{verb}: the {what} is {whole.dtype} on {whole.device}, "
            f"but the {part_what} is {part.dtype} on {part.device}"
        )
    if whole.numel() != size * part.numel():
        raise ValueError(
            f"{verb}: the {what} has {whole.numel()} elements; with {size} ranks and {part.numel()} elements in the "
            f"{part_what} it must have {size * part.numel()}"
        )


def rows(what: str, x: Tensor, splits: list[int], size: int) -> list[Tensor]:
    """The parts of ``x`` along dim 0; no ``splits`` are equal ones."""
    num_rows = x.shape[0] if x.dim() else 1
    splits = splits or [num_rows // size] * size
    if len(splits) != size or sum(splits) != num_rows:
        raise ValueError(
            f"all_to_all_single: {what} split sizes {splits} for {size} ranks and {num_rows} rows along dim 0; give "
            "one for each rank, that add up to the rows"
        )
    return list(torch.split(x, splits))
