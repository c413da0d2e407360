"""Ways a job ends that are neither success nor a plain failure."""

import fcntl
import os
import signal
import subprocess
import sys
import termios
import time

import pytest
import stand_in
from mpi_ranks import MEET
from support import jobs

from torchmpi_py.launch import signals, wrap

pytestmark = [pytest.mark.timeout(240), jobs.needs_mpi]

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


@pytest.mark.parametrize(
    "obstacle",
    [
        "sys.stdout.close(); sys.stderr.close(); os.close(1); os.close(2)",
        # The last is where it would write how it failed.
        "sys.stdout = sys.stderr = None; os.mkdir(os.environ['TORCHMPIRUN_JOB_DIR'] + '/part-1')",
    ],
)
def test_a_rank_that_can_tell_nobody_still_ends_the_job(program, no_leftovers, obstacle):
    text = f"if rank == 1: {obstacle}; raise RuntimeError('boom')"
    assert jobs.torchmpirun("-n", 2, program(MEET), text).returncode == 1


def alone(*words):
    """What one rank does, without a starter."""
    return jobs.run(sys.executable, wrap.__file__, "--bind", "none", *words)


@pytest.mark.parametrize(("how", "ours"), [("plain", 0), ("wrapped", 0), ("broken", 1)])
def test_the_programs_own_excepthook_shows_the_error(program, how, ours):
    rank = alone(program(HOOKED), how)
    assert rank.returncode == 1
    assert rank.stderr.count("hook: RuntimeError boom True\n") == 1
    assert rank.stderr.count("Traceback") == ours


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


@pytest.mark.parametrize(("how", "shown"), [("plain", (1, 0)), ("with its own", (0, 1))])
def test_the_excepthook_of_torch_distributed_is_not_the_programs(program, how, shown):
    rank = alone(program(IN_A_GROUP), how)
    assert rank.returncode == 1
    assert "[rank0]" not in rank.stderr
    assert (rank.stderr.count("Traceback"), rank.stderr.count("hook: boom")) == shown


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
    job = jobs.torchmpirun("-n", 2, program(COLLECTING))
    assert job.returncode == 1
    assert job.stderr.count("RuntimeError: heard") == 1


def test_a_reader_that_goes_away_does_not_end_a_job_with_logs(program, tmp_path, no_leftovers):
    words = ["-n", 2, "--log-dir", tmp_path / "l", program(SLOW), tmp_path / "go on"]
    with jobs.start(*jobs.TORCHMPIRUN, *words) as job:
        assert job.stdout.readline() == "up\n"
        job.stdout.close()
        (tmp_path / "go on").touch()
        assert job.stderr.read() == ""
    assert job.returncode == 0
    assert (tmp_path / "l" / "rank-0.log").read_text() == "up\n" + "more" * 1000 + "\n"


def test_a_program_that_asks_in_vain_does_not_wait_for_ever(program, no_leftovers):
    terminal, job_side = os.openpty()
    in_it = {"stdin": job_side, "start_new_session": True}
    in_it["preexec_fn"] = lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # as a shell does: it controls the session
    for where in (in_it, {"stdin": subprocess.DEVNULL}):
        job = jobs.torchmpirun("-n", 1, program("input()"), **where)
        assert job.returncode == 1
        assert "EOFError" in job.stderr
    os.close(terminal)
    os.close(job_side)


STARTER = """
import signal, time
def note(number, _):
    print(number, flush=True)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, note)
print("up", flush=True)
while True:
    time.sleep(0.1)
"""
OF_SRUN = """
from torchmpi_py.launch import mpirun
jobs.GRACE_SECONDS = 60.0
options = {"vendor": mpirun.vendor_named("srun")}
"""


def test_a_starter_gets_the_signals_that_it_wants(no_leftovers):
    """The next one is due when another signal comes."""
    with stand_in.start(STARTER, before=OF_SRUN) as job:
        for line in ("up\n", "15\n", "15\n"):
            assert job.stdout.readline() == line
            job.send_signal(signal.SIGINT)
            time.sleep(1.2 * signals.SAME_SECONDS)
        assert job.wait(100) == 130


# A starter that ends the job because of a rank on another host; rank 0 has been on this one.
WITH_ANOTHER_HOST = """
import sys, time
from torchmpi_py.launch import exit_marks
with exit_marks.running(sys.argv[1], 0):
    time.sleep(0.5)
sys.exit(255)
"""


ABORT = "MPI_ABORT was invoked on rank 3 in communicator MPI_COMM_WORLD\n  Proc: [[3682,1],3]\n  Errorcode: {}\n"
KILLED = "prterun noticed that process rank {} with PID 136 on node nodeb exited on\nsignal 9 (Killed).\n"
LEFT = "The first process to do so was:\n\n   Process name: [prterun-nodea-124@1,3]\n   Exit code:    5\n"
ERROR = "[rank 3] Traceback (most recent call last):\n"


@pytest.mark.parametrize(
    ("output", "code", "said"),
    [
        (ABORT.format(1) + KILLED.format(3), 137, "rank 3 on nodeb was killed by signal 9"),
        (KILLED.format(0), 255, "torchmpirun: cannot tell which rank failed first"),  # a rank of this host
        (LEFT, 5, "rank 3 on another host ended with exit code 5"),
        (ABORT.format(7), 7, "rank 3 on another host ended with exit code 7"),
        (ABORT.format(1), 255, "torchmpirun: cannot tell which rank failed first"),  # which may report another one
        (ERROR + ABORT.format(1), 255, "rank 3 on another host raised an error"),
    ],
)
def test_what_open_mpis_starter_says_of_a_rank_of_another_host(output, code, said):
    starter = WITH_ANOTHER_HOST.replace("sys.exit", f"print({output!r}, file=sys.stderr)\nsys.exit")
    job = stand_in.run(starter, before="options = dict(num_ranks=4, hosts=(Host('a'), Host('b')))")
    assert job.returncode == code
    assert said in job.stderr.splitlines()[-1]
