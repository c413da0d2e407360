"""Training with a parameter server: which rank seeds, sends, fetches and integrates.

A *worker* is a rank, or a group of ranks that train one copy of the network together (data-parallel: their gradients
are averaged by other means). Only the root of a group exchanges values with the server; after an integration the
other ranks of the group get the root's parameters. After TorchMPI's ``Update`` (reference 5.8), in which every rank of
a group sent, values were fetched F steps too late, and one skipped step stopped the exchange for good.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from torchmpi_py import nn
from torchmpi_py.core import agree, backoff, communicators, journal
from torchmpi_py.core.communicators import Communicator
from torchmpi_py.errors import ParameterServerError, RanksDisagree
from torchmpi_py.paramserver import tensor_lists
from torchmpi_py.paramserver.timetable import Due, Timetable

T = TypeVar("T")


class Update(ABC):
    """Call ``update(step)`` once per training step, after the optimizer's step, on every rank.

    The gradients must still be there (``p.grad``): Downpour sends them. The engine's hook ``on_update`` is the place.
    Steps count from 0, and go up. The constructor, and the step that seeds the server, are collective.

    network: its trainable parameters are served. sharding_communicator: the level over whose ranks they are sharded.
    dataparallel_communicator: the level whose groups are the workers; with None every rank is a worker.
    init_delay, update_frequency, prefetch, send_frequency: see ``Timetable``; the same on all ranks.
    """

    server_optimizer: str | None = None  # whose state the server keeps
    shares_memory = False  # whether the ranks of a group have one copy of the parameters, and need not wait

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
        check_trained(self.sharding, self._name, network)
        self._level = dataparallel_communicator
        self.group = None if self._level is None else communicators.communicator(self._level)
        self._run_on_all_ranks(self._check_group)
        self.is_root = self.group is None or self.group.rank == 0
        self.num_workers = sum(gathered(self.sharding, "workers of an update", self.is_root))
        self.parameters = [p for p in network.parameters() if p.requires_grad]
        self.served: tensor_lists.ServedTensors | None = None
        self.is_free = False
        self._last_step = -1

    def check_alike(self, **settings: object) -> None:
        """RanksDisagree, on every rank, unless all ranks give the same. Collective over the level of sharding."""
        check_alike(self.sharding, self._name, {"the kind of update": self._name, **settings})

    def update(self, step: int) -> None:
        """Do what is due in this step.

        ParameterServerError if the step numbers do not go up, the step that seeds the server was left out, or, after
        what is due, if a send of this worker has failed (in a group on all of its ranks, in a step that integrates).
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
            self._check_sends(self.served, step, due)
        elif step > self.timetable.init_delay:
            raise ParameterServerError(
                f"update({step}): the parameter server is seeded in step {self.timetable.init_delay} "
                "(init_delay), for which update was not called; count the steps from 0, or, to go on with a run that "
                "was saved, call load_state_dict before"
            )

    def exchange(self, served: tensor_lists.ServedTensors, step: int, due: Due) -> None:
        """The actions of a step once the server is seeded, on every rank."""
        if due.integrate:
            self._check_still_trained(step)
        if self.is_root:
            # A fetch U steps before an integration falls into the step of the integration before, and comes after it.
            fetches_last = due.integrate and self.timetable.prefetch > 0
            self.follow(served, step)
            if due.send:
                self.send(served)
            if due.prefetch and not fetches_last:
                self.prefetch(served)
            if due.integrate:
                self.integrate(served)
            if due.prefetch and fetches_last:
                self.prefetch(served)
        if due.integrate:
            self.share()

    def share(self) -> None:
        """Give the other ranks of the group the root's parameters. Collective over the group."""
        if self._level is not None:
            nn.synchronize_parameters(self.network, comm=communicators.communicator(self._level))

    # What each kind of update defines; the methods run on the root of a worker unless they say otherwise.

    def begin(self, served: tensor_lists.ServedTensors) -> None:  # noqa: B027 - not every update has something to do
        """The server has just been seeded. Called on every rank."""

    def follow(self, served: tensor_lists.ServedTensors, step: int) -> None:  # noqa: B027
        """A step after the server was seeded; ``p.grad`` holds its gradients."""

    def send(self, served: tensor_lists.ServedTensors) -> None:  # noqa: B027
        """Send an update to the server, unless the send belongs to an integration."""

    def prefetch(self, served: tensor_lists.ServedTensors) -> None:
        """Start to fetch the values for the next integration."""
        tensor_lists.prefetch_tensors(served)

    @abstractmethod
    def integrate(self, served: tensor_lists.ServedTensors) -> None:
        """Bring the fetched values into the parameters."""

    def adopt(self, served: tensor_lists.ServedTensors) -> None:
        """Replace the parameters by the server's values, as they were fetched."""
        tensor_lists.integrate_tensors(served, lambda fetched, p: p.copy_(fetched))

    def send_rest(self, served: tensor_lists.ServedTensors) -> None:  # noqa: B027
        """Send what the worker has done since its last send."""

    def worker_state(self) -> dict[str, Any]:
        """The state that a worker keeps besides its network and optimizer, in tensors of its own."""
        return {}

    def load_worker_state(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Take over a saved ``worker_state``; ``begin`` has been called."""

    def finish(self) -> None:
        """After a worker's last step: send what is left, and wait until the server has all of it.

        Not collective; idempotent. ParameterServerError if a send has failed.
        """
        if self.served is not None:
            if self.is_root:
                self.send_rest(self.served)
            self.served._finish_sends()

    def take_result(self) -> None:
        """After the last step of all workers: the network gets the server's values, the same on all ranks.

        Each worker is finished first. Collective over the level of sharding; waits asleep. ParameterServerError if
        there were too few steps for the server to be seeded, or, on every rank, if a send has failed on any.
        """
        self._check_usable("take_result")
        if (served := self.served) is None:
            raise ParameterServerError(
                f"take_result: the parameter server is seeded in step {self.timetable.init_delay} (init_delay), which "
                f"was not reached: the last one was update({self._last_step})"
            )
        if self.group is not None:
            self._wait_for_all(self.group, "take_result")  # its ranks have done what they do together
        self._end_on_all_ranks(self.finish, "take_result")
        if self.is_root:
            tensor_lists.prefetch_tensors(served)  # what was fetched before is older
            self.adopt(served)
        self.share()
        self._wait_for_all(self.sharding, "take_result")  # nobody trains on before all have the result

    def free(self) -> None:
        """Free the server. Collective over the level of sharding; idempotent.

        ParameterServerError if a send of this rank has failed, and no other call has raised it; the server is free.
        """
        self.is_free = True
        served, self.served = self.served, None
        if served is not None:
            served.free()
            served.check_sends()

    def state_dict(self) -> dict[str, Any]:
        """The state from which a later run goes on: the server's (on rank 0 alone), and this worker's own.

        Collective over the level of sharding; the ranks wait for each other, so that all shards are of one moment. Each
        rank saves its own state, next to its network and optimizer.
        """
        self._check_usable("state_dict")
        state: dict[str, Any] = {**self._origin(), "step": self._last_step, "is_seeded": self.served is not None}
        if self.served is not None:
            self._end_on_all_ranks(self.served._finish_sends, "state_dict")
            state["server"] = self.served.state_dict() if self.sharding.rank == 0 else None
            state["worker"] = self.worker_state() if self.is_root else {}
            self._wait_for_all(self.sharding, "state_dict")
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state, with the server as rank 0 saved it; the next step is ``state["step"] + 1``.

        Collective over the level of sharding, before the first ``update``, when network and optimizer are loaded. A
        fetch that was under way begins again. ValueError, on every rank, if the state does not fit.
        """
        self._check_usable("load_state_dict")
        if self._last_step >= 0:
            raise ParameterServerError("load_state_dict: call it before the first update; make another one for it")
        self._run_on_all_ranks(lambda: self._check_origin(state))
        self.check_alike(is_seeded=state["is_seeded"])
        if state["is_seeded"]:
            self._seed(state)
        self._last_step = state["step"]

    def _origin(self) -> dict[str, Any]:
        """The facts that are equal where a run is saved and where it goes on."""
        shapes = [list(p.shape) for p in self.parameters]
        return {"kind": self._name, "shapes": shapes, "init_delay": self.timetable.init_delay}

    def _check_origin(self, state: dict[str, Any]) -> None:
        if differing := [name for name, value in self._origin().items() if state.get(name) != value]:
            raise ValueError(f"{self._name}.load_state_dict: was saved with another {', '.join(differing)}")

    def _seed(self, state: dict[str, Any] | None = None) -> None:
        """Make the server, with rank 0's values, or from a saved state."""
        served = tensor_lists.init_tensors(self.parameters, comm=self.sharding, optimizer=self.server_optimizer)
        if state is not None:
            try:
                self._run_on_all_ranks(
                    lambda: served.load_state_dict(state["server"]) if self.sharding.rank == 0 else None
                )
            except ValueError:
                served.free()
                raise
        served.names = [name for name, p in self.network.named_parameters() if p.requires_grad]
        self.served = served
        self.begin(served)
        if state is not None and self.is_root:
            self.load_worker_state(state["worker"])

    def _wait_for_all(self, comm: Communicator, call: str) -> None:
        wait_for_all_after_training(comm, f"{self._name}.{call}")

    def _check_sends(self, served: tensor_lists.ServedTensors, step: int, due: Due) -> None:
        """ParameterServerError if a send of this worker has failed: on all ranks of a group, where they share."""
        allgather: agree.AllGather = agree.alone
        if self.group is not None and not self.shares_memory:
            if not due.integrate:
                return
            allgather = functools.partial(gathered, self.group, "sends of an update")
        failed = agree.first_as(ParameterServerError, f"update({step}): ")
        agree.run_on_all_ranks(allgather, served.check_sends, (ParameterServerError,), str, failed)

    def _end_on_all_ranks(self, step: Callable[[], object], call: str) -> None:
        """ParameterServerError on every rank if ``step`` raises on any. Collective over the sharding; waits asleep."""

        def allgather(outcome: T) -> list[T]:
            self._wait_for_all(self.sharding, call)
            return gathered(self.sharding, "outcomes of an update", outcome)

        def failed(texts: Mapping[int, str]) -> ParameterServerError:
            rank, text = next(iter(texts.items()))
            return ParameterServerError(f"{call}: rank {rank}: {text}")

        agree.run_on_all_ranks(allgather, step, (Exception,), str, failed)

    def _run_on_all_ranks(self, step: Callable[[], object]) -> None:
        """ValueError on every rank if ``step`` raises one, or a TypeError, on any. Collective."""
        allgather = functools.partial(gathered, self.sharding, "outcomes of an update")
        agree.run_on_all_ranks(allgather, step, (TypeError, ValueError), str, _wrong_on_a_rank)

    def _check_usable(self, call: str) -> None:
        if self.is_free:
            raise ParameterServerError(f"{call}: this {self._name} was freed; make another")

    def _check_still_trained(self, step: int) -> None:
        """ParameterServerError unless the network trains the parameters that are served, in the same order."""
        trained = [id(p) for p in self.network.parameters() if p.requires_grad]
        if trained != [id(p) for p in self.parameters]:
            raise ParameterServerError(
                f"update({step}): the network does not train the parameters any more with which this {self._name} was "
                "made (some were added, removed, replaced or frozen); free it, and make another"
            )

    def _check_group(self) -> None:
        """ValueError unless all ranks of this rank's group are among those over which the server is sharded."""
        if self.group is None:
            return
        inner, outer = self.group.direct.mpi.Get_group(), self.sharding.direct.mpi.Get_group()
        places = inner.Translate_ranks(None, outer)
        inner.Free()
        outer.Free()
        if any(place < 0 for place in places):
            raise ValueError(
                f"{self._name}: a group of dataparallel_communicator has {self.group.size} ranks, not all of which are "
                f"among the {self.sharding.size} over which the server is sharded; give a sharding_communicator whose "
                "groups hold whole workers"
            )


def _wrong_on_a_rank(failures: Mapping[int, str]) -> ValueError:
    rank, text = next(iter(failures.items()))
    return ValueError(f"{text} (rank {rank})")


def gathered(comm: Communicator, what: str, mine: T) -> list[T]:
    """The value of each rank, in rank order. Collective; recorded as ``what``, which is equal on all ranks."""
    return journal.run_together(what, comm, lambda: comm.direct.mpi.allgather(mine))


def wait_for_all(comm: Communicator, what: str) -> None:
    """Wait asleep for all ranks. Collective; recorded as ``what``, which is equal on all ranks."""
    journal.run_together(what, comm, lambda: backoff.barrier(comm.direct.mpi))


def wait_for_all_after_training(comm: Communicator, what: str) -> None:
    """Like ``wait_for_all``, for ranks that train asynchronously: some may arrive long after others."""
    journal.run_while_others_work(what, comm, lambda: backoff.barrier(comm.direct.mpi))


def check_alike(
    comm: Communicator, who: str, settings: Mapping[str, object], what: str = "settings of an update"
) -> None:
    """RanksDisagree, on every rank, unless all ranks give the same settings. Collective; recorded as ``what``."""
    given = gathered(comm, what, dict(settings))
    for name in given[0]:
        by_rank = [theirs.get(name) for theirs in given]
        if agree.first_different(by_rank) is not None:
            raise RanksDisagree(f"{who}: {name} by rank: {by_rank}; give the same on all ranks")


def check_trained(comm: Communicator, who: str, network: torch.nn.Module) -> None:
    """RanksDisagree, on every rank, unless all ranks train parameters of the same names, shapes, dtypes and order."""
    mine = [f"{name} {list(p.shape)} {p.dtype}" for name, p in network.named_parameters() if p.requires_grad]
    given = gathered(comm, "parameters of an update", mine)
    if (rank := agree.first_different(given)) is not None:
        index, there, here = agree.first_difference(given[rank], given[0], "none")
        raise RanksDisagree(
            f"{who}: rank {rank} trains other parameters than rank 0: number {index} is {there}, and {here} on rank "
            "0; make the same network on all ranks, and freeze the same parameters"
        )


def refuse_options(who: str, options: Mapping[str, Any], names: Iterable[str], why: str) -> None:
    """TypeError if the caller has given an option that this kind of update does not take."""
    for name in names:
        if name in options:
            raise TypeError(f"{who} takes no {name}: {why}")


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy tensors into others of the same shapes."""
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source.detach())
