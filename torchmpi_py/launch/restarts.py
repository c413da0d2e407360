"""Start a job again that failed: each attempt is a new job, with a folder of its own, and nothing left of the former.

The program goes on from its last checkpoint by itself; to it a restart is a start (TORCHMPIRUN_RESTART counts them).
What was ended from outside, by a signal or by the time limit, is not started again. The limit is for all attempts
together. Every attempt reads the same standard input, if that is a file.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from torchmpi_py.launch import standard_input
from torchmpi_py.launch.guardian import Guardian
from torchmpi_py.launch.job import Job
from torchmpi_py.launch.signals import Signals
from torchmpi_py.launch.terminal import Tail, finish, say

MOST_FOR_ELASTIC = 3  # where the MPI has nothing for --elastic

Maker = Callable[[Path, int, float], Job]


def run(make: Maker, most: int, tail: Tail | None = None) -> int:
    """Run the job that ``make(folder, attempt, begin)`` gives, up to ``most`` times more; the last one's exit code.

    Returns when the reader of ``tail`` has all, or the job was ended from outside.
    """
    tail = tail or Tail(None)
    with Signals() as signals, Guardian() as guardian:
        job, code = _run_attempts(make, most, signals, guardian, tail)

        def is_over() -> bool:
            signals.look_at_parent()
            return bool(signals.ending) or job.was_ended or job.is_late

        finish(tail, is_over)
    return code


def _run_attempts(make: Maker, most: int, signals: Signals, guardian: Guardian, tail: Tail) -> tuple[Job, int]:
    """The last attempt, and the exit code."""
    begin, place = time.monotonic(), standard_input.position()
    for attempt in range(most + 1):
        if attempt:
            standard_input.rewind(place)
        with tempfile.TemporaryDirectory(prefix="torchmpirun-") as folder:
            job = make(Path(folder), attempt, begin)
            job.signals, job.guardian = signals, guardian
            code = 0 if signals.ending else job.run()
        tail.catch_up()
        if signals.ending and (code or not job.has_run):
            return job, code if job.was_ended else 128 + signals.ending[0]
        if code == 0 or job.was_ended:
            break
        if not _goes_on(job, code, attempt, most, signals.cause(code)):
            break
    return job, code


def _goes_on(job: Job, code: int, attempt: int, most: int, signum: int) -> bool:
    """Tell why an attempt failed, and whether there is another."""
    if most:
        is_again = attempt < most and not signum
        what = f"; not started again after signal {signum}, which was passed on" if signum and attempt < most else ""
        what = "; starting again" if is_again else what
        say(f"attempt {attempt + 1} of {most + 1} failed ({job.reason or f'exit code {code}'}){what}")
        return is_again
    if job.reason:
        say(job.reason)
    return False
