"""The beginning of process groups: ranks meet over MPI for torch.distributed, and make a group.

Without ``init_method`` and ``store``, torch.distributed takes ``env://``. Its handler (``registration.py``) leads here
where an MPI has started the ranks, and MASTER_ADDR and MASTER_PORT are not the user's own: the ranks agree on a store
over MPI (``rendezvous.open_store``). So gloo and nccl start under ``torchmpirun`` too.
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

Found = Iterator[tuple[Any, int, int]]
_SLACK_SECONDS = 60  # waits for an operation give up before the watchdog ends the job


def ensure_started(timeout: dt.timedelta | None) -> None:
    """Start the package, unless the program has done so; ``timeout`` is the one given to torch.distributed.

    The watchdog's deadline is then torch's default, or the timeout if that is longer.
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
    frame, name = program(), "init_process_group"
    entry = journal.record(Plain(name, world, (name,)), DIRECT, frame=frame)
    try:
        seconds = _seconds(timeout) or math.inf
        if seconds < math.inf:
            backoff.limited[entry] = entry[0], seconds
        if not backoff.complete(world.direct.mpi.Ibarrier(), backoff.Nap(0.001), seconds):
            raise CollectiveTimeout(
                f"the timeout of {seconds:g} s has passed, and not all ranks have called init_process_group. "
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
    """The timeout that the program has given; 0 for none, or for torch's default, which looks the same."""
    seconds = 0.0 if timeout is None else timeout.total_seconds()
    return 0.0 if seconds == DEFAULT_SECONDS else seconds


def over_mpi(rank: int | None, is_lazy: bool, timeout: dt.timedelta | None = None, **_: object) -> Found:
    """The rendezvous of torch.distributed: a store, the rank (default: MPI's), the size. Collective over the world."""
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
    raise RuntimeError("torch.distributed cannot meet a second time by the same call; call init_process_group again")


def create(options: Any) -> ProcessGroup:
    """The process group that torch.distributed describes by ``options``. Collective over its ranks."""
    # 1. Start the package, if the group can be made at all.
    check_version()
    is_default = not options.global_ranks_in_group
    if is_default and not communicators.is_started():
        _check_is_whole(options, variables.size_in(os.environ) or 1)  # before this rank waits for the others to start
    ensure_started(options.timeout)
    world = communicators.stack().levels[0]
    if is_default:
        _check_is_whole(options, world.size)
    # 2. torch's numbers of the ranks have to be MPI's.
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    if max(ranks, default=-1) >= world.size or ranks[options.group_rank] != world.rank:
        raise TorchMPIError(
            f"torch.distributed was told that this is rank {options.group_rank} of {ranks}, but for MPI it is rank "
            f"{world.rank} of {world.size}. Launch with torchmpirun (not torchrun), and leave rank= and world_size= "
            "away, and RANK and WORLD_SIZE out of the environment"
        )
    # 3. The default group is the first meeting, which names the ranks that do not come.
    if is_default:
        wait_for_all(world, options.timeout)
    group = ProcessGroup(ranks, options.group_id, options.timeout)
    group.lazy_store, rendezvous.newest_lazy_store[:] = rendezvous.newest_lazy_store[:], []  # while it lives
    return group


def _check_is_whole(options: Any, size: int) -> None:
    """TorchMPIError if the default group is to have fewer ranks than MPI has."""
    if options.group_size < size:
        raise TorchMPIError(
            f"the default group was asked for with {options.group_size} ranks, and MPI has started {size}: it has to "
            'have them all. Call dist.init_process_group("torchmpi") on every rank, without rank= and world_size=; a '
            "group of some ranks is then made by dist.new_group(ranks), which all ranks call too"
        )
