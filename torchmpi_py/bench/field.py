"""Which contestants a command line asks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torchmpi_py as mpi
from torchmpi_py.bench.contestants import SELECTOR, SYMMETRIC, Contestant, ours
from torchmpi_py.bench.errors import UsageError
from torchmpi_py.bench.gloo import gloo
from torchmpi_py.bench.limits import limits
from torchmpi_py.bench.raw_mpi import raw_mpi
from torchmpi_py.bench.verbs import Task

if TYPE_CHECKING:
    from mpi4py import MPI

_AVAILABLE = "available"


def for_run(task: Task, flavour: str, *, symmetric: bool, asynchronous: bool) -> list[Contestant]:
    """One flavour alone. UsageError if it is unknown or unavailable."""
    _check(task, [flavour])
    return [ours(task, flavour, is_symmetric=symmetric, asynchronous=asynchronous)]


def for_compare(comm: MPI.Comm, task: Task, flavours: Sequence[str] | None, *, with_gloo: bool) -> list[Contestant]:
    """Ours, all that are available or ``flavours``; then the peers and the limits. UsageError as in ``for_run``."""
    if flavours is not None:
        _check(task, flavours)
    names = _available(task) if flavours is None else list(dict.fromkeys(flavours))
    peers = [*([raw_mpi(comm, task)] if _has_raw_mpi(task) else []), *([gloo(task)] if with_gloo else [])]
    return [*(ours(task, name) for name in names), *peers, *limits(task.device)]


def _has_raw_mpi(task: Task) -> bool:
    """On a GPU: whether this MPI reads its memory. One that does not would crash rather than refuse."""
    return task.device.type == "cpu" or _statuses(task).get("mpi") == _AVAILABLE


def _available(task: Task) -> list[str]:
    flavours = [name for name, status in _statuses(task).items() if status == _AVAILABLE]
    return [*flavours, SELECTOR, SYMMETRIC]


def _check(task: Task, names: Sequence[str]) -> None:
    statuses = _statuses(task)
    for name in names:
        if name in (SELECTOR, SYMMETRIC):
            continue
        if name not in statuses:
            known = ", ".join([*statuses, SELECTOR, SYMMETRIC])
            raise UsageError(f"flavour {name!r} is unknown; known flavours: {known}")
        if statuses[name] != _AVAILABLE:
            raise UsageError(f"flavour {name!r} cannot do {task.verb.name} here: {statuses[name]}")


def _statuses(task: Task) -> dict[str, str]:
    """What each flavour says of the verb on tensors of the task's device."""
    wanted = task.verb.name, task.device.type
    return {row.flavour: row.status for row in mpi.availability() if (row.verb, row.device) == wanted}
