"""Gathers, whose ranks may bring different sizes: each tells its own first, and the rest has to agree.

Only then is the size of the result known, and by it the flavour is chosen that moves the data.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchmpi_py import streams
from torchmpi_py.collectives import wire
from torchmpi_py.errors import RanksDisagree

if TYPE_CHECKING:
    from mpi4py import MPI

    from torchmpi_py.channels import Channel
    from torchmpi_py.collectives.flavour import Flavour
    from torchmpi_py.collectives.operation import Operation
    from torchmpi_py.handles import Handle


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

    @classmethod
    def equal(cls, x: Tensor, size: int) -> Sizes:
        """Every one of ``size`` ranks brings as much as ``x``."""
        return cls([x.shape[0]] * size, [x.nbytes] * size, [0] * size)

    def of(self, ranks: Sequence[int]) -> Sizes:
        """The sizes of some ranks, in the order given."""
        return Sizes(*([column[rank] for rank in ranks] for column in (self.rows, self.num_bytes, self.outs)))

    def together(self, groups: Sequence[Sequence[int]]) -> Sizes:
        """The sizes of groups of ranks, each taken as one."""
        rows, num_bytes = (
            [sum(col[rank] for rank in group) for group in groups] for col in (self.rows, self.num_bytes)
        )
        return Sizes(rows, num_bytes, [0] * len(rows))

    def split(self, out: Tensor) -> tuple[Tensor, ...]:
        """The part of each rank in the result."""
        return torch.split(out, self.rows)


class Gathering:
    """Stands for a flavour until the sizes are known, and then leaves the work to ``choose(bytes of the result)``."""

    meets_first = False  # it tells sizes, but not the root

    def __init__(self, name: str, choose: Callable[[int], Flavour]) -> None:
        self.name = name
        self.choose = choose

    def allgather(self, channel: Channel, x: Tensor, out: Tensor | None) -> Tensor:
        """All ``x`` along dim 0, in ``out`` or a new tensor."""
        sizes = exchange_sizes(channel.mpi, x, out)
        shape = sizes.output_shape("allgather", x, out, writers=range(channel.size))
        result = x.new_empty(shape) if out is None else out
        self.choose(sum(sizes.num_bytes)).allgather(channel, x, result, sizes)
        return result

    def gather(self, channel: Channel, x: Tensor, out: Tensor | None, root: int) -> Tensor | None:
        """As ``allgather`` on root; None elsewhere."""
        sizes = exchange_sizes(channel.mpi, x, out)
        shape = sizes.output_shape("gather", x, out, writers=(root,))
        result = None if channel.rank != root else x.new_empty(shape) if out is None else out
        self.choose(sum(sizes.num_bytes)).gather(channel, x, result, root, sizes)
        return result

    def launch(self, operation: Operation[Any]) -> Handle[Any]:
        """In the communication thread: the exchange comes first."""
        return streams.submit(operation, operation.device, operation.tensors)


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
