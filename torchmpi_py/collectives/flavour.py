"""The contract of a flavour, which is an implementation of the collectives.

A flavour has a name, the device types it serves, and one blocking method per collective that it implements; a method
that is not overridden means "unimplemented". Callers check the arguments first: tensors are flat, roots and ops are
valid, and no other thread uses the ``channel``. A new flavour needs a file and a row in ``registry.py``.

In gathers each rank may bring a different number of rows. The ranks first exchange their ``Sizes``, and check that
dtypes and the other dimensions agree. Only then the size of the result is known, by which the selector chooses the
flavour that moves the data (``Gathering``).
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchmpi_py.collectives import mpi_buffers
from torchmpi_py.collectives.plan import Carrier
from torchmpi_py.core.channels import Channel
from torchmpi_py.core.mpi_api import MPI
from torchmpi_py.core.tensors import copy_if_overlapping
from torchmpi_py.errors import RanksDisagree

Requests = list["MPI.Request"]
Walk = Iterator[Requests]
"""Work in parts. A walk yields requests, which must be complete before the walk is resumed."""


class Flavour(Carrier):
    """Base class of all flavours.

    ``x``, ``source`` and ``destination`` are flat tensors. The methods write results into ``destination``, ``out``, or
    ``x`` where it is the only tensor.
    """

    devices: ClassVar[frozenset[str]]
    num_trial_calls: ClassVar[int] = 0
    """Number of calls of the same kind and size after which the flavour knows its fastest method for them."""
    scatters_in_place: ClassVar[bool] = False
    """Whether the destination of a reduce_scatter may be this rank's slice of the source."""

    def missing(self, device: str) -> str:
        """Return why this flavour cannot serve a device type (one of ``devices``) here, and what would help; or "".

        All ranks must get the same answer.
        """
        return ""

    def refuses(self, channel: Channel) -> str:
        """Return why this flavour cannot serve the ranks of a channel, or "". All ranks must get the same answer."""
        return ""

    def implements(self, verb: str) -> bool:
        """Return whether this flavour implements the collective ``verb``."""
        return getattr(type(self), verb, None) is not getattr(Flavour, verb, None)

    def walk(self, verb: str, channel: Channel, *arguments: Any) -> Walk:
        """Carry out a collective in parts, between which the caller may do other work.

        The default does all of it in one part. All ranks of the channel must start and resume their walks in the same
        order.
        """
        getattr(self, verb)(channel, *arguments)
        return iter(())

    def broadcast(self, channel: Channel, x: Tensor, root: int) -> None:
        """Overwrite ``x`` with the ``x`` of ``root``."""
        raise NotImplementedError

    def reduce(self, channel: Channel, source: Tensor, destination: Tensor, op: str, root: int) -> None:
        """Write the reduction of all ``source`` into ``destination`` on ``root``; other ranks write nothing."""
        raise NotImplementedError

    def allreduce(self, channel: Channel, source: Tensor, destination: Tensor, op: str) -> None:
        """Write the reduction of all ``source`` into ``destination``; the two are the same tensor or do not overlap."""
        raise NotImplementedError

    def allgather(self, channel: Channel, x: Tensor, out: Tensor, sizes: Sizes) -> None:
        """Write all ``x`` into ``out`` along dim 0; ``sizes`` has the number of rows of each rank."""
        raise NotImplementedError

    def reduce_scatter(self, channel: Channel, source: Tensor, destination: Tensor, op: str) -> None:
        """Write this rank's slice, along dim 0, of the reduction of all ``source`` into ``destination``."""
        raise NotImplementedError

    def alltoall(self, channel: Channel, source: Tensor, destination: Tensor) -> None:
        """Write this rank's slice of the ``source`` of rank s into slice s of ``destination``, for every s."""
        raise NotImplementedError

    def gather(self, channel: Channel, x: Tensor, out: Tensor | None, root: int, sizes: Sizes) -> None:
        """Write all ``x`` into ``out`` on ``root``, as ``allgather`` does; ``out`` is None on other ranks."""
        raise NotImplementedError

    def scatter(self, channel: Channel, source: Tensor, destination: Tensor, root: int) -> None:
        """Write this rank's slice of the ``source`` of ``root`` into ``destination``."""
        raise NotImplementedError

    def sendreceive(self, channel: Channel, x: Tensor, out: Tensor, source: int, destination: int) -> None:
        """Send ``x`` to ``destination`` and receive ``out`` from ``source``."""
        raise NotImplementedError

    def send(self, channel: Channel, x: Tensor, destination: int) -> None:
        """Send ``x`` to ``destination``."""
        raise NotImplementedError

    def recv(self, channel: Channel, x: Tensor, source: int) -> None:
        """Overwrite ``x`` with the tensor that ``source`` sends."""
        raise NotImplementedError

    def broadcast_object(self, channel: Channel, obj: object, root: int) -> Any:
        """Return the object of ``root``. The object is sent as a pickle."""
        raise NotImplementedError

    def allgather_object(self, channel: Channel, obj: object) -> list[Any]:
        """Return the objects of all ranks. The objects are sent as pickles."""
        raise NotImplementedError


def complete(walk: Iterable[Requests]) -> None:
    """Carry out all parts of a walk."""
    for requests in walk:
        wait(requests)


def wait(requests: Requests) -> None:
    """Wait for the requests that a walk has yielded."""
    if requests:
        requests[0].Waitall(requests)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of each rank: its number of rows, bytes of all rows, code of the shape of ``out`` (0 without one)."""

    rows: list[int]
    num_bytes: list[int]
    outs: list[int]

    @property
    def are_equal(self) -> bool:
        """Whether all ranks bring the same number of rows."""
        return len(set(self.rows)) == 1

    def output_shape(self, verb: str, x: Tensor, out: Tensor | None, writers: Sequence[int]) -> torch.Size:
        """Return the shape of the result.

        Raise ValueError on every rank if ``out`` has a different shape on a rank that gets the result.
        """
        shape = torch.Size((sum(self.rows), *x.shape[1:]))
        wrong = [rank for rank in writers if self.outs[rank] not in (0, _code(shape))]
        if wrong:
            own = "" if out is None else f" (here: {tuple(out.shape)})"
            raise ValueError(
                f"{verb}: the ranks pass {self.rows} rows, so the result has shape {tuple(shape)}; "
                f"out has a different shape{own} on rank {', '.join(map(str, wrong))}"
            )
        return shape

    @classmethod
    def equal(cls, x: Tensor, size: int) -> Sizes:
        """Return the sizes for ``size`` ranks that each bring as much as ``x``."""
        return cls([x.shape[0]] * size, [x.nbytes] * size, [0] * size)

    def of(self, ranks: Sequence[int]) -> Sizes:
        """Return the sizes of some ranks, in the order of ``ranks``."""
        return Sizes(*([column[rank] for rank in ranks] for column in (self.rows, self.num_bytes, self.outs)))

    def summed(self, groups: Sequence[Sequence[int]]) -> Sizes:
        """Return the sizes of groups of ranks: for each group the sum over its ranks."""
        columns = self.rows, self.num_bytes
        rows, num_bytes = ([sum(column[rank] for rank in group) for group in groups] for column in columns)
        return Sizes(rows, num_bytes, [0] * len(rows))

    def split(self, out: Tensor) -> tuple[Tensor, ...]:
        """Return one view of the result ``out`` per rank, with the rows of this rank."""
        return torch.split(out, self.rows)


class Gathering(Carrier):
    """Stand-in for a flavour that exchanges sizes, and then calls the flavour ``choose(bytes of the result)``."""

    def __init__(self, name: str, choose: Callable[[int], Flavour]) -> None:
        self.name = name
        self.choose = choose

    def allgather(self, channel: Channel, x: Tensor, out: Tensor | None) -> Tensor:
        """Return all ``x`` along dim 0, in ``out`` or in a new tensor."""
        sizes = exchange_sizes(channel.mpi, x, out)
        shape = sizes.output_shape("allgather", x, out, writers=range(channel.size))
        result = x.new_empty(shape) if out is None else out
        x = copy_if_overlapping(x, result, sizes.split(result)[channel.rank])
        self.choose(sum(sizes.num_bytes)).allgather(channel, x, result, sizes)
        return result

    def gather(self, channel: Channel, x: Tensor, out: Tensor | None, root: int) -> Tensor | None:
        """Return the ``x`` of all ranks, concatenated along dim 0 as by ``allgather``, on ``root``.

        Return None on other ranks.
        """
        sizes = exchange_sizes(channel.mpi, x, out)
        shape = sizes.output_shape("gather", x, out, writers=(root,))
        result = None if channel.rank != root else x.new_empty(shape) if out is None else out
        if result is not None:
            x = copy_if_overlapping(x, result, sizes.split(result)[root])
        self.choose(sum(sizes.num_bytes)).gather(channel, x, result, root, sizes)
        return result


def exchange_sizes(comm: MPI.Comm, x: Tensor, out: Tensor | None) -> Sizes:
    """Return the sizes of ``x``, which has at least 1 dimension, and ``out`` on all ranks of ``comm``.

    Collective: one allgather. Raise RanksDisagree on every rank if more than dim 0 differs.
    """
    mine = torch.tensor(
        [x.shape[0], x.nbytes, 0 if out is None else _code(out.shape), _code(x.dtype, x.shape[1:])], device="cpu"
    )
    table = mine.new_empty((comm.size, 4))
    comm.Allgather(mpi_buffers.raw(mine), mpi_buffers.raw(table))
    rows, num_bytes, outs, kinds = table.t().tolist()
    if len(set(kinds)) > 1:
        kinds_in_words = comm.allgather(f"{x.dtype} {tuple(x.shape)}")
        raise RanksDisagree(
            f"gathering on rank {comm.rank} of {comm.size}: only dim 0 may differ between ranks, but "
            + ", ".join(f"rank {rank} passes {text}" for rank, text in enumerate(kinds_in_words))
        )
    return Sizes(rows, num_bytes, outs)


def _code(*parts: object) -> int:
    """Return a number, never 0, that represents a shape or dtype in the exchange."""
    return zlib.crc32(repr(parts).encode()) + 1
