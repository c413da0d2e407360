"""Gradient buckets: flat tensors in symmetric memory; each holds the gradients of many parameters, reduced at once.

Parameters fall into buckets in the order in which backward reaches them, the reverse of their own: a parameter of at
least ``Tuning.alone_bytes`` has a bucket of its own, smaller ones share one of up to ``Tuning.fuse_bytes``. A gradient
is copied into its bucket as soon as it is complete and still in cache, and ``p.grad`` becomes a view of the bucket;
accumulating into views from the start would move more memory, for views have to be zeroed and read again. A gradient
with a bucket of its own need not even be copied as a whole: flavour shared publishes only the slices that other ranks
reduce.

Buckets are reduced in one fixed order, so that ranks whose networks differ in a step still make the same calls. A
parameter without a gradient on this rank counts as zero; one without a gradient on any rank keeps None, which one more
reduction of a byte per parameter finds out, unless compression has kept a part of an earlier one (``Bucket.owes``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from torchmpi_py.collectives import verbs
from torchmpi_py.core import config
from torchmpi_py.core.communicators import Communicator
from torchmpi_py.core.handles import Handle, wait_all
from torchmpi_py.errors import Unavailable
from torchmpi_py.memory import gpus
from torchmpi_py.memory.symmetric import symmetric_empty
from torchmpi_py.nn.bucket import Bucket, SparseBucket
from torchmpi_py.nn.compression import Compression
from torchmpi_py.nn.elements import is_finite
from torchmpi_py.nn.first_batches import FirstBatches
from torchmpi_py.nn.split_parameters import any_split, replicas_of

T = TypeVar("T", bound=Tensor)
_ALIGNMENT = 512  # bytes: no two buckets share a cache line; as torch aligns memory on GPUs


class Joining:
    """How many of P ranks still have data, counted in each reduction; the others bring zeros. See ``mpi.join``."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.has_data = True  # on this rank
        self.num_steps = 0  # with data here
        self.counts = torch.zeros(2, dtype=torch.int64, device="cpu")  # of ranks with data; of those that want sums

    @property
    def is_over(self) -> bool:
        """Whether no rank has data any more."""
        return not self.has_data and int(self.counts[0]) == 0

    @property
    def op(self) -> str:
        """The reduction that the ranks with data have begun."""
        return "sum" if self.counts[1] else "avg"

    def counts_here(self, op: str) -> Tensor:
        """The counts of this rank, to be summed over the ranks in place."""
        self.num_steps += self.has_data
        self.counts[0], self.counts[1] = self.has_data, self.has_data and op == "sum"
        return self.counts

    def weigh(self, op: str, reduced: Iterable[Tensor]) -> None:
        """Make averages over P ranks those over the ranks that have data."""
        num_present = int(self.counts[0])
        if op == "avg" and 0 < num_present < self.size:
            for flat in reduced:
                flat *= self.size / num_present


class Buckets:
    """The buckets of some parameters, in the order of their reduction. Making them is collective over ``comm``.

    groups: parameters that share a bucket whatever their size; the parameters in no group are grouped by size.
    sparse: parameters whose gradients are sparse, and stay so.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        comm: Communicator,
        groups: Iterable[Sequence[torch.nn.Parameter]] = (),
        compression: Compression | None = None,
        sparse: Container[torch.nn.Parameter] = (),
    ) -> None:
        self.parameters = list(parameters)
        self.comm = comm
        self.sparse = {p for p in parameters if p in sparse}
        self.first_batches = FirstBatches(comm, alike=any_split(parameters))
        self.compression = compression
        self.joining: Joining | None = None  # while ranks may run out of data one by one
        self.all = self.made(groups)
        self.index_of = {p: index for index, bucket in enumerate(self.all) for p in bucket.parameters}

    def made(self, groups: Iterable[Sequence[torch.nn.Parameter]]) -> list[Bucket]:
        """New buckets, in their order. Those with the same replicas share memory, symmetric among these."""
        groups = [group for group in groups if self.sparse.isdisjoint(group)]
        runs = runs_of(self.parameters, groups, lambda p: (replicas_of(p, self.comm), p if p in self.sparse else None))
        by_replicas: dict[Communicator, list[list[torch.nn.Parameter]]] = {}
        for run in runs:
            if run[0] not in self.sparse:
                by_replicas.setdefault(replicas_of(run[0], self.comm), []).append(run)
        made: dict[torch.nn.Parameter, Bucket] = {p: SparseBucket(p, replicas_of(p, self.comm)) for p in self.sparse}
        made |= {
            run[0]: Bucket(run, flat, replicas, self.compression)
            for replicas, equal in by_replicas.items()
            for run, flat in zip(equal, flat_memory(equal, replicas), strict=True)
        }
        return [made[run[0]] for run in runs]

    def fit(
        self, parameters: Sequence[torch.nn.Parameter], comm: Communicator, sparse: Container[torch.nn.Parameter] = ()
    ) -> bool:
        """Whether these buckets serve these parameters; if so they do from now on.

        Only shapes, dtypes and devices count: a rank whose parameters are other objects than before (it loaded them,
        say) must not be the only one to make new buckets.
        """
        if comm is not self.comm or len(parameters) != len(self.parameters):
            return False
        if [p in sparse for p in parameters] != [p in self.sparse for p in self.parameters]:
            return False
        # Parameter by parameter, in order: which ones have become which.
        successor = dict(zip(self.parameters, parameters, strict=True))
        followers = [[successor[p] for p in bucket.parameters] for bucket in self.all]
        if not all(bucket.fits(members) for bucket, members in zip(self.all, followers, strict=True)):
            return False
        if any(p is not q for p, q in successor.items()):
            for bucket, members in zip(self.all, followers, strict=True):
                bucket.adopt(members)
            self.parameters = list(parameters)
            self.sparse = {successor[p] for p in self.sparse}
            self.index_of = {p: index for index, bucket in enumerate(self.all) for p in bucket.parameters}
        return True

    def all_fit(self) -> bool:
        """Whether their own parameters have the shapes, dtypes and devices still for which the buckets were made."""
        return all(bucket.fits(bucket.parameters) for bucket in self.all)

    def has_gradient_here(self) -> Tensor:
        """A byte per parameter: whether it has a gradient on this rank. Reduced by ``max``: on any rank.

        Digests of the first batches may lie behind the flags (``first_batches``).
        """
        flags = torch.tensor([p.grad is not None for p in self.parameters], dtype=torch.uint8, device="cpu")
        return self.first_batches.append_digests(flags)

    def drop_unused_gradients(self, has_gradient_anywhere: Tensor) -> None:
        """Set ``p.grad`` to None where no rank had a gradient, nor is owed a part of an earlier one (compression)."""
        flags, digests = has_gradient_anywhere.tensor_split([len(self.parameters)])
        for parameter, has_gradient in zip(self.parameters, flags.tolist(), strict=True):
            if not has_gradient and not self.all[self.index_of[parameter]].owes(parameter):
                parameter.grad = None
        self.first_batches.warn_of_equal(digests)

    def hold_gradients(self) -> bool:
        """Whether a parameter's gradient lies in its bucket."""
        return any(bucket.holds_gradient() for bucket in self.all)

    def announce(self, op: str) -> list[Handle[Any]]:
        """Before a reduction: where ranks run out of data one by one, count those that have some. Collective."""
        if self.joining is None:
            return []
        return [verbs.allreduce_async(self.joining.counts_here(op), comm=self.comm)]

    def finish(self, op: str, has_gradient_anywhere: Tensor) -> None:
        """Once what was launched is done: the buckets hold reduced gradients, none of them unused. Collective."""
        for bucket in self.all:
            bucket.finish(op)
        if any_split(self.parameters):
            place = next((bucket.flat for bucket in self.all if bucket.flat.numel()), self.all[0].flat)
            share_overflow([bucket.flat for bucket in self.all if bucket.num_parts > 1], place, self.comm)
        if self.joining is not None:
            self.joining.weigh(op, [bucket.flat for bucket in self.all])
        self.drop_unused_gradients(has_gradient_anywhere)

    def reduce(self, op: str = "avg") -> None:
        """Reduce all gradients, and drop those that no rank has. Collective.

        A rank that has run out of data takes the op of the others, and does nothing where all have.
        """
        self.first_batches.add_gradients(self.parameters)
        wait_all(self.announce(op))
        if self.joining is not None and not self.joining.has_data:
            if self.joining.is_over:
                return
            op = self.joining.op
        flags = self.has_gradient_here()  # before the buckets give every parameter a gradient
        for bucket in self.all:
            bucket.reduce(op)
        self.finish(op, verbs.allreduce(flags, op="max", comm=self.comm))


def share_overflow(gradients: Iterable[Tensor], place: Tensor, comm: Communicator) -> None:
    """Where a rank's gradients are not all finite, the others get a NaN in ``place``. Collective.

    So a GradScaler skips a step on all ranks or on none.
    """
    is_finite_here = all(is_finite(x) for x in gradients)
    if verbs.allreduce(int(is_finite_here), op="min", comm=comm) == 0 and is_finite_here:
        place[(0,) * place.dim()] = math.nan  # not view(-1): it may have gaps, or be channels_last


def grouped(tensors: Iterable[T], key: Callable[[T], Hashable] = lambda x: None) -> Iterator[list[T]]:
    """Groups of tensors of one dtype, device and ``key``, in order: a large one alone, others up to ``fuse_bytes``."""
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
    """The parameters of each bucket, from the last to the first, as backward comes to them.

    Buckets are ordered by the last one in each, with which they are complete. Those of a bucket have the same ``key``;
    ``groups`` with split parameters do not count.
    """
    parameters = list(reversed(parameters))
    runs: list[list[torch.nn.Parameter]] = []
    in_groups: set[torch.nn.Parameter] = set()
    for group in groups:
        if not any_split(group):
            runs.append([p for p in group if p not in in_groups])  # blocks may share parameters
            in_groups |= set(group)
    runs = [run for run in runs if run]
    runs += grouped((p for p in parameters if p not in in_groups), key)
    position = {p: index for index, p in enumerate(parameters)}
    return sorted(runs, key=lambda run: max(position[p] for p in run))


def flat_memory(
    runs: list[list[torch.nn.Parameter]], comm: Communicator, counts: list[int] | None = None
) -> list[Tensor]:
    """A flat tensor of zeros for each run of parameters; on one device, all in one symmetric tensor, if possible.

    counts: the elements of each; default: those of its parameters.
    """
    if counts is None:
        counts = [sum(p.numel() for p in run) for run in runs]
    num_bytes = [
        -(-count * run[0].itemsize // _ALIGNMENT) * _ALIGNMENT for count, run in zip(counts, runs, strict=True)
    ]
    devices = {run[0].device for run in runs}
    kinds = {device.type for device in devices}
    if comm.size > 1 and len(devices) == 1 and (kinds == {"cpu"} or (kinds == {"cuda"} and not gpus.why_no_ipc())):
        try:
            pool = symmetric_empty(sum(num_bytes), dtype=torch.uint8, device=runs[0][0].device, comm=comm).zero_()
            parts = zip(torch.split(pool, num_bytes), counts, runs, strict=True)
            return [part[: count * run[0].itemsize].view(run[0].dtype) for part, count, run in parts]
        except Unavailable:
            pass  # the same on every rank; other flavours do not need it
    return [torch.zeros(n, dtype=run[0].dtype, device=run[0].device) for n, run in zip(counts, runs, strict=True)]
