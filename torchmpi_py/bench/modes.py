"""The subcommand ``modes``: the modes of distribution trained on the same digits with the same number of samples.

Each mode starts from the same network, seed by seed, and sees the same batches: those of one process, cut into a share
for each rank. The modes take turns. What is tested in the end is what the mode has come to: the server's values where
there is a server, the average of local SGD, the common copy of Hogwild.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Sequence

import torch

import torchmpi_py as mpi
from torchmpi_py.bench import UsageError, machine, modes_data, modes_slow, progress_bar, results
from torchmpi_py.bench.modes_ways import MODES, Mode
from torchmpi_py.bench.results import quantile
from torchmpi_py.collectives.timing import order
from torchmpi_py.core.mpi_api import MPI
from torchmpi_py.engine import DatasetIterator

BASELINE = "allreduce"
_FORMAT = "torchmpi_py.bench modes 1"
_NOTES = [
    "MB are what a rank sends and receives, mean over the ranks: for servers what it exchanges with other ranks' "
    "shards and they with its own, without the clocks of ssp; for an allreduce the least that it takes, 4 (n-1)/n of "
    "the parameters. On one node all of it goes through shared memory",
]


@dataclasses.dataclass(frozen=True)
class Run:
    """One training: accuracy in percent, time from the first step until the result is there, and bytes of a rank."""

    mode: str
    seed: int
    accuracy: float
    seconds: float
    num_bytes: float


@dataclasses.dataclass(frozen=True)
class ModesReport:
    """All runs, how they came about, and what a slow rank does, if that was asked for."""

    epochs: int
    batch: int
    num_samples: int
    settings: dict[str, str]
    facts: dict[str, str]
    notes: list[str]
    runs: list[Run]
    slow: modes_slow.SlowReport | None

    def of(self, mode: str) -> list[Run]:
        """The runs of a mode, seed by seed."""
        return sorted((run for run in self.runs if run.mode == mode), key=lambda run: run.seed)

    def gain(self, mode: str) -> float | None:
        """Mean accuracy less that of the baseline with the same seeds, in percent points."""
        pairs = zip(self.of(mode), self.of(BASELINE), strict=False)
        differences = [run.accuracy - other.accuracy for run, other in pairs]
        return statistics.mean(differences) if differences else None


def main(comm: MPI.Comm, options: argparse.Namespace) -> None:
    """Measure, print on rank 0, and store. Collective over ``comm``, which holds all ranks.

    Raises UsageError for an unknown mode, and without scikit-learn.
    """
    names = options.modes or list(MODES)
    if unknown := [name for name in names if name not in MODES]:
        raise UsageError(f"--modes: {unknown[0]!r} is unknown; known modes: {', '.join(MODES)}")
    chosen = {name: _scaled(MODES[name], options.lr_factor) for name in names}
    machine.limit_threads()
    runs = _trained(comm, chosen, options)
    slow = modes_slow.measure(comm, options) if options.slow_rank else None
    settings = {name: mode.settings for name, mode in chosen.items()}
    num_samples = options.epochs * len(modes_data.digits()[0])
    report = ModesReport(options.epochs, options.batch, num_samples, settings, machine.facts(), _NOTES, runs, slow)
    if comm.rank == 0:
        print(render(report), flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps({"format": _FORMAT} | dataclasses.asdict(report), indent=1) + "\n")


def _scaled(mode: Mode, factor: float) -> Mode:
    return dataclasses.replace(mode, lr=mode.lr * factor)


def _trained(comm: MPI.Comm, chosen: dict[str, Mode], options: argparse.Namespace) -> list[Run]:
    """All modes with all seeds, in turns."""
    names = list(chosen)
    for name in names:
        _run(comm, name, chosen[name], 0, epochs=1, batch=options.batch)  # untimed: the first use of torch's optimizers
    todo = [
        (options.first_seed + turn, names[index]) for turn in range(options.seeds) for index in order(len(names), turn)
    ]
    shown = progress_bar.shown(todo, lambda run: f"{run[1]}", rank=comm.rank, always=options.progress)
    return [_run(comm, name, chosen[name], seed, options.epochs, options.batch) for seed, name in shown]


def _run(comm: MPI.Comm, name: str, mode: Mode, seed: int, epochs: int, batch: int) -> Run:
    """Train once. The same on every rank."""
    network = modes_data.make_network(seed)
    way = mode.way(network, mode)
    iterator = DatasetIterator(modes_data.digits()[0], -(-batch // comm.size), seed=seed)
    comm.Barrier()
    begin = time.perf_counter()
    way.engine.train(
        network=network, criterion=torch.nn.CrossEntropyLoss(), iterator=iterator, maxepoch=epochs, **way.how
    )
    way.finish()
    seconds = comm.allreduce(time.perf_counter() - begin, MPI.MAX)
    mpi.nn.check_with_allreduce(network)
    accuracy = modes_data.accuracy(network)
    num_bytes = comm.allreduce(way.num_bytes) / comm.size
    way.free()
    return Run(name, seed, accuracy, seconds, num_bytes)


def render(report: ModesReport) -> str:
    """The report in Markdown."""
    seeds = sorted({run.seed for run in report.runs})
    title = (
        f"modes of distribution: digits, {report.epochs} epochs, {report.num_samples} samples, {report.batch} a step "
        f"over all ranks, {len(seeds)} seed{'s' if len(seeds) > 1 else ''}"
    )
    header = ["mode", "accuracy %", "least", "most", f"minus {BASELINE}", "seconds", "MB a rank", "settings"]
    rows = [_cells(report, mode) for mode in report.settings]
    whole = results.document(title, report.facts, report.notes, header, rows)
    return whole if report.slow is None else f"{whole}\n\n{modes_slow.render(report.slow)}"


def _cells(report: ModesReport, mode: str) -> list[str]:
    runs = report.of(mode)
    accuracies = [run.accuracy for run in runs]
    gain = report.gain(mode)
    return [
        mode,
        _percent(statistics.mean(accuracies)),
        _percent(min(accuracies)),
        _percent(max(accuracies)),
        "-" if gain is None else _percent(round(gain, 2) + 0.0),  # no minus zero
        results.number(quantile([run.seconds for run in runs], 0.5)),
        results.number(_mean([run.num_bytes for run in runs]) / 1e6),
        report.settings[mode],
    ]


def _percent(value: float) -> str:
    return f"{value:.2f}"


def _mean(values: Sequence[float]) -> float:
    return statistics.mean(values)
