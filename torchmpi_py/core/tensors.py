"""Checks of the tensors of a collective, and copies of strided tensors to flat memory and back.

A flavour receives only contiguous tensors without pending conjugation or negation. Any other tensor is copied to flat
memory before the operation and, if the operation writes it, copied back afterwards. All checks use properties that are
equal on every rank (type, dtype, layout, shape). So a mistake raises the same error on every rank, before any data
moves.
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
    "transforms of torch.func (grad, vmap, jvp, ...) and forward-mode derivatives are not supported; call "
    "torch.autograd.grad with functions of torchmpi_py.nn.functional, and create_graph=True for higher derivatives"
)
OPS = ("sum", "avg", "prod", "min", "max", "band", "bor", "bxor", "land", "lor")
_FLOAT_OPS = ("sum", "avg", "prod", "min", "max")
_COMPLEX_OPS = ("sum", "avg", "prod")
_INTEGER_OPS = ("sum", "prod", "min", "max", "band", "bor", "bxor", "land", "lor")
WHOLE_NUMBERS = frozenset(getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64))
_STRIDED = torch.strided


def ops_of(dtype: torch.dtype) -> tuple[str, ...]:
    """Return the reductions that are defined for a dtype. For bool, sum and max mean "or", prod and min mean "and"."""
    if dtype.is_complex:
        return _COMPLEX_OPS
    if dtype.is_floating_point:
        # An element of float4_e2m1fn_x2 contains two numbers in one byte.
        return () if str(dtype) == "torch.float4_e2m1fn_x2" else _FLOAT_OPS
    return _INTEGER_OPS if dtype in WHOLE_NUMBERS or dtype == torch.bool else ()


def check_known_op(verb: str, op: str) -> None:
    """Raise a ValueError that lists the known ops if ``op`` is unknown."""
    if op not in OPS:
        raise ValueError(f"{verb}: op {op!r} is unknown; use one of: {', '.join(OPS)}")


@functools.cache
def check_op(verb: str, op: str, dtype: torch.dtype) -> None:
    """Raise a ValueError that lists the allowed ops if ``op`` is not defined for ``dtype``."""
    check_known_op(verb, op)
    if not ops_of(dtype):
        raise ValueError(f"{verb}: {dtype} cannot be reduced; unpack its values into a tensor of float32 or int32")
    if op not in ops_of(dtype):
        raise ValueError(f"{verb}: op {op!r} is not defined for {dtype}; use one of: {', '.join(ops_of(dtype))}")


def check_rank(verb: str, what: str, value: int, size: int) -> int:
    """Return ``value`` as an int; raise TypeError or ValueError if it is not a rank of a group of ``size`` ranks."""
    try:
        rank = operator.index(value)
    except (TypeError, ValueError):  # Arrays and tensors have __index__, but it raises for most of them.
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
        raise ValueError(f"{what}={value!r}: expected {number}, at least {least}")
    return value


def check_tensor(verb: str, name: str, x: object) -> Tensor:
    """Return ``x``; raise a TypeError with the remedy unless it is a dense tensor in memory."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{verb}: {name} must be a torch.Tensor, not {type(x).__name__}; pass torch.as_tensor(...)")
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
        # A list may be long, so ordinary tensors skip the full check.
        if type(part) is not Tensor or part.layout is not _STRIDED or part.is_nested:
            check_tensor(verb, f"number {number} of the {what}", part)


def _is_in_memory(x: Tensor) -> bool:
    """Return whether a tensor of a subclass has its own memory, and is not a wrapper of other tensors."""
    try:
        return x.data_ptr() != 0 or (x.numel() == 0 and not hasattr(x, "to_local"))
    except RuntimeError:  # ``data_ptr`` raises for a tensor without memory.
        return False


def _kind_and_remedy(x: Tensor) -> str:
    """Return a description of a tensor without plain, dense memory, and advice on the tensor to pass instead."""
    kind = type(x).__name__
    if hasattr(x, "to_local"):
        return f"a {kind}, of which this rank holds only a part; pass the result of .to_local()"
    if hasattr(x, "get_data"):
        return f"a {kind}; pass the results of .get_data() and .get_mask() in separate calls"
    if x.is_nested:
        return "a nested tensor; pass the result of .to_padded_tensor(0.0), or each tensor of .unbind()"
    if x.is_quantized:
        return "a quantized tensor; pass a dense tensor, such as the result of .dequantize() or .int_repr()"
    if x.layout is not _STRIDED:
        return f"a {x.layout} tensor; pass a dense tensor, such as the result of .to_dense()"
    if x.is_meta:
        return "on the meta device, so it has no values; pass a tensor on the CPU or a CUDA device"
    return (
        f"a {kind} without its own memory (it wraps another tensor, is a FakeTensor, or is inside torch.func or "
        "torch.export); pass the plain tensor"
    )


def check_divisible(verb: str, x: Tensor, size: int) -> None:
    """Raise ValueError unless dim 0 of ``x`` splits into ``size`` equal slices."""
    if x.dim() == 0 or x.shape[0] % size:
        raise ValueError(
            f"{verb}: shape {tuple(x.shape)} cannot be split into {size} equal slices along dim 0; "
            f"make its first dimension a multiple of {size}"
        )


def check_out(verb: str, out: object, x: Tensor, shape: Sequence[int] | None) -> Tensor:
    """Return ``out``; raise an error unless it is a tensor with the dtype and device of ``x``, and with ``shape``."""
    out = check_tensor(verb, "out", out)
    if out.dtype != x.dtype or out.device != x.device:
        raise ValueError(f"{verb}: out must be like x, {x.dtype} on {x.device}, but it is {out.dtype} on {out.device}")
    if shape is not None and out.shape != torch.Size(shape):
        raise ValueError(f"{verb}: out has shape {tuple(out.shape)}, but the result has shape {tuple(shape)}")
    return out


def is_flat(x: Tensor) -> bool:
    """Return whether ``x`` is flat: contiguous, without pending conjugation or negation."""
    return x.is_contiguous() and not x.is_neg() and not x.is_conj()


def flat(x: Tensor) -> Tensor:
    """Return ``x``, detached and in flat memory: in the same memory if ``x`` is flat, otherwise as a copy."""
    x = x.detach()
    return x if is_flat(x) else x.resolve_conj().resolve_neg().contiguous()


def flat_copy(x: Tensor) -> Tensor:
    """Return a flat copy of ``x`` in new memory, so that the program may change ``x``."""
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
    for stride, extent in dims:  # Strides from ``as_strided`` may overlap, so compare the places of all elements.
        places = places.unsqueeze(-1) + stride * torch.arange(extent)
    return len(torch.unique(places)) < places.numel()


def output_buffer(verb: str, target: Tensor, *, holds_input: bool) -> tuple[Tensor, Finish | None]:
    """Return flat memory to write instead of ``target``, and a function that copies the memory to ``target``.

    With ``holds_input`` the flat memory starts with the values of ``target``. If it is the memory of ``target``, there
    is nothing to copy, and None replaces the function.
    """
    if not target.is_inference():
        increment_version(target)  # Autograd cannot observe that MPI writes to the tensor.
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
    """Return a tensor that shares the memory of an inference tensor, and can be written outside of inference mode."""
    place = x.untyped_storage(), x.storage_offset(), x.shape, x.stride()
    plain = torch.empty(0, dtype=x.dtype, device=x.device).set_(*place)
    plain = plain.conj() if x.is_conj() else plain
    return torch._neg_view(plain) if x.is_neg() else plain


class _Overwritten(torch.autograd.Function):
    """A node of autograd's graph that replaces the history of a tensor that a collective overwrites.

    Its backward raises an error. Without this node, gradients would flow as if the collective had changed nothing.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, verb: str) -> Tensor:
        ctx.verb = verb
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> NoReturn:
        raise RuntimeError(
            f"backward() reached a tensor that {ctx.verb} has overwritten, so there is no gradient; use "
            f"torchmpi_py.nn.functional.{'sendreceive' if ctx.verb == 'recv' else ctx.verb}, or pass x.detach()"
        )


def writes_into_x(verb: str, out: object) -> bool:
    """Return whether a collective with this ``out`` writes its result into ``x`` on some rank."""
    writes = COLLECTIVES[verb].writes
    return writes is Writes.X or (out is None and writes is Writes.X_WITHOUT_OUT)


def cut_off(verb: str, x: Tensor, out: object) -> None:
    """Let ``backward`` raise an error if it reaches the tensor that a collective is about to overwrite.

    This affects only tensors in autograd's graph. All ranks do this, even if the collective writes only on its root.
    Raise ValueError if torch forbids in-place writes to the tensor.
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
    """Return ``x``, or a copy of ``x`` if it overlaps ``buffer``, because MPI forbids this.

    If ``x`` is exactly the memory of ``place``, return ``x``.
    """
    begin, start = x.data_ptr(), buffer.data_ptr()
    overlap = begin < start + buffer.nbytes and start < begin + x.nbytes
    is_in_place = place is not None and begin == place.data_ptr() and x.nbytes == place.nbytes
    return x.clone() if overlap and not is_in_place else x


def copy_to(destination: Tensor, source: Tensor) -> None:
    """Copy ``source`` to ``destination`` unless both have the same memory."""
    if destination.data_ptr() != source.data_ptr():
        destination.copy_(source)
