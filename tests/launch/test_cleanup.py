"""What is cleared away after a job: its processes and shared memory alone; folders of jobs that were killed."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import jobs

from torchmpi_py.launch import cleanup, exit_marks, proc

pytestmark = pytest.mark.timeout(120)
STRANGER = 54321
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="starts a process of another user")


def sleeping(folder):
    """A process of the job of this folder, just started."""
    environment = os.environ | {"TORCHMPIRUN_JOB_DIR": str(folder)}
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"], env=environment)


@contextlib.contextmanager
def process_of(folder, program, *wrapper):
    """A process of the job of this folder, that runs a program and sleeps: itself, and the line that it has printed."""
    text = f"import os, sys, time\n{program}\nprint(flush=True)\ntime.sleep(100)"
    environment = os.environ | {"TORCHMPIRUN_JOB_DIR": str(folder)}
    with jobs.start(*wrapper, sys.executable, "-c", text, env=environment) as process:
        try:
            if not (line := process.stdout.readline()):
                pytest.skip(f"{' '.join(wrapper)} is not allowed here")
            yield process, line.strip()
        finally:
            process.kill()


@needs_root
@pytest.mark.parametrize("whose", ["own", "of another user", "of another container"])
def test_processes(tmp_path, whose):
    program = f"os.setuid({STRANGER})" if whose == "of another user" else ""
    wrapper = ("unshare", "--pid", "--fork", "--kill-child") if whose == "of another container" else ()
    with process_of(tmp_path, program, *wrapper) as (process, _):
        children = set(map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()))
        found = cleanup.Remains(tmp_path).processes()
        assert (process.pid in found) == (whose != "of another user")
        assert not children & set(found)
        assert len(children) == (whose == "of another container")


def test_a_process_that_has_just_become_another_program_is_the_jobs(tmp_path):
    remains = cleanup.Remains(tmp_path)
    for _ in range(50):  # of which two in three have no environment yet that others see
        with sleeping(tmp_path) as process:
            try:
                assert cleanup.lives_with(process.pid, remains.variable)
            finally:
                process.kill()


@pytest.mark.parametrize("name", ["mpich_shm_", f"sm_segment.{os.uname().nodename}.{os.geteuid()}."])
@pytest.mark.parametrize("close", ["", "os.close(file)"], ids=["open", "mapped"])
def test_shared_memory_that_another_container_holds(monkeypatch, tmp_path, close, name):
    monkeypatch.setattr(proc, "others", list)  # as /proc shows it: no process of this container has the file
    path = f"/dev/shm/{name}{os.getpid()}_{time.monotonic_ns()}"
    program = f"""
import ctypes
file = os.open({path!r}, os.O_RDWR | os.O_CREAT, 0o600)
os.truncate(file, 4096)
ctypes.CDLL(None).mmap(None, ctypes.c_size_t(4096), 3, 1, file, ctypes.c_long(0))
{close}"""
    try:
        with process_of(tmp_path, program):
            assert path in cleanup.randomly_named()
            cleanup.remove_shared_memory({path})
            assert os.path.exists(path)
        cleanup.remove_shared_memory({path})
        assert not os.path.exists(path)
    finally:
        Path(path).unlink(missing_ok=True)


@needs_root
def test_shared_memory_of_another_user():
    path = f"/dev/shm/torch_{os.getpid()}_{time.monotonic_ns()}"
    with open(path, "w"):
        os.chown(path, STRANGER, -1)
    try:
        cleanup.remove_shared_memory({path})
        assert os.path.exists(path)
    finally:
        os.unlink(path)


TRACKED = """
from multiprocessing import shared_memory
held = shared_memory.SharedMemory(create=True, size=100)
print("/dev/shm/" + held.name, end="")
"""
OWN = "import tempfile\nprint(tempfile.mkstemp(prefix='torchmpi_py_', dir='/dev/shm')[1], end='')"


@pytest.mark.parametrize(("program", "name"), [(TRACKED, "folder"), (OWN, os.fsdecode(b"no UTF-8 \xff"))])
def test_shared_memory_goes_with_a_killed_process(tmp_path, monkeypatch, program, name):
    """What Python tracks, and what the package has made, whatever the job's folder is called."""
    for limit in ("_TRACKER_SECONDS", "KILL_SECONDS"):  # the tracker may stand still
        monkeypatch.setattr(cleanup, limit, 60.0)
    folder = tmp_path / name
    folder.mkdir()
    with process_of(folder, program) as (process, file):
        assert os.path.exists(file)
        remains = cleanup.Remains(folder)
        remains.clear(process.poll)
        assert process.wait(100) == -signal.SIGKILL
        assert remains.processes() == []
        assert not os.path.exists(file)


@pytest.mark.parametrize("proxy", [b"", b"/bin/hydra_pmi_proxy\0"])
def test_a_topology_goes_if_it_is_new_and_no_proxy_lives(tmp_path, monkeypatch, proxy):
    monkeypatch.setattr(cleanup, "_TOPOLOGY", f"{tmp_path}/xml_")
    monkeypatch.setattr(cleanup, "_RANDOM_NAMES", (f"{tmp_path}/xml_*",))
    monkeypatch.setattr(proc, "others", lambda: [1])
    monkeypatch.setattr(proc, "read", lambda *_: proxy)
    jobs.write(tmp_path, "", "xml_before")
    remains = cleanup.Remains(tmp_path)
    jobs.write(tmp_path, "", "xml_new")
    remains.clear()
    assert sorted(os.listdir(tmp_path)) == ["xml_before", *["xml_new"] * bool(proxy)]


# --- folders of jobs that were killed together with their guardian; test_signals has the jobs


def guarded(folder, *processes, change=("", "")):
    """A job's folder with marks of processes; ``change`` replaces something in their text."""
    folder.mkdir()
    for process in processes:
        exit_marks.record(folder, f"guard-{process}", process)
        mark = folder / f"guard-{process}"
        mark.write_text(mark.read_text().replace(*change))


def linked(folder, dead):
    guarded(folder.with_name("elsewhere"), dead)
    folder.symlink_to(folder.with_name("elsewhere"))


def given_away(folder, dead):
    guarded(folder, dead)
    os.chown(folder, STRANGER, -1)


def described(folder, dead):
    guarded(folder, dead)
    (folder / "remains").write_text(ascii((dead, set(), {"/dev/shm/x"}, [15])))


def still_used(folder, dead):
    guarded(folder, dead)
    return sleeping(folder)


ME = os.getpid()
BEGINNING = f" {exit_marks._beginning(ME)}"
LEFT = {
    "by one that lives": lambda folder, dead: guarded(folder, dead, ME),
    "without marks": lambda folder, dead: guarded(folder),
    "of another container": lambda folder, dead: guarded(folder, dead, change=(exit_marks._numbering(), "boot.40265")),
    "a link to one": linked,
    "a file": lambda folder, dead: folder.write_text(""),
    "marks of another kind": lambda folder, dead: jobs.write(folder, "x", "guard-1"),
} | ({"of another user": given_away} if os.geteuid() == 0 else {})
CLEARED = {
    "by a dead one": described,
    "by one whose number is taken": lambda folder, dead: guarded(folder, ME, change=(BEGINNING, " 1")),
    "with a process that lives on": still_used,
}


def test_which_folders_the_next_torchmpirun_clears_away(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with subprocess.Popen(["true"]) as dead:
        pass
    made = {name: make(tmp_path / f"torchmpirun-{name}", dead.pid) for name, make in (LEFT | CLEARED).items()}
    guardians = cleanup.clear_abandoned()
    assert cleanup.clear_abandoned() == []  # they are at work
    for guardian in guardians:
        guardian.process.wait(30)
    assert made["with a process that lives on"].wait(30) == -signal.SIGKILL
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"elsewhere", *(f"torchmpirun-{name}" for name in LEFT)}
    assert len(guardians) == len(CLEARED)
    assert os.listdir(tmp_path / "elsewhere") == [f"guard-{dead.pid}"]
