"""The effect of one slow rank on the modes.

A step is the small network's and a pause of fixed length, so that cores, of which there may be fewer than ranks, do not
limit the rate. The last rank pauses longer. Even and slow runs take turns; a run lasts a fixed time, or, for modes in
which all ranks step together, a fixed number of steps.

Bounded staleness is observed from outside. Every rank records when each of its calls of ``update`` begins and returns,
by the clock that the processes of a node share. A rank whose update k has begun has completed k steps. So when update k
returns on a rank, its *lead* is k less the fewest updates that had begun on any rank.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from modes import MODES, Training, digits, make_network

from torchmpi_py.bench import progress_bar, results
from torchmpi_py.bench.results import quantile
from torchmpi_py.core.mpi_api import MPI
from torchmpi_py.engine.state import State

SSP = "ssp"
COMPARED = ("allreduce", "downpour", "easgd", SSP)
BATCH = 15


@dataclasses.dataclass(frozen=True)
class SlowReport:
    """Samples per second of all ranks but the last, by run, with even and with slow steps; and leads by run."""

    step_seconds: float
    factor: float
    even: dict[str, list[float]]
    slow: dict[str, list[float]]
    staleness: int
    num_steps: int
    leads: list[int]

    def ratio(self, mode: str) -> float:
        """The median of slow over even, over pairs of runs that follow each other."""
        return quantile([slow / even for slow, even in zip(self.slow[mode], self.even[mode], strict=True)], 0.5)


class Paced:
    """An iterator for the engine: batches, each after a pause, for some time or some number of steps.

    The time begins with the second batch: the first step waits for all ranks to seed the server.
    """

    def __init__(self, batches: Sequence[object], pause: float, *, seconds: float | None, steps: int | None) -> None:
        self.batches, self.pause = batches, pause
        self.seconds, self.steps = seconds, steps
        self.begin = 0.0
        self.num_timed = 0

    def __iter__(self) -> Iterator[object]:
        yield self.batches[0]
        self.begin = time.perf_counter()
        while not self._is_done():
            time.sleep(self.pause)
            self.num_timed += 1
            yield self.batches[self.num_timed % len(self.batches)]

    def _is_done(self) -> bool:
        if self.steps is not None:
            return self.num_timed >= self.steps
        assert self.seconds is not None, "one of them is given"
        return time.perf_counter() - self.begin >= self.seconds


class UpdateTimes:
    """Records when the calls of the hook ``on_update`` begin and return, in seconds of the node's clock."""

    def __init__(self, training: Training) -> None:
        self.begins: list[float] = []
        self.returns: list[float] = []
        self._inner = training.engine.hooks.on_update
        training.engine.hooks.on_update = self._recorded

    def _recorded(self, state: State) -> None:
        self.begins.append(time.monotonic())
        self._inner(state)
        self.returns.append(time.monotonic())


def measure(comm: MPI.Comm, options: argparse.Namespace) -> SlowReport:
    """Even and slow runs of the compared modes, and leads of SSP. Collective over ``comm``."""
    even: dict[str, list[float]] = {name: [] for name in COMPARED}
    slow: dict[str, list[float]] = {name: [] for name in COMPARED}
    shown = progress_bar.shown(range(options.rounds), lambda turn: "slow rank", rank=comm.rank, always=options.progress)
    for turn in shown:
        for name in COMPARED:
            for factor in (1.0, options.slow_factor)[:: 1 if turn % 2 else -1]:
                (even if factor == 1 else slow)[name].append(_rate(comm, name, factor, options))
    leads = [_largest_lead(comm, options) for _ in range(options.lead_runs)]
    staleness = MODES[SSP].schedule["staleness"]
    return SlowReport(options.step_seconds, options.slow_factor, even, slow, staleness, options.lead_steps, leads)


def _rate(comm: MPI.Comm, name: str, factor: float, options: argparse.Namespace) -> float:
    """Samples per second of all ranks but the last. The same on every rank."""
    training = MODES[name].training(make_network(0), MODES[name])
    steps = int(options.slow_seconds / options.step_seconds / factor) if training.is_collective or name == SSP else None
    paced = _paced(comm, factor, options, seconds=options.slow_seconds, steps=steps)
    seconds = _train(comm, training, paced)
    rate = paced.num_timed * BATCH / seconds if comm.rank < max(1, comm.size - 1) else 0.0
    return comm.allreduce(rate)  # type: ignore[no-any-return]


def _largest_lead(comm: MPI.Comm, options: argparse.Namespace) -> int:
    """The largest lead of the fastest rank over the slowest one. The same on every rank."""
    training = MODES[SSP].training(make_network(0), MODES[SSP])
    times = UpdateTimes(training)
    _train(comm, training, _paced(comm, options.slow_factor, options, seconds=None, steps=options.lead_steps))
    gathered = comm.allgather((times.begins, times.returns))
    return largest_lead([begins for begins, _ in gathered], [returns for _, returns in gathered])


def largest_lead(begins: Sequence[Sequence[float]], returns: Sequence[Sequence[float]]) -> int:
    """The largest lead, from the times at which the updates of each rank began and returned (module docstring)."""
    leads = []
    for times in returns:
        fewest = np.min([np.searchsorted(np.array(others), np.array(times), side="right") for others in begins], axis=0)
        leads.append(int((np.arange(1, len(times) + 1) - fewest).max()))
    return max(leads)


def _paced(
    comm: MPI.Comm, factor: float, options: argparse.Namespace, *, seconds: float | None, steps: int | None
) -> Paced:
    images, labels = digits()[0].tensors
    chosen = torch.split(torch.arange(comm.rank, len(labels), comm.size), BATCH)[:-1]
    pause = options.step_seconds * (factor if comm.rank == comm.size - 1 else 1)
    return Paced([(images[batch], labels[batch]) for batch in chosen], pause, seconds=seconds, steps=steps)


def _train(comm: MPI.Comm, training: Training, paced: Paced) -> float:
    """Train; return the seconds of the timed steps on this rank. Collective."""
    training.engine.train(
        network=training.network, criterion=torch.nn.CrossEntropyLoss(), iterator=paced, **training.arguments
    )
    seconds = time.perf_counter() - paced.begin
    training.finish()
    comm.Barrier()
    training.free()
    return seconds


def render(report: SlowReport) -> str:
    """The report in Markdown."""
    header = ["mode", "even samples/s", "slow samples/s", "slow / even"]
    rows = [
        [
            mode,
            results.number(quantile(report.even[mode], 0.5)),
            results.number(quantile(report.slow[mode], 0.5)),
            f"{report.ratio(mode):.3f}",
        ]
        for mode in report.even
    ]
    num_runs = len(next(iter(report.even.values())))
    explanation = (
        f"In every step the last rank pauses {report.factor:g} times as long as the others, which pause "
        f"{report.step_seconds * 1e3:g} ms. What the others get done together, medians of {num_runs} runs that take "
        "turns with runs in which all pause alike:"
    )
    leads = (
        f"Bounded staleness with s = {report.staleness}: in {report.num_steps} steps with the slow rank the fastest "
        f"was at most {max(report.leads)} ahead of the slowest (by run: {', '.join(map(str, report.leads))})."
    )
    return f"## One slow rank\n\n{explanation}\n\n{results.table(header, rows)}\n\n{leads}"
