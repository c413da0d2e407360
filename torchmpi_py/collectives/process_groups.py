"""Process groups of torch.distributed that belong to a flavour, apart from those of the program.

There is one per channel, made on first use: rank 0 opens a store on a free port, MPI tells the others where it is, and
the library connects the ranks. Groups take flat tensors. Those of NCCL put their work on the current stream and return;
gloo's return when the work is done.
"""

from __future__ import annotations

import datetime as dt
from typing import Any, ClassVar

import torch
from torch import distributed

from torchmpi_py.channels import Channel
from torchmpi_py.collectives import rendezvous
from torchmpi_py.errors import CommunicatorError

_OPERATION_TIMEOUT = dt.timedelta(minutes=30)  # torch's own default for gloo: the other ranks may be computing
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


class Group:
    """A process group of the ranks of a channel, kept with the channel. Making one is collective."""

    name: ClassVar[str]

    def __init__(self, channel: Channel) -> None:
        self._mpi = channel.mpi
        self._store = rendezvous.open_store(channel, f"flavour {self.name}")
        self._group = self._connect(channel)

    def _connect(self, channel: Channel) -> Any:
        """What torch.distributed calls a process group or a backend."""
        raise NotImplementedError

    def run(self, call: str, *arguments: object, **fields: object) -> None:
        """Carry out a collective of torch.distributed with options that have these fields."""
        options = getattr(distributed.distributed_c10d, _OPTIONS[call])()
        if hasattr(options, "asyncOp"):  # NCCL uses a stream of its own without it, as it does in older torch
            options.asyncOp = False
        for field, value in fields.items():
            setattr(options, field, value)
        try:
            work = getattr(self._group, call)(*arguments, options)
            if work is not None:  # what was put on the current stream needs no waiting for
                work.wait()
        except RuntimeError as error:
            raise CommunicatorError(
                f"{self.name}'s {call} failed: {error}. Did every rank call it with the same sizes?"
            ) from error

    def free(self) -> None:
        """End its threads and close its connections when no rank uses them any more; the store, on rank 0, is last."""
        self._mpi.Barrier()
        self._group = None
        if self._mpi.rank != 0:
            self._store = None
        self._mpi.Barrier()
        self._store = None


class GlooGroup(Group):
    """Ranks that gloo connects over TCP."""

    name = "gloo"

    def _connect(self, channel: Channel) -> Any:
        address = rendezvous.own_address(channel.num_nodes)

        def connect() -> Any:
            factory: Any = distributed.ProcessGroupGloo
            options = factory._Options()
            options._timeout = _OPERATION_TIMEOUT
            options._devices = [factory.create_device(interface=name) for name in rendezvous.interfaces()]
            options._devices = options._devices or [factory.create_device(hostname=address)]
            return factory(self._store, channel.rank, channel.size, options)

        what = f"flavour gloo: cannot connect with the other ranks from {address}"
        return rendezvous.together(channel.mpi, what, connect)


class NcclGroup(Group):
    """Ranks that NCCL connects, each with a GPU of its own: that of the tensors. It does so in the first call."""

    name = "nccl"

    def _connect(self, channel: Channel) -> Any:
        def connect() -> Any:
            factory: Any = distributed.ProcessGroupNCCL
            options = factory.Options()
            options._timeout = _OPERATION_TIMEOUT
            return factory(self._store, channel.rank, channel.size, options)

        return rendezvous.together(
            channel.mpi, "flavour nccl: cannot make a process group", connect, "NCCL_DEBUG=INFO may tell more"
        )

    def free(self) -> None:
        """Close NCCL's connections before the rest: first all GPUs finish, as older torch aborts what still runs."""
        torch.cuda.synchronize()
        self._mpi.Barrier()
        shut_down = getattr(self._group, "shutdown", None) or getattr(self._group, "_shutdown", None)  # torch 2.4, 2.5
        if shut_down is not None:
            shut_down()
        super().free()
