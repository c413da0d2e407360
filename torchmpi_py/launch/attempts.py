"""Attempts to run a job, which are repeated after a failure or when the job's hosts have changed.

A failed job may be started again. Each attempt is a new job with its own folder, and nothing of the earlier attempt
remains. A restart is an ordinary start of the program, which continues from its last checkpoint. TORCHMPIRUN_RESTART is
the number of restarts. A job that was ended by a signal or by the time limit is not started again. The time limit
covers all attempts together. If a script lists the hosts (`discovery`), a change of the hosts ends an attempt and
starts the next one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from torchmpi_py.launch import cleanup, terminal
from torchmpi_py.launch.cleanup import Guardian
from torchmpi_py.launch.job import TIMEOUT_CODE, Job, new_folder
from torchmpi_py.launch.signals import Signals
from torchmpi_py.launch.terminal import Tail, say

Maker = Callable[[Path, int, float], Job]
Waiter = Callable[[float, Signals], bool]


def run(make: Maker, most: int, tail: Tail, wait: Waiter = lambda begin, signals: True) -> tuple[int, list[Job]]:
    """Run a job, and restart it after a failure; return the exit code and the jobs of all attempts.

    ``make(folder, attempt, begin)`` returns the job of an attempt. ``attempt`` counts from 0, and ``begin`` is the
    monotonic time at which the first attempt started. A job is restarted after at most ``most`` failures. If an attempt
    of more than a minute is followed by an attempt on other hosts, the count of failures starts again at 0.

    ``wait(begin, signals)`` is called before each attempt. If it returns False, there is no attempt, and the exit code
    is `TIMEOUT_CODE`.

    ``tail`` copies rank 0's log to the standard output. Before returning, wait until all output has been read. After a
    signal or the time limit, wait only while the reader continues to read.
    """
    cleanup.clear_abandoned()
    with Signals() as signals:
        code, attempts = _run_attempts(make, most, signals, tail, wait)

        def is_over() -> bool:
            signals.look_at_parent()
            return bool(signals.ending) or attempts[-1].was_ended or attempts[-1].is_late

        terminal.finish(tail, is_over)
    return code, attempts


def _run_attempts(make: Maker, most: int, signals: Signals, tail: Tail, wait: Waiter) -> tuple[int, list[Job]]:
    attempts: list[Job] = []
    begin, place, num_failures = time.monotonic(), terminal.input_position(), 0
    while True:
        if attempts:
            terminal.rewind_input(place)
        is_ready, folder = wait(begin, signals), new_folder()
        with Guardian(folder.name), folder:  # The guardian must remain until the folder is removed.
            job = make(Path(folder.name), len(attempts), begin)
            if attempts and attempts[-1].has_lasted and job.spec.hosts != attempts[-1].spec.hosts:
                num_failures = 0
            attempts.append(job)
            job.signals, job.was_ended = signals, not is_ready
            code = job.run() if is_ready and not signals.ending else 0
        tail.catch_up()
        if signals.ending and (code or not job.has_run):
            return code if job.was_ended else 128 + signals.ending[0], attempts
        if not is_ready:
            return TIMEOUT_CODE, attempts
        if job.starts_again:
            continue
        if code == 0 or job.was_ended or not _goes_on(job, code, num_failures, most, signals.cause(code)):
            return code, attempts
        num_failures += 1
        if job.spec.discover:  # Give the hosts time to recover.
            signals.wait(2.0 ** min(num_failures - 1, 6))


def _goes_on(job: Job, code: int, attempt: int, most: int, signum: int) -> bool:
    """Print the reason why an attempt failed; return whether there will be another attempt.

    ``attempt`` is the number of earlier failures. ``signum`` is the forwarded signal that caused the failure, or 0.
    """
    if most:
        is_again = attempt < most and not signum
        outcome = f"; no restart: signal {signum} may announce a time limit" if signum and attempt < most else ""
        outcome = "; starting again" if is_again else outcome
        say(f"attempt {attempt + 1} of {most + 1} {job.verb} ({job.reason or f'exit code {code}'}){outcome}")
        return is_again
    if job.reason:
        say(job.reason)
    return False
