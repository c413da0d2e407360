"""Whether the results are right: before the times are taken, and again after."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from torchmpi_py.bench import WrongValue, exact_values
from torchmpi_py.bench.buffers import Rotation, Slot
from torchmpi_py.bench.candidates import Contestant
from torchmpi_py.bench.cases import Task
from torchmpi_py.collectives.timing import until_done
from torchmpi_py.core.mpi_api import MPI
from torchmpi_py.errors import FlavourError


def verify(comm: MPI.Comm, task: Task, contestant: Contestant, rotation: Rotation, num_bytes: int, when: str) -> None:
    """One call on the next slot, with values that tell elements and ranks apart. Collective.

    Raises WrongValue on every rank if a result is wrong on any of them, for the lowest such rank.
    """
    failures = [text for text in comm.allgather(_mistake(task, contestant, rotation, num_bytes)) if text]
    if failures:
        raise WrongValue(f"{contestant.name}: {_describe(task, num_bytes)}, {when}: {failures[0]}")


def why_not(comm: MPI.Comm, task: Task, contestant: Contestant, rotation: Rotation, num_bytes: int) -> str:
    """Why this contestant cannot do this task, by a trial; "" if it can. Collective, the same on every rank.

    Of ours, only what a flavour refuses counts: all else that it raises goes through, and a wrong value is found later.
    """
    refusals = (FlavourError, TypeError, ValueError) if contestant.is_ours else (Exception,)
    try:
        mistake = _mistake(task, contestant, rotation, num_bytes)
        failure = "" if contestant.is_ours else mistake
    except refusals as error:
        failure = f"{type(error).__name__}: {error}".splitlines()[0]
    return next((text for text in comm.allgather(failure) if text), "")


def _mistake(task: Task, contestant: Contestant, rotation: Rotation, num_bytes: int) -> str:
    """What is wrong on this rank after one call, or ""."""
    slot = rotation.take()
    exact_values.write(slot.x, task.pattern(task.rank))
    if slot.out is not None:
        slot.out.fill_(1)
    until_done(contestant.bind(lambda: slot), task.device)()
    return _first_wrong(task, slot, task.expected(num_bytes))


def _first_wrong(task: Task, slot: Slot, expected: Sequence[tuple[Tensor, int]]) -> str:
    tolerance = exact_values.tolerance(task.dtype, task.op) if task.verb.reduces else 0.0
    begin = 0
    for numbers, count in expected:
        index = exact_values.first_wrong(slot.result[begin : begin + count], numbers, tolerance)
        if index is not None:
            got, right = slot.result[begin + index].item(), numbers[index % exact_values.PERIOD].item()
            return f"rank {task.rank} has {got} in element {begin + index}, where {right} is right"
        begin += count
    return ""


def _describe(task: Task, num_bytes: int) -> str:
    op = f" {task.op}" if task.verb.reduces else ""
    return f"{task.verb.name} of {num_bytes} bytes ({str(task.dtype).removeprefix('torch.')}{op})"
