"""Every contestant at every size, in one run: checked, timed in turns, checked again.

The subcommands ``run`` and ``compare``: from options to a report.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import torchmpi_py as mpi
from torchmpi_py.bench import UsageError, buffers, gpu, machine, peers, progress_bar
from torchmpi_py.bench.buffers import BufferPlan, Rotation, format_size, make_slab
from torchmpi_py.bench.candidates import GLOO, TORCH_TORCHMPI, Call, Contestant, Take
from torchmpi_py.bench.cases import VERBS, Task
from torchmpi_py.bench.peers import PeerGroups, process_groups
from torchmpi_py.bench.results import Report, ResultRow, make_row
from torchmpi_py.bench.verification import verify, why_not
from torchmpi_py.collectives.timing import interleaved, until_done
from torchmpi_py.core.mpi_api import MPI
from torchmpi_py.core.tensors import check_op
from torchmpi_py.errors import Unavailable

MIN_TURNS, MAX_TURNS = 5, 1000
_SMALL_BYTES = 64 << 10  # up to here a call takes about as long whatever the size


@dataclasses.dataclass
class Measurement:
    """Contestants that do the same task on ``comm``; ``slabs`` by whether they are symmetric. All is collective."""

    comm: MPI.Comm
    task: Task
    contestants: list[Contestant]
    plan: BufferPlan
    slabs: dict[bool, Tensor]
    seconds: float
    verify: bool
    patience_seconds: float = math.inf
    measured: dict[str, ResultRow] = dataclasses.field(default_factory=dict)  # the last row of each contestant

    def drop_unable(self, num_bytes: int) -> list[str]:
        """Leave out those that cannot do the task, found by a trial; return the reasons."""
        rotations = self.rotations(num_bytes, is_cold=False)
        reasons = {
            contestant.name: why_not(self.comm, self.task, contestant, rotations[contestant.is_symmetric], num_bytes)
            for contestant in self.contestants
            if contestant.has_values
        }
        self.contestants = [contestant for contestant in self.contestants if not reasons.get(contestant.name)]
        return [f"{name} is left out: {reason}" for name, reason in reasons.items() if reason]

    def drop_slow(self, num_bytes: int) -> list[str]:
        """Leave out those that would take too long for ``num_bytes``, going by the last size; return the reasons."""
        expected = {
            name: row.median_seconds * max(num_bytes, _SMALL_BYTES) / max(row.num_bytes, _SMALL_BYTES)
            for name, row in self.measured.items()
        }
        slow = [each.name for each in self.contestants if expected.get(each.name, 0.0) > self.patience_seconds]
        self.contestants = [each for each in self.contestants if each.name not in slow]
        return [
            f"{name} is left out from {format_size(num_bytes)} on: a call would take about {expected[name]:.2g} s"
            for name in slow
        ]

    def rows(self, num_bytes: int, buffers: str) -> list[ResultRow]:
        """One row per contestant, for one size and kind of buffers. WrongValue if a result is wrong."""
        is_cold = buffers == "cold"
        rotations = self.rotations(num_bytes, is_cold=is_cold)
        self._verify(rotations, num_bytes, f"{buffers} buffers, before timing")
        for rotation in rotations.values():
            rotation.clear()
        timed = {
            c.name: (_Cold if is_cold else _Warm)(c.bind, rotations[c.is_symmetric].take) for c in self.contestants
        }
        device = self.task.device
        times = interleaved(
            self.comm,
            {name: until_done(each.call, device) for name, each in timed.items()},
            before={name: until_done(each.before, device) for name, each in timed.items()},
            seconds=self.seconds,
            min_turns=MIN_TURNS,
            max_turns=MAX_TURNS,
        )
        self._verify(rotations, num_bytes, f"{buffers} buffers, after timing")
        rows = [make_row(num_bytes, name, buffers, seconds) for name, seconds in times.items()]
        self.measured |= {row.what: row for row in rows}
        return rows

    def rotations(self, num_bytes: int, *, is_cold: bool) -> dict[bool, Rotation]:
        """The slots of one size in each slab."""
        return {
            kind: Rotation(
                slab,
                self.task,
                num_bytes,
                self.plan.num_slots(self.task, num_bytes, is_symmetric=kind, is_cold=is_cold),
            )
            for kind, slab in self.slabs.items()
        }

    def _verify(self, rotations: dict[bool, Rotation], num_bytes: int, when: str) -> None:
        for contestant in self.contestants:
            if self.verify and contestant.has_values:
                verify(self.comm, self.task, contestant, rotations[contestant.is_symmetric], num_bytes, when)


class _Warm:
    """The same slot again and again: the call is made once before it is timed, whatever ran in between."""

    def __init__(self, bind: Callable[[Take], Call], take: Take) -> None:
        self.call = self.before = bind(take)


class _Cold:
    """The next slot for each call, bound before it is timed."""

    def __init__(self, bind: Callable[[Take], Call], take: Take) -> None:
        self.bind = bind
        self.take = take
        self.bound: Call = _nothing

    def before(self) -> None:
        self.bound = self.bind(self.take)

    def call(self) -> object:
        return self.bound()


def _nothing() -> None:
    """Replaced before the first call."""


def make_slabs(
    plan: BufferPlan, contestants: Sequence[Contestant], device: torch.device
) -> tuple[dict[bool, Tensor], list[Contestant], list[str]]:
    """The slabs, the contestants for whom there is one, and remarks. Collective."""
    slabs = {False: make_slab(plan.plain_bytes, device)}
    if not plan.symmetric_bytes:
        return slabs, list(contestants), []
    try:
        slabs[True] = mpi.symmetric_empty(plan.symmetric_bytes, dtype=torch.uint8, device=device)
    except Unavailable as error:
        without = [contestant for contestant in contestants if not contestant.is_symmetric]
        return slabs, without, [f"symmetric tensors are left out: {error}"]
    return slabs, list(contestants), []


def report(comm: MPI.Comm, options: argparse.Namespace) -> Report:
    """Measure what ``options`` ask for, on ``mpi.device()``. Collective over ``comm``, which holds all ranks.

    Raises UsageError and WrongValue, on every rank.
    """
    task = _task(comm, options)
    wanted = [options.flavour] if options.command == "run" else options.flavours
    with_torchmpi = peers.wants_torchmpi(wanted)
    with contextlib.ExitStack() as stack:
        groups = None
        if options.command == "compare" or with_torchmpi:
            groups = stack.enter_context(process_groups(comm, with_torchmpi=with_torchmpi))
        if options.command == "run" or groups is None:
            forms = {"symmetric": options.symmetric, "asynchronous": options.asynchronous}
            return _measured(comm, options, task, peers.for_run(task, options.flavour, groups, **forms), [])
        contestants = peers.for_compare(comm, task, wanted, groups, asynchronous=options.asynchronous)
        return _measured(comm, options, task, contestants, _without(groups, with_torchmpi=with_torchmpi))


def _without(groups: PeerGroups, *, with_torchmpi: bool) -> list[str]:
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
    rows: list[ResultRow] = []
    with_names = progress_bar.shown(
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
) -> buffers.BufferPlan:
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


def _cold_remarks(plan: buffers.BufferPlan, task: Task, sizes: list[int]) -> list[str]:
    small = [str(size) for size in sizes if plan.is_too_small(task, size)]
    if not small:
        return []
    return [
        f"the cold buffers of {', '.join(small)} bytes take turns within {format_size(plan.plain_bytes)} a rank, which "
        f"the last-level cache ({format_size(plan.cache_bytes)}) can hold: they may be warm; --max-memory gives more"
    ]
