"""The measurement of all candidates at one size: check the results, time alternating calls, and check again."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

import torchmpi_py as mpi
from torchmpi_py.bench import WrongValue, cases, machine
from torchmpi_py.bench.buffers import BufferPlan, Rotation, TaskBuffers, format_size, make_pool
from torchmpi_py.bench.candidates import WIRE, Call, Candidate, NextBuffers
from torchmpi_py.bench.cases import Task
from torchmpi_py.bench.results import ResultRow, make_row
from torchmpi_py.bench.wire import Wire
from torchmpi_py.collectives.timing import interleaved, until_done
from torchmpi_py.core.mpi_api import MPI
from torchmpi_py.errors import FlavourError, Unavailable

MIN_TURNS, MAX_TURNS = 5, 1000
_SMALL_BYTES = 64 << 10  # Up to this size, the time of a call hardly depends on the size.


@dataclasses.dataclass
class Measurement:
    """The candidates for one task on ``comm``, and the pools of memory that provide their buffers.

    ``pools`` maps True to the symmetric pool and False to the plain pool. The *floor* is the shortest time that a call
    can take on ``link``. If ``link`` is set, an additional row shows the floor, and the row of each candidate that has
    a result shows the ratio to the floor. All ranks of ``comm`` must call each method.
    """

    comm: MPI.Comm
    task: Task
    candidates: list[Candidate]
    plan: BufferPlan
    pools: dict[bool, Tensor]
    seconds: float
    verify: bool
    time_limit_seconds: float = math.inf
    link: Wire | None = None
    num_in_a_row: int = 1  # calls that are timed together
    last_rows: dict[str, ResultRow] = dataclasses.field(default_factory=dict)  # latest row by candidate name

    def drop_unable(self, num_bytes: int) -> list[str]:
        """Remove the candidates that fail a trial of the task, and return the reasons."""
        rotations = self.rotations(num_bytes, is_cold=False)
        reasons = {
            candidate.name: refusal(self.comm, self.task, candidate, rotations[candidate.is_symmetric], num_bytes)
            for candidate in self.candidates
            if candidate.has_values
        }
        # All ranks have the same reasons, so all ranks keep the same candidates.
        self.candidates = [candidate for candidate in self.candidates if not reasons.get(candidate.name)]
        return [f"{name} is left out: {reason}" for name, reason in reasons.items() if reason]

    def drop_slow(self, num_bytes: int) -> list[str]:
        """Remove the candidates that would exceed the time limit, and return the reasons.

        The time of a candidate is estimated from its time at the last size.
        """
        expected = {
            name: row.median_seconds * max(num_bytes, _SMALL_BYTES) / max(row.num_bytes, _SMALL_BYTES)
            for name, row in self.last_rows.items()
        }
        slow = [each.name for each in self.candidates if expected.get(each.name, 0.0) > self.time_limit_seconds]
        self.candidates = [each for each in self.candidates if each.name not in slow]
        return [
            f"{name} is left out from {format_size(num_bytes)} on: a call would take about {expected[name]:.2g} s"
            for name in slow
        ]

    def rows(self, num_bytes: int, buffers: str) -> list[ResultRow]:
        """Return one row per candidate for a size and for "warm" or "cold" buffers.

        Raise WrongValue if a result is wrong.
        """
        is_cold = buffers == "cold"
        rotations = self.rotations(num_bytes, is_cold=is_cold)
        self._verify(rotations, num_bytes, f"{buffers} buffers, before timing")
        # The timed calls reduce zeros in place, because other values would grow from call to call until they overflow.
        for rotation in rotations.values():
            rotation.clear()
        timed = {c.name: (_cold if is_cold else _warm)(c.bind, rotations[c.is_symmetric].take) for c in self.candidates}
        device = self.task.device
        times = interleaved(
            self.comm,
            {name: until_done(_repeated(each.call, self.num_in_a_row), device) for name, each in timed.items()},
            before={name: until_done(each.before, device) for name, each in timed.items()},
            seconds=self.seconds,
            min_turns=MIN_TURNS,
            max_turns=MAX_TURNS,
        )
        of_one = {name: [each / self.num_in_a_row for each in seconds] for name, seconds in times.items()}
        rows = [make_row(num_bytes, name, buffers, seconds) for name, seconds in of_one.items()]
        self.last_rows |= {row.what: row for row in rows}
        if self.link is not None:
            rows = self._beside_floor(self.link, rows)
        self._verify(rotations, num_bytes, f"{buffers} buffers, after timing")
        return rows

    def _beside_floor(self, link: Wire, rows: list[ResultRow]) -> list[ResultRow]:
        """Return the rows with their ratios to the floor (the shortest time on the link), and a row for the floor."""
        verb, num_bytes, buffers = self.task.verb.name, rows[0].num_bytes, rows[0].buffers
        floor = link.floor_seconds(verb, num_bytes)
        of_wire = []
        for row, candidate in zip(rows, self.candidates, strict=True):
            if candidate.has_values:
                row = dataclasses.replace(row, time_to_floor=row.median_seconds / floor)
            of_wire.append(row)
        return [*of_wire, ResultRow(num_bytes, WIRE, buffers, floor, floor, 0)]

    def rotations(self, num_bytes: int, *, is_cold: bool) -> dict[bool, Rotation]:
        """Return the slots of one size in each pool."""
        return {
            kind: Rotation(
                pool,
                self.task,
                num_bytes,
                self.plan.num_slots(self.task, num_bytes, is_symmetric=kind, is_cold=is_cold),
            )
            for kind, pool in self.pools.items()
        }

    def _verify(self, rotations: dict[bool, Rotation], num_bytes: int, when: str) -> None:
        """Call each candidate once on the next slot, with values that depend on element and rank.

        Raise WrongValue on every rank if a result is wrong on any rank. The error describes the result of the lowest
        such rank.
        """
        op = f" {self.task.op}" if self.task.verb.reduces else ""
        what = f"{self.task.verb.name} of {num_bytes} bytes ({str(self.task.dtype).removeprefix('torch.')}{op})"
        for candidate in self.candidates:
            if self.verify and candidate.has_values:
                mistake = _mistake(self.task, candidate, rotations[candidate.is_symmetric], num_bytes)
                if mistake := machine.first_failure(self.comm, mistake):
                    raise WrongValue(f"{candidate.name}: {what}, {when}: {mistake}")


class _Timed(NamedTuple):
    """A timed call, and the untimed call that precedes it."""

    before: Call
    call: Call


def _warm(bind: Callable[[NextBuffers], Call], take: NextBuffers) -> _Timed:
    """Return an untimed call and a timed call that are identical, and that always use the same slot."""
    call = bind(take)
    return _Timed(call, call)


def _repeated(call: Call, number: int) -> Call:
    """Return a function that makes ``number`` calls, or ``call`` itself if ``number`` is 1."""
    if number == 1:
        return call

    def calls() -> None:
        for _ in range(number):
            call()

    return calls


def _cold(bind: Callable[[NextBuffers], Call], take: NextBuffers) -> _Timed:
    """Return an untimed call, which binds the next slot, and a timed call on this slot."""
    bound: list[Call] = []

    def before() -> None:
        bound[:] = [bind(take)]

    return _Timed(before, lambda: bound[0]())


def make_pools(
    plan: BufferPlan, candidates: Sequence[Candidate], device: torch.device
) -> tuple[dict[bool, Tensor], list[Candidate], list[str]]:
    """Return the pools, the candidates whose pool could be allocated, and notes for the report.

    All ranks must call this function.
    """
    pools = {False: make_pool(plan.plain_bytes, device)}
    if not plan.symmetric_bytes:
        return pools, list(candidates), []
    try:
        pools[True] = mpi.symmetric_empty(plan.symmetric_bytes, dtype=torch.uint8, device=device)
    except Unavailable as error:
        without = [candidate for candidate in candidates if not candidate.is_symmetric]
        return pools, without, [f"symmetric tensors are left out: {error}"]
    return pools, list(candidates), []


def refusal(comm: MPI.Comm, task: Task, candidate: Candidate, rotation: Rotation, num_bytes: int) -> str:
    """Try ``candidate``, and return the reason why it cannot do ``task``, or "" if it can.

    All ranks of ``comm`` must call this function, and all get the same result. A candidate of this package fails the
    trial only if its flavour raises FlavourError, TypeError or ValueError. Its other errors propagate, and
    ``Measurement.rows`` reports its wrong values.
    """
    refusals = (FlavourError, TypeError, ValueError) if candidate.is_ours else (Exception,)
    try:
        mistake = _mistake(task, candidate, rotation, num_bytes)
        failure = "" if candidate.is_ours else mistake
    except refusals as error:
        failure = f"{type(error).__name__}: {error}".splitlines()[0]
    return machine.first_failure(comm, failure)


def _mistake(task: Task, candidate: Candidate, rotation: Rotation, num_bytes: int) -> str:
    """Make one call, and return a description of the first wrong element on this rank, or "" if all are right."""
    # Put a wrong value into the output before the call, to detect a call that writes nothing.
    buffers = rotation.take()
    cases.write(buffers.x, task.pattern(task.rank))
    if buffers.out is not None:
        buffers.out.fill_(1)
    until_done(candidate.bind(lambda: buffers), task.device)()
    return _first_wrong(task, buffers, task.expected(num_bytes))


def _first_wrong(task: Task, buffers: TaskBuffers, expected: Sequence[tuple[Tensor, int]]) -> str:
    tolerance = cases.tolerance(task.dtype, task.op) if task.verb.reduces else 0.0
    begin = 0
    for numbers, count in expected:
        index = cases.first_wrong(buffers.result[begin : begin + count], numbers, tolerance)
        if index is not None:
            got, right = buffers.result[begin + index].item(), numbers[index % cases.PERIOD].item()
            return f"rank {task.rank} has {got} in element {begin + index}, but the right value is {right}"
        begin += count
    return ""
