"""Where functions of torch.distributed are wrapped, so that they know this backend, or say what they would not.

- A string such as "cpu:gloo,cuda:torchmpi" makes a group of "torchmpi" alone: torch lets a backend that is written in
  Python take the whole group over, after it has made the other one for nothing.
- In an MPI job of several ranks, one line tells when their default group is made on another CPU backend, which the
  program has not asked for by name.
- ``_set_pg_timeout``, which knows gloo and NCCL only, reaches the groups of this backend.

Nothing heavier than torch is imported here: the wrappers are there in every program that imports the backend's name.
"""

from __future__ import annotations

import datetime as dt
import functools
import logging
import os
from typing import Any

from torch import distributed
from torch.distributed import distributed_c10d

from torchmpi_py.launch import variables
from torchmpi_py.torch_backend import call_queue
from torchmpi_py.torch_backend.registration import NAME

logger = logging.getLogger("torchmpi_py")

_UNNAMED = "undefined"
_ON_THE_CPU = {"gloo", "mpi", "ucc"}
_REMEDY = f'call dist.init_process_group("{NAME}") before, or give the library that name'


def register() -> None:
    """Wrap them, once."""
    if not hasattr(distributed_c10d._new_process_group_helper, "former"):
        _wrap_making()
        _wrap_set_timeout()


def _wrap_making() -> None:
    former = distributed_c10d._new_process_group_helper

    @functools.wraps(former)
    def make(group_size: int, group_rank: int, ranks: list[int], backend: str, *others: Any, **options: Any) -> Any:
        names = _names(backend)
        if not ranks:
            _tell_if_elsewhere(backend, names)
        return former(group_size, group_rank, ranks, _chosen(backend, names), *others, **options)

    make.former = former  # type: ignore[attr-defined]
    distributed_c10d._new_process_group_helper = make  # type: ignore[assignment]


def _wrap_set_timeout() -> None:
    former = distributed_c10d._set_pg_timeout

    @functools.wraps(former)
    def set_timeout(timeout: dt.timedelta, group: Any = None) -> None:
        used = group or distributed.group.WORLD
        if isinstance(used, distributed.ProcessGroup) and used.name() == NAME:
            used.set_timeout(timeout)
        else:
            former(timeout, group)

    distributed_c10d._set_pg_timeout = set_timeout


def _names(backend: str) -> set[str]:
    """The backends that torch would make a group of, given a name, device strings, or nothing."""
    if backend == _UNNAMED:
        backend = str(distributed_c10d.BackendConfig(distributed.Backend(backend)))
    return {part.rpartition(":")[2] for part in backend.lower().split(",")}


def _chosen(backend: str, names: set[str]) -> str:
    """What torch is to make: this backend where it stands among others; where none is named, the name of torch's."""
    if NAME in names:
        if len(names) > 1 and _speaks():
            rest = " and ".join(sorted(names - {NAME}))
            logger.warning(
                '"%s": %s serves all devices of a group, and %s is not used; give "%s", or make a group of the other '
                'by dist.new_group(backend="%s")',
                backend, NAME, rest, NAME, min(names - {NAME}),
            )  # fmt: skip
        return NAME
    return next(iter(names)) if backend == _UNNAMED and _is_job() and len(names) == 1 else backend


def _tell_if_elsewhere(backend: str, names: set[str]) -> None:
    """One line on rank 0 of an MPI job, if its default group is made on another CPU backend unasked."""
    if not names <= _ON_THE_CPU or not _is_job() or not _speaks():
        return
    library = call_queue.library(call_queue.program())
    if backend == _UNNAMED or library:
        why = f"{library} asks for it" if library else "no backend was named"
        logger.warning(
            'the default group of torch.distributed is made on "%s", and not on MPI: %s. For MPI, %s',
            "/".join(sorted(names)), why, _REMEDY,
        )  # fmt: skip


def _is_job() -> bool:
    """Whether this is a rank among several that an MPI has started, and torchrun has not."""
    return (variables.size_in(os.environ) or 1) > 1 and not variables.is_under_torchrun(os.environ)


def _speaks() -> bool:
    return not variables.rank_in(os.environ)
