"""Ways a job ends that are neither success nor a plain failure."""

import fcntl
import os
import re
import signal
import subprocess
import sys
import termios
import threading
import time

import pytest

from torchmpi_py.errors import LaunchError
from torchmpi_py.launch import job as jobs, mpirun

try:
    VENDOR = mpirun.find("", os.environ)[0].name
    MISSING = ""
except LaunchError as error:
    VENDOR, MISSING = "", str(error)

pytestmark = [pytest.mark.timeout(240), pytest.mark.skipif(bool(MISSING), reason=MISSING)]

# Rank 1 does what argv[1] says; the others wait for it, and would wait for ever.
FAIL = """
import os, sys
from mpi4py import MPI
MPI.COMM_WORLD.Barrier()
if MPI.COMM_WORLD.rank == 1:
    exec(sys.argv[1])
    raise RuntimeError("boom")
MPI.COMM_WORLD.Barrier()
"""

# Rank 0 says that it is up, and ends when a file appears.
SLOW = """
import os, sys, time
from mpi4py import MPI
if MPI.COMM_WORLD.rank == 0:
    print("up", flush=True)
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.05)
    print("more" * 1000, flush=True)
    time.sleep(0.5)
MPI.COMM_WORLD.Barrier()
"""

# A starter that ends the job because of a rank on another host; rank 0 has been on this one.
WITH_ANOTHER_HOST = """
import os, sys, time
from torchmpi_py.launch import exit_marks
with exit_marks.running(os.environ["TORCHMPIRUN_JOB_DIR"], 0):
    time.sleep(0.5)
sys.exit(255)
"""

HOOKED = """
import sys
def shown(kind, error, frames):
    print("hook:", kind.__name__, error, frames.tb_frame.f_code.co_filename == __file__, file=sys.stderr)
    if sys.argv[1] == "broken":
        raise OSError
def aborting(*failure):
    raise AssertionError
aborting.aborts = True
aborting.former = shown
sys.excepthook = aborting if sys.argv[1] == "wrapped" else shown
raise RuntimeError("boom")
"""


def command(*arguments):
    return [sys.executable, "-m", "torchmpi_py.launch", *map(str, arguments)]


def launch(*arguments, **keywords):
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=200, check=False, **keywords)


@pytest.mark.parametrize(
    "obstacle",
    [
        "sys.stdout.close(); sys.stderr.close()",
        "os.close(1); os.close(2)",
        # The last is where it would write how it failed.
        "sys.stdout = sys.stderr = None; os.mkdir(os.environ['TORCHMPIRUN_JOB_DIR'] + '/part-1')",
    ],
)
def test_a_rank_that_can_tell_nobody_still_ends_the_job(program, no_leftovers, obstacle):
    job = launch("-n", 2, program(FAIL), obstacle)
    assert job.returncode == 1


def test_a_rank_that_leaves_in_the_middle_is_no_success(program, no_leftovers):
    job = launch("-n", 2, program(FAIL), "os._exit(0)")
    assert job.returncode == 1
    assert re.search(r"rank 1 \(process \d+\) ended in the middle of the program, with exit code 0\n$", job.stderr)


@pytest.mark.parametrize(("how", "ours"), [("plain", 0), ("wrapped", 0), ("broken", 1)])
def test_the_programs_own_excepthook_shows_the_error(program, no_leftovers, how, ours):
    job = launch("-n", 1, program(HOOKED), how)
    assert job.returncode == 1
    assert job.stderr.count("hook: RuntimeError boom True\n") == 1
    assert job.stderr.count("[rank 0] Traceback") == ours


IN_A_GROUP = """
import sys
from torch import distributed
if sys.argv[1] == "with its own":
    sys.excepthook = lambda kind, error, frames: print("hook:", error, file=sys.stderr)
for _ in range(2):
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    distributed.destroy_process_group()
raise RuntimeError("boom")
"""


@pytest.mark.parametrize("how", ["plain", "with its own"])
def test_the_excepthook_of_torch_distributed_is_not_the_programs(program, no_leftovers, how):
    pytest.importorskip("torch")
    job = launch("-n", 1, program(IN_A_GROUP), how)
    assert job.returncode == 1
    assert "[rank0]" not in job.stderr
    assert (job.stderr.count("[rank 0] Traceback"), job.stderr.count("hook: boom")) == (
        (1, 0) if how == "plain" else (0, 1)
    )


# As torch.distributed's hook: it shows what the one before it wrote when that returns, which ours does not.
COLLECTING = """
import io, sys, torchmpi_py as mpi
mpi.start()
inner = sys.excepthook
def collecting(*failure):
    stderr, sys.stderr = sys.stderr, io.StringIO()
    inner(*failure)
    text, sys.stderr = sys.stderr.getvalue(), stderr
    sys.stderr.write(text)
sys.excepthook = collecting
if mpi.rank() == 1:
    raise RuntimeError("heard")
mpi.barrier()
"""


def test_a_hook_that_collects_the_error_does_not_swallow_it(program, no_leftovers):
    job = launch("-n", 2, program(COLLECTING))
    assert job.returncode == 1
    assert job.stderr.count("RuntimeError: heard") == 1


def test_a_reader_that_goes_away_does_not_end_a_job_with_logs(program, tmp_path, no_leftovers):
    arguments = command("-n", 2, "--log-dir", tmp_path / "l", program(SLOW), tmp_path / "go on")
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as job:
        assert job.stdout.readline() == "up\n"
        job.stdout.close()
        (tmp_path / "go on").touch()
        assert job.stderr.read() == ""
    assert job.returncode == 0
    assert (tmp_path / "l" / "rank-0.log").read_text() == "up\n" + "more" * 1000 + "\n"


def test_a_program_that_asks_the_terminal_does_not_wait_for_ever(program, no_leftovers):
    def as_a_shell_does():  # the terminal controls the session that torchmpirun is in
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    terminal, job_side = os.openpty()
    try:
        job = launch("-n", 1, program("input()"), stdin=job_side, start_new_session=True, preexec_fn=as_a_shell_does)
    finally:
        os.close(terminal)
        os.close(job_side)
    assert job.returncode == 1
    assert "EOFError" in job.stderr


def test_no_input_is_the_end_of_the_input(program, no_leftovers):
    job = launch("-n", 1, program("input()"), stdin=subprocess.DEVNULL)
    assert job.returncode == 1
    assert "EOFError" in job.stderr


def test_standard_input_that_is_no_terminal_reaches_rank_0(program, no_leftovers):
    job = launch("-n", 1, program("print(input())"), input="a line\n")
    assert (job.returncode, job.stdout) == (0, "a line\n")


def test_a_starter_gets_the_signals_that_it_wants(program, tmp_path, no_leftovers, monkeypatch):
    monkeypatch.setattr(jobs, "GRACE_SECONDS", 60.0)
    seen = tmp_path / "seen"
    starter = program(
        "import os, signal, time\n"
        f"note = lambda number, _: open({str(seen)!r}, 'a').write(f'{{number}} ')\n"
        "for number in (signal.SIGINT, signal.SIGTERM): signal.signal(number, note)\n"
        f"open({str(seen)!r}, 'a').close()\n"
        "while True: time.sleep(0.1)\n"
    )
    stop_signals = mpirun.vendor_named("srun").stop_signals
    folder = tmp_path / "job"
    folder.mkdir()
    environment = os.environ | {"TORCHMPIRUN_JOB_DIR": str(folder)}
    job = jobs.Job([sys.executable, str(starter)], environment, folder, stop_signals=stop_signals)

    def end_when_it_is_up():
        """And again when a signal has come, not as one that counts as the same: the next one is due then."""
        for text in ("", "15 ", "15 15 "):
            while not (seen.exists() and seen.read_text() == text):
                time.sleep(0.01)
            job.signals.ending.append(signal.SIGINT)

    threading.Thread(target=end_when_it_is_up, daemon=True).start()
    assert job.run() == 130
    assert seen.read_text() == "15 15 "


@pytest.mark.parametrize("num_hosts", [1, 2])
def test_a_job_that_a_rank_of_another_host_may_have_ended(tmp_path, num_hosts):
    environment = os.environ | {"TORCHMPIRUN_JOB_DIR": str(tmp_path)}
    line = [sys.executable, "-c", WITH_ANOTHER_HOST]
    job = jobs.Job(line, environment, tmp_path, num_ranks=2, num_hosts=num_hosts)
    assert job.run() == 255
    assert ("which rank ended the job is not known" in job.reason) == (num_hosts == 2)
