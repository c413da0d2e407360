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
    """This rank's copy of a trained state, kept equal to the copies of the other ranks. All methods are collective.

    A copy consists of parameters and buffers of network and criterion, and of parameters that only the optimizer holds.
    """

    def __init__(self, state: State, asynchronous: bool, make_buckets: BucketFactory) -> None:
        self.state = state
        self.asynchronous = asynchronous
        self.make_buckets = make_buckets
        self.module: torch.nn.Module = torch.nn.ModuleDict()
        self.members: ParameterSnapshot | None = None  # snapshot at the last broadcast
        self.registration: nn.AsyncBackward | None = None
        self.buckets: Buckets | None = None  # buckets of the reduction after the backward pass
        self.bucketed: ParameterSnapshot | None = None  # snapshot for which the buckets were created

    def renew(self, *, with_buffers: bool = True) -> None:
        """Broadcast rank 0's parameters, and its buffers, and drop the buckets."""
        self.close()
        self.module, self.members = self.state.as_one_module(), self.state.members()
        nn.synchronize_parameters(self.module if with_buffers else torch.nn.ParameterList(self.module.parameters()))

    def regroup(self) -> None:
        """Continue with the survivors of a death, who may have seen different changes of the network."""
        with suppress(Exception):  # The death has broken the pending operations.
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
        """Let the next backward pass reduce gradients, if ``asynchronous`` is set and the optimizer does not do it."""
        is_due = self.asynchronous and self.registration is None and self.state.parameters()
        if is_due and not isinstance(self.state.optimizer, ReducingOptimizer):
            self.registration = nn.AsyncBackward(self.module, make_buckets=self.make_buckets)

    def average_gradients(self) -> None:
        """Replace every gradient by its mean over the ranks, unless the backward pass has already reduced it.

        A step without samples has no backward pass, so this rank's gradients count as zero.
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
        """Return the buckets of the gradients, comparing parameters only if something changed since the last step."""
        members, buckets = self.state.place.members, self.buckets
        is_same = buckets is not None and (members is self.bucketed or buckets.serve(self.module))
        if buckets is None or not is_same or not buckets.all_fit():
            named = parameters_to_reduce("train", self.module, resolve(None))
            buckets = self.buckets = self.make_buckets(self.module, list(named.values()), resolve(None))
        self.bucketed = members
        return buckets

    def check(self) -> None:
        """Raise RanksDisagree if the parameters differ. Buffers may differ, because each rank has its own batches."""
        check_all_with_allreduce(dict(self.module.named_parameters()))

    def close(self) -> None:
        """Remove the registration, and drop the buckets."""
        registration, self.registration, self.buckets = self.registration, None, None
        if registration is not None:
            registration.remove()
