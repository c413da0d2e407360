"""The command ``step``: the time that averaging the gradients adds to one training step.

All *trainers* have the same network, data and optimizer, but each averages the gradients with a different method. A
trainer is a function that runs several steps of an ongoing training and calls ``done`` after each step. The time
between two calls of ``done`` is the time of one whole step, from reading the sample to updating the parameters. This is
also true of the engine's loop. The trainers alternate in short runs of several steps. The first step of each run is not
counted, because it follows a step of a different trainer, and the engine's first step includes the start of ``train``.
On a GPU ``done`` waits for the GPU after every step of every trainer.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

import torchmpi_py as mpi
from torchmpi_py import nn as mpinn
from torchmpi_py.bench import UsageError, WrongValue, command_line, machine, progress_bar, results, trainers, wire
from torchmpi_py.bench.candidates import process_groups
from torchmpi_py.bench.results import quantile
from torchmpi_py.collectives.timing import order
from torchmpi_py.core.mpi_api import MPI
from torchmpi_py.memory import devices

FLOOR = "max(compute, wire)"
STEPS_PER_RUN = 3
_FORMAT = "torchmpi_py.bench step 2"
_CPU = torch.device("cpu")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``step``."""
    add = parser.add_argument
    networks = "perceptron: few large gradients (default); gpt: 0.8 M parameters, 128 tokens per sample"
    add("--network", choices=trainers.NETWORKS, default="perceptron", help=networks)
    widths = ",".join(map(str, trainers.LAYERS["perceptron"]))
    add("--layers", type=_layers, help=f"widths of the perceptron's layers, starting with the input; default: {widths}")
    command_line.add_device(parser)
    add("--batch", type=command_line.count, default=32, help="samples per rank in each step; default: 32")
    add("--steps", type=command_line.count, default=25, help="timed steps of each trainer; default: 25")
    add("--optimizer", choices=trainers.OPTIMIZERS, default="sgd", help="optimizer of each trainer; default: sgd")
    ways = "average (DDP, nn and the engine; default), sharded (optimizers), compressed (gradients)"
    add("--ways", type=_ways, default="average", help=f"groups of trainers, separated by commas: {ways}")
    command_line.add_link(parser)
    command_line.add_output(parser)


@command_line.with_message
def _ways(text: str) -> list[str]:
    if unknown := [way for way in text.split(",") if way not in trainers.WAYS]:
        raise ValueError(f"{unknown[0]!r} is not a group of trainers; choose from {', '.join(trainers.WAYS)}")
    return text.split(",")


@command_line.with_message
def _layers(text: str) -> list[int]:
    parts = text.split(",")
    if len(parts) < 2 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(f"{text!r}: expected at least two widths above 0, such as 784,4096,10")
    return [int(part) for part in parts]


@dataclasses.dataclass(frozen=True)
class StepReport:
    """The settings of a measurement, and the median time of a step for each trainer."""

    layers: list[int]
    batch: int
    num_steps: int
    facts: dict[str, str]
    notes: list[str]
    median_seconds: dict[str, float]
    device: str = "cpu"
    optimizer: str = "sgd"
    network: str = "perceptron"
    wire_seconds: float | None = None  # floor of an allreduce of all gradients; None without --link

    @property
    def floor_seconds(self) -> float | None:
        """The floor of a step: the longer of computation and communication, which overlap. None without ``--link``."""
        return None if self.wire_seconds is None else max(self.median_seconds[trainers.NONE], self.wire_seconds)

    def added_seconds(self, name: str) -> float:
        """Return the number of seconds by which a trainer's step is slower than a step without communication."""
        return self.median_seconds[name] - self.median_seconds[trainers.NONE]


def main(comm: MPI.Comm, options: argparse.Namespace) -> None:
    """Measure on ``mpi.device()``, print the report on rank 0, and store it.

    ``comm`` contains all ranks, and all ranks must call this function. Raise RanksDisagree if a trainer leaves
    different parameters on different ranks. Raise WrongValue if trainers with ``is_exact`` have different parameters.
    """
    if options.layers is not None and options.network != "perceptron":
        raise UsageError("--layers applies only to the perceptron; omit --layers, or use --network perceptron")
    machine.limit_threads()
    device, layers = mpi.device(), options.layers or trainers.LAYERS[options.network]
    link = None if options.link is None else wire.open_link(options.link)
    with process_groups(comm, with_torchmpi=True) as groups:
        made = trainers.trainers(
            layers,
            with_ddp=not groups.no_gloo,
            torchmpi=groups.torchmpi,
            device=device,
            ways=options.ways,
            optimizer=options.optimizer,
            network=options.network,
        )
        reasons = {trainers.DDP: groups.no_gloo, trainers.DDP_TORCHMPI: groups.no_torchmpi}
        notes = [f"{name} is left out: {reason}" for name, reason in reasons.items() if reason]
        is_text = options.network == "gpt"
        samples = make_samples(layers, options.batch, STEPS_PER_RUN + 1, comm.rank, device=device, is_text=is_text)
        seconds = _measured(comm, made, samples, options)
    num_steps = len(seconds[trainers.NONE])
    medians = {name: quantile(times, 0.5) for name, times in seconds.items()}
    facts = machine.facts(comm, device) | wire.facts(link)
    on_wire = (
        None if link is None else link.floor_seconds("allreduce", sum(p.nbytes for p in made[0].network.parameters()))
    )
    how = device.type, options.optimizer, options.network, on_wire
    report = StepReport(layers, options.batch, num_steps, facts, notes, medians, *how)
    results.publish(comm.rank, render(report), _FORMAT, report, options.json)


def render(report: StepReport) -> str:
    """Return the report in Markdown."""
    network = f"{report.network} {'-'.join(map(str, report.layers))}"
    where = "" if report.device == "cpu" else f" on {report.device}"
    batches = f"{report.optimizer}, batches of {report.batch} per rank"
    title = f"a training step{where}: {network}, {batches}, {report.num_steps} steps"
    header = ["what", "step ms", "added ms", "x DDP's added"]
    rows = [_row(report, name) for name in report.median_seconds]
    floor = report.floor_seconds
    if floor is not None:
        header.append("time/floor")
        rows = [[*row, results.number(report.median_seconds[row[0]] / floor)] for row in rows]
        rows.append([FLOOR, results.number(floor * 1e3), "-", "-", "1.00"])
    return results.document(title, report.facts, report.notes, header, rows)


def _row(report: StepReport, name: str) -> list[str]:
    if name == trainers.NONE:
        return [name, results.number(report.median_seconds[name] * 1e3), "-", "-"]
    added = report.added_seconds(name)
    ddp = report.added_seconds(trainers.DDP) if trainers.DDP in report.median_seconds else 0.0
    return [
        name,
        results.number(report.median_seconds[name] * 1e3),
        results.number(added * 1e3),
        results.number(added / ddp if ddp > 0 else None),
    ]


def _measured(
    comm: MPI.Comm, made: Sequence[trainers.Trainer], samples: Sequence[trainers.Sample], options: argparse.Namespace
) -> dict[str, list[float]]:
    """Return the times of each trainer's timed steps in seconds. The slowest rank determines the time of a step.

    All ranks of ``comm`` must call this function.
    """
    for trainer in made:
        trainer.train(samples, lambda: None)  # These steps are not timed: DDP builds its buckets.
    _check_alike(made)
    # The trainers alternate in short runs, in a changing order, so that load from other programs slows all trainers
    # equally.
    times: dict[str, list[float]] = {trainer.name: [] for trainer in made}
    rounds = range(-(-options.steps // STEPS_PER_RUN))
    for turn in progress_bar.shown(rounds, lambda turn: "steps", rank=comm.rank, always=options.progress):
        for index in order(len(made), turn):
            comm.Barrier()
            times[made[index].name] += _run(made[index], samples)
    for trainer in made:
        # The ranks of the trainers in this tuple have different parameters, or different shards of the parameters.
        if trainer.name not in (trainers.NONE, trainers.DDP_ALONE, trainers.FSDP, trainers.FSDP_TORCHMPI):
            mpinn.check_with_allreduce(trainer.network)
    return {name: np.max(comm.allgather(of_trainer), axis=0).tolist() for name, of_trainer in times.items()}


def _run(trainer: trainers.Trainer, samples: Sequence[trainers.Sample]) -> list[float]:
    """Run one step per sample, and return the time of each step except the first in seconds."""
    ends: list[float] = []
    device = devices.of(samples[0][0].device)

    def done() -> None:
        device.synchronize()
        ends.append(time.perf_counter())

    trainer.train(samples, done)
    return [end - begin for begin, end in itertools.pairwise(ends)]


def _check_alike(made: Sequence[trainers.Trainer]) -> None:
    """Raise WrongValue unless all trainers with ``is_exact`` have the same parameters, up to rounding errors."""
    first, *others = [trainer for trainer in made if trainer.name != trainers.NONE and trainer.is_exact] or made[:1]
    for other in others:
        for (name, x), y in zip(first.network.named_parameters(), other.network.parameters(), strict=True):
            if not torch.allclose(_whole(x), _whole(y), rtol=1e-3, atol=1e-5):
                raise WrongValue(f"parameter {name} of {first.name!r} and {other.name!r} differs after the same steps")


def _whole(x: Any) -> torch.Tensor:
    """Return the whole parameter. If the parameter is sharded, all ranks must call this function."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x  # type: ignore[no-any-return]


def make_samples(
    layers: Sequence[int], batch: int, num_steps: int, rank: int, *, device: torch.device = _CPU, is_text: bool = False
) -> list[trainers.Sample]:
    """Return the batches of ``rank`` on ``device``: inputs (batch, layers[0]), and a class index for each input.

    With ``is_text`` the inputs are tokens, and each token has a class index.
    """
    generator = torch.Generator().manual_seed(trainers.SEED + rank)
    samples = []
    for _ in range(num_steps):
        x = torch.randn(batch, layers[0], generator=generator)
        if is_text:
            x = torch.randint(layers[-1], x.shape, generator=generator)
        y = torch.randint(layers[-1], (x.numel() if is_text else batch,), generator=generator)
        samples.append((x.to(device), y.to(device)))
    return samples
