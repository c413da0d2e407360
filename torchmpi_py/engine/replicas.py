"""The copies of a network that data-parallel training keeps equal."""

from __future__ import annotations

from typing import Any

import torch

from torchmpi_py import nn
from torchmpi_py.core import ulfm
from torchmpi_py.engine.state import State
from torchmpi_py.errors import RanksDisagree
from torchmpi_py.nn.compression import Compression
from torchmpi_py.nn.members import Members
from torchmpi_py.nn.synchronize import average_gradients_of, check_replicas
from torchmpi_py.optim.sharded import ShardedOptimizer
from torchmpi_py.runtime import process


class Replicas:
    """This rank's copy of what a state trains, kept equal to the copies of the other ranks. All methods are collective.

    A copy is parameters and buffers of network and criterion, and the parameters that only the optimizer holds.
    """

    def __init__(self, state: State, asynchronous: bool, compression: Compression | None) -> None:
        self.state = state
        self.asynchronous = asynchronous
        self.compression = compression
        self.module: torch.nn.Module = torch.nn.ModuleDict()
        self.members: Members | None = None  # when last broadcast
        self.registration: nn.AsyncBackward | None = None

    def follow(self) -> None:
        """Broadcast and register, if the set of trained parameters is not the one of the last time."""
        members = self.state.members()
        if members is self.members:
            return
        if self._trains(members):
            self.members = members
            return
        self.close()
        nn.synchronize_parameters(self.state.as_one_module())
        self._register()

    def make_equal(self, with_buffers: bool) -> None:
        """Broadcast parameters and buffers where the ranks' differ; buffers alone may, unless ``with_buffers``."""
        module = self.state.as_one_module()
        try:
            check_replicas(dict([*module.named_parameters(), *(module.named_buffers() if with_buffers else ())]))
        except RanksDisagree:
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
        successor = Replicas(self.state, self.asynchronous, self.compression)
        if self._trains(self.state.members()):
            successor._register()
        else:
            successor.follow()
        return successor

    def _trains(self, members: Members) -> bool:
        """Whether these are the parameters that were last broadcast, whatever else has changed."""
        return self.members is not None and list(map(id, members.trained)) == list(map(id, self.members.trained))

    def _register(self) -> None:
        self.module = self.state.as_one_module()
        if self.asynchronous:
            self.registration = nn.register_async_backward(self.module, compression=self.compression)
        self.members = self.state.members()

    def set_batch(self) -> None:
        """Before the backward pass: tell the registration its batch."""
        if (reduction := self._in_backward()) is not None:
            reduction.look(self._batch())

    def average_gradients(self) -> None:
        """Every gradient becomes its mean over the ranks; a ShardedOptimizer's are by the end of the pass."""
        if self.registration is not None:
            self.registration.synchronize()
        elif self._in_backward() is None:
            average_gradients_of(self.module, self._batch(), self.compression)

    def _in_backward(self) -> nn.AsyncBackward | None:
        """The registration that reduces gradients during the backward pass; None if there is none."""
        optimizer = self.state.optimizer
        return optimizer.reduction if isinstance(optimizer, ShardedOptimizer) else self.registration

    def _batch(self) -> Any:
        """The batch, to compare with other ranks'; None for the stand-in of a rank without samples."""
        return self.state.sample if self.state.num_samples > 0 else None

    def check(self) -> None:
        """RanksDisagree if the parameters differ between ranks. Buffers may, until the end: each has its batches."""
        check_replicas(dict(self.module.named_parameters()))

    def close(self) -> None:
        """Undo the registration."""
        if self.registration is not None:
            registration, self.registration = self.registration, None
            registration.remove()
