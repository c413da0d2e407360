"""Flavour ``gloo``: collectives of torch.distributed, as a peer to measure the others against.

The process groups are the flavour's own, one per channel, so that a program's own use of torch.distributed is not
touched. They are made on first use: rank 0 opens a store on a free port, and MPI tells the others where it is.

Gloo reduces few dtypes with few ops. Values travel in the form that ``reductions.py`` gives them, 16-bit integers as 32
and complex numbers as pairs; scratch is as long as the tensor. A product of complex numbers, which gloo cannot do, is
gathered and reduced here. So is reduce_scatter, of which old versions of torch have none: each rank gets its slices by
alltoall. Gloo reduces each element on one rank and passes the result on, so all ranks get the same bits.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed

from torchmpi_py.channels import Channel
from torchmpi_py.collectives import rendezvous
from torchmpi_py.collectives.flavour import Flavour
from torchmpi_py.collectives.gathering import Sizes
from torchmpi_py.collectives.reductions import Kernel, kernel
from torchmpi_py.errors import CommunicatorError

_OPERATION_TIMEOUT = dt.timedelta(minutes=30)  # torch's own default: the other ranks may be computing
_WIDER = {torch.int16: torch.int32}
_OPS: dict[Callable[..., Tensor], str] = {
    torch.add: "SUM",
    torch.mul: "PRODUCT",
    torch.minimum: "MIN",
    torch.maximum: "MAX",
    torch.bitwise_and: "BAND",
    torch.bitwise_or: "BOR",
    torch.bitwise_xor: "BXOR",
}


_OPTIONS = {
    "allgather": "AllgatherOptions",
    "allreduce": "AllreduceOptions",
    "alltoall_base": "AllToAllOptions",
    "broadcast": "BroadcastOptions",
    "gather": "GatherOptions",
    "reduce": "ReduceOptions",
    "scatter": "ScatterOptions",
}


class Gloo(Flavour):
    """torch.distributed's gloo."""

    name = "gloo"
    devices = frozenset({"cpu"})

    def missing(self, device: str) -> str:
        if not distributed.is_available():
            return "this torch was built without torch.distributed; install one from pip"
        return "" if distributed.is_gloo_available() else "this torch was built without gloo; install one from pip"

    def broadcast(self, channel: Channel, x: Tensor, root: int) -> None:
        if x.numel():
            _group(channel).run("broadcast", [_bytes(x)], rootRank=root)

    def allreduce(self, channel: Channel, source: Tensor, destination: Tensor, op: str) -> None:
        how, x, out = kernel(source.dtype, op), source.view(-1), destination.view(-1)
        if not x.numel():
            return
        if _is_known(how):
            total = _start(how, x, out)
            _group(channel).run("allreduce", [_pairs(total)], reduceOp=_op(how))
            _finish(how, total, channel.size, out)
        else:
            parts = x.new_empty((channel.size, x.numel()))
            _group(channel).run("allgather", [_rows(parts)], [_bytes(x)])
            how.reduce(list(parts), out)

    def reduce(self, channel: Channel, source: Tensor, destination: Tensor, op: str, root: int) -> None:
        how, x, is_root = kernel(source.dtype, op), source.view(-1), channel.rank == root
        if not x.numel():
            return
        if _is_known(how):
            out = destination.view(-1) if is_root else torch.empty_like(x)  # gloo writes its partial sums everywhere
            total = _start(how, x, out)
            _group(channel).run("reduce", [_pairs(total)], reduceOp=_op(how), rootRank=root)
            if is_root:
                _finish(how, total, channel.size, out)
        else:
            parts = x.new_empty((channel.size if is_root else 0, x.numel()))
            _group(channel).run("gather", [_rows(parts)] if is_root else [], [_bytes(x)], rootRank=root)
            if is_root:
                how.reduce(list(parts), destination.view(-1))

    def reduce_scatter(self, channel: Channel, source: Tensor, destination: Tensor, op: str) -> None:
        parts = torch.empty_like(source)
        self.alltoall(channel, source, parts)
        kernel(source.dtype, op).reduce(list(parts.view(channel.size, -1)), destination.view(-1))

    def alltoall(self, channel: Channel, source: Tensor, destination: Tensor) -> None:
        if source.numel():
            _group(channel).run("alltoall_base", _bytes(destination), _bytes(source), [], [])

    def scatter(self, channel: Channel, source: Tensor, destination: Tensor, root: int) -> None:
        if source.numel():
            parts = [_rows(source.view(channel.size, -1))] if channel.rank == root else []
            _group(channel).run("scatter", [_bytes(destination)], parts, rootRank=root)

    def allgather(self, channel: Channel, x: Tensor, out: Tensor, sizes: Sizes) -> None:
        parts = list(torch.split(_bytes(out), sizes.num_bytes))
        if sizes.are_equal and x.numel():
            _group(channel).run("allgather", [parts], [_bytes(x)])
        elif out.numel():
            parts[channel.rank].copy_(_bytes(x))
            for root, part in enumerate(parts):
                if part.numel():
                    _group(channel).run("broadcast", [part], rootRank=root)

    def gather(self, channel: Channel, x: Tensor, out: Tensor | None, root: int, sizes: Sizes) -> None:
        if sizes.are_equal and x.numel():
            parts = [] if out is None else [list(torch.split(_bytes(out), sizes.num_bytes))]
            _group(channel).run("gather", parts, [_bytes(x)], rootRank=root)
        elif any(sizes.num_bytes):  # alltoall takes unequal parts; but for root's all are empty
            received = x.new_empty(0, dtype=torch.uint8) if out is None else _bytes(out)
            expected = [0] * channel.size if out is None else sizes.num_bytes
            sent = [x.nbytes if rank == root else 0 for rank in range(channel.size)]
            _group(channel).run("alltoall_base", received, _bytes(x), expected, sent)


class GlooGroup:
    """A process group of the ranks of a channel, kept with the channel. Gloo wants tensors that are 1-D, not empty."""

    def __init__(self, channel: Channel) -> None:
        self._mpi = channel.mpi
        address = rendezvous.own_address(channel.num_nodes)
        self._store = rendezvous.open_store(channel, "flavour gloo")

        def connect() -> Any:
            factory: Any = distributed.ProcessGroupGloo
            options = factory._Options()
            options._timeout = _OPERATION_TIMEOUT
            options._devices = [factory.create_device(interface=name) for name in rendezvous.interfaces()]
            options._devices = options._devices or [factory.create_device(hostname=address)]
            return factory(self._store, channel.rank, channel.size, options)

        what = f"flavour gloo: cannot connect with the other ranks from {address}"
        self._group = rendezvous.together(channel.mpi, what, connect)

    def run(self, call: str, *arguments: object, **fields: object) -> None:
        """Carry out a collective of torch.distributed with options that have these fields."""
        options = getattr(distributed.distributed_c10d, _OPTIONS[call])()
        for field, value in fields.items():
            setattr(options, field, value)
        try:
            getattr(self._group, call)(*arguments, options).wait()
        except RuntimeError as error:
            raise CommunicatorError(
                f"gloo's {call} failed: {error}. Did every rank call it with the same sizes?"
            ) from error

    def free(self) -> None:
        """End its threads and close its connections when no rank uses them any more; the store, on rank 0, is last."""
        self._mpi.Barrier()
        self._group = None
        if self._mpi.rank != 0:
            self._store = None
        self._mpi.Barrier()
        self._store = None


def _group(channel: Channel) -> GlooGroup:
    return channel.keep(GlooGroup, GlooGroup)


def _is_known(how: Kernel) -> bool:
    """Whether gloo can do it."""
    return not (how.dtype.is_complex and how.combine is torch.mul)


def _op(how: Kernel) -> object:
    return getattr(distributed.ReduceOp, _OPS[how.combine])


def _start(how: Kernel, x: Tensor, out: Tensor) -> Tensor:
    """What gloo reduces in place: ``x`` in the form for it, in the memory of ``out`` where that has this form."""
    wire_dtype = _WIDER.get(how.dtype, how.dtype)
    if not how.is_plain or wire_dtype != how.dtype:
        return how.partial(x).to(wire_dtype)
    if out.data_ptr() != x.data_ptr():
        out.copy_(x)
    return out.view(wire_dtype)


def _finish(how: Kernel, total: Tensor, num_ranks: int, out: Tensor) -> None:
    result = how.result(total.to(how.dtype), num_ranks, out.dtype)
    if result.data_ptr() != out.data_ptr():
        out.copy_(result)


def _pairs(x: Tensor) -> Tensor:
    return torch.view_as_real(x).view(-1) if x.is_complex() else x


def _bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)


def _rows(x: Tensor) -> list[Tensor]:
    return [_bytes(row) for row in x]
