"""The modes of distribution with their learning rates and schedules, and the digits and the network for all of them.

A *training* is one run of a mode: the engine, with the hooks of the mode. In every mode a rank computes on as many
samples in as many steps. Rates are for all ranks together: where every rank's steps count in full, as in Hogwild and
Downpour, a rank uses the rate over the number of ranks. The data set, its split and the network are the examples'.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import TensorDataset

import torchmpi_py as mpi
from torchmpi_py import nn as mpinn
from torchmpi_py import paramserver as ps
from torchmpi_py.bench import UsageError
from torchmpi_py.engine import AllReduceSGDEngine, SGDEngine
from torchmpi_py.engine.state import State

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import digits_data


@functools.cache
def digits() -> tuple[TensorDataset, TensorDataset]:
    """(training set, test set) of 1437 and 360 images of 8 x 8 pixels. UsageError without scikit-learn."""
    if importlib.util.find_spec("sklearn") is None:
        raise UsageError("modes needs scikit-learn, for its digits: pip install 'torchmpi-py[examples]'")
    return digits_data.digits()


def make_network(seed: int) -> torch.nn.Module:
    """Two convolutions and two linear layers, the same on every rank."""
    torch.manual_seed(seed)
    return digits_data.conv_net(image_size=8)


def accuracy_percent(network: torch.nn.Module) -> float:
    """The share of the test set that ``network`` classifies right, in percent."""
    return 100 * digits_data.accuracy(network, digits()[1])


@dataclasses.dataclass(frozen=True)
class Mode:
    """A row of the table below."""

    training: type[Training]
    lr: float
    momentum: float = 0.0
    schedule: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def settings(self) -> str:
        """Learning rate, momentum and schedule as a report shows them."""
        momentum = {"momentum": self.momentum} if self.momentum else {}
        return ", ".join(
            f"{name} {value}" for name, value in ({"lr": self.lr} | momentum | dict(self.schedule)).items()
        )


class Training:
    """One run on this rank; made, finished and freed collectively. In this base class each rank trains alone."""

    is_collective = False  # whether a rank that takes a step waits for all others to take one

    def __init__(self, network: torch.nn.Module, mode: Mode) -> None:
        self.network, self.lr = network, mode.lr
        self.engine = SGDEngine()
        self.num_bytes = 0.0  # sent and received by this rank; complete after ``finish``
        self.update: Any = None
        self.make_optimizer(mode)
        self.begin(**mode.schedule)

    def make_optimizer(self, mode: Mode) -> None:
        """The optimizer, and ``arguments`` for the engine's ``train``."""
        self.optimizer = torch.optim.SGD(
            self.network.parameters(), lr=mode.lr, momentum=mode.momentum, nesterov=mode.momentum > 0
        )
        self.arguments: dict[str, Any] = {"optimizer": self.optimizer}

    def begin(self, **schedule: Any) -> None:
        """Set up what the mode needs."""

    def finish(self) -> None:
        """After the last step: write the mode's result into the network."""

    def free(self) -> None:
        """Free what ``begin`` has set up."""
        if self.update is not None:
            self.update.free()

    def parameter_bytes(self) -> int:
        """Bytes of one copy of the parameters."""
        return sum(p.nbytes for p in self.network.parameters())

    def count_allreduce(self) -> None:
        """Count an allreduce of all parameters: the least bytes that a rank sends and receives for it."""
        self.num_bytes += 4 * (mpi.size() - 1) / mpi.size() * self.parameter_bytes()

    def count_served(self, *servers: Any) -> None:
        """Count this rank's traffic with other ranks' shards; on average they have as much with this rank's."""
        exchanged = sum(server.num_bytes_sent + server.num_bytes_received for server in servers)
        self.num_bytes = 2 * (mpi.size() - 1) / mpi.size() * exchanged


class AllReduce(Training):
    """Gradients are averaged by an allreduce in every step."""

    is_collective = True

    def begin(self, **schedule: Any) -> None:
        self.engine = AllReduceSGDEngine()
        self.engine.hooks.on_update = lambda state: self.count_allreduce()


class LowLevel(Training):
    """Gradients are averaged in every step by a server, as the example dsgd does."""

    is_collective = True

    def begin(self, **schedule: Any) -> None:
        self.server = ps.init(parameters_to_vector(self.network.parameters()).detach())
        self.engine.hooks.on_backward = self.average

    def average(self, state: State) -> None:
        """Zero, add, receive, with a barrier after each."""
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


class SynchronousServer(Training):
    """The server's optimizer does the step, each rank on its shard."""

    is_collective = True

    def make_optimizer(self, mode: Mode) -> None:
        self.arguments = {"lr": 0}

    def begin(self, **schedule: Any) -> None:
        self.update = ps.SynchronousUpdate(self.network, lr=self.lr, **schedule)
        self.engine.hooks.on_update = lambda state: self.update.update()

    def finish(self) -> None:
        self.count_served(self.update.served, self.update._gradients)


class LocalSGD(Training):
    """Parameters are averaged every few steps."""

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


class Served(Training):
    """A server holds the parameters; an update exchanges each rank's with the server's."""

    def begin(self, **schedule: Any) -> None:
        self.update = self.make_update(init_delay=0, **schedule)
        self.engine.hooks.on_update = lambda state: self.update.update(state.t - 1)

    def make_update(self, **schedule: Any) -> ps.Update:
        """The mode's update."""
        raise NotImplementedError

    def finish(self) -> None:
        self.update.finish()
        self.count_served(self.update.served)  # without the bytes of taking the result
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
    """EASGD with momentum."""

    def make_update(self, **schedule: Any) -> ps.Update:
        return ps.EAMSGDUpdate(self.network, self.optimizer, **schedule)


class Stale(Served):
    """Ranks send in every step, and wait for ranks too far behind."""

    def make_update(self, **schedule: Any) -> ps.Update:
        return ps.StaleSynchronousUpdate(self.network, **schedule)


class Difference(Served):
    """Ranks exchange the differences of their parameters since the last exchange."""

    def make_update(self, **schedule: Any) -> ps.Update:
        return ps.DifferenceUpdate(self.network, **schedule)


class SharedWeights(Training):
    """Ranks train one shared copy of the parameters."""

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
