"""Which ranks of this host died, and in which order.

A rank died if its process is gone and its mark is still there (`exit_marks`).

The order matters because the MPI ends the other ranks some milliseconds after the first death. Polling would find all
of them dead. Linux reports the end of a process at once, because a process descriptor (pidfd) becomes readable. But a
large process takes milliseconds to end, as long as the MPI takes to end the others. So each rank also holds a pipe,
which breaks as soon as the rank begins to end, before mpirun's connection to the rank breaks. The order in which the
pipes break is kept by epoll. A rank that fails writes into its pipe, and this write takes its place in the same order.

Messages about deaths follow from this order, not from the moment at which torchmpirun looks. A rank that has ended is
kept here until every rank that began to end before it has ended too. Without pipes, the order in which the ends are
seen is used. If all ranks died before the first look at them, all of them are named.

A pipe also breaks when the rank becomes another program (exec). Then the process lives on with another command line,
and its mark is removed, because the end of that program concerns the MPI alone. A program that ends within milliseconds
may be gone before the look. Then it counts as a rank that did not reach its end.

Only the parent, mpirun, learns how a process ended. Linux 6.15 and later also report it through a pidfd. On an older
Linux the status is read from the process as soon as its pipe breaks, and again when the process is a zombie. If mpirun
reaps the process before that, only mpirun's own exit code is known.
"""

import contextlib
import fcntl
import math
import os
import select
import signal
import struct
import time
from pathlib import Path
from typing import NamedTuple

from torchmpi_py.launch import exit_marks, proc

_GET_INFO = 0xC040FF0B  # PIDFD_GET_INFO of linux/pidfd.h; the next constant asks how the process ended
_INFO_EXIT = 1 << 3
_INFO = struct.Struct("=QQ11Ii")  # Mask and cgroup. Process, thread group, parent and eight user ids. Status.
BY_STARTER = (None, signal.SIGKILL, signal.SIGTERM)  # Statuses of ranks that mpirun may have ended.
ENDING_SECONDS = 2.0  # A rank that lives longer after its pipe broke has only closed the pipe.


class Death(NamedTuple):
    """A rank that ended in the middle of its program; ``status`` is as from os.waitpid, None if unknown."""

    rank: int
    process_id: int
    status: int | None = None
    began: float = math.inf  # when its end was first seen, in order among the ranks; inf if unknown
    num_left: int = 0  # number of ranks that had not begun to end at that time

    @property
    def name(self) -> str:
        """Return the rank and its process, for a message."""
        return f"rank {self.rank} (process {self.process_id})"

    def code(self, starter_code: int = 1) -> int:
        """Return an exit code for the death, never 0; ``starter_code`` if the status is unknown."""
        if self.status is None:
            return starter_code or 1
        code = os.waitstatus_to_exitcode(self.status)
        return 128 - code if code < 0 else code or 1

    def explain(self, starter_code: int = 1) -> str:
        """Return how the rank ended, for a message."""
        if self.status is not None and not os.WIFSIGNALED(self.status):
            return f"ended in the middle of the program, with exit code {os.waitstatus_to_exitcode(self.status)}"
        if self.status is not None or 128 < starter_code < 128 + signal.NSIG:  # Intel MPI's code is always 255
            return f"was killed by signal {self.code(starter_code) - 128}"
        return "died"


def are_by_starter(deaths: list[Death], code: int, killed_code: int) -> bool:
    """Return whether mpirun ended these ranks because of another rank, judging by mpirun's exit code.

    Every mpirun ends the ranks here when a rank of another host dies. Those of MPICH and Intel MPI also kill the caller
    of MPI_Abort. Exit code 255 only means that something went wrong, for example a connection of MPICH's mpirun.
    """
    is_other = code not in (0, 255, killed_code, *(death.code() for death in deaths))
    return bool(deaths) and is_other and all(death.status in BY_STARTER[1:] for death in deaths)


class Lookout:
    """Watch the ranks of a job on this host, and mpirun; ``num_ranks`` is 0 if the number is unknown."""

    def __init__(self, folder: Path, starter: int, num_ranks: int = 0) -> None:
        self.folder = folder
        self._num_ranks = num_ranks
        self._poll = select.epoll()
        self._watched: dict[int, tuple[int, int | None]] = {}  # Rank: process, and its descriptor if it has one.
        self._pipes: dict[int, int] = {}  # Descriptor: rank.
        self._statuses: dict[int, int | None] = {}  # Rank: status at the time when its pipe broke.
        self._began: dict[int, float] = {}  # Ranks that failed or whose pipe broke, with the time.
        # rank: process and status, until every earlier rank has ended
        self._ended: dict[int, tuple[int, int | None]] = {}
        self._num_ended = 0  # ranks that are no longer in `_ended`
        self._starter = self._open_descriptor(starter)
        self.codes_in_order: list[int] = []  # exit codes of the ranks that ended without dying

    @property
    def is_deserted(self) -> bool:
        """Return whether every rank of the job ran on this host and has ended."""
        return len(self._watched) == self._num_ranks > 0 and not self.living

    @property
    def living(self) -> dict[int, int]:
        """The processes of the ranks that have not ended."""
        return {rank: process_id for rank, (process_id, _) in self._watched.items() if process_id}

    @property
    def sees_all(self) -> bool:
        """Return whether every rank of the job has been on this host."""
        return len(self._watched) >= self._num_ranks

    def has(self, rank: int) -> bool:
        """Return whether this rank has been on this host."""
        return rank in self._watched

    @property
    def is_holding(self) -> bool:
        """Return whether a rank has begun to end but still exists, or has ended and is not yet reported."""
        return bool(self._ended) or any(self._watched[rank][0] for rank in self._began)

    def close(self) -> None:
        """Close the descriptors."""
        self._poll.close()
        for descriptor in (self._starter, *self._pipes, *(descriptor for _, descriptor in self._watched.values())):
            if descriptor is not None:
                os.close(descriptor)
        self._watched, self._pipes, self._starter = {}, {}, None

    def wait(self, seconds: float) -> list[Death]:
        """Return the ranks that died since the last call, in order.

        Waits at most ``seconds`` for a death or for mpirun's end.
        """
        self._watch_new_ranks()
        # Read the pipes first, because they show the order of the ends.
        ready = self._record_beginnings([descriptor for descriptor, _ in self._poll.poll(seconds)])
        late = self._watch_new_ranks() if ready else set()  # ranks that started, and may have died, meanwhile
        # Then look at the processes: by their descriptors, or directly if a process has no descriptor or is new.
        for rank, (process_id, descriptor) in self._watched.items():
            is_looked_at = descriptor is None or rank in late
            if process_id and (descriptor in ready or (is_looked_at and proc.is_gone(process_id))):
                status = _status(process_id, descriptor)
                self._ended[rank] = process_id, self._statuses.get(rank) if status is None else status
                self._close_descriptor(rank)
        self._drop_survivors()
        return self._deaths_in_turn()

    def began(self, rank: int) -> float:
        """Return when this rank was seen to begin to end or to fail; inf if the time is unknown."""
        return self._began.get(rank, math.inf)

    def _record_beginnings(self, ready: list[int]) -> list[int]:
        """Record which ranks have begun to end, in order; return the descriptors that are not pipes."""
        broken = [descriptor for descriptor in ready if descriptor in self._pipes]
        for descriptor in broken:
            rank = self._pipes.pop(descriptor)
            self._began[rank], self._statuses[rank] = time.monotonic(), _status(*self._watched[rank])
            self._poll.unregister(descriptor)
            os.close(descriptor)
        return [descriptor for descriptor in ready if descriptor not in broken]

    def _drop_survivors(self) -> None:
        """Forget that a rank began to end if it lives on as another program or without its pipe."""
        limit = time.monotonic() - ENDING_SECONDS
        begun = [(rank, start) for rank, start in self._began.items() if self._watched[rank][0]]
        for rank, start in begun:
            if exit_marks.release_replaced(self.folder, rank) or start < limit:
                del self._began[rank]

    def _deaths_in_turn(self) -> list[Death]:
        """Return the deaths that no other rank can precede, in order."""
        deaths = []
        # A rank whose process still exists although it has begun to end holds back all ranks that began after it.
        earliest = min((self.began(rank) for rank in self._began if self._watched[rank][0]), default=math.inf)
        for rank in sorted(self._ended, key=self.began):
            if self.began(rank) > earliest:
                break
            process_id, status = self._ended.pop(rank)
            self._num_ended += 1
            # A program that has returned may call os._exit(0) at exit. An unknown status counts as 0 then, because
            # mpirun reports any other status.
            is_in_order = status in (0, None) and exit_marks.is_left(self.folder, f"through-{rank}")
            # A signal may end a rank in MPI_Finalize, where the rank has already removed its mark.
            is_killed = status is not None and os.WIFSIGNALED(status)
            if is_killed or (exit_marks.is_left(self.folder, f"running-{rank}") and not is_in_order):
                num_left = max(self._num_ranks, len(self._watched)) - self._num_ended
                deaths.append(Death(rank, process_id, status, self.began(rank), num_left))
            else:
                self.codes_in_order.append(os.waitstatus_to_exitcode(status or 0))
        return deaths

    def _watch_new_ranks(self) -> set[int]:
        """Watch the ranks that have left new marks, and return them."""
        running = exit_marks.ranks_running(self.folder, "over") | exit_marks.ranks_running(self.folder)
        new = {rank for rank, process_id in running.items() if process_id and rank not in self._watched}
        for rank in new:
            self._watched[rank] = running[rank], self._open_descriptor(running[rank])
            with contextlib.suppress(OSError):
                pipe = exit_marks.open_pipe(self.folder, rank)
                self._poll.register(pipe, select.EPOLLIN | select.EPOLLHUP)
                self._pipes[pipe] = rank
                if not exit_marks.is_held(pipe):  # it is broken already, and epoll would not report that
                    exit_marks.release_replaced(self.folder, rank)
        return new

    def _open_descriptor(self, process_id: int) -> int | None:
        # the process is gone, Python or Linux lacks pidfds, or no descriptor is free
        with contextlib.suppress(OSError, AttributeError):
            descriptor = os.pidfd_open(process_id)
            self._poll.register(descriptor, select.EPOLLIN)
            return descriptor
        return None

    def _close_descriptor(self, rank: int) -> None:
        """Stop watching a process that has ended."""
        descriptor = self._watched[rank][1]
        self._watched[rank] = 0, None
        if descriptor is not None:
            self._poll.unregister(descriptor)
            os.close(descriptor)


def _status(process_id: int, descriptor: int | None) -> int | None:
    """Return the status of a process that has ended or is about to end; None if it is unknown."""
    if descriptor is not None:
        info = bytearray(_INFO.pack(_INFO_EXIT, *[0] * 13))
        with contextlib.suppress(OSError):  # Linux is older than 6.15, or nothing has reaped the process yet
            fcntl.ioctl(descriptor, _GET_INFO, info)
            mask, *_, status = _INFO.unpack(info)
            if mask & _INFO_EXIT:
                return int(status)
    fields = proc.status_fields(process_id)
    if fields[:1] in (["Z"], ["X"]):
        return int(fields[-1])
    # A living process may show status 0. A stopped process shows the signal that stopped it.
    return None if fields[:1] in ([], ["T"], ["t"]) else int(fields[-1]) or None
