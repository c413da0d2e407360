"""Start a job again that failed: each attempt is a new job, with a folder of its own, and nothing left of the former.

The program goes on from its last checkpoint by itself; to it a restart is a start (TORCHMPIRUN_RESTART counts them).
What was ended from outside, by a signal or by the time limit, is not started again. The limit is for all attempts
together.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from torchmpi_py.launch.job import Job
from torchmpi_py.launch.terminal import say

MOST_FOR_ELASTIC = 3  # where the MPI has nothing for --elastic


def run(make: Callable[[Path, int, float], Job], most: int) -> int:
    """Run the job that ``make(folder, attempt, begin)`` gives, up to ``most`` times more; the last one's exit code."""
    begin = time.monotonic()
    for attempt in range(most + 1):
        with tempfile.TemporaryDirectory(prefix="torchmpirun-") as folder:
            job = make(Path(folder), attempt, begin)
            code = job.run()
        if code == 0 or job.was_ended:
            break
        if most:
            again = "; starting again" if attempt < most else ""
            say(f"attempt {attempt + 1} of {most + 1} failed ({job.reason or f'exit code {code}'}){again}")
        elif job.reason:
            say(job.reason)
    return code
