"""Training with a parameter server: who seeds, fetches, integrates and sends, and when (``timetable.py``).

A *worker* is a rank, or a group of ranks that train one copy of the network together (data-parallel: their gradients
are averaged by other means). Of a group only its root talks to the server; after an integration the others get the
root's parameters. After TorchMPI's ``Update`` (reference 5.8), in which every rank of a group sent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from torchmpi_py import communicators, nn
from torchmpi_py.errors import ParameterServerError
from torchmpi_py.paramserver import lists
from torchmpi_py.paramserver.timetable import Timetable


class Update(ABC):
    """Call ``update(step)`` once per training step, after the optimizer's, with the step's number, on every rank.

    The gradients must still be there (``p.grad``): Downpour sends them. The engine's hook ``on_update`` is the place.

    network: its trainable parameters are served. sharding_communicator: the level over whose ranks they are sharded.
    dataparallel_communicator: the level whose groups are the workers; by default every rank is one.
    init_delay, update_frequency, prefetch, send_frequency: steps, see ``timetable.py``.
    """

    def __init__(
        self,
        network: torch.nn.Module,
        *,
        sharding_communicator: int = 0,
        dataparallel_communicator: int | None = None,
        update_frequency: int = 10,
        init_delay: int = 100,
        prefetch: int = 0,
        send_frequency: int = 1,
    ) -> None:
        self.timetable = Timetable(init_delay, update_frequency, prefetch, send_frequency)
        self.network = network
        self.sharding = communicators.communicator(sharding_communicator)
        self.group = None
        if dataparallel_communicator not in (None, sharding_communicator):
            self.group = communicators.communicator(dataparallel_communicator)
        self._level = dataparallel_communicator
        self.is_root = self.group is None or self.group.rank == 0
        self.num_workers: int = self.sharding.direct.mpi.allreduce(int(self.is_root))
        self.parameters = [p for p in network.parameters() if p.requires_grad]
        self.served: lists.ServedTensors | None = None

    def update(self, step: int) -> None:
        """Do what is due in this step. ParameterServerError if the step at which the server is seeded was left out."""
        due = self.timetable.at(step)
        if due.shard:
            self.served = lists.init_tensors(self.parameters, comm=self.sharding)
            self.begin()
        if self.served is None:
            if step > self.timetable.init_delay:
                raise ParameterServerError(
                    f"update({step}): the parameter server is seeded in step {self.timetable.init_delay} "
                    "(init_delay), for which update was not called; count the steps from 0"
                )
            return
        if self.is_root:
            if due.prefetch:
                lists.prefetch_tensors(self.served)
            self.follow(self.served, step)
            if due.integrate:
                self.integrate(self.served)
            if due.send:
                self.send(self.served)
        if due.integrate and self.group is not None:
            with communicators.at(self._level or 0):
                nn.synchronize_parameters(self.network)

    def begin(self) -> None:  # noqa: B027 - not every update has something to do
        """The server has just been seeded."""

    def follow(self, served: lists.ServedTensors, step: int) -> None:  # noqa: B027
        """A step after that; ``p.grad`` holds its gradients."""

    @abstractmethod
    def integrate(self, served: lists.ServedTensors) -> None:
        """Bring the values that were fetched into the parameters."""

    def send(self, served: lists.ServedTensors) -> None:  # noqa: B027
        """Send what the server should take in, unless that belongs to an integration."""

    def free(self) -> None:
        """Free the server. Collective over the level of sharding; idempotent."""
        if self.served is not None:
            self.served.free()
            self.served = None
