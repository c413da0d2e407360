"""What all attempts to run a job have in common: standard input, and the signals that come from outside.

A program that needs no MPI stands in for the MPI's starter, and for the ranks.
"""

import os
import re
import signal
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("no_leftovers")]

# Runs argv[1] at most argv[2] times more when it fails; argv[3] is done in the launcher itself before.
LAUNCHER = """
import os, signal, sys
from torchmpi_py.launch import job as jobs, leftovers, restarts

def make(folder, attempt, begin):
    environment = os.environ | {"TORCHMPIRUN_JOB_DIR": str(folder), "TORCHMPIRUN_RESTART": str(attempt)}
    command = [sys.executable, "-c", sys.argv[1]]
    return jobs.Job(command, environment, folder, begin=begin, attempt=attempt, **options)

def hear(*_):
    os.kill(os.getpid(), signal.SIGTERM)

options = {}
exec(sys.argv[3])
sys.exit(restarts.run(make, int(sys.argv[2])))
"""


def launch(starter, most=1, before="", **keywords):
    arguments = [sys.executable, "-c", LAUNCHER, starter, str(most), before]
    return subprocess.run(arguments, capture_output=True, text=True, timeout=50, check=False, **keywords)


READ = "import sys; print(sys.stdin.read().strip(), flush=True); sys.exit(3)"


def test_every_attempt_reads_the_same_file(tmp_path):
    (tmp_path / "file").write_text("first\nsecond\n")
    with open(tmp_path / "file") as file:
        os.lseek(file.fileno(), 6, os.SEEK_SET)
        job = launch(READ, stdin=file)
    assert (job.returncode, job.stdout, job.stderr.count("torchmpirun: ")) == (3, "second\nsecond\n", 2)


def test_of_a_pipe_another_attempt_gets_nothing():
    job = launch(READ, input="first")
    assert (job.returncode, job.stdout) == (3, "first\n\n")
    assert "standard input is a pipe, which can be read only once: further attempts get none" in job.stderr


DIE_OF_IT = "import os, signal, time; os.kill(os.getppid(), signal.SIGUSR1); time.sleep(50)"
ANSWER_IT = f"import signal; signal.signal(signal.SIGUSR1, lambda *_: exit(5)); {DIE_OF_IT}"
LIVE_ON = f"import signal; signal.signal(signal.SIGUSR1, lambda *_: print('asked')); {DIE_OF_IT[:-3]}0.5); exit(5)"


@pytest.mark.parametrize(("starter", "code"), [(DIE_OF_IT, 138), (ANSWER_IT, 5)])
def test_a_signal_passed_on_that_ends_the_job_ends_it_for_good(starter, code):
    job = launch(starter, most=2)
    assert job.returncode == code
    assert re.findall(r"attempt . of 3 failed \(exit code \d+\)(.*)", job.stderr) == [
        "; not started again after signal 10, which was passed on"
    ]


def test_a_failure_long_after_a_signal_that_was_passed_on_is_like_any_other():
    job = launch(LIVE_ON, before="from torchmpi_py.launch import signals; signals._SOON_SECONDS = 0.1")
    assert (job.returncode, job.stdout) == (5, "asked\n" * 2)
    assert "starting again" in job.stderr


@pytest.mark.parametrize(
    "moment",
    [
        "leftovers.remove_session_folders = hear",  # after an attempt
        "tail = jobs.Tail; jobs.Tail = lambda *_: hear() or tail(*_)",
        "make = lambda *_, make=make: hear() or make(*_)",
    ],
)
def test_a_signal_beside_the_jobs(moment):
    job = launch("exit(1)", before=moment)
    assert (job.returncode, job.stderr) == (128 + signal.SIGTERM, "")


def test_a_signal_that_was_ignored_before_stays_ignored():
    def as_nohup_does():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    starter = "import os, time; os.kill(os.getppid(), 1); time.sleep(0.3); print('on')"
    job = launch(starter, preexec_fn=as_nohup_does)
    assert (job.returncode, job.stdout, job.stderr) == (0, "on\n", "")


def test_the_time_limit_is_for_all_attempts():
    job = launch("import time; time.sleep(0.5); exit(3)", most=99, before="options = dict(timeout_seconds=1.5)")
    assert job.returncode == 124
    assert job.stderr.count("passed its limit of 1.5 s (--timeout)") == 1
    assert "attempt 1 of 100 failed" in job.stderr


def test_who_is_ended_by_the_launcher_has_not_died():
    before = "options = dict(elastic=True, num_ranks=2, timeout_seconds=1.0)"
    hands_on = "import signal; signal.signal(15, lambda *_: os.killpg(0, 9)); time.sleep(50)\n"
    starter = DESERTED.format(last="time.sleep(50)").replace("time.sleep(50)\n", hands_on)
    job = launch(starter, most=0, before=before)
    assert (job.returncode, job.stderr.count("rank 0"), job.stderr.count("rank 1")) == (124, 0, 1), job.stderr


# Rank 1 dies; rank 0 does what is said; this one, the starter, stays for ever.
DESERTED = """
import os, sys, time
from torchmpi_py.launch import marks
for rank, last in enumerate(({last!r}, "os.kill(os.getpid(), 9)")):
    if os.fork() == 0:
        with marks.running(os.environ["TORCHMPIRUN_JOB_DIR"], rank):
            time.sleep(0.3)
            exec(last)
        sys.exit(0)
time.sleep(50)
"""


@pytest.mark.parametrize(
    ("last", "code"),
    [("time.sleep(0.3)", 0), ("time.sleep(0.3); os.kill(os.getpid(), 9)", 137), ("raise SystemExit(4)", 4)],
)
def test_an_elastic_job_that_all_ranks_have_left_ends(last, code):
    if code == 4:
        last = f"marks.record_failure(os.environ['TORCHMPIRUN_JOB_DIR'], 0, 4); {last}"
    before = "options = dict(elastic=True, num_ranks=2); jobs.DESERTED_SECONDS = 0.5"
    job = launch(DESERTED.format(last=last), most=0, before=before)
    assert job.returncode == code, job.stderr
    if code != 4:
        first = r"torchmpirun: rank 1 \(process \d+\) was killed by signal 9"
        assert re.match(first + "; the others go on\n", job.stderr)
        last_one = rf"torchmpirun: rank 0 \(process \d+\) was killed by signal 9\n{first}; rank 0 .*signal 9\n"
        assert bool(re.search(last_one, job.stderr)) == (code == 137), job.stderr
