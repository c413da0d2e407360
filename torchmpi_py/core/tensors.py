"""Checks of the tensors of a collective, and copies of strided tensors to flat memory and back.

A flavour only ever gets contiguous tensors without pending conjugation or negation. Any other tensor is copied in
before the operation and, if the operation writes it, copied out afterwards. All checks use properties that are equal on
every rank (type, dtype, layout, shape). So a mistake raises the same error on every rank, before any data moves.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version

from torchmpi_py.core.collective import COLLECTIVES, Writes

Finish = Callable[[], None]

NO_TRANSFORM = (
    "transforms of torch.func (grad, vmap, jvp, ...) and forward-mode derivatives cannot pass through it; use "
    "torch.autograd.grad with a function of nn.functional, and create_graph=True for higher derivatives"
)
OPS = ("sum", "avg", "prod", "min", "max", "band", "bor", "bxor", "land", "lor")
_FLOAT_OPS = ("sum", "avg", "prod", "min", "max")
_COMPLEX_OPS = ("sum", "avg", "prod")
_INTEGER_OPS = ("sum", "prod", "min", "max", "band", "bor", "bxor", "land", "lor")
WHOLE_NUMBERS = frozenset(getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64))
_STRIDED = torch.strided


def ops_of(dtype: torch.dtype) -> tuple[str, ...]:
    """Return the reductions that are defined for a dtype. On bool, sum and max mean "or", prod and min mean "and"."""
    if dtype.is_complex:
        return _COMPLEX_OPS
    if dtype.is_floating_point:
        return () if str(dtype) == "torch.float4_e2m1fn_x2" else _FLOAT_OPS  # float4_e2m1fn_x2 packs two numbers a byte
    return _INTEGER_OPS if dtype in WHOLE_NUMBERS or dtype == torch.bool else ()


def check_known_op(verb: str, op: str) -> None:
    """Raise a ValueError with the list of known ops unless ``op`` is one of them."""
    if op not in OPS:
        raise ValueError(f"{verb}: op {op!r} is unknown; known ops: {', '.join(OPS)}")


@functools.cache
def check_op(verb: str, op: str, dtype: torch.dtype) -> None:
    """Raise a ValueError with the list of allowed ops unless ``op`` is defined for ``dtype``."""
    check_known_op(verb, op)
    if not ops_of(dtype):
        raise ValueError(f"{verb}: {dtype} cannot be reduced; unpack its values into a tensor of float32 or int32")
    if op not in ops_of(dtype):
        raise ValueError(f"{verb}: op {op!r} is not defined for {dtype}; ops for it: {', '.join(ops_of(dtype))}")


def check_rank(verb: str, what: str, value: int, size: int) -> int:
    """Return ``value`` as a rank of a communicator of ``size`` ranks; raise TypeError or ValueError if it is not."""
    try:
        rank = operator.index(value)
    except (TypeError, ValueError):  # An array or a tensor has __index__, but most of them raise in it.
        rank = None
    if rank is None or isinstance(value, bool):
        hint = f"; the tensor comes first, then {what}" if isinstance(value, Tensor) else ""
        raise TypeError(f"{verb}: {what} must be a rank (an int), not {value!r}{hint}")
    if not 0 <= rank < size:
        raise ValueError(f"{verb}: {what}={value} is not a rank of this communicator; ranks are 0 to {size - 1}")
    return rank


def check_count(what: str, value: int, least: int, unit: str = "") -> int:
    """Return ``value``; raise ValueError unless it is an int of at least ``least``. ``unit`` is a plural noun."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        number = f"a whole number of {unit}" if unit else "a whole number"
        raise ValueError(f"{what}={value!r}: give {number}, at least {least}")
    return value


def check_tensor(verb: str, name: str, x: object) -> Tensor:
    """Return ``x`` as a dense tensor in memory; raise a TypeError with the remedy for any other type."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{verb}: {name} must be a torch.Tensor, not {type(x).__name__}; use torch.as_tensor({name})")
    if x.layout is not _STRIDED or x.is_quantized or x.is_nested or (type(x) is not Tensor and not _is_in_memory(x)):
        raise TypeError(f"{verb}: {name} is {_kind_and_remedy(x)}")
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        _check_untransformed(verb, x)
    return x


def _check_untransformed(verb: str, x: Tensor) -> None:
    """Raise TypeError for a tensor inside a transform of torch.func, or with a forward-mode derivative."""
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor(x)
    if is_wrapped or forward_ad.unpack_dual(x).tangent is not None:  # type: ignore[no-untyped-call]
        raise TypeError(f"{verb}: {NO_TRANSFORM}")


def check_parts(verb: str, what: str, parts: Sequence[Tensor]) -> None:
    """Call ``check_tensor`` for each tensor of a list; the caller checks sizes, dtype and device."""
    for number, part in enumerate(parts):
        # Lists are long, so most tensors skip the full check here.
        if type(part) is not Tensor or part.layout is not _STRIDED or part.is_nested:
            check_tensor(verb, f"number {number} of the {what}", part)


def _is_in_memory(x: Tensor) -> bool:
    """Return whether a tensor of a subclass has values of its own, and is not a wrapper of other tensors."""
    try:
        return x.data_ptr() != 0 or (x.numel() == 0 and not hasattr(x, "to_local"))
    except RuntimeError:  # Such a tensor has no pointer to its values.
        return False


def _kind_and_remedy(x: Tensor) -> str:
    """Return the type of a tensor without values in plain memory, and what to pass instead."""
    kind = type(x).__name__
    if hasattr(x, "to_local"):
        return f"a {kind}, of which this rank holds only a part; pass the result of .to_local()"
    if hasattr(x, "get_data"):
        return f"a {kind}; pass the results of .get_data() and .get_mask(), each in a call of its own"
    if x.is_nested:
        return "a nested tensor; pass the result of .to_padded_tensor(0.0), or each tensor of .unbind()"
    if x.is_quantized:
        return "a quantized tensor; pass a dense tensor, such as the result of .dequantize() or .int_repr()"
    if x.layout is not _STRIDED:
        return f"a {x.layout} tensor; pass a dense tensor, such as the result of .to_dense()"
    if x.is_meta:
        return "on the meta device, without values; pass a tensor on the CPU or a CUDA device"
    return (
        f"a {kind} without memory of its own (a wrapper around another tensor, a FakeTensor, or inside torch.func "
        "or torch.export); pass the plain tensor"
    )


def check_divisible(verb: str, x: Tensor, size: int) -> None:
    """Raise ValueError unless dim 0 of ``x`` splits into ``size`` equal slices."""
    if x.dim() == 0 or x.shape[0] % size:
        raise ValueError(
            f"{verb}: shape {tuple(x.shape)} cannot be split into {size} equal slices along dim 0; "
            f"make its first dimension a multiple of {size}"
        )


def check_out(verb: str, out: object, x: Tensor, shape: Sequence[int] | None) -> Tensor:
    """Return ``out`` as a tensor for the result: same dtype and device as ``x``, and exactly ``shape``."""
    out = check_tensor(verb, "out", out)
    if out.dtype != x.dtype or out.device != x.device:
        raise ValueError(f"{verb}: out is {out.dtype} on {out.device}, but x is {x.dtype} on {x.device}")
    if shape is not None and out.shape != torch.Size(shape):
        raise ValueError(f"{verb}: out has shape {tuple(out.shape)}, but the result has shape {tuple(shape)}")
    return out


def is_flat(x: Tensor) -> bool:
    """Return whether the memory of ``x`` is its values in order: contiguous, no pending conjugation or negation."""
    return x.is_contiguous() and not x.is_neg() and not x.is_conj()


def flat(x: Tensor) -> Tensor:
    """Return ``x`` without its history, in flat memory: the same memory if ``x`` is flat, otherwise a copy."""
    x = x.detach()
    return x if is_flat(x) else x.resolve_conj().resolve_neg().contiguous()


def flat_copy(x: Tensor) -> Tensor:
    """Return ``flat(x)`` in new memory, which the program does not change."""
    return flat(x).clone() if is_flat(x) else flat(x)


def check_writable(verb: str, x: Tensor) -> None:
    """Raise ValueError for a destination whose elements share memory (an expanded tensor)."""
    if _shares_elements(x):
        raise ValueError(
            f"{verb}: cannot write into an expanded tensor of shape {tuple(x.shape)} and strides {x.stride()}, "
            "whose elements share memory; pass x.clone() or a contiguous out="
        )


def _shares_elements(x: Tensor) -> bool:
    """Return whether two elements of ``x`` share memory."""
    dims = sorted((stride, extent) for stride, extent in zip(x.stride(), x.shape, strict=True) if extent > 1)
    if dims and dims[0][0] == 0:  # an expanded tensor
        return True
    reach, is_nested = 0, True
    for stride, extent in dims:
        is_nested = is_nested and stride > reach
        reach += stride * (extent - 1)
    if is_nested or x.numel() == 0:
        return False
    places = torch.zeros((), dtype=torch.int64)
    for stride, extent in dims:  # Overlapping strides, as as_strided can create: compare the place of each element.
        places = places.unsqueeze(-1) + stride * torch.arange(extent)
    return len(torch.unique(places)) < places.numel()


def output_buffer(verb: str, target: Tensor, *, holds_input: bool) -> tuple[Tensor, Finish | None]:
    """Return flat memory to write in place of ``target``, and a function that copies it to ``target``, or None.

    With ``holds_input`` the flat memory starts with the values of ``target``. The function is None if there is nothing
    to copy.
    """
    if not target.is_inference():
        increment_version(target)  # Autograd does not observe what MPI writes.
    elif not torch.is_inference_mode_enabled():
        target = _writable(target)
    if target.is_contiguous() and not target.is_neg() and not target.is_conj():  # ``is_flat``, inlined for speed
        return target.detach() if target.requires_grad else target, None
    check_writable(verb, target)
    plain = target.detach()
    buffer = flat(plain) if holds_input else torch.empty(plain.shape, dtype=plain.dtype, device=plain.device)

    def copy_out() -> None:
        plain.copy_(buffer)

    return buffer, copy_out


def _writable(x: Tensor) -> Tensor:
    """Return the memory of a tensor from inference mode as a tensor that can be written outside of that mode."""
    place = x.untyped_storage(), x.storage_offset(), x.shape, x.stride()
    plain = torch.empty(0, dtype=x.dtype, device=x.device).set_(*place)
    plain = plain.conj() if x.is_conj() else plain
    return torch._neg_view(plain) if x.is_neg() else plain


class _Overwritten(torch.autograd.Function):
    """A node of autograd's graph that replaces the history of a tensor that a collective overwrites.

    Its backward raises an error. Without this node gradients would pass as if the collective had changed nothing.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, verb: str) -> Tensor:
        ctx.verb = verb
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> NoReturn:
        raise RuntimeError(
            f"backward() through a tensor that {ctx.verb} has overwritten, which has no gradient: use "
            f"torchmpi_py.nn.functional.{'sendreceive' if ctx.verb == 'recv' else ctx.verb}, or pass x.detach()"
        )


def writes_into_x(verb: str, out: object) -> bool:
    """Return whether a collective with this ``out`` writes its result into ``x`` on some rank."""
    writes = COLLECTIVES[verb].writes
    return writes is Writes.X or (out is None and writes is Writes.X_WITHOUT_OUT)


def cut_off(verb: str, x: Tensor, out: object) -> None:
    """Make ``backward`` through the tensor that a collective is about to write raise an error.

    This affects only tensors in autograd's graph. It happens on every rank, even if the collective writes on its root
    alone. Raise ValueError if torch forbids in-place writes to the tensor.
    """
    target = x if writes_into_x(verb, out) else out
    if not isinstance(target, Tensor) or not target.requires_grad or not torch.is_grad_enabled():
        return
    try:
        # A program writes to a leaf (a parameter or a view of one) on purpose, so ``backward`` raises no error for it.
        is_leaf = target._base.is_leaf if target._base is not None else target.is_leaf
        if not is_leaf:
            _Overwritten.apply(target, verb)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise ValueError(f"{verb}: the tensor is part of autograd's graph; pass x.detach(). {error}") from None


def copy_if_overlapping(x: Tensor, buffer: Tensor, place: Tensor | None = None) -> Tensor:
    """Return ``x``, or a copy if it overlaps ``buffer``, which MPI forbids, and is not the memory of ``place``."""
    begin, start = x.data_ptr(), buffer.data_ptr()
    overlap = begin < start + buffer.nbytes and start < begin + x.nbytes
    is_in_place = place is not None and begin == place.data_ptr() and x.nbytes == place.nbytes
    return x.clone() if overlap and not is_in_place else x


def copy_to(destination: Tensor, source: Tensor) -> None:
    """Copy ``source`` to ``destination`` unless both are the same memory."""
    if destination.data_ptr() != source.data_ptr():
        destination.copy_(source)
