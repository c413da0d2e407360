"""An optimizer whose state is divided among the ranks: each parameter, or slice of a bucket, is updated by one rank.

1. Backward reduces each bucket of gradients to the owners of its parts, while other gradients are computed.
2. ``step`` updates what this rank owns, bucket by bucket, with a plain torch optimizer, and
3. brings the updated parameters to all ranks, while later buckets are updated.

Data on the wire: as much as with plain averaging. State on each rank: 1/P of it. Sources: ``sharded_buckets``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from torchmpi_py.collectives import verbs
from torchmpi_py.core.communicators import Communicator, resolve
from torchmpi_py.core.handles import Handle, wait_all
from torchmpi_py.errors import RanksDisagree
from torchmpi_py.nn.async_backward import AsyncBackward
from torchmpi_py.nn.compression import Compression, check_compression
from torchmpi_py.nn.gradient_reducer import views_of
from torchmpi_py.nn.synchronize import check_whole
from torchmpi_py.optim.owners import Placement, owners
from torchmpi_py.optim.sharded_buckets import GradientOfOwners, ShardedBuckets, ShardedReducer, slice_of_state
from torchmpi_py.optim.sharded_gradients import clip, share_overflow
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
    The gradient of a parameter that no rank used counts as zero. So weight decay, momentum and the moments of Adam move
    that parameter, where torch would leave it as it is: freeze it before the optimizer is made.
    ``state_dict`` is that of the plain optimizer, the same on every rank and for any number of ranks; it is collective.
    ``load_state_dict`` takes it, on every rank. With slices, parameters of one bucket share the number of steps, also
    one whose state is missing.
    ``param_groups`` hold what this rank updates; schedulers and GradScaler work with them. ``parameters`` are the whole
    ones. ``from_optimizer`` takes an optimizer that is there already.

    Raises TypeError or ValueError for what is not as above, RanksDisagree by the first step where parameters differ.
    """

    def __init__(
        self,
        parameters: Iterable[Any],
        optimizer_class: type[torch.optim.Optimizer],
        *,
        placement: Placement = "size",
        comm: Communicator | None = None,
        average: bool = True,
        backward_passes_per_step: int = 1,
        compression: Compression | None = None,
        **defaults: Any,
    ) -> None:
        groups = _groups(parameters)
        _check_parameters([p for group in groups for p in group["params"]], optimizer_class)
        how = {"average": average, "frequency": backward_passes_per_step}
        self._divide(optimizer_class(groups, **defaults), placement, comm, compression, how)

    @classmethod
    def from_optimizer(
        cls,
        optimizer: torch.optim.Optimizer,
        *,
        placement: Placement = "size",
        comm: Communicator | None = None,
        average: bool = True,
        backward_passes_per_step: int = 1,
        compression: Compression | None = None,
    ) -> ShardedOptimizer:
        """A sharded optimizer that uses ``optimizer``, with its groups and its state, which all ranks have alike.

        Schedulers of ``optimizer`` go on working. ``to_optimizer`` gives it its parameters back. Collective.
        """
        sharded = cls.__new__(cls)
        _check_parameters([p for group in optimizer.param_groups for p in group["params"]], type(optimizer))
        how = {"average": average, "frequency": backward_passes_per_step}
        sharded._divide(optimizer, placement, comm, compression, how)
        return sharded

    def to_optimizer(self) -> torch.optim.Optimizer:
        """End the sharding; the plain optimizer, with the whole parameters and the whole state. Collective."""
        state = self.state_dict()
        self.remove()
        self.optimizer.state.clear()
        self.optimizer.load_state_dict(state)
        return self.optimizer

    def _divide(
        self,
        optimizer: torch.optim.Optimizer,
        placement: Placement,
        comm: Communicator | None,
        compression: Compression | None,
        how: dict[str, Any],
    ) -> None:
        """Let ``optimizer`` hold this rank's shards in place of its parameters. ``how``: gradients are reduced."""
        super().__init__()
        check_compression(compression)
        self.comm = resolve(comm)
        self.compression = compression
        self._num_loads = 0
        self._state_of_untrained: dict[torch.nn.Parameter, dict[str, Any]] = {}  # frozen: no rank updates them
        state = optimizer.state_dict()
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        self.parameters = [p for members in self._groups for p in members]
        group_of = {p: index for index, members in enumerate(self._groups) for p in members}
        owner_of = owners(self.parameters, placement, type(optimizer), self.comm.size)
        trained = [p for p in self.parameters if p.requires_grad]
        self._module = torch.nn.ParameterList(trained)
        self.reduction = AsyncBackward(
            self._module,
            comm=self.comm,
            make_buckets=lambda _, trained, comm: ShardedBuckets(trained, comm, group_of, owner_of, compression),
            before_pass=self._check_pass,
            on_reduction=self._wait,
            **how,
        )
        self._buckets: list[ShardedReducer] = self.reduction.buckets.all  # type: ignore[assignment]
        for index, group in enumerate(optimizer.param_groups):
            group["params"] = [shard for bucket in self._buckets if bucket.group == index for shard in bucket.shards]
        # GradScaler wants a gradient on every rank; this one belongs to no bucket, so that no step updates it.
        self._stand_in = torch.nn.Parameter(torch.zeros(1, device=self.parameters[0].device))
        if not any(group["params"] for group in optimizer.param_groups):
            optimizer.param_groups[0]["params"] = [self._stand_in]
        self.optimizer = optimizer
        self.optimizer.state.clear()
        if state["state"]:
            try:
                self.load_state_dict(state)
            except BaseException:  # leave the optimizer as it was
                self.remove()
                self.optimizer.state.clear()
                self.optimizer.load_state_dict(state)
                raise

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update what this rank owns, and bring the parameters to all ranks. Collective.

        closure: evaluated once, before the update.
        """
        loss = evaluated(closure)
        self._check_thawed()
        self._check_frozen()
        self.synchronize()
        self.check_equal()
        # A bucket's parameters travel while the next bucket is updated; every rank starts all of them, in one order.
        handles: list[Handle[Any]] = []
        groups, updated = self.optimizer.param_groups, {}
        for bucket in self._buckets:
            if bucket.shards:
                updated[bucket.group] = self._update(bucket)
            handles += bucket.spread()
        # What an optimizer counts in a group, it counts once a step, not once a bucket.
        for index, values in updated.items():
            groups[index].update(values)
        wait_all(handles)
        self._is_reduced = False
        self.reduction.order.num_updates += 1
        return loss

    def synchronize(self) -> None:
        """Reduce gradients that are not reduced yet, as after no backward pass, or fewer than on other ranks."""
        if not self._is_reduced:
            super().synchronize()
            self._share_overflow()

    def _update(self, bucket: ShardedReducer) -> dict[str, Any]:
        """The optimizer's step, for one bucket alone; what its group holds then beside the parameters."""
        groups = self.optimizer.param_groups
        group = {**groups[bucket.group], "params": bucket.shards}
        self.optimizer.param_groups = [group]
        try:
            self.optimizer.step()
        finally:
            self.optimizer.param_groups = groups
        del group["params"]
        return group

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their norm is at most ``max_norm``; returns the norm. Collective.

        As ``torch.nn.utils.clip_grad_norm_``, between the backward pass and ``step``. Gradients that are not reduced
        yet are reduced first.
        """
        self.synchronize()
        return clip(self._gradients_here(), max_norm, norm_type, self.comm)

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
        for group, members in zip(self.optimizer.param_groups, self._groups, strict=True):
            group["params"] = members

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """TypeError: state is divided when the optimizer is made."""
        raise TypeError("a ShardedOptimizer takes no more parameters; make another one, with its state_dict()")

    def state_dict(self) -> dict[str, Any]:
        """The plain optimizer's state, on every rank. Collective. RanksDisagree if only some ranks have loaded one.

        RuntimeError between the backward passes of one step: no state has gradients.
        """
        self._check_between_steps("state_dict")
        if len(set(verbs.allgather(self._num_loads, comm=self.comm))) > 1:
            raise RanksDisagree(
                "ShardedOptimizer: load_state_dict was not called on all ranks; every rank loads the same"
            )
        number_of = {p: number for number, p in enumerate(self.parameters)}
        state = {number_of[p]: copy.deepcopy(entries) for p, entries in self._state_of_untrained.items()}
        for bucket in self._buckets:
            for p, entries in zip(bucket.parameters, self._states_of(bucket), strict=True):
                if entries:
                    state[number_of[p]] = entries
        groups = [
            {**group, "params": [number_of[p] for p in members]}
            for group, members in zip(self._values_of_groups(), self._groups, strict=True)
        ]
        return {"state": dict(sorted(state.items())), "param_groups": groups}

    def _values_of_groups(self) -> list[dict[str, Any]]:
        """What the groups hold beside their parameters, each as a rank has it that updates some of them. Collective."""
        values = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        updaters = {bucket.group: bucket.owner for bucket in self._buckets if bucket.owner is not None}
        if not updaters:
            return values
        of_ranks = verbs.allgather_object(values, comm=self.comm)
        return [of_ranks[updaters.get(index, self.comm.rank)][index] for index in range(len(values))]

    def _states_of(self, bucket: ShardedReducer) -> list[dict[str, Any]]:
        """The optimizer's state of each parameter of a bucket. Collective."""
        # A whole bucket's owner has the whole state.
        if bucket.owner is not None:
            here = [self.optimizer.state.get(p, {}) for p in bucket.parameters]
            states: list[dict[str, Any]] = verbs.broadcast_object(here, bucket.owner, comm=self.comm)
            return states
        # Of slices, entries of the slice's shape are joined; others (numbers of steps) are the same for all parameters.
        (shard,) = bucket.shards
        states = [{} for _ in bucket.parameters]
        for name, value in self.optimizer.state.get(shard, {}).items():
            if isinstance(value, Tensor) and value.shape == shard.shape:
                whole = verbs.allgather(value, comm=self.comm)
                values: list[Any] = [view.clone() for view in views_of(whole, bucket.parameters)]
            else:
                values = [value.clone() if isinstance(value, Tensor) else value for _ in bucket.parameters]
            for entries, of_parameter in zip(states, values, strict=True):
                entries[name] = of_parameter
        return states

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the state of a plain optimizer of these parameters, or of this class on any number of ranks."""
        groups, members = state_dict["param_groups"], [len(group) for group in self._groups]
        if [len(group["params"]) for group in groups] != members:
            raise ValueError(
                f"the state has groups of {[len(group['params']) for group in groups]} parameters, this optimizer of "
                f"{members}"
            )
        number_of = dict(zip(self.parameters, (n for group in groups for n in group["params"]), strict=True))
        self._num_loads += 1
        trained = {p for bucket in self._buckets for p in bucket.parameters}
        self._state_of_untrained = {
            p: copy.deepcopy(state_dict["state"][number])
            for p, number in number_of.items()
            if p not in trained and number in state_dict["state"]
        }
        # A plain state of what this rank updates: its parameters are the shards, numbered in the order of the groups.
        state: dict[int, dict[str, Any]] = {}
        shards = [shard for group in self.optimizer.param_groups for shard in group["params"]]
        bucket_of = {shard: bucket for bucket in self._buckets for shard in bucket.shards}
        for index, shard in enumerate(shards):
            if shard is self._stand_in:
                continue
            bucket = bucket_of[shard]
            saved = {p: state_dict["state"].get(number_of[p], {}) for p in bucket.parameters}
            options = groups[bucket.group]
            entries = slice_of_state(bucket, list(saved.values()), options) if bucket.owner is None else saved[shard]
            if entries:
                state[index] = copy.deepcopy(entries)  # torch would share tensors with it
        counts = iter(range(len(shards)))
        own_groups = [
            {**group, "params": [next(counts) for _ in own["params"]]}
            for group, own in zip(groups, self.optimizer.param_groups, strict=True)
        ]
        super().load_state_dict({"state": state, "param_groups": own_groups})

    def _wait(self) -> None:
        """At the end of the backward pass: each rank has the gradients that it owns."""
        self.reduction.synchronize()
        self._is_reduced = True
        self._share_overflow()

    def _gradients_here(self) -> list[Tensor]:
        """The reduced gradients that this rank owns."""
        gradients = [shard.grad for bucket in self._buckets for shard in bucket.shards]
        return [x for x in gradients if x is not None and x.numel()]

    def _share_overflow(self) -> None:
        """Let an overflow show on all ranks; a rank that owns nothing has the stand-in for it. Collective."""
        here = self._gradients_here()
        self._stand_in.grad = torch.zeros_like(self._stand_in)
        share_overflow(here, here[0] if here else self._stand_in.grad, self.comm)

    def _check_frozen(self) -> None:
        """RuntimeError where a parameter was frozen later: slices have no way to leave it out."""
        trained = self.reduction.names
        if frozen := [number for number, p in enumerate(self.parameters) if p in trained and not p.requires_grad]:
            raise RuntimeError(
                f"parameter {frozen[0]} was frozen after the ShardedOptimizer was made, which would still move it by "
                "its moments and its weight decay: make another one, with its state_dict() (in the engine: call train "
                "again)"
            )

    def _check_thawed(self) -> None:
        """RuntimeError where a parameter has become trainable later."""
        trained = self.reduction.names
        if late := [number for number, p in enumerate(self.parameters) if p.requires_grad and p not in trained]:
            raise RuntimeError(
                f"parameter {late[0]} has become trainable since the ShardedOptimizer was made, which would not update "
                "it: make another one, with its state_dict()"
            )

    def _check_pass(self) -> None:
        if self._is_reduced:
            raise RuntimeError(GradientOfOwners.why)
        self._check_thawed()
        if not all(bucket.is_in_place() for bucket in self._buckets):
            raise RuntimeError(
                "parameters have other memory than when the ShardedOptimizer was made, as after module.to(...): make "
                "the optimizer after that"
            )


def _groups(parameters: Iterable[Any]) -> list[dict[str, Any]]:
    """Groups of parameters, as torch's optimizers take them: copies."""
    given = list(parameters)
    groups = [dict(group) for group in given] if given and isinstance(given[0], dict) else [{"params": given}]
    for group in groups:
        params = group["params"]
        group["params"] = [params] if isinstance(params, Tensor) else list(params)
        group["params"] = [p[1] if isinstance(p, tuple) else p for p in group["params"]]  # named_parameters()
    return groups


def _check_parameters(parameters: list[Any], optimizer_class: type[torch.optim.Optimizer]) -> None:
    if optimizer_class is torch.optim.LBFGS:
        raise TypeError("ShardedOptimizer: LBFGS needs closures and all gradients; take optim.DistributedOptimizer")
    if not parameters:
        raise ValueError("ShardedOptimizer: no parameters; give module.parameters()")
    for number, p in enumerate(parameters):
        if not isinstance(p, torch.nn.Parameter):
            raise TypeError(f"ShardedOptimizer: parameter {number} is a {type(p).__name__}; give torch.nn.Parameters")
    check_whole("ShardedOptimizer", dict(enumerate(parameters)))
    if len(set(parameters)) < len(parameters):
        raise ValueError("ShardedOptimizer: a parameter is given twice")
