"""Which ranks died, in which order, as seen from outside: the process is gone, and its mark (see `marks`) is not.

An MPI ends the other ranks some milliseconds after the first, so a look now and then would find them all dead. Linux
tells at once: a descriptor of a process (pidfd) becomes readable when it has ended. But a large process takes
milliseconds to end, as long as the MPI takes to end the others. So each rank also holds a pipe open (see `marks`),
which breaks at the beginning of its end, and epoll keeps the order in which they do. A rank that fails writes into its
pipe, which takes its place in that order. What is said of a death follows from this order, not from the moment at which
torchmpirun looks: a rank that has ended waits here until those that began to end before it have ended too. Where there
are no pipes, the order in which the ends are seen must do.

How a process ended is known to its parent only, the MPI's starter. But until that has asked, the process is a zombie,
whose status the system shows; half of the time that can still be read. Else the exit code of the starter has to tell.
"""

import contextlib
import math
import os
import select
import time
from pathlib import Path
from typing import NamedTuple

from torchmpi_py.launch import exit_marks


class Death(NamedTuple):
    """A rank that ended in the middle of its program; ``status`` as os.waitpid gives it, None where it is not known."""

    rank: int
    process_id: int
    status: int | None = None
    began: float = math.inf  # when it was seen to begin to end, in order among the ranks; inf where that is not known
    num_left: int = 0  # ranks that had not begun to end when this one did

    @property
    def name(self) -> str:
        """The rank, in words."""
        return f"rank {self.rank} (process {self.process_id})"

    @property
    def code(self) -> int:
        """An exit code for it, which is never 0."""
        if self.status is None:
            return 1
        code = os.waitstatus_to_exitcode(self.status)
        return 128 - code if code < 0 else code or 1

    def explain(self, starter_code: int | None = None) -> str:
        """How it ended, in words; "" if it is only one of those that the MPI ended because of another."""
        if self.status is not None and not os.WIFSIGNALED(self.status):
            return f"ended in the middle of the program, with exit code {os.waitstatus_to_exitcode(self.status)}"
        if self.status is not None:
            signum = os.WTERMSIG(self.status)
            fits = starter_code is None or starter_code in (signum, 128 + signum)
            return f"was killed by signal {signum}" if fits else ""
        if starter_code is not None and starter_code > 128:
            return f"was killed by signal {starter_code - 128}"
        return "died" if starter_code in (None, *_SIGNALS) else "was the first to end, in the middle of the program"


_SIGNALS = range(1, 32)  # MPICH's starter ends with the signal's bare number
_ENDING_SECONDS = 2.0  # a rank that lives longer after its pipe broke has only closed the pipe: os.closerange, or exec


class Lookout:
    """Watches the marks of a job's ranks, and its starter; ``num_ranks`` is 0 where it is not known."""

    def __init__(self, folder: Path, starter: int, num_ranks: int = 0) -> None:
        self._folder = folder
        self._num_ranks = num_ranks
        self._poll = select.epoll()
        self._watched: dict[int, tuple[int, int | None]] = {}  # rank: process, and its descriptor if there is one
        self._pipes: dict[int, int] = {}  # descriptor: rank
        self._began: dict[int, float] = {}  # ranks that failed, or whose pipes broke, in order: when that was seen
        self._ended: dict[int, tuple[int, int | None]] = {}  # rank: process and status, until its turn comes
        self._num_ended = 0  # ranks whose turn has come
        self._starter = self._watch(starter)
        self.num_in_order = 0  # those of them that did not die

    @property
    def is_deserted(self) -> bool:
        """Whether all ranks have been here, and have ended."""
        has_process = any(process_id for process_id, _ in self._watched.values())
        return len(self._watched) == self._num_ranks > 0 and not has_process

    @property
    def is_holding(self) -> bool:
        """Whether a rank has ended whose turn has not come."""
        return bool(self._ended)

    def close(self) -> None:
        """Give the descriptors back."""
        self._poll.close()
        for descriptor in (self._starter, *self._pipes, *(descriptor for _, descriptor in self._watched.values())):
            if descriptor is not None:
                os.close(descriptor)
        self._watched, self._pipes, self._starter = {}, {}, None

    def wait(self, seconds: float) -> list[Death]:
        """Ranks that have died since the last call, in order; waits so long for one, or for the end of the starter."""
        self._look_for_marks()
        ready = self._note([descriptor for descriptor, _ in self._poll.poll(seconds)])
        late = self._look_for_marks() if ready else set()  # ranks that came, and may have died, meanwhile
        for rank, (process_id, descriptor) in self._watched.items():
            is_looked_at = descriptor is None or rank in late
            if process_id and (descriptor in ready or (is_looked_at and _is_gone(process_id))):
                self._ended[rank] = process_id, _status(process_id)
                self._forget(rank)
        return self._take_turns()

    def began(self, rank: int) -> float:
        """When this rank was seen to begin to end, or to fail; inf where that is not known."""
        return self._began.get(rank, math.inf)

    def _take_turns(self) -> list[Death]:
        """Those that have died, of the ranks that have ended and that no other may precede."""
        deaths = []
        earliest = min((self.began(rank) for rank in self._began if self._watched[rank][0]), default=math.inf)
        for rank in sorted(self._ended, key=self.began):
            if self.began(rank) > earliest:
                break
            process_id, status = self._ended.pop(rank)
            self._num_ended += 1
            if exit_marks.is_running(self._folder, rank):
                num_left = max(self._num_ranks, len(self._watched)) - self._num_ended
                deaths.append(Death(rank, process_id, status, self.began(rank), num_left))
            else:
                self.num_in_order += 1
        return deaths

    def _note(self, ready: list[int]) -> list[int]:
        """Note which ranks have begun to end, and which have not after all; the descriptors that are no pipes."""
        broken = [descriptor for descriptor in ready if descriptor in self._pipes]
        for descriptor in broken:
            self._began[self._pipes.pop(descriptor)] = time.monotonic()
            self._poll.unregister(descriptor)
            os.close(descriptor)
        limit = time.monotonic() - _ENDING_SECONDS
        lives_on = [rank for rank, began in self._began.items() if began < limit and self._watched[rank][0]]
        for rank in lives_on:
            del self._began[rank]
        return [descriptor for descriptor in ready if descriptor not in broken]

    def _look_for_marks(self) -> set[int]:
        """Watch the ranks that are new."""
        found = exit_marks.ranks_running(self._folder)
        new = {rank for rank, process_id in found.items() if process_id and rank not in self._watched}
        for rank in new:
            self._watched[rank] = found[rank], self._watch(found[rank])
            with contextlib.suppress(OSError):
                pipe = exit_marks.open_pipe(self._folder, rank)
                self._poll.register(pipe, select.EPOLLIN | select.EPOLLHUP)
                self._pipes[pipe] = rank
        return new

    def _watch(self, process_id: int) -> int | None:
        with contextlib.suppress(OSError, AttributeError):  # it is gone, the system is old, or no descriptors are left
            descriptor = os.pidfd_open(process_id)
            self._poll.register(descriptor, select.EPOLLIN)
            return descriptor
        return None

    def _forget(self, rank: int) -> None:
        """Once is enough."""
        descriptor = self._watched[rank][1]
        self._watched[rank] = 0, None
        if descriptor is not None:
            self._poll.unregister(descriptor)
            os.close(descriptor)


def _stat(process_id: int) -> list[str]:
    """The fields from the state on, see proc(5); none when the process is gone, or says nothing to this user."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    return []


def _is_gone(process_id: int) -> bool:
    return _stat(process_id)[:1] in ([], ["Z"], ["X"])


def _status(process_id: int) -> int | None:
    """How a process ended that nobody has asked for it yet."""
    fields = _stat(process_id)
    return int(fields[-1]) if fields[:1] == ["Z"] else None
