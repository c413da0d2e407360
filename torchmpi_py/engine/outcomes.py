"""Work that may fail on one rank. The ranks exchange the outcomes, so that all of them raise an error together.

Rank 0 may write to a disk for minutes while the other ranks wait, so no timeout applies to this wait. The death of a
rank ends the job, as in any collective.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from typing import TypeVar, cast

from torchmpi_py.collectives import verbs
from torchmpi_py.core import agree, backoff, communicators, journal, ulfm
from torchmpi_py.errors import CheckpointError
from torchmpi_py.runtime import chief, process

T = TypeVar("T")


def rank() -> int:
    """Return this process's rank in the current level; 0 without ``mpi.start()``. A death may change the rank."""
    return process.rank() if process.is_started() else 0


def size() -> int:
    """Return the number of ranks in the current level; 1 without ``mpi.start()``."""
    return process.size() if process.is_started() else 1


def is_chief() -> bool:
    """Return whether this process writes one-time output (``mpi.is_chief``); True without ``mpi.start()``."""
    return not process.is_started() or chief.is_chief()


def of_all(work: Callable[[], T], what: str) -> list[T]:
    """Do the work on every rank, and return the results of all ranks. Results should be small.

    Every rank must make this call. If the work fails on any rank, every rank raises CheckpointError. The error's
    message begins with ``what``.
    """

    def describe(error: Exception) -> str:
        if ulfm.is_death(error):
            raise error
        return f"on {socket.gethostname()}: {_text_of(error)}"

    def failed(failures: Mapping[int, str]) -> Exception:
        text = "; ".join(f"rank {rank} {text}" for rank, text in failures.items())
        return CheckpointError(f"{what}: {text}")

    return agree.gather_results(_exchanged if size() > 1 else agree.alone, work, (Exception,), describe, failed)


def of_rank_0(work: Callable[[], T], what: str) -> T:
    """Do the work on rank 0, and return its result on all ranks. Errors are raised as in ``of_all``."""
    return cast(T, of_all(work if rank() == 0 else lambda: None, what)[0])


def _exchanged(mine: T) -> list[T]:
    """Return the objects of all ranks, in rank order."""
    comm = communicators.resolve(None)
    # Wait without a timeout until all ranks have done their work. The exchange itself is short.
    journal.run_together("checkpoint", comm, lambda: backoff.barrier(comm.direct.mpi), is_patient=True)
    return cast(list[T], verbs.allgather_object(mine))


def _text_of(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'writing'}: {error.strerror}"
    return f"{type(error).__name__}: {error}"
