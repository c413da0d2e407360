"""The limits: copies of as many bytes, of private buffers, by all ranks at the same time.

``copy``, on CPU, and ``device copy``, on a GPU, are what a collective costs that only had to write its result. ``host
copy`` takes the bytes off the GPU into pinned host memory and back: the least for a way through the host. A large one
goes in *chunks* through a few *slots* of pinned memory, off and back at the same time, as such a way would do it.

The peer "raw MPI": the same collectives as a user of mpi4py writes them, on the memory of the same tensors.

torch.distributed: the peer "torch gloo", and "torch torchmpi", the same calls through this package's own backend.

gloo is the default process group, which MPI helps to start. Ours is a further group of the same processes, made as a
program would make it, so that the two can take turns.

Which contestants a command line asks for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import torchmpi_py as mpi
from torchmpi_py.bench import UsageError
from torchmpi_py.bench.candidates import (
    COPY,
    DEVICE_COPY,
    GLOO,
    HOST_COPY,
    RAW_MPI,
    TORCH_TORCHMPI,
    TORCHMPI,
    WAYS,
    Call,
    Contestant,
    Take,
    asynchronously,
    ours,
)
from torchmpi_py.bench.cases import ROOT, Task
from torchmpi_py.collectives.flavours import rendezvous
from torchmpi_py.core.mpi_api import MPI
from torchmpi_py.memory import devices

_CHUNK_BYTES = 4 << 20
_NUM_SLOTS = 8


def limits(device: torch.device) -> list[Contestant]:
    """Those that mean something for collectives of tensors on ``device``."""
    if device.type == "cpu":
        return [copy(COPY)]
    return [copy(DEVICE_COPY), host_copy(device)]


def copy(name: str) -> Contestant:
    """From one buffer to another, where they are."""

    def bind(take: Take) -> Call:
        source, destination = take().whole, take().whole
        return functools.partial(destination.copy_, source)

    return Contestant(name, bind)


def host_copy(device: torch.device, chunk_bytes: int = _CHUNK_BYTES) -> Contestant:
    """From one buffer to another, through the host."""
    is_gpu = device.type == "cuda"
    slots = torch.empty(_NUM_SLOTS, chunk_bytes, dtype=torch.uint8, pin_memory=is_gpu)
    overlapping = _Overlapping(slots, device) if is_gpu else None

    def bind(take: Take) -> Call:
        source, destination = (take().whole.view(torch.uint8) for _ in range(2))
        if overlapping is None or source.numel() <= chunk_bytes:
            return functools.partial(_in_order, slots, source, destination)
        return functools.partial(overlapping.copy, source, destination)

    return Contestant(HOST_COPY, bind)


def _in_order(slots: Tensor, source: Tensor, destination: Tensor) -> None:
    """Chunk by chunk."""
    for index, (x, y) in enumerate(_chunks(slots, source, destination)):
        host = slots[index % len(slots)][: x.numel()]
        host.copy_(x, non_blocking=True)
        y.copy_(host, non_blocking=True)


class _Overlapping:
    """Two streams: one takes chunks off the GPU, the other takes them back; an event a slot for each says how far."""

    def __init__(self, slots: Tensor, device: torch.device) -> None:
        self.slots = slots
        self.device = device
        self.off, self.back = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]
        self.filled, self.emptied = ([_event() for _ in slots] for _ in range(2))

    def copy(self, source: Tensor, destination: Tensor) -> None:
        """Queue everything; the current stream waits for the last chunk."""
        current = torch.cuda.current_stream(self.device)
        self.off.wait_stream(current)
        self.back.wait_stream(current)
        for index, (x, y) in enumerate(_chunks(self.slots, source, destination)):
            slot = index % len(self.slots)
            host = self.slots[slot][: x.numel()]
            with torch.cuda.stream(self.off):
                self.off.wait_event(self.emptied[slot])  # never recorded: nothing to wait for
                host.copy_(x, non_blocking=True)
                self.filled[slot].record(self.off)
            with torch.cuda.stream(self.back):
                self.back.wait_event(self.filled[slot])
                y.copy_(host, non_blocking=True)
                self.emptied[slot].record(self.back)
        current.wait_stream(self.back)


def _chunks(slots: Tensor, *tensors: Tensor) -> Any:
    """Corresponding parts of the tensors, no larger than a slot."""
    return zip(*(torch.split(x, slots.shape[1]) for x in tensors), strict=True)


def _event() -> Any:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def raw_mpi(comm: MPI.Comm, task: Task) -> Contestant:
    """Raw mpi4py on ``comm``. What numpy or MPI cannot represent raises when it is bound or called."""

    def bind(take: Take) -> Call:
        slot = take()
        x, out = (None if tensor is None else _array(tensor, task.verb.reduces) for tensor in (slot.x, slot.out))
        call = _call_mpi(comm, task, x, out)
        if task.device.type == "cuda":
            call = functools.partial(_mpi_arguments_in_order, call, task.device)
        has_result = task.verb.name != "reduce" or comm.rank == ROOT
        if task.verb.reduces and task.op == "avg" and has_result:
            return functools.partial(_divided, call, x if out is None else out, comm.size)
        return call

    return Contestant(RAW_MPI, bind)


def _array(x: torch.Tensor, reduces: bool) -> Any:
    """The memory of a tensor; what is only moved travels as bytes, whatever its dtype."""
    x = x if reduces else x.view(torch.uint8)
    return x.numpy() if x.device.type == "cpu" else x


def _call_mpi(comm: MPI.Comm, task: Task, x: Any, out: Any) -> Call:

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


def _mpi_arguments_in_order(call: Call, device: torch.device) -> None:
    """MPI knows nothing of streams: what the tensors are to hold must be in them."""
    devices.of(device).synchronize()
    call()


def _divided(call: Call, result: Any, size: int) -> None:
    call()
    result /= size


_TIMEOUT = dt.timedelta(seconds=60)


class PeerGroups(NamedTuple):
    """Why there is no process group, the same on every rank, or ""; and the one on "torchmpi", if there is one."""

    no_gloo: str
    no_torchmpi: str
    torchmpi: Any


@contextlib.contextmanager
def process_groups(comm: MPI.Comm, *, with_torchmpi: bool) -> Iterator[PeerGroups]:
    """torch.distributed's default process group, on gloo and on all ranks of ``comm``, while the block runs.

    ``with_torchmpi``: and one on backend "torchmpi" beside it. Collective. No MASTER_ADDR is needed: rank 0 opens a
    store, and MPI tells the others where.
    """
    try:
        _, no_gloo = _attempt(comm, lambda: _join(comm))
        ours, no_torchmpi = None, no_gloo
        if with_torchmpi and not no_gloo:
            ours, no_torchmpi = _attempt(comm, _on_torchmpi)
        yield PeerGroups(no_gloo, no_torchmpi, None if no_torchmpi else ours)
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


_AVAILABLE = "available"


def wants_torchmpi(flavours: Sequence[str] | None) -> bool:
    """Whether torch.distributed over our backend is among what is asked for (None: all there is)."""
    return flavours is None or TORCHMPI in flavours


def for_run(
    task: Task, flavour: str, groups: PeerGroups | None, *, symmetric: bool, asynchronous: bool
) -> list[Contestant]:
    """One flavour alone. UsageError if it is unknown or unavailable; ``groups`` are for "torchmpi"."""
    _check(task, [flavour], groups)
    if flavour == TORCHMPI and groups is not None:
        return [dataclasses.replace(torchmpi(task, groups.torchmpi, asynchronous=asynchronous), is_symmetric=symmetric)]
    return [ours(task, flavour, is_symmetric=symmetric, asynchronous=asynchronous)]


def for_compare(
    comm: MPI.Comm, task: Task, flavours: Sequence[str] | None, groups: PeerGroups, *, asynchronous: bool = False
) -> list[Contestant]:
    """Ours, all that are available or ``flavours``; then the peers and the limits. UsageError as in ``for_run``.

    ``asynchronous``: whether those that have an asynchronous form take part with that, too.
    """
    if flavours is not None:
        _check(task, flavours, groups)
    names = _available(task, groups) if flavours is None else list(dict.fromkeys(flavours))
    forms = (False, True) if asynchronous else (False,)
    of_ours = [
        torchmpi(task, groups.torchmpi, asynchronous=form) if name == TORCHMPI else ours(task, name, asynchronous=form)
        for name in names
        for form in forms
    ]
    of_gloo = [] if groups.no_gloo else [gloo(task, asynchronous=form) for form in forms]
    return [*of_ours, *([raw_mpi(comm, task)] if _has_raw_mpi(task) else []), *of_gloo, *limits(task.device)]


def _has_raw_mpi(task: Task) -> bool:
    """On a GPU: whether this MPI reads its memory. One that does not would crash rather than refuse."""
    return task.device.type == "cpu" or _statuses(task).get("mpi") == _AVAILABLE


def _available(task: Task, groups: PeerGroups) -> list[str]:
    flavours = [name for name, status in _statuses(task).items() if status == _AVAILABLE]
    return [*flavours, *(way for way in WAYS if way != TORCHMPI or groups.torchmpi is not None)]


def _check(task: Task, names: Sequence[str], groups: PeerGroups | None) -> None:
    statuses = _statuses(task)
    for name in names:
        if name == TORCHMPI and groups is not None and groups.no_torchmpi:
            raise UsageError(f"torch.distributed has no group on {name!r} here: {groups.no_torchmpi}")
        if name in WAYS:
            continue
        if name not in statuses:
            raise UsageError(f"flavour {name!r} is unknown; known flavours: {', '.join([*statuses, *WAYS])}")
        if statuses[name] != _AVAILABLE:
            raise UsageError(f"flavour {name!r} cannot do {task.verb.name} here: {statuses[name]}")


def _statuses(task: Task) -> dict[str, str]:
    """What each flavour says of the verb on tensors of the task's device."""
    wanted = task.verb.name, task.device.type
    return {row.flavour: row.status for row in mpi.availability() if (row.verb, row.device) == wanted}
