"""Work that may fail on one rank, and that all ranks then give up: they exchange the outcomes.

Rank 0 may work on a disk for minutes while the others wait for it, so no timeout applies to that wait. The death of a
rank ends the job, as anywhere.
"""

from __future__ import annotations

import io
import pickle
import socket
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar, cast

import numpy as np

from torchmpi_py.core import agree, backoff, communicators, journal, ulfm
from torchmpi_py.core.mpi_api import MPI
from torchmpi_py.errors import CheckpointError
from torchmpi_py.runtime import process

_LOOK_SECONDS = 0.01
PIECE_BYTES = 1 << 30  # MPI counts elements by ints

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
        return _RankFailure(socket.gethostname(), str(error) if mistake else _text_of(error), mistake)

    def failed(failures: Mapping[int, _RankFailure]) -> Exception:
        text = "; ".join(f"rank {rank} on {each.host}: {each.text}" for rank, each in failures.items())
        texts = {each.text for each in failures.values()}
        if len(failures) == size() > 1 == len(texts):
            text = f"all ranks: {texts.pop()}"
        kinds = {each.mistake for each in failures.values()}
        kind = kinds.pop() if len(kinds) == 1 else None
        return CheckpointError(f"{what}: {text}") if kind is None else kind(text)

    return agree.gather_results(_exchanged if size() > 1 else agree.alone, work, (Exception,), describe, failed)


def of_rank_0(work: Callable[[], T], what: str) -> T:
    """Do the work on rank 0, and return its result on all ranks; otherwise as ``of_all``."""
    return cast(T, of_all(work if rank() == 0 else lambda: None, what)[0])


def of_each(work: Callable[[], T], what: str, mistakes: tuple[type[Exception], ...] = ()) -> T:
    """Like ``of_all`` for large results: each rank gets its own, and they are not exchanged."""
    results: list[T] = []
    of_all(lambda: results.append(work()), what, mistakes)
    return results[0]


def gathered(mine: bytes) -> list[bytes]:
    """Return the bytes of all ranks on rank 0, in rank order, and none on the others. Collective."""
    return _patiently(lambda mpi: _gathered(mpi, mine)) if size() > 1 else [mine]


def broadcast(content: io.BytesIO) -> None:
    """Overwrite the content with rank 0's, which has as many bytes. Collective."""
    if size() > 1:
        _patiently(lambda mpi: _broadcast(mpi, np.frombuffer(content.getbuffer(), np.uint8)))


def _exchanged(mine: T) -> list[T]:
    """The objects of all ranks, in rank order."""
    return [pickle.loads(packed) for packed in _patiently(lambda mpi: _all_gathered(mpi, pickle.dumps(mine)))]


def _patiently(exchange: Callable[[MPI.Comm], T]) -> T:
    """Run a collective without a timeout, recorded for the hang detection."""
    comm = communicators.resolve(None)
    return journal.run_together("checkpoint", comm, lambda: exchange(comm.direct.mpi), is_patient=True)


def _complete(request: MPI.Request) -> None:
    backoff.complete(request, backoff.Nap(_LOOK_SECONDS))


def _sizes(mpi: MPI.Comm, mine: bytes) -> list[int]:
    sizes = np.empty(mpi.size, np.int64)
    _complete(mpi.Iallgather(np.array([len(mine)], np.int64), sizes))
    return cast(list[int], sizes.tolist())


def _all_gathered(mpi: MPI.Comm, mine: bytes) -> list[bytes]:
    sizes = _sizes(mpi, mine)
    received = np.empty(sum(sizes), np.uint8)
    _complete(mpi.Iallgatherv(np.frombuffer(mine, np.uint8), [received, sizes]))
    return [piece.tobytes() for piece in np.split(received, np.cumsum(sizes)[:-1])]


def _gathered(mpi: MPI.Comm, mine: bytes) -> list[bytes]:
    """In pieces of the same size from every rank, so that rank 0 never receives more than one message may hold."""
    sizes = _sizes(mpi, mine)
    piece = min(max(sizes), PIECE_BYTES // mpi.size)
    rounds = []
    for begin in range(0, max(sizes), piece):
        received = np.empty((mpi.size, piece) if mpi.rank == 0 else 0, np.uint8)
        _complete(mpi.Igather(np.frombuffer(mine[begin : begin + piece].ljust(piece, b"\0"), np.uint8), received, 0))
        rounds.append(received)
    return [b"".join(part[rank] for part in rounds)[:num] for rank, num in enumerate(sizes)] if mpi.rank == 0 else []


def _broadcast(mpi: MPI.Comm, content: np.ndarray) -> None:
    for begin in range(0, content.size, PIECE_BYTES):
        _complete(mpi.Ibcast(content[begin : begin + PIECE_BYTES], 0))


def _text_of(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'writing'}: {error.strerror}"
    return f"{type(error).__name__}: {error}"
