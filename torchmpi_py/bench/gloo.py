"""The peer "torch gloo": torch.distributed's collectives, in a process group that MPI helps to start."""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torchmpi_py as mpi
from torchmpi_py.bench.contestants import GLOO, Call, Contestant, Take
from torchmpi_py.bench.verbs import ROOT, Task

if TYPE_CHECKING:
    from mpi4py import MPI

_TIMEOUT = dt.timedelta(seconds=60)


@contextlib.contextmanager
def process_group(comm: MPI.Comm) -> Iterator[str]:
    """torch.distributed's default process group, on gloo and on all ranks of ``comm``, while the block runs.

    Collective. Gives the reason why there is none, the same on every rank, or "". No MASTER_ADDR is needed: rank 0
    opens a store, and MPI tells the others where.
    """
    try:
        _join(comm)
        failure = ""
    except Exception as error:  # whatever it is, the bench goes on without this peer
        failure = f"{type(error).__name__}: {error}".splitlines()[0]
    failures = [text for text in comm.allgather(failure) if text]
    try:
        yield failures[0] if failures else ""
    finally:
        if not failure:
            _distributed().destroy_process_group()


def _join(comm: MPI.Comm) -> None:
    dist = _distributed()
    store: Any = None
    try:
        if comm.rank == 0:
            store = dist.TCPStore(_host(), 0, comm.size, True, timeout=_TIMEOUT, wait_for_workers=False)
    finally:
        place = comm.bcast((_host(), store.port) if store else None)
    if place is None:
        raise RuntimeError("rank 0 could not open a store")
    if store is None:
        store = dist.TCPStore(*place, comm.size, False, timeout=_TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.size, timeout=_TIMEOUT)


def _host() -> str:
    return "127.0.0.1" if mpi.num_nodes() == 1 else socket.gethostname()


def _distributed() -> Any:
    import torch.distributed  # here, for a torch may be built without it

    return torch.distributed


def gloo(task: Task) -> Contestant:
    """torch.distributed on the default process group. What gloo cannot do raises when it is bound or called."""

    def bind(take: Take) -> Call:
        slot = take()
        return _call(task, slot.x, slot.out)

    return Contestant(GLOO, bind)


def _call(task: Task, x: Any, out: Any) -> Call:
    dist = _distributed()
    is_root = task.rank == ROOT
    op = getattr(dist.ReduceOp, task.op.upper(), None)
    if task.verb.reduces and op is None:
        raise ValueError(f"gloo has no op {task.op}")
    # torch 2.13 has a new name for two of them.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    calls: dict[str, tuple[Any, ...]] = {
        "allreduce": (dist.all_reduce, x, op),
        "broadcast": (dist.broadcast, x, ROOT),
        "reduce": (dist.reduce, x, ROOT, op),
        "allgather": (gather, out, x),
        "reduce_scatter": (scatter, out, x, op),
        "alltoall": (dist.all_to_all_single, out, x),
        "gather": (dist.gather, x, _slices(task, out) if is_root else None, ROOT),
        "scatter": (dist.scatter, out, _slices(task, x) if is_root else None, ROOT),
    }
    function, *arguments = calls[task.verb.name]
    return functools.partial(function, *arguments)


def _slices(task: Task, whole: Any) -> list[Any] | None:
    return list(whole.chunk(task.size)) if task.verb.name in ("gather", "scatter") else None
