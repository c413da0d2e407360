"""Marks of ranks that end in the middle of their program, become another program, or leave out what runs at exit."""

import os
import select
import subprocess
import sys
import threading

import pytest
import stand_in

from torchmpi_py.launch import exit_marks, job as one_job
from torchmpi_py.launch.command import StarterCommand
from torchmpi_py.launch.hosts import Host
from torchmpi_py.launch.job_spec import JobSpec

pytestmark = pytest.mark.timeout(240)

RANK = """
import atexit, contextlib, os, sys
from torchmpi_py.launch import exit_marks
with exit_marks.running(sys.argv[1], 3):
    exec(sys.argv[2])
"""
# Another program, until torchmpirun has seen it.
WAIT = 'while [ -e "$TORCHMPIRUN_JOB_DIR/running-3" ] && [ $((i+=1)) -lt 600 ]; do sleep 0.1; done'
EXEC = f"os.execvp('sh', ['sh', '-c', {WAIT!r}])"
EXEC_FAILS = "with contextlib.suppress(OSError): os.execvp('/no/such', ['x'])\nos._exit(0)"


def test_the_pipe_is_the_first_to_break(tmp_path):
    """The starter learns of an end by another descriptor, and ends the other ranks at once: their pipes break, too."""
    os.mkfifo(tmp_path / "starter")
    text = f"os.open({str(tmp_path / 'starter')!r}, os.O_RDWR); print('here', flush=True); sys.stdin.read()"
    pipes = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", RANK, tmp_path, text], stdin=pipes, stdout=pipes) as rank:
        assert rank.stdout.readline() == b"here\n"
        found = {os.open(tmp_path / name, os.O_RDONLY | os.O_NONBLOCK): name for name in ("starter", "alive-3")}
        with select.epoll() as poll:
            for descriptor in found:
                poll.register(descriptor, select.EPOLLHUP)
            rank.kill()
            rank.wait()
            assert [found[descriptor] for descriptor, _ in poll.poll(100)] == ["alive-3", "starter"]
        for descriptor in found:
            os.close(descriptor)


def test_a_failure_follows_the_ends_that_the_rank_may_have_noticed(tmp_path, monkeypatch):
    looks = iter([True, True, False])
    monkeypatch.setattr(exit_marks.proc, "is_ending", lambda process: process == os.getpid() and next(looks))
    exit_marks.record(str(tmp_path), "running-0", os.getpid())
    exit_marks.record_failure(str(tmp_path), 1, 4)
    codes = [failure.code for failure in exit_marks.failures(tmp_path)]
    assert (next(looks, None), codes) == (None, [4])


# Runs a rank, a program and a text, as a starter that reports success, as MPICH's may.
STARTER = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[2], sys.argv[1], sys.argv[3]])"
AGAIN = (
    "if os.environ.setdefault('TIMES', '0') == '0': os.environ['TIMES'] = '1'; os.execv(sys.executable, sys.orig_argv)"
)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("if os.fork() == 0: os._exit(7)\nos.wait()", 0),
        ("if os.fork() == 0: sys.exit(0)\nos.wait(); os._exit(0)", 1),
        ("atexit.register(os._exit, 0)", 0),
        (EXEC, 0),
        (f"import time; time.sleep(0.5); {EXEC}", 0),
        (AGAIN, 0),  # under the same command line
        (f"{AGAIN}\nos._exit(0)", 1),
        (EXEC_FAILS, 1),
    ],
)
def test_what_a_rank_has_left_in_the_middle_is_no_success(no_leftovers, text, code):
    job = stand_in.run(STARTER, RANK, text, before="options = {'num_ranks': 1}")
    assert job.returncode == code, job.stderr
    assert ("rank 3 (process " in job.stderr) == (code == 1)


# Open MPI's, when it has lost a host of an elastic job: it reports success, and the ranks of this host run on.
DESERTS = """
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", *sys.argv[1:]])
while not os.path.exists(os.path.join(sys.argv[2], "running-3")): time.sleep(0.01)
"""


def of_two_hosts(num_ranks):
    return JobSpec(num_ranks=num_ranks, hosts=(Host("a"), Host("b")), elastic=True)


def test_ranks_that_the_starter_leaves_are_no_success(tmp_path, no_leftovers):
    command = [sys.executable, "-c", DESERTS, RANK, str(tmp_path), "import time; time.sleep(200)"]
    environment = os.environ | {"TORCHMPIRUN_JOB_DIR": str(tmp_path)}
    deserted = one_job.Job(StarterCommand(command, environment, {}), of_two_hosts(2), tmp_path)
    assert deserted.run() == 1
    assert "rank 3 did not reach the end of the program" in deserted.reason


def test_in_an_elastic_job_a_mark_of_another_host_tells_nothing(tmp_path, no_leftovers):
    """Where hosts share the folder: a rank there may have died, and the others have gone on without it."""
    (tmp_path / "running-2").write_text("77 another-host 0 0")
    environment = os.environ | {"TORCHMPIRUN_JOB_DIR": str(tmp_path)}
    ended = one_job.Job(StarterCommand(["true"], environment, {}), of_two_hosts(3), tmp_path)
    assert (ended.run(), ended.reason) == (0, "")


def test_output_is_waited_for_until_it_is_read(monkeypatch):
    """However late the starter comes."""
    monkeypatch.setattr(exit_marks, "_UNREAD_SECONDS", 60.0)
    monkeypatch.setattr(exit_marks, "_OUTPUT_SECONDS", 0.0)
    reading, writing = os.pipe()
    os.write(writing, b"a traceback")
    read = []
    starter = threading.Timer(0.5, lambda: read.append(os.read(reading, 100)))
    starter.start()
    exit_marks.wait_for_output((1 << 20, writing))  # the first is closed
    assert starter.finished.is_set()
    starter.join()
    assert read == [b"a traceback"]
    os.write(writing, b"more")
    os.close(reading)
    exit_marks.wait_for_output((writing,))  # nobody will read it
    os.close(writing)
