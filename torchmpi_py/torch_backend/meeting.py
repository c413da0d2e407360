"""Start process groups: the rendezvous of torch.distributed over MPI, and the creation of a group.

Without ``init_method`` and ``store``, torch.distributed uses ``env://``. If MPI has started the ranks, and the user has
not set MASTER_ADDR and MASTER_PORT, the handler of ``env://`` (``registration.py``) calls this module. The ranks then
agree on a store over MPI (``rendezvous.open_store``), so gloo and nccl start under ``torchmpirun`` too.
"""

from __future__ import annotations

import datetime as dt
import math
import os
from collections.abc import Iterator
from typing import Any

from torchmpi_py.collectives.flavours import rendezvous
from torchmpi_py.core import backoff, communicators, config, journal
from torchmpi_py.core.channels import DIRECT
from torchmpi_py.core.communicators import Communicator
from torchmpi_py.core.journal import Plain
from torchmpi_py.errors import CollectiveTimeout, TorchMPIError
from torchmpi_py.launch import variables
from torchmpi_py.runtime import process
from torchmpi_py.torch_backend.process_group import ProcessGroup
from torchmpi_py.torch_backend.torch_internals import DEFAULT_SECONDS, check_version, program
from torchmpi_py.watch import reports

Rendezvous = Iterator[tuple[Any, int, int]]
_SLACK_SECONDS = 60  # seconds from the timeout of a wait until the watchdog ends the job


def ensure_started(timeout: dt.timedelta | None) -> None:
    """Start the package if it has not been started. ``timeout`` is the argument of ``init_process_group``.

    Unless the environment sets a timeout, hang detection ends the job a minute after torch's default timeout, or a
    minute after ``timeout`` if that is longer.
    """
    if process.is_started():
        return
    tuning, seconds = config.from_environment(), _seconds(timeout)
    if not any(name in os.environ for name in ("TORCHMPI_DEADLINE", "TORCHMPI_DEADLINE_SECONDS")):
        longest = max(DEFAULT_SECONDS, seconds)
        tuning = config.Tuning(**vars(tuning) | {"deadline_seconds": longest + _SLACK_SECONDS})
    process.start_for_group(tuning, seconds)


def wait_for_all(world: Communicator, timeout: dt.timedelta | None) -> None:
    """Wait until all ranks have called ``init_process_group``. All ranks of ``world`` must call this function.

    Raise CollectiveTimeout, which lists the missing ranks, after ``timeout``. None and torch's default mean no limit.
    """
    frame, name = program(), "init_process_group"
    entry = journal.record(Plain(name, world, (name,)), DIRECT, frame=frame)
    try:
        seconds = _seconds(timeout) or math.inf
        if seconds < math.inf:
            backoff.limited[entry] = entry[0], seconds
        if not backoff.complete(world.direct.mpi.Ibarrier(), backoff.Nap(0.001), seconds):
            raise CollectiveTimeout(
                f"the timeout of {seconds:g} s has passed, but not all ranks have called init_process_group. "
                f"{reports.late(entry)}"
            )
    except BaseException:
        journal.fail(entry)
        raise
    else:
        journal.end(entry)
    finally:
        backoff.limited.pop(entry, None)


def _seconds(timeout: dt.timedelta | None) -> float:
    """Return the program's timeout in seconds, or 0 for None and for torch's default, which count as no timeout."""
    seconds = 0.0 if timeout is None else timeout.total_seconds()
    return 0.0 if seconds == DEFAULT_SECONDS else seconds


def over_mpi(rank: int | None, is_lazy: bool, timeout: dt.timedelta | None = None, **_: object) -> Rendezvous:
    """Yield the store, the rank (default: MPI's) and the size for torch.distributed.

    All ranks must make this call. With ``is_lazy``, the ranks of a large job connect to the store at its first use.
    """
    ensure_started(timeout)
    world = communicators.stack().levels[0]
    wait_for_all(world, timeout)
    store = journal.run_together(
        "the store of init_process_group",
        world,
        lambda: rendezvous.open_store(world.direct, "torch.distributed", is_lazy=is_lazy),
        frame=program(),
    )
    yield store, world.rank if rank is None else rank, world.size
    raise RuntimeError("init_process_group: this rendezvous was already used; call init_process_group again")


def create(options: Any) -> ProcessGroup:
    """Return the process group that torch's ``options`` describe. All ranks of the group must call it."""
    # 1. Check that the group is possible, then start the package.
    check_version()
    is_default = not options.global_ranks_in_group
    if is_default and not communicators.is_started():
        _check_is_whole(options, variables.size_in(os.environ) or 1)  # Check before waiting for other ranks to start.
    ensure_started(options.timeout)
    world = communicators.stack().levels[0]
    if is_default:
        _check_is_whole(options, world.size)
    # 2. Check that torch numbers the ranks as MPI does.
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    if max(ranks, default=-1) >= world.size or ranks[options.group_rank] != world.rank:
        raise TorchMPIError(
            f"torch.distributed numbers this process rank {options.group_rank} of {ranks}, but MPI numbers it rank "
            f"{world.rank} of {world.size}. Launch with torchmpirun (not torchrun), omit rank= and world_size=, and "
            "unset RANK and WORLD_SIZE in the environment"
        )
    # 3. Wait for all ranks before the default group is created, because this wait can report the missing ranks.
    if is_default:
        wait_for_all(world, options.timeout)
    group = ProcessGroup(ranks, options.group_id, options.timeout)
    # The group keeps the store alive.
    group.lazy_store, rendezvous.newest_lazy_store[:] = rendezvous.newest_lazy_store[:], []
    return group


def _check_is_whole(options: Any, size: int) -> None:
    """Raise TorchMPIError if the default group has fewer ranks than MPI has started."""
    if options.group_size < size:
        raise TorchMPIError(
            f"init_process_group: expected all {size} ranks of MPI in the group, found {options.group_size}. "
            'Call dist.init_process_group("torchmpi") on every rank, without rank= and world_size=; for a smaller '
            "group, call dist.new_group(ranks) on every rank"
        )
