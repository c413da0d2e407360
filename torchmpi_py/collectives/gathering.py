"""What the ranks bring to a gather: each tells its size along dim 0, and the rest has to agree."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchmpi_py.collectives import wire
from torchmpi_py.errors import RanksDisagree

if TYPE_CHECKING:
    from mpi4py import MPI


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Per rank: the rows it brings, the bytes they take, and the code of the shape of its ``out`` (0: it has none)."""

    rows: list[int]
    num_bytes: list[int]
    outs: list[int]

    @property
    def are_equal(self) -> bool:
        return len(set(self.rows)) == 1

    def output_shape(self, verb: str, x: Tensor, out: Tensor | None, writers: Sequence[int]) -> torch.Size:
        """The shape of the result. A ValueError on every rank if ``out`` does not have it on one of the ``writers``."""
        shape = torch.Size((sum(self.rows), *x.shape[1:]))
        wrong = [rank for rank in writers if self.outs[rank] not in (0, _code(shape))]
        if wrong:
            given = "" if out is None else f" (here: {tuple(out.shape)})"
            raise ValueError(
                f"{verb}: the ranks bring {self.rows} rows, so the result has shape {tuple(shape)}; "
                f"out has another shape{given} on rank {', '.join(map(str, wrong))}"
            )
        return shape

    def split(self, out: Tensor) -> tuple[Tensor, ...]:
        """The part of each rank in the result."""
        return torch.split(out, self.rows)


def exchange_sizes(comm: MPI.Comm, x: Tensor, out: Tensor | None) -> Sizes:
    """Tell all ranks the shapes of this rank's ``x`` (of at least 1 dimension) and ``out``.

    RanksDisagree, on every rank, if more than dim 0 differs.
    """
    mine = torch.tensor(
        [x.shape[0], x.nbytes, 0 if out is None else _code(out.shape), _code(x.dtype, x.shape[1:])], device="cpu"
    )
    table = mine.new_empty((comm.size, 4))
    comm.Allgather(wire.raw(mine), wire.raw(table))
    rows, num_bytes, outs, kinds = table.t().tolist()
    if len(set(kinds)) > 1:
        brought = comm.allgather(f"{x.dtype} {tuple(x.shape)}")
        raise RanksDisagree(
            f"gathering on rank {comm.rank} of {comm.size}: only dim 0 may differ between ranks, but "
            + ", ".join(f"rank {rank} brings {text}" for rank, text in enumerate(brought))
        )
    return Sizes(rows, num_bytes, outs)


def _code(*parts: object) -> int:
    """A number that stands for a shape or dtype in the exchange; never 0."""
    return zlib.crc32(repr(parts).encode()) + 1
