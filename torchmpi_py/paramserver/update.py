"""Training with a parameter server: who seeds, sends, fetches and integrates, and when (``timetable.py``).

A *worker* is a rank, or a group of ranks that train one copy of the network together (data-parallel: their gradients
are averaged by other means). Of a group only its root talks to the server; after an integration the others get the
root's parameters. After TorchMPI's ``Update`` (reference 5.8), in which every rank of a group sent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from torchmpi_py import nn
from torchmpi_py.core import communicators
from torchmpi_py.core.communicators import Communicator
from torchmpi_py.core.handles import wait_all
from torchmpi_py.errors import ParameterServerError
from torchmpi_py.paramserver import agreement, tensor_lists
from torchmpi_py.paramserver.timetable import Due, Timetable


class Update(ABC):
    """Call ``update(step)`` once per training step, after the optimizer's, with the step's number, on every rank.

    The gradients must still be there (``p.grad``): Downpour sends them. The engine's hook ``on_update`` is the place.
    Steps count from 0, and go up. To make one, and the step that seeds the server, are collective.

    network: its trainable parameters are served. sharding_communicator: the level over whose ranks they are sharded.
    dataparallel_communicator: the level whose groups are the workers; with None every rank is one.
    init_delay, update_frequency, prefetch, send_frequency: steps, see ``timetable.py``; the same on all ranks.
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
        self.network, self._name = network, type(self).__name__
        self.sharding = communicators.communicator(sharding_communicator)
        self.check_alike(
            init_delay=init_delay, update_frequency=update_frequency, prefetch=prefetch, send_frequency=send_frequency
        )
        self.timetable = Timetable(init_delay, update_frequency, prefetch, send_frequency)
        agreement.check_trained(self.sharding, self._name, network)
        self._level = dataparallel_communicator
        self.group = None if self._level is None else communicators.communicator(self._level)
        agreement.check_within(self.group, self.sharding, self._name)
        self.is_root = self.group is None or self.group.rank == 0
        self.num_workers = sum(agreement.gathered(self.sharding, "workers of an update", self.is_root))
        self.parameters = [p for p in network.parameters() if p.requires_grad]
        self.served: tensor_lists.ServedTensors | None = None
        self.is_free = False
        self._last_step = -1

    def check_alike(self, **settings: object) -> None:
        """RanksDisagree, on every rank, unless all give the same. Collective over the level of sharding."""
        agreement.check_alike(self.sharding, self._name, {"the kind of update": self._name, **settings})

    def update(self, step: int) -> None:
        """Do what is due in this step.

        ParameterServerError if the numbers of the steps do not go up, or the one that seeds the server was left out.
        """
        self._check_usable(f"update({step})")
        if step <= self._last_step:
            raise ParameterServerError(
                f"update({step}): it was called for step {self._last_step} already, and steps must go up; count on "
                "through all of the training (a second engine.train begins again with state.t)"
            )
        self._last_step = step
        due = self.timetable.at(step)._replace(shard=self.served is None and step == self.timetable.init_delay)
        if due.shard:
            self._seed()
        if self.served is not None:
            self.exchange(self.served, step, due)
        elif step > self.timetable.init_delay:
            raise ParameterServerError(
                f"update({step}): the parameter server is seeded in step {self.timetable.init_delay} "
                "(init_delay), for which update was not called; count the steps from 0, or, to go on with a run that "
                "was saved, call load_state_dict before"
            )

    def exchange(self, served: tensor_lists.ServedTensors, step: int, due: Due) -> None:
        """What is due in a step once the server is seeded, on every rank."""
        if due.integrate:
            agreement.check_still_trained(self._name, step, self.network, self.parameters)
        if self.is_root:
            # what is fetched update_frequency steps before an integration is for the one after that of this step
            is_for_later = due.integrate and self.timetable.prefetch > 0
            self.follow(served, step)
            if due.send:
                self.send(served)
            if due.prefetch and not is_for_later:
                self.prefetch(served)
            if due.integrate:
                self.integrate(served)
            if due.prefetch and is_for_later:
                self.prefetch(served)
        if due.integrate:
            self.share()

    def share(self) -> None:
        """Give the other ranks of the group the root's parameters. Collective over the group."""
        if self._level is not None:
            with communicators.at(self._level):
                nn.synchronize_parameters(self.network)

    def begin(self, served: tensor_lists.ServedTensors) -> None:  # noqa: B027 - not every update has something to do
        """The server has just been seeded; every rank calls it."""

    def follow(self, served: tensor_lists.ServedTensors, step: int) -> None:  # noqa: B027
        """A step after that; ``p.grad`` holds its gradients."""

    def send(self, served: tensor_lists.ServedTensors) -> None:  # noqa: B027
        """Send what the server should take in, unless that belongs to an integration."""

    def prefetch(self, served: tensor_lists.ServedTensors) -> None:
        """Start to fetch the values for the next integration."""
        tensor_lists.prefetch_tensors(served)

    @abstractmethod
    def integrate(self, served: tensor_lists.ServedTensors) -> None:
        """Bring the values that were fetched into the parameters."""

    def adopt(self, served: tensor_lists.ServedTensors) -> None:
        """The server's values, as they were fetched, take the place of the parameters."""
        tensor_lists.integrate_tensors(served, lambda fetched, p: p.copy_(fetched))

    def send_rest(self, served: tensor_lists.ServedTensors) -> None:  # noqa: B027
        """Send what a worker has done since it sent the last time."""

    def finish(self) -> None:
        """After a worker's last step: send what is left, and wait until the server has it all.

        Not collective; idempotent.
        """
        if self.served is not None:
            if self.is_root:
                self.send_rest(self.served)
            self._wait(self.served)

    def take_result(self) -> None:
        """When all workers have done their last step: the network gets the server's values, the same on all ranks.

        It finishes each worker first. Collective over the level of sharding; waits asleep. ParameterServerError if
        there were too few steps for the server to be seeded.
        """
        self._check_usable("take_result")
        served = self._seeded("take_result")
        if self.group is not None:
            self._meet(self.group, "take_result")  # what its ranks have done together is done
        self.finish()
        self._meet(self.sharding, "take_result")
        if self.is_root:
            tensor_lists.prefetch_tensors(served)  # what was fetched before is older
            self.adopt(served)
        self.share()
        self._meet(self.sharding, "take_result")  # nobody trains on before all have it

    def free(self) -> None:
        """Free the server. Collective over the level of sharding; idempotent."""
        self.is_free = True
        served, self.served = self.served, None
        if served is not None:
            served.free()

    def state_dict(self) -> dict[str, Any]:
        """What it takes to go on later: the server (on rank 0 alone), and what this worker keeps.

        Collective over the level of sharding, for one moment of all shards: nothing is on its way then. Each rank saves
        its own, and next to it its network and optimizer.
        """
        self._check_usable("state_dict")
        state: dict[str, Any] = {**self._origin(), "step": self._last_step, "is_seeded": self.served is not None}
        if self.served is not None:
            self._wait(self.served)
            self._meet(self.sharding, "state_dict")
            state["server"] = self.served.state_dict() if self.sharding.rank == 0 else None
            state["worker"] = self.worker_state() if self.is_root else {}
            self._meet(self.sharding, "state_dict")
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what was saved, the server as on rank 0; the next step is ``state["step"] + 1``.

        Collective over the level of sharding, before the first ``update``, when network and optimizer are loaded. What
        was being fetched is fetched afresh. ValueError, on every rank, if it does not fit.
        """
        self._check_usable("load_state_dict")
        if self._last_step >= 0:
            raise ParameterServerError("load_state_dict: call it before the first update; make another one for it")
        differing = [name for name, value in self._origin().items() if state.get(name) != value]
        failure = f"{self._name}.load_state_dict: was saved with another {', '.join(differing)}" if differing else None
        agreement.raise_together(self.sharding, failure)
        self.check_alike(is_seeded=state["is_seeded"])
        if state["is_seeded"]:
            self._seed(state)
        self._last_step = state["step"]

    def worker_state(self) -> dict[str, Any]:
        """What a worker keeps besides its network and optimizer, in tensors of its own."""
        return {}

    def load_worker_state(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Become what was saved; ``begin`` has been called."""

    def _origin(self) -> dict[str, Any]:
        """What must be the same when it goes on."""
        shapes = [list(p.shape) for p in self.parameters]
        return {"kind": self._name, "shapes": shapes, "init_delay": self.timetable.init_delay}

    def _seed(self, state: dict[str, Any] | None = None) -> None:
        """Make the server, with rank 0's values, or as it was saved."""
        served = tensor_lists.init_tensors(self.parameters, comm=self.sharding, optimizer=self.server_optimizer)
        if state is not None:
            restore: Callable[[Any], object] = served.load_state_dict if self.sharding.rank == 0 else id
            try:
                agreement.run_on_all_ranks(self.sharding, lambda: restore(state["server"]))
            except ValueError:
                served.free()
                raise
        self.served = served
        self.begin(served)
        if state is not None and self.is_root:
            self.load_worker_state(state["worker"])

    def _seeded(self, call: str) -> tensor_lists.ServedTensors:
        if self.served is None:
            raise ParameterServerError(
                f"{call}: the parameter server is seeded in step {self.timetable.init_delay} (init_delay), which was "
                f"not reached: the last one was update({self._last_step})"
            )
        return self.served

    def _meet(self, comm: Communicator, call: str) -> None:
        agreement.wait_for_all_after_training(comm, f"{self._name}.{call}")

    def _wait(self, served: tensor_lists.ServedTensors) -> None:
        wait_all([pack.sending for pack in served.packs if pack.sending is not None])

    def _check_usable(self, call: str) -> None:
        if self.is_free:
            raise ParameterServerError(f"{call}: this {self._name} was freed; make another")
