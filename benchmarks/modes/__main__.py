"""The modes of distribution trained on the same digits: accuracy, time and bytes for the same number of samples.

    torchmpirun -n 4 benchmarks/modes/__main__.py --seeds 5 --slow-rank

Each mode starts from the same network, seed by seed, and reads the same batches: the batches of one process, cut into a
share for each rank. The modes take turns. Tested is the result of the mode: the server's values where there is a
server, the average of local SGD, the common copy of Hogwild. The digits need scikit-learn.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time

import slow_rank
import torch
from modes import MODES, Mode, accuracy_percent, digits, make_network

import torchmpi_py as mpi
from torchmpi_py.bench import command_line, machine, progress_bar, results
from torchmpi_py.bench.results import quantile
from torchmpi_py.collectives.timing import order
from torchmpi_py.core.mpi_api import MPI
from torchmpi_py.engine import DatasetIterator

BASELINE = "allreduce"
FORMAT = "torchmpi_py.bench modes 1"
NOTES = [
    "MB are what a rank sends and receives, mean over the ranks: for servers what it exchanges with other ranks' "
    "shards and they with its own, without the clocks of ssp; for an allreduce the least that it takes, 4 (n-1)/n of "
    "the parameters. On one node all of it goes through shared memory",
]


@dataclasses.dataclass(frozen=True)
class Run:
    """One training: accuracy in percent, seconds from the first step to the result, and bytes of a rank."""

    mode: str
    seed: int
    accuracy: float
    seconds: float
    num_bytes: float


@dataclasses.dataclass(frozen=True)
class Report:
    """All runs, their settings, and the effect of a slow rank if ``--slow-rank`` was given."""

    epochs: int
    batch: int
    num_samples: int
    settings: dict[str, str]
    facts: dict[str, str]
    notes: list[str]
    runs: list[Run]
    slow: slow_rank.SlowReport | None

    def of(self, mode: str) -> list[Run]:
        """The runs of a mode, seed by seed."""
        return sorted((run for run in self.runs if run.mode == mode), key=lambda run: run.seed)

    def gain(self, mode: str) -> float | None:
        """Mean accuracy less the baseline's with the same seeds, in percent points; None without the baseline."""
        pairs = zip(self.of(mode), self.of(BASELINE), strict=False)
        differences = [run.accuracy - other.accuracy for run, other in pairs]
        return statistics.mean(differences) if differences else None


def main() -> None:
    """Measure, print on rank 0, and store. UsageError, on every rank, for mistakes and without scikit-learn."""
    options = parse(sys.argv[1:])
    mpi.start()
    comm = MPI.COMM_WORLD.Dup()
    results.check_outputs(comm, options.json)
    machine.limit_threads()
    chosen = {name: dataclasses.replace(MODES[name], lr=MODES[name].lr * options.lr_factor) for name in options.modes}
    runs = trained(comm, chosen, options)
    slow = slow_rank.measure(comm, options) if options.slow_rank else None
    settings = {name: mode.settings for name, mode in chosen.items()}
    num_samples = options.epochs * len(digits()[0])
    report = Report(options.epochs, options.batch, num_samples, settings, machine.facts(comm), NOTES, runs, slow)
    results.publish(comm.rank, render(report), FORMAT, report, options.json)
    mpi.stop()


@command_line.with_message
def whole_number(text: str) -> int:
    """A whole number from 0."""
    if not text.isdecimal():
        raise ValueError(f"{text!r} is not a whole number from 0")
    return int(text)


def parse(words: list[str]) -> argparse.Namespace:
    """The options. UsageError for mistakes."""
    count, positive = command_line.count, command_line.positive
    parser = command_line.Parser(prog="benchmarks/modes", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--modes", type=mode_names, default=list(MODES), metavar="a,b", help="default: all")
    add("--epochs", type=count, default=25, help="default: 25")
    add("--batch", type=count, default=60, help="samples a step, over all ranks; default: 60")
    add("--seeds", type=count, default=3, help="how many trainings of each mode; default: 3")
    add("--first-seed", type=whole_number, default=0, metavar="SEED", help="default: 0")
    add("--lr-factor", type=positive, default=1.0, metavar="F", help="on all learning rates; default: 1")
    add("--slow-rank", action="store_true", help="then let the last rank be slower, and see what the others get done")
    add("--slow-factor", type=positive, default=10.0, metavar="F", help="how much longer it pauses; default: 10")
    add("--step-seconds", type=positive, default=0.01, metavar="SECONDS", help="the others' pause; default: 0.01")
    add("--slow-seconds", type=positive, default=5.0, metavar="SECONDS", help="of each such run; default: 5")
    add("--rounds", type=count, default=5, help="even and slow runs of each mode; default: 5")
    add("--lead-runs", type=count, default=1, metavar="N", help="runs in which leads are watched; default: 1")
    add("--lead-steps", type=count, default=1000, metavar="N", help="of such a run; default: 1000")
    command_line.add_output(parser)
    return parser.parse_args(words)


@command_line.with_message
def mode_names(text: str) -> list[str]:
    """Names of modes, separated by commas."""
    for name in text.split(","):
        if name not in MODES:
            raise ValueError(f"{name!r} is unknown; known modes: {', '.join(MODES)}")
    return text.split(",")


def trained(comm: MPI.Comm, chosen: dict[str, Mode], options: argparse.Namespace) -> list[Run]:
    """All modes with all seeds, in turns. Collective over ``comm``."""
    names = list(chosen)
    for name in names:
        train(
            comm, name, chosen[name], 0, epochs=1, batch=options.batch
        )  # untimed: the first use of torch's optimizers
    todo = [
        (options.first_seed + turn, names[index]) for turn in range(options.seeds) for index in order(len(names), turn)
    ]
    shown = progress_bar.shown(todo, lambda run: f"{run[1]}", rank=comm.rank, always=options.progress)
    return [train(comm, name, chosen[name], seed, options.epochs, options.batch) for seed, name in shown]


def train(comm: MPI.Comm, name: str, mode: Mode, seed: int, epochs: int, batch: int) -> Run:
    """One training. Collective over ``comm``; the result is the same on every rank."""
    network = make_network(seed)
    training = mode.training(network, mode)
    iterator = DatasetIterator(digits()[0], -(-batch // comm.size), seed=seed)
    comm.Barrier()
    begin = time.perf_counter()
    training.engine.train(
        network=network, criterion=torch.nn.CrossEntropyLoss(), iterator=iterator, maxepoch=epochs, **training.arguments
    )
    training.finish()
    seconds = comm.allreduce(time.perf_counter() - begin, MPI.MAX)
    mpi.nn.check_with_allreduce(network)
    accuracy = accuracy_percent(network)
    num_bytes = comm.allreduce(training.num_bytes) / comm.size
    training.free()
    return Run(name, seed, accuracy, seconds, num_bytes)


def render(report: Report) -> str:
    """The report in Markdown."""
    seeds = sorted({run.seed for run in report.runs})
    title = (
        f"modes of distribution: digits, {report.epochs} epochs, {report.num_samples} samples, {report.batch} a step "
        f"over all ranks, {len(seeds)} seed{'s' if len(seeds) > 1 else ''}"
    )
    header = ["mode", "accuracy %", "least", "most", f"minus {BASELINE}", "seconds", "MB a rank", "settings"]
    rows = [row(report, mode) for mode in report.settings]
    whole = results.document(title, report.facts, report.notes, header, rows)
    return whole if report.slow is None else f"{whole}\n\n{slow_rank.render(report.slow)}"


def row(report: Report, mode: str) -> list[str]:
    """The table's row of a mode."""
    runs = report.of(mode)
    accuracies = [run.accuracy for run in runs]
    gain = report.gain(mode)
    return [
        mode,
        f"{statistics.mean(accuracies):.2f}",
        f"{min(accuracies):.2f}",
        f"{max(accuracies):.2f}",
        "-" if gain is None else f"{round(gain, 2) + 0.0:.2f}",  # no minus zero
        results.number(quantile([run.seconds for run in runs], 0.5)),
        results.number(statistics.mean(run.num_bytes for run in runs) / 1e6),
        report.settings[mode],
    ]


if __name__ == "__main__":
    sys.exit(command_line.exit_code(main))
