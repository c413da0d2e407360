"""How torchmpirun and the ranks take a signal: without an MPI, and without a real time to wait."""

import contextlib
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import stand_in
from support import jobs

from torchmpi_py.errors import LaunchError
from torchmpi_py.launch import attempts, checks, cleanup, exit_marks, signals, wrap

pytestmark = pytest.mark.timeout(240)

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
options = dict(num_ranks=1, timeout=7, grace=1000)
"""


def test_the_time_limit_ends_the_grace(no_leftovers):
    with stand_in.start(f"import sys; sys.argv[1] = '0'\n{RANK}", most=3, before=LATE) as job:
        assert job.stdout.readline() == "up\n"
        job.send_signal(signal.SIGTERM)
        _, said = job.communicate(timeout=200)
    late = "torchmpirun: killed rank 0: still running when the time limit of 7 s passed (--timeout)\n"
    assert (job.returncode, said) == (143, late)


@contextlib.contextmanager
def ranks(folder, *marked, text=RANK):
    """Processes that run as ranks, with the mark of a job or of another."""
    with contextlib.ExitStack() as stack:
        started = []
        for rank, is_marked in enumerate(marked):
            environment = os.environ | {"TORCHMPIRUN_JOB_DIR": str(folder)}
            command = [sys.executable, "-c", text, str(rank)]
            if not is_marked:  # by a shell variable that comes too late for /proc
                command[2] = f"import os; os.environ['TORCHMPIRUN_JOB_DIR'] = {str(folder)!r}\n{text}"
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


def test_a_rank_that_sets_its_title_is_the_jobs(tmp_path):
    text = RANK.replace('    print("up"', f'    exec({SET_TITLE!r})\n    print("up"')
    with ranks(tmp_path, True, text=text) as (process,):
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
        assert "killed rank 1: " in forwarded.reason
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


@pytest.mark.parametrize("is_full", [False, True])
def test_a_rank_that_fails_before_mpi_aborts_where_its_mark_is_missing(tmp_path, monkeypatch, is_full):
    started = []
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setattr(wrap, "_start_mpi", lambda: started.append(1))
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    if is_full:
        (tmp_path / "part-failed-0").mkdir()
    kept = os.dup(0)  # it closes that
    with pytest.raises(SystemExit):
        wrap.fail(SystemExit(3), 3, str(tmp_path), 0, ())
    os.dup2(kept, 0)
    os.close(kept)
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

    done = SimpleNamespace(run=lambda: 0, has_run=True, was_ended=False, is_late=False, starts_again=False)
    heard = []
    monkeypatch.setattr(signals, "say", heard.append)
    assert attempts.run(lambda *_: done, 0, Paused()) == (0, [done])
    assert heard == [signals.PARENT_ENDED]


def test_a_log_of_an_earlier_job_is_replaced(tmp_path):
    (tmp_path / "rank-0.log").write_text("of an earlier job")
    checks.check_output_folder("--log-dir", tmp_path, replaced="rank-0.log")
    assert not os.listdir(tmp_path)
    (tmp_path / "rank-0.log").mkdir()
    with pytest.raises(LaunchError, match=r"cannot write rank-0\.log there"):
        checks.check_output_folder("--log-dir", tmp_path, replaced="rank-0.log")
