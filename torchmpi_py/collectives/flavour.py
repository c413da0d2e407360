"""The contract of a flavour, which is an implementation of the collectives.

A flavour has a name, a set of device types, and one blocking method per collective that it implements. A collective
whose method a flavour does not override counts as unimplemented. Callers check the arguments first: tensors are flat,
roots and ops are valid, and no other thread uses the ``channel``. A new flavour needs a file and a row in
``registry.py``.

In ``gather`` and ``allgather``, ranks may pass different numbers of rows. The ranks first exchange their ``Sizes``, and
check that the dtypes and all other dimensions agree. Only then is the size of the result known. The selector uses this
size to choose the flavour that moves the data (``Gathering``).
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
"""An iterator that carries out a collective in parts.

Each item is a list of MPI requests. They must be complete before the iterator is resumed.
"""


class Flavour(Carrier):
    """Base class of all flavours.

    ``x``, ``source`` and ``destination`` are flat tensors. The methods write results into ``destination``, ``out``, or
    ``x`` if there is no other tensor.
    """

    devices: ClassVar[frozenset[str]]
    num_trial_calls: ClassVar[int] = 0
    """Number of identical calls after which the flavour has found the fastest of its methods for such calls."""
    scatters_in_place: ClassVar[bool] = False
    """Whether the destination of a reduce_scatter may be this rank's slice of the source."""

    def missing(self, device: str) -> str:
        """Return why this flavour cannot serve a device type here, with a remedy, or "" if it can.

        ``device`` is one of ``devices``. The result must be the same on all ranks.
        """
        return ""

    def refuses(self, channel: Channel) -> str:
        """Return why this flavour cannot serve the ranks of a channel, or "" if it can.

        The result must be the same on all ranks.
        """
        return ""

    def implements(self, verb: str) -> bool:
        """Return whether this flavour implements the collective ``verb``."""
        return getattr(type(self), verb, None) is not getattr(Flavour, verb, None)

    def walk(self, verb: str, channel: Channel, *arguments: Any) -> Walk:
        """Carry out a collective in parts, between which the caller may do other work.

        The default implementation has a single part. All ranks of the channel must start and resume their walks in the
        same order.
        """
        getattr(self, verb)(channel, *arguments)
        return iter(())

    def broadcast(self, channel: Channel, x: Tensor, root: int) -> None:
        """Overwrite ``x`` with the ``x`` of ``root``."""
        raise NotImplementedError

    def reduce(self, channel: Channel, source: Tensor, destination: Tensor, op: str, root: int) -> None:
        """Write the reduction of all ranks' ``source`` into ``destination`` on ``root``; other ranks write nothing."""
        raise NotImplementedError

    def allreduce(self, channel: Channel, source: Tensor, destination: Tensor, op: str) -> None:
        """Write the reduction of all ranks' ``source`` into ``destination``.

        ``source`` and ``destination`` are the same tensor or do not overlap.
        """
        raise NotImplementedError

    def allgather(self, channel: Channel, x: Tensor, out: Tensor, sizes: Sizes) -> None:
        """Write the ``x`` of all ranks into ``out`` along dim 0; ``sizes`` has the number of rows of each rank."""
        raise NotImplementedError

    def reduce_scatter(self, channel: Channel, source: Tensor, destination: Tensor, op: str) -> None:
        """Write this rank's slice, along dim 0, of the reduction of all ranks' ``source`` into ``destination``."""
        raise NotImplementedError

    def alltoall(self, channel: Channel, source: Tensor, destination: Tensor) -> None:
        """Write this rank's slice of the ``source`` of rank s into slice s of ``destination``, for every s."""
        raise NotImplementedError

    def gather(self, channel: Channel, x: Tensor, out: Tensor | None, root: int, sizes: Sizes) -> None:
        """Write the ``x`` of all ranks into ``out`` on ``root``, along dim 0; ``out`` is None on other ranks."""
        raise NotImplementedError

    def scatter(self, channel: Channel, source: Tensor, destination: Tensor, root: int) -> None:
        """Write this rank's slice of the ``source`` of ``root`` into ``destination``."""
        raise NotImplementedError

    def sendreceive(self, channel: Channel, x: Tensor, out: Tensor, source: int, destination: int) -> None:
        """Send ``x`` to rank ``destination``, and overwrite ``out`` with the tensor that rank ``source`` sends."""
        raise NotImplementedError

    def send(self, channel: Channel, x: Tensor, destination: int) -> None:
        """Send ``x`` to rank ``destination``."""
        raise NotImplementedError

    def recv(self, channel: Channel, x: Tensor, source: int) -> None:
        """Overwrite ``x`` with the tensor that rank ``source`` sends."""
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
    """The sizes on each rank: number of rows, number of bytes, and a checksum of the shape of ``out`` (0 if None)."""

    rows: list[int]
    num_bytes: list[int]
    outs: list[int]

    @property
    def are_equal(self) -> bool:
        """Whether all ranks pass the same number of rows."""
        return len(set(self.rows)) == 1

    def output_shape(self, verb: str, x: Tensor, out: Tensor | None, writers: Sequence[int]) -> torch.Size:
        """Return the shape of the result.

        ``writers`` lists the ranks that get the result. Raise ValueError on every rank if ``out`` has a different shape
        on one of them.
        """
        shape = torch.Size((sum(self.rows), *x.shape[1:]))
        wrong = [rank for rank in writers if self.outs[rank] not in (0, _code(shape))]
        if wrong:
            own = "" if out is None else f" (on this rank its shape is {tuple(out.shape)})"
            raise ValueError(
                f"{verb}: the ranks pass {self.rows} rows, so out must have shape {tuple(shape)}; "
                f"out has a different shape on rank {', '.join(map(str, wrong))}{own}"
            )
        return shape

    @classmethod
    def equal(cls, x: Tensor, size: int) -> Sizes:
        """Return the sizes for ``size`` ranks that each pass a tensor of the size of ``x``."""
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
        """Split the result ``out`` into one view per rank; each view covers the rows of its rank."""
        return torch.split(out, self.rows)


class Gathering(Carrier):
    """A stand-in for a flavour. It exchanges the ranks' sizes, and then calls the flavour that fits the result.

    ``choose`` gets the size of the result in bytes, and returns this flavour.
    """

    def __init__(self, name: str, choose: Callable[[int], Flavour]) -> None:
        self.name = name
        self.choose = choose

    def allgather(self, channel: Channel, x: Tensor, out: Tensor | None) -> Tensor:
        """Return the ``x`` of all ranks, concatenated along dim 0, in ``out`` or in a new tensor."""
        sizes = exchange_sizes(channel.mpi, x, out)
        shape = sizes.output_shape("allgather", x, out, writers=range(channel.size))
        result = x.new_empty(shape) if out is None else out
        x = copy_if_overlapping(x, result, sizes.split(result)[channel.rank])
        self.choose(sum(sizes.num_bytes)).allgather(channel, x, result, sizes)
        return result

    def gather(self, channel: Channel, x: Tensor, out: Tensor | None, root: int) -> Tensor | None:
        """Return, on ``root``, the ``x`` of all ranks, concatenated along dim 0; on other ranks, return None."""
        sizes = exchange_sizes(channel.mpi, x, out)
        shape = sizes.output_shape("gather", x, out, writers=(root,))
        result = None if channel.rank != root else x.new_empty(shape) if out is None else out
        if result is not None:
            x = copy_if_overlapping(x, result, sizes.split(result)[root])
        self.choose(sum(sizes.num_bytes)).gather(channel, x, result, root, sizes)
        return result


def exchange_sizes(comm: MPI.Comm, x: Tensor, out: Tensor | None) -> Sizes:
    """Return the sizes of ``x`` and ``out`` on all ranks of ``comm``. ``x`` has at least one dimension.

    Every rank of ``comm`` must make this call, which performs an allgather. Raise RanksDisagree on every rank if dtypes
    or dimensions other than dim 0 differ.
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
            f"gather or allgather, on rank {comm.rank} of {comm.size}: only dim 0 may differ between ranks, but "
            + ", ".join(f"rank {rank} passes {text}" for rank, text in enumerate(kinds_in_words))
        )
    return Sizes(rows, num_bytes, outs)


def _code(*parts: object) -> int:
    """Return a checksum of a shape or dtype for the exchange. It is never 0."""
    return zlib.crc32(repr(parts).encode()) + 1
