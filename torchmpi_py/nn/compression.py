"""Compression of gradients: fewer bytes are sent, at the cost of precision.

Pass a compression to ``nn.register_async_backward``, to an optimizer of ``optim``, or to the engine, with the same
arguments on every rank. Only buckets of floating-point gradients are compressed; other buckets are sent unchanged.
All ranks get the same bits. A plain allreduce of n elements of b bytes over P ranks sends and receives
2 n b (P-1)/P bytes on each rank. With compression, the ranks exchange:

- ``BF16()``: 16-bit floats with the range of float32, in an allreduce of 2 n bytes.
- ``FP16()``: 16-bit floats, scaled into the range of float16, in an allreduce of 2 n bytes. After an overflow or
  an underflow, the ranks reduce the bucket again uncompressed.
- ``TopK(r)``: the largest share r of each rank's elements, in allgathers whose results have r n (4 + b) P bytes.
- ``PowerSGD(k)``: matrices as products of rank k, in two allreduces of k (rows + columns) b bytes in total.

TopK and PowerSGD add the part that they omit to the gradients of the next step (error feedback). So the omitted part is
applied late, but it is not lost. If a GradScaler changes its scale, the omitted part keeps the old scale. BF16 and FP16
do not change float16 and bfloat16 gradients. For DistributedDataParallel, use ``torch_backend.compressed``.

Sources: Seide et al., 1-Bit SGD (2014), for error feedback. Stich et al., Sparsified SGD with memory (2018). Vogels
et al., PowerSGD (2019).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchmpi_py.collectives import verbs
from torchmpi_py.core.communicators import Communicator
from torchmpi_py.core.handles import Handle, wait_all
from torchmpi_py.core.tensors import check_count
from torchmpi_py.errors import RanksDisagree
from torchmpi_py.nn.elements import indices_of_largest, is_finite, largest_amount
from torchmpi_py.nn.gradient_reducer import GradientReducer

_WIDE = (torch.float32, torch.float64)
_MOST_FLOAT16 = 65504.0
_LEAST_FLOAT16 = 2.0**-10  # If the largest absolute value is smaller, small elements lose digits.
_MOST_EXPONENT = 126  # Up to this exponent, a scale and its inverse are normal numbers in float32.
_HEADROOM = 64.0  # Gradients may grow by this factor from one step to the next before they overflow.


class Destination:
    """The ranks that need the reduced gradients: all ranks here, and only some ranks in ``optim.sharded_buckets``."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm

    def reduce_async(self, x: Tensor, op: str) -> Handle[Tensor]:
        """Start to reduce ``x``, which may be overwritten. All ranks of ``comm`` must call it."""
        return verbs.allreduce_async(x, op=op, comm=self.comm)

    def result(self, handle: Handle[Tensor]) -> Tensor:
        """Wait for a reduction, and return the part of the reduced values that this rank needs."""
        return handle.wait()

    def bounds(self, count: int) -> tuple[int, int]:
        """Return the start and the end of the part that this rank needs, in a bucket of ``count`` elements."""
        return 0, count

    def part(self, flat: Tensor) -> Tensor:
        """Return the part of a bucket that this rank needs."""
        return flat[slice(*self.bounds(flat.numel()))]

    def largest(self, part: Tensor) -> float:
        """Return the largest absolute value in the parts of all ranks."""
        return largest_amount(part)


class Compressor:
    """The reduction of one bucket of gradients. This class sends the bucket uncompressed; subclasses compress it.

    ``launch`` starts the first collectives. When their handles are complete, ``finish`` writes the result into
    ``flat``, at least into the part that this rank needs. All ranks of ``comm`` must call both methods.

    Args:
        flat (Tensor): the bucket as a flat tensor.
        views (sequence of Tensor): views of ``flat``, one for each gradient in the bucket, in order. Each view has the
            shape and the strides of its gradient.
        comm (Communicator): ranks to reduce over.
        destination (Destination): the ranks that need the result; default None, all ranks.
    """

    def __init__(
        self, flat: Tensor, views: Sequence[Tensor], comm: Communicator, destination: Destination | None = None
    ) -> None:
        self.flat = self.wire = flat
        self.views = list(views)
        self.comm = comm
        self.destination = destination or Destination(comm)
        self.part = self.destination.part(flat)

    def launch(self, op: str) -> list[Handle[Any]]:
        """Start to reduce ``flat``, and return the handles to wait for.

        Args:
            op (str): "sum" or "avg".

        Returns:
            The handles of the collectives that were started.
        """
        self.handle = self.destination.reduce_async(self.wire, op)
        return [self.handle]

    def finish(self, op: str) -> None:
        """Write the reduced values into ``flat``.

        Args:
            op (str): "sum" or "avg", as for ``launch``.
        """
        result = self.destination.result(self.handle)
        if result.data_ptr() != self.part.data_ptr():
            self.part.copy_(result)

    def restart(self) -> None:
        """Drop the state of earlier steps. All ranks must call this in the same step."""


class CompressedReducer(GradientReducer):
    """A dense bucket that a Compressor reduces."""

    has_state = True

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], flat: Tensor, comm: Communicator, compressor: Compressor
    ) -> None:
        super().__init__(parameters, flat, comm)
        self.reads_in_place = False
        self.compressor = compressor

    def launch(self, op: str) -> list[Handle[Any]]:
        self._insert(self.parameters)
        return self.compressor.launch(op)

    def reduce(self, op: str) -> None:
        wait_all(self.launch(op))

    def finish(self, op: str) -> None:
        self.compressor.finish(op)
        super().finish(op)

    def owes(self, parameter: torch.nn.Parameter) -> bool:
        """Return whether the reduced gradient is nonzero: error feedback may have added gradients of earlier steps."""
        return bool(self._views[parameter].any())

    def restart(self) -> None:
        self.compressor.restart()


class Compression:
    """Base class of the compressions. A subclass creates a ``Compressor`` for each bucket."""

    def compressor(self, flat: Tensor, *of_bucket: Any) -> Compressor | None:
        """Create the compressor of a bucket.

        Args:
            flat (Tensor): the bucket as a flat tensor.
            *of_bucket (object): the other arguments of ``Compressor``.

        Returns:
            A ``Compressor``, or None if the bucket is sent uncompressed.
        """
        raise NotImplementedError

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({options})"


class BF16(Compression):
    """Send gradients as bfloat16: 8 bits of precision and the range of float32. Sums accumulate in float32.

    Only float32 and float64 gradients are compressed.

    Examples:
        >>> net = torch.nn.Linear(4, 1)
        >>> registration = mpi.nn.register_async_backward(net, compression=mpi.optim.compression.BF16())
        >>> registration.remove()
    """

    def compressor(self, flat: Tensor, *of_bucket: Any) -> Compressor | None:
        """Create a compressor for a bucket of float32 or float64; return None for other buckets."""
        return _Half(torch.bfloat16, flat, *of_bucket) if flat.dtype in _WIDE else None


class _Half(Compressor):
    """A compressor that sends gradients as 16-bit floats of ``dtype``."""

    def __init__(self, dtype: torch.dtype, *of_bucket: Any) -> None:
        super().__init__(*of_bucket)
        self.wire = torch.empty_like(self.flat, dtype=dtype)

    def launch(self, op: str) -> list[Handle[Any]]:
        self.wire.copy_(self.flat)
        return super().launch(op)


class FP16(Compression):
    """Send gradients as float16: 11 bits of precision. A power of 2 scales the gradients into the range of float16.

    The scale is computed from the result of the previous step. If a result still overflows, or is too small for
    float16, the ranks reduce the bucket again uncompressed. Only float32 and float64 gradients are compressed.

    Examples:
        >>> net = torch.nn.Linear(4, 1)
        >>> registration = mpi.nn.register_async_backward(net, compression=mpi.optim.compression.FP16())
        >>> registration.remove()
    """

    def compressor(self, flat: Tensor, *of_bucket: Any) -> Compressor | None:
        """Create a compressor for a bucket of float32 or float64; return None for other buckets."""
        return _FP16(torch.float16, flat, *of_bucket) if flat.dtype in _WIDE else None


class _FP16(_Half):
    scale = 1.0

    def restart(self) -> None:
        self.scale = 1.0

    def launch(self, op: str) -> list[Handle[Any]]:
        torch.mul(self.flat, self.scale, out=self.wire)
        return Compressor.launch(self, op)

    def finish(self, op: str) -> None:
        largest = self.destination.largest(self.destination.result(self.handle))
        # All ranks have the same maximum, so all ranks take the same branch.
        if _LEAST_FLOAT16 <= largest < math.inf:
            super().finish(op)
            self.part.mul_(1 / self.scale)
            largest /= self.scale
        elif largest == 0 and verbs.allreduce(largest_amount(self.flat), op="max", comm=self.comm) == 0:
            self.part.zero_()
        else:
            self.part.copy_(self.destination.result(self.destination.reduce_async(self.flat, op)))
            largest = self.destination.largest(self.part)
        # The next step's scale maps this step's maximum to the largest float16 divided by the headroom.
        if 0 < largest < math.inf:
            exponent = math.floor(math.log2(_MOST_FLOAT16 / _HEADROOM) - math.log2(largest))
            self.scale = 2.0 ** min(exponent, _MOST_EXPONENT)


class TopK(Compression):
    """Send only the largest elements of each rank's gradients; add the other elements to the next step's gradients.

    Only floating-point gradients are compressed.

    Args:
        ratio (float): share of the elements to send, above 0 and at most 1; default 0.01. Every rank must pass the same
            ratio.

    Raises:
        ValueError: ``ratio`` is not a number above 0 and at most 1.
        RanksDisagree: in ``synchronize``, if the ranks have different ratios.

    Examples:
        >>> net = torch.nn.Linear(4, 1)
        >>> registration = mpi.nn.register_async_backward(net, compression=mpi.optim.compression.TopK(0.25))
        >>> registration.remove()
    """

    def __init__(self, ratio: float = 0.01) -> None:
        if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0 < ratio <= 1:
            raise ValueError(f"TopK: expected 0 < ratio <= 1, found {ratio=}; pass the share of elements to send")
        self.ratio = float(ratio)

    def compressor(self, flat: Tensor, *of_bucket: Any) -> Compressor | None:
        """Create a compressor for a bucket of floating-point numbers; return None for other buckets."""
        return _TopK(self.ratio, flat, *of_bucket) if flat.is_floating_point() and flat.numel() else None


class _TopK(Compressor):
    """A compressor that keeps unsent elements in ``residual``, and adds them to the gradients of the next step."""

    def __init__(self, ratio: float, *of_bucket: Any) -> None:
        super().__init__(*of_bucket)
        self.count = max(1, round(ratio * self.flat.numel()))
        self.residual = torch.zeros_like(self.flat)

    def restart(self) -> None:
        self.residual.zero_()

    def launch(self, op: str) -> list[Handle[Any]]:
        self.residual += self.flat
        indices = indices_of_largest(self.residual.abs(), self.count)
        values = self.residual[indices]
        self.residual[indices] = 0
        dtype = torch.int32 if self.flat.numel() < 2**31 else torch.int64
        self.handles = [verbs.allgather_async(x, comm=self.comm) for x in (indices.to(dtype), values)]
        return self.handles

    def finish(self, op: str) -> None:
        indices, values = (handle.wait() for handle in self.handles)
        if values.numel() != self.count * self.comm.size:
            raise RanksDisagree(
                f"TopK: ratios differ (this rank sends {self.count} of {values.numel()} elements); pass equal ratios"
            )
        self.flat.zero_()
        # Add rank by rank. The indices of one rank are distinct, so the order of additions is the same on all ranks.
        for index, value in zip(indices.split(self.count), values.split(self.count), strict=True):
            self.flat.index_add_(0, index, value)
        if op == "avg":
            self.flat /= self.comm.size
        if not is_finite(self.flat):  # All ranks have the same sum, so all ranks make the same change.
            self.residual.nan_to_num_(0.0, 0.0, 0.0)


class PowerSGD(Compression):
    """Send each gradient of at least two dimensions as a product of two smaller matrices of rank ``rank``.

    The approximation error is added to the next step's gradients. Only float32 and float64 gradients are compressed.
    A gradient is sent uncompressed if the two matrices together would not be smaller.

    Args:
        rank (int): rank of the matrices, at least 1; default 1. A larger rank is more exact and sends more bytes.

    Raises:
        ValueError: ``rank`` is below 1.

    Examples:
        >>> net = torch.nn.Linear(8, 8)
        >>> registration = mpi.nn.register_async_backward(net, compression=mpi.optim.compression.PowerSGD(2))
        >>> registration.remove()
    """

    def __init__(self, rank: int = 1) -> None:
        self.rank = check_count("PowerSGD: rank", rank, 1)

    def compressor(self, flat: Tensor, views: Sequence[Tensor], *of_bucket: Any) -> Compressor | None:
        """Create a compressor for a bucket of float32 or float64 if the matrices are smaller; else return None."""
        is_smaller = flat.dtype in _WIDE and any(_is_smaller(self.rank, view) for view in views)
        return _PowerSGD(self.rank, flat, views, *of_bucket) if is_smaller else None


class _PowerSGD(Compressor):
    """A compressor that replaces each gradient matrix M by a product P Q^T.

    The ranks average P = M Q, make the columns of P orthonormal, and average Q = M^T P. Each training step starts with
    the Q of the previous step, so P approaches the main directions that the gradients share.
    """

    def __init__(self, rank: int, *of_bucket: Any) -> None:
        super().__init__(*of_bucket)
        self.rank = rank
        self.low_rank = [view for view in self.views if _is_smaller(rank, view)]  # sent as two matrices
        self.others = [view for view in self.views if not _is_smaller(rank, view)]  # sent uncompressed
        self.restart()

    def restart(self) -> None:
        generator = torch.Generator().manual_seed(0)  # All ranks start with the same values.
        shapes = [(view.numel() // len(view), self.rank) for view in self.low_rank]
        self.qs = [torch.randn(shape, generator=generator, device="cpu").to(self.flat) for shape in shapes]
        self.residuals = [torch.zeros_like(view) for view in self.low_rank]

    def launch(self, op: str) -> list[Handle[Any]]:
        for view, residual in zip(self.low_rank, self.residuals, strict=True):
            view += residual
            residual.copy_(view)
        # flatten copies a gradient whose strides do not allow a view as a matrix, such as channels_last.
        self.matrices = [view.flatten(1) for view in self.low_rank]
        products = [matrix @ q for matrix, q in zip(self.matrices, self.qs, strict=True)]
        self.wire = torch.cat([x.reshape(-1) for x in (*products, *self.others)])
        return [verbs.allreduce_async(self.wire, op="avg", comm=self.comm)]

    def finish(self, op: str) -> None:
        # The first reduction has averaged P and the uncompressed gradients.
        counts = [self.rank * matrix.shape[0] for matrix in self.matrices] + [x.numel() for x in self.others]
        reduced = torch.split(self.wire, counts)
        ps = [torch.linalg.qr(product.view(-1, self.rank)).Q for product in reduced[: len(self.matrices)]]
        # The second reduction averages Q. On the CPU, matrix.T @ p would take 28 times as long as (p.T @ matrix).T.
        wire = torch.cat([(p.T @ matrix).T.reshape(-1) for matrix, p in zip(self.matrices, ps, strict=True)])
        verbs.allreduce(wire, op="avg", comm=self.comm)
        parts = torch.split(wire, [q.numel() for q in self.qs])
        self.qs = [part.view_as(q) for part, q in zip(parts, self.qs, strict=True)]
        for view, matrix, p, q in zip(self.low_rank, self.matrices, ps, self.qs, strict=True):
            torch.mm(p, q.T, out=matrix)
            if matrix.data_ptr() != view.data_ptr():
                view.copy_(matrix.view(view.shape))
        for view, average in zip(self.others, reduced[len(self.matrices) :], strict=True):
            view.copy_(average.view(view.shape))
        # The residual is the part of this rank's gradients that the result lacks. An overflow resets all residuals.
        for residual, view in zip(self.residuals, self.low_rank, strict=True):
            residual -= view
        if not is_finite(wire):  # All ranks have the same values, so all ranks take this branch.
            self.restart()
        if op == "sum":
            self.flat *= self.comm.size


def _is_smaller(rank: int, gradient: Tensor) -> bool:
    """Return whether two matrices of rank ``rank`` have fewer elements than the gradient."""
    rows = len(gradient) if gradient.dim() > 1 else 0
    return rows > 0 and rank * (rows + gradient.numel() // rows) < gradient.numel()


def check_compression(compression: object) -> None:
    """Raise TypeError unless the argument is a compression or None."""
    if compression is not None and not isinstance(compression, Compression):
        raise TypeError(f"{compression=} is not a compression; pass an object such as optim.compression.BF16()")
