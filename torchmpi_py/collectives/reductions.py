"""The reduction of values: the dtypes in which values are reduced, and the arithmetic on tensors in this process.

Values of most dtypes are reduced without conversion. In the following cases, values are *encoded* into a different
dtype and *decoded* afterwards:

16- and 8-bit floats   as float32, so that sums accumulate in float32 and are rounded once
complex32              as complex64
land, lor of integers  as bool, so that the result is 0 or 1, even with a single rank
min, max of floats     as integers in the same order. Processors and MPI treat NaN and the sign of zero differently,
                       so ranks could get different results. Here NaN wins, as in torch.minimum, and -0.0 < +0.0. The
                       integer consists of the float's bits; if the sign bit is set, all lower bits are flipped. The
                       largest (smallest) integer represents NaN in max (min).

Values of dtype bool are reduced with bitwise ops. "or" works on the bytes in memory. "and" and "xor" work on 0 and 1,
because in a view of a different dtype True may be any byte except 0.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Code = Callable[[Tensor], Tensor]
BOOL_OPS = {"bxor": "bxor"} | dict.fromkeys(("sum", "max", "bor", "lor"), "bor")
BOOL_OPS |= dict.fromkeys(("prod", "min", "band", "land"), "band")
_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "prod": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64, torch.bool: torch.uint8}


@dataclasses.dataclass(frozen=True, slots=True)
class Kernel:
    """The reduction of one (dtype, op) in this process.

    ``partial`` encodes a tensor, ``combine(a, b, out=)`` reduces two partial results, and ``result`` decodes the
    final partial result. ``dtype`` is the dtype of partial results.
    """

    dtype: torch.dtype
    op: str  # the op that ``combine`` carries out on values of ``dtype``
    encode: Code | None
    decode: Code | None
    divide: bool

    @property
    def combine(self) -> Callable[..., Tensor]:
        """The function that reduces two partial results into ``out=``."""
        return _FUNCTIONS[self.op]

    @property
    def is_plain(self) -> bool:
        """Whether partial results have the same representation in memory as the tensor."""
        return self.encode is None

    def partial(self, x: Tensor) -> Tensor:
        """Return ``x`` as a partial result: a view of ``x`` if ``is_plain``, else a new tensor."""
        return x.view(self.dtype) if self.encode is None else self.encode(x)

    def result(self, total: Tensor, num_ranks: int, dtype: torch.dtype) -> Tensor:
        """Convert ``total``, the reduction over ``num_ranks`` ranks, to ``dtype``. **Overwrites** ``total``."""
        if self.divide:
            total.div_(num_ranks)
        return total.view(dtype) if self.decode is None else self.decode(total)

    def reduce(self, sources: Sequence[Tensor], out: Tensor) -> None:
        """Reduce flat tensors, in order, into ``out``, which may be one of these tensors."""
        if self.encode is None:
            if out.dtype != self.dtype:
                sources, out = [source.view(self.dtype) for source in sources], out.view(self.dtype)
            self._reduce_plain(sources, out)
            return
        total = self.encode(sources[0])
        for source in sources[1:]:
            self.combine(total, self.encode(source), out=total)
        out.copy_(self.result(total, len(sources), out.dtype))

    def _reduce_plain(self, sources: Sequence[Tensor], out: Tensor) -> None:
        """Reduce tensors of ``dtype``; only the last step writes ``out``, which may be a source."""
        if len(sources) == 1:
            out.copy_(sources[0])
            return
        total = sources[0]
        if len(sources) > 2:
            total = self.combine(total, sources[1])
            for source in sources[2:-1]:
                self.combine(total, source, out=total)
        self.combine(total, sources[-1], out=out)
        if self.divide:
            out.div_(len(sources))


@functools.cache
def kernel(dtype: torch.dtype, op: str) -> Kernel:
    """Return the arithmetic for a dtype and an op that ``tensors.check_op`` accepts."""
    wire_dtype, encode, decode = form(dtype, op)
    if wire_dtype == torch.bool:
        op = BOOL_OPS[op]
    divide = op == "avg"
    op = "sum" if divide else op
    if wire_dtype in (torch.uint16, torch.uint32, torch.uint64) and op in ("min", "max"):
        signed, top = _SIGNED[wire_dtype], torch.iinfo(_SIGNED[wire_dtype]).min
        return Kernel(signed, op, lambda x: x.view(signed) ^ top, lambda x: (x ^ top).view(dtype), False)
    raw = _SIGNED.get(wire_dtype, wire_dtype)
    if encode is not None and raw != wire_dtype:  # land and lor reduce integers as bool.
        plain = encode
        return Kernel(raw, op, lambda x: plain(x).view(raw), lambda x: x.view(wire_dtype), False)
    return Kernel(raw, op, encode, decode, divide)


def form(dtype: torch.dtype, op: str) -> tuple[torch.dtype, Code | None, Code | None]:
    """Return (dtype of partial results, encode, decode); both functions are None if no conversion is needed."""
    if op in ("land", "lor") and dtype != torch.bool:
        return torch.bool, lambda x: x.to(torch.bool), lambda wire: wire
    if dtype == torch.bool and BOOL_OPS.get(op) != "bor":
        return torch.bool, lambda x: x.view(torch.uint8).ne(0), lambda wire: wire
    accumulate = dtype
    if dtype.is_floating_point and dtype.itemsize < 4:
        accumulate = torch.float32
    elif dtype == torch.complex32:
        accumulate = torch.complex64
    if dtype.is_floating_point and op in ("min", "max"):
        integer = torch.int64 if accumulate == torch.float64 else torch.int32
        of_nan = torch.iinfo(integer).max if op == "max" else torch.iinfo(integer).min
        return (
            integer,
            lambda x: _ordered(x.to(accumulate).view(integer)).masked_fill_(torch.isnan(x.to(accumulate)), of_nan),
            lambda wire: _ordered(wire).view(accumulate),
        )
    if accumulate != dtype:
        return accumulate, lambda x: x.to(accumulate), lambda wire: wire
    return dtype, None, None


def _ordered(bits: Tensor) -> Tensor:
    """Convert float bits to integers of the same order, and back: if the sign bit is set, flip all other bits."""
    return bits ^ ((bits >> (8 * bits.itemsize - 1)) & torch.iinfo(bits.dtype).max)
