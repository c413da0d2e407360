"""A job that is asked to end: what its ranks get, how long they have, and what is left when torchmpirun is killed."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import stand_in
from mpi_ranks import START
from support import jobs

from torchmpi_py.launch import signals

pytestmark = pytest.mark.timeout(240)

# Each rank does what argv[1] says, and says in a file of the folder argv[2] what it has saved.
PROGRAM = f"""
{START}
asked = []
def up():
    world.Barrier()
    if rank == 0:
        print("up", flush=True)
def save():
    open(f"{{sys.argv[2]}}/saved-{{rank}}", "w").close()
def wait_for(other):
    while not os.path.exists(f"{{sys.argv[2]}}/saved-{{other}}"):
        time.sleep(0.01)
def heed():
    signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
def wait():
    while not asked:
        time.sleep(0.01)
exec(sys.argv[1])
"""

# Ranks end one after another, each in another way; none may take the time from the next.
ONE_BY_ONE = """
heed(); up(); wait()
if rank > 0:
    wait_for(rank - 1)
time.sleep(0.3)
save()
sys.exit((0, 3, "the end")[rank])
"""

FINALLY = """
try:
    up()
    time.sleep(100)
except KeyboardInterrupt:
    if rank == 1:
        wait_for(0)
    raise
finally:
    save()
    if rank == 0:
        wait_for(1)
        time.sleep(1.5)
    open(f"{sys.argv[2]}/through-{rank}", "w").close()
"""

RANK_0_ALONE = """
if rank == 0:
    heed()
up()
if rank == 0:
    wait()
    time.sleep(0.5)
    save()
    sys.exit(0)
world.Barrier()
"""

IN_C = """
up()
if rank == 0:
    time.sleep(100)
world.Barrier()
"""

# The signal comes when the main thread of each rank is in the last line.
DEADLOCK = """
import threading
main, last_line = sys._getframe(), len(sys.argv[1].splitlines())
def say_that_all_wait():
    while main.f_lineno < last_line:
        time.sleep(0.01)
    save()
    if rank == 0:
        wait_for(1)
        print("up", flush=True)
world.Barrier()
threading.Thread(target=say_that_all_wait, daemon=True).start()
world.recv(source=world.size - 1 - rank)
"""

NEVER = """
heed(); up(); wait(); save()
while True:
    time.sleep(1)
"""


def ended(job, *signums, before_next=lambda: None):
    """The exit code, and what was said, of a job that gets these signals when it is up."""
    with job:
        assert job.stdout.readline() == "up\n"
        for number, signum in enumerate(signums):
            if number:
                before_next()
            job.send_signal(signum)
        _, said = job.communicate(timeout=200)
    return job.returncode, said


@pytest.fixture
def start(program, tmp_path, no_leftovers):
    """Start ``PROGRAM`` on some ranks, with a time to end, and with what they do."""
    path = program(PROGRAM)
    return lambda size, grace, text: jobs.start(*jobs.TORCHMPIRUN, "-n", size, "--grace", grace, path, text, tmp_path)


def saved(folder, what="saved"):
    return sorted(path.name for path in folder.glob(f"{what}-*"))


@jobs.needs_mpi
def test_each_rank_has_its_time_whatever_the_others_do(start, tmp_path):
    code, said = ended(start(3, 80, ONE_BY_ONE), signal.SIGTERM)
    assert (code, saved(tmp_path)) == (143, ["saved-0", "saved-1", "saved-2"]), said
    passed_on = [line for line in said.splitlines() if "signal 15 was passed to the ranks; they have" in line]
    assert said.splitlines() in (["the end"], ["the end", *passed_on], [*passed_on, "the end"])


@jobs.needs_mpi
def test_a_rank_in_finally_keeps_its_time_at_ctrl_c(start, tmp_path):
    code, said = ended(start(2, 80, FINALLY), signal.SIGINT)
    assert (code, saved(tmp_path, "through")) == (130, ["through-0", "through-1"]), said
    assert "Traceback" not in said


@jobs.needs_mpi
@pytest.mark.parametrize(
    ("text", "signum", "who"), [(RANK_0_ALONE, signal.SIGHUP, ["saved-0"]), (IN_C, signal.SIGINT, [])]
)
def test_ranks_that_do_not_heed_it_are_not_waited_for(start, tmp_path, text, signum, who):
    code, said = ended(start(3, 1000, text), signum)
    assert (code, saved(tmp_path)) == (128 + signum, who), said


@jobs.needs_mpi
def test_ctrl_c_at_ranks_that_all_wait_in_mpi(start):
    code, said = ended(start(2, 1000, DEADLOCK), signal.SIGINT)
    assert code == 130
    assert said.endswith("torchmpirun: killed all ranks: no rank reacted to Ctrl-C (probably waiting in MPI)\n")


@jobs.needs_mpi
@pytest.mark.parametrize("grace", [0.5, 1000])
def test_the_grace_ends_and_a_second_signal_ends_it_at_once(start, tmp_path, grace):
    def have_all_heard():
        jobs.until(lambda: len(saved(tmp_path)) == 2)
        time.sleep(1.2 * signals.SAME_SECONDS)

    code, said = ended(start(2, grace, NEVER), *[signal.SIGTERM] * (1 + (grace > 1)), before_next=have_all_heard)
    assert code == 143
    assert ("torchmpirun: killed ranks 0, 1: still running 0.5 s after signal 15 (--grace)\n" in said) == (grace < 1)
    assert ("killed rank" in said) == (grace < 1)


def kill(launcher, with_guardian):
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    (guardian,) = (int(each) for each in children if "guardian.py" in Path(f"/proc/{each}/cmdline").read_text())
    if with_guardian:
        os.kill(guardian, signal.SIGKILL)
    launcher.kill()
    launcher.communicate(timeout=200)  # all who write there have ended, or close it


@jobs.needs_mpi
def test_a_launcher_that_is_killed_leaves_nothing(start, program, tmp_path):
    """If its guardian is killed too, the next launcher clears up."""
    with start(2, 0, "heed(); up(); time.sleep(100)") as alone, start(2, 0, "up(); time.sleep(100)") as with_guardian:
        for launcher in (alone, with_guardian):
            assert launcher.stdout.readline() == "up\n"
        assert len(os.listdir(os.environ["TMPDIR"])) >= 2
        assert len(saved(tmp_path, "held")) == 4
        time.sleep(6)  # the launcher looks every five seconds at the latest
        kill(alone, False)
        kill(with_guardian, True)
    assert len(os.listdir(os.environ["TMPDIR"])) >= 1
    job = jobs.torchmpirun("-n", 1, program("print('next')"))
    assert (job.stdout, job.stderr) == ("next\n", "")


# A starter that ends only when it is ended, and has a child that survives that.
STAYS = "import subprocess, time; subprocess.Popen(['sleep', '200']); print('up', flush=True); time.sleep(200)"


@pytest.mark.parametrize("who", ["launcher", "parent"])
def test_a_job_ends_with_its_launcher_and_the_launcher_with_its_parent(no_leftovers, who):
    parent = [sys.executable, "-c", "import subprocess, sys; subprocess.run(sys.argv[1:])"]
    with jobs.start(*parent * (who == "parent"), *stand_in.command(STAYS, most=3)) as job:
        assert job.stdout.readline() == "up\n"
        job.kill()
        _, said = job.communicate(timeout=200)
    assert said == ("" if who == "launcher" else f"torchmpirun: {signals.PARENT_ENDED}\n")


BEGIN = """import sys, time
from pathlib import Path
from torchmpi_py.launch import __main__ as main, group_jobs, job_spec, timeline_file
"""
WITH_GROUPS = """
group_jobs._GroupJob = lambda *_: None
group_jobs._wait = lambda *_: print("up", flush=True) or time.sleep(200)
main.main(["-n", "1", "--groups", "1", "-m", "os"])
"""
WITH_TIMELINE = """
with timeline_file.kept(job_spec.JobSpec(timeline=Path(sys.argv[1]))):
    print("up", flush=True)
    time.sleep(200)
"""


@pytest.mark.parametrize(
    ("text", "signum"),
    [(WITH_GROUPS, signal.SIGKILL), (WITH_TIMELINE, signal.SIGKILL), (WITH_TIMELINE, signal.SIGTERM)],
)
def test_folders_that_outlive_a_job_go_with_their_launcher(no_leftovers, text, signum):
    folder = os.environ["TMPDIR"]
    with jobs.start(sys.executable, "-c", BEGIN + text, f"{folder}/page.html") as launcher:
        assert launcher.stdout.readline() == "up\n"
        assert len(os.listdir(folder)) == 1
        launcher.send_signal(signum)
