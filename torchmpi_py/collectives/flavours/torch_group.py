"""Flavours ``gloo`` and ``nccl``: collectives of torch.distributed.

``gloo`` serves CPU tensors, to compare the other flavours with. ``nccl`` serves GPU tensors, if each rank has its own
GPU. Each flavour has its own process groups, one per channel, made on first use, so that a program's use of
torch.distributed is not affected. ``rendezvous.py`` opens a store, through which the library connects the ranks. Calls
of NCCL return after they have put their work on the current stream; calls of gloo return when the work is done.

A library supports few dtypes and few ops. Values travel in the form that ``reductions.py`` gives them, but 16-bit
integers as 32 bits, and complex numbers as pairs. Scratch memory is as long as the tensor. For other reductions, such
as products of complex numbers and, with NCCL, bitwise ops, the ranks gather bytes and reduce here, in rank order. Data
that is only moved travels as bytes. Each element is reduced on one rank and passed on, or by all ranks in the same
order, so all ranks get the same bits. Empty tensors are not sent.
"""

from __future__ import annotations

import datetime as dt
import functools
from typing import Any, ClassVar

import torch
from torch import Tensor, distributed

from torchmpi_py.collectives.flavour import Flavour, Sizes
from torchmpi_py.collectives.flavours import rendezvous
from torchmpi_py.collectives.reductions import Kernel, kernel
from torchmpi_py.core.channels import Channel
from torchmpi_py.core.mpi_api import MPI
from torchmpi_py.errors import CommunicatorError
from torchmpi_py.memory import gpus

_WIDER = {torch.int16: torch.int32}
_ARITHMETIC = {"sum": "SUM", "prod": "PRODUCT", "min": "MIN", "max": "MAX"}
_BITWISE = {"band": "BAND", "bor": "BOR", "bxor": "BXOR"}
_OPERATION_TIMEOUT = dt.timedelta(minutes=30)  # torch's own default for gloo, because other ranks may be computing
_OPTIONS = {
    "_allgather_base": "AllgatherOptions",
    "_reduce_scatter_base": "ReduceScatterOptions",
    "allreduce": "AllreduceOptions",
    "alltoall_base": "AllToAllOptions",
    "broadcast": "BroadcastOptions",
    "gather": "GatherOptions",
    "reduce": "ReduceOptions",
    "scatter": "ScatterOptions",
}


class ProcessGroupOfTorch:
    """A flavour's process group of the ranks of a channel, kept with the channel; its construction is collective."""

    def __init__(self, channel: Channel, flavour: TorchGroup) -> None:
        self._mpi, self._name, self._close = channel.mpi, flavour.name, flavour.close
        self._store = rendezvous.open_store(channel, f"flavour {flavour.name}")
        what = f"flavour {flavour.name}: cannot connect the ranks"
        connect = functools.partial(flavour.connect, self._store, channel)
        self._group = rendezvous.connect_all(channel.mpi, what, connect, flavour.remedy)

    def run(self, call: str, *arguments: object, **fields: object) -> None:
        """Carry out the collective ``call`` of torch.distributed, whose options have these ``fields``."""
        options = getattr(distributed.distributed_c10d, _OPTIONS[call])()
        if hasattr(options, "asyncOp"):  # without this, and in older torch, NCCL uses its own stream
            options.asyncOp = False
        for field, value in fields.items():
            setattr(options, field, value)
        try:
            work = getattr(self._group, call)(*arguments, options)
            if work is not None:  # work on the current stream returns None, and needs no wait
                work.wait()
        except RuntimeError as error:
            raise CommunicatorError(
                f"{self._name}'s {call} failed: {error}. Did every rank call it with the same sizes?"
            ) from error

    def free(self) -> None:
        """End the threads and close the connections when no rank uses them any more; rank 0 closes the store last."""
        self._close(self._group, self._mpi)
        self._mpi.Barrier()
        self._group = None
        if self._mpi.rank != 0:
            self._store = None
        self._mpi.Barrier()
        self._store = None


class TorchGroup(Flavour):
    """The common base of flavours gloo and nccl."""

    ops: ClassVar[dict[str, str]]
    """The ops that the library supports on real numbers of 8, 32 and 64 bits, with the library's names."""
    remedy: ClassVar[str]
    """The advice to the user if ``connect`` fails."""

    def connect(self, store: Any, channel: Channel) -> Any:
        """Return the ProcessGroup, or Backend, of torch.distributed for the ranks of the channel."""
        raise NotImplementedError

    def close(self, group: Any, comm: MPI.Comm) -> None:
        """Prepare the process group for its end. Collective; the default does nothing."""

    def broadcast(self, channel: Channel, x: Tensor, root: int) -> None:
        if x.numel():
            self._group(channel).run("broadcast", [_bytes(x)], rootRank=root)

    def allreduce(self, channel: Channel, source: Tensor, destination: Tensor, op: str) -> None:
        self._reduce(channel, source, destination, op)

    def reduce(self, channel: Channel, source: Tensor, destination: Tensor, op: str, root: int) -> None:
        self._reduce(channel, source, destination if channel.rank == root else None, op, root)

    def _reduce(
        self, channel: Channel, source: Tensor, destination: Tensor | None, op: str, root: int | None = None
    ) -> None:
        """Reduce to ``root``, or to all ranks (None); ``destination`` is None on ranks that get no result."""
        how, x, out = kernel(source.dtype, op), source.view(-1), None if destination is None else destination.view(-1)
        if not x.numel():
            return
        if self._knows(how):
            # A rank without a result needs memory too, because gloo writes its partial sums there.
            total, reduce_op = _start(how, x, torch.empty_like(x) if out is None else out), self._op(how)
            if root is None:
                self._group(channel).run("allreduce", [_pairs(total)], reduceOp=reduce_op)
            else:
                self._group(channel).run("reduce", [_pairs(total)], reduceOp=reduce_op, rootRank=root)
            if out is not None:
                _finish(how, total, channel.size, out)
            return
        parts, sizes = x.new_empty((0 if out is None else channel.size, x.numel())), Sizes.equal(x, channel.size)
        if root is None:
            self.allgather(channel, x, parts, sizes)
        else:
            self.gather(channel, x, None if out is None else parts, root, sizes)
        if out is not None:
            how.reduce(list(parts), out)

    def reduce_scatter(self, channel: Channel, source: Tensor, destination: Tensor, op: str) -> None:
        parts = torch.empty_like(source)
        self.alltoall(channel, source, parts)
        kernel(source.dtype, op).reduce(list(parts.view(channel.size, -1)), destination.view(-1))

    def alltoall(self, channel: Channel, source: Tensor, destination: Tensor) -> None:
        if source.numel():
            self._group(channel).run("alltoall_base", _bytes(destination), _bytes(source), [], [])

    def scatter(self, channel: Channel, source: Tensor, destination: Tensor, root: int) -> None:
        if source.numel():
            parts = [[_bytes(row) for row in source.view(channel.size, -1)]] if channel.rank == root else []
            self._group(channel).run("scatter", [_bytes(destination)], parts, rootRank=root)

    def allgather(self, channel: Channel, x: Tensor, out: Tensor, sizes: Sizes) -> None:
        if sizes.are_equal and x.numel():
            self._group(channel).run("_allgather_base", _bytes(out), _bytes(x))
        elif out.numel():
            parts = torch.split(_bytes(out), sizes.num_bytes)
            parts[channel.rank].copy_(_bytes(x))
            for root, part in enumerate(parts):
                if part.numel():
                    self._group(channel).run("broadcast", [part], rootRank=root)

    def gather(self, channel: Channel, x: Tensor, out: Tensor | None, root: int, sizes: Sizes) -> None:
        if sizes.are_equal and x.numel():
            parts = [] if out is None else [list(torch.split(_bytes(out), sizes.num_bytes))]
            self._group(channel).run("gather", parts, [_bytes(x)], rootRank=root)
        elif any(sizes.num_bytes):  # alltoall accepts unequal parts; only the parts for root are not empty
            received = x.new_empty(0, dtype=torch.uint8) if out is None else _bytes(out)
            expected = [0] * channel.size if out is None else sizes.num_bytes
            sent = [x.nbytes if rank == root else 0 for rank in range(channel.size)]
            self._group(channel).run("alltoall_base", received, _bytes(x), expected, sent)

    def _group(self, channel: Channel) -> ProcessGroupOfTorch:
        """Return the process group of a channel. Collective at the first call."""
        return channel.keep(self.name, lambda made: ProcessGroupOfTorch(made, self))

    def _knows(self, how: Kernel) -> bool:
        """Return whether the library supports the reduction ``how``."""
        return how.op in self.ops and not (how.dtype.is_complex and how.op == "prod")

    def _op(self, how: Kernel) -> object:
        """Return torch's op for the reduction ``how``."""
        return getattr(distributed.ReduceOp, self.ops[how.op])


class Gloo(TorchGroup):
    """torch.distributed's gloo. Old versions have no reduce_scatter, so each rank gets its slices by alltoall."""

    name = "gloo"
    devices = frozenset({"cpu"})
    ops = _ARITHMETIC | _BITWISE
    remedy = rendezvous.REMEDY

    def connect(self, store: Any, channel: Channel) -> Any:
        """Connect the ranks over TCP."""
        factory: Any = distributed.ProcessGroupGloo
        options = factory._Options()
        options._timeout = _OPERATION_TIMEOUT
        options._devices = [factory.create_device(interface=name) for name in rendezvous.interfaces()]
        address = rendezvous.own_address(channel.num_nodes)
        options._devices = options._devices or [factory.create_device(hostname=address)]
        return factory(store, channel.rank, channel.size, options)

    def missing(self, device: str) -> str:
        has_gloo = distributed.is_available() and distributed.is_gloo_available()
        return "" if has_gloo else "this torch was built without gloo; install one from pip"


class Nccl(TorchGroup):
    """torch.distributed's NCCL. Results are ordered on the current stream; the host does not wait for them."""

    name = "nccl"
    devices = frozenset({"cuda"})
    ops = _ARITHMETIC
    remedy = "Set NCCL_DEBUG=INFO to see NCCL's own messages"

    def connect(self, store: Any, channel: Channel) -> Any:
        """Make a group of ranks that each have a GPU of their own; NCCL connects them in the first call."""
        factory: Any = distributed.ProcessGroupNCCL
        options = factory.Options()
        options._timeout = _OPERATION_TIMEOUT
        return factory(store, channel.rank, channel.size, options)

    def close(self, group: Any, comm: MPI.Comm) -> None:
        """Close NCCL's connections, after all GPUs have finished: older torch aborts what still runs."""
        torch.cuda.synchronize()
        comm.Barrier()
        shut_down = getattr(group, "shutdown", None) or getattr(group, "_shutdown", None)  # torch 2.4, 2.5
        if shut_down is not None:
            shut_down()

    def missing(self, device: str) -> str:
        if not (distributed.is_available() and distributed.is_nccl_available()):
            return "this torch was built without NCCL; install one with CUDA from pip"
        if not torch.cuda.is_available():
            return f"torch {torch.__version__} sees no CUDA device"
        return "" if gpus.table() is not None else "no GPU is assigned to the ranks; call mpi.start(with_cuda=True)"

    def refuses(self, channel: Channel) -> str:
        table, ranks_of = gpus.table(), dict[str, list[int]]()
        if table is None:
            return ""  # ``missing`` says why
        for rank, place in enumerate(channel.places):
            ranks_of.setdefault(table[place], []).append(rank)
        for gpu, ranks in ranks_of.items():
            if len(ranks) > 1:
                named = f"{', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
                return f"ranks {named} share {gpu}; NCCL needs one GPU per rank, flavours cudaipc and staged do not"
        return ""

    def reduce_scatter(self, channel: Channel, source: Tensor, destination: Tensor, op: str) -> None:
        how, x, out = kernel(source.dtype, op), source.view(-1), destination.view(-1)
        if not self._knows(how):
            super().reduce_scatter(channel, source, destination, op)
        elif x.numel():
            wire = how.partial(x).to(_wire_dtype(how))
            total = out.view(wire.dtype) if _is_as_it_lies(how) else wire.new_empty(out.numel())
            self._group(channel).run("_reduce_scatter_base", _pairs(total), _pairs(wire), reduceOp=self._op(how))
            _finish(how, total, channel.size, out)


def _wire_dtype(how: Kernel) -> torch.dtype:
    """Return the dtype in which partial results travel."""
    return _WIDER.get(how.dtype, how.dtype)


def _is_as_it_lies(how: Kernel) -> bool:
    """Return whether the library can reduce the tensor's memory without a conversion."""
    return how.is_plain and how.dtype not in _WIDER


def _start(how: Kernel, x: Tensor, out: Tensor) -> Tensor:
    """Return the tensor for the library to reduce in place: ``x`` in its wire form, in ``out`` if it needs no other."""
    if not _is_as_it_lies(how):
        return how.partial(x).to(_wire_dtype(how))
    if out.data_ptr() != x.data_ptr():
        out.copy_(x)
    return out.view(how.dtype)


def _finish(how: Kernel, total: Tensor, num_ranks: int, out: Tensor) -> None:
    """Convert the library's result, and write it to ``out`` if it is not there."""
    result = how.result(total.to(how.dtype), num_ranks, out.dtype)
    if result.data_ptr() != out.data_ptr():
        out.copy_(result)


def _pairs(x: Tensor) -> Tensor:
    """Return complex numbers as pairs of real ones, and other tensors unchanged."""
    return torch.view_as_real(x).view(-1) if x.is_complex() else x


def _bytes(x: Tensor) -> Tensor:
    """Return the bytes of a flat tensor."""
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)  # one element is flat with any stride
