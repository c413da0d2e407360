"""How a started process ends: stop at a normal exit, abort of the whole job on an uncaught exception.

A forked child is disowned: it must neither use its parent's rank nor shut its parent's MPI down.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import logging
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from torchmpi_py import board, communication_thread, communicators, handles, recovery, signals, tracing, watch
from torchmpi_py.board_layout import ENDING, HAS_LEFT
from torchmpi_py.channels import BACKGROUND, DIRECT
from torchmpi_py.communicators import Communicator
from torchmpi_py.launch import marks
from torchmpi_py.waiting import Nap

logger = logging.getLogger("torchmpi_py")

STOP_WARNING_SECONDS = 20.0
OUTPUT_SECONDS = 0.3  # an abort overtakes output: MPICH's mpiexec drops what it has not yet read of the traceback
_exit_is_registered = False
_process = os.getpid()


def register(stop: Callable[[], None]) -> None:
    """Once per process: stop at exit, abort the job on an uncaught exception, disown forked children."""
    global _exit_is_registered, _process
    if _exit_is_registered:
        return
    _exit_is_registered = True
    _process = os.getpid()
    atexit.register(_at_exit, stop)
    os.register_at_fork(after_in_child=_disown)
    if not hasattr(sys, "ps1") and not sys.flags.interactive:
        sys.excepthook = _aborting(sys.excepthook)


def is_forked() -> bool:
    """Whether this process is a fork of one that had started."""
    return _exit_is_registered and os.getpid() != _process


def meet(world: Communicator) -> None:
    """Wait for all ranks; say so when it takes long, for a rank that left early waits here for ever.

    On the background communicator, which is idle by now: a barrier that another rank's program is in is not this one.
    It is noted as any operation: RanksDisagree if a neighbour has called one more, or one less.
    """
    noted = [watch.note_plain("mpi.stop()", world, lane) for lane in (BACKGROUND, DIRECT)]
    try:
        _meet_audibly(world)
    except BaseException:
        for each in noted:
            watch.fail(each)
        raise
    for each in noted:
        watch.end(each)


def _meet_audibly(world: Communicator) -> None:
    request, nap, warned = world.background.mpi.Ibarrier(), Nap(0.001), False
    while not request.Test():
        nap.take()
        if nap.seconds > STOP_WARNING_SECONDS and not warned:
            warned = True
            logger.warning(
                "rank %d has been waiting in mpi.stop() for %.0f s; the other ranks are still in their program. "
                "If it left early (sys.exit on one rank?), they wait for it too, and the job hangs",
                world.rank,
                nap.seconds,
            )


def _at_exit(stop: Callable[[], None]) -> None:
    from mpi4py import MPI

    if os.getpid() == _process and not MPI.Is_finalized():
        try:
            stop()
        except BaseException:
            sys.excepthook(*sys.exc_info())
            abort(1)
        if not communication_thread.are_over():
            logger.error(
                "an operation that timed out is still under way, so MPI cannot be ended in order; the job is aborted"
            )
            abort(1)
        if not recovery.has_lost_ranks():  # MPI_Finalize of Open MPI 5 may wait for the dead
            MPI.Finalize()


def _disown() -> None:
    signals.disown()
    handles.disown()
    communication_thread.install(None)
    communicators.install(
        None, "it was forked from a started rank, and only that one may call; in data loaders, return tensors instead"
    )


def _aborting(former: Callable[..., Any]) -> Callable[..., None]:
    """An excepthook that ends the whole job after reporting: ranks that wait for this one would wait for ever."""

    def hook(*failure: Any) -> None:
        former(*failure)
        if isinstance(sys.stderr, io.StringIO) and sys.__stderr__ is not None:
            # A hook around this one (torch.distributed has one) collects the text, to show it when this one returns.
            sys.__stderr__.write(sys.stderr.getvalue())
        abort(1)

    hook.aborts = True  # type: ignore[attr-defined]  # launch/wrap.py aborts by itself, after the user's own hook
    hook.former = former  # type: ignore[attr-defined]
    return hook


def abort(code: int) -> None:
    """End the whole job with ``code`` if other ranks belong to it; else do nothing."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or os.getpid() != _process or not mpi.Is_initialized() or mpi.Is_finalized():
        return
    if mpi.COMM_WORLD.size > 1:
        with contextlib.suppress(Exception):
            marks.record_failure(os.environ.get("TORCHMPIRUN_JOB_DIR", ""), mpi.COMM_WORLD.rank, code)
        with contextlib.suppress(Exception):
            tracing.save()
        for stream in (sys.stdout, sys.stderr, sys.__stderr__):
            with contextlib.suppress(Exception):
                stream.flush()  # type: ignore[union-attr]
        if board.current is not None:
            board.current.put(HAS_LEFT, ENDING)
        time.sleep(OUTPUT_SECONDS)
        mpi.COMM_WORLD.Abort(code)
        os._exit(code)  # MPICH's returns, and the process lives until it is killed
