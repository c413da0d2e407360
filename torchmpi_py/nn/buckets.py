"""Gradient buckets: flat tensors in symmetric memory, in which the gradients of many parameters are reduced together.

Parameters fall into buckets in the order in which backward reaches them, the reverse of their own: a parameter of at
least ``Tuning.alone_bytes`` by itself, smaller ones together, up to ``Tuning.fuse_bytes``. A gradient enters its bucket
by a copy as soon as it is there and still in cache, and ``p.grad`` becomes a view of the bucket; accumulating into
views from the start would move more memory, for they had to be zeroed and read again. A gradient that has a bucket to
itself need not even be copied as a whole: flavour shared publishes only the slices that other ranks reduce.

Buckets are reduced in one fixed order, so that ranks whose networks differ in a step still make the same calls. What
got no gradient on this rank counts as zero; what got none on any rank keeps None, which one more reduction of a byte
per parameter finds out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from torchmpi_py.collectives import verbs
from torchmpi_py.core import config
from torchmpi_py.core.communicators import Communicator
from torchmpi_py.core.handles import Handle
from torchmpi_py.errors import Unavailable
from torchmpi_py.memory import gpus
from torchmpi_py.memory.symmetric import find, symmetric_empty
from torchmpi_py.nn.first_batches import FirstBatches

T = TypeVar("T", bound=Tensor)
_ALIGNMENT = 512  # bytes: no two buckets share a cache line; as torch aligns memory on GPUs


class Bucket:
    """Parameters of one dtype and device, and the flat memory for their gradients."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], flat: Tensor, comm: Communicator) -> None:
        self.parameters = list(parameters)
        self.comm = comm
        self.flat = flat
        self.publishes = len(self.parameters) == 1 and comm.num_nodes == 1 and find(flat) is not None
        parts = torch.split(self.flat, [p.numel() for p in parameters])
        self._views = {p: _shaped(part, p) for p, part in zip(parameters, parts, strict=True)}

    def fits(self, parameters: Sequence[torch.nn.Parameter]) -> bool:
        """Whether these have the shapes, dtype and device that its parameters had."""
        return all(
            p.shape == view.shape and p.dtype == view.dtype and p.device == view.device
            for p, view in zip(parameters, self._views.values(), strict=True)
        )

    def adopt(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Take other parameters, which fit, in place of its own."""
        self.parameters = list(parameters)
        self._views = dict(zip(parameters, self._views.values(), strict=True))

    def take(self, parameter: torch.nn.Parameter) -> None:
        """Move a gradient into the bucket, unless it is there; zero for None. A publishing one leaves it to launch."""
        if not self.publishes:
            self._take(parameter)

    def launch(self, op: str) -> Handle[Tensor]:
        """Start the reduction of all gradients of the bucket; those that were not taken are taken now."""
        return verbs.allreduce_async(self._input(), out=self.flat, op=op, comm=self.comm)

    def reduce(self, op: str) -> None:
        """Reduce all gradients of the bucket."""
        verbs.allreduce(self._input(), out=self.flat, op=op, comm=self.comm)

    def _take(self, parameter: torch.nn.Parameter) -> None:
        view = self._views[parameter]
        if parameter.grad is None:
            view.zero_()
        elif parameter.grad.data_ptr() != view.data_ptr() or parameter.grad.stride() != view.stride():
            view.copy_(parameter.grad.detach())
        else:
            return
        parameter.grad = view.detach()  # a tensor of its own: module.to() changes what is in parameter.grad

    def _input(self) -> Tensor:
        """The values to reduce, flat: the bucket itself, or the one gradient that is to be reduced into it."""
        gradient, view = self.parameters[0].grad, self._views[self.parameters[0]]
        if (
            self.publishes
            and gradient is not None
            and gradient.data_ptr() != view.data_ptr()
            and gradient.stride() == view.stride()
            and gradient.is_contiguous()
        ):
            self.parameters[0].grad = view.detach()
            return gradient.detach().view(-1)
        for parameter in self.parameters:
            self._take(parameter)
        return self.flat


class Buckets:
    """The buckets of some parameters, in the order of their reduction. Collective over ``comm``.

    ``groups``: parameters that share a bucket whatever their size; what is in none of them is grouped by size.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        comm: Communicator,
        groups: Iterable[Sequence[torch.nn.Parameter]] = (),
    ) -> None:
        self.parameters = list(parameters)
        self.comm = comm
        self.first_batches = FirstBatches(comm)
        runs = _runs(list(reversed(parameters)), groups)
        self.all = [Bucket(run, flat, comm) for run, flat in zip(runs, _memory(runs, comm), strict=True)]
        self.index_of = {p: index for index, bucket in enumerate(self.all) for p in bucket.parameters}

    def fit(self, parameters: Sequence[torch.nn.Parameter], comm: Communicator) -> bool:
        """Whether these buckets serve these parameters; then they are theirs.

        By shapes, dtypes and devices alone: a rank whose parameters are other objects than before (it loaded them, say)
        must not be the only one to make new buckets.
        """
        if comm is not self.comm or len(parameters) != len(self.parameters):
            return False
        successor = dict(zip(self.parameters, parameters, strict=True))
        followers = [[successor[p] for p in bucket.parameters] for bucket in self.all]
        if not all(bucket.fits(members) for bucket, members in zip(self.all, followers, strict=True)):
            return False
        if any(p is not q for p, q in successor.items()):
            for bucket, members in zip(self.all, followers, strict=True):
                bucket.adopt(members)
            self.parameters = list(parameters)
            self.index_of = {p: index for index, bucket in enumerate(self.all) for p in bucket.parameters}
        return True

    def received(self) -> Tensor:
        """A byte per parameter: whether it has a gradient here. Reduce it with ``max``, and give it to ``settle``.

        Digests of the first batches may lie behind (``first_batches``).
        """
        flags = torch.tensor([p.grad is not None for p in self.parameters], dtype=torch.uint8, device="cpu")
        return self.first_batches.attach(flags)

    def settle(self, anywhere: Tensor) -> None:
        """Give those that got a gradient on no rank None."""
        flags, digests = anywhere.tensor_split([len(self.parameters)])
        for parameter, received in zip(self.parameters, flags.tolist(), strict=True):
            if not received:
                parameter.grad = None
        self.first_batches.compare(digests)

    def reduce(self, op: str) -> None:
        """Reduce all gradients, and settle. Collective."""
        self.first_batches.look_at_gradients(self.parameters)
        received = self.received()
        for bucket in self.all:
            bucket.reduce(op)
        self.settle(verbs.allreduce(received, op="max", comm=self.comm))


def grouped(tensors: Iterable[T]) -> Iterator[list[T]]:
    """Tensors of one dtype and device, in order: a large one by itself, small ones up to ``fuse_bytes`` together."""
    tuning = config.current
    open_groups: dict[tuple[torch.dtype, torch.device], list[T]] = {}
    for x in tensors:
        if x.nbytes >= tuning.alone_bytes:
            yield [x]
            continue
        group = open_groups.setdefault((x.dtype, x.device), [])
        if group and sum(y.nbytes for y in group) + x.nbytes > tuning.fuse_bytes:
            yield list(group)
            group.clear()
        group.append(x)
    yield from (group for group in open_groups.values() if group)


def _runs(
    parameters: list[torch.nn.Parameter], groups: Iterable[Sequence[torch.nn.Parameter]]
) -> list[list[torch.nn.Parameter]]:
    """The buckets' parameters, in order of the last of each: a bucket can only set out when that is there."""
    runs: list[list[torch.nn.Parameter]] = []
    in_groups: set[torch.nn.Parameter] = set()
    for group in groups:
        runs.append([p for p in group if p not in in_groups])  # blocks may share parameters
        in_groups |= set(group)
    runs = [run for run in runs if run]
    runs += grouped(p for p in parameters if p not in in_groups)
    position = {p: index for index, p in enumerate(parameters)}
    return sorted(runs, key=lambda run: max(position[p] for p in run))


def _memory(runs: list[list[torch.nn.Parameter]], comm: Communicator) -> list[Tensor]:
    """A flat tensor of zeros for each run of parameters; on one device, all in one symmetric tensor, if possible."""
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


def _shaped(part: Tensor, parameter: torch.nn.Parameter) -> Tensor:
    """A part of flat memory in the shape of a parameter, and in its layout where that leaves no gaps."""
    plain = parameter.detach()
    is_dense = plain.numel() == 0 or torch.empty_like(plain).stride() == plain.stride()
    return part.as_strided(plain.shape, plain.stride()) if is_dense else part.view(plain.shape)
