"""Training with a parameter server: who seeds, fetches, integrates and sends, and when (``timetable.py``).

A *worker* is a rank, or a group of ranks that train one copy of the network together (data-parallel: their gradients
are averaged by other means). Of a group only its root talks to the server; after an integration the others get the
root's parameters. After TorchMPI's ``Update`` (reference 5.8), in which every rank of a group sent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from torchmpi_py import communicators, nn
from torchmpi_py.errors import ParameterServerError, RanksDisagree
from torchmpi_py.paramserver import lists
from torchmpi_py.paramserver.timetable import Due, Timetable


class Update(ABC):
    """Call ``update(step)`` once per training step, after the optimizer's, with the step's number, on every rank.

    The gradients must still be there (``p.grad``): Downpour sends them. The engine's hook ``on_update`` is the place.

    network: its trainable parameters are served. sharding_communicator: the level over whose ranks they are sharded.
    dataparallel_communicator: the level whose groups are the workers; by default every rank is one.
    init_delay, update_frequency, prefetch, send_frequency: steps, see ``timetable.py``.
    """

    server_optimizer: str | None = None  # of which the server keeps the state

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
        self.check_alike("init_delay", init_delay)
        self.num_workers: int = self.sharding.direct.mpi.allreduce(int(self.is_root))
        self.parameters = [p for p in network.parameters() if p.requires_grad]
        self.served: lists.ServedTensors | None = None
        self.is_free = False

    def check_alike(self, name: str, value: object) -> None:
        """RanksDisagree, on every rank, unless all give the same. Collective over the level of sharding."""
        given = self.sharding.direct.mpi.allgather(value)
        if any(other != value for other in given):
            raise RanksDisagree(f"{type(self).__name__}: {name} by rank: {given}; give the same on all ranks")

    def update(self, step: int) -> None:
        """Do what is due in this step. ParameterServerError if the step at which the server is seeded was left out."""
        if self.is_free:
            raise ParameterServerError(f"update({step}): this {type(self).__name__} was freed; make another")
        due = self.timetable.at(step)
        if due.shard and self.served is None:
            self.served = lists.init_tensors(self.parameters, comm=self.sharding, optimizer=self.server_optimizer)
            self.begin(self.served)
        if self.served is not None:
            self.exchange(self.served, step, due)
        elif step > self.timetable.init_delay:
            raise ParameterServerError(
                f"update({step}): the parameter server is seeded in step {self.timetable.init_delay} "
                "(init_delay), for which update was not called; count the steps from 0"
            )

    def exchange(self, served: lists.ServedTensors, step: int, due: Due) -> None:
        """What is due in a step once the server is seeded, on every rank."""
        if self.is_root:
            # what is fetched update_frequency steps before an integration is for the one after that of this step
            is_for_later = due.integrate and self.timetable.prefetch > 0
            if due.prefetch and not is_for_later:
                self.prefetch(served)
            self.follow(served, step)
            if due.integrate:
                self.integrate(served)
            if due.send:
                self.send(served)
            if due.prefetch and is_for_later:
                self.prefetch(served)
        if due.integrate:
            self.share()

    def share(self) -> None:
        """Give the other ranks of the group the root's parameters. Collective over the group."""
        if self.group is not None:
            with communicators.at(self._level or 0):
                nn.synchronize_parameters(self.network)

    def begin(self, served: lists.ServedTensors) -> None:  # noqa: B027 - not every update has something to do
        """The server has just been seeded; every rank calls it."""

    def prefetch(self, served: lists.ServedTensors) -> None:
        """Start to fetch the values for the next integration."""
        lists.prefetch_tensors(served)

    def follow(self, served: lists.ServedTensors, step: int) -> None:  # noqa: B027
        """A step after that; ``p.grad`` holds its gradients."""

    @abstractmethod
    def integrate(self, served: lists.ServedTensors) -> None:
        """Bring the values that were fetched into the parameters."""

    def send(self, served: lists.ServedTensors) -> None:  # noqa: B027
        """Send what the server should take in, unless that belongs to an integration."""

    def finish(self) -> None:
        """After a worker's last step: wait until the server has all that it has sent. Not collective; idempotent."""
        for pack in self.served.packs if self.served is not None else ():
            if pack.sending is not None:
                pack.sending.wait()

    def free(self) -> None:
        """Free the server. Collective over the level of sharding; idempotent."""
        self.is_free = True
        if self.served is not None:
            self.served.free()
            self.served = None
