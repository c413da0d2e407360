"""End of the whole job from one rank."""

from __future__ import annotations

import contextlib
import os
import sys

from torchmpi_py.core import mpi_api, status_board
from torchmpi_py.core.status_board import ENDING, HAS_LEFT
from torchmpi_py.launch import exit_marks
from torchmpi_py.watch import tracing

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
    """Show on the board that this rank is about to end the job, and has said why."""
    if status_board.current is not None:
        status_board.current.put(HAS_LEFT, ENDING)
