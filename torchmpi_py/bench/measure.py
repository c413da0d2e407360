"""Every contestant at every size, in one run: checked, timed in turns, checked again."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

import torchmpi_py as mpi
from torchmpi_py.bench.buffers import Plan, Rotation, make_slab
from torchmpi_py.bench.contestants import Call, Contestant, Take
from torchmpi_py.bench.results import Row, make_row
from torchmpi_py.bench.sizes import format_size
from torchmpi_py.bench.verbs import Task
from torchmpi_py.bench.verification import verify, why_not
from torchmpi_py.collectives.timing import interleaved, until_done
from torchmpi_py.errors import Unavailable

if TYPE_CHECKING:
    from mpi4py import MPI

MIN_TURNS, MAX_TURNS = 5, 1000
_SMALL_BYTES = 64 << 10  # up to here a call takes about as long whatever the size


@dataclasses.dataclass
class Measurement:
    """Contestants that do the same task on ``comm``; ``slabs`` by whether they are symmetric. All is collective."""

    comm: MPI.Comm
    task: Task
    contestants: list[Contestant]
    plan: Plan
    slabs: dict[bool, Tensor]
    seconds: float
    verify: bool
    patience_seconds: float = math.inf
    measured: dict[str, Row] = dataclasses.field(default_factory=dict)  # the last row of each contestant

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

    def rows(self, num_bytes: int, buffers: str) -> list[Row]:
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
    plan: Plan, contestants: Sequence[Contestant], device: torch.device
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
