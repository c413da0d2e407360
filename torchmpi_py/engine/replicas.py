"""The copies of a network that data-parallel training keeps equal."""

from __future__ import annotations

from contextlib import suppress

import torch

from torchmpi_py import nn
from torchmpi_py.collectives.check import check_all_with_allreduce
from torchmpi_py.core.communicators import resolve
from torchmpi_py.engine.state import State
from torchmpi_py.nn.async_backward import BucketFactory
from torchmpi_py.nn.buckets import Buckets
from torchmpi_py.nn.members import ParameterSnapshot
from torchmpi_py.nn.synchronize import parameters_to_reduce
from torchmpi_py.optim.wrapper import ReducingOptimizer


class Replicas:
    """This rank's copy of the trained parameters and buffers, which is kept equal to the copies of the other ranks.

    The copy consists of the parameters and buffers of network and criterion, and of the parameters that only the
    optimizer has. Every rank must call the same methods.
    """

    def __init__(self, state: State, asynchronous: bool, make_buckets: BucketFactory) -> None:
        self.state = state
        self.asynchronous = asynchronous
        self.make_buckets = make_buckets
        self.module: torch.nn.Module = torch.nn.ModuleDict()
        self.members: ParameterSnapshot | None = None  # snapshot at the last broadcast
        self.registration: nn.AsyncBackward | None = None
        self.buckets: Buckets | None = None  # buckets of the reduction after the backward pass
        self.bucketed: ParameterSnapshot | None = None  # snapshot that the buckets match

    def renew(self, *, with_buffers: bool = True) -> None:
        """Broadcast rank 0's parameters, and optionally its buffers. Drop the registration and the buckets."""
        self.close()
        self.module, self.members = self.state.as_one_module(), self.state.members()
        nn.synchronize_parameters(self.module if with_buffers else torch.nn.ParameterList(self.module.parameters()))

    def regroup(self) -> None:
        """Broadcast again after a death, because the survivors may have made different changes to the network."""
        with suppress(Exception):  # Pending operations fail because of the death.
            self.close()
        self.renew(with_buffers=False)  # Each rank keeps the statistics of its own batches.

    def follow(self) -> None:
        """Broadcast again if the set of trained parameters has changed."""
        members, former = self.state.members(), self.members
        if members is not former:
            if former is None or list(map(id, members.trained)) != list(map(id, former.trained)):
                self.renew()
            self.members = members

    def register(self) -> None:
        """With ``asynchronous``, register the gradients for reduction, unless the optimizer reduces them."""
        is_due = self.asynchronous and self.registration is None and self.state.parameters()
        if is_due and not isinstance(self.state.optimizer, ReducingOptimizer):
            self.registration = nn.AsyncBackward(self.module, make_buckets=self.make_buckets)

    def average_gradients(self) -> None:
        """Replace every gradient by its mean over the ranks.

        If the backward pass reduces gradients, wait for these reductions. A rank without samples has no backward pass,
        so its gradients count as zero.
        """
        optimizer = self.state.optimizer
        if isinstance(optimizer, ReducingOptimizer):
            optimizer.synchronize()
        elif self.registration is None:
            self._present_buckets().reduce("avg")
        elif self.state.sample is not None:
            self.registration.synchronize()
        else:
            self.registration.reduce_now()

    def _present_buckets(self) -> Buckets:
        """Return the gradient buckets. If parameters have changed, compare the ranks, and create new buckets."""
        members, buckets = self.state.place.members, self.buckets
        is_same = buckets is not None and (members is self.bucketed or buckets.serve(self.module))
        if buckets is None or not is_same or not buckets.all_fit():
            named = parameters_to_reduce("train", self.module, resolve(None))
            buckets = self.buckets = self.make_buckets(self.module, list(named.values()), resolve(None))
        self.bucketed = members
        return buckets

    def check(self) -> None:
        """Raise RanksDisagree if the ranks' parameters differ.

        Buffers may differ, because each rank has its own batches.
        """
        check_all_with_allreduce(dict(self.module.named_parameters()))

    def close(self) -> None:
        """Remove the registration, and drop the buckets."""
        registration, self.registration, self.buckets = self.registration, None, None
        if registration is not None:
            registration.remove()
