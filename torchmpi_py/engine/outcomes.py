"""Work that may fail on one rank, and that all ranks then give up: they exchange the outcomes.

One rank may write to a disk for minutes while the others wait for its outcome, so no deadline counts in that wait. The
death of a rank ends the job as anywhere.
"""

from __future__ import annotations

import pickle
import socket
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar, cast

import numpy as np

from torchmpi_py.core import agree, backoff, communicators, journal, ulfm
from torchmpi_py.core.mpi_api import MPI
from torchmpi_py.errors import CheckpointError
from torchmpi_py.runtime import process

_LOOK_SECONDS = 0.01

T = TypeVar("T")


def rank() -> int:
    """This process's rank in the current level; 0 without ``mpi.start()``. Not kept: ranks may die."""
    return process.rank() if process.is_started() else 0


def size() -> int:
    """The number of ranks in the current level; 1 without ``mpi.start()``."""
    return process.size() if process.is_started() else 1


class _RankFailure(NamedTuple):
    """Why the work failed on one rank; ``mistake`` is the class of an error that is the caller's own."""

    host: str
    text: str
    mistake: type[Exception] | None


def of_all(work: Callable[[], T], what: str, mistakes: tuple[type[Exception], ...] = ()) -> list[T]:
    """Do the work on every rank, and return the results of all. Collective; results should be small.

    CheckpointError on every rank if it fails on one; ``what`` says what will not be. Errors in ``mistakes`` are the
    caller's own, and raised as what they are.
    """

    def describe(error: Exception) -> _RankFailure:
        if ulfm.is_death(error):
            raise error
        mistake = next((kind for kind in mistakes if isinstance(error, kind)), None)
        return _RankFailure(socket.gethostname(), str(error) if mistake else _said(error), mistake)

    def failed(failures: Mapping[int, _RankFailure]) -> Exception:
        said = "; ".join(f"rank {rank} on {each.host}: {each.text}" for rank, each in failures.items())
        texts = {each.text for each in failures.values()}
        if len(failures) == size() > 1 == len(texts):
            said = f"all ranks: {texts.pop()}"
        kinds = {each.mistake for each in failures.values()}
        kind = kinds.pop() if len(kinds) == 1 else None
        return CheckpointError(f"{what}: {said}") if kind is None else kind(said)

    exchange = exchanged if size() > 1 else agree.alone
    return agree.gather_results(exchange, work, (Exception,), describe, failed)


def of_rank_0(work: Callable[[], T], what: str) -> T:
    """Do the work on rank 0, and return its result on all; else as ``of_all``."""
    return cast(T, of_all(work if rank() == 0 else lambda: None, what)[0])


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


def exchanged(mine: T) -> list[T]:
    """The objects of all ranks, in rank order. Like ``allgather_object``, without a deadline. Collective."""
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


def _said(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'writing'}: {error.strerror}"
    return f"{type(error).__name__}: {error}" if not isinstance(error, FileNotFoundError) else str(error)
