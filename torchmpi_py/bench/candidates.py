"""The candidates of a comparison: implementations of one task, in this package and its peers, and plain copies.

- Ours: a collective of this package with each flavour, with the flavour that the selector chooses (``selector``), and
  on symmetric tensors (``symmetric``).
- ``raw MPI``: the collective as a user of mpi4py writes it, on the memory of the same tensors.
- ``torch gloo`` and ``torch torchmpi``: the collective of torch.distributed, on gloo and on this package's backend.
  gloo is the default process group, and MPI distributes the address of gloo's store. The group on this package's
  backend is a second group of the same processes, so that calls on both groups can alternate.
- The limits: copies of the same number of bytes between private buffers, by all ranks at the same time. ``copy`` on a
  CPU and ``device copy`` on a GPU show the cost of a collective that only writes its result. ``host copy`` moves the
  bytes from the GPU to pinned host memory and back, which is the least cost of a collective through the host. A large
  host copy moves *chunks* through a few *slots* of pinned memory, in both directions at the same time. ``wire``, the
  floor of the link between nodes, is computed and not measured (``wire.py``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import torchmpi_py as mpi
from torchmpi_py.bench import machine
from torchmpi_py.bench.buffers import TaskBuffers
from torchmpi_py.bench.cases import ROOT, Task
from torchmpi_py.collectives.flavours import rendezvous
from torchmpi_py.core.mpi_api import MPI
from torchmpi_py.memory import devices

SELECTOR, SYMMETRIC, TORCHMPI = OTHER_NAMES = "selector", "symmetric", "torchmpi"
"""Further values of ``--flavours``: the selector's choice, symmetric tensors, and our backend of torch.distributed."""
RAW_MPI, GLOO, TORCH_TORCHMPI = "raw MPI", "torch gloo", "torch torchmpi"
COPY, DEVICE_COPY, HOST_COPY, WIRE = LIMITS = "copy", "device copy", "host copy", "wire"

_TIMEOUT = dt.timedelta(seconds=60)
_CHUNK_BYTES = 4 << 20
_NUM_SLOTS = 8

Call = Callable[[], object]
NextBuffers = Callable[[], TaskBuffers]


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One implementation of the task.

    ``bind`` takes a function that returns buffers, and returns the call that is timed.
    """

    name: str
    bind: Callable[[NextBuffers], Call]
    is_ours: bool = False
    is_symmetric: bool = False

    @property
    def has_values(self) -> bool:
        """Whether the candidate has a result to check."""
        return self.name not in LIMITS


def flavour(task: Task, name: str, *, asynchronous: bool = False) -> Candidate:
    """Return a candidate that calls this package's collective; ``name`` is a flavour, "selector" or "symmetric"."""
    options: dict[str, Any] = {} if name in (SELECTOR, SYMMETRIC) else {"flavour": name}
    if task.verb.reduces:
        options["op"] = task.op

    def bind(next_buffers: NextBuffers) -> Call:
        buffers = next_buffers()
        verb = getattr(mpi, f"{task.verb.name}_async" if asynchronous else task.verb.name)
        keywords = options if buffers.out is None else options | {"out": buffers.out}
        call = functools.partial(verb, buffers.x, **keywords)
        return _and_wait(call) if asynchronous else call

    label = f"{name}, async" if asynchronous else name
    return Candidate(label, bind, is_ours=True, is_symmetric=name == SYMMETRIC)


def _and_wait(call: Callable[[], Any]) -> Call:
    """Return a function that runs ``call`` and waits for its handle."""
    return lambda: call().wait()


def raw_mpi(comm: MPI.Comm, task: Task) -> Candidate:
    """Return a candidate that calls mpi4py directly on ``comm``.

    ``bind``, or the call, raises an error for a dtype that numpy or MPI cannot represent.
    """

    def bind(next_buffers: NextBuffers) -> Call:
        buffers = next_buffers()
        x, out = (None if tensor is None else _array(tensor, task.verb.reduces) for tensor in (buffers.x, buffers.out))
        call = _mpi_call(comm, task, x, out)
        if task.device.type == "cuda":
            call = functools.partial(_after_stream, call, task.device)
        has_result = task.verb.name != "reduce" or comm.rank == ROOT
        if task.verb.reduces and task.op == "avg" and has_result:
            return functools.partial(_divided, call, x if out is None else out, comm.size)
        return call

    return Candidate(RAW_MPI, bind)


def _array(x: Tensor, reduces: bool) -> Any:
    """Return the memory of a tensor, as bytes if MPI need not compute with the values."""
    x = x if reduces else x.view(torch.uint8)
    return x.numpy() if x.device.type == "cpu" else x


def _mpi_call(comm: MPI.Comm, task: Task, x: Any, out: Any) -> Call:
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


def _after_stream(call: Call, device: torch.device) -> None:
    """Run ``call`` after the GPU has written the tensors, because MPI does not wait for streams."""
    devices.of(device).synchronize()
    call()


def _divided(call: Call, result: Any, size: int) -> None:
    call()
    result /= size


class TorchGroups(NamedTuple):
    """The process group on "torchmpi", and the reasons why the group on gloo or on "torchmpi" is missing.

    A reason is "" if the group exists. All ranks have the same reasons.
    """

    no_gloo: str = ""
    no_torchmpi: str = ""
    torchmpi: Any = None


@contextlib.contextmanager
def process_groups(comm: MPI.Comm, *, with_torchmpi: bool) -> Iterator[TorchGroups]:
    """Open torch.distributed's default process group on gloo, with all ranks of ``comm``, for a ``with`` block.

    With ``with_torchmpi`` also open a group on the backend "torchmpi". All ranks of ``comm`` must call this function.
    MASTER_ADDR is not needed, because rank 0 opens a store, and MPI sends the store's address to the other ranks.
    """
    try:
        _, no_gloo = _attempt(comm, lambda: _join(comm))
        group, no_torchmpi = None, no_gloo
        if with_torchmpi and not no_gloo:
            group, no_torchmpi = _attempt(comm, _on_torchmpi)
        yield TorchGroups(no_gloo, no_torchmpi, None if no_torchmpi else group)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _attempt(comm: MPI.Comm, make: Callable[[], Any]) -> tuple[Any, str]:
    """Return the result of ``make``, and the reason for a failure on any rank, or "" if no rank failed.

    All ranks of ``comm`` must call this function. Errors of ``make`` are not raised.
    """
    result, failure = None, ""
    try:
        result = make()
    except Exception as error:
        failure = f"{type(error).__name__}: {error}".splitlines()[0]
    return result, machine.first_failure(comm, failure)


def _join(comm: MPI.Comm) -> None:
    store = rendezvous.open_store(mpi.communicator().direct, "bench")
    dist.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.size, timeout=_TIMEOUT)


def _on_torchmpi() -> Any:
    import torchmpi_py.torch_backend  # noqa: F401 - registers the backend

    return dist.new_group(backend=TORCHMPI)


def torch_distributed(task: Task, name: str, group: Any, *, asynchronous: bool = False) -> Candidate:
    """Return a candidate that calls torch.distributed on ``group``, or on the default group if ``group`` is None.

    ``name`` is GLOO or TORCH_TORCHMPI. ``bind``, or the call, raises an error for a task that gloo does not support.
    """

    def bind(next_buffers: NextBuffers) -> Call:
        buffers = next_buffers()
        call = functools.partial(_torch_call(task, buffers.x, buffers.out), group=group)
        return _and_wait(functools.partial(call, async_op=True)) if asynchronous else call

    label = f"{name}, async" if asynchronous else name
    return Candidate(label, bind, is_ours=name == TORCH_TORCHMPI)


def _torch_call(task: Task, x: Any, out: Any) -> Callable[..., Any]:
    is_root = task.rank == ROOT
    op = getattr(dist.ReduceOp, task.op.upper(), None)
    if task.verb.reduces and op is None:
        raise ValueError(f"torch.distributed has no op {task.op}")
    # torch 2.13 has new names for two of the collectives.
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


def limits(device: torch.device) -> list[Candidate]:
    """Return the copies that serve as limits for collectives on tensors of ``device``."""
    if device.type == "cpu":
        return [copy(COPY)]
    return [copy(DEVICE_COPY), host_copy(device)]


def copy(name: str) -> Candidate:
    """Return a candidate that copies one buffer to another on the same device."""

    def bind(next_buffers: NextBuffers) -> Call:
        source, destination = next_buffers().whole, next_buffers().whole
        return functools.partial(destination.copy_, source)

    return Candidate(name, bind)


def host_copy(device: torch.device, chunk_bytes: int = _CHUNK_BYTES) -> Candidate:
    """Return a candidate that copies one buffer to another through the host."""
    is_gpu = device.type == "cuda"
    slots = torch.empty(_NUM_SLOTS, chunk_bytes, dtype=torch.uint8, pin_memory=is_gpu)
    overlapping = _OverlappingCopy(slots, device) if is_gpu else None

    def bind(next_buffers: NextBuffers) -> Call:
        source, destination = (next_buffers().whole.view(torch.uint8) for _ in range(2))
        if overlapping is None or source.numel() <= chunk_bytes:
            return functools.partial(_copy_in_order, slots, source, destination)
        return functools.partial(overlapping.copy, source, destination)

    return Candidate(HOST_COPY, bind)


def _copy_in_order(slots: Tensor, source: Tensor, destination: Tensor) -> None:
    """Copy the chunks one after the other on the current stream."""
    for index, (x, y) in enumerate(_chunks(slots, source, destination)):
        host = slots[index % len(slots)][: x.numel()]
        host.copy_(x, non_blocking=True)
        y.copy_(host, non_blocking=True)


class _OverlappingCopy:
    """A copy with two streams: one copies chunks to the host, the other copies them back.

    Each slot has two events: one is recorded after the slot is filled, and the other after the slot is emptied.
    """

    def __init__(self, slots: Tensor, device: torch.device) -> None:
        self.slots = slots
        self.device = device
        self.off, self.back = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]
        self.filled, self.emptied = ([torch.cuda.Event() for _ in slots] for _ in range(2))  # type: ignore[no-untyped-call]

    def copy(self, source: Tensor, destination: Tensor) -> None:
        """Queue the copies of all chunks, and make the current stream wait for the last one."""
        current = torch.cuda.current_stream(self.device)
        self.off.wait_stream(current)
        self.back.wait_stream(current)
        for index, (x, y) in enumerate(_chunks(self.slots, source, destination)):
            slot = index % len(self.slots)
            host = self.slots[slot][: x.numel()]
            with torch.cuda.stream(self.off):
                self.off.wait_event(self.emptied[slot])  # An event that was never recorded does not block.
                host.copy_(x, non_blocking=True)
                self.filled[slot].record(self.off)
            with torch.cuda.stream(self.back):
                self.back.wait_event(self.filled[slot])
                y.copy_(host, non_blocking=True)
                self.emptied[slot].record(self.back)
        current.wait_stream(self.back)


def _chunks(slots: Tensor, *tensors: Tensor) -> Any:
    """Return the corresponding parts of the tensors, none larger than a slot."""
    return zip(*(torch.split(x, slots.shape[1]) for x in tensors), strict=True)
