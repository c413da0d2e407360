"""Flavours ``gloo`` and ``nccl``: collectives of torch.distributed.

``gloo`` serves CPU tensors, mainly for comparison with the other flavours. ``nccl`` serves GPU tensors if each rank has
its own GPU. The first use of a flavour on a channel creates a process group for this channel, so that a program's own
use of torch.distributed is not affected. ``rendezvous.py`` opens a store, through which the library connects the ranks.
Calls of NCCL return after they have queued their work on the current stream; calls of gloo return when the work is
done.

Both libraries support only some dtypes and ops. Values travel in the encoding of ``reductions.py``, except that 16-bit
integers travel as 32 bits, and complex numbers as pairs of real numbers. These conversions need scratch memory for the
whole tensor. For ops that a library lacks, the ranks gather the data as bytes, and reduce it locally in rank order.
Examples are products of complex numbers, and bitwise ops with NCCL. Data that is only moved travels as bytes. All
ranks get the same bits, because each element is either reduced on one rank only, or on all ranks in the same order.
Empty tensors are not sent.
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
# The timeout is long, like torch's default for gloo, because other ranks may be computing.
_OPERATION_TIMEOUT = dt.timedelta(minutes=30)
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
    """A flavour's process group for the ranks of a channel. All ranks of the channel must construct it together.

    The channel keeps this object between calls.
    """

    def __init__(self, channel: Channel, flavour: TorchGroup) -> None:
        self._mpi, self._name, self._close = channel.mpi, flavour.name, flavour.close
        self._store = rendezvous.open_store(channel, f"flavour {flavour.name}")
        what = f"flavour {flavour.name}: cannot connect the ranks"
        connect = functools.partial(flavour.connect, self._store, channel)
        self._group = rendezvous.connect_all(channel.mpi, what, connect, flavour.remedy)

    def run(self, call: str, *arguments: object, **fields: object) -> None:
        """Carry out the collective ``call`` of torch.distributed; ``fields`` are set in the options of the call."""
        options = getattr(distributed.distributed_c10d, _OPTIONS[call])()
        if hasattr(options, "asyncOp"):  # With asyncOp, and in older versions of torch, NCCL uses its own stream.
            options.asyncOp = False
        for field, value in fields.items():
            setattr(options, field, value)
        try:
            work = getattr(self._group, call)(*arguments, options)
            if work is not None:  # For work on the current stream the call returns None, and no wait is needed.
                work.wait()
        except RuntimeError as error:
            raise CommunicatorError(
                f"flavour {self._name}: {call} failed: {error}; check that all ranks run and pass the same sizes"
            ) from error

    def free(self) -> None:
        """End the library's threads and connections. All ranks of the channel must call it.

        Rank 0 is the last rank to close the store.
        """
        self._close(self._group, self._mpi)
        self._mpi.Barrier()
        self._group = None
        if self._mpi.rank != 0:
            self._store = None
        self._mpi.Barrier()
        self._store = None


class TorchGroup(Flavour):
    """The common base of flavours ``gloo`` and ``nccl``."""

    ops: ClassVar[dict[str, str]]
    """The library's names of the ops that it supports on real numbers of 8, 32 and 64 bits."""
    remedy: ClassVar[str]
    """Advice for the user in the error message if ``connect`` fails."""

    def connect(self, store: Any, channel: Channel) -> Any:
        """Return the ProcessGroup, or Backend, of torch.distributed for the ranks of the channel."""
        raise NotImplementedError

    def close(self, group: Any, comm: MPI.Comm) -> None:
        """Shut down the process group. All ranks of ``comm`` must call it. The default does nothing."""

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
        """Reduce to ``root``, or to all ranks without ``root``; ``destination`` is None on ranks that get no result."""
        how, x, out = kernel(source.dtype, op), source.view(-1), None if destination is None else destination.view(-1)
        if not x.numel():
            return
        if self._knows(how):
            # Ranks that get no result need an output tensor too, because gloo writes partial sums into it.
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
        elif any(sizes.num_bytes):  # Unlike gather, alltoall accepts unequal parts. All parts except root's are empty.
            received = x.new_empty(0, dtype=torch.uint8) if out is None else _bytes(out)
            expected = [0] * channel.size if out is None else sizes.num_bytes
            sent = [x.nbytes if rank == root else 0 for rank in range(channel.size)]
            self._group(channel).run("alltoall_base", received, _bytes(x), expected, sent)

    def _group(self, channel: Channel) -> ProcessGroupOfTorch:
        """Return the process group of a channel. All ranks of the channel must make the first call together."""
        return channel.keep(self.name, lambda made: ProcessGroupOfTorch(made, self))

    def _knows(self, how: Kernel) -> bool:
        """Return whether the library supports the reduction ``how``."""
        return how.op in self.ops and not (how.dtype.is_complex and how.op == "prod")

    def _op(self, how: Kernel) -> object:
        """Return torch's ReduceOp for the reduction ``how``."""
        return getattr(distributed.ReduceOp, self.ops[how.op])


class Gloo(TorchGroup):
    """torch.distributed's gloo.

    A reduce_scatter is an alltoall and a local reduction, because gloo in old versions of torch has no reduce_scatter.
    """

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
        return "" if has_gloo else "this torch was built without gloo; install torch from pip, which contains gloo"


class Nccl(TorchGroup):
    """torch.distributed's NCCL. Calls queue their work on the current stream, and the host does not wait for it."""

    name = "nccl"
    devices = frozenset({"cuda"})
    ops = _ARITHMETIC
    remedy = "Set NCCL_DEBUG=INFO to see NCCL's own messages"

    def connect(self, store: Any, channel: Channel) -> Any:
        """Create the process group. NCCL connects the ranks in the first call. Each rank needs its own GPU."""
        factory: Any = distributed.ProcessGroupNCCL
        options = factory.Options()
        options._timeout = _OPERATION_TIMEOUT
        return factory(store, channel.rank, channel.size, options)

    def close(self, group: Any, comm: MPI.Comm) -> None:
        """Close NCCL's connections after all GPUs have finished.

        Without this wait, older versions of torch would abort unfinished work.
        """
        torch.cuda.synchronize()
        comm.Barrier()
        shut_down = getattr(group, "shutdown", None) or getattr(group, "_shutdown", None)  # name in torch 2.4, 2.5
        if shut_down is not None:
            shut_down()

    def missing(self, device: str) -> str:
        if not (distributed.is_available() and distributed.is_nccl_available()):
            return "this torch was built without NCCL; install torch with CUDA from pip"
        if not torch.cuda.is_available():
            return f"torch {torch.__version__} sees no CUDA device"
        return "" if gpus.table() is not None else "no GPU is assigned to the ranks; call mpi.start(with_cuda=True)"

    def refuses(self, channel: Channel) -> str:
        table, ranks_of = gpus.table(), dict[str, list[int]]()
        if table is None:
            return ""  # ``missing`` returns the reason.
        for rank, place in enumerate(channel.places):
            ranks_of.setdefault(table[place], []).append(rank)
        for gpu, ranks in ranks_of.items():
            if len(ranks) > 1:
                named = f"{', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
                return f"ranks {named} share {gpu}; NCCL needs one GPU per rank, so use flavour cudaipc or staged"
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
    """Return the dtype in which the library sends partial results."""
    return _WIDER.get(how.dtype, how.dtype)


def _is_as_it_lies(how: Kernel) -> bool:
    """Return whether the library can reduce the tensor's own memory, without a conversion."""
    return how.is_plain and how.dtype not in _WIDER


def _start(how: Kernel, x: Tensor, out: Tensor) -> Tensor:
    """Return a tensor with the values of ``x`` in their wire form, which the library then reduces in place.

    The tensor is ``out`` if no conversion is needed.
    """
    if not _is_as_it_lies(how):
        return how.partial(x).to(_wire_dtype(how))
    if out.data_ptr() != x.data_ptr():
        out.copy_(x)
    return out.view(how.dtype)


def _finish(how: Kernel, total: Tensor, num_ranks: int, out: Tensor) -> None:
    """Convert the library's result, and copy the result into ``out`` if it is in other memory."""
    result = how.result(total.to(how.dtype), num_ranks, out.dtype)
    if result.data_ptr() != out.data_ptr():
        out.copy_(result)


def _pairs(x: Tensor) -> Tensor:
    """Return a view of complex numbers as pairs of real numbers; return other tensors unchanged."""
    return torch.view_as_real(x).view(-1) if x.is_complex() else x


def _bytes(x: Tensor) -> Tensor:
    """Return a view of a flat tensor as bytes."""
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)  # A tensor of one element is flat whatever its stride.
