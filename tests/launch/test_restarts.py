"""A rank that dies is named; a job that failed is started again, where that is asked for."""

import os
import re
import subprocess

import pytest
from mpi_ranks import MEET
from support import jobs

from torchmpi_py.launch import deaths, exit_marks

pytestmark = pytest.mark.timeout(240)

# Rank 1 is killed in the attempts before number argv[2], while the others wait for it.
DIE = """
attempt = int(os.environ["TORCHMPIRUN_RESTART"])
print(f"rank {rank} in attempt {attempt}", flush=True)
world.Barrier()
if rank == 1 and attempt < int(sys.argv[2]):
    time.sleep(1)  # torchmpirun tells who died first once it has seen the ranks
    os.kill(os.getpid(), signal.SIGKILL)
"""

SURVIVE = """
import mpi4py, os, sys, time
mpi4py.rc.finalize = False  # it may hang after a death
from mpi4py import MPI
world = MPI.COMM_WORLD
world.Set_errhandler(MPI.ERRORS_RETURN)
try:
    world.Barrier()  # another may have died before this rank is through
    if world.rank == 1:
        os.kill(os.getpid(), 9)
    while True:
        world.Barrier()
        time.sleep(0.05)
except MPI.Exception:
    if os.environ["TORCHMPIRUN_RESTART"] == "0":
        os.kill(os.getpid(), 9)
    world.Revoke()
    print(world.Shrink().size, "go on", flush=True)
"""


@jobs.needs_mpi
def test_a_job_is_started_again_and_the_logs_go_on(program, tmp_path, no_leftovers):
    options = ["-n", 3, "--max-restarts", 2, "--log-dir", tmp_path / "l"]
    job = jobs.torchmpirun(*options, program(MEET), DIE, 1)
    assert job.returncode == 0
    said = r"attempt 1 of 3 failed \(rank 1 \(process \d+\) (was killed by signal 9|died)\); starting again"
    assert len(re.findall(f"torchmpirun: {said}", job.stderr)) == job.stderr.count("torchmpirun: ") == 1
    assert [job.stdout.count(f"rank 0 in attempt {attempt}\n") for attempt in (0, 1)] == [1, 1]
    for rank in (0, 1, 2):
        lines = (tmp_path / "l" / f"rank-{rank}.log").read_text().splitlines()
        found = [line for line in lines if line.startswith("rank")]
        assert found == [f"rank {rank} in attempt {attempt}" for attempt in (0, 1)]


@jobs.needs_mpi
def test_elastic(program, no_leftovers):
    if jobs.VENDOR == "openmpi":
        job = jobs.torchmpirun("-n", 3, "--elastic", "--max-restarts", 1, program(SURVIVE))
        assert "2 go on" in job.stdout
        death = r"torchmpirun: rank (\d) \(process \d+\) (?:was killed by signal 9|died)(; the other ranks continue)?\n"
        told = re.findall(death, job.stderr)
        assert [bool(others) for _, others in told] == [True, True, False, True], job.stderr
        assert sorted(rank for rank, _ in told) == ["0", "1", "1", "2"]
        assert told[3][0] == "1"
        assert re.search(r"attempt 1 of 2 failed \((rank \d [^;]*(; )?){3}\); starting again", job.stderr)
        return
    job = jobs.torchmpirun("-n", 2, "--elastic", program(MEET), DIE, 2)
    assert job.returncode == 0
    assert f"{jobs.VENDOR} does not support --elastic" in job.stderr
    assert "attempt 2 of 4 failed" in job.stderr


@pytest.mark.parametrize("is_ending", [True, False])
def test_deaths_are_told_in_the_order_of_their_beginnings(tmp_path, monkeypatch, is_ending):
    """Of a rank that takes long to end, and of one that has closed its pipe and lives on."""
    monkeypatch.setattr(deaths, "ENDING_SECONDS", 100.0 if is_ending else 0.0)
    with subprocess.Popen(["sleep", "100"]) as one, subprocess.Popen(["sleep", "100"]) as other:
        pipes = []
        for rank, process in enumerate((one, other)):
            os.mkfifo(tmp_path / f"alive-{rank}")
            pipes.append(os.open(tmp_path / f"alive-{rank}", os.O_RDWR | os.O_CLOEXEC))
            exit_marks.record(str(tmp_path), f"running-{rank}", process.pid)
        lookout = deaths.Lookout(tmp_path, os.getpid(), 2)
        try:
            lookout.wait(0.0)
            for pipe in pipes:
                os.close(pipe)
            other.kill()
            os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
            seen = lookout.wait(0.05) + lookout.wait(0.05)
            assert lookout.is_holding == is_ending
            one.kill()
            os.waitid(os.P_PID, one.pid, os.WEXITED | os.WNOWAIT)
            told = [(death.rank, death.status, death.num_left) for death in seen + lookout.wait(1.0)]
            assert told == ([(0, 9, 1), (1, 9, 0)] if is_ending else [(1, 9, 1), (0, 9, 0)])
        finally:
            one.kill()
            lookout.close()
