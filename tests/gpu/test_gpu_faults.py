"""Ranks that die, sleep or call something else while they work on GPU tensors: jobs of their own."""

import os
import time
from pathlib import Path

import pytest
import torch
from support import jobs

if not torch.cuda.is_available():
    pytest.skip("no GPU that torch can use", allow_module_level=True)

ROOT = Path(__file__).parents[2]
WORK = """
import os, signal, sys, time
import torch
import torchmpi_py as mpi

flavour, fault = sys.argv[1:]
mpi.start(with_cuda=True)
first, step = mpi.rank(), 0
x = torch.empty(1_000_003, device=mpi.device())
y = mpi.symmetric_empty(300_001, device=mpi.device())


def work():
    global step
    while step < 60:
        if (first, step) == (1, 30):
            print("the fault", flush=True)
            if fault == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "asleep":
                time.sleep(100)
            if fault == "another call":
                mpi.broadcast(x, root=0, flavour=flavour)
        for z in (x, y):
            z.fill_(mpi.rank() + step)
            mpi.allreduce_async(z, flavour=flavour).wait()
            assert (z == mpi.size() * step + mpi.size() * (mpi.size() - 1) // 2).all()
        step += 1


while step < 60:
    with mpi.elastic() as attempt:
        work()
    if attempt.has_recovered:
        step = mpi.allreduce(step, op="min")
        y = mpi.symmetric_empty(300_001, device=mpi.device())
print(f"done on {mpi.size()} ranks: {x[0].item():g}", flush=True)
mpi.stop()
"""


def run(tmp_path, flavour, fault, *options):
    settings = {"TORCHMPI_DEADLINE": "5", "TORCHMPI_DUMP_DIR": str(tmp_path)}
    settings["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    words = ["-n", "3", "--timeout", "100", *options, jobs.write(tmp_path, WORK), flavour, fault]
    begin = time.monotonic()
    job = jobs.torchmpirun(*words, seconds=150, env=settings)
    job.seconds = time.monotonic() - begin
    return job


@pytest.mark.parametrize(
    ("fault", "flavour", "said"),
    [
        ("killed", "cudaipc", "rank 1"),
        ("killed", "staged", "rank 1"),
        ("asleep", "cudaipc", "time.sleep(100)"),
        ("another call", "cudaipc", "broadcast"),
    ],
)
def test_the_job_ends(tmp_path, fault, flavour, said):
    job = run(tmp_path, flavour, fault)
    assert job.returncode != 0, job.stdout + job.stderr
    assert job.stdout.splitlines() == ["the fault"], job.stdout + job.stderr
    assert said in job.stderr, job.stderr
    assert job.seconds < 90, job.stderr


def test_survivors_go_on(tmp_path):
    job = run(tmp_path, "cudaipc", "killed", "--elastic", "--max-restarts", "0")
    if "does not support --elastic" in job.stderr:
        pytest.skip("this MPI has no ULFM")
    assert job.returncode == 0, job.stdout + job.stderr
    assert sorted(job.stdout.splitlines()) == ["done on 2 ranks: 119"] * 2 + ["the fault"], job.stdout + job.stderr
