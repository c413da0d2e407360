"""An optimizer whose state is divided among the ranks: each parameter, or slice of a bucket, is updated by one rank.

1. Backward reduces each bucket of gradients to the owners of its parts, while other gradients are computed.
2. ``step`` updates what this rank owns, bucket by bucket, with a plain torch optimizer, and
3. brings the updated parameters to all ranks, while later buckets are updated.

Data on the wire: as much as with plain averaging. State on each rank: 1/P of it. Sources: ``sharded_buckets``.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from torchmpi_py.collectives import verbs
from torchmpi_py.core.communicators import Communicator, resolve
from torchmpi_py.core.handles import Handle, wait_all
from torchmpi_py.errors import RanksDisagree
from torchmpi_py.nn.compression import Compression, check_compression
from torchmpi_py.nn.elements import is_finite
from torchmpi_py.nn.synchronize import check_whole
from torchmpi_py.optim.sharded_buckets import Placement, ShardedBuckets, ShardedReducer, owners
from torchmpi_py.optim.wrapper import ReducingOptimizer, evaluated


class ShardedOptimizer(ReducingOptimizer):
    """``optimizer_class(parameters, **defaults)``, with its state divided among the ranks of ``comm``.

    Gradients are averaged during the backward pass, so that plain loops stay as they are. Afterwards each rank has
    those that it owns, and elsewhere reading or changing ``p.grad`` raises RuntimeError until ``step``: clip with
    ``clip_grad_norm_`` of this object, and drop gradients with its ``zero_grad``. Parameters become views of flat
    memory, which ``torch.save`` would store whole: save clones. The class's step hooks run once for each bucket. Every
    rank makes the optimizer with the same arguments, runs as many backward passes, and calls ``step`` as often.
    ``remove()`` ends it.

    parameters: as torch's; parameters equal on all ranks, which the first step checks, on one device.
    optimizer_class: a class of torch optimizers without closures (not LBFGS).
    placement: who updates what. "size": equal slices, where the class treats every element alike (SGD, Adam, AdamW and
        others of torch.optim); with any other class whole parameters, the largest first to the rank with the least. An
        update of a parameter may not depend on other parameters.
        "round_robin", "hash" (of its number): whole parameters. A function of (number of the parameter, parameter):
        the rank that owns it.
    average: mean over the ranks; False: sum.
    backward_passes_per_step: gradients of so many passes are added up, and reduced in the last one.
    compression: of gradients on their way to the owners; updated parameters travel as they are.

    Sparse gradients (``Embedding(sparse=True)``) are made dense.
    A parameter that no rank has used in a step is left as it is, as by torch. ``step`` drops the gradients.
    ``state_dict`` is that of the plain optimizer, the same on every rank and for any number of ranks; it is collective.
    ``load_state_dict`` takes it, on every rank.
    ``param_groups`` hold what this rank updates; schedulers and GradScaler work with them. ``parameters`` are the whole
    ones. ``from_optimizer`` takes an optimizer that is there already.

    Raises TypeError or ValueError for what is not as above, RanksDisagree by the first step where parameters differ.
    """

    ends_by = "take the plain optimizer that its to_optimizer() returns"

    def __init__(
        self,
        parameters: Iterable[Any],
        optimizer_class: Callable[..., torch.optim.Optimizer],
        *,
        placement: Placement = "size",
        comm: Communicator | None = None,
        average: bool = True,
        backward_passes_per_step: int = 1,
        compression: Compression | None = None,
        **defaults: Any,
    ) -> None:
        super().__init__()
        self.optimizer = optimizer_class(parameters, **defaults)
        self.whole_groups = [list(group["params"]) for group in self.optimizer.param_groups]
        self.parameters = [p for members in self.whole_groups for p in members]
        _check(self.parameters, self.optimizer)
        check_compression(compression)
        self.comm = resolve(comm)
        self._num_loads = 0
        group_of = {p: index for index, members in enumerate(self.whole_groups) for p in members if p.requires_grad}
        owner_of = owners(self.parameters, placement, type(self.optimizer), self.comm.size)
        self._module = torch.nn.ParameterDict({f"parameter {n}": p for n, p in enumerate(self.parameters)})
        self._register(
            self._module,
            make_buckets=lambda module, trained, comm: ShardedBuckets(comm, group_of, owner_of, compression),
            frequency=backward_passes_per_step,
            average=average,
        )
        self._buckets: list[ShardedReducer] = self.reduction.buckets.all  # type: ignore[assignment]
        # GradScaler wants a gradient on every rank; this one belongs to no bucket, so that no step updates it.
        self._stand_in = torch.nn.Parameter(torch.zeros(1, device=self.parameters[0].device))
        self._hold_shards()

    @classmethod
    def from_optimizer(cls, optimizer: torch.optim.Optimizer, **options: Any) -> ShardedOptimizer:
        """A sharded optimizer that uses ``optimizer``, with its groups and its state, which all ranks have alike.

        Schedulers of ``optimizer`` go on working. ``to_optimizer`` gives it its parameters back. Collective.

        Args:
            optimizer: any optimizer without closures.
            options: placement, comm, average, backward_passes_per_step and compression, as in the constructor.
        """
        return cls(optimizer.param_groups, lambda groups: optimizer, **options)

    def to_optimizer(self) -> torch.optim.Optimizer:
        """End the sharding; the plain optimizer, with the whole parameters and the whole state. Collective."""
        state = self.state_dict()
        self.remove()
        self.optimizer.state.clear()
        self.optimizer.load_state_dict(state)
        return self.optimizer

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update what this rank owns, and bring the parameters to all ranks. Collective.

        closure: evaluated once, before the update.
        """
        loss = evaluated(closure)
        self.synchronize()
        for bucket in self._buckets:
            for shard, part in bucket.shards.items():
                if part.parameter.grad is None:  # no rank has used it, or the user has dropped its gradient
                    shard.grad = None
        # A bucket's parameters travel while the next bucket is updated; every rank starts all of them, in one order.
        handles: list[Handle[Any]] = []
        groups, updated = self.optimizer.param_groups, {}
        try:
            for bucket in self._buckets:
                if bucket.shards:
                    updated[bucket.group] = {**groups[bucket.group], "params": list(bucket.shards)}
                    self.optimizer.param_groups = [updated[bucket.group]]
                    self.optimizer.step()
                handles.append(bucket.spread())
        finally:
            self.optimizer.param_groups = groups
        # What an optimizer counts in a group, it counts once a step, not once a bucket.
        for index, group in updated.items():
            groups[index].update({**group, "params": groups[index]["params"]})
        self._is_reduced = False
        self.reduction.order.num_updates += 1
        wait_all(handles)
        return loss

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their norm is at most ``max_norm``; returns the norm. Collective.

        As ``torch.nn.utils.clip_grad_norm_``, between the backward pass and ``step``. Gradients that are not reduced
        yet are reduced first. The norm is in float64.
        """
        self.synchronize()
        gradients = self._gradients_here()
        norms = [torch.linalg.vector_norm(x, norm_type).double().cpu() for x in gradients if x.numel()]
        norm: Tensor = torch.linalg.vector_norm(torch.stack([torch.zeros((), dtype=torch.double), *norms]), norm_type)
        norm = torch.linalg.vector_norm(verbs.allgather(norm.view(1), comm=self.comm), norm_type)
        factor = float((max_norm / (norm + 1e-6)).clamp(max=1.0))
        for gradient in gradients:
            gradient *= factor
        return norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients. RuntimeError between the backward passes of one step, whose gradients would be lost."""
        super().zero_grad(set_to_none)
        for p in self.parameters:
            p.grad = None

    def remove(self) -> None:
        """End the reductions; the parameters get memory of their own, and the plain optimizer holds them again.

        ``state_dict`` of this object can still be asked.
        """
        super().remove()
        for bucket in self._buckets:
            bucket.leave()
        self._hold_parameters()

    def state_dict(self) -> dict[str, Any]:
        """The plain optimizer's state, on every rank. Collective. RanksDisagree if only some ranks have loaded one.

        RuntimeError between the backward passes of one step: no state has gradients.
        """
        groups: Any = self.optimizer.param_groups
        state: Any = self.optimizer.state
        self._check_between_steps("state_dict")
        # The options of a group come from a rank that updates some of its parameters.
        here = {bucket.group: {**groups[bucket.group], "params": None} for bucket in self._shards.values()}
        of_ranks = verbs.allgather_object((self._num_loads, here), comm=self.comm)
        if len({num_loads for num_loads, _ in of_ranks}) > 1:
            raise RanksDisagree("ShardedOptimizer: only some ranks called load_state_dict; every rank loads the same")
        updated = collections.ChainMap(*(groups_there for _, groups_there in of_ranks))
        whole = {key: entries for key, entries in state.items() if key not in self._shards}  # as of frozen parameters
        for bucket in self._buckets:
            whole |= bucket.join(state)
        try:
            self.optimizer.state = {p: whole.pop(p) for p in self.parameters if p in whole} | whole  # type: ignore[assignment]
            self.optimizer.param_groups = [
                {**group, **updated.get(index, {}), "params": self.whole_groups[index]}
                for index, group in enumerate(groups)
            ]
            return self.optimizer.state_dict()
        finally:
            self.optimizer.param_groups, self.optimizer.state = groups, state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the state of a plain optimizer of these parameters, or of this class on any number of ranks."""
        self._hold_parameters()
        try:
            super().load_state_dict(state_dict)
            self._num_loads += 1
        finally:
            self._hold_shards()

    def _hold_parameters(self) -> None:
        """Let the optimizer hold the whole parameters."""
        for group, members in zip(self.optimizer.param_groups, self.whole_groups, strict=True):
            group["params"] = members

    def _hold_shards(self) -> None:
        """Let the optimizer hold what this rank updates, with its part of the state, in place of the parameters."""
        trained, whole = self.reduction.names, self.optimizer.state
        state: dict[Any, Any] = {key: entries for key, entries in whole.items() if key not in trained}
        for bucket in self._buckets:
            state |= bucket.cut(whole)
        self.optimizer.state = collections.defaultdict(dict, state)
        self._shards = {shard: bucket for bucket in self._buckets for shard in bucket.shards}
        self.optimizer.param_groups = [
            {**group, "params": [shard for shard, bucket in self._shards.items() if bucket.group == index]}
            for index, group in enumerate(self.optimizer.param_groups)
        ]
        self.optimizer.param_groups[0]["params"].append(self._stand_in)

    def _gradients_here(self) -> list[Tensor]:
        """The reduced gradients that this rank owns."""
        return [shard.grad for shard in self._shards if shard.grad is not None]

    def _end_reduction(self) -> None:
        """Let an overflow show on all ranks, so that a GradScaler skips a step on all or on none. Collective."""
        super()._end_reduction()
        is_finite_here = all(map(is_finite, self._gradients_here()))
        is_everywhere = verbs.allreduce(int(is_finite_here), op="min", comm=self.comm)
        self._stand_in.grad = torch.full_like(self._stand_in, 0.0 if is_everywhere else math.nan)

    def check_pass(self) -> None:
        super().check_pass()
        if not all(bucket.is_in_place() for bucket in self._buckets):
            raise RuntimeError("parameters lie in other memory than before: make the optimizer after module.to(...)")


def _check(parameters: list[Any], optimizer: torch.optim.Optimizer) -> None:
    if isinstance(optimizer, torch.optim.LBFGS) or hasattr(optimizer, "eval"):  # as schedule-free optimizers have
        name = type(optimizer).__name__
        raise TypeError(f"ShardedOptimizer: {name} needs all parameters and gradients; take optim.DistributedOptimizer")
    for number, p in enumerate(parameters):
        if not isinstance(p, torch.nn.Parameter):
            raise TypeError(f"ShardedOptimizer: parameter {number} is a {type(p).__name__}; give torch.nn.Parameters")
    check_whole("ShardedOptimizer", dict(enumerate(parameters)))
    if len(set(parameters)) < len(parameters):
        raise ValueError("ShardedOptimizer: a parameter is given twice")
