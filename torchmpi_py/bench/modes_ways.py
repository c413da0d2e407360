"""The modes of distribution that ``modes`` compares, with their learning rates and schedules.

A *way* is one run of a mode: the engine that trains, with the hooks of the mode. In all of them a rank computes on as
many samples in as many steps. Rates are for all ranks together: where every rank's steps count in full, as in Hogwild
and Downpour, a rank takes its part, the rate over the number of ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import torchmpi_py as mpi
from torchmpi_py import nn as mpinn
from torchmpi_py import paramserver as ps
from torchmpi_py.engine import AllReduceSGDEngine, SGDEngine
from torchmpi_py.engine.state import State


@dataclasses.dataclass(frozen=True)
class Mode:
    """A row of the table below."""

    way: type[Way]
    lr: float
    momentum: float = 0.0
    schedule: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def settings(self) -> str:
        """For the reader of a report."""
        momentum = {"momentum": self.momentum} if self.momentum else {}
        return ", ".join(
            f"{name} {value}" for name, value in ({"lr": self.lr} | momentum | dict(self.schedule)).items()
        )


class Way:
    """One run on this rank; made, finished and freed collectively. Here: each rank trains by itself."""

    is_collective = False  # whether a rank that takes a step waits for all others to take one

    def __init__(self, network: torch.nn.Module, mode: Mode) -> None:
        self.network, self.lr = network, mode.lr
        self.engine = SGDEngine()
        self.num_bytes = 0.0  # sent and received by this rank; complete after ``finish``
        self.update: Any = None
        self.make_optimizer(mode)
        self.begin(**mode.schedule)

    def make_optimizer(self, mode: Mode) -> None:
        """``how``: what the engine's ``train`` is told."""
        self.optimizer = torch.optim.SGD(
            self.network.parameters(), lr=mode.lr, momentum=mode.momentum, nesterov=mode.momentum > 0
        )
        self.how: dict[str, Any] = {"optimizer": self.optimizer}

    def begin(self, **schedule: Any) -> None:
        """Set up what the mode needs."""

    def finish(self) -> None:
        """After the last step: give the network what the mode has come to."""

    def free(self) -> None:
        """Give back what ``begin`` has set up."""
        if self.update is not None:
            self.update.free()

    def parameter_bytes(self) -> int:
        """Of one copy of the parameters."""
        return sum(p.nbytes for p in self.network.parameters())

    def count_allreduce(self) -> None:
        """An allreduce of all parameters: the least that a rank has to send and receive for it."""
        self.num_bytes += 4 * (mpi.size() - 1) / mpi.size() * self.parameter_bytes()

    def count_served(self, *servers: Any) -> None:
        """What this rank has exchanged with the shards of others. On average they have as much with its own."""
        exchanged = sum(server.num_bytes_sent + server.num_bytes_received for server in servers)
        self.num_bytes = 2 * (mpi.size() - 1) / mpi.size() * exchanged


class AllReduce(Way):
    """Gradients are averaged by an allreduce in every step."""

    is_collective = True

    def begin(self, **schedule: Any) -> None:
        self.engine = AllReduceSGDEngine()
        self.engine.hooks.on_update = lambda state: self.count_allreduce()


class LowLevel(Way):
    """Gradients are averaged in every step by a server, as the example dsgd does."""

    is_collective = True

    def begin(self, **schedule: Any) -> None:
        self.server = ps.init(parameters_to_vector(self.network.parameters()).detach())
        self.engine.hooks.on_backward = self.average

    def average(self, state: State) -> None:
        """Zero, add, receive; all meet in between."""
        gradients = [p.grad for p in self.network.parameters() if p.grad is not None]
        total = parameters_to_vector(gradients)
        if mpi.rank() == 0:
            self.server.send(total, "zero").wait()
        mpi.barrier()
        self.server.send(total, "add").wait()
        mpi.barrier()
        self.server.receive(total).wait()
        mpi.barrier()
        vector_to_parameters(total / mpi.size(), gradients)

    def finish(self) -> None:
        self.count_served(self.server)

    def free(self) -> None:
        self.server.free()


class SynchronousServer(Way):
    """The server's optimizer does the step, each rank its part of it."""

    is_collective = True

    def make_optimizer(self, mode: Mode) -> None:
        self.how = {"lr": 0}

    def begin(self, **schedule: Any) -> None:
        self.update = ps.SynchronousUpdate(self.network, lr=self.lr, **schedule)
        self.engine.hooks.on_update = lambda state: self.update.update()

    def finish(self) -> None:
        self.count_served(self.update.served, self.update._gradients)


class LocalSGD(Way):
    """Parameters are averaged now and then."""

    is_collective = True

    def begin(self, **schedule: Any) -> None:
        self.update = ps.PeriodicAveraging(self.network, init_delay=0, **schedule)
        self.engine.hooks.on_update = self.after_step

    def after_step(self, state: State) -> None:
        """Steps count from 0; state.t counts this one already."""
        self.update.update(state.t - 1)
        if self.update.timetable.at(state.t - 1).integrate:
            self.count_allreduce()

    def finish(self) -> None:
        mpinn.synchronize_parameters(self.network, average=True)
        self.count_allreduce()


class Served(Way):
    """A server holds the parameters, and each rank exchanges with it as its update says."""

    def begin(self, **schedule: Any) -> None:
        self.update = self.make_update(init_delay=0, **schedule)
        self.engine.hooks.on_update = lambda state: self.update.update(state.t - 1)

    def make_update(self, **schedule: Any) -> ps.Update:
        """The mode's update."""
        raise NotImplementedError

    def finish(self) -> None:
        self.update.finish()
        self.count_served(self.update.served)  # without what it takes to look at the result
        self.update.take_result()


class Downpour(Served):
    """Ranks send sums of gradients."""

    def make_update(self, **schedule: Any) -> ps.Update:
        rate = self.lr / mpi.size()
        return ps.DownpourUpdate(self.network, local_update=lambda total: total.mul_(-rate), **schedule)


class Elastic(Served):
    """Ranks and a centre attract each other."""

    def make_update(self, **schedule: Any) -> ps.Update:
        return ps.EASGDUpdate(self.network, **schedule)


class ElasticMomentum(Served):
    """The same with momentum."""

    def make_update(self, **schedule: Any) -> ps.Update:
        return ps.EAMSGDUpdate(self.network, self.optimizer, **schedule)


class Stale(Served):
    """Ranks send in every step, and wait for those too far behind."""

    def make_update(self, **schedule: Any) -> ps.Update:
        return ps.StaleSynchronousUpdate(self.network, **schedule)


class Difference(Served):
    """Ranks exchange how far they have come."""

    def make_update(self, **schedule: Any) -> ps.Update:
        return ps.DifferenceUpdate(self.network, **schedule)


class SharedWeights(Way):
    """Ranks train one copy."""

    def begin(self, **schedule: Any) -> None:
        self.update = ps.Hogwild(self.network)
        for group in self.optimizer.param_groups:
            group["lr"] /= mpi.size()

    def finish(self) -> None:
        mpi.barrier()


MODES: dict[str, Mode] = {
    "allreduce": Mode(AllReduce, lr=0.1),
    "dsgd": Mode(LowLevel, lr=0.1),
    "synchronous": Mode(SynchronousServer, lr=0.1),
    "local": Mode(LocalSGD, lr=0.1, schedule={"update_frequency": 10}),
    "downpour": Mode(Downpour, lr=0.1, schedule={"update_frequency": 5, "send_frequency": 5, "prefetch": 1}),
    "easgd": Mode(Elastic, lr=0.1, schedule={"beta": 0.9, "update_frequency": 10, "prefetch": 1}),
    "eamsgd": Mode(
        ElasticMomentum, lr=0.01, momentum=0.9, schedule={"beta": 0.9, "update_frequency": 10, "prefetch": 1}
    ),
    "difference": Mode(Difference, lr=0.1, schedule={"update_frequency": 5, "prefetch": 1}),
    "ssp": Mode(Stale, lr=0.1, schedule={"staleness": 3}),
    "hogwild": Mode(SharedWeights, lr=0.1),
}
