"""How processes that MPI started meet for torch.distributed: rank, size and store come over MPI.

Without ``init_method`` and ``store``, torch.distributed takes ``env://``. Its handler (``registration.py``) leads here
where an MPI has started the ranks, and MASTER_ADDR and MASTER_PORT are not the user's own: rank 0 opens a store on a
free port, and MPI tells the others where, also on other nodes. That holds for every backend, so that gloo and nccl
start under ``torchmpirun`` too.
"""

from __future__ import annotations

import datetime as dt
import os
from collections.abc import Iterator
from typing import Any

import torch

from torchmpi_py import communicators, config, runtime, watch
from torchmpi_py.collectives import rendezvous
from torchmpi_py.torch_backend import sites

Found = Iterator[tuple[Any, int, int]]
DEFAULT_SECONDS = 30 * 60
"""torch's own deadline of an operation, for all backends but NCCL."""

_SLACK_SECONDS = 60  # whoever waits for an operation gives up before the watchdog ends the job


def ensure_started(timeout: dt.timedelta | None) -> None:
    """Start the package, unless the program has done so; ``timeout`` is what torch.distributed was told.

    The watchdog's deadline is then that of torch, or the timeout if that is longer.
    """
    if runtime.is_started():
        return
    tuning = config.from_environment()
    if not any(name in os.environ for name in ("TORCHMPI_DEADLINE", "TORCHMPI_DEADLINE_SECONDS")):
        longest = max(DEFAULT_SECONDS, timeout.total_seconds() if timeout is not None else 0)
        tuning = config.Tuning(**vars(tuning) | {"deadline_seconds": int(longest) + _SLACK_SECONDS})
    runtime.start(with_cuda=torch.cuda.is_available(), tuning=tuning)


def over_mpi(rank: int | None, timeout: dt.timedelta | None = None, **_: object) -> Found:
    """What a rendezvous gives: a store, the rank (default: MPI's), the size. Collective over the world."""
    ensure_started(timeout)
    world = communicators.stack().levels[0]
    store = watch.together(
        "init_process_group",
        world,
        lambda: rendezvous.open_store(world.direct, "torch.distributed"),
        frame=sites.program(),
    )
    yield store, world.rank if rank is None else rank, world.size
    raise RuntimeError("torch.distributed cannot meet a second time by the same call; call init_process_group again")
