"""Tensors as MPI messages, and the MPI datatype and op for each torch dtype and op.

Values are reduced in the *form* that ``reductions.py`` defines. Data that is only moved is sent as bytes. MPI never
gets a dtype that it does not support, because Open MPI returns inf for a bfloat16 sum instead of an error. MPI also
never gets a dtype that it adds by different rules than torch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from torchmpi_py.collectives.reductions import BOOL_OPS, form
from torchmpi_py.core.mpi_api import MPI

Buffer = Any  # an mpi4py buffer: [memory, datatype], or IN_PLACE

_MPI_TYPES = {
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    torch.complex64: "C_FLOAT_COMPLEX",
    torch.complex128: "C_DOUBLE_COMPLEX",
    torch.bool: "UINT8_T",
    torch.uint8: "UINT8_T",
    torch.int8: "INT8_T",
    torch.int16: "INT16_T",
    torch.int32: "INT32_T",
    torch.int64: "INT64_T",
    torch.uint16: "UINT16_T",
    torch.uint32: "UINT32_T",
    torch.uint64: "UINT64_T",
}
_CAPPED = frozenset({torch.int8, torch.uint8, torch.int16, torch.uint16})
"""Integer dtypes whose sums saturate in Open MPI's vector code: 100 + 100 - 100 would be 27 in int8.
Their values are sent as int32, so that sums wrap around as in torch."""

_MPI_OPS = {"avg": "SUM"} | {op: op.upper() for op in ("sum", "prod", "min", "max", "band", "bor", "bxor")}


@dataclasses.dataclass(frozen=True, slots=True)
class Reduction:
    """The reduction of one (dtype, op) by MPI; ``itemsize`` bytes per element are sent, and ``divide`` is true for avg.

    Without ``encode`` and ``decode``, MPI uses the memory of the tensor itself.
    """

    mpi_type: MPI.Datatype
    mpi_op: MPI.Op
    divide: bool
    itemsize: int
    encode: Callable[[Tensor], Tensor] | None = None
    decode: Callable[[Tensor], Tensor] | None = None


@functools.cache
def reduction(dtype: torch.dtype, op: str) -> Reduction:
    """Return the reduction for a dtype and an op that ``tensors.check_op`` accepts."""
    wire_dtype, encode, decode = form(dtype, op)
    if op == "sum" and dtype in _CAPPED:
        wire_dtype, encode, decode = torch.int32, lambda x: x.to(torch.int32), lambda wire: wire.to(dtype)
    name = BOOL_OPS[op].upper() if wire_dtype == torch.bool else _MPI_OPS[op]
    mpi_type, mpi_op = getattr(MPI, _MPI_TYPES[wire_dtype]), getattr(MPI, name)
    return Reduction(mpi_type, mpi_op, op == "avg", wire_dtype.itemsize, encode, decode)


def typed(x: Tensor, mpi_type: MPI.Datatype) -> Buffer:
    """Return a flat tensor as an MPI message of elements. The tensor must outlive the operation."""
    return [MPI.memory.fromaddress(x.data_ptr(), x.nbytes), mpi_type]  # This takes a fifth of the time of x.numpy().


def raw(x: Tensor) -> Buffer:
    """Return a flat tensor as an MPI message of bytes. The tensor must outlive the operation."""
    return typed(x, MPI.BYTE)


def pair(sent: Tensor, received: Tensor, mpi_type: MPI.Datatype) -> tuple[Buffer, Buffer]:
    """Return the send and receive buffers of a reduction, which is in place if both tensors have the same address."""
    send_buffer = MPI.IN_PLACE if sent.data_ptr() == received.data_ptr() else typed(sent, mpi_type)
    return send_buffer, typed(received, mpi_type)


def synchronize_stream(x: Tensor) -> None:
    """Block until the current stream of the device of ``x`` is idle, because MPI does not support streams."""
    torch.cuda.current_stream(x.device).synchronize()


def pieces(max_bytes: int, itemsize: int, *tensors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Cut flat tensors into matching 1-D pieces of at most ``max_bytes``, at ``itemsize`` bytes per element.

    The tensors must have the same number of elements. Tensors that fit into one piece are returned unchanged. Empty
    tensors have no pieces.
    """
    count = tensors[0].numel()
    if 0 < count * itemsize <= max_bytes:
        return (tensors,)
    step = max(1, max_bytes // itemsize)
    lines = [x.view(-1) for x in tensors]
    return (tuple(x[begin : begin + step] for x in lines) for begin in range(0, count, step))
