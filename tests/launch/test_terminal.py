"""What torchmpirun shows and says: readers who pause, disks that are full. A program stands in for the MPI."""

import contextlib
import fcntl
import os
import signal
import sys
import time

import pytest
import stand_in

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("no_leftovers")]

NUM_BYTES = 1 << 18  # more than fits into a pipe
FILL = f"import sys, time; log = open(sys.argv[2], 'ab', 0); log.write(b'x' * {NUM_BYTES}); "


def start(starter, folder, seconds=100, **pipes):
    """Start a job with a time limit that shows a log; the starter writes the log argv[2]."""
    before = f"options = dict(timeout={seconds}); tail = terminal.Tail(Path({str(folder)!r}))\n"
    before += "terminal.ENDED_SECONDS = 0.3"  # of a reader who pauses
    return stand_in.start(starter, f"{folder}/rank-0.log", before=before, text=False, **pipes)


def wait_until_full(pipe):
    """Until the launcher has written what the pipe takes."""
    held, before = 0, -1
    while not held or held != before:
        time.sleep(0.3)
        before, held = held, int.from_bytes(fcntl.ioctl(pipe, 0x541B, bytes(4)), sys.byteorder)  # FIONREAD


def test_a_signal_is_heeded_while_the_reader_pauses(tmp_path):
    with start(FILL + "time.sleep(100)", tmp_path) as job:
        wait_until_full(job.stdout)
        job.send_signal(signal.SIGTERM)
        assert job.wait() == 143
        said = job.stderr.read().decode()
        assert f"not all of rank 0's output was shown; the complete output is in {tmp_path}/rank-0.log" in said


def test_the_time_limit_is_heeded_while_the_readers_of_both_pause(tmp_path):
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"x" * 4096)
    os.set_blocking(writing, True)
    with start(FILL + "time.sleep(100)", tmp_path, seconds=1, stderr=writing) as job:
        assert job.wait() == 124
    os.close(reading)
    os.close(writing)


def test_a_reader_that_goes_on_gets_all(tmp_path):
    with start(FILL + "log.write(b'end')", tmp_path) as job:
        wait_until_full(job.stdout)
        time.sleep(0.5)  # the job has ended
        assert job.poll() is None
        assert job.stdout.read() == b"x" * NUM_BYTES + b"end"
        assert (job.wait(), job.stderr.read()) == (0, b"")


SHOWS = r"""
import os, sys, time
log, folder = open(sys.argv[2], "wb", 0), os.path.dirname(sys.argv[2])
log.write(b"caf\xc3"); time.sleep(0.3); log.write(b"\xa9 \xff\n")
while not os.path.exists(f"{folder}/seen"): time.sleep(0.01)
os.truncate(sys.argv[2], 0); time.sleep(0.3)
log.write(b"on\n"); os.write(2, b"notice\n\0"); os._exit(3)
"""


def test_what_is_shown_is_text(tmp_path):
    """A log is cut while one who has it open goes on writing where it was."""
    with start(SHOWS, tmp_path) as job:
        first = job.stdout.readline()
        (tmp_path / "seen").touch()
        shown, said = job.communicate()
    assert first.decode() == "caf\N{LATIN SMALL LETTER E WITH ACUTE} \ufffd\n"
    assert (job.returncode, shown, said) == (3, b"on\n", b"notice\n")


def test_standard_output_on_a_full_disk(tmp_path):
    with open("/dev/full", "wb") as full, start(FILL, tmp_path, stdout=full) as job:
        assert b"cannot write to standard output: No space left on device; rank 0's output is in" in job.stderr.read()
        assert job.wait() == 0
