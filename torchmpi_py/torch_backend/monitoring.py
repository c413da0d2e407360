"""A barrier that can name the ranks that are missing.

Every rank sends rank 0 a message when it comes. Rank 0 answers when all have come, or when the time is up, with the
ranks that have not. A rank numbers its messages, and takes a message back by its negative number if rank 0 has not
answered in time, so that a late message for one barrier does not count for the next.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import distributed

from torchmpi_py.core import backoff, communicators, journal
from torchmpi_py.core.mpi_api import MPI
from torchmpi_py.torch_backend import torch_internals
from torchmpi_py.torch_backend.communicator_pool import Membership

_MILLISECONDS = 1000
_ANSWER_SECONDS = 1.0  # rank 0 answers when the time is up: the others wait a little longer

_of_torch = distributed.monitored_barrier  # a program may put this module's function in its place


def monitored_barrier(
    group: Any = None, timeout: dt.timedelta | float | None = None, wait_all_ranks: bool = False
) -> None:
    """``torch.distributed.monitored_barrier``, which torch has for gloo only. Collective over the group.

    RuntimeError on rank 0 that names the first rank that did not come in time, or with ``wait_all_ranks`` all of them;
    also on the ranks that did come. ``timeout`` (seconds, if a number): default that of the group.
    """
    used: Any = group or distributed.group.WORLD
    if not torch_internals.is_group(used):
        _of_torch(group, timeout, wait_all_ranks)
        return
    given = dt.timedelta(seconds=timeout) if isinstance(timeout, (int, float)) else timeout
    used.monitored_barrier(given, wait_all_ranks)


class Monitor:
    """The monitored barriers of a group."""

    def __init__(self, membership: Membership) -> None:
        self._comm = membership.comm
        self._mpi, self._tag = membership.messages, membership.tags.own
        self._number = 0  # of this rank's messages: a rank may leave barriers out

    def wait(self, seconds: float | None, wait_all_ranks: bool) -> None:
        """Wait for all ranks, or raise RuntimeError."""
        communicators.resolve(self._comm)
        self._number += 1
        if seconds is None:  # the package's own deadline counts
            seconds = float(torch_internals.DEFAULT_SECONDS)
            missing = journal.run_alone(
                "monitored_barrier", self._comm, lambda: self._exchange(seconds, wait_all_ranks)
            )
        else:
            missing = self._exchange(seconds, wait_all_ranks)
        if missing:
            names = f"Rank {missing[0]}" if len(missing) == 1 else f"Ranks {', '.join(map(str, missing))}"
            failure = f"{names} failed to pass monitoredBarrier in {seconds * _MILLISECONDS:.0f} ms"
            raise RuntimeError(f"[Rank {self._comm.rank}]: {self._own_part(seconds)}{failure}")

    def _exchange(self, seconds: float, wait_all_ranks: bool) -> list[int]:
        """The ranks that have not come, as far as this rank knows."""
        return self._gather(seconds, wait_all_ranks) if self._comm.rank == 0 else self._report(seconds)

    def _own_part(self, seconds: float) -> str:
        """The part of the message about this rank, worded as in gloo, for programs that look for gloo's message."""
        rank = self._comm.rank
        if rank > 0:
            return (
                f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for send/recv "
                "from rank 0: "
            )
        return f"Rank {rank} timed out in monitoredBarrier after 0 ms: " if seconds <= 0 else ""

    def _gather(self, seconds: float, wait_all_ranks: bool) -> list[int]:
        """Rank 0: the ranks that have not come."""
        nap, size = backoff.Nap(0.001), self._comm.size
        arrivals = {rank: _Inbox(self._mpi, rank, self._tag, 1) for rank in range(1, size)}
        missing: list[int] = []
        # Collect arrivals, all against one clock.
        for rank, arrival in arrivals.items():
            if not arrival.wait(nap, seconds, lambda number: number > 0):
                missing.append(rank)
                if not wait_all_ranks:
                    break
        # Answer each rank that has come, also one that came after the time was up and has not taken its message back.
        for rank, arrival in arrivals.items():
            if arrival.close():
                answer = np.array([arrival.numbers[0], *(other in missing for other in range(size))], np.int64)
                self._mpi.Send(answer, rank, self._tag)
        return missing

    def _report(self, seconds: float) -> list[int]:
        """Another rank: the ranks that rank 0 names; rank 0 if it does not answer."""
        mpi, own = self._mpi, self._number
        mpi.Send(np.array([own], np.int64), 0, self._tag)
        answer = _Inbox(mpi, 0, self._tag, 1 + self._comm.size)
        if not answer.wait(backoff.Nap(0.001), seconds + _ANSWER_SECONDS, lambda number: number == own):
            answer.close()
            mpi.Send(np.array([-own], np.int64), 0, self._tag)
            return [0]
        return [rank for rank, is_missing in enumerate(answer.numbers[1:]) if is_missing]


class _Inbox:
    """The messages from a rank, of ``length`` numbers each: the last message counts."""

    def __init__(self, mpi: MPI.Comm, rank: int, tag: int, length: int) -> None:
        self._mpi, self._rank, self._tag = mpi, rank, tag
        self.numbers: Any = np.zeros(length, np.int64)
        self._request: Any = self._post()

    def _post(self) -> Any:
        return self._mpi.Irecv(self.numbers, self._rank, self._tag)

    def wait(self, nap: backoff.Nap, seconds: float, counts: Callable[[int], bool]) -> bool:
        """Wait for a message whose first number ``counts``; False after ``seconds``."""
        while backoff.complete(self._request, nap, seconds):
            if counts(int(self.numbers[0])) and not self._mpi.Iprobe(self._rank, self._tag):
                return True
            self._request = self._post()
        return False

    def close(self) -> bool:
        """End receiving; whether the last message says that the rank has come."""
        if self._request:
            self._request.Cancel()
            self._request.Wait()
        return bool(self.numbers[0] > 0)
