"""The peer "raw MPI": the same collectives as a user of mpi4py writes them, on the memory of the same tensors."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from torchmpi_py import devices
from torchmpi_py.bench.contestants import RAW_MPI, Call, Contestant, Take
from torchmpi_py.bench.verbs import ROOT, Task

if TYPE_CHECKING:
    from mpi4py import MPI


def raw_mpi(comm: MPI.Comm, task: Task) -> Contestant:
    """Raw mpi4py on ``comm``. What numpy or MPI cannot represent raises when it is bound or called."""

    def bind(take: Take) -> Call:
        slot = take()
        x, out = (None if tensor is None else _array(tensor, task.verb.reduces) for tensor in (slot.x, slot.out))
        call = _call(comm, task, x, out)
        if task.device.type == "cuda":
            call = functools.partial(_in_order, call, task.device)
        has_result = task.verb.name != "reduce" or comm.rank == ROOT
        if task.verb.reduces and task.op == "avg" and has_result:
            return functools.partial(_divided, call, x if out is None else out, comm.size)
        return call

    return Contestant(RAW_MPI, bind)


def _array(x: torch.Tensor, reduces: bool) -> Any:
    """The memory of a tensor; what is only moved travels as bytes, whatever its dtype."""
    x = x if reduces else x.view(torch.uint8)
    return x.numpy() if x.device.type == "cpu" else x


def _call(comm: MPI.Comm, task: Task, x: Any, out: Any) -> Call:
    from mpi4py import MPI

    is_root = comm.rank == ROOT
    op = getattr(MPI, "SUM" if task.op == "avg" else task.op.upper())
    calls: dict[str, tuple[Any, ...]] = {
        "allreduce": (comm.Allreduce, MPI.IN_PLACE, x, op),
        "broadcast": (comm.Bcast, x, ROOT),
        "reduce": (comm.Reduce, MPI.IN_PLACE if is_root else x, x if is_root else None, op, ROOT),
        "allgather": (comm.Allgather, x, out),
        "reduce_scatter": (comm.Reduce_scatter_block, x, out, op),
        "alltoall": (comm.Alltoall, x, out),
        "gather": (comm.Gather, x, out if is_root else None, ROOT),
        "scatter": (comm.Scatter, x if is_root else None, out, ROOT),
    }
    function, *arguments = calls[task.verb.name]
    return functools.partial(function, *arguments)


def _in_order(call: Call, device: torch.device) -> None:
    """MPI knows nothing of streams: what the tensors are to hold must be in them."""
    devices.of(device).synchronize()
    call()


def _divided(call: Call, result: Any, size: int) -> None:
    call()
    result /= size
