"""torch.distributed: the peer "torch gloo", and "torch torchmpi", the same calls through this package's own backend.

gloo is the default process group, which MPI helps to start. Ours is a further group of the same processes, made as a
program would make it, so that the two can take turns.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torchmpi_py as mpi
from torchmpi_py.bench.contestants import GLOO, TORCH_TORCHMPI, TORCHMPI, Call, Contestant, Take, asynchronously
from torchmpi_py.bench.verbs import ROOT, Task
from torchmpi_py.collectives import rendezvous

if TYPE_CHECKING:
    from mpi4py import MPI

_TIMEOUT = dt.timedelta(seconds=60)


class Groups(NamedTuple):
    """Why there is no process group, the same on every rank, or ""; and the one on "torchmpi", if there is one."""

    no_gloo: str
    no_torchmpi: str
    torchmpi: Any


@contextlib.contextmanager
def process_groups(comm: MPI.Comm, *, with_torchmpi: bool) -> Iterator[Groups]:
    """torch.distributed's default process group, on gloo and on all ranks of ``comm``, while the block runs.

    ``with_torchmpi``: and one on backend "torchmpi" beside it. Collective. No MASTER_ADDR is needed: rank 0 opens a
    store, and MPI tells the others where.
    """
    try:
        _, no_gloo = _attempt(comm, lambda: _join(comm))
        ours, no_torchmpi = None, no_gloo
        if with_torchmpi and not no_gloo:
            ours, no_torchmpi = _attempt(comm, _on_torchmpi)
        yield Groups(no_gloo, no_torchmpi, None if no_torchmpi else ours)
    finally:
        dist = _distributed()
        if dist.is_initialized():
            dist.destroy_process_group()


def _attempt(comm: MPI.Comm, make: Callable[[], Any]) -> tuple[Any, str]:
    """What it makes, and why it could not be made on some rank, the same on every rank; whatever it is, go on."""
    made, failure = None, ""
    try:
        made = make()
    except Exception as error:
        failure = f"{type(error).__name__}: {error}".splitlines()[0]
    return made, next((text for text in comm.allgather(failure) if text), "")


def _join(comm: MPI.Comm) -> None:
    store = rendezvous.open_store(mpi.communicator().direct, "bench")
    _distributed().init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.size, timeout=_TIMEOUT)


def _on_torchmpi() -> Any:
    import torchmpi_py.torch_backend  # noqa: F401 - registers the backend

    return _distributed().new_group(backend=TORCHMPI)


def _distributed() -> Any:
    import torch.distributed  # here, for a torch may be built without it

    return torch.distributed


def gloo(task: Task, *, asynchronous: bool = False) -> Contestant:
    """torch.distributed on the default process group. What gloo cannot do raises when it is bound or called."""
    return _contestant(task, GLOO, None, asynchronous=asynchronous)


def torchmpi(task: Task, group: Any, *, asynchronous: bool = False) -> Contestant:
    """torch.distributed on ``group``, ours."""
    return _contestant(task, TORCH_TORCHMPI, group, asynchronous=asynchronous)


def _contestant(task: Task, name: str, group: Any, *, asynchronous: bool) -> Contestant:
    def bind(take: Take) -> Call:
        slot = take()
        call = functools.partial(_call(task, slot.x, slot.out), **{} if group is None else {"group": group})
        return asynchronously(functools.partial(call, async_op=True)) if asynchronous else call

    return Contestant(f"{name}, async" if asynchronous else name, bind, is_ours=name == TORCH_TORCHMPI)


def _call(task: Task, x: Any, out: Any) -> Call:
    dist = _distributed()
    is_root = task.rank == ROOT
    op = getattr(dist.ReduceOp, task.op.upper(), None)
    if task.verb.reduces and op is None:
        raise ValueError(f"torch.distributed has no op {task.op}")
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
