"""Training with a parameter server: which rank seeds the server, sends, fetches and integrates, and when.

A *worker* is a rank, or a group of ranks that train one copy of the network together (data-parallel: another part of
the program averages their gradients). Only the root of a group exchanges values with the server. After an integration,
the root broadcasts its parameters to the other ranks of the group. The alternative is TorchMPI's ``Update`` (reference
5.8), in which every rank of a group sends the same gradient. In that class, values also arrive ``prefetch`` steps too
late, and one skipped step ends the exchange for the rest of the training.
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
    """Base class for training with parameter servers. It determines the steps in which a worker sends and fetches.

    Call ``update(step)`` on every rank once per training step, after the optimizer's step and before ``zero_grad``,
    because Downpour sends the gradients. With an engine, call it in the hook ``on_update``. Steps start at 0 and
    increase. All ranks of the sharding level must call the constructor. All of them must also call ``update`` in the
    step ``init_delay``, which creates the server.

    Args:
        network (torch.nn.Module): network to train. The server holds its trainable parameters.
        sharding_communicator (int): level whose ranks hold the shards of the server. Default 0, all ranks.
        dataparallel_communicator (int): level whose groups are the workers. Default None, every rank is a worker.
        update_frequency (int): number of steps from one integration of the server's values to the next. Default 10.
        init_delay (int): step in which the server is created with rank 0's parameters. Default 100.
        prefetch (int): number of steps from the start of a fetch to its integration, at most ``update_frequency``.
            Default 0.
        send_frequency (int): number of steps from one send to the next. Default 1.

    Raises:
        ValueError: a number of steps is not an int or is out of range, or a group of ``dataparallel_communicator`` has
            ranks outside the sharding level.
        RanksDisagree: the ranks pass different settings, or train parameters of different names, shapes or dtypes.
    """

    server_optimizer: str | None = None  # the optimizer whose state the server keeps
    shares_memory = False  # whether the ranks of a group share one copy of the parameters, and need not synchronize

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
        """Raise RanksDisagree unless all ranks of the sharding level pass the same settings.

        All ranks of the sharding level must call it.

        Args:
            **settings: settings by name, for the error message.

        Raises:
            RanksDisagree: the settings differ. The error is raised on every rank.
        """
        check_alike(self.sharding, self._name, {"class": self._name, **settings})

    def update(self, step: int) -> None:
        """Send, fetch and integrate if these actions are due in this step. Call it on every rank.

        A step that integrates **overwrites** the parameters of the network.

        Args:
            step (int): number of the step, from 0. It must be larger than in the previous call.

        Raises:
            ParameterServerError: the step does not increase, the step ``init_delay`` was skipped, this object was
                freed, or the parameters of the network were replaced or frozen. The call also raises this error if a
                send of this worker has failed. In a group, all ranks raise the error in a step that integrates.
        """
        self._check_usable(f"update({step})")
        if step <= self._last_step:
            raise ParameterServerError(
                f"update({step}): expected a step after {self._last_step}, the previous step; count the steps of the "
                "whole training (state.t starts again at 0 in a second engine.train)"
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
                f"update({step}): update({self.timetable.init_delay}) creates the parameter server (init_delay), but "
                "was not called; count the steps from 0. To resume a saved run, call load_state_dict before the "
                "first update"
            )

    def exchange(self, served: tensor_lists.ServedTensors, step: int, due: Due) -> None:
        """Carry out the actions of a step. ``update`` calls this method on every rank once the server exists.

        Args:
            served (ServedTensors): the parameters and their server.
            step (int): number of the step.
            due (Due): actions that are due in this step.
        """
        if due.integrate:
            self._check_still_trained(step)
        if self.is_root:
            # With prefetch = update_frequency, a step that integrates also starts the fetch for the next integration.
            # The step must integrate first. Otherwise, the integration would use the values of the new fetch.
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
        """Copy the root's parameters to the other ranks of the group. All ranks of the group must call it."""
        if self._level is not None:
            nn.synchronize_parameters(self.network, comm=communicators.communicator(self._level))

    # Derived classes override these methods. A method runs only on the root of a worker, unless its docstring says that
    # it runs on every rank.

    def begin(self, served: tensor_lists.ServedTensors) -> None:  # noqa: B027 - subclasses need not override it
        """Prepare the exchanges. This method runs on every rank, right after the server has been created.

        Args:
            served (ServedTensors): the parameters and their server.
        """

    def follow(self, served: tensor_lists.ServedTensors, step: int) -> None:  # noqa: B027
        """Process a training step, whose gradients are in ``p.grad``. This method runs in each step after ``begin``.

        Args:
            served (ServedTensors): the parameters and their server.
            step (int): number of the step.
        """

    def send(self, served: tensor_lists.ServedTensors) -> None:  # noqa: B027
        """Send an update to the server. Classes that send in ``integrate`` leave this method empty.

        Args:
            served (ServedTensors): the parameters and their server.
        """

    def prefetch(self, served: tensor_lists.ServedTensors) -> None:
        """Start to fetch the values for the next integration.

        Args:
            served (ServedTensors): the parameters and their server.
        """
        tensor_lists.prefetch_tensors(served)

    @abstractmethod
    def integrate(self, served: tensor_lists.ServedTensors) -> None:
        """Change the parameters according to the fetched values.

        Args:
            served (ServedTensors): the parameters and their server.
        """

    def adopt(self, served: tensor_lists.ServedTensors) -> None:
        """Replace the parameters by the fetched values of the server.

        Args:
            served (ServedTensors): the parameters and their server.
        """
        tensor_lists.integrate_tensors(served, lambda fetched, p: p.copy_(fetched))

    def send_rest(self, served: tensor_lists.ServedTensors) -> None:  # noqa: B027
        """Send the changes that the worker has made since its last send.

        Args:
            served (ServedTensors): the parameters and their server.
        """

    def worker_state(self) -> dict[str, Any]:
        """Return a copy of the worker's state, without the network and the optimizer.

        Returns:
            A dictionary for ``load_worker_state``.
        """
        return {}

    def load_worker_state(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Restore the saved state of a worker. This method runs after ``begin``.

        Args:
            state (dict): dictionary that ``worker_state`` returned.
        """

    def finish(self) -> None:
        """Send this worker's remaining changes after its last step, and wait until the server has applied all sends.

        Any rank may call it alone. Repeated calls have no effect.

        Raises:
            ParameterServerError: a send has failed.
        """
        if self.served is not None:
            if self.is_root:
                self.send_rest(self.served)
            self.served._finish_sends()

    def take_result(self) -> None:
        """Replace the parameters of the network by the final values of the server, which are equal on all ranks.

        All ranks of the sharding level must call it after their last step. The call first finishes this worker (see
        ``finish``), and sleeps until all workers have finished. **Overwrites** the parameters.

        Raises:
            ParameterServerError: the training ended before the step ``init_delay``, or a send has failed on any rank.
                The error of a failed send is raised on every rank.
        """
        self._check_usable("take_result")
        if (served := self.served) is None:
            raise ParameterServerError(
                f"take_result: the parameter server is created in step {self.timetable.init_delay} (init_delay), which "
                f"was not reached (steps so far: {self._last_step + 1}); pass a smaller init_delay"
            )
        if self.group is not None:
            self._wait_for_all(self.group, "take_result")  # The group may still have collectives to complete.
        self._end_on_all_ranks(self.finish, "take_result")
        if self.is_root:
            tensor_lists.prefetch_tensors(served)  # An earlier prefetch may have fetched older values.
            self.adopt(served)
        self.share()
        self._wait_for_all(self.sharding, "take_result")  # No rank may send before all ranks have the result.

    def free(self) -> None:
        """Free the server. All ranks of the sharding level must call it. Repeated calls have no effect.

        Raises:
            ParameterServerError: a send of this rank has failed, and no other call has raised the error. The server has
                been freed nevertheless.
        """
        self.is_free = True
        served, self.served = self.served, None
        if served is not None:
            served.free()
            served.check_sends()

    def state_dict(self) -> dict[str, Any]:
        """Return the state from which a later run can resume. All ranks of the sharding level must call it.

        The ranks synchronize, so that the states of all shards and workers belong to the same moment. Save the returned
        dictionary on each rank, with the network and the optimizer. Only rank 0's dictionary contains the state of the
        server.

        Returns:
            A dictionary for ``torch.save`` and ``load_state_dict``.

        Raises:
            ParameterServerError: this object was freed, or a send has failed on any rank. The error of a failed send is
                raised on every rank.
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
        """Resume from a saved state. The next step is ``state["step"] + 1``.

        All ranks of the sharding level must call it before the first ``update``, after they have loaded the network and
        the optimizer. The server gets the state that rank 0 has saved. A fetch that was in progress when the state was
        saved starts again.

        Args:
            state (dict): dictionary that ``state_dict`` returned on this rank.

        Raises:
            ValueError: the state belongs to a different class, or to parameters of other shapes, or was saved with
                another ``init_delay``. The error is raised on every rank.
            ParameterServerError: ``update`` was already called, or this object was freed.
        """
        self._check_usable("load_state_dict")
        if self._last_step >= 0:
            raise ParameterServerError("load_state_dict: training has already started; load into a new object")
        self._run_on_all_ranks(lambda: self._check_origin(state))
        self.check_alike(is_seeded=state["is_seeded"])
        if state["is_seeded"]:
            self._seed(state)
        self._last_step = state["step"]

    def _origin(self) -> dict[str, Any]:
        """Return the settings that must be equal in the run that saved a state and in the run that resumes."""
        shapes = [list(p.shape) for p in self.parameters]
        return {"kind": self._name, "shapes": shapes, "init_delay": self.timetable.init_delay}

    def _check_origin(self, state: dict[str, Any]) -> None:
        if differing := [name for name, value in self._origin().items() if state.get(name) != value]:
            raise ValueError(f"{self._name}.load_state_dict: pass a state with the same {', '.join(differing)}")

    def _seed(self, state: dict[str, Any] | None = None) -> None:
        """Create the server from rank 0's values, or from a saved state."""
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
        """Raise ParameterServerError if a send of this worker has failed.

        In a group, all ranks raise the error in a step that integrates. Otherwise, the other ranks of the group would
        wait for the root forever.
        """
        allgather: agree.AllGather = agree.alone
        if self.group is not None and not self.shares_memory:
            if not due.integrate:
                return
            allgather = functools.partial(gathered, self.group, "sends of an update")
        failed = agree.first_as(ParameterServerError, f"update({step}): ")
        agree.run_on_all_ranks(allgather, served.check_sends, (ParameterServerError,), str, failed)

    def _end_on_all_ranks(self, step: Callable[[], object], call: str) -> None:
        """Run ``step``, and raise ParameterServerError on every rank if it raises on any rank.

        All ranks of the sharding level must call it. They sleep until the slowest rank calls it.
        """

        def allgather(outcome: T) -> list[T]:
            self._wait_for_all(self.sharding, call)
            return gathered(self.sharding, "outcomes of an update", outcome)

        def failed(texts: Mapping[int, str]) -> ParameterServerError:
            rank, text = next(iter(texts.items()))
            return ParameterServerError(f"{call}: rank {rank}: {text}")

        agree.run_on_all_ranks(allgather, step, (Exception,), str, failed)

    def _run_on_all_ranks(self, step: Callable[[], object]) -> None:
        """Run ``step``, and raise ValueError on every rank if it raises ValueError or TypeError on any rank.

        All ranks of the sharding level must call it.
        """
        allgather = functools.partial(gathered, self.sharding, "outcomes of an update")
        agree.run_on_all_ranks(allgather, step, (TypeError, ValueError), str, _wrong_on_a_rank)

    def _check_usable(self, call: str) -> None:
        if self.is_free:
            raise ParameterServerError(f"{call}: this {self._name} was freed; create a new one")

    def _check_still_trained(self, step: int) -> None:
        """Raise ParameterServerError unless the network still trains the served parameters, in the same order."""
        trained = [id(p) for p in self.network.parameters() if p.requires_grad]
        if trained != [id(p) for p in self.parameters]:
            raise ParameterServerError(
                f"update({step}): the network no longer trains the parameters with which this {self._name} was created "
                "(some were added, removed, replaced or frozen); call free(), and create a new one"
            )

    def _check_group(self) -> None:
        """Raise ValueError unless all ranks of this rank's group hold shards of the server."""
        if self.group is None:
            return
        inner, outer = self.group.direct.mpi.Get_group(), self.sharding.direct.mpi.Get_group()
        places = inner.Translate_ranks(None, outer)
        inner.Free()
        outer.Free()
        if any(place < 0 for place in places):
            raise ValueError(
                f"{self._name}: a group of dataparallel_communicator ({self.group.size} ranks) is not contained in the "
                f"group of sharding_communicator ({self.sharding.size} ranks); pass a sharding_communicator with "
                "larger groups, such as 0"
            )


def _wrong_on_a_rank(failures: Mapping[int, str]) -> ValueError:
    rank, text = next(iter(failures.items()))
    return ValueError(f"{text} (rank {rank})")


def gathered(comm: Communicator, what: str, mine: T) -> list[T]:
    """Return the value ``mine`` of each rank, in rank order. All ranks of ``comm`` must call it.

    ``what`` is the name of the call in hang reports.
    """
    return journal.run_together(what, comm, lambda: comm.direct.mpi.allgather(mine))


def wait_for_all(comm: Communicator, what: str) -> None:
    """Sleep until all ranks of ``comm`` have called it. ``what`` is the name of the call in hang reports."""
    journal.run_together(what, comm, lambda: backoff.barrier(comm.direct.mpi))


def wait_for_all_after_training(comm: Communicator, what: str) -> None:
    """Sleep until all ranks of ``comm`` have called it, after asynchronous training.

    In contrast to ``wait_for_all``, a long wait does not indicate a hang, because some ranks train much longer than
    others. ``what`` is the name of the call in hang reports.
    """
    journal.run_while_others_work(what, comm, lambda: backoff.barrier(comm.direct.mpi))


def check_alike(
    comm: Communicator, who: str, settings: Mapping[str, object], what: str = "settings of an update"
) -> None:
    """Raise RanksDisagree, on every rank, unless all ranks of ``comm`` pass the same settings.

    All ranks must call it. ``what`` is the name of the call in hang reports.
    """
    all_settings = gathered(comm, what, dict(settings))
    for name in all_settings[0]:
        by_rank = [theirs.get(name) for theirs in all_settings]
        if agree.first_different(by_rank) is not None:
            raise RanksDisagree(f"{who}: {name} differs between ranks (by rank: {by_rank}); use one value on all ranks")


def check_trained(comm: Communicator, who: str, network: torch.nn.Module) -> None:
    """Raise RanksDisagree unless all ranks train parameters of the same names, shapes, dtypes and order.

    All ranks of ``comm`` must call it.
    """
    mine = [f"{name} {list(p.shape)} {p.dtype}" for name, p in network.named_parameters() if p.requires_grad]
    by_rank = gathered(comm, "parameters of an update", mine)
    if (rank := agree.first_different(by_rank)) is not None:
        index, there, here = agree.first_difference(by_rank[rank], by_rank[0], "missing")
        raise RanksDisagree(
            f"{who}: rank {rank} and rank 0 train different parameters: parameter {index} is {there} on rank {rank} "
            f"and {here} on rank 0. Create the same network on all ranks, and freeze the same parameters"
        )


def refuse_options(who: str, options: Mapping[str, Any], names: Iterable[str], why: str) -> None:
    """Raise TypeError if ``options`` contains one of the ``names``, which the class ``who`` does not accept."""
    for name in names:
        if name in options:
            raise TypeError(f"{who} does not accept {name}, because {why}; omit {name}")


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source to the target at the same position, which must have the same shape."""
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source.detach())
