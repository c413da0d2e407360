"""What torch.distributed's options say: it gives some of them as objects, and some by themselves.

Lists of tensors as parts of one flat tensor: whether they fit, and the way back into the list.

Means of whole numbers, which the package's verbs refuse: the sum, divided and rounded towards zero, as NCCL does.

Lightning counts samples in them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed

from torchmpi_py.core.tensors import check_parts, check_tensor
from torchmpi_py.torch_backend.call_queue import Call

_KINDS: Any = distributed.ReduceOp.RedOpType
_OPS = {
    "SUM": "sum", "AVG": "avg", "PRODUCT": "prod", "MIN": "min", "MAX": "max", "BAND": "band", "BOR": "bor",
    "BXOR": "bxor", "PREMUL_SUM": "sum",
}  # fmt: skip
_BY_NUMBER = {_KINDS.__members__[name].value: op for name, op in _OPS.items()}  # to compare the kinds takes longer
_PREMUL_SUM = _KINDS.PREMUL_SUM.value


def op_of(opts: Any) -> tuple[str, Any]:
    """What the package calls a reduction, and by what every tensor is multiplied before (None: by nothing)."""
    given = getattr(opts, "reduceOp", opts)
    if given is None:
        return "sum", None
    number = getattr(given, "op", given).value
    name = _BY_NUMBER.get(number)
    if name is None:
        raise ValueError(f"backend torchmpi does not know {given!r}; it knows {', '.join(_OPS)}")
    return name, given.__getstate__()[1] if number == _PREMUL_SUM else None


def root_of(opts: Any) -> int:
    """The root, which torch.distributed gives in options or by itself."""
    return opts if isinstance(opts, int) else int(opts.rootRank)


def as_list(tensors: Sequence[Tensor] | Tensor) -> list[Tensor]:
    """torch.distributed may give one tensor by itself."""
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


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
