"""Detection of ranks that hang after the end of their program, and of an mpirun that hangs after the end of all ranks.

The watchdog of a rank stops in ``mpi.stop()``. Four later steps may still hang: the last part of ``mpi.stop()``,
MPI_Finalize (which waits for all ranks), the shutdown of Python, and mpirun. But a program may also work for any time
after ``mpi.stop()`` or after its last line, in a thread or in an atexit function. The other ranks then wait in
MPI_Finalize, and the work would be lost if the job were ended.

So each rank writes a mark while it waits (`exit_marks.record_stage`). The job is ended only if *every* rank waits or is
stopped by a signal, and if nothing changes until the timeout in the marks. If a rank is in its program, or on another
host where its state is unknown, torchmpirun prints one line about the waiting ranks, and the job continues. A program
that never calls ``mpi.stop()`` writes no mark and has no timeout.

After the end of all ranks, mpirun needs only the time to print their output. But mpirun also waits for processes that a
rank has started and left behind, because these processes may still write output. In that case mpirun is not ended.

The time does not count while the output of torchmpirun cannot be written, for example because a pager has paused. In
this case mpirun, or a rank that flushes its output at its end, waits for the reader.
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

# Wait this long after the timeout, because a busy host is slow, and a rank's watchdog should report first.
LATER_SECONDS = 10.0
_LOOK_SECONDS = 0.5
_MOST_NAMED = 8
_LIMIT = "TORCHMPI_DEADLINE sets the limit, 0 for no limit"


class LastWait:
    """Detector of hanging ranks, or of a hanging mpirun, at the end of a job.

    ``is_starter_alone`` is True if all ranks have ended, but mpirun hangs.
    """

    def __init__(self, lookout: Lookout, remains: Remains) -> None:
        self._lookout, self._remains = lookout, remains
        self._before, self._seconds, self._state = time.monotonic(), 0.0, object()
        self.is_starter_alone = False

    def look(self) -> str:
        """Examine the job; return the reason for ending it if its ranks hang, else ""."""
        if (passed := time.monotonic() - self._before) < _LOOK_SECONDS:
            return ""
        living, is_deserted = self._lookout.living, self._lookout.is_deserted
        stages = {
            rank: exit_marks.stage_of(self._lookout.folder, rank, process_id) for rank, process_id in living.items()
        }
        has_room = len(select.select([], [1, 2], [], 0)[1]) == 2
        # If the output cannot be written, use a new object, which differs from every earlier state.
        state = (stages, is_deserted, stages or num_written(self._remains.starter)) if has_room else object()
        # Add at most two intervals at a time. If torchmpirun was stopped together with the job, the time of the stop
        # does not count.
        before = self._seconds
        self._seconds = before + min(passed, 2 * _LOOK_SECONDS) if state == self._state else 0.0
        self._before, self._state = self._before + passed, state
        limits = [0.0] * is_deserted + [stage.seconds or inf for stage in stages.values() if stage.call]
        if not limits or not before <= max(limits) + LATER_SECONDS < self._seconds:
            return ""
        if is_deserted:
            self.is_starter_alone = not self._has_orphans()
            if self.is_starter_alone:
                say(f"all ranks ended {self._seconds:.0f} s ago, but mpirun is still running: ending mpirun")
            self._seconds = 0.0
            return ""
        return self._judge(stages, living)

    def _has_orphans(self) -> bool:
        """Return whether the job has a process whose parent is not in the job, such as a child of a rank that ended."""
        processes = self._remains.processes()
        known = {str(each) for each in (os.getpid(), *processes)}
        return not all(known.issuperset(proc.status_fields(each)[1:2]) for each in processes)

    def _judge(self, stages: dict[int, Stage], processes: dict[int, int]) -> str:
        """Return the reason for ending the job; if a rank may still be working, print a line and return ""."""
        # The ranks in the stage with the fewest ranks are the most likely cause, so list these ranks first.
        calls = [stage.call for stage in stages.values()]
        ranks = sorted(stages, key=lambda rank: (calls.count(stages[rank].call), rank))[:_MOST_NAMED]
        names = [
            f"rank {rank} (process {processes[rank]}) is in {stages[rank].call or 'the program'}" for rank in ranks
        ]
        where = f"on host {os.uname().nodename} ({len(stages)} rank{'s' * (len(stages) > 1)}): {', '.join(names)}"
        message = f"nothing has changed for {self._seconds:.0f} s after mpi.stop() {where}"
        if self._lookout.sees_all and all(stage.call and stage.ends for stage in stages.values()):
            return f"{message}; check rank {ranks[0]} for unfinished operations, such as mpi4py requests ({_LIMIT})"
        say(f"{message}; the job continues, because a rank may still be working (to limit the job, use --timeout)")
        return ""
