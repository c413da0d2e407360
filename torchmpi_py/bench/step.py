"""The subcommand ``step``: what averaging the gradients adds to one training step.

The trainers take turns in short runs of several steps, in one run of the bench. The first step of each run is not
counted: it follows another trainer's, and the engine's includes the begin of ``train``. On a GPU every step of every
trainer ends with waiting for the GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

import torchmpi_py as mpi
from torchmpi_py import devices
from torchmpi_py import nn as mpinn
from torchmpi_py.bench import breakdown, gpu, machine, progress, table
from torchmpi_py.bench.errors import WrongValue
from torchmpi_py.bench.results import quantile
from torchmpi_py.bench.torch_groups import process_groups
from torchmpi_py.bench.trainers import DDP, DDP_TORCHMPI, NONE, Sample, Trainer, make_samples, trainers
from torchmpi_py.collectives.timing import order

if TYPE_CHECKING:
    from mpi4py import MPI

STEPS_PER_RUN = 3
_FORMAT = "torchmpi_py.bench step 1"


@dataclasses.dataclass(frozen=True)
class StepReport:
    """Median times of one step, in seconds, by the name of the trainer; and how they came about."""

    layers: list[int]
    batch: int
    num_steps: int
    facts: dict[str, str]
    notes: list[str]
    median_seconds: dict[str, float]
    parts_seconds: dict[str, float]
    device: str = "cpu"

    def added_seconds(self, name: str) -> float:
        """What a trainer takes above the loop without communication."""
        return self.median_seconds[name] - self.median_seconds[NONE]


def main(comm: MPI.Comm, options: argparse.Namespace) -> None:
    """Measure on ``mpi.device()``, print on rank 0, and store. Collective over ``comm``, which holds all ranks.

    Raises RanksDisagree if a trainer leaves different parameters on different ranks, and WrongValue if its parameters
    after the first steps are not those of the others.
    """
    machine.limit_threads()
    device = mpi.device()
    with process_groups(comm, with_torchmpi=True) as groups:
        made = trainers(options.layers, with_ddp=not groups.no_gloo, torchmpi=groups.torchmpi, device=device)
        reasons = {DDP: groups.no_gloo, DDP_TORCHMPI: groups.no_torchmpi}
        notes = [f"{name} is left out: {reason}" for name, reason in reasons.items() if reason]
        samples = make_samples(options.layers, options.batch, STEPS_PER_RUN + 1, comm.rank, device)
        seconds = _measured(comm, made, samples, options)
    num_steps = len(seconds[NONE])
    medians = {name: quantile(times, 0.5) for name, times in seconds.items()}
    parts = breakdown.measure(comm, options.layers, samples[0], min(options.steps, 15))
    facts = machine.facts() | gpu.facts(comm, device)
    report = StepReport(options.layers, options.batch, num_steps, facts, notes, medians, parts, device.type)
    if comm.rank == 0:
        print(render(report), flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps({"format": _FORMAT} | dataclasses.asdict(report), indent=1) + "\n")


def render(report: StepReport) -> str:
    """The report in Markdown."""
    layers = "-".join(map(str, report.layers))
    where = "" if report.device == "cpu" else f" on {report.device}"
    title = f"a training step{where}: layers {layers}, batches of {report.batch} a rank, {report.num_steps} steps"
    header = ["what", "step ms", "added ms", "x DDP's added"]
    rows = [_row(report, name) for name in report.median_seconds]
    parts = [[name, table.number(seconds * 1e3)] for name, seconds in report.parts_seconds.items()]
    whole = table.document(title, report.facts, report.notes, header, rows)
    return f"{whole}\n\n{table.table(['part', 'ms'], parts)}" if parts else whole


def _row(report: StepReport, name: str) -> list[str]:
    if name == NONE:
        return [name, table.number(report.median_seconds[name] * 1e3), "-", "-"]
    added = report.added_seconds(name)
    ddp = report.added_seconds(DDP) if DDP in report.median_seconds else 0.0
    return [
        name,
        table.number(report.median_seconds[name] * 1e3),
        table.number(added * 1e3),
        table.number(added / ddp if ddp > 0 else None),
    ]


def _measured(
    comm: MPI.Comm, made: Sequence[Trainer], samples: Sequence[Sample], options: argparse.Namespace
) -> dict[str, list[float]]:
    """The times of the timed steps of each trainer, each that of the slowest rank."""
    for trainer in made:
        trainer.train(samples, _ignored)  # untimed: DDP arranges its buckets, memory is allocated
    _check_alike(made)
    times: dict[str, list[float]] = {trainer.name: [] for trainer in made}
    rounds = range(-(-options.steps // STEPS_PER_RUN))
    for turn in progress.shown(rounds, lambda turn: "steps", rank=comm.rank, always=options.progress):
        for index in order(len(made), turn):
            comm.Barrier()
            times[made[index].name] += _run(made[index], samples)
    for trainer in made:
        if trainer.name != NONE:
            mpinn.check_with_allreduce(trainer.network)
    return {name: _slowest(comm, of_trainer) for name, of_trainer in times.items()}


def _run(trainer: Trainer, samples: Sequence[Sample]) -> list[float]:
    """The times of all steps but the first."""
    ends: list[float] = []
    device = devices.of(samples[0][0].device)

    def done() -> None:
        device.synchronize()
        ends.append(time.perf_counter())

    trainer.train(samples, done)
    return [end - begin for begin, end in itertools.pairwise(ends)]


def _slowest(comm: MPI.Comm, seconds: Sequence[float]) -> list[float]:
    from mpi4py import MPI

    here = np.array(seconds)
    comm.Allreduce(MPI.IN_PLACE, here, MPI.MAX)
    return here.tolist()  # type: ignore[no-any-return]


def _check_alike(made: Sequence[Trainer]) -> None:
    """All that average start alike and see the same data, so they must get the same parameters, up to rounding."""
    first, *others = [trainer for trainer in made if trainer.name != NONE]
    for other in others:
        for (name, x), y in zip(first.network.named_parameters(), other.network.parameters(), strict=True):
            if not torch.allclose(x, y, rtol=1e-3, atol=1e-5):
                raise WrongValue(f"after the same steps {name} of {other.name!r} is not that of {first.name!r}")


def _ignored() -> None:
    """The end of an untimed step."""
