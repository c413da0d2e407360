"""The exit of a started process: a normal exit calls ``stop``, and an uncaught exception aborts the whole job.

A forked child is disowned: it must not use its parent's rank, and must not shut down its parent's MPI.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

from torchmpi_py.core import backoff, communication_thread, communicators, config, journal, mpi_api, ulfm
from torchmpi_py.core.channels import BACKGROUND, DIRECT
from torchmpi_py.core.communicators import Communicator
from torchmpi_py.core.mpi_api import MPI
from torchmpi_py.launch import exit_marks
from torchmpi_py.watch import abort, final_check, watchdog
from torchmpi_py.watch.report_requests import requests

logger = logging.getLogger("torchmpi_py")


def register(stop: Callable[[], None]) -> None:
    """Register the handlers of this process, once.

    The handlers call ``stop`` at exit, abort the job on an uncaught exception, and keep forked children from using MPI.
    """
    if not mpi_api.claim_process():
        return
    atexit.register(_at_exit, stop)
    os.register_at_fork(after_in_child=_disown)
    if not hasattr(sys, "ps1") and not sys.flags.interactive:
        sys.excepthook = _aborting(sys.excepthook)


def wait_for_all(world: Communicator) -> None:
    """Wait until all ranks make this call.

    The barrier uses the background communicator, which is idle at this point, so it cannot match a barrier of the
    program. The journal records the barrier like any operation. So this function raises RanksDisagree if a neighbour
    has made one call more or fewer, or if ranks of other nodes have made different calls.
    """
    entries = [journal.record_plain("mpi.stop()", world, thread_role) for thread_role in (BACKGROUND, DIRECT)]
    watchdog.announce_stop(is_drained=True)
    try:
        backoff.fenced(lambda: backoff.complete(world.background.mpi.Ibarrier(), backoff.Nap(0.001)))()
        final_check.run(world.background)
    except BaseException:
        for each in entries:
            journal.fail(each)
        raise
    for each in entries:
        journal.end(each)


def show_stage(call: str) -> None:
    """Report to torchmpirun that this rank waits for other ranks in ``call``, where no watchdog runs.

    Pass "" when the wait has ended.
    """
    tuning = config.current
    exit_marks.record_stage(exit_marks.Stage(call, tuning.deadline_seconds, tuning.at_deadline != "report"))


def _at_exit(stop: Callable[[], None]) -> None:
    if not mpi_api.is_forked() and not MPI.Is_finalized():
        failure = None
        try:
            stop()
        except BaseException:
            failure = sys.exc_info()
        # Call the hook outside of the except block, because abort reports an exception that is being handled.
        if failure is not None:
            try:
                sys.excepthook(*failure)
            finally:
                abort.abort(1)
        if not communication_thread.are_over():
            logger.error(
                "an operation that timed out is still under way, so MPI cannot be finalized; the job is aborted"
            )
            abort.abort(1)
        if not ulfm.has_lost_ranks():  # MPI_Finalize of Open MPI 5 may wait for dead ranks.
            show_stage("MPI_Finalize")
            MPI.Finalize()
            show_stage("")


def _disown() -> None:
    requests.disown()
    communication_thread.current_thread = None
    communicators.current_stack = None
    communicators.why_not = (
        "a started rank forked this process, and only the rank may call torchmpi_py; return tensors to the rank instead"
    )


def _aborting(former: Callable[..., Any]) -> Callable[..., None]:
    """Return an excepthook that calls ``former`` and then ends the whole job, because other ranks may be waiting."""

    def hook(*failure: Any) -> None:
        try:
            former(*failure)
        except BaseException:  # The program's own hook may raise, or call sys.exit.
            sys.__excepthook__(*failure)
        finally:
            with contextlib.suppress(Exception):
                if isinstance(sys.stderr, io.StringIO) and sys.__stderr__ is not None:
                    # An outer hook, such as torch.distributed's, has collected the text, but cannot show it after the
                    # abort.
                    sys.__stderr__.write(sys.stderr.getvalue())
            abort.abort(1)

    hook.aborts = True  # type: ignore[attr-defined]  # launch/wrap.py skips this hook, because it ends the job itself.
    hook.former = former  # type: ignore[attr-defined]
    return hook
