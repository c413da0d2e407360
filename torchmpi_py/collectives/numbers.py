"""Python numbers in collectives: a number is sent with its type, so that 0 on one rank plus 1.5 on another is 1.5.

A number becomes a record of three 64-bit words: kind, value, imaginary part. Reductions gather the records with MPI,
whatever the flavour, and reduce in Python, in rank order. Python's rules apply: sums of ints are exact, True counts as
1, and ``avg`` of ints is a float.

Making a tensor of each number is not possible without further communication, because the ranks would first have to
agree on a dtype.
"""

from __future__ import annotations

import functools
import math
import numbers
import operator
import struct
from collections.abc import Callable, Sequence

import numpy as np
import torch

from torchmpi_py.collectives.plan import Carrier
from torchmpi_py.core.channels import Channel
from torchmpi_py.core.tensors import check_op

Number = bool | int | float | complex
NUMBERS: tuple[type[bool], type[int], type[float], type[complex]] = (numbers.Complex, np.bool_)  # type: ignore[assignment]
"""The classes of Python's and NumPy's numbers. ``isinstance`` is slow with these classes: test for tensors first."""

_KINDS: dict[type, int] = {bool: 0, int: 1, float: 2, complex: 3}
_DTYPES = (torch.bool, torch.int64, torch.float64, torch.complex128)  # indexed by kind
_FORMATS = ("<qqq", "<qqq", "<qdd", "<qdd")
RECORD_BYTES = 24
TOO_LARGE = len(_FORMATS)  # the kind of a number that does not fit into 64 bits


class Records(Carrier):
    """A stand-in for a flavour. It exchanges numbers instead of tensors."""

    name = "mpi"

    def exchange(self, channel: Channel, record: bytes) -> list[Number]:
        """Return the numbers of all ranks, in rank order. Every rank must make this call, which is an allgather."""
        records = bytearray(channel.size * RECORD_BYTES)
        channel.mpi.Allgather(record, records)
        return from_records(records)


def to_record(x: Number) -> bytes:
    """Return the record of a number. A record has RECORD_BYTES bytes."""
    kind, value = (_KINDS[type(x)], x) if type(x) in _KINDS else _kind_and_value(x)
    words = (value.real, value.imag) if kind == 3 else (value, 0)
    try:
        return struct.pack(_FORMATS[kind], kind, *words)
    except struct.error:
        # Every rank that reads this record raises an error. If only this rank raised one, the other ranks would wait.
        return struct.pack("<qqq", TOO_LARGE, 0, 0)


def from_records(records: bytes | bytearray) -> list[Number]:
    """Return the numbers in records, in order."""
    values = list[Number]()
    for begin in range(0, len(records), RECORD_BYTES):
        kind = records[begin]
        if kind == TOO_LARGE:
            raise ValueError("a rank passed an integer that does not fit into 64 bits; pass it as a float")
        _, value, imaginary = struct.unpack_from(_FORMATS[kind], records, begin)
        values.append(bool(value) if kind == 0 else complex(value, imaginary) if kind == 3 else value)
    return values


def reduce_numbers(verb: str, op: str, values: Sequence[Number]) -> Number:
    """Reduce the values in rank order. Raise ValueError if the widest kind among the values does not support the op."""
    widest = max(map(_KINDS.__getitem__, map(type, values)))
    if op != "avg" or widest > 1:  # Python can average integers, but torch cannot.
        check_op(verb, op, _DTYPES[max(widest, 1)])
    return _REDUCE[op](values)


def _extreme(pick: Callable[[Sequence[Number]], Number]) -> Callable[[Sequence[Number]], Number]:
    """Return a minimum or maximum function that returns NaN if any value is NaN, as for tensors."""

    def reduce(values: Sequence[Number]) -> Number:
        # Only NaN differs from itself.
        return next((value for value in values if value != value), None) or pick(values)

    return reduce


def _pairwise(function: Callable[[Number, Number], Number]) -> Callable[[Sequence[Number]], Number]:
    """Return a reduction that applies ``function`` to the values from left to right."""
    return functools.partial(functools.reduce, function)


_REDUCE: dict[str, Callable[[Sequence[Number]], Number]] = {
    "sum": sum,
    "avg": lambda values: sum(values) / len(values),
    "prod": math.prod,
    "min": _extreme(min),  # type: ignore[arg-type]
    "max": _extreme(max),  # type: ignore[arg-type]
    "band": _pairwise(operator.and_),
    "bor": _pairwise(operator.or_),
    "bxor": _pairwise(operator.xor),
    "land": lambda values: int(all(values)),
    "lor": lambda values: int(any(values)),
}


def _kind_and_value(x: Number) -> tuple[int, Number]:
    """Return the kind of a number, and the number converted to Python's class for this kind."""
    if isinstance(x, (bool, np.bool_)):
        return 0, bool(x)
    if isinstance(x, numbers.Integral):
        return 1, int(x)
    if isinstance(x, numbers.Real):
        return 2, float(x)
    return 3, complex(x)
