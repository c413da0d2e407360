"""What torchmpirun shows and says: readers who pause, disks that are full. A program stands in for the MPI."""

import fcntl
import os
import signal
import subprocess
import sys
import time

import pytest

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("no_leftovers")]

# Runs argv[1] as the starter of a job whose logs are in argv[2].
LAUNCHER = """
import os, sys
from pathlib import Path
from torchmpi_py.launch import job as jobs, terminal

def make(folder, attempt, begin):
    environment = os.environ | {"TORCHMPIRUN_JOB_DIR": str(folder)}
    command = [sys.executable, "-c", sys.argv[1], sys.argv[2] + "/rank-0.log"]
    return jobs.Job(command, environment, folder, begin=begin, timeout_seconds=float(sys.argv[3]))

sys.exit(jobs.run(make, 0, terminal.Tail(Path(sys.argv[2]))))
"""

NUM_BYTES = 1 << 18  # more than fits into a pipe
FILL = f"import sys, time; log = open(sys.argv[1], 'ab', 0); log.write(b'x' * {NUM_BYTES}); "


def start(starter, folder, seconds=100, **pipes):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | pipes
    return subprocess.Popen([sys.executable, "-c", LAUNCHER, starter, str(folder), str(seconds)], **pipes)


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
        assert (
            f"not all of rank 0's output was read; the rest is in {tmp_path}/rank-0.log" in job.stderr.read().decode()
        )


def test_the_time_limit_is_heeded_while_the_readers_of_both_pause(tmp_path):
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    while True:
        try:
            os.write(writing, b"x" * 4096)
        except BlockingIOError:
            break
    os.set_blocking(writing, True)
    with start(FILL + "time.sleep(100)", tmp_path, seconds=2, stderr=writing) as job:
        assert job.wait() == 124
    os.close(reading)
    os.close(writing)


def test_a_reader_that_goes_on_gets_all(tmp_path):
    with start(FILL + "log.write(b'end')", tmp_path) as job:
        wait_until_full(job.stdout)
        time.sleep(1)  # the job has ended
        assert job.poll() is None
        assert job.stdout.read() == b"x" * NUM_BYTES + b"end"
        assert (job.wait(), job.stderr.read()) == (0, b"")


def test_what_is_shown_is_text(tmp_path):
    """A log is cut while one who has it open goes on writing where it was."""
    program = (
        "import os, sys, time; log = open(sys.argv[1], 'wb', 0)\n"
        f"seen = {str(tmp_path / 'seen')!r}\n"
        "log.write(b'caf\\xc3'); time.sleep(0.3); log.write(b'\\xa9 \\xff\\n')\n"
        "while not os.path.exists(seen): time.sleep(0.01)\n"
        "os.truncate(sys.argv[1], 0); time.sleep(0.3)\n"
        "log.write(b'on\\n'); os.write(2, b'notice\\n\\0'); os._exit(3)"
    )
    with start(program, tmp_path) as job:
        first = job.stdout.readline()
        (tmp_path / "seen").touch()
        shown, said = job.communicate()
    assert first.decode() == "caf\N{LATIN SMALL LETTER E WITH ACUTE} \ufffd\n"
    assert (job.returncode, shown, said) == (3, b"on\n", b"notice\n")


def test_standard_output_on_a_full_disk(tmp_path):
    with open("/dev/full", "wb") as full, start(FILL, tmp_path, stdout=full) as job:
        assert b"cannot write to standard output: No space left on device; rank 0's output is in" in job.stderr.read()
        assert job.wait() == 0
