"""The public functions of a started process: start and stop, its rank and its node, the barrier.

``start`` initialises MPI (the import of the package does not), opens the session, and marks the environment, so that
child processes get an error instead of their parent's rank. ``stop`` closes the session, and leaves MPI itself running
until the interpreter exits, so that a process can start again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

import torch

from torchmpi_py.core import backoff, communicators, config, journal, mpi_api
from torchmpi_py.core.communicators import Communicator
from torchmpi_py.core.mpi_api import MPI
from torchmpi_py.errors import CollectiveTimeout, NotStarted, TorchMPIError
from torchmpi_py.launch import exit_marks, mpirun
from torchmpi_py.runtime import arrival, building, exits, placement, session as sessions, survivors
from torchmpi_py.watch import reports

logger = logging.getLogger("torchmpi_py")

STARTED_PID = config.STARTED_PID  # by which a child process knows that it is one; torchmpirun removes it


def start(
    with_cuda: bool = False,
    *,
    with_ipc_groups: bool = True,
    custom_communicator_init: Callable[[], int] | None = None,
    with_cartesian_communicator: bool = False,
    collective_communicator: Callable[[], int | None] | None = None,
    tuning: config.Tuning | None = None,
) -> None:
    """Start this process as a rank of the job it was launched in, or as a world of one. Collective.

    with_cuda: pin this rank to a GPU, round robin by local rank. with_ipc_groups: let ranks whose GPUs reach each other
    map each other's GPU memory (flavour cudaipc); the default level then has a group per set of such ranks, not node.
    custom_communicator_init: pushes levels of your own; returns the index of the deepest one, which becomes current.
    with_cartesian_communicator: link every rank, not only roots, with its counterparts where groups are equal.
    collective_communicator: pushes the levels for hierarchical collectives instead of the default, a level with a group
    per node; returns the index of the level that ends the span (None: no span below the current level).
    tuning: sizes and deadlines; default from the environment (TORCHMPI_*). The same on every rank.

    Raises NotStarted in a child process of a started one, TorchMPIError when it is started already, ValueError for
    ``with_cuda`` without a GPU, RanksDisagree if tunings differ, TypeError if a function for levels returns no index.
    """
    _check_startable()
    tuning = tuning or config.from_environment()
    device = placement.cuda_device() if with_cuda else torch.device("cpu")
    options = sessions.StartOptions(
        device, with_ipc_groups, custom_communicator_init, with_cartesian_communicator, collective_communicator, tuning
    )
    _start(options, arrival.Wait("mpi.start()", arrival.limit_of(tuning), tuning.at_deadline))


def start_for_group(tuning: config.Tuning, timeout_seconds: float) -> None:
    """Start for ``init_process_group``: as ``start``, with a GPU if there is one. Collective.

    The job ends if not all ranks have called it after ``timeout_seconds`` (0: never), or the limit of ``start`` if that
    is shorter.
    """
    _check_startable()
    device = placement.cuda_device() if torch.cuda.is_available() else torch.device("cpu")
    limits = [seconds for seconds in (timeout_seconds, arrival.limit_of(tuning)) if seconds > 0]
    wait = arrival.Wait("init_process_group", min(limits, default=0), tuning.at_deadline)
    _start(sessions.StartOptions(device, True, None, False, None, tuning), wait)


def _start(options: sessions.StartOptions, wait: arrival.Wait) -> None:
    log_level = config.log_level()  # an error before the ranks meet
    with wait.watched():
        world = _initialise_mpi()
        sessions.check_same(world, options.tuning)
    with building.watched(wait.called, options.tuning):
        sessions.open_session(world, options)
    os.environ[STARTED_PID] = str(os.getpid())
    _log_from(world.rank, log_level)
    if world.rank == 0 and (unknown := config.unknown_settings()):
        logger.warning("%s", unknown)
    if communicators.resolve(None).rank == 0 and world.rank == 0:
        logger.info("%s", placement.describe(device(), world.size, num_nodes()))


def stop() -> None:
    """Drain outstanding operations, and free communicators, staging memory and threads. Collective; idempotent.

    A normal exit of the interpreter calls ``stop``. ``start`` may be called again. TorchMPIError in an experiment
    (``mpi.experiments``), whose ranks go on with the next one.
    """
    if not communicators.is_started():
        return
    if communicators.stack().outer is not None:
        raise TorchMPIError("mpi.stop() was called in an experiment, whose ranks go on with the next one: leave it out")
    survivors.close_session()
    os.environ.pop(STARTED_PID, None)


@contextlib.contextmanager
def session(*args: Any, **kwargs: Any) -> Iterator[None]:
    """``with mpi.session():`` start, and stop at the end; the arguments are those of ``start``.

    Where the block raises, the error goes on, and ends the job unless it is caught: other ranks may be waiting for this
    one, so this rank alone cannot stop.
    """
    start(*args, **kwargs)
    try:
        yield
    except Exception:
        if communicators.stack().levels[0].size == 1:
            stop()
        raise
    stop()


def is_started() -> bool:
    """Whether this process is between ``start`` and ``stop``."""
    return communicators.is_started()


def rank() -> int:
    """This process's rank in the current level: 0 to ``size() - 1``. NotStarted before ``start``."""
    return communicators.resolve(None).rank


def size() -> int:
    """The number of ranks in the current level. NotStarted before ``start``."""
    return communicators.resolve(None).size


def barrier(comm: Communicator | None = None) -> None:
    """Wait until every rank of ``comm`` (default: the current level) has called ``barrier``.

    NotStarted before ``start``; CollectiveTimeout after the deadline if ``at_deadline`` of the tuning is "raise".
    """
    comm, limit = communicators.resolve(comm), config.current.deadline_seconds
    entry = journal.record_plain("barrier", comm)
    try:
        if not config.can_raise:
            backoff.fenced(comm.direct.mpi.Barrier)()
        elif not backoff.fenced(lambda: backoff.complete(comm.direct.mpi.Ibarrier(), backoff.Nap(0.001), limit))():
            late = f"the barrier is not complete after {limit:g} s. {reports.late(entry)}"
            raise CollectiveTimeout(late)._of_call("barrier", comm)
        journal.end(entry)
    except BaseException:
        journal.fail(entry)
        raise


def local_rank() -> int:
    """This process's rank among those of its node. NotStarted before ``start``."""
    return sessions.current().location().rank


def local_size() -> int:
    """The number of ranks on this node. NotStarted before ``start``."""
    return sessions.current().location().size


def num_nodes() -> int:
    """The number of nodes that the current level spreads over. NotStarted before ``start``."""
    return communicators.resolve(None).num_nodes


def device() -> torch.device:
    """The device on which this rank computes: its GPU after ``start(with_cuda=True)``, else the CPU.

    NotStarted before ``start``.
    """
    return sessions.current().device


def host_name() -> str:
    """The name of this host. Ranks with equal names may still be on different nodes."""
    return socket.gethostname()


def _initialise_mpi() -> MPI.Comm:
    exit_marks.record_meeting()
    placement.prepare_environment()
    import mpi4py

    mpi4py.rc.thread_level = "multiple"
    mpi4py.rc.finalize = False  # exits.py finalizes: mpi4py's own exit handler would also run in forked children
    mpi4py.rc.initialize = False  # arrival.initialise_mpi does

    _load_mpi()
    if MPI.Is_finalized():
        raise TorchMPIError("MPI was finalised in this process and cannot be started again")
    if not MPI.Is_initialized():
        arrival.initialise_mpi()
    exits.register(stop)
    placement.check_world(MPI.COMM_WORLD.size)
    return sessions.remaining_world or MPI.COMM_WORLD


def _load_mpi() -> None:
    """Load the MPI library. TorchMPIError where there is none, with the remedy."""
    try:
        MPI.Get_library_version()
    except (ImportError, RuntimeError) as error:
        why = f"no MPI library can be loaded ({'; '.join(str(error).splitlines())})"
        raise TorchMPIError(f"{why}; {mpirun.library_remedy('')}") from None


def _log_from(rank: int, level: str | None) -> None:
    """Let the package's log be seen from this level on, where the program has not set up logging of its own."""
    if level is None:
        return
    logger.setLevel(level)
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(f"[rank {rank}] %(name)s %(levelname)s: %(message)s"))
        logger.addHandler(handler)


def _check_startable() -> None:
    if communicators.is_started():
        raise TorchMPIError("mpi.start() was called already; call mpi.stop() before starting again")
    parent = os.environ.get(STARTED_PID)
    if parent is not None and parent != str(os.getpid()):
        raise NotStarted(
            f"this process ({os.getpid()}) is a child of a started rank (process {parent}) and cannot be a rank; "
            "call torchmpi_py in the parent only, or launch a job of its own with torchmpirun (or without "
            f"{STARTED_PID} in its environment)"
        )
    if mpi_api.is_forked():
        raise NotStarted("this process was forked from one that had started MPI; it cannot be a rank itself")
