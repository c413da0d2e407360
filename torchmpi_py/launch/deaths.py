"""Which ranks died, in which order, as torchmpirun sees it: the process is gone, and its mark is not (`exit_marks`).

An MPI ends the other ranks some milliseconds after the first death, so a look now and then would find all of them dead.
Linux reports an end at once: a descriptor of a process (pidfd) becomes readable. But a large process takes milliseconds
to end, as long as the MPI takes to end the others. So each rank also holds a pipe, which breaks when the rank begins to
end, before the connection does by which the MPI's starter learns of the end (`exit_marks`), and epoll keeps the order
of these breaks. A rank that fails writes into its pipe, which takes its place in the same order. What is said of a
death follows from this order, not from the moment at which torchmpirun looks: a rank that has ended is kept here until
all that began to end before it have ended too. Where there are no pipes, the order in which the ends are seen must do.
Ranks that have all died before the first look at them are all named.

A pipe also breaks when the rank becomes another program (exec). Then the process lives on with another command line,
and its mark is removed: the end of that program is the MPI's affair. A program that ends within milliseconds may be
gone before the look; then it counts as a rank that did not reach its end.

How a process ended is known to its parent, the MPI's starter. Linux 6.15 tells it to the holder of a descriptor of the
process, too. On an older Linux it is read from the process as soon as its pipe breaks, and again when the process is a
zombie; a starter that reaps the process before that leaves no more than its own exit code.
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

_GET_INFO = 0xC040FF0B  # PIDFD_GET_INFO of linux/pidfd.h, and the bit that asks how the process ended
_INFO_EXIT = 1 << 3
_INFO = struct.Struct("=QQ11Ii")  # mask and cgroup; process, thread group, parent and eight user ids; status
BY_STARTER = (None, signal.SIGKILL, signal.SIGTERM)  # statuses of ranks that a starter may have ended
ENDING_SECONDS = 2.0  # a rank that lives longer after its pipe broke has only closed it, by os.closerange for instance


class Death(NamedTuple):
    """A rank that ended in the middle of its program; ``status`` as os.waitpid gives it, None where it is not known."""

    rank: int
    process_id: int
    status: int | None = None
    began: float = math.inf  # when it was seen to begin to end, in order among the ranks; inf where that is not known
    num_left: int = 0  # ranks that had not begun to end when this one did

    @property
    def name(self) -> str:
        """The rank and its process, for a message."""
        return f"rank {self.rank} (process {self.process_id})"

    def code(self, starter_code: int = 1) -> int:
        """An exit code for the death, never 0; ``starter_code`` where the status of the process is not known."""
        if self.status is None:
            return starter_code or 1
        code = os.waitstatus_to_exitcode(self.status)
        return 128 - code if code < 0 else code or 1

    def explain(self, starter_code: int = 1) -> str:
        """The end of the rank, for a message."""
        if self.status is not None and not os.WIFSIGNALED(self.status):
            return f"ended in the middle of the program, with exit code {os.waitstatus_to_exitcode(self.status)}"
        if self.status is not None or 128 < starter_code < 128 + signal.NSIG:  # Intel MPI's code is always 255
            return f"was killed by signal {self.code(starter_code) - 128}"
        return "died"


def are_by_starter(deaths: list[Death], code: int, killed_code: int) -> bool:
    """Whether the starter has ended the ranks that died here because of another one, as its exit code shows.

    All starters do where a rank of another host has died. MPICH's and Intel MPI's also kill the caller of MPI_Abort.
    A code of 255 says no more than that something went wrong, a connection of MPICH's starter for instance.
    """
    is_other = code not in (0, 255, killed_code, *(death.code() for death in deaths))
    return bool(deaths) and is_other and all(death.status in BY_STARTER[1:] for death in deaths)


class Lookout:
    """Watches the ranks of a job on this host, and its starter; ``num_ranks`` is 0 where it is not known."""

    def __init__(self, folder: Path, starter: int, num_ranks: int = 0) -> None:
        self.folder = folder
        self._num_ranks = num_ranks
        self._poll = select.epoll()
        self._watched: dict[int, tuple[int, int | None]] = {}  # rank: process, and its descriptor if there is one
        self._pipes: dict[int, int] = {}  # descriptor: rank
        self._statuses: dict[int, int | None] = {}  # rank: status, as its pipe broke
        self._began: dict[int, float] = {}  # ranks that failed, or whose pipes broke, in order: when that was seen
        self._ended: dict[int, tuple[int, int | None]] = {}  # rank: process and status, until its turn comes
        self._num_ended = 0  # ranks whose turn has come
        self._starter = self._open_descriptor(starter)
        self.codes_in_order: list[int] = []  # exit codes of those of them that did not die

    @property
    def is_deserted(self) -> bool:
        """Whether all ranks have been here, and have ended."""
        return len(self._watched) == self._num_ranks > 0 and not self.living

    @property
    def living(self) -> dict[int, int]:
        """The processes of the ranks that have not ended."""
        return {rank: process_id for rank, (process_id, _) in self._watched.items() if process_id}

    @property
    def sees_all(self) -> bool:
        """Whether all ranks of the job have been on this host."""
        return len(self._watched) >= self._num_ranks

    def has(self, rank: int) -> bool:
        """Whether this rank has been on this host."""
        return rank in self._watched

    @property
    def is_holding(self) -> bool:
        """Whether a rank has begun to end that is still there, or has ended and its turn has not come."""
        return bool(self._ended) or any(self._watched[rank][0] for rank in self._began)

    def close(self) -> None:
        """Give the descriptors back."""
        self._poll.close()
        for descriptor in (self._starter, *self._pipes, *(descriptor for _, descriptor in self._watched.values())):
            if descriptor is not None:
                os.close(descriptor)
        self._watched, self._pipes, self._starter = {}, {}, None

    def wait(self, seconds: float) -> list[Death]:
        """Ranks that have died since the last call, in order. Waits ``seconds`` for a death or the starter's end."""
        self._watch_new_ranks()
        # The pipes first: what has broken them is the order of the ends.
        ready = self._record_beginnings([descriptor for descriptor, _ in self._poll.poll(seconds)])
        late = self._watch_new_ranks() if ready else set()  # ranks that came, and may have died, meanwhile
        # Then the processes: by their descriptors, and by a look at those that have none, or came just now.
        for rank, (process_id, descriptor) in self._watched.items():
            is_looked_at = descriptor is None or rank in late
            if process_id and (descriptor in ready or (is_looked_at and proc.is_gone(process_id))):
                status = _status(process_id, descriptor)
                self._ended[rank] = process_id, self._statuses.get(rank) if status is None else status
                self._close_descriptor(rank)
        self._drop_survivors()
        return self._deaths_in_turn()

    def began(self, rank: int) -> float:
        """The time at which this rank was seen to begin to end, or to fail; inf where the time is not known."""
        return self._began.get(rank, math.inf)

    def _record_beginnings(self, ready: list[int]) -> list[int]:
        """Record which ranks have begun to end, in order; return the descriptors that are no pipes."""
        broken = [descriptor for descriptor in ready if descriptor in self._pipes]
        for descriptor in broken:
            rank = self._pipes.pop(descriptor)
            self._began[rank], self._statuses[rank] = time.monotonic(), _status(*self._watched[rank])
            self._poll.unregister(descriptor)
            os.close(descriptor)
        return [descriptor for descriptor in ready if descriptor not in broken]

    def _drop_survivors(self) -> None:
        """Forget the beginnings of ranks that live on: as another program, or without their pipe."""
        limit = time.monotonic() - ENDING_SECONDS
        begun = [(rank, began) for rank, began in self._began.items() if self._watched[rank][0]]
        for rank, began in begun:
            if exit_marks.release_replaced(self.folder, rank) or began < limit:
                del self._began[rank]

    def _deaths_in_turn(self) -> list[Death]:
        """Ranks that have ended and died, in order, as far as no other rank may precede them."""
        deaths = []
        # A rank that has begun to end, and whose process is still there, holds back all that began after it.
        earliest = min((self.began(rank) for rank in self._began if self._watched[rank][0]), default=math.inf)
        for rank in sorted(self._ended, key=self.began):
            if self.began(rank) > earliest:
                break
            process_id, status = self._ended.pop(rank)
            self._num_ended += 1
            # A program that has returned may call os._exit(0) at exit. A status that was not read counts as 0 then:
            # the starter reports any other.
            is_in_order = status in (0, None) and exit_marks.is_left(self.folder, f"through-{rank}")
            # A signal may end a rank in MPI_Finalize, when its mark is gone.
            is_killed = status is not None and os.WIFSIGNALED(status)
            if is_killed or (exit_marks.is_left(self.folder, f"running-{rank}") and not is_in_order):
                num_left = max(self._num_ranks, len(self._watched)) - self._num_ended
                deaths.append(Death(rank, process_id, status, self.began(rank), num_left))
            else:
                self.codes_in_order.append(os.waitstatus_to_exitcode(status or 0))
        return deaths

    def _watch_new_ranks(self) -> set[int]:
        """Watch the ranks whose marks are new, and return them."""
        found = exit_marks.ranks_running(self.folder, "over") | exit_marks.ranks_running(self.folder)
        new = {rank for rank, process_id in found.items() if process_id and rank not in self._watched}
        for rank in new:
            self._watched[rank] = found[rank], self._open_descriptor(found[rank])
            with contextlib.suppress(OSError):
                pipe = exit_marks.open_pipe(self.folder, rank)
                self._poll.register(pipe, select.EPOLLIN | select.EPOLLHUP)
                self._pipes[pipe] = rank
                if not exit_marks.is_held(pipe):  # it broke before, and epoll does not report that
                    exit_marks.release_replaced(self.folder, rank)
        return new

    def _open_descriptor(self, process_id: int) -> int | None:
        with contextlib.suppress(OSError, AttributeError):  # it is gone, the system is old, or no descriptors are left
            descriptor = os.pidfd_open(process_id)
            self._poll.register(descriptor, select.EPOLLIN)
            return descriptor
        return None

    def _close_descriptor(self, rank: int) -> None:
        """Watch a process that has ended no longer."""
        descriptor = self._watched[rank][1]
        self._watched[rank] = 0, None
        if descriptor is not None:
            self._poll.unregister(descriptor)
            os.close(descriptor)


def _status(process_id: int, descriptor: int | None) -> int | None:
    """Status of a process that has ended, or is about to; None where the status is not known."""
    if descriptor is not None:
        info = bytearray(_INFO.pack(_INFO_EXIT, *[0] * 13))
        with contextlib.suppress(OSError):  # the system is older, or nothing has reaped the process
            fcntl.ioctl(descriptor, _GET_INFO, info)
            mask, *_, status = _INFO.unpack(info)
            if mask & _INFO_EXIT:
                return int(status)
    fields = proc.status_fields(process_id)
    if fields[:1] in (["Z"], ["X"]):
        return int(fields[-1])
    # 0 may be the status of a process that lives; that of a stopped process is the signal that stopped it.
    return None if fields[:1] in ([], ["T"], ["t"]) else int(fields[-1]) or None
