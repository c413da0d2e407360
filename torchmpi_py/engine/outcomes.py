"""Work that may fail on one rank, and must then be given up by all: they tell each other how it went."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import TypeVar, cast

from torchmpi_py import runtime
from torchmpi_py.collectives import objects
from torchmpi_py.errors import CheckpointError

T = TypeVar("T")


def rank() -> int:
    """This process's rank in the current level; 0 without ``mpi.start()``. Asked anew each time: ranks may die."""
    return runtime.rank() if runtime.is_started() else 0


def size() -> int:
    """The number of ranks in the current level; 1 without ``mpi.start()``."""
    return runtime.size() if runtime.is_started() else 1


def of_all(work: Callable[[], T], what: str) -> list[T]:
    """Do the work on every rank, and return the results of all. Collective; results should be small.

    CheckpointError on every rank if it fails on one; ``what`` says what will not be.
    """
    result, failure, error = None, "", None
    try:
        result = work()
    except Exception as caught:
        error, failure = caught, f"rank {rank()} on {socket.gethostname()}: {_said(caught)}"
    outcomes = [(result, failure)] if size() == 1 else objects.allgather_object((result, failure))
    failures = [failure for _, failure in outcomes if failure]
    if failures:
        raise CheckpointError(f"{what}: {'; '.join(failures)}") from error
    return [cast(T, result) for result, _ in outcomes]


def of_rank_0(work: Callable[[], T], what: str) -> T:
    """Do the work on rank 0, and return its result on all; else as ``of_all``."""
    return cast(T, of_all(work if rank() == 0 else _nothing, what)[0])


def soon(attempt: Callable[[], None], error: type[Exception], within_seconds: float) -> None:
    """Try until it succeeds, or raise the error when that takes too long."""
    deadline = time.monotonic() + within_seconds
    while True:
        try:
            return attempt()
        except error:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.1)


def _nothing() -> None:
    """What the other ranks do in the meantime."""


def _said(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'writing'}: {error.strerror}"
    return f"{type(error).__name__}: {error}" if not isinstance(error, FileNotFoundError) else str(error)
