"""What all attempts to run a job have in common: standard input, and the signals that come from outside.

A program that needs no MPI stands in for the MPI's starter, and for the ranks.
"""

import os
import re
import signal

import pytest
import stand_in

from torchmpi_py.errors import LaunchError
from torchmpi_py.launch.command import StarterCommand
from torchmpi_py.launch.job import Job
from torchmpi_py.launch.job_spec import JobSpec

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("no_leftovers")]

# The command, whose options are those of the stand-in's launcher.
IN_MAIN = """
from torchmpi_py.launch import __main__ as main
main.run = lambda spec: attempts.run(make, 0, tail)[0]
sys.exit(main.main(["-m", "os"]))
"""
NO_FOLDER = "import tempfile; tempfile.tempdir = '/no/such'"
NO_STARTER = """
make_job = make
def make(*_):
    job = make_job(*_)
    job.command.words[:] = ["/etc/passwd"]
    return job
"""


@pytest.mark.parametrize(
    ("before", "said"),
    [(NO_FOLDER, "cannot create a folder for the job"), (NO_STARTER, "cannot start /etc/passwd: Permission denied")],
)
def test_what_keeps_a_job_from_its_start_is_a_line(before, said):
    job = stand_in.run("", before=f"{before}\n{IN_MAIN}")
    assert job.returncode == 2
    assert re.fullmatch(f"torchmpirun: {said}.*\n", job.stderr), job.stderr


def test_a_hostfile_that_cannot_be_written(tmp_path):
    job = Job(StarterCommand(["true"], {}, {}, hostfile="a"), JobSpec(), tmp_path / "none")
    with pytest.raises(LaunchError, match=r"hostfile: No such file .* to another"):
        job.run()


READ = "import sys; print(sys.stdin.read().strip(), flush=True); sys.exit(3)"


def test_every_attempt_reads_the_same_file_and_a_pipe_only_once(tmp_path):
    (tmp_path / "file").write_text("first\nsecond\n")
    with open(tmp_path / "file") as file:
        os.lseek(file.fileno(), 6, os.SEEK_SET)
        job = stand_in.run(READ, most=1, stdin=file)
    assert (job.returncode, job.stdout, job.stderr.count("torchmpirun: ")) == (3, "second\nsecond\n", 2)
    told = re.findall(r"attempt (\d) of 2 failed \((.*)\)(.*)", job.stderr)
    assert told == [("1", "exit code 3", "; starting again"), ("2", "exit code 3", "")]
    job = stand_in.run(READ, most=1, input="first")
    assert (job.returncode, job.stdout) == (3, "first\n\n")
    assert "standard input is a pipe" in job.stderr


DIE_OF_IT = "import os, signal, time; os.kill(os.getppid(), signal.SIGUSR1); time.sleep(50)"
ANSWER_IT = f"import signal; signal.signal(signal.SIGUSR1, lambda *_: exit(5)); {DIE_OF_IT}"
LIVE_ON = """
import os, signal, time
heard = []
signal.signal(signal.SIGUSR1, lambda *_: heard.append(print('asked')))
os.kill(os.getppid(), signal.SIGUSR1)
while not heard:
    time.sleep(0.01)
time.sleep(0.3)
exit(5)
"""


@pytest.mark.parametrize(("starter", "code"), [(DIE_OF_IT, 138), (ANSWER_IT, 5)])
def test_a_signal_passed_on_that_ends_the_job_ends_it_for_good(starter, code):
    job = stand_in.run(starter, most=2)
    assert job.returncode == code
    told = re.findall(r"attempt . of 3 failed \(exit code \d+\)(.*)", job.stderr)
    assert told == ["; no restart: signal 10 may announce a time limit"]


def test_a_failure_long_after_a_signal_that_was_passed_on_is_like_any_other():
    job = stand_in.run(LIVE_ON, most=1, before="signals.SOON_SECONDS = 0.0")
    assert (job.returncode, job.stdout) == (5, "asked\n" * 2)
    assert "starting again" in job.stderr


@pytest.mark.parametrize(
    "moment",
    [
        "cleanup.remove_session_folder = hear",  # after an attempt
        "get = terminal.starter_input; terminal.starter_input = lambda: hear() or get()",
        "make = lambda *_, make=make: hear() or make(*_)",
    ],
)
def test_a_signal_beside_the_jobs(moment):
    job = stand_in.run("exit(1)", most=1, before=moment)
    assert (job.returncode, job.stderr) == (128 + signal.SIGTERM, "")


def test_a_signal_that_was_ignored_before_stays_ignored():
    starter = "import os, time; os.kill(os.getppid(), 1); time.sleep(0.3); print('on')"
    as_nohup_does = {"preexec_fn": lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)}
    job = stand_in.run(starter, most=1, **as_nohup_does)
    assert (job.returncode, job.stdout, job.stderr) == (0, "on\n", "")


def test_the_time_limit_is_for_all_attempts():
    before = """
import time
options, make_one, clock = dict(timeout=200), make, time.monotonic
def make(folder, attempt, begin):
    time.monotonic = lambda: clock() + 300 * attempt  # as if the first attempt had taken 300 s
    return make_one(folder, attempt, begin)
"""
    starter = "import os, time; os.environ['TORCHMPIRUN_RESTART'] == '0' and exit(3); time.sleep(100)"
    job = stand_in.run(starter, most=99, before=before)
    assert job.returncode == 124
    assert job.stderr.count("exceeded its time limit of 200 s (--timeout)") == 1
    assert "attempt 1 of 100 failed" in job.stderr


# Each rank waits for what it is to do. The launcher is stopped until all that is to happen has: it sees all at once.
STEPS = """
import os, signal, sys, time
from torchmpi_py.launch import exit_marks
exit_marks.has_met = lambda: True
folder, launcher, steps = os.environ["TORCHMPIRUN_JOB_DIR"], os.getppid(), {steps!r}
texts = dict(die="os.kill(os.getpid(), 9)", leave="sys.exit(0)",
             fail="exit_marks.record_failure(folder, rank, 4); time.sleep(0.5); os._exit(4)")
signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, 9))
def pipes_of_launcher():
    for name in os.listdir(f"/proc/{{launcher}}/fd"):
        try:
            yield "/alive-" in os.readlink(f"/proc/{{launcher}}/fd/{{name}}")
        except FileNotFoundError:
            continue
def is_stopped():
    with open(f"/proc/{{launcher}}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] == "T"
children, ends = [], []
for rank in range(len(steps)):
    source, end = os.pipe()
    ends.append(end)
    children.append(os.fork())
    if children[-1] == 0:
        with exit_marks.running(folder, rank):
            exec(texts[os.read(source, 100).decode()])
        sys.exit(0)
while sum(pipes_of_launcher()) < len(steps):
    time.sleep(0.01)
os.kill(launcher, signal.SIGSTOP)
while not is_stopped():
    time.sleep(0.01)
for rank, what in steps:
    if what == "stay":
        break
    os.write(ends[rank], what.encode())
    while what == "fail" and not os.path.exists(f"{{folder}}/failed-{{rank}}"):
        time.sleep(0.01)
    if what != "fail":
        os.waitid(os.P_PID, children[rank], os.WEXITED | os.WNOWAIT)
os.kill(launcher, signal.SIGCONT)
time.sleep({seconds})
sys.exit({code})
"""
ON = "; the other ranks continue"
NOT_ELASTIC = {"elastic": False}


def play(steps, options, seconds, code=0, before=""):
    """What is done by ranks that play these steps; the starter stays for some seconds more, and ends with the code."""
    chosen = [(int(step.split()[0]), step.split()[1]) for step in steps]
    options = {"elastic": True, "num_ranks": len(steps), **options}
    starter = STEPS.format(steps=chosen, seconds=seconds, code=code)
    return stand_in.run(starter, before=f"options = {options}\n{before}")


@pytest.mark.parametrize("system", ["", "del os.pidfd_open"], ids=["today's", "old"])
def test_who_is_ended_by_the_launcher_has_not_died(system):
    before = (
        "from dataclasses import replace\nrecord = jobs.Job.record_deaths\n"
        "late = lambda job: setattr(job, 'spec', replace(job.spec, timeout=0.1))\n"
        "jobs.Job.record_deaths = lambda job, deaths: record(job, deaths) or late(job)\n"
    )
    job = play(["1 die", "0 stay"], {"timeout": 40}, 50, before=before + system)
    assert (job.returncode, job.stderr.count("rank 0"), job.stderr.count("rank 1")) == (124, 0, 1), job.stderr


@pytest.mark.parametrize(("last", "code"), [("leave", 0), ("die", 137), ("fail", 4)])
def test_an_elastic_job_that_all_ranks_have_left_ends(last, code):
    """Its starter would stay."""
    job = play(["1 die", f"0 {last}"], {}, 50, before="jobs.FAILURE_GRACE_SECONDS = 0.7; last_wait.LATER_SECONDS = 0.5")
    assert job.returncode == code, job.stderr
    first = r"torchmpirun: rank 1 \(process \d+\) was killed by signal 9"
    assert re.match(first + f"{ON}\n", job.stderr)
    second = r"torchmpirun: rank 0 \(process \d+\) was killed by signal 9\n.*ending mpirun\n"
    is_told = bool(re.search(rf"{second}{first}; rank 0 .*signal 9\n", job.stderr))
    assert is_told == (code == 137), job.stderr


@pytest.mark.parametrize(
    ("options", "steps", "seconds", "said"),
    [
        ({}, ["1 die", "3 leave", "0 die", "2 die"], 0, ["1 dies" + ON, "0 dies" + ON, "2 dies"]),
        ({}, ["1 die", "3 leave", "0 die", "2 die"], 0.3, ["1 dies" + ON, "0 dies" + ON, "2 dies"]),
        ({}, ["1 die", "0 leave", "2 leave"], 0, ["1 dies" + ON]),
        ({}, ["0 leave", "2 leave", "1 die"], 0.3, ["1 dies"]),
        ({"num_ranks": 3}, ["1 die", "0 die"], 0, ["1 dies" + ON, "0 dies" + ON]),  # one is on another host
        ({}, ["1 die", "0 fail"], 0.3, ["1 dies" + ON, "1 dies; rank 0 failed after that, with exit code 4"]),
        ({}, ["0 fail", "1 die"], 0, ["0 failed first, with exit code 4"]),
        (NOT_ELASTIC, ["1 die", "0 die"], 0.3, ["1 dies"]),
        (NOT_ELASTIC, ["1 die", "0 fail"], 0, ["1 dies"]),
        (NOT_ELASTIC, ["1 die", "0 fail"], 0.3, ["1 dies"]),
        (NOT_ELASTIC, ["0 fail", "1 die"], 0, ["0 failed first, with exit code 4"]),
        (NOT_ELASTIC, ["0 fail", "1 die"], 0.3, ["0 failed first, with exit code 4"]),
    ],
)
def test_what_is_said_of_a_death_is_what_happened_then(options, steps, seconds, said):
    """Also if the launcher looks when all is over: the ranks, or the starter too."""
    job = play(steps, options, seconds, code=137 * (options == NOT_ELASTIC))
    lines = [f"torchmpirun: rank {line}\n" for line in said]
    # Of a process that is gone when the launcher looks an elastic job knows no more than that it has ended.
    dies = "was killed by signal 9" if options == NOT_ELASTIC else "(was killed by signal 9|died)"
    seen = re.sub(rf"(rank \d) \(process \d+\) {dies}", r"\1 dies", job.stderr)
    assert seen == "".join(lines), job.stderr


def test_a_death_is_told_also_where_a_rank_that_noticed_it_ended_the_job_first():
    job = play(["1 die", "0 fail"], NOT_ELASTIC, 0.3, code=4)
    found = r"torchmpirun: rank 1 \(process \d+\) was killed by signal 9\n"
    assert re.fullmatch(found, job.stderr), job.stderr
