"""The subcommands ``run`` and ``compare``: from options to a report."""

from __future__ import annotations

import argparse
import contextlib
from typing import TYPE_CHECKING

import torchmpi_py as mpi
from torchmpi_py.bench import buffers, field, gpu, machine, progress
from torchmpi_py.bench.contestants import Contestant
from torchmpi_py.bench.errors import UsageError
from torchmpi_py.bench.gloo import process_group
from torchmpi_py.bench.measure import Measurement, make_slabs
from torchmpi_py.bench.results import Report, Row
from torchmpi_py.bench.sizes import format_size
from torchmpi_py.bench.verbs import VERBS, Task
from torchmpi_py.tensors import check_op

if TYPE_CHECKING:
    from mpi4py import MPI


def report(comm: MPI.Comm, options: argparse.Namespace) -> Report:
    """Measure what ``options`` ask for, on ``mpi.device()``. Collective over ``comm``, which holds all ranks.

    Raises UsageError and WrongValue, on every rank.
    """
    task = _task(comm, options)
    notes: list[str] = []
    with contextlib.ExitStack() as stack:
        if options.command == "run":
            contestants = field.for_run(
                task, options.flavour, symmetric=options.symmetric, asynchronous=options.asynchronous
            )
        else:
            no_gloo = stack.enter_context(process_group(comm))
            notes += [f"torch gloo is left out: {no_gloo}"] if no_gloo else []
            contestants = field.for_compare(comm, task, options.flavours, with_gloo=not no_gloo)
        return _measured(comm, options, task, contestants, notes)


def _task(comm: MPI.Comm, options: argparse.Namespace) -> Task:
    verb = VERBS[options.verb]
    if verb.reduces:
        try:
            check_op(verb.name, options.op, options.dtype)
        except ValueError as error:
            raise UsageError(str(error)) from None
    return Task(verb, options.dtype, options.op, comm.rank, comm.size, mpi.device())


def _measured(
    comm: MPI.Comm, options: argparse.Namespace, task: Task, contestants: list[Contestant], notes: list[str]
) -> Report:
    sizes = sorted({task.rounded(num_bytes) for num_bytes in options.sizes})
    kinds = ["warm", "cold"] if options.buffers == "both" else [options.buffers]
    plan = _plan(comm, options, task, sizes, contestants)
    slabs, contestants, remarks = make_slabs(plan, contestants, task.device)
    measurement = Measurement(comm, task, contestants, plan, slabs, options.seconds, options.verify, options.patience)
    notes += [*remarks, *measurement.drop_unable(sizes[0])]
    if not any(contestant.is_ours for contestant in measurement.contestants):
        raise UsageError(f"nothing is left to measure: {'; '.join(notes)}")
    if "cold" in kinds:
        notes += _cold_remarks(plan, task, sizes)
    cases = [(size, kind) for size in sizes for kind in kinds]
    rows: list[Row] = []
    with_names = progress.shown(
        cases, lambda case: f"{format_size(case[0])} {case[1]}", rank=comm.rank, always=options.progress
    )
    for size, kind in with_names:
        notes += measurement.drop_slow(size)
        rows += measurement.rows(size, kind)
    op = task.op if task.verb.reduces else ""
    dtype = str(task.dtype).removeprefix("torch.")
    facts = machine.facts() | gpu.facts(comm, task.device)
    return Report(task.verb.name, dtype, op, comm.size, facts, notes, rows, task.device.type)


def _plan(
    comm: MPI.Comm, options: argparse.Namespace, task: Task, sizes: list[int], contestants: list[Contestant]
) -> buffers.Plan:
    with_symmetric = any(contestant.is_symmetric for contestant in contestants)
    if task.device.type == "cpu":
        max_bytes = machine.agreed_max_bytes(comm, options.max_memory)
        cache_bytes = machine.agreed_cache_bytes(comm)
    else:
        max_bytes = gpu.agreed_max_bytes(comm, options.max_memory, task.device)
        cache_bytes = gpu.CACHE_BYTES
    return buffers.plan(
        task,
        sizes,
        max_bytes=max_bytes,
        cache_bytes=cache_bytes,
        with_symmetric=with_symmetric,
        with_cold=options.buffers != "warm",
    )


def _cold_remarks(plan: buffers.Plan, task: Task, sizes: list[int]) -> list[str]:
    small = [str(size) for size in sizes if plan.is_too_small(task, size)]
    if not small:
        return []
    return [
        f"the cold buffers of {', '.join(small)} bytes take turns within {format_size(plan.plain_bytes)} a rank, which "
        f"the last-level cache ({format_size(plan.cache_bytes)}) can hold: they may be warm; --max-memory gives more"
    ]
