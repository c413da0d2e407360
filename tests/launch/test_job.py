"""Real jobs through the MPI of this environment, on mpi4py alone: no mpirun around pytest is needed."""

import os
import shutil
import sys

import pytest
from mpi_ranks import MEET, START
from support import jobs

from torchmpi_py.launch import mpirun

pytestmark = [pytest.mark.timeout(240), jobs.needs_mpi]

HELLO = f"""
{START}
total = world.allreduce(world.rank)
mine = (world.rank, world.size, total, len(os.sched_getaffinity(0)), os.environ["OMP_NUM_THREADS"], sys.argv[1:])
for line in world.gather(mine) or ():
    print(*line, flush=True)
window.Free()
"""

RAISE = "if rank == 1: raise RuntimeError('boom')"
HANG = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: time.sleep(1)"


def test_hello(program, no_leftovers):
    """Ranks get the program's words as they are, and share out the cores."""
    words = ["a b", "--", "-n", '"$HOME"', "c'd", "*", ":", "", "%3A", "x\ny", "--bind-to", "core", "--mca"]
    job = jobs.torchmpirun("-n", 2, program(HELLO), *words)
    assert (job.returncode, job.stderr) == (0, "")
    lines = job.stdout.splitlines()
    assert [line.split()[:3] for line in lines] == [["0", "2", "1"], ["1", "2", "1"]]
    assert all(line.endswith(str(words)) for line in lines)
    allowed = len(os.sched_getaffinity(0))
    assert sum(int(line.split()[3]) for line in lines) == max(allowed, 2)


def test_a_module_from_the_current_folder_free_of_cores_and_with_logs(tmp_path, no_leftovers):
    jobs.write(tmp_path, HELLO + "print(__name__, __spec__.name, world.rank)", "hello.py")
    options = ["-n", 2, "--bind", "none", "--env", "OMP_NUM_THREADS=7", "--log-dir", "l"]
    job = jobs.torchmpirun(*options, "-m", "hello", "x", cwd=tmp_path)
    assert job.returncode == 0
    *lines, last = job.stdout.splitlines()
    assert [line.split()[3:5] for line in lines] == [[str(len(os.sched_getaffinity(0))), "7"]] * 2
    assert last == "__main__ hello 0"
    assert job.stdout == (tmp_path / "l" / "rank-0.log").read_text()
    assert (tmp_path / "l" / "rank-1.log").read_text() == "__main__ hello 1\n"


ENDS_AT_EXIT = """
import atexit, os, time
if os.environ["RANK"] == "0":
    atexit.register(os._exit, 0)
else:
    time.sleep(1)
    print("done", flush=True)
"""


def test_a_rank_that_ends_by_os_exit_at_exit(program, no_leftovers):
    job = jobs.torchmpirun("-n", 2, program(ENDS_AT_EXIT))
    assert (job.returncode, job.stdout) == (0, "done\n"), job.stderr


def test_time_limit(program, no_leftovers):
    job = jobs.torchmpirun("-n", 2, "--timeout", 2, program(MEET), HANG)
    assert job.returncode == 124
    assert "torchmpirun: the job exceeded its time limit of 2 s (--timeout)" in job.stderr.splitlines()


def test_a_full_disk(program, tmp_path, no_leftovers):
    in_a_namespace = ["unshare", "--mount", "--propagation", "private", "sh", "-c"]
    folder = tmp_path / "logs"
    folder.mkdir()
    mount = f"mount -t tmpfs -o size=64k none {folder}"
    if jobs.run(*in_a_namespace, mount).returncode:
        pytest.skip("file systems cannot be mounted here")
    fills = "world.Barrier(); print('x' * 200_000 * world.rank, flush=True)"
    words = [*jobs.TORCHMPIRUN, "-n", 2, "--log-dir", folder, program(HELLO + fills)]
    job = jobs.run(*in_a_namespace, f'{mount} && exec "$@"', "sh", *words)
    assert job.returncode == 1
    assert "[rank 1] cannot write to this rank's log: No space left on device\n[rank 1] Traceback" in job.stderr
    assert "torchmpirun: rank 1 failed first, with exit code 1" in job.stderr


def test_a_log_holds_the_traceback_and_a_data_set_in_shared_memory_stays(program, tmp_path, no_leftovers):
    data = f"/dev/shm/launch-test-{os.getpid()}.bin"
    text = f"import mmap; file = open({data!r}, 'r+b'); held = mmap.mmap(file.fileno(), 0)\n"
    try:
        with open(data, "wb") as file:
            file.write(b"mine" * 1024)
        job = jobs.torchmpirun("-n", 2, "--log-dir", tmp_path / "logs", program(text + MEET), RAISE)
        assert (job.returncode, os.path.getsize(data)) == (1, 4096)
    finally:
        os.remove(data)
    log = tmp_path / "logs" / "rank-1.log"
    assert "RuntimeError: boom" in log.read_text()
    assert f"torchmpirun: rank 1 failed first, with exit code 1; see {log}\n" in job.stderr


# In place of mpirun: before it starts a former mpirun of the same number has been here, and was killed.
AFTER_ANOTHER = """\
#!/bin/sh
[ "$1" = --version ] && exec {mpirun} "$@"
mkdir -p "$TMPDIR/ompi.$$"
touch "$TMPDIR/ompi.$$/pmix.vm.tool"
exec {mpirun} "$@"
"""

WITH_STARTER = """
import sys
from torchmpi_py.launch import __main__ as main, mpirun
_, starter, *words = sys.argv
find = mpirun.find
mpirun.find = lambda *wanted: (find(*wanted)[0], starter)
sys.exit(main.main(words))
"""


@pytest.mark.skipif(jobs.VENDOR != "openmpi", reason="is about Open MPI's session folder")
def test_the_session_folder_that_a_killed_mpirun_has_left_is_in_nobodys_way(program, tmp_path, no_leftovers):
    starter = jobs.script(tmp_path, AFTER_ANOTHER.format(mpirun=mpirun.find("", os.environ)[1]), "starter")
    job = jobs.run(sys.executable, "-c", WITH_STARTER, starter, "-n", 2, program(HELLO))
    assert (job.returncode, job.stderr) == (0, "")
    assert [line.split()[:3] for line in job.stdout.splitlines()] == [["0", "2", "1"], ["1", "2", "1"]]
    [left] = (tmp_path / "t").iterdir()  # nothing of this job
    assert os.listdir(left) == ["pmix.vm.tool"]
    shutil.rmtree(left)


@pytest.mark.parametrize("vendor", ["intel", "srun"])  # the others run jobs here
def test_dry_run(vendor, no_leftovers):
    words = ["--dry-run", "--mpi", vendor, "-n", 4, "--hosts", "a:2,b:2", "--env", "X=1 2", "train.py", "a b"]
    job = jobs.torchmpirun(*words)
    assert (job.returncode, job.stderr) == (0, "")
    *added, last = job.stdout.splitlines()
    assert "X='1 2' \\" in added
    assert last.startswith(mpirun.vendor_named(vendor).programs[0] + " ")
    assert last.endswith("wrap.py --bind core train.py 'a b'")


def test_mistakes_end_with_2_and_the_remedy(program, no_leftovers):
    path = program(HELLO)
    for words, message in [
        (["nosuch.py"], "nosuch.py: this program does not exist"),
        (["/usr/bin/python3.12", path], "omit /usr/bin/python3.12"),
        (["--hosts", "a:0", path], "has 0 slots"),
        (["--hosts", "a", "--hostfile", "f", path], "use only one of them"),
        (["--log-dir", path, path], "cannot write files there"),
    ]:
        job = jobs.torchmpirun(*words)
        assert (job.returncode, job.stdout, job.stderr.count("\n")) == (2, "", 1)
        assert message in job.stderr
