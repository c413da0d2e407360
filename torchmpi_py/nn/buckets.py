"""The buckets of a module: flat tensors in symmetric memory, each with the gradients of many parameters.

The backward pass completes gradients in about the reverse order of the parameters, so buckets are filled in that
order. A parameter of at least ``Tuning.alone_bytes`` has its own bucket. Smaller parameters share a bucket of up to
``Tuning.fuse_bytes``. One bucket is reduced in one operation (``gradient_reducer``). The buckets have one fixed
order, so that ranks whose networks differ in a step still make the same calls.

A parameter without a gradient on this rank counts as zero. A parameter without a gradient on any rank keeps None. To
find these parameters, one more reduction sends a byte per parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from torchmpi_py.collectives import verbs
from torchmpi_py.core import config
from torchmpi_py.core.communicators import Communicator
from torchmpi_py.errors import Unavailable
from torchmpi_py.memory import gpus
from torchmpi_py.memory.symmetric import symmetric_empty
from torchmpi_py.nn.block_sequential import BlockSequential
from torchmpi_py.nn.compression import CompressedReducer, Compression, check_compression
from torchmpi_py.nn.gradient_reducer import GradientReducer, views_of
from torchmpi_py.nn.members import parameters_of
from torchmpi_py.nn.sparse_reducer import SparseReducer, sparse_parameters

T = TypeVar("T", bound=Tensor)
_ALIGNMENT = 512  # bytes, torch's alignment on GPUs. Two buckets never share a cache line.


class Buckets:
    """The buckets of a list of parameters, in the order in which the buckets are reduced."""

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], comm: Communicator, reducers: Sequence[GradientReducer]
    ) -> None:
        self.parameters = list(parameters)
        self.comm = comm
        self.all = list(reducers)
        self.index_of = {p: index for index, bucket in enumerate(self.all) for p in bucket.parameters}

    def all_fit(self) -> bool:
        """Return whether the parameters still have the shapes, dtypes and devices that the buckets were created for."""
        return all(bucket.fits() for bucket in self.all)

    def serve(self, module: torch.nn.Module) -> bool:
        """Return whether the module's trainable parameters, their order and their sparsity still match the buckets."""
        trained = [p for p in parameters_of(module) if p.requires_grad]
        is_same = list(map(id, trained)) == list(map(id, self.parameters))
        sparse = {p for bucket in self.all if isinstance(bucket, SparseReducer) for p in bucket.parameters}
        return is_same and sparse_parameters(module).intersection(trained) == sparse and self.all_fit()

    def hold_gradients(self) -> bool:
        """Return whether any gradient is stored in its bucket."""
        return any(bucket.holds(p) for bucket in self.all for p in bucket.parameters)

    def gradient_flags(self) -> Tensor:
        """Return one byte per parameter: 1 if the parameter has a gradient on this rank, else 0."""
        return torch.tensor([p.grad is not None for p in self.parameters], dtype=torch.uint8, device="cpu")

    def reduce(self, op: str = "avg") -> None:
        """Reduce all gradients on the calling thread. All ranks of ``comm`` must call it."""
        flags = self.gradient_flags()  # Reducing a bucket sets p.grad, so read the flags first.
        for bucket in self.all:
            bucket.reduce(op)
        self.finish(op, verbs.allreduce(flags, op="max", comm=self.comm))

    def finish(self, op: str, flags: Tensor) -> None:
        """Finish the launched reductions, and set each ``p.grad`` to the reduced gradient, or None if no rank has one.

        ``flags`` is the maximum of the ``gradient_flags`` of all ranks. All ranks of ``comm`` must call this method.
        """
        for bucket in self.all:
            bucket.finish(op)
        for parameter, has_gradient in zip(self.parameters, flags.tolist(), strict=True):
            if not has_gradient and not self.all[self.index_of[parameter]].owes(parameter):
                parameter.grad = None


def buckets_of(
    module: torch.nn.Module,
    parameters: Sequence[torch.nn.Parameter],
    comm: Communicator,
    *,
    compression: Compression | None = None,
    sparse_as_dense: bool = False,
) -> Buckets:
    """Create the buckets of ``parameters``, which belong to ``module``. All ranks of ``comm`` must call it.

    A block of a BlockSequential is one bucket, whatever its size. Other parameters are grouped by size. A parameter
    with sparse gradients has its own SparseReducer, unless ``sparse_as_dense`` is set.
    """
    check_compression(compression)
    sparse = set() if sparse_as_dense else sparse_parameters(module).intersection(parameters)
    dense = set(parameters) - sparse
    blocks = [block.parameters for m in module.modules() if isinstance(m, BlockSequential) for block in m.blocks]
    blocks = [block for block in blocks if dense.issuperset(block) and len({(p.dtype, p.device) for p in block}) == 1]
    runs = runs_of(parameters, blocks, lambda p: p if p in sparse else None)
    memory = iter(flat_memory([run for run in runs if run[0] in dense], comm))
    reducers = [
        _dense_reducer(run, next(memory), comm, compression) if run[0] in dense else SparseReducer(run[0], comm)
        for run in runs
    ]
    return Buckets(parameters, comm, reducers)


def _dense_reducer(
    run: list[torch.nn.Parameter], flat: Tensor, comm: Communicator, compression: Compression | None
) -> GradientReducer:
    views = list(views_of(flat, run))
    compressor = compression.compressor(flat, views, comm) if compression is not None and comm.size > 1 else None
    return GradientReducer(run, flat, comm) if compressor is None else CompressedReducer(run, flat, comm, compressor)


def grouped(tensors: Iterable[T], key: Callable[[T], Hashable] = lambda x: None) -> Iterator[list[T]]:
    """Yield the tensors in groups. All tensors of a group have the same dtype, device and ``key``.

    A tensor of at least ``Tuning.alone_bytes`` forms a separate group. Smaller tensors share groups of up to
    ``Tuning.fuse_bytes``.
    """
    tuning = config.current
    open_groups: dict[Hashable, list[T]] = {}
    for x in tensors:
        if x.nbytes >= tuning.alone_bytes:
            yield [x]
            continue
        group = open_groups.setdefault((x.dtype, x.device, key(x)), [])
        if group and sum(y.nbytes for y in group) + x.nbytes > tuning.fuse_bytes:
            yield list(group)
            group.clear()
        group.append(x)
    yield from (group for group in open_groups.values() if group)


def runs_of(
    parameters: Sequence[torch.nn.Parameter],
    groups: Iterable[Sequence[torch.nn.Parameter]],
    key: Callable[[torch.nn.Parameter], Hashable],
) -> list[list[torch.nn.Parameter]]:
    """Return the parameters of each bucket. The buckets are in the order in which the backward pass completes them.

    The backward pass usually computes gradients from the last parameter to the first. A bucket is complete when the
    last of its parameters in this order has a gradient, so the buckets are sorted by this parameter. Each of the
    ``groups`` becomes one bucket. In the other buckets, all parameters have the same ``key``.
    """
    parameters = list(reversed(parameters))
    runs: list[list[torch.nn.Parameter]] = []
    in_groups: set[torch.nn.Parameter] = set()
    for group in groups:
        runs.append([p for p in group if p not in in_groups])  # Blocks may share parameters.
        in_groups |= set(group)
    runs = [run for run in runs if run]
    runs += grouped((p for p in parameters if p not in in_groups), key)
    position = {p: index for index, p in enumerate(parameters)}
    return sorted(runs, key=lambda run: max(position[p] for p in run))


def flat_memory(
    runs: list[list[torch.nn.Parameter]], comm: Communicator, counts: list[int] | None = None
) -> list[Tensor]:
    """Return a flat tensor of zeros for each run of parameters, all in one symmetric tensor if possible.

    ``counts`` lists the number of elements of each flat tensor. By default, a flat tensor has as many elements
    as its parameters. All ranks of ``comm`` must call this function.
    """
    counts = counts or [sum(p.numel() for p in run) for run in runs]
    num_bytes = [
        -(-count * run[0].itemsize // _ALIGNMENT) * _ALIGNMENT for count, run in zip(counts, runs, strict=True)
    ]
    kinds = [device.type for device in {run[0].device for run in runs}]
    if comm.size > 1 and (kinds == ["cpu"] or (kinds == ["cuda"] and not gpus.why_no_ipc())):
        try:
            pool = symmetric_empty(sum(num_bytes), dtype=torch.uint8, device=runs[0][0].device, comm=comm).zero_()
            parts = zip(torch.split(pool, num_bytes), counts, runs, strict=True)
            return [part[: count * run[0].itemsize].view(run[0].dtype) for part, count, run in parts]
        except Unavailable:
            pass  # Unavailable is raised on all ranks, so all ranks fall back to ordinary memory.
    return [torch.zeros(n, dtype=run[0].dtype, device=run[0].device) for n, run in zip(counts, runs, strict=True)]
