"""The subcommands ``run`` and ``compare``: from options to a report."""

from __future__ import annotations

import argparse
import contextlib
from typing import TYPE_CHECKING

import torchmpi_py as mpi
from torchmpi_py.bench import buffers, field, gpu, machine, progress
from torchmpi_py.bench.contestants import GLOO, TORCH_TORCHMPI, Contestant
from torchmpi_py.bench.errors import UsageError
from torchmpi_py.bench.measure import Measurement, make_slabs
from torchmpi_py.bench.results import Report, Row
from torchmpi_py.bench.sizes import format_size
from torchmpi_py.bench.torch_groups import Groups, process_groups
from torchmpi_py.bench.verbs import VERBS, Task
from torchmpi_py.tensors import check_op

if TYPE_CHECKING:
    from mpi4py import MPI


def report(comm: MPI.Comm, options: argparse.Namespace) -> Report:
    """Measure what ``options`` ask for, on ``mpi.device()``. Collective over ``comm``, which holds all ranks.

    Raises UsageError and WrongValue, on every rank.
    """
    task = _task(comm, options)
    wanted = [options.flavour] if options.command == "run" else options.flavours
    with_torchmpi = field.wants_torchmpi(wanted)
    with contextlib.ExitStack() as stack:
        groups = None
        if options.command == "compare" or with_torchmpi:
            groups = stack.enter_context(process_groups(comm, with_torchmpi=with_torchmpi))
        if options.command == "run" or groups is None:
            forms = {"symmetric": options.symmetric, "asynchronous": options.asynchronous}
            return _measured(comm, options, task, field.for_run(task, options.flavour, groups, **forms), [])
        contestants = field.for_compare(comm, task, wanted, groups, asynchronous=options.asynchronous)
        return _measured(comm, options, task, contestants, _without(groups, with_torchmpi=with_torchmpi))


def _without(groups: Groups, *, with_torchmpi: bool) -> list[str]:
    """Remarks on process groups that there are none of."""
    reasons = {GLOO: groups.no_gloo, TORCH_TORCHMPI: groups.no_torchmpi if with_torchmpi else ""}
    return [f"{name} is left out: {reason}" for name, reason in reasons.items() if reason]


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
