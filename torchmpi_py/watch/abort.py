"""End the whole job from one rank."""

from __future__ import annotations

import contextlib
import os
import sys

from torchmpi_py.core import mpi_api, status_board
from torchmpi_py.launch import exit_marks
from torchmpi_py.launch.notices import printable
from torchmpi_py.watch import stacks, tracing

# Time to collect exceptions: longer than the 0.5 s between two checks of a watchdog. An abort also has the delays that
# are defined in launch/exit_marks.py.
_HANDLED_SECONDS = 0.6
EXIT_CODE = 1
"""The exit code of a job that hang detection ends."""


def abort(code: int, report: str = "") -> None:
    """End the whole job with the exit code ``code``. Do nothing if MPI is not running or the job has only this rank.

    If this rank ends the job because of another rank's fault, ``report`` describes that fault in a few words.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or mpi_api.is_forked() or not mpi.Is_initialized() or mpi.Is_finalized():
        return
    if mpi.COMM_WORLD.size > 1:
        with contextlib.suppress(Exception):
            folder = os.environ.get("TORCHMPIRUN_JOB_DIR", "")
            exit_marks.record_failure(folder, mpi.COMM_WORLD.rank, code, report)
        with contextlib.suppress(Exception):
            tracing.save()
        for stream in (sys.stdout, sys.stderr, sys.__stderr__):
            with contextlib.suppress(Exception):
                stream.flush()  # type: ignore[union-attr]
        announce()
        exit_marks.abort(mpi, code)


def announce() -> None:
    """Show on the board that this rank is about to end the job, and print the pending exceptions of this node.

    Call this function after printing the reason for the end. A rank that waits for a collective within a ``finally``
    block would print its pending exception only after the wait. The end of the job interrupts the wait, so this rank
    prints the pending exceptions of all ranks of the node.
    """
    if (board := status_board.current) is not None:
        board.put(status_board.HAS_LEFT, status_board.ENDING)
        text = stacks.exceptions(board, stacks.gather(board, lambda: False, _HANDLED_SECONDS))
        with contextlib.suppress(OSError):
            os.write(2, printable(text).encode(errors="backslashreplace"))
