"""The end of a started process: stop at a normal exit, abort of the whole job on an uncaught exception.

A forked child is disowned: it must neither use its parent's rank nor shut its parent's MPI down.
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
    """Once per process: stop at exit, abort the job on an uncaught exception, disown forked children."""
    if not mpi_api.claim_process():
        return
    atexit.register(_at_exit, stop)
    os.register_at_fork(after_in_child=_disown)
    if not hasattr(sys, "ps1") and not sys.flags.interactive:
        sys.excepthook = _aborting(sys.excepthook)


def wait_for_all(world: Communicator) -> None:
    """Wait for all ranks. Collective.

    The barrier is on the background communicator, which is idle by now, so that no barrier of another rank's program
    matches it. The journal records it as any operation: RanksDisagree if a neighbour has called one more, or one less,
    or if ranks of other nodes have called something else.
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
    """Show torchmpirun that this rank waits for others in ``call``; "": that it does not. No watchdog looks there."""
    tuning = config.current
    exit_marks.record_stage(exit_marks.Stage(call, tuning.deadline_seconds, tuning.at_deadline != "report"))


def _at_exit(stop: Callable[[], None]) -> None:
    if not mpi_api.is_forked() and not MPI.Is_finalized():
        failure = None
        try:
            stop()
        except BaseException:
            failure = sys.exc_info()
        if failure is not None:  # not in the block above: the abort reports exceptions that are being handled
            try:
                sys.excepthook(*failure)
            finally:
                abort.abort(1)
        if not communication_thread.are_over():
            logger.error(
                "an operation that timed out is still under way, so MPI cannot be ended in order; the job is aborted"
            )
            abort.abort(1)
        if not ulfm.has_lost_ranks():  # MPI_Finalize of Open MPI 5 may wait for the dead
            show_stage("MPI_Finalize")
            MPI.Finalize()
            show_stage("")


def _disown() -> None:
    requests.disown()
    communication_thread.current_thread = None
    communicators.current_stack = None
    communicators.why_not = (
        "it was forked from a started rank, and only that one may call; in data loaders, return tensors instead"
    )


def _aborting(former: Callable[..., Any]) -> Callable[..., None]:
    """An excepthook that ends the whole job after reporting: ranks that wait for this one would wait for ever."""

    def hook(*failure: Any) -> None:
        try:
            former(*failure)
        except BaseException:  # the program's own may raise, or call sys.exit
            sys.__excepthook__(*failure)
        finally:
            with contextlib.suppress(Exception):
                if isinstance(sys.stderr, io.StringIO) and sys.__stderr__ is not None:
                    # A hook around this one (torch.distributed has one) collects the text, and shows it afterwards.
                    sys.__stderr__.write(sys.stderr.getvalue())
            abort.abort(1)

    hook.aborts = True  # type: ignore[attr-defined]  # launch/wrap.py has its own abort, after the user's hook
    hook.former = former  # type: ignore[attr-defined]
    return hook
