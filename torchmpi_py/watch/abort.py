"""End of the whole job from one rank."""

from __future__ import annotations

import contextlib
import os
import sys

from torchmpi_py.core import mpi_api, status_board
from torchmpi_py.core.status_board import ENDING, HAS_LEFT
from torchmpi_py.launch import exit_marks
from torchmpi_py.launch.notices import printable
from torchmpi_py.watch import stacks, tracing

_HANDLED_SECONDS = 0.6  # a watchdog looks twice a second; see exit_marks.py for what else takes time until the end
EXIT_CODE = 1
"""The exit code of a job that is ended by the ranks' watch over each other."""


def abort(code: int, report: str = "") -> None:
    """End the whole job with ``code`` if other ranks belong to it; else do nothing.

    ``report``: what is wrong with another rank, in a few words, where this rank ends the job because of that.
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
    """Show on the board that this rank is about to end the job, and has said why; and print what else went wrong.

    A rank that waits in a collective of a ``finally`` has an exception that it would print after the wait. The end of
    the job cuts the wait off, so this rank prints the exceptions that the ranks of its node handle.
    """
    if (board := status_board.current) is not None:
        board.put(HAS_LEFT, ENDING)
        text = stacks.exceptions(board, stacks.gather(board, lambda: False, _HANDLED_SECONDS))
        with contextlib.suppress(OSError):
            os.write(2, printable(text).encode(errors="backslashreplace"))
