"""Detection of which ranks of this host died, and in which order.

A rank has died if its process has ended and its mark ``running-R`` still exists (`exit_marks`).

The order matters because the MPI kills the other ranks some milliseconds after the first death, so a poll of the
processes would find all of them dead. A process descriptor (pidfd) becomes readable when the process has ended. But a
large process takes milliseconds to end, which is enough time for the MPI to kill the other ranks. So each rank also
keeps a pipe open. The kernel closes the pipe as soon as the rank begins to end, before mpirun's connection to the rank
breaks. epoll preserves the order in which the pipes break. A rank that fails writes into its pipe, and epoll reports
this write in the same order.

The order in messages about deaths is the order of these events. It does not depend on when torchmpirun polls. The death
of a rank is reported only after all ranks that began to end earlier have ended too. A rank without a pipe counts as
ending when torchmpirun first finds its process gone. If all ranks died before the first poll, all of them are reported.

A pipe also breaks when the rank executes another program (exec). The process then continues with another command line,
and `Lookout` removes its mark, because the end of the new program concerns only the MPI. A program that ends within
milliseconds may be gone before the poll, and then the rank counts as dead.

Linux reports the exit status of a process only to its parent, mpirun. Since Linux 6.15 a pidfd reports the status too.
On an older Linux this module reads the status from /proc as soon as the pipe breaks, and again when the process is a
zombie. If mpirun reaps the process before that, only mpirun's own exit code is known.
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

_GET_INFO = 0xC040FF0B  # PIDFD_GET_INFO in linux/pidfd.h.
_INFO_EXIT = 1 << 3  # PIDFD_INFO_EXIT, the bit for the exit status.
_INFO = struct.Struct("=QQ11Ii")  # Mask, cgroup, 11 IDs of processes, users and groups, exit status.
BY_STARTER = (None, signal.SIGKILL, signal.SIGTERM)  # Statuses of ranks that mpirun may have killed.
ENDING_SECONDS = 2.0  # A rank that lives longer after its pipe broke has only closed the pipe.


class Death(NamedTuple):
    """The death of a rank in the middle of its program.

    ``status`` has the form that os.waitpid returns, or is None if the status is unknown.
    """

    rank: int
    process_id: int
    status: int | None = None
    began: float = math.inf  # monotonic time at which the rank was first seen to end; inf if unknown
    num_left: int = 0  # number of ranks that ended later, or are still running

    @property
    def name(self) -> str:
        """The number and the process ID of the rank, for a message."""
        return f"rank {self.rank} (process {self.process_id})"

    def code(self, starter_code: int = 1) -> int:
        """Return the exit code of the rank, or mpirun's ``starter_code`` if the status is unknown; 1 instead of 0."""
        if self.status is None:
            return starter_code or 1
        code = os.waitstatus_to_exitcode(self.status)
        return 128 - code if code < 0 else code or 1

    def explain(self, starter_code: int = 1) -> str:
        """Return a description of how the rank ended, for a message."""
        if self.status is not None and not os.WIFSIGNALED(self.status):
            return f"ended in the middle of the program, with exit code {os.waitstatus_to_exitcode(self.status)}"
        if self.status is not None or 128 < starter_code < 128 + signal.NSIG:  # Intel MPI's 255 does not show a signal.
            return f"was killed by signal {self.code(starter_code) - 128}"
        return "died"


def are_by_starter(deaths: list[Death], code: int, killed_code: int) -> bool:
    """Return whether mpirun killed these ranks because of another rank or because of MPI_Abort.

    ``code`` is mpirun's exit code, and ``killed_code`` is `Vendor.killed_code`. When a rank of another host dies,
    mpirun kills the ranks of this host. With MPICH and Intel MPI, mpirun also kills the rank that called MPI_Abort.
    Exit code 255 shows only that something failed, such as a connection of MPICH's mpirun.
    """
    is_other = code not in (0, 255, killed_code, *(death.code() for death in deaths))
    return bool(deaths) and is_other and all(death.status in BY_STARTER[1:] for death in deaths)


class Lookout:
    """Observer of mpirun and of a job's ranks on this host.

    ``num_ranks`` is the number of ranks in the job, or 0 if the number is unknown.
    """

    def __init__(self, folder: Path, starter: int, num_ranks: int = 0) -> None:
        self.folder = folder
        self._num_ranks = num_ranks
        self._poll = select.epoll()
        # Maps each rank to its process (0 after the end) and to the descriptor of the process, if there is one.
        self._watched: dict[int, tuple[int, int | None]] = {}
        self._pipes: dict[int, int] = {}  # Maps the descriptor of a pipe to the rank.
        self._statuses: dict[int, int | None] = {}  # Maps a rank to its exit status when its pipe broke.
        self._began: dict[int, float] = {}  # Maps a rank to the time at which it failed or its pipe broke.
        # Maps a rank to its process and exit status, until all ranks that began to end earlier have ended.
        self._ended: dict[int, tuple[int, int | None]] = {}
        self._num_ended = 0  # Number of ranks that were removed from `_ended`.
        self._starter = self._open_descriptor(starter)
        self.codes_in_order: list[int] = []  # exit codes of the ranks that ended without dying

    @property
    def is_deserted(self) -> bool:
        """Whether all ranks of the job ran on this host and have ended."""
        return len(self._watched) == self._num_ranks > 0 and not self.living

    @property
    def living(self) -> dict[int, int]:
        """The process ID of each rank that has not ended."""
        return {rank: process_id for rank, (process_id, _) in self._watched.items() if process_id}

    @property
    def sees_all(self) -> bool:
        """Whether all ranks of the job have started on this host."""
        return len(self._watched) >= self._num_ranks

    def has(self, rank: int) -> bool:
        """Return whether ``rank`` has started on this host; it may have ended since."""
        return rank in self._watched

    @property
    def is_holding(self) -> bool:
        """Whether a rank has begun to end but still exists, or has ended and was not reported yet."""
        return bool(self._ended) or any(self._watched[rank][0] for rank in self._began)

    def close(self) -> None:
        """Close the descriptors of epoll, mpirun, the ranks' processes and their pipes."""
        self._poll.close()
        for descriptor in (self._starter, *self._pipes, *(descriptor for _, descriptor in self._watched.values())):
            if descriptor is not None:
                os.close(descriptor)
        self._watched, self._pipes, self._starter = {}, {}, None

    def wait(self, seconds: float) -> list[Death]:
        """Wait at most ``seconds`` for a death or for mpirun's end.

        Return the deaths since the last call, in the order in which the ranks began to end.
        """
        self._watch_new_ranks()
        # Read the pipes first, because they show the order in which the ranks began to end.
        ready = self._record_beginnings([descriptor for descriptor, _ in self._poll.poll(seconds)])
        late = self._watch_new_ranks() if ready else set()  # ranks that started during the poll and may have died
        # Then find the processes that have ended. A descriptor shows the end. A process that has no descriptor or is
        # new is looked up in /proc.
        for rank, (process_id, descriptor) in self._watched.items():
            is_looked_at = descriptor is None or rank in late
            if process_id and (descriptor in ready or (is_looked_at and proc.is_gone(process_id))):
                status = _status(process_id, descriptor)
                self._ended[rank] = process_id, self._statuses.get(rank) if status is None else status
                self._close_descriptor(rank)
        self._drop_survivors()
        return self._deaths_in_turn()

    def began(self, rank: int) -> float:
        """Return the time at which ``rank`` was first seen to fail or to begin to end; inf if it is unknown."""
        return self._began.get(rank, math.inf)

    def _record_beginnings(self, ready: list[int]) -> list[int]:
        """Record which ranks have begun to end, in order; return the descriptors in ``ready`` that are not pipes."""
        broken = [descriptor for descriptor in ready if descriptor in self._pipes]
        for descriptor in broken:
            rank = self._pipes.pop(descriptor)
            self._began[rank], self._statuses[rank] = time.monotonic(), _status(*self._watched[rank])
            self._poll.unregister(descriptor)
            os.close(descriptor)
        return [descriptor for descriptor in ready if descriptor not in broken]

    def _drop_survivors(self) -> None:
        """Forget that a rank began to end if it continues as another program or without its pipe."""
        limit = time.monotonic() - ENDING_SECONDS
        begun = [(rank, start) for rank, start in self._began.items() if self._watched[rank][0]]
        for rank, start in begun:
            if exit_marks.release_replaced(self.folder, rank) or start < limit:
                del self._began[rank]

    def _deaths_in_turn(self) -> list[Death]:
        """Return the new deaths, in order, up to the first rank that has begun to end and still exists."""
        deaths = []
        # A rank that has begun to end may still turn out to have died. Until its process has ended, do not report the
        # ranks that began to end after it.
        earliest = min((self.began(rank) for rank in self._began if self._watched[rank][0]), default=math.inf)
        for rank in sorted(self._ended, key=self.began):
            if self.began(rank) > earliest:
                break
            process_id, status = self._ended.pop(rank)
            self._num_ended += 1
            # A function that runs at exit may call os._exit(0) after the program has returned. Treat an unknown status
            # as 0 in this case, because mpirun reports any other status.
            is_in_order = status in (0, None) and exit_marks.is_left(self.folder, f"through-{rank}")
            # A signal may kill a rank in MPI_Finalize, after the rank has removed its mark.
            is_killed = status is not None and os.WIFSIGNALED(status)
            if is_killed or (exit_marks.is_left(self.folder, f"running-{rank}") and not is_in_order):
                num_left = max(self._num_ranks, len(self._watched)) - self._num_ended
                deaths.append(Death(rank, process_id, status, self.began(rank), num_left))
            else:
                self.codes_in_order.append(os.waitstatus_to_exitcode(status or 0))
        return deaths

    def _watch_new_ranks(self) -> set[int]:
        """Start to watch the ranks whose marks are new; return these ranks."""
        running = exit_marks.ranks_running(self.folder, "over") | exit_marks.ranks_running(self.folder)
        new = {rank for rank, process_id in running.items() if process_id and rank not in self._watched}
        for rank in new:
            self._watched[rank] = running[rank], self._open_descriptor(running[rank])
            with contextlib.suppress(OSError):
                pipe = exit_marks.open_pipe(self.folder, rank)
                self._poll.register(pipe, select.EPOLLIN | select.EPOLLHUP)
                self._pipes[pipe] = rank
                # The pipe may be broken already. epoll reports no event for a pipe that was opened without a writer.
                if not exit_marks.is_held(pipe):
                    exit_marks.release_replaced(self.folder, rank)
        return new

    def _open_descriptor(self, process_id: int) -> int | None:
        # The process may have ended, Python or Linux may lack pidfds, or this process may be out of descriptors.
        with contextlib.suppress(OSError, AttributeError):
            descriptor = os.pidfd_open(process_id)
            self._poll.register(descriptor, select.EPOLLIN)
            return descriptor
        return None

    def _close_descriptor(self, rank: int) -> None:
        """Record that the process of ``rank`` has ended, and close its descriptor."""
        descriptor = self._watched[rank][1]
        self._watched[rank] = 0, None
        if descriptor is not None:
            self._poll.unregister(descriptor)
            os.close(descriptor)


def _status(process_id: int, descriptor: int | None) -> int | None:
    """Return the exit status of a process that has ended or is ending; None if the status is unknown."""
    if descriptor is not None:
        info = bytearray(_INFO.pack(_INFO_EXIT, *[0] * 13))
        with contextlib.suppress(OSError):  # Linux may be older than 6.15, or the process was not reaped yet.
            fcntl.ioctl(descriptor, _GET_INFO, info)
            mask, *_, status = _INFO.unpack(info)
            if mask & _INFO_EXIT:
                return int(status)
    fields = proc.status_fields(process_id)
    if fields[:1] in (["Z"], ["X"]):
        return int(fields[-1])
    # In /proc, a process that has not begun to exit shows 0, and a stopped process shows the signal that stopped it.
    return None if fields[:1] in ([], ["T"], ["t"]) else int(fields[-1]) or None
