"""A job that is asked to end: what its ranks get, how long they have, and what is left when torchmpirun is killed."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import stand_in
from support import jobs

from torchmpi_py.errors import LaunchError
from torchmpi_py.launch import __main__ as main, cleanup, exit_marks, job as one_job, signals, wrap

pytestmark = pytest.mark.timeout(240)

# Each rank says in a file of the folder argv[2] what it has saved, and which shared memory it holds; argv[1] is done
# when all ranks are up.
PROGRAM = """
import os, signal, sys, time
from mpi4py import MPI
world = MPI.COMM_WORLD
rank, asked = world.rank, []
window = MPI.Win.Allocate_shared(1 << 20, comm=world)
with open("/proc/self/maps") as maps, open(f"{sys.argv[2]}/held-{rank}", "w") as held:
    held.writelines(line for line in maps if " /dev/shm/" in line)
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
    passed_on = [line for line in said.splitlines() if "signal 15 was passed on; the ranks have" in line]
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
    assert said.endswith("torchmpirun: no rank answers Ctrl-C (all of them wait in MPI?), so killed\n")


@jobs.needs_mpi
@pytest.mark.parametrize("grace", [0.5, 1000])
def test_the_grace_ends_and_a_second_signal_ends_it_at_once(start, tmp_path, grace):
    def have_all_heard():
        while len(saved(tmp_path)) < 2:
            time.sleep(0.01)
        time.sleep(1.2 * signals.SAME_SECONDS)

    code, said = ended(start(2, grace, NEVER), *[signal.SIGTERM] * (1 + (grace > 1)), before_next=have_all_heard)
    assert code == 143
    assert ("torchmpirun: not ended 0.5 s after signal 15 (--grace), so killed: rank 0, 1\n" in said) == (grace < 1)
    assert ("so killed" in said) == (grace < 1)


def kill(launcher, with_guardian):
    with open(f"/proc/{launcher.pid}/task/{launcher.pid}/children") as file:
        children = file.read().split()
    (guardian,) = (int(each) for each in children if b"cleanup.py" in cleanup._read(f"/proc/{each}/cmdline"))
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
        assert saved(tmp_path, "held") == ["held-0", "held-1"]
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
    with jobs.start(sys.executable, "-c", BEGIN + text, f"{folder}/page.html") as launcher:
        assert launcher.stdout.readline() == "up\n"
        assert len(os.listdir(folder)) == 1
        launcher.send_signal(signum)


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
jobs.GRACE_SECONDS = 0.1
jobs.Job.is_late = property(lambda self: bool(self.signals.ending))
options = dict(num_ranks=1, timeout_seconds=7, grace_seconds=1000)
"""


def test_the_time_limit_ends_the_grace(no_leftovers):
    with stand_in.start(f"import sys; sys.argv[1] = '0'\n{RANK}", most=3, before=LATE) as job:
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
    assert jobs.python(begin + text, tmp_path).returncode == 0
    assert exit_marks.is_left(tmp_path, "own-0") == is_own


@pytest.fixture
def default_signals():
    """SIGHUP and SIGINT have no handler and are not ignored, and this process does not lead its session."""
    former = {signum: signal.signal(signum, signal.SIG_DFL) for signum in (signal.SIGHUP, signal.SIGINT)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "getsid", lambda _: 1)
        yield patch
    for signum, handler in former.items():
        signal.signal(signum, handler)


@pytest.mark.parametrize("survives", ["", "nohup", "background", "setsid"])
def test_who_survives_the_parent(default_signals, survives):
    if survives == "setsid":
        default_signals.setattr(os, "getsid", lambda _: os.getpid())
    elif survives:
        signal.signal(signal.SIGHUP if survives == "nohup" else signal.SIGINT, signal.SIG_IGN)
    with signals.Signals() as heard:
        heard.look_at_parent()
        assert heard.ending == []
        default_signals.setattr(os, "getppid", lambda: 1 << 22)
        heard.look_at_parent()
        heard.look_at_parent()
        assert heard.ending == ([] if survives else [signal.SIGHUP])


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


def test_the_parents_death_ends_the_wait_for_a_reader(monkeypatch, default_signals):
    class Paused:
        log = "rank-0.log"
        wait = staticmethod(lambda seconds, is_over=None: is_over is None or all(is_over() for _ in range(2)))
        catch_up = staticmethod(lambda: monkeypatch.setattr(os, "getppid", lambda: 1 << 22))

    done, heard = SimpleNamespace(run=lambda: 0, has_run=True, was_ended=False, is_late=False), []
    monkeypatch.setattr(signals, "say", heard.append)
    assert one_job.run(lambda *_: done, 0, Paused()) == 0
    assert heard == [signals.PARENT_ENDED]


def test_an_end_that_the_ranks_wanted_is_no_failure(tmp_path):
    (tmp_path / "part-ended-1").mkdir()  # as where the mark cannot be written
    for folder in (tmp_path, "", tmp_path / "none"):
        assert not exit_marks.leave(folder, "ended-1", "143")
    assert exit_marks.code_of_end(tmp_path) == 0
    assert exit_marks.leave(tmp_path, "ended-2", "143")
    assert exit_marks.code_of_end(tmp_path) == 143


def test_a_log_of_an_earlier_job_is_replaced(tmp_path):
    (tmp_path / "rank-0.log").write_text("of an earlier job")
    main.check_folder("--log-dir", tmp_path, replaced="rank-0.log")
    assert not os.listdir(tmp_path)
    (tmp_path / "rank-0.log").mkdir()
    with pytest.raises(LaunchError, match=r"cannot write rank-0\.log there"):
        main.check_folder("--log-dir", tmp_path, replaced="rank-0.log")


def test_a_grace_is_a_time(capsys):
    for text in ("-1", "nan", "long"):
        with pytest.raises(SystemExit):
            main.parse(["--grace", text, "x.py"])
        assert "--grace" in capsys.readouterr().err
    assert main.parse(["--grace", "0", "x.py"]).grace == 0
