"""How processes that MPI started meet for torch.distributed: rank, size and store come over MPI.

Without ``init_method`` and ``store``, torch.distributed takes ``env://``. Its handler (``registration.py``) leads here
where an MPI has started the ranks, and MASTER_ADDR and MASTER_PORT are not the user's own: rank 0 opens a store on a
free port, and MPI tells the others where, also on other nodes. That holds for every backend, so that gloo and nccl
start under ``torchmpirun`` too.
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
from torchmpi_py.errors import CollectiveTimeout
from torchmpi_py.runtime import process
from torchmpi_py.torch_backend import call_queue
from torchmpi_py.watch import reports

Found = Iterator[tuple[Any, int, int]]
DEFAULT_SECONDS = 30 * 60
"""torch's own deadline of an operation, for all backends but NCCL."""

_SLACK_SECONDS = 60  # whoever waits for an operation gives up before the watchdog ends the job


def ensure_started(timeout: dt.timedelta | None) -> None:
    """Start the package, unless the program has done so; ``timeout`` is what torch.distributed was told.

    The watchdog's deadline is then that of torch, or the timeout if that is longer.
    """
    if process.is_started():
        return
    tuning, given = config.from_environment(), _seconds(timeout)
    if not any(name in os.environ for name in ("TORCHMPI_DEADLINE", "TORCHMPI_DEADLINE_SECONDS")):
        longest = max(DEFAULT_SECONDS, given)
        tuning = config.Tuning(**vars(tuning) | {"deadline_seconds": longest + _SLACK_SECONDS})
    process.start_for_group(tuning, given)


def wait_for_all(world: Communicator, timeout: dt.timedelta | None) -> None:
    """Wait until all ranks have called ``init_process_group``. Collective.

    CollectiveTimeout, with the ranks that are missing, after ``timeout``, if one was given.
    """
    frame, name = call_queue.program(), "init_process_group"
    entry = journal.record(Plain(name, world, (name,)), DIRECT, frame=frame)
    try:
        seconds = _seconds(timeout) or math.inf
        if not backoff.complete(world.direct.mpi.Ibarrier(), backoff.Nap(0.001), seconds):
            raise CollectiveTimeout(
                f"the timeout of {seconds:g} s has passed, and not all ranks have called init_process_group. "
                f"{reports.late(entry)}"
            )
    except BaseException:
        journal.fail(entry)
        raise
    journal.end(entry)


def _seconds(timeout: dt.timedelta | None) -> float:
    """What the program has given as timeout; 0 if nothing, or torch's default, for which the same number stands."""
    seconds = 0.0 if timeout is None else timeout.total_seconds()
    return 0.0 if seconds == DEFAULT_SECONDS else seconds


def over_mpi(rank: int | None, timeout: dt.timedelta | None = None, **_: object) -> Found:
    """What a rendezvous gives: a store, the rank (default: MPI's), the size. Collective over the world."""
    ensure_started(timeout)
    world = communicators.stack().levels[0]
    wait_for_all(world, timeout)
    store = journal.run_together(
        "the store of init_process_group",
        world,
        lambda: rendezvous.open_store(world.direct, "torch.distributed"),
        frame=call_queue.program(),
    )
    yield store, world.rank if rank is None else rank, world.size
    raise RuntimeError("torch.distributed cannot meet a second time by the same call; call init_process_group again")
