"""Folders of jobs that were killed together with their guardian: the next torchmpirun clears away those, and no others.

test_signals has the jobs.
"""

import os
import subprocess
import sys

import pytest

from torchmpi_py.launch import cleanup, exit_marks

pytestmark = pytest.mark.timeout(60)
STRANGER = 54321


def guarded(folder, *processes, change=("", "")):
    """A job's folder with marks of processes; ``change`` replaces something in their text."""
    folder.mkdir()
    for process in processes:
        exit_marks.record(folder, f"guard-{process}", process)
        mark = folder / f"guard-{process}"
        mark.write_text(mark.read_text().replace(*change))


def by_one_that_lives(folder, dead):
    guarded(folder, dead, os.getpid())


def without_marks(folder, dead):
    guarded(folder)


def of_another_container(folder, dead):
    guarded(folder, dead, change=(exit_marks._numbering(), "boot.4026531836"))


def of_another_user(folder, dead):
    guarded(folder, dead)
    os.chown(folder, STRANGER, -1)


def a_link_to_one(folder, dead):
    guarded(folder.with_name("elsewhere"), dead)
    folder.symlink_to(folder.with_name("elsewhere"))


def a_file(folder, dead):
    folder.write_text("")


def marks_of_another_kind(folder, dead):
    folder.mkdir()
    (folder / "guard-1").write_text("x")


def by_dead_ones(folder, dead):
    with subprocess.Popen(["true"]) as another:
        pass
    guarded(folder, dead, another.pid)


def by_one_whose_number_is_taken(folder, dead):
    guarded(folder, os.getpid(), change=(f" {exit_marks._beginning(os.getpid())}", " 1"))


def with_a_process_that_lives_on(folder, dead):
    guarded(folder, dead)
    environment = {**os.environ, "TORCHMPIRUN_JOB_DIR": str(folder)}
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"], env=environment)


LEFT = (by_one_that_lives, without_marks, of_another_container, a_link_to_one, a_file, marks_of_another_kind)
LEFT += (of_another_user,) if os.geteuid() == 0 else ()
CLEARED = (by_dead_ones, by_one_whose_number_is_taken, with_a_process_that_lives_on)


def test_which_folders_the_next_torchmpirun_clears_away(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with subprocess.Popen(["true"]) as dead:
        pass
    made = {make: make(tmp_path / f"torchmpirun-{make.__name__}", dead.pid) for make in (*LEFT, *CLEARED)}
    (tmp_path / "torchmpirun-by_dead_ones" / "remains").write_text(ascii((dead.pid, set(), {"/dev/shm/x"}, [15])))
    guardians = cleanup.clear_abandoned()
    assert cleanup.clear_abandoned() == []  # they are at work
    for guardian in guardians:
        guardian.process.wait(30)
    assert made[with_a_process_that_lives_on].wait(30) == -9
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"elsewhere", *(f"torchmpirun-{make.__name__}" for make in LEFT)}
    assert len(guardians) == len(CLEARED)
    assert os.listdir(tmp_path / "elsewhere") == [f"guard-{dead.pid}"]
