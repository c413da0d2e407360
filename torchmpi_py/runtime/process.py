"""The public functions of a started process: start and stop, the rank and its node, and the barrier.

``start`` initializes MPI (the import of the package does not), opens the session, and marks the environment. Because of
the mark, child processes raise an error in ``start`` instead of using their parent's rank. ``stop`` closes the session.
MPI itself runs until the interpreter exits, so a process can start again.
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
from torchmpi_py.core.communicators import Communicator, is_started as is_started
from torchmpi_py.core.mpi_api import MPI
from torchmpi_py.errors import CollectiveTimeout, NotStarted, TorchMPIError
from torchmpi_py.launch import exit_marks, mpirun
from torchmpi_py.runtime import arrival, building, exits, placement, session as sessions, survivors
from torchmpi_py.watch import reports

logger = logging.getLogger("torchmpi_py")

STARTED_PID = config.STARTED_PID  # A child process inherits this variable. torchmpirun removes it.


def start(
    with_cuda: bool = False,
    *,
    with_ipc_groups: bool = True,
    custom_communicator_init: Callable[[], int] | None = None,
    with_cartesian_communicator: bool = False,
    collective_communicator: Callable[[], int | None] | None = None,
    tuning: config.Tuning | None = None,
) -> None:
    """Start this process as a rank of the job in which it was launched, or, without a launcher, as the only rank.

    Every rank of the job must make this call, which initializes MPI and waits for the other ranks. A process can start
    again after ``mpi.stop()``.

    Args:
        with_cuda (bool): whether to give this rank a GPU, round robin by local rank; default False.
        with_ipc_groups (bool): whether ranks whose GPUs reach each other map each other's GPU memory (flavour cudaipc).
            The default level then has a group for each set of such ranks, instead of a group for each node. Default
            True.
        custom_communicator_init (callable): function without arguments that pushes your own levels. It returns the
            index of the deepest level, which becomes current. Default None.
        with_cartesian_communicator (bool): whether every rank of a level is linked with its counterparts in the other
            groups, if the groups are equal in size. Default False: only the first rank of each group is linked.
        collective_communicator (callable): function without arguments that pushes the levels for hierarchical
            collectives. It returns the index of the level that ends the span, or None for no span below the current
            level. Default None: a level with a group for each node ends the span.
        tuning (Tuning): sizes and timeouts, the same on every rank; default None, from the environment (TORCHMPI_*).

    Returns:
        None.

    Raises:
        NotStarted: this process is a child of a started process.
        TorchMPIError: this process is already started, or no MPI library can be loaded.
        ValueError: ``with_cuda`` is True and there is no GPU, or a variable TORCHMPI_* has a wrong value.
        RanksDisagree: the ranks have different tunings or different versions of this package.
        TypeError: ``custom_communicator_init`` or ``collective_communicator`` does not return the index of a level.

    Examples:
        >>> if not mpi.is_started():
        ...     mpi.start()
        >>> mpi.rank() < mpi.size()
        True
    """
    _check_startable()
    tuning = tuning or config.from_environment()
    device = placement.cuda_device() if with_cuda else torch.device("cpu")
    options = sessions.StartOptions(
        device, with_ipc_groups, custom_communicator_init, with_cartesian_communicator, collective_communicator, tuning
    )
    _start(options, arrival.Wait("mpi.start()", arrival.limit_of(tuning), tuning.at_deadline))


def start_for_group(tuning: config.Tuning, timeout_seconds: float) -> None:
    """Start for ``init_process_group``, with a GPU if there is one. Every rank must make this call.

    The job ends if not all ranks have made the call within ``timeout_seconds`` (0: no limit), or within the limit of
    ``start`` if the latter is shorter.
    """
    _check_startable()
    device = placement.cuda_device() if torch.cuda.is_available() else torch.device("cpu")
    limits = [seconds for seconds in (timeout_seconds, arrival.limit_of(tuning)) if seconds > 0]
    wait = arrival.Wait("init_process_group", min(limits, default=0), tuning.at_deadline)
    _start(sessions.StartOptions(device, True, None, False, None, tuning), wait)


def _start(options: sessions.StartOptions, wait: arrival.Wait) -> None:
    log_level = config.log_level()  # A wrong value raises here, before the ranks wait for each other.
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
    """Wait for outstanding operations, free communicators and shared memory, and end the package's threads.

    Every rank of the job must make this call. At a normal exit the interpreter makes the call automatically. A second
    call does nothing.

    Returns:
        None.

    Raises:
        TorchMPIError: the call is inside an experiment (``mpi.experiments``), whose ranks run other experiments later.
    """
    if not communicators.is_started():
        return
    if communicators.stack().outer is not None:
        raise TorchMPIError("mpi.stop() in an experiment would end ranks that the sweep still needs; remove the call")
    survivors.close_session()
    os.environ.pop(STARTED_PID, None)


@contextlib.contextmanager
def session(*args: Any, **kwargs: Any) -> Iterator[None]:
    """Call ``mpi.start`` at the beginning of a ``with`` block, and ``mpi.stop`` at its end.

    Every rank of the job must enter the block. An error in the block passes through, and ends the job unless the
    program catches the error. After an error, a job of several ranks is not stopped, because the other ranks may not
    have left the block.

    Args:
        args (Any): positional arguments of ``mpi.start``.
        kwargs (Any): keyword arguments of ``mpi.start``.

    Returns:
        A context manager.

    Raises:
        TorchMPIError: this process is already started; see ``mpi.start`` for the other errors.
    """
    start(*args, **kwargs)
    try:
        yield
    except Exception:
        if communicators.stack().levels[0].size == 1:
            stop()
        raise
    stop()


def rank() -> int:
    """Return the rank of this process in the current level, which is the whole job unless levels are used.

    Returns:
        A number from 0 to ``mpi.size() - 1``.

    Raises:
        NotStarted: ``mpi.start()`` was not called.

    Examples:
        >>> mpi.rank() in range(mpi.size())
        True
    """
    return communicators.resolve(None).rank


def size() -> int:
    """Return the number of ranks in the current level, which is the whole job unless levels are used.

    Returns:
        A number, 1 or more.

    Raises:
        NotStarted: ``mpi.start()`` was not called.

    Examples:
        >>> mpi.allreduce(1) == mpi.size()
        True
    """
    return communicators.resolve(None).size


def barrier(comm: Communicator | None = None) -> None:
    """Wait until every rank of a communicator has made this call.

    Args:
        comm (Communicator): communicator whose ranks make this call; default None, the current level.

    Returns:
        None.

    Raises:
        NotStarted: ``mpi.start()`` was not called.
        CollectiveTimeout: ``Tuning.deadline_seconds`` passed, with ``Tuning.at_deadline="raise"``.

    Examples:
        >>> mpi.barrier()
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
    """Return the rank of this process among the ranks of its node.

    Returns:
        A number from 0 to ``mpi.local_size() - 1``.

    Raises:
        NotStarted: ``mpi.start()`` was not called.

    Examples:
        >>> mpi.local_rank() in range(mpi.local_size())
        True
    """
    return sessions.current().location().rank


def local_size() -> int:
    """Return the number of ranks on this node.

    Returns:
        A number, 1 or more.

    Raises:
        NotStarted: ``mpi.start()`` was not called.
    """
    return sessions.current().location().size


def num_nodes() -> int:
    """Return the number of nodes on which the current level has ranks.

    Returns:
        A number, 1 or more.

    Raises:
        NotStarted: ``mpi.start()`` was not called.
    """
    return communicators.resolve(None).num_nodes


def device() -> torch.device:
    """Return the device on which this rank computes: its GPU after ``mpi.start(with_cuda=True)``, else the CPU.

    Returns:
        A ``torch.device``.

    Raises:
        NotStarted: ``mpi.start()`` was not called.

    Examples:
        >>> x = torch.ones(2, device=mpi.device())
    """
    return sessions.current().device


def host_name() -> str:
    """Return the name of this host.

    Different nodes may have the same name.

    Returns:
        The name, as ``socket.gethostname()`` returns it.
    """
    return socket.gethostname()


def _initialise_mpi() -> MPI.Comm:
    exit_marks.record_meeting()
    placement.prepare_environment()
    import mpi4py

    mpi4py.rc.thread_level = "multiple"
    mpi4py.rc.finalize = False  # exits.py finalizes, because mpi4py's exit handler would also run in forked children.
    mpi4py.rc.initialize = False  # arrival.initialise_mpi initializes MPI.

    _load_mpi()
    if MPI.Is_finalized():
        raise TorchMPIError("MPI was finalized in this process and cannot start again; start a new process")
    if not MPI.Is_initialized():
        arrival.initialise_mpi()
    exits.register(stop)
    placement.check_world(MPI.COMM_WORLD.size)
    return sessions.remaining_world or MPI.COMM_WORLD


def _load_mpi() -> None:
    """Load the MPI library. Raise TorchMPIError, with the remedy, if no library can be loaded."""
    try:
        MPI.Get_library_version()
    except (ImportError, RuntimeError) as error:
        why = f"no MPI library can be loaded ({'; '.join(str(error).splitlines())})"
        raise TorchMPIError(f"{why}; {mpirun.library_remedy('')}") from None


def _log_from(rank: int, level: str | None) -> None:
    """Log the package's messages of ``level`` and above: to the program's handlers, or else to standard error."""
    if level is None:
        return
    logger.setLevel(level)
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(f"[rank {rank}] %(name)s %(levelname)s: %(message)s"))
        logger.addHandler(handler)


def _check_startable() -> None:
    if communicators.is_started():
        raise TorchMPIError("this process is already started; remove this call, or call mpi.stop() first")
    parent = os.environ.get(STARTED_PID)
    if parent is not None and parent != str(os.getpid()):
        raise NotStarted(
            f"this process ({os.getpid()}) is a child of a started rank (process {parent}) and cannot be a rank. "
            "Call torchmpi_py only in the parent, or launch this program as a separate job with torchmpirun (or "
            f"without {STARTED_PID} in its environment)"
        )
    if mpi_api.is_forked():
        raise NotStarted("this process was forked after MPI had started, so it cannot be a rank; start a new process")
