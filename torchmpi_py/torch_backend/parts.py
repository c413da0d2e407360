"""Lists of tensors as parts of one flat tensor: whether they fit, and the way back into the list."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchmpi_py.tensors import check_parts, check_tensor

Tensors = Sequence[Tensor]


def check_list(verb: str, what: str, parts: Tensors, x: Tensor, size: int) -> None:
    """ValueError unless there is a tensor for each of ``size`` ranks, alike ``x`` in dtype and device."""
    check_tensor(verb, "tensor", x)
    check_parts(verb, what, parts)
    if len(parts) != size:
        raise ValueError(f"{verb}: {len(parts)} {what}, but the group has {size} ranks; give a tensor for each")
    for rank, part in enumerate(parts):
        if part.dtype != x.dtype or part.device != x.device:
            raise ValueError(
                f"{verb}: number {rank} of the {what} is {part.dtype} on {part.device}, "
                f"but the other tensor is {x.dtype} on {x.device}"
            )


def check_equal(verb: str, what: str, parts: Tensors, x: Tensor) -> None:
    """ValueError unless all have as many elements as ``x``."""
    for rank, part in enumerate(parts):
        if part.numel() != x.numel():
            raise ValueError(
                f"{verb}: number {rank} of the {what} has {part.numel()} elements, but the other tensor has {x.numel()}"
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


def into_lists(wholes: Tensors, lists: Sequence[Tensors]) -> Callable[[], None]:
    """What copies each flat tensor into the tensors of its list."""

    def conclude() -> None:
        with torch.no_grad():
            for whole, parts in zip(wholes, lists, strict=True):
                for piece, part in zip(torch.split(whole, [x.numel() for x in parts]), parts, strict=True):
                    part.detach().copy_(piece.view(part.shape))

    return conclude


def one_after_another(steps: Sequence[Callable[[], object] | None]) -> Callable[[], Any] | None:
    """All that are there, as one."""
    given = [step for step in steps if step is not None]

    def conclude() -> None:
        for step in given:
            step()

    return conclude if given else None
