"""The buckets of a sharded optimizer. Each part of a bucket has an owner, which is the rank that updates the part.

Gradients are reduced to the owner of each part, and the owner sends the updated parameters to all ranks. A bucket holds
its parameters and their gradients in two flat tensors; ``p.data`` are views of the first tensor. A bucket is divided in
one of two ways:

- *slices*: P equal parts, one per rank. A reduce_scatter gives each rank the gradients of its slice, and an allgather
  sends the updated slices to all ranks. For S elements, each of the two moves S (P-1)/P elements, so together they move
  as many elements as one allreduce. A slice may begin or end within a parameter, so the optimizer must treat every
  element in the same way.
- *whole*: one rank owns the bucket. A reduce sends the gradients to the owner, and a broadcast sends the updated
  parameters to all ranks.

In both cases a rank has one shard for each parameter of its part. A shard is the whole parameter, or the flat piece of
the parameter that is in the slice. So the optimizer keeps a separate state for each parameter, as without sharding.
Gradients compressed to 16 bits use the same collectives. TopK and PowerSGD send their data to all ranks.

Sources: PaddlePaddle, for the sequence of reduce, update and broadcast. Rajbhandari et al., ZeRO (2020), stage 1.
"""

from __future__ import annotations

import copy
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._pytree import tree_map_only

from torchmpi_py.collectives import verbs
from torchmpi_py.core.communicators import Communicator
from torchmpi_py.core.handles import Handle
from torchmpi_py.core.tensors import check_rank
from torchmpi_py.nn.absent_gradients import AbsentGradient
from torchmpi_py.nn.buckets import Buckets, flat_memory, runs_of
from torchmpi_py.nn.compression import CompressedReducer, Compression, Compressor, Destination
from torchmpi_py.nn.elements import largest_amount
from torchmpi_py.nn.gradient_reducer import views_of

_State = Mapping[Any, dict[str, Any]]
_Numbers = Mapping[Parameter, int]
_ELEMENTWISE = {  # These classes update each element of a parameter independently of the other elements.
    getattr(torch.optim, name)
    for name in "ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD".split()  # noqa: SIM905
}

Placement = Literal["size", "round_robin", "hash"] | Callable[[int, Parameter], int]


def owners(parameters: list[Parameter], placement: Placement, optimizer_class: Any, size: int) -> dict[Parameter, int]:
    """Return the rank that owns each parameter; an empty dict means that every bucket is cut into slices."""
    if placement == "size":
        return {} if optimizer_class in _ELEMENTWISE else _balanced(parameters, size)
    rules = {"round_robin": lambda n, p: n % size, "hash": lambda n, p: zlib.crc32(str(n).encode()) % size}
    rule = placement if callable(placement) else rules.get(placement)
    if rule is None:
        raise ValueError(f"ShardedOptimizer: {placement=} is unknown; use 'size', 'round_robin', 'hash' or a function")
    return {
        p: check_rank("ShardedOptimizer", f"placement's owner of parameter {n}", rule(n, p), size)
        for n, p in enumerate(parameters)
    }


def _balanced(parameters: list[Parameter], size: int) -> dict[Parameter, int]:
    """Assign each parameter, the largest first, to the rank with the fewest elements, and return the owners."""
    num_elements, owners = [0] * size, {}
    for p in sorted(parameters, key=lambda p: -p.numel()):
        owners[p] = num_elements.index(min(num_elements))
        num_elements[owners[p]] += p.numel()
    return owners


class _Sharded(Destination):
    """A destination of reductions in which each rank needs only a part of the bucket."""

    def largest(self, part: Tensor) -> float:
        here = largest_amount(part)
        return float(verbs.allreduce(math.inf if math.isnan(here) else here, op="max", comm=self.comm))


class Slices(_Sharded):
    """A destination that gives each rank its slice of the reduced gradients."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__(comm)
        self._reduced: dict[torch.dtype, Tensor] = {}  # It is reused, because new memory costs more than the reduction.

    def reduced(self, x: Tensor) -> Tensor:
        """Return the memory into which this rank's slice of ``x`` is reduced."""
        if x.dtype not in self._reduced:
            self._reduced[x.dtype] = x.new_empty(x.numel() // self.comm.size)
        return self._reduced[x.dtype]

    def reduce_async(self, x: Tensor, op: str) -> Handle[Tensor]:
        return verbs.reduce_scatter_async(x, out=self.reduced(x), op=op, comm=self.comm)

    def bounds(self, count: int) -> tuple[int, int]:
        length = count // self.comm.size
        return self.comm.rank * length, (self.comm.rank + 1) * length

    def spread(self, flat: Tensor) -> Handle[Tensor]:
        """Start to send each rank's slice to all ranks. All ranks of ``comm`` must call it."""
        return verbs.allgather_async(self.part(flat), out=flat, comm=self.comm)


class Owner(_Sharded):
    """A destination that gives one rank all the reduced gradients."""

    def __init__(self, owner: int, comm: Communicator) -> None:
        super().__init__(comm)
        self.owner = owner

    def reduced(self, x: Tensor) -> Tensor:
        """Return the memory into which ``x`` is reduced."""
        return self.part(x)

    def reduce_async(self, x: Tensor, op: str) -> Handle[Tensor]:
        return verbs.reduce_async(x, self.owner, op=op, comm=self.comm)

    def result(self, handle: Handle[Tensor]) -> Tensor:
        return self.part(handle.wait())

    def bounds(self, count: int) -> tuple[int, int]:
        return 0, count if self.comm.rank == self.owner else 0

    def spread(self, flat: Tensor) -> Handle[Tensor]:
        """Start to send the owner's values to all ranks. All ranks of ``comm`` must call it."""
        return verbs.broadcast_async(flat, self.owner, comm=self.comm)


class GradientOfOwners(AbsentGradient):
    """A stand-in for a gradient, used from the backward pass until ``step``, while the owners have the gradient."""

    place = (
        "on other ranks of a ShardedOptimizer, in part or as a whole: clip with optimizer.clip_grad_norm_(...), or "
        "change this rank's gradients in optimizer.param_groups; drop gradients with optimizer.zero_grad()"
    )


class Part(NamedTuple):
    """The parameter of a shard, the shard's position in the parameter, and the memory of the shard's gradient."""

    parameter: Parameter
    begin: int  # offset of the shard in the parameter's memory
    gradient: Tensor  # memory into which the gradient is reduced, in the shard's shape


class ShardedReducer(CompressedReducer):
    """A bucket: some parameters of the optimizer's group number ``group``, and the memory of these parameters.

    The keys of ``shards`` are the parameters, or pieces of parameters, that this rank updates. The shards have
    gradients when a reduction is finished. ``p.grad`` of every other parameter is a stand-in until ``spread``.
    """

    absent_kind = GradientOfOwners

    def __init__(self, parameters: Sequence[Parameter], memory: Tensor, buckets: ShardedBuckets) -> None:
        owner, comm, compression = buckets.owner_of.get(parameters[0]), buckets.comm, buckets.compression
        self.group = buckets.group_of[parameters[0]]
        self.destination = Slices(comm) if owner is None else Owner(owner, comm)
        self.values, gradients = memory.chunk(2)  # Both are padded to P equal slices.
        padding = gradients[sum(p.numel() for p in parameters) :]  # The padding may be empty.
        of_bucket = gradients, [*views_of(gradients, parameters), padding], comm, self.destination
        compressor = compression.compressor(*of_bucket) if compression is not None and comm.size > 1 else None
        self.has_state = compressor is not None
        if compressor is None:
            compressor = Compressor(*of_bucket)
            compressor.part = self.destination.reduced(gradients)  # Reduced gradients are not copied to other memory.
        super().__init__(parameters, gradients, comm, compressor)
        self.views = list(views_of(self.values, parameters))
        with torch.no_grad():
            for p, view in zip(parameters, self.views, strict=True):
                view.copy_(p)
                p.data = view
        self.shards = dict(self._shards())

    def _shards(self) -> Iterator[tuple[Parameter, Part]]:
        first, last = self.destination.bounds(self.values.numel())
        end = 0
        for p in self.parameters:
            begin, end = end, end + p.numel()
            start, stop = max(begin, first), min(end, last)
            if first <= begin and end <= last:
                # With slices, p.grad stays a stand-in on every rank, so a shard needs its own Parameter.
                shard = p if isinstance(self.destination, Owner) else Parameter(p.detach())
            elif start < stop:
                shard = Parameter(self.values[start:stop])
            else:
                continue
            (gradient,) = views_of(self.compressor.part[start - first :], [shard])
            yield shard, Part(p, start - begin, gradient)

    def finish(self, op: str) -> None:
        """Finish a reduction with ``op``, and set the gradients of ``shards``."""
        self.compressor.finish(op)
        for shard, part in self.shards.items():
            shard.grad = part.gradient.detach()

    def spread(self) -> Handle[Any]:
        """Drop the gradients, and start to send the updated parameters to all ranks. All ranks must call it."""
        for p in (*self.shards, *self.parameters):
            p.grad = None
        return self.destination.spread(self.values)

    def leave(self) -> None:
        """Give each parameter its own memory, and drop the stand-ins of gradients."""
        for p in self.parameters:
            p.data = p.detach().clone()
            p.grad = None if p.grad is self._absent[p] else p.grad

    def is_in_place(self) -> bool:
        """Return whether the parameters are still views of the bucket's memory."""
        return all(p.data_ptr() == view.data_ptr() for p, view in zip(self.parameters, self.views, strict=True))

    def cut(self, state: _State) -> dict[Any, dict[str, Any]]:
        """Return the state of each shard, copied from the ``state`` of the whole parameters."""
        return {
            shard: {name: _cut(x, shard, part) for name, x in state[part.parameter].items()}
            for shard, part in self.shards.items()
            if state.get(part.parameter)
        }

    def join(self, state: _State) -> dict[Any, dict[str, Any]]:
        """Return the state of each whole parameter, joined from the states of all ranks' shards.

        ``state`` is the state of this rank's shards. All ranks of ``comm`` must make this call.
        """
        number_of = {p: number for number, p in enumerate(self.parameters)}
        here = {number_of[part.parameter]: state[shard] for shard, part in self.shards.items() if state.get(shard)}
        of_ranks = verbs.allgather_object(tree_map_only(Tensor, lambda x: x.detach().cpu(), here), comm=self.comm)
        whole_state = {}
        for p, number in number_of.items():
            if parts := [of_rank[number] for of_rank in of_ranks if number in of_rank]:
                whole_state[p] = {name: _joined(p, [part[name] for part in parts]) for name in parts[0]}
        return whole_state


def _cut(x: Any, shard: Tensor, part: Part) -> Any:
    if not isinstance(x, Tensor) or x.shape != part.parameter.shape:
        return copy.deepcopy(x)  # The value may be a number of steps, for example.
    flat = x.new_empty(x.numel())
    next(views_of(flat, [part.parameter])).copy_(x)  # Copy in the order of the parameter's memory.
    return next(views_of(flat[part.begin :], [shard])).clone()


def _joined(p: Tensor, parts: list[Any]) -> Any:
    """Return one entry of the state of ``p``, joined from the entries of the shards (``parts``, in rank order)."""
    if not isinstance(parts[0], Tensor) or not parts[0].dim():
        return parts[0]
    whole = parts[0] if len(parts) == 1 else next(views_of(torch.cat(parts), [p]))
    return whole.to(p.device)


class ShardedBuckets(Buckets):
    """The buckets of a ShardedOptimizer. All ranks of ``comm`` must create them together.

    ``group_of`` maps each trainable parameter to the number of its group in the optimizer. ``owner_of`` maps each
    parameter to its owner; an empty mapping means that every bucket is cut into slices.
    """

    all: list[ShardedReducer]  # type: ignore[assignment]

    def __init__(
        self, comm: Communicator, group_of: _Numbers, owner_of: _Numbers, compression: Compression | None
    ) -> None:
        self.comm, self.group_of, self.owner_of, self.compression = comm, group_of, owner_of, compression
        runs = runs_of(list(group_of), (), lambda p: (group_of[p], owner_of.get(p)))
        padding = 1 if owner_of else comm.size
        counts = [-(-sum(p.numel() for p in run) // padding) * padding for run in runs]
        memory = flat_memory(runs, comm, [2 * count for count in counts])
        reducers = [ShardedReducer(run, flat, self) for run, flat in zip(runs, memory, strict=True)]
        super().__init__(list(group_of), comm, reducers)
