"""Two jobs on one folder of checkpoints, and what other users have left in it."""

import contextlib
import errno
import fcntl
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import foreign_files
import pytest
import torch
from runs import classes, listed, train
from support import jobs

from torchmpi_py import errors
from torchmpi_py.engine import Checkpoints, DatasetIterator, checkpoint_file, folder_lock

pytestmark = pytest.mark.usefixtures("no_waiting")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="acts as another user")
PARTIAL = ".step-000007.pt.partial-0f0f"
OTHER_JOB = """
import sys
from torchmpi_py.engine import Checkpoints
checkpoints = Checkpoints(sys.argv[1])
checkpoints.save(1, {"x": 10})
print("saved", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def other_job(mpi, folder):
    """A job of one process that has saved into the folder; its process id, on all ranks. It is killed at the end."""
    job = None
    if mpi.rank() == 0:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI", "PMI"))}
        job = jobs.start(sys.executable, "-c", OTHER_JOB, folder, stdin=-1, env=environment)
        assert job.stdout.readline() == "saved\n"
    try:
        yield mpi.broadcast_object(job.pid if job else None)
    finally:
        if job:
            job.kill()
            job.communicate()
        mpi.barrier()


@pytest.mark.mpi
def test_the_second_job_is_refused_on_all_ranks(mpi, folder, monkeypatch):
    def save():
        Checkpoints(folder).save(2, {"x": 20})

    def trained():
        def on_start_epoch(state):
            pytest.fail("the error comes before the first step")

        train(torch.nn.Linear(6, 3), DatasetIterator(classes(12), 2), checkpoint=folder, on_start_epoch=on_start_epoch)

    monkeypatch.setattr(folder_lock, "SECONDS", 0.3)
    with other_job(mpi, folder) as process_id:
        if mpi.rank() == 0:
            (folder / PARTIAL).touch()  # as if the other job were saving
        for use in (save, trained):
            with pytest.raises(errors.CheckpointError, match=rf"{folder}.*process {process_id} of .*another folder"):
                use()
        assert Checkpoints(folder).load() == (1, {"x": 10})  # to read needs no lock
        mpi.barrier()
        assert listed(folder) == [PARTIAL, "step-000001.pt"]
    begin = time.monotonic()
    monkeypatch.setattr(folder_lock, "SECONDS", 20.0)
    save()  # the other job was killed
    assert time.monotonic() - begin < 10.0
    mpi.barrier()
    assert listed(folder) == ["step-000001.pt", "step-000002.pt"]


def in_child(work, user=0):
    """Do the work in a process of its own, which knows of no lock of this one; what it said, or its error."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        folder_lock._held.clear()
        try:
            if user:
                os.setgroups([])
                os.setgid(user)
                os.setuid(user)
            said = work()
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writer, str(said).encode())
        os.kill(os.getpid(), signal.SIGKILL)
    os.close(writer)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    with open(reader, "rb") as file:
        os.set_blocking(reader, False)
        return (file.read() or b"").decode()


def is_refused(folder):
    """Whether another process may not save, because this one holds the folder; the process is killed then."""
    said = in_child(lambda: Checkpoints(folder).save(9, {"x": 9}))
    assert said == f"{folder}/step-000009.pt" or f"process {os.getpid()} of" in said, said
    return said != f"{folder}/step-000009.pt"


def test_who_may_save(tmp_path, caplog):
    free, held = tmp_path / "free", tmp_path / "held"
    kept = [Checkpoints(free)]
    kept[0].load()
    for _ in range(2):  # who only loads holds nothing, nor does a job that was killed
        assert not is_refused(free)
    kept = [Checkpoints(held), Checkpoints(held)]
    for number, each in enumerate(kept):
        each.save(number, {"x": number})
    assert is_refused(held)
    shutil.copytree(held, tmp_path / "copy")  # it opens the lock file, and closes it
    assert is_refused(held)
    kept.clear()
    del each
    assert not is_refused(held)
    assert not caplog.records


def test_a_child_that_outlives_its_rank_holds_nothing(tmp_path):
    def work():
        checkpoints = Checkpoints(tmp_path)
        checkpoints.save(1, {"x": 1})
        left = os.fork()
        if left == 0:
            time.sleep(100)
            os._exit(0)
        return left

    left = int(in_child(work))
    assert not is_refused(tmp_path)
    os.kill(left, signal.SIGKILL)


def test_a_file_system_without_locks(tmp_path, monkeypatch, caplog):
    def flock(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    kept = Checkpoints(tmp_path)
    for step in (1, 2):
        kept.save(step, {"x": step})
    assert not is_refused(tmp_path)
    assert len(caplog.records) <= 1


def test_a_folder_is_free_after_release(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(5, {"x": 5})
    checkpoints.release()
    assert not is_refused(tmp_path)


def test_a_checkpoint_that_a_job_removes_while_another_one_loads(tmp_path, monkeypatch, caplog):
    Checkpoints(tmp_path).save(2, {"x": 2})
    listings = [[(1, tmp_path / "step-000001.pt")], [(2, tmp_path / "step-000002.pt")]]
    monkeypatch.setattr(checkpoint_file, "complete", lambda directory: listings.pop(0))
    assert Checkpoints(tmp_path).load() == (2, {"x": 2})
    assert not caplog.records


@needs_root
@pytest.mark.parametrize("make", [*foreign_files.NOT_OURS, *foreign_files.NOT_FILES], ids=lambda make: make.__name__)
def test_something_else_in_place_of_the_lock(tmp_path, caplog, make):
    make(tmp_path / ".lock")
    for step in (1, 2):
        Checkpoints(tmp_path).save(step, {"x": step})
    assert len(caplog.records) == (make is not foreign_files.of_another)  # to root that is a file
    assert Checkpoints(tmp_path).load() == (2, {"x": 2})
    assert make is not foreign_files.link or (tmp_path / "elsewhere").read_text() == "untouched"


@needs_root
@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_a_folder_with_checkpoints_of_another_user(monkeypatch, mode):
    """They are loaded, and stay; what cannot be removed is named once."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(mode)
        for step in (1, 2):
            Checkpoints(folder).save(step, {"x": step})
        (folder / "step-000002.pt").write_bytes(b"")
        (folder / PARTIAL).touch()
        warnings = []

        def work():
            monkeypatch.setattr(checkpoint_file, "warn_once", lambda *words: warnings.append(words[1].name))
            checkpoints = Checkpoints(folder, keep=1)
            assert checkpoints.load() == (1, {"x": 1})
            checkpoints.save(2 if mode == 0o777 else 3, {"x": 3})
            assert checkpoints.load().parts == {"x": 3}
            return sorted(set(warnings))

        said = in_child(work, user=foreign_files.STRANGER)
        assert (PARTIAL in listed(folder)) == (mode == 0o1777)
        # Where another user may not remove it, it stays, with a warning.
        assert ("step-000001.pt" in said) == ("step-000001.pt" in listed(folder)) == (mode == 0o1777)
        assert ("step-000002.pt.damaged" in listed(folder)) == (mode == 0o777)
