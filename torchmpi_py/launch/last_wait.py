"""The last wait of a job: of the ranks for each other after their program, and of the starter after the ranks.

The watchdog of a rank ends in ``mpi.stop()``. What follows may still hang: the last steps of ``mpi.stop()``,
MPI_Finalize, which waits for all ranks, the end of Python, and the MPI's starter. But a program may also work on as
long as it likes after ``mpi.stop()`` or its last line, in a thread or an atexit function, while the other ranks wait
for it in MPI_Finalize. So a rank leaves a mark while it waits (`exit_marks.record_stage`). The job is ended only where
*every* rank waits, or is stopped by a signal, and nothing has changed until the deadline, which is in the marks. Where
a rank is elsewhere, or on another host, which cannot be seen from here, one line says who waits for whom, and the job
goes on. A program that never calls ``mpi.stop()`` leaves no mark and has no deadline.

Once all ranks have ended, only the starter is left, and needs no more time than it takes to pass their output on. It
also waits for a process that a rank has started and left behind, because that process may write: then it is not ended.

No time counts while torchmpirun's own output cannot be written to, because a pager, say, reads no further: the starter,
or a rank that flushes its output as it ends, then waits for that.
"""

import os
import select
import time
from math import inf

from torchmpi_py.launch import exit_marks, proc
from torchmpi_py.launch.cleanup import Remains
from torchmpi_py.launch.deaths import Lookout
from torchmpi_py.launch.exit_marks import Stage
from torchmpi_py.launch.signals import num_written
from torchmpi_py.launch.terminal import say

LATER_SECONDS = 10.0  # behind the deadline: a busy host is slow, and a watchdog that still runs reports first
_LOOK_SECONDS = 0.5
_MOST_NAMED = 8
_LIMIT = "TORCHMPI_DEADLINE sets the limit, 0: none"


class LastWait:
    """Watches what keeps the job; ``is_starter_alone``: all ranks have ended, and the starter does not."""

    def __init__(self, lookout: Lookout, remains: Remains) -> None:
        self._lookout, self._remains = lookout, remains
        self._before, self._seconds, self._state = time.monotonic(), 0.0, object()
        self.is_starter_alone = False

    def look(self) -> str:
        """Look again; return why the job is to be ended, where its ranks hang, else ""."""
        if (passed := time.monotonic() - self._before) < _LOOK_SECONDS:
            return ""
        living, is_deserted = self._lookout.living, self._lookout.is_deserted
        stages = {
            rank: exit_marks.stage_of(self._lookout.folder, rank, process_id) for rank, process_id in living.items()
        }
        has_room = len(select.select([], [1, 2], [], 0)[1]) == 2
        state = (stages, is_deserted, stages or num_written(self._remains.starter)) if has_room else object()
        before = self._seconds  # a job that was stopped as a whole is not late
        self._seconds = before + min(passed, 2 * _LOOK_SECONDS) if state == self._state else 0.0
        self._before, self._state = self._before + passed, state
        limits = [0.0] * is_deserted + [stage.seconds or inf for stage in stages.values() if stage.call]
        if not limits or not before <= max(limits) + LATER_SECONDS < self._seconds:
            return ""
        if is_deserted:
            self.is_starter_alone = not self._has_orphans()
            if self.is_starter_alone:
                say(f"all ranks have ended, and the MPI's starter has not for {self._seconds:.0f} s: it is ended")
            self._seconds = 0.0
            return ""
        return self._judge(stages, living)

    def _has_orphans(self) -> bool:
        """Whether the job has a process that was started by one which is gone, such as a rank."""
        processes = self._remains.processes()
        known = {str(each) for each in (os.getpid(), *processes)}
        return not all(known.issuperset(proc.status_fields(each)[1:2]) for each in processes)

    def _judge(self, stages: dict[int, Stage], processes: dict[int, int]) -> str:
        """Return why the job is to be ended; "" where a rank may be at work, after a line that says so."""
        # The culprit is most likely where the fewest are.
        calls = [stage.call for stage in stages.values()]
        ranks = sorted(stages, key=lambda rank: (calls.count(stages[rank].call), rank))[:_MOST_NAMED]
        names = [
            f"rank {rank} (process {processes[rank]}) is in {stages[rank].call or 'the program'}" for rank in ranks
        ]
        where = f"on host {os.uname().nodename}, of {len(stages)} ranks, {', '.join(names)}"
        what = f"nothing has changed for {self._seconds:.0f} s after mpi.stop(): {where}"
        if self._lookout.sees_all and all(stage.call and stage.ends for stage in stages.values()):
            return f"{what}; see what the first one leaves open, a request of mpi4py for instance ({_LIMIT})"
        say(f"{what}; the job goes on, for a rank may be at work, in a thread or at exit (--timeout limits it)")
        return ""
