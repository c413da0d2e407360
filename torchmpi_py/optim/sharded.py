"""A sharded optimizer (ZeRO-1): the state is divided among the ranks, and each rank updates a part of the parameters.

1. The backward pass reduces each bucket of gradients to the owners of the bucket's parts, while it computes other
   gradients.
2. ``step`` updates this rank's parts, bucket by bucket, with a plain torch optimizer.
3. ``step`` sends the updated parameters of a bucket to all ranks, while later buckets are updated.

The ranks send the same number of bytes as with plain averaging, and each of P ranks holds 1/P of the state. The sources
are listed in ``sharded_buckets``.
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
    """Run ``optimizer_class(parameters, **defaults)`` with its state divided among the ranks of ``comm`` (ZeRO-1).

    Every rank must create the optimizer with the same arguments, run the same number of backward passes, and call
    ``step`` the same number of times. Gradients are averaged during the backward pass, so plain training loops need no
    other change. After a backward pass, each rank has only the gradients of its own shards. Reading or changing any
    other ``p.grad`` raises RuntimeError until ``step``. So clip with this optimizer's ``clip_grad_norm_``, and drop
    gradients with its ``zero_grad``. ``step`` also drops the gradients.

    **Overwrites** ``p.data``: parameters become views of flat memory. ``torch.save`` of a parameter would store all of
    this memory, so save clones. ``step`` of ``optimizer_class`` and its step hooks run once per bucket. Sparse
    gradients (``Embedding(sparse=True)``) become dense. A parameter that no rank used in a step is not changed.

    ``param_groups`` holds this rank's shards, and works with schedulers and GradScaler. ``parameters`` holds the whole
    parameters. Call ``state_dict`` and ``load_state_dict`` on every rank. The state has the format of the plain
    optimizer's state, is equal on every rank, and can be loaded on any number of ranks. ``from_optimizer`` converts an
    existing optimizer, and ``remove()`` ends the sharding.

    Args:
        parameters (iterable): parameters or parameter groups, as in torch. They must be on one device. Their values
            must be equal on all ranks, which the first step checks.
        optimizer_class (type): torch optimizer class that needs no closure (so not LBFGS). The update of a parameter
            must not depend on other parameters.
        placement (str or callable): rule that assigns parameters to ranks. "size" (default) assigns equal slices if the
            class updates every element in the same way (SGD, Adam, AdamW and others of torch.optim). For any other
            class, "size" assigns whole parameters, the largest first, each to the rank with the fewest elements.
            "round_robin" and "hash" assign whole parameters by their number. A function receives (number, parameter)
            and returns the rank.
        comm (Communicator): ranks that share the state; default None, the current level.
        average (bool): True (default) computes the mean of the gradients over the ranks; False computes the sum.
        backward_passes_per_step (int): number of backward passes whose gradients are added up before a step; default 1.
        compression (Compression): compression of the gradients that are sent to the owners; default None. Updated
            parameters are sent uncompressed.
        **defaults (object): options of ``optimizer_class``, such as ``lr``.

    Raises:
        TypeError: a parameter is not a torch.nn.Parameter, or ``optimizer_class`` needs a closure.
        ValueError: a parameter occurs twice, another registration already reduces a parameter, or ``placement`` is
            unknown.
        RanksDisagree: on every rank, no later than in the first step, if parameters differ between ranks.

    Examples:
        >>> net = torch.nn.Linear(4, 1)
        >>> mpi.nn.synchronize_parameters(net)
        >>> optimizer = mpi.optim.ShardedOptimizer(net.parameters(), torch.optim.Adam, lr=0.01)
        >>> for x in torch.randn(3, 8, 4):
        ...     optimizer.zero_grad()
        ...     net(x).square().mean().backward()
        ...     norm = optimizer.clip_grad_norm_(1.0)
        ...     optimizer.step()
        >>> mpi.nn.check_with_allreduce(net)
        >>> optimizer.remove()
    """

    ends_by = "use the plain optimizer that to_optimizer() returns"

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
        # GradScaler needs a gradient on every rank. No bucket holds this parameter, so no step updates it.
        self._stand_in = torch.nn.Parameter(torch.zeros(1, device=self.parameters[0].device))
        self._hold_shards()

    @classmethod
    def from_optimizer(cls, optimizer: torch.optim.Optimizer, **options: Any) -> ShardedOptimizer:
        """Create a sharded optimizer with the groups and the state of ``optimizer``. Every rank must make this call.

        The state of ``optimizer`` must be equal on all ranks. Schedulers of ``optimizer`` keep working.
        ``to_optimizer`` reverses this call.

        Args:
            optimizer (torch.optim.Optimizer): any plain optimizer that needs no closure.
            **options (object): ``placement``, ``comm``, ``average``, ``backward_passes_per_step`` and ``compression``,
                as in the constructor.

        Returns:
            A ShardedOptimizer that uses ``optimizer``.

        Raises:
            TypeError: as in the constructor.
            ValueError: as in the constructor.
        """
        return cls(optimizer.param_groups, lambda groups: optimizer, **options)

    def to_optimizer(self) -> torch.optim.Optimizer:
        """End the sharding, and return the plain optimizer. Every rank must make this call.

        Returns:
            The plain optimizer, with the whole parameters and the whole state.
        """
        state = self.state_dict()
        self.remove()
        self.optimizer.state.clear()
        self.optimizer.load_state_dict(state)
        return self.optimizer

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this rank's shards, and send the updated parameters to all ranks. Every rank must make this call.

        **Overwrites** the parameters, and drops the gradients.

        Args:
            closure (callable): function that computes the loss and its gradients, evaluated once before the update, or
                None (default).

        Returns:
            The loss that the closure returned, or None without a closure.
        """
        loss = evaluated(closure)
        self.synchronize()
        for bucket in self._buckets:
            for shard, part in bucket.shards.items():
                if part.parameter.grad is None:  # No rank used the parameter, or the user dropped the gradient.
                    shard.grad = None
        # Send the parameters of a bucket while the next bucket is updated. All ranks send buckets in the same order.
        handles: list[Handle[Any]] = []
        groups, new_groups = self.optimizer.param_groups, {}
        try:
            for bucket in self._buckets:
                if bucket.shards:
                    new_groups[bucket.group] = {**groups[bucket.group], "params": list(bucket.shards)}
                    self.optimizer.param_groups = [new_groups[bucket.group]]
                    self.optimizer.step()
                handles.append(bucket.spread())
        finally:
            self.optimizer.param_groups = groups
        # Some optimizers count their steps in a group. The count must grow once per step, not once per bucket.
        for index, group in new_groups.items():
            groups[index].update({**group, "params": groups[index]["params"]})
        self._is_reduced = False
        self.reduction.order.num_updates += 1
        wait_all(handles)
        return loss

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their norm is at most ``max_norm``. Every rank must make this call.

        **Overwrites** the gradients. Use it like ``torch.nn.utils.clip_grad_norm_``, between the backward pass and
        ``step``. Gradients that are not reduced yet are reduced first.

        Args:
            max_norm (float): upper limit for the norm of all gradients together.
            norm_type (float): order of the norm; default 2.0.

        Returns:
            The norm before scaling: a float64 tensor on the CPU, equal on every rank.
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
        """Drop the gradients.

        Args:
            set_to_none (bool): passed to the plain optimizer; default True. The gradients of the whole parameters
                always become None.

        Raises:
            RuntimeError: some, but not all, backward passes of a step have run, so their gradients would be lost.
        """
        super().zero_grad(set_to_none)
        for p in self.parameters:
            p.grad = None

    def remove(self) -> None:
        """End the reductions and the sharding.

        Each parameter gets its own memory, and the plain optimizer holds the whole parameters again. You may still call
        ``state_dict``.
        """
        super().remove()
        for bucket in self._buckets:
            bucket.leave()
        self._hold_parameters()

    def state_dict(self) -> dict[str, Any]:
        """Return the plain optimizer's state, equal on every rank. Every rank must make this call.

        Returns:
            A dict in the format of ``torch.optim``. ``load_state_dict`` accepts it on any number of ranks.

        Raises:
            RanksDisagree: on every rank, if only some ranks have loaded a state.
            RuntimeError: some, but not all, backward passes of a step have run. A state contains no gradients.
        """
        groups: Any = self.optimizer.param_groups
        state: Any = self.optimizer.state
        self._check_between_steps("state_dict")
        # Take the options of each group from a rank that updates parameters of the group.
        here = {bucket.group: {**groups[bucket.group], "params": None} for bucket in self._shards.values()}
        of_ranks = verbs.allgather_object((self._num_loads, here), comm=self.comm)
        if len({num_loads for num_loads, _ in of_ranks}) > 1:
            raise RanksDisagree("ShardedOptimizer: only some ranks called load_state_dict; call it on every rank")
        options_of_group = collections.ChainMap(*(groups_there for _, groups_there in of_ranks))
        # Keep the entries that belong to no shard, such as entries of frozen parameters.
        whole = {key: entries for key, entries in state.items() if key not in self._shards}
        for bucket in self._buckets:
            whole |= bucket.join(state)
        try:
            self.optimizer.state = {p: whole.pop(p) for p in self.parameters if p in whole} | whole  # type: ignore[assignment]
            self.optimizer.param_groups = [
                {**group, **options_of_group.get(index, {}), "params": self.whole_groups[index]}
                for index, group in enumerate(groups)
            ]
            return self.optimizer.state_dict()
        finally:
            self.optimizer.param_groups, self.optimizer.state = groups, state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class, or of a plain optimizer. Every rank must make this call.

        Args:
            state_dict (dict): state to load. It may have been saved by a job with any number of ranks.
        """
        self._hold_parameters()
        try:
            super().load_state_dict(state_dict)
            self._num_loads += 1
        finally:
            self._hold_shards()

    def _hold_parameters(self) -> None:
        """Put the whole parameters into the groups of the plain optimizer."""
        for group, members in zip(self.optimizer.param_groups, self.whole_groups, strict=True):
            group["params"] = members

    def _hold_shards(self) -> None:
        """Replace the parameters and their state, in the plain optimizer, by this rank's shards and their state."""
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
        """Return the reduced gradients of this rank's shards."""
        return [shard.grad for shard in self._shards if shard.grad is not None]

    def _end_reduction(self) -> None:
        """Finish a reduction, and copy an overflow of one rank to all ranks. All ranks of ``comm`` must call it.

        So GradScaler skips the step on all ranks or on no rank.
        """
        super()._end_reduction()
        is_finite_here = all(map(is_finite, self._gradients_here()))
        is_everywhere = verbs.allreduce(int(is_finite_here), op="min", comm=self.comm)
        self._stand_in.grad = torch.full_like(self._stand_in, 0.0 if is_everywhere else math.nan)

    def check_pass(self) -> None:
        super().check_pass()
        if not all(bucket.is_in_place() for bucket in self._buckets):
            raise RuntimeError("a parameter was moved to other memory; move the module before you create the optimizer")


def _check(parameters: list[Any], optimizer: torch.optim.Optimizer) -> None:
    # Schedule-free optimizers have a method ``eval``.
    if isinstance(optimizer, torch.optim.LBFGS) or hasattr(optimizer, "eval"):
        name = type(optimizer).__name__
        raise TypeError(f"ShardedOptimizer: {name} cannot update shards of parameters; use optim.DistributedOptimizer")
    for number, p in enumerate(parameters):
        if not isinstance(p, torch.nn.Parameter):
            raise TypeError(f"ShardedOptimizer: pass torch.nn.Parameters; number {number} is a {type(p).__name__}")
    check_whole("ShardedOptimizer", dict(enumerate(parameters)))
    if len(set(parameters)) < len(parameters):
        raise ValueError("ShardedOptimizer: a parameter occurs twice; pass each parameter once")
