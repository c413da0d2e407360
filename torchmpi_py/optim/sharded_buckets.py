"""Buckets of which each rank updates a part: gradients are reduced to the owner of each part, parameters come from it.

A bucket holds parameters and their gradients in two flat tensors; ``p.data`` are views of the first. Its parts:

- *slices*: P equal parts, whatever parameter they belong to. reduce_scatter gives a rank the gradients of its slice,
  allgather brings the updated slices together: S (P-1)/P elements each way, as much as one allreduce. For optimizers
  that treat every element alike.
- *whole*: the bucket has one owner, which updates its parameters: reduce, then broadcast.

Compressed gradients of 16 bits travel in the same ways; what TopK and PowerSGD send, all ranks get.

Sources: PaddlePaddle's reduce, update, broadcast; Rajbhandari et al., ZeRO (2020), stage 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchmpi_py.collectives import verbs
from torchmpi_py.core.communicators import Communicator
from torchmpi_py.core.handles import Handle
from torchmpi_py.nn.absent_gradients import AbsentGradient
from torchmpi_py.nn.bucket import Bucket, shaped
from torchmpi_py.nn.buckets import Buckets, flat_memory, runs_of
from torchmpi_py.nn.compression import Compression, Destination

_OF_A_PARAMETER = {"step", "eta", "mu", "mu_product"}  # one number, also where the parameter itself is one

_Start = Callable[[Tensor, dict[str, Any]], Any]
_STARTS_AT: dict[str, _Start] = {  # entries of a new state, of a parameter and its group; the others start at zero
    "step_size": lambda p, group: group["lr"],  # of Rprop
    "sum": lambda p, group: group["initial_accumulator_value"],  # of Adagrad
    "ax": lambda p, group: p,  # of ASGD
}


class Slices(Destination):
    """Of reduced gradients each rank wants its slice."""

    is_everywhere = False

    def __init__(self, comm: Communicator) -> None:
        super().__init__(comm)
        self._reduced: dict[torch.dtype, Tensor] = {}  # kept: new memory costs more than the reduction

    def reduce_async(self, x: Tensor, op: str) -> Handle[Tensor]:
        if x.dtype not in self._reduced:
            self._reduced[x.dtype] = x.new_empty(x.numel() // self.comm.size)
        return verbs.reduce_scatter_async(x, out=self._reduced[x.dtype], op=op, comm=self.comm)

    def part(self, flat: Tensor) -> Tensor:
        return flat.chunk(self.comm.size)[self.comm.rank]


class Owner(Destination):
    """One rank wants all the reduced gradients."""

    is_everywhere = False

    def __init__(self, owner: int, comm: Communicator) -> None:
        super().__init__(comm)
        self.owner = owner

    def reduce_async(self, x: Tensor, op: str) -> Handle[Tensor]:
        return verbs.reduce_async(x, self.owner, op=op, comm=self.comm)

    def result(self, handle: Handle[Tensor]) -> Tensor:
        return self.part(handle.wait())

    def part(self, flat: Tensor) -> Tensor:
        return flat if self.comm.rank == self.owner else flat[:0]


class GradientOfOwners(AbsentGradient):
    """Stands for the gradient of a parameter from the backward pass to ``step``: the ranks have parts of it."""

    why = (
        "ShardedOptimizer: a gradient was read or changed that this rank does not have as a whole, or backward() ran "
        "again before step(). Until step() each rank has the gradients of what it updates, in optimizer.param_groups: "
        "clip with optimizer.clip_grad_norm_(...), or with clip_grad_value_ of the parameters there. Drop gradients, "
        "as of a step that GradScaler skips, with optimizer.zero_grad(). To accumulate, use backward_passes_per_step=. "
        "Activation checkpointing needs checkpoint(..., use_reentrant=False)"
    )


class ShardedBucket(Bucket):
    """Parameters of one group of the optimizer, and their memory.

    owner: the rank that updates all of it; None: each rank updates its slice. ``shards``: what this rank updates, with
    gradients once a reduction is finished. ``p.grad`` of the other parameters is absent until ``spread``.
    """

    absent_kind = GradientOfOwners

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        memory: Tensor,
        comm: Communicator,
        group: int,
        owner: int | None,
        compression: Compression | None,
    ) -> None:
        self.values, gradients = memory.chunk(2)
        num_elements = sum(p.numel() for p in parameters)
        super().__init__(parameters, gradients[:num_elements], comm)
        self.padded = gradients  # with zeros, so that there are P equal slices
        self.publishes = False
        self.group = group
        self.owner = owner
        self._destination = Slices(comm) if owner is None else Owner(owner, comm)
        if compression is not None and comm.size > 1:
            views = [*self._views.values(), gradients[num_elements:]]  # the last one: padding, perhaps of no element
            self.compressor = compression.compressor(gradients, views, comm, self._destination)
        self.views = [shaped(part, p) for part, p in zip(self.split(self.values), parameters, strict=True)]
        with torch.no_grad():
            for p, view in zip(parameters, self.views, strict=True):
                view.copy_(p)
                p.data = view
        self.shards: list[torch.nn.Parameter] = []
        if owner is None:
            self.shards = [torch.nn.Parameter(self._destination.part(self.values))]
        elif owner == comm.rank:
            self.shards = list(parameters)

    def split(self, flat: Tensor) -> tuple[Tensor, ...]:
        """The parts of the parameters, of a flat tensor of the bucket's values; padding is left out."""
        counts = [p.numel() for p in self.parameters]
        return torch.split(flat[: sum(counts)], counts)

    def launch(self, op: str) -> list[Handle[Any]]:
        """Start the reduction of the gradients to their owners."""
        for parameter in self.parameters:
            self.insert(parameter)
        if self.compressor is not None:
            return self.compressor.launch(op)
        self._handle = self._destination.reduce_async(self.padded, op)
        return [self._handle]

    def finish(self, op: str) -> None:
        """Once that is done: ``shards`` have their gradients."""
        if self.compressor is not None:
            self.compressor.finish(op)
        # A compressor leaves the result in the bucket; the plain reduction of slices in memory of its own.
        if self.owner is None:
            is_compressed, destination = self.compressor is not None, self._destination
            self.shards[0].grad = destination.part(self.padded) if is_compressed else destination.result(self._handle)
        else:
            for shard in self.shards:
                shard.grad = self._views[shard].detach()

    def spread(self) -> list[Handle[Any]]:
        """Start to bring the updated parameters to all ranks."""
        for p in (*self.shards, *self.parameters):
            p.grad = None
        if self.owner is None:
            return [verbs.allgather_async(self.shards[0].detach(), out=self.values, comm=self.comm)]
        return [verbs.broadcast_async(self.values, self.owner, comm=self.comm)]

    def leave(self) -> None:
        """Give the parameters memory of their own."""
        for p, view in zip(self.parameters, self.views, strict=True):
            if p.data_ptr() == view.data_ptr():
                p.data = view.clone()

    def is_in_place(self) -> bool:
        """Whether the parameters are still the bucket's memory."""
        return all(p.data_ptr() == view.data_ptr() for p, view in zip(self.parameters, self.views, strict=True))


class ShardedBuckets(Buckets):
    """The buckets of a ShardedOptimizer. Making them is collective over ``comm``.

    group_of: the optimizer's group of each parameter; owner_of: the owner of each; None in place of it: slices.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        comm: Communicator,
        group_of: dict[torch.nn.Parameter, int],
        owner_of: dict[torch.nn.Parameter, int] | None,
        compression: Compression | None,
    ) -> None:
        self.group_of = group_of
        self.owner_of = owner_of
        super().__init__(parameters, comm, compression=compression)

    def made(self, groups: Iterable[Sequence[torch.nn.Parameter]]) -> list[Bucket]:
        """New buckets, each of one group of the optimizer and one owner."""
        owners = self.owner_of or {}
        runs = runs_of(self.parameters, groups, lambda p: (self.group_of[p], owners.get(p)))
        padding = self.comm.size if self.owner_of is None else 1
        counts = [-(-sum(p.numel() for p in run) // padding) * padding for run in runs]
        memory = flat_memory(runs, self.comm, [2 * count for count in counts])
        return [
            ShardedBucket(run, flat, self.comm, self.group_of[run[0]], owners.get(run[0]), self.compression)
            for run, flat in zip(runs, memory, strict=True)
        ]

    def announce(self, op: str) -> list[Handle[Any]]:
        """Before a reduction: what a backward pass that broke off has left in the buckets does not count."""
        for bucket in self.all:
            for p, absent in bucket._absent.items():
                if p.grad is absent:
                    p.grad = None
        return super().announce(op)

    def has_gradient_here(self) -> Tensor:
        """Digests of the first batches alone: gradients have left their parameters by now; missing ones are zero."""
        return self.first_batches.append_digests(torch.ones(len(self.parameters), dtype=torch.uint8, device="cpu"))


def slice_of_state(bucket: ShardedBucket, saved: list[dict[str, Any]], group: dict[str, Any]) -> dict[str, Any]:
    """This rank's slice of the state of a bucket's parameters. ``group``: the options of the parameters' group."""
    entries: dict[str, Any] = {}
    shard = bucket.shards[0]
    for name in dict.fromkeys(name for of_parameter in saved for name in of_parameter):
        values = {p: entry[name] for p, entry in zip(bucket.parameters, saved, strict=True) if name in entry}
        first = next(iter(values.values()))
        has_shape = all(isinstance(x, Tensor) and x.shape == p.shape for p, x in values.items())
        if not has_shape or name in _OF_A_PARAMETER:
            if others := [x for x in values.values() if x != first]:
                raise ValueError(
                    f"the state's {name} is {first} for one parameter and {others[0]} for another, which share a "
                    "slice: take placement='round_robin', which keeps parameters apart"
                )
            entries[name] = first
            continue
        whole = torch.zeros(bucket.values.numel(), dtype=first.dtype, device="cpu")
        start: _Start = _STARTS_AT.get(name, lambda p, group: 0)
        for part, p in zip(bucket.split(whole), bucket.parameters, strict=True):
            shaped(part, p)[...] = values[p] if p in values else start(p.detach(), group)
        begin = bucket.comm.rank * shard.numel()
        entries[name] = whole[begin : begin + shard.numel()].clone()
    return entries
