"""The command ``step``: the time that averaging the gradients adds to one training step.

The network, data and optimizer stay the same, and the gradients are averaged in several ways. Each way is a *trainer*:
a function that makes some steps of an ongoing training and calls ``done`` after each step. The time between two calls
is one whole step, from taking the sample to the new parameters, also in the engine's loop. The trainers make short runs
of several steps alternately. The first step of each run is not counted, because it follows a step of a different
trainer, and the engine's first step includes the start of ``train``. On a GPU ``done`` waits for the GPU after every
step of every trainer.
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
    networks = "perceptron: few large gradients (default); gpt: 0.8 M parameters, 128 tokens a sample"
    add("--network", choices=trainers.NETWORKS, default="perceptron", help=networks)
    widths = ",".join(map(str, trainers.LAYERS["perceptron"]))
    add("--layers", type=_layers, help=f"widths of the perceptron, input first; default: {widths}")
    command_line.add_device(parser)
    add("--batch", type=command_line.count, default=32, help="samples a rank; default: 32")
    add("--steps", type=command_line.count, default=25, help="timed steps of each way; default: 25")
    add("--optimizer", choices=trainers.OPTIMIZERS, default="sgd", help="default: sgd")
    ways = "average: DDP, nn, the engine (default); sharded: the optimizer's state divided; compressed: fewer bytes"
    add("--ways", type=_ways, default="average", help=f"kinds of trainers, separated by commas; {ways}")
    command_line.add_link(parser)
    command_line.add_output(parser)


@command_line.with_message
def _ways(text: str) -> list[str]:
    if unknown := [way for way in text.split(",") if way not in trainers.WAYS]:
        raise ValueError(f"{unknown[0]!r} is not a kind of trainer; choose from {', '.join(trainers.WAYS)}")
    return text.split(",")


@command_line.with_message
def _layers(text: str) -> list[int]:
    parts = text.split(",")
    if len(parts) < 2 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(f"{text!r}: give at least two widths, such as 784,4096,10")
    return [int(part) for part in parts]


@dataclasses.dataclass(frozen=True)
class StepReport:
    """Settings, and the median seconds of a step, by trainer."""

    layers: list[int]
    batch: int
    num_steps: int
    facts: dict[str, str]
    notes: list[str]
    median_seconds: dict[str, float]
    device: str = "cpu"
    optimizer: str = "sgd"
    network: str = "perceptron"
    wire_seconds: float | None = None  # the floor of an allreduce of all gradients, where the link is known

    @property
    def floor_seconds(self) -> float | None:
        """The floor of a step: it computes, and all gradients cross the wire, at best at the same time."""
        return None if self.wire_seconds is None else max(self.median_seconds[trainers.NONE], self.wire_seconds)

    def added_seconds(self, name: str) -> float:
        """Seconds of a trainer above the loop without communication."""
        return self.median_seconds[name] - self.median_seconds[trainers.NONE]


def main(comm: MPI.Comm, options: argparse.Namespace) -> None:
    """Measure on ``mpi.device()``, print on rank 0, and store. Collective over ``comm``, which holds all ranks.

    Raise RanksDisagree if a trainer leaves different parameters on different ranks, and WrongValue if its parameters
    after the first steps are not those of the others.
    """
    if options.layers is not None and options.network != "perceptron":
        raise UsageError("--layers are the widths of the perceptron; omit --layers, or use --network perceptron")
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
    batches = f"{report.optimizer}, batches of {report.batch} a rank"
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
    """Return the seconds of each trainer's timed steps; each step counts as on the slowest rank. Collective."""
    for trainer in made:
        trainer.train(samples, lambda: None)  # untimed: DDP builds its buckets, memory is allocated
    _check_alike(made)
    # The trainers make short runs alternately, in a changing order, so load on the machine slows all of them equally.
    times: dict[str, list[float]] = {trainer.name: [] for trainer in made}
    rounds = range(-(-options.steps // STEPS_PER_RUN))
    for turn in progress_bar.shown(rounds, lambda turn: "steps", rank=comm.rank, always=options.progress):
        for index in order(len(made), turn):
            comm.Barrier()
            times[made[index].name] += _run(made[index], samples)
    for trainer in made:
        # These trainers leave different parameters on each rank.
        if trainer.name not in (trainers.NONE, trainers.DDP_ALONE, trainers.FSDP, trainers.FSDP_TORCHMPI):
            mpinn.check_with_allreduce(trainer.network)
    return {name: np.max(comm.allgather(of_trainer), axis=0).tolist() for name, of_trainer in times.items()}


def _run(trainer: trainers.Trainer, samples: Sequence[trainers.Sample]) -> list[float]:
    """Run the steps, and return the seconds of each step except the first."""
    ends: list[float] = []
    device = devices.of(samples[0][0].device)

    def done() -> None:
        device.synchronize()
        ends.append(time.perf_counter())

    trainer.train(samples, done)
    return [end - begin for begin, end in itertools.pairwise(ends)]


def _check_alike(made: Sequence[trainers.Trainer]) -> None:
    """Raise WrongValue unless all trainers that average all bits have the same parameters, up to rounding."""
    first, *others = [trainer for trainer in made if trainer.name != trainers.NONE and trainer.is_exact] or made[:1]
    for other in others:
        for (name, x), y in zip(first.network.named_parameters(), other.network.parameters(), strict=True):
            if not torch.allclose(_whole(x), _whole(y), rtol=1e-3, atol=1e-5):
                raise WrongValue(f"after the same steps, {name} of {other.name!r} differs from {first.name!r}")


def _whole(x: Any) -> torch.Tensor:
    """Return the whole parameter. Collective if each rank has only a part of the parameter."""
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
