"""Work that may fail on one rank, and must then be given up by all: they tell each other how it went.

One rank may write to a disk for minutes while the others wait for its word. So nobody is late here: no deadline counts
while they wait. A rank that dies ends the job as anywhere.
"""

from __future__ import annotations

import pickle
import socket
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

from torchmpi_py.core import backoff, communicators, journal, ulfm
from torchmpi_py.core.mpi_api import MPI
from torchmpi_py.errors import CheckpointError
from torchmpi_py.runtime import process

_LOOK_SECONDS = 0.01

T = TypeVar("T")


def rank() -> int:
    """This process's rank in the current level; 0 without ``mpi.start()``. Asked anew each time: ranks may die."""
    return process.rank() if process.is_started() else 0


def size() -> int:
    """The number of ranks in the current level; 1 without ``mpi.start()``."""
    return process.size() if process.is_started() else 1


class _Outcome(NamedTuple):
    """How it went on one rank: the result, or what was said, and whether that is the caller's mistake."""

    result: Any
    failure: str = ""
    mistake: str = ""


def of_all(work: Callable[[], T], what: str, mistakes: tuple[type[Exception], ...] = ()) -> list[T]:
    """Do the work on every rank, and return the results of all. Collective; results should be small.

    CheckpointError on every rank if it fails on one; ``what`` says what will not be. Errors in ``mistakes`` are the
    caller's own, and raised as what they are.
    """
    outcome, error = _Outcome(None), None
    try:
        outcome = _Outcome(work())
    except Exception as caught:
        if ulfm.is_death(caught):
            raise
        error = caught
        mistake = next((kind.__name__ for kind in mistakes if isinstance(caught, kind)), "")
        outcome = _Outcome(None, str(caught) if mistake else _said(caught), mistake)
    outcomes = [(outcome, socket.gethostname())] if size() == 1 else _exchanged((outcome, socket.gethostname()))
    failures = [(rank, host, each) for rank, (each, host) in enumerate(outcomes) if each.failure]
    if not failures:
        return [cast(T, each.result) for each, _ in outcomes]
    said = "; ".join(f"rank {rank} on {host}: {each.failure}" for rank, host, each in failures)
    if len(failures) == len(outcomes) and len({each for _, _, each in failures}) == 1:
        said = f"all ranks: {failures[0][2].failure}" if len(outcomes) > 1 else said
    for kind in mistakes:
        if {each.mistake for _, _, each in failures} == {kind.__name__}:
            raise kind(said) from error
    raise CheckpointError(f"{what}: {said}") from error


def of_rank_0(work: Callable[[], T], what: str) -> T:
    """Do the work on rank 0, and return its result on all; else as ``of_all``."""
    return cast(T, of_all(work if rank() == 0 else _nothing, what)[0])


def soon(attempt: Callable[[], T], error: type[Exception], within_seconds: float) -> T:
    """Try until it succeeds, or raise the error when that takes too long."""
    deadline = time.monotonic() + within_seconds
    while True:
        try:
            return attempt()
        except error:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.1)


def _exchanged(mine: T) -> list[T]:
    """What all ranks have brought. As ``allgather_object``, but it may take as long as it wants."""
    comm = communicators.resolve(None)
    return journal.run_together("checkpoint", comm, lambda: _gathered(comm.direct.mpi, mine), is_patient=True)


def _gathered(mpi: MPI.Comm, mine: T) -> list[T]:
    packed = pickle.dumps(mine)
    sizes = np.empty(mpi.size, np.int64)
    backoff.complete(mpi.Iallgather(np.array([len(packed)], np.int64), sizes), backoff.Nap(_LOOK_SECONDS))
    received = np.empty(sizes.sum(), np.uint8)
    request = mpi.Iallgatherv(np.frombuffer(packed, np.uint8), [received, sizes.tolist()])
    backoff.complete(request, backoff.Nap(_LOOK_SECONDS))
    return [pickle.loads(piece.tobytes()) for piece in np.split(received, np.cumsum(sizes)[:-1])]


def _nothing() -> None:
    """What the other ranks do in the meantime."""


def _said(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'writing'}: {error.strerror}"
    return f"{type(error).__name__}: {error}" if not isinstance(error, FileNotFoundError) else str(error)
