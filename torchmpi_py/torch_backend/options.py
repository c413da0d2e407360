"""What torch.distributed's options say: it gives some of them as objects, and some by themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, distributed

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
