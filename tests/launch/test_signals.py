"""A job that is asked to end: what its ranks get, how long they have, and what is left when torchmpirun is killed."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from torchmpi_py.errors import LaunchError
from torchmpi_py.launch import __main__ as main, cleanup, exit_marks, job, mpirun, signals, wrap

try:
    MISSING = "" if mpirun.find("", os.environ) else "none"
except LaunchError as error:
    MISSING = str(error)

pytestmark = pytest.mark.timeout(240)
needs_mpi = pytest.mark.skipif(bool(MISSING), reason=MISSING)

# Each rank says in a file of the folder argv[2] what it has saved; argv[1] is done when all ranks are up.
PROGRAM = """
import os, signal, sys, time
from mpi4py import MPI
world = MPI.COMM_WORLD
rank, asked = world.rank, []
def up():
    world.Barrier()
    if rank == 0:
        print("up", flush=True)
def save():
    open(os.path.join(sys.argv[2], f"saved-{rank}"), "w").close()
def wait_for(other):
    while not os.path.exists(os.path.join(sys.argv[2], f"saved-{other}")):
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
    open(os.path.join(sys.argv[2], f"through-{rank}"), "w").close()
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


def start(*arguments, **keywords):
    def heed():  # tests that run in the background of a script would pass on that SIGINT is ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, "-m", "torchmpi_py.launch", *map(str, arguments)]
    return subprocess.Popen(command, preexec_fn=heed, **pipes, **keywords)


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


def saved(folder, what="saved"):
    return sorted(path.name for path in folder.glob(f"{what}-*"))


@needs_mpi
def test_each_rank_has_its_time_whatever_the_others_do(program, tmp_path, no_leftovers):
    code, said = ended(start("-n", 3, "--grace", 80, program(PROGRAM), ONE_BY_ONE, tmp_path), signal.SIGTERM)
    assert (code, saved(tmp_path)) == (143, ["saved-0", "saved-1", "saved-2"]), said
    passed_on = [line for line in said.splitlines() if "signal 15 was passed on; the ranks have" in line]
    assert said.splitlines() in (["the end"], ["the end", *passed_on], [*passed_on, "the end"])


@needs_mpi
def test_a_rank_in_finally_keeps_its_time_at_ctrl_c(program, tmp_path, no_leftovers):
    code, said = ended(start("-n", 2, "--grace", 80, program(PROGRAM), FINALLY, tmp_path), signal.SIGINT)
    assert (code, saved(tmp_path, "through")) == (130, ["through-0", "through-1"]), said
    assert "Traceback" not in said


@needs_mpi
@pytest.mark.parametrize(
    ("text", "signum", "who"), [(RANK_0_ALONE, signal.SIGHUP, ["saved-0"]), (IN_C, signal.SIGINT, [])]
)
def test_ranks_that_do_not_heed_it_are_not_waited_for(program, tmp_path, no_leftovers, text, signum, who):
    code, said = ended(start("-n", 3, "--grace", 1000, program(PROGRAM), text, tmp_path), signum)
    assert (code, saved(tmp_path)) == (128 + signum, who), said


@needs_mpi
def test_ctrl_c_at_ranks_that_all_wait_in_mpi(program, tmp_path, no_leftovers):
    code, said = ended(start("-n", 2, "--grace", 1000, program(PROGRAM), DEADLOCK, tmp_path), signal.SIGINT)
    assert code == 130
    assert said.endswith("torchmpirun: no rank answers Ctrl-C (all of them wait in MPI?), so killed\n")


@needs_mpi
@pytest.mark.parametrize("grace", [0.5, 1000])
def test_the_grace_ends_and_a_second_signal_ends_it_at_once(program, tmp_path, no_leftovers, grace):
    def have_all_heard():
        while len(saved(tmp_path)) < 2:
            time.sleep(0.01)
        time.sleep(2 * signals.SAME_SECONDS)

    job = start("-n", 2, "--grace", grace, program(PROGRAM), NEVER, tmp_path)
    if grace < 1:
        code, said = ended(job, signal.SIGTERM)
        assert "torchmpirun: not ended 0.5 s after signal 15 (--grace), so killed: rank 0, 1\n" in said
    else:
        code, said = ended(job, signal.SIGTERM, signal.SIGTERM, before_next=have_all_heard)
        assert "so killed" not in said
    assert code == 143


def kill(launcher, with_guardian):
    with open(f"/proc/{launcher.pid}/task/{launcher.pid}/children") as file:
        children = file.read().split()
    (guardian,) = (int(each) for each in children if b"cleanup.py" in cleanup._read(f"/proc/{each}/cmdline"))
    if with_guardian:
        os.kill(guardian, signal.SIGKILL)
    launcher.kill()
    launcher.communicate(timeout=200)  # all who write there have ended, or close it


@needs_mpi
@pytest.mark.parametrize("with_guardian", [False, True])
def test_a_launcher_that_is_killed_leaves_nothing(program, tmp_path, no_leftovers, with_guardian):
    """If its guardian is killed too, the next launcher clears up."""
    text = "heed(); window = MPI.Win.Allocate_shared(1 << 20, comm=world); up(); time.sleep(100)"
    note = "with open('/proc/self/maps') as maps, open(f'{sys.argv[2]}/held-{rank}', 'w') as held:\n"
    note += "    held.writelines(line for line in maps if ' /dev/shm/' in line)\n"
    text = text.replace("up();", f"\n{note}up();")
    with start("-n", 2, program(PROGRAM), text, tmp_path) as job:
        assert job.stdout.readline() == "up\n"
        assert len(os.listdir(os.environ["TMPDIR"])) >= 1
        assert saved(tmp_path, "held") == ["held-0", "held-1"]
        time.sleep(6)  # the launcher looks every five seconds at the latest
        kill(job, with_guardian)
    if with_guardian:
        assert len(os.listdir(os.environ["TMPDIR"])) >= 1
        with start("-n", 1, program("print('next')")) as job:
            assert job.communicate(timeout=200) == ("next\n", "")
    wait_for_the_end()


def wait_for_the_end():
    """Of all processes of the test."""
    until = time.monotonic() + 100
    mark = f"LAUNCH_TEST={os.environ['LAUNCH_TEST']}"
    while set(cleanup.processes_with(mark)) - {os.getpid()} and time.monotonic() < until:
        time.sleep(0.05)


# Runs a starter that ends only when it is ended, and has a child that survives that.
LAUNCHER = """
import os, sys
from torchmpi_py.launch import job
STARTER = "import subprocess, sys, time; subprocess.Popen(['sleep', '200']); print('up', flush=True); time.sleep(200)"
def make(folder, attempt, begin):
    return job.Job([sys.executable, "-c", STARTER], os.environ | {"TORCHMPIRUN_JOB_DIR": str(folder)}, folder)
sys.exit(job.run(make, 3))
"""


@pytest.mark.parametrize("who", ["launcher", "parent"])
def test_a_job_ends_with_its_launcher_and_the_launcher_with_its_parent(no_leftovers, who):
    def heed():
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)

    parent = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
    command = [sys.executable, "-c", *([parent] if who == "parent" else []), LAUNCHER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heed) as job:
        assert job.stdout.readline() == "up\n"
        job.kill()
        _, said = job.communicate(timeout=200)
    wait_for_the_end()
    assert said == ("" if who == "launcher" else f"torchmpirun: {signals.PARENT_ENDED}\n")


BEGIN = "import sys, time\nfrom torchmpi_py.launch import __main__ as main, group_jobs, timeline_file\n"
WITH_GROUPS = """
group_jobs._GroupJob = lambda *_: None
group_jobs._wait = lambda *_: print("up", flush=True) or time.sleep(200)
main.main(["-n", "1", "--groups", "1", "-m", "os"])
"""
WITH_TIMELINE = """
options = main.parse(["--timeline", sys.argv[1], "x.py"])
with timeline_file.kept(options):
    print("up", flush=True)
    time.sleep(200)
"""


@pytest.mark.parametrize(
    ("text", "signum"),
    [(WITH_GROUPS, signal.SIGKILL), (WITH_TIMELINE, signal.SIGKILL), (WITH_TIMELINE, signal.SIGTERM)],
)
def test_folders_that_outlive_a_job_go_with_their_launcher(no_leftovers, text, signum):
    folder = os.environ["TMPDIR"]
    command = [sys.executable, "-c", BEGIN + text, f"{folder}/page.html"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout.readline() == "up\n"
        assert len(os.listdir(folder)) == 1
        launcher.send_signal(signum)
    wait_for_the_end()


def test_a_process_that_has_just_become_another_program_is_the_jobs(tmp_path):
    remains = cleanup.Remains(tmp_path)
    environment = os.environ | {"TORCHMPIRUN_JOB_DIR": str(tmp_path)}
    for _ in range(50):  # of which two in three have no environment yet that others see
        with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(200)"], env=environment) as process:
            try:
                assert cleanup.lives_with(process.pid, remains.variable)
            finally:
                process.kill()


# A rank without an MPI, that does not end by SIGTERM.
RANK = """
import os, signal, sys, time
from torchmpi_py.launch import exit_marks
signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored in the background of a script
signal.signal(signal.SIGTERM, lambda *_: print("asked", flush=True))
with exit_marks.running(os.environ["TORCHMPIRUN_JOB_DIR"], int(sys.argv[1])):
    print("up", flush=True)
    time.sleep(200)
"""

LATE = """
import os, sys
from torchmpi_py.launch import job
job.GRACE_SECONDS = 0.1
job.Job.is_late = property(lambda self: bool(self.signals.ending))
def make(folder, attempt, begin):
    environment = os.environ | {"TORCHMPIRUN_JOB_DIR": str(folder)}
    command = [sys.executable, "-c", sys.argv[1], "0"]
    return job.Job(command, environment, folder, num_ranks=1, timeout_seconds=7, grace_seconds=1000)
sys.exit(job.run(make, 3))
"""


def test_the_time_limit_ends_the_grace(no_leftovers):
    command = [sys.executable, "-c", LATE, RANK]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as job:
        assert job.stdout.readline() == "up\n"
        job.send_signal(signal.SIGTERM)
        _, said = job.communicate(timeout=200)
    late = "torchmpirun: not ended when the limit of 7 s passed (--timeout), so killed: rank 0\n"
    assert (job.returncode, said) == (143, late)


@contextlib.contextmanager
def ranks(folder, *marked):
    """Processes that run as ranks, with the mark of a job or of another."""
    with contextlib.ExitStack() as stack:
        started = []
        for rank, is_marked in enumerate(marked):
            environment = os.environ | {"TORCHMPIRUN_JOB_DIR": str(folder)}
            command = [sys.executable, "-c", RANK, str(rank)]
            if not is_marked:  # by a shell variable that comes too late for /proc
                command[2] = f"import os; os.environ['TORCHMPIRUN_JOB_DIR'] = {str(folder)!r}\n" + RANK
                del environment["TORCHMPIRUN_JOB_DIR"]
            process = stack.enter_context(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
            stack.callback(process.kill)
            assert process.stdout.readline() == "up\n"
            if not is_marked:  # the process that had this number began before
                mark = folder / f"running-{rank}"
                mark.write_text(mark.read_text().rpartition(" ")[0] + " 1")
            started.append(process)
        yield started


def test_a_number_that_is_another_process_by_now_gets_no_signal(tmp_path):
    with ranks(tmp_path, True, False) as (mine, other):
        forwarded = signals.ForwardedSignal(cleanup.Remains(tmp_path), signal.SIGTERM)
        assert forwarded.ranks == {0: mine.pid}
        forwarded.ranks[1] = other.pid  # it died just now
        forwarded.send()
        assert mine.stdout.readline() == "asked\n"
        assert forwarded.unfinished() == {0}
        other.kill()
        assert other.stdout.read() == ""


# As setproctitle does: the title takes the place of the environment that other processes see.
SET_TITLE = """
import ctypes
with open("/proc/self/stat") as stat:
    begin, _, _, end = map(int, stat.read().rpartition(")")[2].split()[45:49])  # arguments, then environment
ctypes.memset(begin, 0, end - begin)
"""


def test_a_rank_that_sets_its_title_is_the_jobs(tmp_path, monkeypatch):
    monkeypatch.setattr(
        sys.modules[__name__], "RANK", RANK.replace('    print("up"', f'    exec({SET_TITLE!r})\n    print("up"')
    )
    with ranks(tmp_path, True) as (process,):
        remains = cleanup.Remains(tmp_path)
        assert not cleanup.lives_with(process.pid, remains.variable)
        assert remains.processes() == [process.pid]
        forwarded = signals.ForwardedSignal(remains, signal.SIGTERM)
        assert forwarded.ranks == {0: process.pid}
        forwarded.send()
        assert process.stdout.readline() == "asked\n"
        assert forwarded.unfinished() == {0}
        (tmp_path / "failed-0").touch()
        assert not exit_marks.release_replaced(tmp_path, 0)  # it has failed, and is no other program
        remains.kill(process.poll)
        assert process.wait(100) == -signal.SIGKILL
        assert (tmp_path / "running-0").exists()
        assert remains.processes() == []


HOLD = """
import time
from multiprocessing import shared_memory
print(shared_memory.SharedMemory(create=True, size=100).name, flush=True)
time.sleep(200)
"""


def test_shared_memory_that_python_tracks_is_gone_with_a_killed_rank(tmp_path, monkeypatch):
    for name in ("_TRACKER_SECONDS", "KILL_SECONDS"):  # the tracker may stand still
        monkeypatch.setattr(cleanup, name, 60.0)
    environment = os.environ | {"TORCHMPIRUN_JOB_DIR": str(tmp_path)}
    command = [sys.executable, "-c", HOLD]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        name = process.stdout.readline().strip()
        assert os.path.exists(f"/dev/shm/{name}")
        remains = cleanup.Remains(tmp_path)
        remains.kill(process.poll)
        assert remains.processes() == []
        assert not os.path.exists(f"/dev/shm/{name}")


OPEN = """
import sys, tempfile, time
file = tempfile.mkstemp(prefix="torchmpi_py_", dir="/dev/shm")
print(file[1], flush=True)
time.sleep(200)
"""


def test_a_file_of_the_packages_own_goes_with_a_job_whatever_its_folder_is_called(tmp_path):
    folder = tmp_path / os.fsdecode(b"\xff")  # no UTF-8
    folder.mkdir()
    environment = os.environ | {"TORCHMPIRUN_JOB_DIR": str(folder)}
    with subprocess.Popen([sys.executable, "-c", OPEN], env=environment, stdout=subprocess.PIPE, text=True) as process:
        name = process.stdout.readline().strip()
        try:
            assert os.path.exists(name)
            cleanup.Remains(folder).clear(process.poll)
            assert process.wait(100) == -signal.SIGKILL
            assert not os.path.exists(name)
        finally:
            process.kill()
            if os.path.exists(name):
                os.unlink(name)


def test_who_waits_for_a_rank_that_has_left(tmp_path, monkeypatch):
    now, written = [0.0], [0]
    monkeypatch.setattr(signals.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(signals, "num_written", lambda _: written[0])
    with ranks(tmp_path, True, True):
        forwarded = signals.ForwardedSignal(cleanup.Remains(tmp_path), signal.SIGTERM)
        now[0] = 100.0
        assert not forwarded.is_over()  # nobody has left
        exit_marks.record_failure(str(tmp_path), 0, 1)
        assert not forwarded.is_over()
        now[0], written[0] = 111.0, 1
        assert not forwarded.is_over()
        now[0] = 120.0
        assert (forwarded.is_over(), forwarded.reason) == (False, "")
        now[0] = 122.0
        assert forwarded.is_over()
        assert "so killed: rank 1" in forwarded.reason
        forwarded.reason = ""
        exit_marks.leave(tmp_path, "ended-0", "143")  # the ranks have agreed
        assert not forwarded.is_over()


@pytest.mark.parametrize("knows", ["", "heard", "own"])
def test_who_answers_ctrl_c(tmp_path, monkeypatch, knows):
    now = [0.0]
    monkeypatch.setattr(signals.time, "monotonic", lambda: now[0])
    with ranks(tmp_path, True):
        forwarded = signals.ForwardedSignal(cleanup.Remains(tmp_path), signal.SIGINT)
        assert not forwarded.is_over()
        if knows:
            exit_marks.leave(tmp_path, f"{knows}-0")
        now[0] = 4.0
        assert forwarded.is_over() == (not knows)


def test_a_rank_that_is_asked_to_end_says_all_before_it_can_be_killed(tmp_path, monkeypatch):
    steps = []

    def step(name):
        return lambda *_: steps.append((name, exit_marks.is_left(tmp_path, "failed-0")))

    def be_killed(*_):
        assert exit_marks.is_left(tmp_path, "failed-0")
        raise EOFError

    exit_marks.leave(tmp_path, "ending")
    monkeypatch.setitem(sys.modules, "torchmpi_py.watch.tracing", SimpleNamespace(save=step("saved")))
    monkeypatch.setattr(wrap, "explain", step("explained"))
    monkeypatch.setattr(exit_marks, "wait_for_output", step("read"))
    monkeypatch.setattr(wrap, "_wait_to_be_killed", be_killed)
    with pytest.raises(EOFError):
        wrap.fail(KeyboardInterrupt(), 130, str(tmp_path), 0, ())
    assert steps == [("explained", False), ("saved", False), ("read", False)]
    assert [failure.code for failure in exit_marks.failures(tmp_path)] == [130]


@pytest.mark.parametrize("is_full", [False, True])
def test_a_rank_that_fails_before_mpi_aborts_where_its_mark_is_missing(tmp_path, monkeypatch, is_full):
    started = []
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setattr(wrap, "_start_mpi", lambda: started.append(1))
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    if is_full:
        (tmp_path / "part-failed-0").mkdir()
    with pytest.raises(SystemExit):
        wrap.fail(SystemExit(3), 3, str(tmp_path), 0, ())
    assert bool(started) == is_full


@pytest.mark.parametrize(
    ("text", "is_own"),
    [
        ("signal.signal(signal.SIGINT, signal.default_int_handler)", False),
        ("signal.signal(signal.SIGTERM, signal.SIG_IGN)", False),
        ("if os.fork() == 0: signal.signal(signal.SIGINT, signal.SIG_IGN)", False),
        ("signal.signal(signalnum=signal.SIGINT, handler=lambda *_: None)", True),
    ],
)
def test_a_programs_own_handler_is_known(tmp_path, text, is_own):
    begin = "import os, signal, sys; from torchmpi_py.launch import wrap\n"
    begin += "signal.signal(signal.SIGINT, signal.default_int_handler); wrap.record_interrupts(sys.argv[1], 0)\n"
    subprocess.run([sys.executable, "-c", begin + text, tmp_path], check=True, timeout=200)
    assert exit_marks.is_left(tmp_path, "own-0") == is_own


@pytest.mark.parametrize("survives", ["", "nohup", "background", "setsid"])
def test_who_survives_the_parent(monkeypatch, survives):
    former = {signum: signal.getsignal(signum) for signum in (signal.SIGHUP, signal.SIGINT)}
    monkeypatch.setattr(os, "getsid", lambda _: os.getpid() if survives == "setsid" else 1)
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN if survives == "nohup" else signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN if survives == "background" else signal.default_int_handler)
        with signals.Signals() as heard:
            heard.look_at_parent()
            assert heard.ending == []
            monkeypatch.setattr(os, "getppid", lambda: 1 << 22)
            heard.look_at_parent()
            heard.look_at_parent()
            assert heard.ending == ([] if survives else [signal.SIGHUP])
    finally:
        for signum, handler in former.items():
            signal.signal(signum, handler)


@pytest.mark.parametrize(
    ("came", "ending"),
    [
        ([(1.0, 15), (1.01, 15), (1.02, 1), (1.03, 2)], [15]),
        ([(1.0, 1), (1.0, 15)], [1]),
        ([(1.0, 15), (3.0, 1), (3.1, 10)], [15]),
        ([(1.0, 15), (1.6, 2), (2.2, 2), (2.3, 2)], [15, 2]),
    ],
)
def test_a_signal_that_comes_twice_at_once_is_one(monkeypatch, came, ending):
    now = [0.0]
    monkeypatch.setattr(signals.time, "monotonic", lambda: now[0])
    heard = signals.Signals()
    for when, signum in came:
        now[0] = when
        heard.receive(signum)
    assert heard.ending == ending


def test_the_parents_death_ends_the_wait_for_a_reader(monkeypatch):
    class Paused:
        log = "rank-0.log"
        wait = staticmethod(lambda seconds, is_over=None: is_over is None or all(is_over() for _ in range(2)))
        catch_up = staticmethod(lambda: monkeypatch.setattr(os, "getppid", lambda: 1 << 22))

    done = SimpleNamespace(run=lambda: 0, has_run=True, was_ended=False, is_late=False)
    former = {signum: signal.signal(signum, signal.SIG_DFL) for signum in (signal.SIGHUP, signal.SIGINT)}
    monkeypatch.setattr(os, "getsid", lambda _: 1)
    heard = []
    monkeypatch.setattr(signals, "say", heard.append)
    try:
        assert job.run(lambda *_: done, 0, Paused()) == 0
    finally:
        for signum, handler in former.items():
            signal.signal(signum, handler)
    assert heard == [signals.PARENT_ENDED]


def test_marks_that_cannot_be_written(tmp_path):
    for name in ("ending", "heard-1", "ended-1"):
        (tmp_path / f"part-{name}").mkdir()
    for name in ("ending", "heard-1", "ended-1"):
        assert not exit_marks.leave(tmp_path, name, "143")
        assert not exit_marks.is_left(tmp_path, name)
    assert exit_marks.code_of_end(tmp_path) == 0


def test_a_log_that_cannot_be_replaced(tmp_path):
    (tmp_path / "rank-0.log").write_text("of an earlier job")
    main.check_folder("--log-dir", tmp_path, replaced="rank-0.log")
    assert not os.listdir(tmp_path)
    (tmp_path / "rank-0.log").mkdir()
    with pytest.raises(LaunchError, match=r"cannot write rank-0\.log there"):
        main.check_folder("--log-dir", tmp_path, replaced="rank-0.log")


def test_an_end_that_the_ranks_wanted_is_no_failure(tmp_path):
    assert exit_marks.code_of_end(tmp_path) == 0
    assert exit_marks.leave(tmp_path, "ended-1", "143")
    assert not exit_marks.leave("", "ended-1", "143")
    assert not exit_marks.leave(tmp_path / "none", "ended-1", "143")
    assert exit_marks.code_of_end(tmp_path) == 143


@pytest.mark.parametrize("text", ["-1", "nan", "long"])
def test_a_grace_that_is_no_time(text, capsys):
    with pytest.raises(SystemExit):
        main.parse(["--grace", text, "x.py"])
    assert "--grace" in capsys.readouterr().err
    assert main.parse(["--grace", "0", "x.py"]).grace == 0
