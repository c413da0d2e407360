"""The copies of a network that data-parallel training keeps equal."""

from __future__ import annotations

import torch

from torchmpi_py import nn
from torchmpi_py.collectives.check import check_all_with_allreduce, differing
from torchmpi_py.core import ulfm
from torchmpi_py.core.communicators import resolve
from torchmpi_py.engine.same_batches import FirstBatches
from torchmpi_py.engine.state import State
from torchmpi_py.nn.async_backward import BucketFactory
from torchmpi_py.nn.buckets import Buckets
from torchmpi_py.nn.members import ParameterSnapshot
from torchmpi_py.nn.synchronize import check_unregistered, parameters_to_reduce, reduced_in_backward
from torchmpi_py.optim.sharded import ShardedOptimizer
from torchmpi_py.runtime import process


class Replicas:
    """This rank's copy of what a state trains, kept equal to the copies of the other ranks. All methods are collective.

    A copy is parameters and buffers of network and criterion, and the parameters that only the optimizer holds.
    """

    def __init__(self, state: State, asynchronous: bool, make_buckets: BucketFactory) -> None:
        self.state = state
        self.asynchronous = asynchronous
        self.make_buckets = make_buckets
        self.module: torch.nn.Module = torch.nn.ModuleDict()
        self.members: ParameterSnapshot | None = None  # when last broadcast
        self.registration: nn.AsyncBackward | None = None
        self.buckets: Buckets | None = None  # where gradients are reduced after the backward pass
        self.bucketed: ParameterSnapshot | None = None  # whose gradients are in them
        self._first_batches = FirstBatches()

    def follow(self) -> None:
        """Broadcast and register, if the set of trained parameters is not the one of the last time."""
        members = self.state.members()
        if members is not self.members and not self._trains(members):
            self.close()
            nn.synchronize_parameters(self.state.as_one_module())
            self._register()
        self.members = members

    def make_equal(self, with_buffers: bool) -> None:
        """Broadcast parameters and buffers where the ranks' differ; buffers alone may, unless ``with_buffers``."""
        module = self.state.as_one_module()
        named = dict(module.named_parameters()) | (dict(module.named_buffers()) if with_buffers else {})
        if differing(named, resolve(None)):
            nn.synchronize_parameters(module)

    def successor(self) -> Replicas | None:
        """The replicas of the survivors, which are equal already; None for a single survivor."""
        try:
            self.close()
        except Exception as error:
            if not ulfm.is_death(error):  # the death has ended what was under way
                raise
        if process.size() == 1:
            return None
        successor = Replicas(self.state, self.asynchronous, self.make_buckets)
        if self._trains(self.state.members()):
            successor._register()
        else:
            successor.follow()
        return successor

    def _trains(self, members: ParameterSnapshot) -> bool:
        """Whether these are the parameters that were last broadcast, whatever else has changed."""
        return self.members is not None and list(map(id, members.trained)) == list(map(id, self.members.trained))

    def _register(self) -> None:
        self.module = self.state.as_one_module()
        if self.asynchronous and self.state.parameters():
            self.registration = nn.AsyncBackward(self.module, make_buckets=self.make_buckets)
        self.members = self.state.members()

    def look(self) -> None:
        """Look, before the forward pass, whether other ranks train on the same batches."""
        self._first_batches.look(self.state.sample)

    def average_gradients(self) -> None:
        """Make every gradient its mean over the ranks; a ShardedOptimizer's are by the end of a backward pass.

        In a step without samples there was no pass, and the gradients of this rank count as zero.
        """
        has_samples, optimizer = self.state.sample is not None, self.state.optimizer
        if isinstance(optimizer, ShardedOptimizer):
            optimizer.synchronize()
        elif self.registration is None:
            self._present_buckets().reduce("avg")
        elif has_samples:
            self.registration.synchronize()
        else:
            self.registration.reduce_now()

    def _present_buckets(self) -> Buckets:
        """The buckets of the gradients; without another look at each if nothing has changed since the last step."""
        if reduced_in_backward:
            check_unregistered("train", self.module.named_parameters())
        members, buckets, comm = self.state.place.members, self.buckets, resolve(None)
        is_same = buckets is not None and (members is self.bucketed or buckets.serve(self.module))
        if buckets is None or not is_same or buckets.comm is not comm or not buckets.all_fit():
            named = parameters_to_reduce("train", self.module, comm)
            buckets = self.buckets = self.make_buckets(self.module, list(named.values()), comm)
        self.bucketed = members
        return buckets

    def check(self) -> None:
        """RanksDisagree if the parameters differ between ranks. Buffers may, until the end: each has its batches."""
        check_all_with_allreduce(dict(self.module.named_parameters()))

    def close(self) -> None:
        """Undo the registration."""
        if self.registration is not None:
            registration, self.registration = self.registration, None
            registration.remove()
