"""The commands ``run`` and ``compare``, which measure the candidates that the options select, and print a report.

``run`` measures only one flavour. ``compare`` measures our flavours, the peers and the limits in one run.
"""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Sequence

import torch

import torchmpi_py as mpi
from torchmpi_py.bench import UsageError, buffers, command_line, machine, progress_bar, results, wire
from torchmpi_py.bench.buffers import BufferPlan, format_size, parse_size, parse_sizes
from torchmpi_py.bench.candidates import (
    GLOO,
    OTHER_NAMES,
    SELECTOR,
    TORCH_TORCHMPI,
    TORCHMPI,
    Candidate,
    TorchGroups,
    flavour,
    limits,
    process_groups,
    raw_mpi,
    torch_distributed,
)
from torchmpi_py.bench.cases import VERBS, Task
from torchmpi_py.bench.measurement import Measurement, make_pools
from torchmpi_py.bench.results import Report, ResultRow
from torchmpi_py.core.mpi_api import MPI
from torchmpi_py.core.tensors import OPS, check_op

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in ("float32", "float64", "float16", "bfloat16", "int8", "int16", "int32", "int64", "uint8", "bool")
}
_SIZES = {"cpu": "4:64M:8x", "cuda": "4:1G:8x"}
_AVAILABLE = "available"


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``run``."""
    default = "flavour to measure; default: the flavour that a call without flavour= uses"
    parser.add_argument("--flavour", dest="flavours", nargs=1, default=[SELECTOR], metavar="FLAVOUR", help=default)
    _add_options(parser)


def add_compare_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``compare``."""
    parser.add_argument("--flavours", type=command_line.names, metavar="a,b", help="flavours to measure; default: all")
    _add_options(parser)


def _add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--verb", choices=list(VERBS), default="allreduce", help="collective to measure; default: allreduce")
    command_line.add_device(parser)
    sizes = "bytes, such as 4,64K or 4:64M:8x (the default; with --device cuda 4:1G:8x)"
    add("--sizes", type=command_line.with_message(parse_sizes), help=sizes)
    dtypes = f"one of {', '.join(DTYPES)}; default: float32"
    add("--dtype", choices=DTYPES, default="float32", metavar="DTYPE", help=dtypes)
    add("--async", dest="asynchronous", action="store_true", help="measure the asynchronous version (compare: both)")
    add("--op", choices=OPS, default="sum", metavar="OP", help=f"one of {', '.join(OPS)}; default: sum")
    add("--buffers", choices=("warm", "cold", "both"), default="both", help="in the cache or outside it; default: both")
    seconds = "approximate time for each size and each kind of buffers; default: 1"
    add("--seconds", type=command_line.positive, default=1.0, help=seconds)
    in_a_row = "time N calls without a barrier between them, and report their mean; default: 1"
    add("--in-a-row", type=command_line.count, default=1, metavar="N", help=in_a_row)
    memory = "memory for buffers per rank; default: depends on free memory, at most 1G (cuda: 8G)"
    add("--max-memory", type=command_line.with_message(parse_size), metavar="BYTES", help=memory)
    patience = "skip a candidate from the first size at which one call would take longer; default: never"
    add("--patience", type=command_line.positive, default=math.inf, metavar="SECONDS", help=patience)
    command_line.add_link(parser)
    add("--no-verify", dest="verify", action="store_false", help="do not check the values of the results")
    command_line.add_output(parser)


def main(comm: MPI.Comm, options: argparse.Namespace) -> None:
    """Measure, print the report on rank 0, and store it. All ranks must call this function; ``comm`` contains them.

    Raise UsageError or WrongValue on every rank.
    """
    measured = report(comm, options)
    results.publish(comm.rank, results.render(measured), results.COLLECTIVE, measured, options.json)


def report(comm: MPI.Comm, options: argparse.Namespace) -> Report:
    """Measure on ``mpi.device()``, and return the report. All ranks of ``comm`` must call this function.

    Raise UsageError or WrongValue on every rank.
    """
    task = _task(comm, options)
    link = None if options.link is None else wire.open_link(options.link)
    with_peers = options.command == "compare"
    with_torchmpi = options.flavours is None or TORCHMPI in options.flavours
    forms = (False, True) if with_peers and options.asynchronous else (options.asynchronous,)
    notes = []
    with contextlib.ExitStack() as stack:
        groups = TorchGroups()
        if with_peers or with_torchmpi:
            groups = stack.enter_context(process_groups(comm, with_torchmpi=with_torchmpi))
        candidates = ours(task, options.flavours, groups, forms)
        if with_peers:
            candidates += peers(comm, task, groups, forms)
            reasons = {GLOO: groups.no_gloo, TORCH_TORCHMPI: groups.no_torchmpi if with_torchmpi else ""}
            notes = [f"{name} is left out: {reason}" for name, reason in reasons.items() if reason]
        return _measured(comm, options, task, candidates, notes, link)


def _task(comm: MPI.Comm, options: argparse.Namespace) -> Task:
    verb, dtype = VERBS[options.verb], DTYPES[options.dtype]
    if verb.reduces:
        try:
            check_op(verb.name, options.op, dtype)
        except ValueError as error:
            raise UsageError(str(error)) from None
    return Task(verb, dtype, options.op, comm.rank, comm.size, mpi.device())


def ours(task: Task, names: Sequence[str] | None, groups: TorchGroups, forms: Sequence[bool]) -> list[Candidate]:
    """Return this package's candidates: ``names``, or all available candidates.

    ``forms`` contains False for blocking and True for asynchronous calls. ``groups`` contains the process group of the
    candidate "torchmpi". Raise UsageError for a name that is not available.
    """
    statuses = _statuses(task, groups)
    if names is None:
        names = [name for name, status in statuses.items() if status == _AVAILABLE]
    for name in names:
        if name not in statuses:
            raise UsageError(f"flavour {name!r} is unknown; known flavours: {', '.join(statuses)}")
        if statuses[name] != _AVAILABLE:
            raise UsageError(f"flavour {name!r} cannot do {task.verb.name} here: {statuses[name]}; use another flavour")
    return [
        torch_distributed(task, TORCH_TORCHMPI, groups.torchmpi, asynchronous=form)
        if name == TORCHMPI
        else flavour(task, name, asynchronous=form)
        for name in dict.fromkeys(names)
        for form in forms
    ]


def peers(comm: MPI.Comm, task: Task, groups: TorchGroups, forms: Sequence[bool]) -> list[Candidate]:
    """Return raw MPI and gloo, if they are available, and the limits."""
    # On a GPU check the status of raw MPI, because an MPI that cannot access GPU memory would crash.
    has_raw_mpi = task.device.type == "cpu" or _statuses(task, groups).get("mpi") == _AVAILABLE
    of_gloo = [] if groups.no_gloo else [torch_distributed(task, GLOO, None, asynchronous=form) for form in forms]
    return [*([raw_mpi(comm, task)] if has_raw_mpi else []), *of_gloo, *limits(task.device)]


def _statuses(task: Task, groups: TorchGroups) -> dict[str, str]:
    """Return the status of each valid name of ``--flavours``, for the task's collective and device."""
    wanted = task.verb.name, task.device.type
    statuses = {row.flavour: row.status for row in mpi.availability() if (row.verb, row.device) == wanted}
    statuses |= dict.fromkeys(OTHER_NAMES, _AVAILABLE)
    if groups.no_torchmpi:
        statuses[TORCHMPI] = f"torch.distributed has no group on {TORCHMPI!r}: {groups.no_torchmpi}"
    return statuses


def sizes_of(options: argparse.Namespace) -> list[int]:
    """Return ``--sizes`` in bytes, or the default sizes of the device."""
    return options.sizes or parse_sizes(_SIZES[options.device])


def _measured(
    comm: MPI.Comm,
    options: argparse.Namespace,
    task: Task,
    candidates: list[Candidate],
    notes: list[str],
    link: wire.Wire | None,
) -> Report:
    sizes = sorted({task.rounded(num_bytes) for num_bytes in sizes_of(options)})
    kinds = ["warm", "cold"] if options.buffers == "both" else [options.buffers]
    plan = buffers.plan(
        task,
        sizes,
        max_bytes=machine.agreed_max_bytes(comm, options.max_memory, task.device),
        cache_bytes=machine.agreed_cache_bytes(comm, task.device),
        with_symmetric=any(candidate.is_symmetric for candidate in candidates),
        with_cold="cold" in kinds,
    )
    pools, candidates, without_pool = make_pools(plan, candidates, task.device)
    measurement = Measurement(
        comm, task, candidates, plan, pools, options.seconds, options.verify, options.patience, link, options.in_a_row
    )
    # A candidate that fails at the smallest size is omitted at all sizes.
    notes += [*without_pool, *measurement.drop_unable(sizes[0])]
    if not any(candidate.is_ours for candidate in measurement.candidates):
        raise UsageError(f"no flavour can do this measurement; change the options ({'; '.join(notes)})")
    if "cold" in kinds:
        notes += _notes_on_cold(plan, task, sizes)
    rows: list[ResultRow] = []
    for size, kind in progress_bar.shown(
        [(size, kind) for size in sizes for kind in kinds],
        lambda case: f"{format_size(case[0])} {case[1]}",
        rank=comm.rank,
        always=options.progress,
    ):
        notes += measurement.drop_slow(size)
        rows += measurement.rows(size, kind)
    op = task.op if task.verb.reduces else ""
    dtype = str(task.dtype).removeprefix("torch.")
    facts = machine.facts(comm, task.device) | wire.facts(link)
    if options.in_a_row > 1:
        facts["calls in a row"] = str(options.in_a_row)
    return Report(task.verb.name, dtype, op, comm.size, facts, notes, rows, task.device.type)


def _notes_on_cold(plan: BufferPlan, task: Task, sizes: list[int]) -> list[str]:
    small = [str(size) for size in sizes if plan.is_too_small(task, size)]
    if not small:
        return []
    return [
        f"the cold buffers of {', '.join(small)} bytes may be warm, because {format_size(plan.plain_bytes)} of buffers "
        f"per rank fit into the last-level cache ({format_size(plan.cache_bytes)}); pass a larger --max-memory"
    ]
