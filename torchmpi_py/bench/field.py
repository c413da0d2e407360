"""Which contestants a command line asks for."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torchmpi_py as mpi
from torchmpi_py.bench.contestants import TORCHMPI, WAYS, Contestant, ours
from torchmpi_py.bench.errors import UsageError
from torchmpi_py.bench.limits import limits
from torchmpi_py.bench.raw_mpi import raw_mpi
from torchmpi_py.bench.torch_groups import Groups, gloo, torchmpi
from torchmpi_py.bench.verbs import Task

if TYPE_CHECKING:
    from mpi4py import MPI

_AVAILABLE = "available"


def wants_torchmpi(flavours: Sequence[str] | None) -> bool:
    """Whether torch.distributed over our backend is among what is asked for (None: all there is)."""
    return flavours is None or TORCHMPI in flavours


def for_run(
    task: Task, flavour: str, groups: Groups | None, *, symmetric: bool, asynchronous: bool
) -> list[Contestant]:
    """One flavour alone. UsageError if it is unknown or unavailable; ``groups`` are for "torchmpi"."""
    _check(task, [flavour], groups)
    if flavour == TORCHMPI and groups is not None:
        return [dataclasses.replace(torchmpi(task, groups.torchmpi, asynchronous=asynchronous), is_symmetric=symmetric)]
    return [ours(task, flavour, is_symmetric=symmetric, asynchronous=asynchronous)]


def for_compare(
    comm: MPI.Comm, task: Task, flavours: Sequence[str] | None, groups: Groups, *, asynchronous: bool = False
) -> list[Contestant]:
    """Ours, all that are available or ``flavours``; then the peers and the limits. UsageError as in ``for_run``.

    ``asynchronous``: whether those that have an asynchronous form take part with that, too.
    """
    if flavours is not None:
        _check(task, flavours, groups)
    names = _available(task, groups) if flavours is None else list(dict.fromkeys(flavours))
    forms = (False, True) if asynchronous else (False,)
    of_ours = [
        torchmpi(task, groups.torchmpi, asynchronous=form) if name == TORCHMPI else ours(task, name, asynchronous=form)
        for name in names
        for form in forms
    ]
    of_gloo = [] if groups.no_gloo else [gloo(task, asynchronous=form) for form in forms]
    return [*of_ours, *([raw_mpi(comm, task)] if _has_raw_mpi(task) else []), *of_gloo, *limits(task.device)]


def _has_raw_mpi(task: Task) -> bool:
    """On a GPU: whether this MPI reads its memory. One that does not would crash rather than refuse."""
    return task.device.type == "cpu" or _statuses(task).get("mpi") == _AVAILABLE


def _available(task: Task, groups: Groups) -> list[str]:
    flavours = [name for name, status in _statuses(task).items() if status == _AVAILABLE]
    return [*flavours, *(way for way in WAYS if way != TORCHMPI or groups.torchmpi is not None)]


def _check(task: Task, names: Sequence[str], groups: Groups | None) -> None:
    statuses = _statuses(task)
    for name in names:
        if name == TORCHMPI and groups is not None and groups.no_torchmpi:
            raise UsageError(f"torch.distributed has no group on {name!r} here: {groups.no_torchmpi}")
        if name in WAYS:
            continue
        if name not in statuses:
            raise UsageError(f"flavour {name!r} is unknown; known flavours: {', '.join([*statuses, *WAYS])}")
        if statuses[name] != _AVAILABLE:
            raise UsageError(f"flavour {name!r} cannot do {task.verb.name} here: {statuses[name]}")


def _statuses(task: Task) -> dict[str, str]:
    """What each flavour says of the verb on tensors of the task's device."""
    wanted = task.verb.name, task.device.type
    return {row.flavour: row.status for row in mpi.availability() if (row.verb, row.device) == wanted}
