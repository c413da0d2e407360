"""Compression of gradients on the wire: fewer bytes, at the price of digits.

A compression is given to ``nn.register_async_backward``, an optimizer of ``optim`` or the engine, alike on all ranks,
and reduces each bucket of floating-point gradients in its way; other buckets go as they are. The result is the same,
bit for bit, on all ranks. With n elements of b bytes in a bucket and P ranks, in place of the 2 n b (P-1)/P bytes that
an allreduce sends and receives on each rank:

==============  ==========================  =============================================================
``BF16()``      n x 2 bytes by allreduce    16 bits with the range of float32
``FP16()``      n x 2 bytes by allreduce    16 bits, scaled into their range; float32 where they overflow
``TopK(r)``     r n x (4 + b) x P bytes     the largest share r of each rank's elements, by allgather
``PowerSGD(k)``  k (rows + columns) x b      matrices as products of rank k, by two allreduces
==============  ==========================  =============================================================

What TopK and PowerSGD leave out is added to the next step's gradients (error feedback), so it is late, not
lost; where a GradScaler changes its scale, it is in the scale of its own step. float16 and bfloat16
gradients go by BF16 and FP16 as they are. ``torch_backend.compressed`` is for DistributedDataParallel.

Sources: Seide et al., 1-Bit SGD (2014), for error feedback; Stich et al., Sparsified SGD with memory (2018); Vogels et
al., PowerSGD (2019).
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
_LEAST_FLOAT16 = 2.0**-10  # the largest amount below which other elements would lose digits
_MOST_EXPONENT = 126  # of a scale that float32 has
_HEADROOM = 64.0  # a step's gradients may be so many times larger than the last step's before they overflow


class Destination:
    """Where reduced gradients are wanted: on all ranks. See ``optim.sharded_buckets`` for others."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm

    def reduce_async(self, x: Tensor, op: str) -> Handle[Tensor]:
        """Start to reduce ``x``, which may be overwritten. Collective."""
        return verbs.allreduce_async(x, op=op, comm=self.comm)

    def result(self, handle: Handle[Tensor]) -> Tensor:
        """The part of the reduced values that is wanted on this rank."""
        return handle.wait()

    def bounds(self, count: int) -> tuple[int, int]:
        """Where the part of a bucket of ``count`` elements begins and ends that is wanted on this rank."""
        return 0, count

    def part(self, flat: Tensor) -> Tensor:
        """The part of a bucket that is wanted on this rank."""
        return flat[slice(*self.bounds(flat.numel()))]

    def largest(self, part: Tensor) -> float:
        """The largest amount in the parts of all ranks."""
        return largest_amount(part)


class Compressor:
    """How the gradients of one bucket travel: here as they are; subclasses compress them.

    flat: the bucket. views: the gradients in it, in order: parts of ``flat`` with the shapes and strides of gradients.

    ``launch`` starts what can be started; once its handles are done, ``finish`` puts the result into ``flat``, at least
    where it is wanted (``destination``; default: everywhere). Both are collective over ``comm``.
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
        """Start to reduce ``flat`` by ``op``, sum or avg."""
        self.handle = self.destination.reduce_async(self.wire, op)
        return [self.handle]

    def finish(self, op: str) -> None:
        """Put what was reduced into ``flat``."""
        result = self.destination.result(self.handle)
        if result.data_ptr() != self.part.data_ptr():
            self.part.copy_(result)

    def restart(self) -> None:
        """Forget what earlier steps have left, on all ranks in the same step."""


class CompressedReducer(GradientReducer):
    """A bucket whose gradients are compressed: inserted as usual, and reduced within the bucket by a Compressor."""

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
        """Whether error feedback has kept a part of earlier gradients."""
        return bool(self._views[parameter].any())

    def restart(self) -> None:
        self.compressor.restart()


class Compression:
    """Base of the compressions: what makes the compressors of buckets."""

    def compressor(self, flat: Tensor, *of_bucket: Any) -> Compressor | None:
        """A compressor for a bucket, with the arguments of ``Compressor``; None for one that goes as it is."""
        raise NotImplementedError

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({options})"


class BF16(Compression):
    """16 bits on the wire, 8 of them of precision, with the range of float32; sums accumulate in float32."""

    def compressor(self, flat: Tensor, *of_bucket: Any) -> Compressor | None:
        """For float32 and float64."""
        return _Half(torch.bfloat16, flat, *of_bucket) if flat.dtype in _WIDE else None


class _Half(Compressor):
    """Gradients travel as 16 bits, of ``dtype``."""

    def __init__(self, dtype: torch.dtype, *of_bucket: Any) -> None:
        super().__init__(*of_bucket)
        self.wire = torch.empty_like(self.flat, dtype=dtype)

    def launch(self, op: str) -> list[Handle[Any]]:
        self.wire.copy_(self.flat)
        return super().launch(op)


class FP16(Compression):
    """16 bits on the wire, 11 of them of precision. Gradients are scaled, by a power of 2, into the range of float16.

    The scale follows from the result of the step before. Where a result overflows all the same, or is too small for
    float16, the ranks reduce that bucket again as it is.
    """

    def compressor(self, flat: Tensor, *of_bucket: Any) -> Compressor | None:
        """For float32 and float64."""
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
        # Every rank has the same maximum, and takes the same one of the three ways.
        if _LEAST_FLOAT16 <= largest < math.inf:
            super().finish(op)
            self.part.mul_(1 / self.scale)
            largest /= self.scale
        elif largest == 0 and verbs.allreduce(largest_amount(self.flat), op="max", comm=self.comm) == 0:
            self.part.zero_()
        else:
            self.part.copy_(self.destination.result(self.destination.reduce_async(self.flat, op)))
            largest = self.destination.largest(self.part)
        # The scale of the next step brings this step's maximum to the range's end, less the headroom.
        if 0 < largest < math.inf:
            exponent = math.floor(math.log2(_MOST_FLOAT16 / _HEADROOM) - math.log2(largest))
            self.scale = 2.0 ** min(exponent, _MOST_EXPONENT)


class TopK(Compression):
    """The ``ratio`` of elements that are largest by amount, of each rank; the others wait for the next step."""

    def __init__(self, ratio: float = 0.01) -> None:
        if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0 < ratio <= 1:
            raise ValueError(f"TopK: ratio={ratio!r}: give a share of the elements, above 0 and at most 1")
        self.ratio = float(ratio)

    def compressor(self, flat: Tensor, *of_bucket: Any) -> Compressor | None:
        """For buckets of floating-point numbers."""
        return _TopK(self.ratio, flat, *of_bucket) if flat.is_floating_point() and flat.numel() else None


class _TopK(Compressor):
    """The elements that are not sent stay in ``left``, and are added in the next step."""

    def __init__(self, ratio: float, *of_bucket: Any) -> None:
        super().__init__(*of_bucket)
        self.count = max(1, round(ratio * self.flat.numel()))
        self.left = torch.zeros_like(self.flat)

    def restart(self) -> None:
        self.left.zero_()

    def launch(self, op: str) -> list[Handle[Any]]:
        self.left += self.flat
        indices = indices_of_largest(self.left.abs(), self.count)
        values = self.left[indices]
        self.left[indices] = 0
        dtype = torch.int32 if self.flat.numel() < 2**31 else torch.int64
        self.handles = [verbs.allgather_async(x, comm=self.comm) for x in (indices.to(dtype), values)]
        return self.handles

    def finish(self, op: str) -> None:
        indices, values = (handle.wait() for handle in self.handles)
        if values.numel() != self.count * self.comm.size:
            raise RanksDisagree(
                f"TopK: this rank takes {self.count} elements, all {values.numel()}: give all ranks the same ratio"
            )
        self.flat.zero_()
        # Rank by rank: a rank's indices differ from each other, so that the order of additions is the same everywhere.
        for index, value in zip(indices.split(self.count), values.split(self.count), strict=True):
            self.flat.index_add_(0, index, value)
        if op == "avg":
            self.flat /= self.comm.size
        if not is_finite(self.flat):  # the same on all ranks: no such element is left
            self.left.nan_to_num_(0.0, 0.0, 0.0)


class PowerSGD(Compression):
    """Each gradient of at least two dimensions as a product of two matrices of rank ``rank``, where that is smaller."""

    def __init__(self, rank: int = 1) -> None:
        self.rank = check_count("PowerSGD: rank", rank, 1)

    def compressor(self, flat: Tensor, views: Sequence[Tensor], *of_bucket: Any) -> Compressor | None:
        """For buckets of float32 or float64 with such a gradient."""
        is_smaller = flat.dtype in _WIDE and any(_is_smaller(self.rank, view) for view in views)
        return _PowerSGD(self.rank, flat, views, *of_bucket) if is_smaller else None


class _PowerSGD(Compressor):
    """For a matrix M: P = M Q, averaged over the ranks and made orthogonal; Q = M^T P, averaged; M becomes P Q^T.

    Q of a step is where the next one begins, so that P comes to span what the gradients have in common.
    """

    def __init__(self, rank: int, *of_bucket: Any) -> None:
        super().__init__(*of_bucket)
        self.rank = rank
        self.low_rank = [view for view in self.views if _is_smaller(rank, view)]  # these travel as two matrices
        self.others = [view for view in self.views if not _is_smaller(rank, view)]  # these travel as they are
        self.restart()

    def restart(self) -> None:
        generator = torch.Generator().manual_seed(0)  # the same start on all ranks
        shapes = [(view.numel() // len(view), self.rank) for view in self.low_rank]
        self.qs = [torch.randn(shape, generator=generator, device="cpu").to(self.flat) for shape in shapes]
        self.lefts = [torch.zeros_like(view) for view in self.low_rank]

    def launch(self, op: str) -> list[Handle[Any]]:
        for view, left in zip(self.low_rank, self.lefts, strict=True):
            view += left
            left.copy_(view)
        # The strides of a gradient, such as channels_last, may leave no view as a matrix: then this is a copy.
        self.matrices = [view.flatten(1) for view in self.low_rank]
        products = [matrix @ q for matrix, q in zip(self.matrices, self.qs, strict=True)]
        self.wire = torch.cat([x.reshape(-1) for x in (*products, *self.others)])
        return [verbs.allreduce_async(self.wire, op="avg", comm=self.comm)]

    def finish(self, op: str) -> None:
        # The first reduction has brought P, and the parts that go as they are.
        counts = [self.rank * matrix.shape[0] for matrix in self.matrices] + [x.numel() for x in self.others]
        reduced = torch.split(self.wire, counts)
        ps = [torch.linalg.qr(product.view(-1, self.rank)).Q for product in reduced[: len(self.matrices)]]
        # The second one brings Q. Not matrix.T @ p, for which torch on the CPU takes 28 times as long.
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
        # The part of this rank's gradients that the result lacks. A step that overflowed leaves nothing.
        for left, view in zip(self.lefts, self.low_rank, strict=True):
            left -= view
        if not is_finite(wire):  # the same on all ranks
            self.restart()
        if op == "sum":
            self.flat *= self.comm.size


def _is_smaller(rank: int, gradient: Tensor) -> bool:
    """Whether two matrices of a rank have fewer elements than a gradient."""
    rows = len(gradient) if gradient.dim() > 1 else 0
    return rows > 0 and rank * (rows + gradient.numel() // rows) < gradient.numel()


def check_compression(compression: object) -> None:
    """TypeError unless it is a compression, or None."""
    if compression is not None and not isinstance(compression, Compression):
        raise TypeError(f"compression={compression!r}: give an object such as optim.compression.BF16(), or None")
