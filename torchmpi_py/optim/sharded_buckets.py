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

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchmpi_py.collectives import verbs
from torchmpi_py.core.communicators import Communicator
from torchmpi_py.core.handles import Handle
from torchmpi_py.nn.absent_gradients import AbsentGradient
from torchmpi_py.nn.buckets import Buckets, flat_memory, runs_of
from torchmpi_py.nn.compressed_reducer import CompressedReducer
from torchmpi_py.nn.compression import Compression, Destination, Uncompressed
from torchmpi_py.nn.gradient_reducer import views_of

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


class ShardedReducer(CompressedReducer):
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
        *,
        group: int,
        owner: int | None,
        compression: Compression | None,
    ) -> None:
        self.values, gradients = memory.chunk(2)  # with padding, so that there are P equal slices
        self.group = group
        self.owner = owner
        destination = Slices(comm) if owner is None else Owner(owner, comm)
        padding = gradients[sum(p.numel() for p in parameters) :]  # perhaps of no element
        of_bucket = gradients, [*views_of(gradients, parameters), padding], comm, destination
        compressor = compression.compressor(*of_bucket) if compression is not None and comm.size > 1 else None
        self.has_state = compressor is not None
        super().__init__(parameters, gradients, comm, compressor or Uncompressed(*of_bucket))
        self.views = list(views_of(self.values, parameters))
        with torch.no_grad():
            for p, view in zip(parameters, self.views, strict=True):
                view.copy_(p)
                p.data = view
        self.shards: list[torch.nn.Parameter] = []
        if owner is None:
            self.shards = [torch.nn.Parameter(destination.part(self.values))]
        elif owner == comm.rank:
            self.shards = list(parameters)

    def finish(self, op: str) -> None:
        """Give ``shards`` their gradients."""
        self.compressor.finish(op)
        if self.owner is None:
            self.shards[0].grad = self.compressor.result()
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
        owners = owner_of or {}
        runs = runs_of(parameters, (), lambda p: (group_of[p], owners.get(p)))
        padding = comm.size if owner_of is None else 1
        counts = [-(-sum(p.numel() for p in run) // padding) * padding for run in runs]
        memory = flat_memory(runs, comm, [2 * count for count in counts])
        reducers = [
            ShardedReducer(run, flat, comm, group=group_of[run[0]], owner=owners.get(run[0]), compression=compression)
            for run, flat in zip(runs, memory, strict=True)
        ]
        super().__init__(parameters, comm, reducers)

    def begin(self) -> None:
        """Drop what a backward pass that broke off has left in the buckets."""
        for bucket in self.all:
            for p, absent in bucket._absent.items():
                if p.grad is absent:
                    p.grad = None

    def gradient_flags(self) -> Tensor:
        """Ones: gradients have left their parameters by now; missing ones are zero."""
        return torch.ones(len(self.parameters), dtype=torch.uint8, device="cpu")


def slice_of_state(bucket: ShardedReducer, saved: list[dict[str, Any]], group: dict[str, Any]) -> dict[str, Any]:
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
        for view, p in zip(views_of(whole, bucket.parameters), bucket.parameters, strict=True):
            view[...] = values[p] if p in values else start(p.detach(), group)
        begin = bucket.comm.rank * shard.numel()
        entries[name] = whole[begin : begin + shard.numel()].clone()
    return entries
