"""A program that catches the error of a mismatch and goes on: no later result is wrong, and the job ends."""

import subprocess
import sys
from pathlib import Path

import harness
import pytest

pytestmark = [pytest.mark.timeout(150), pytest.mark.skipif(bool(harness.MISSING), reason=harness.MISSING)]
TORCHMPIRUN = Path(sys.executable).with_name("torchmpirun")

PROGRAM = """
import pickle, sys, torch, torchmpi_py as mpi

mpi.start()
rank, size = mpi.rank(), mpi.size()
odd = rank == size - 1
comm = mpi.split(0) if "group" in sys.argv else mpi.communicator()


def mismatch():
    kind = sys.argv[1]
    if kind == "count":
        mpi.allreduce(torch.ones(17 + odd), comm=comm)
    elif kind == "dtype":
        mpi.allreduce(torch.ones(4000, dtype=torch.float64 if odd else torch.float32), comm=comm)
    elif kind == "launch":
        mpi.allreduce_async(torch.ones(17 + odd), comm=comm).wait()
    elif kind == "verb":
        x = torch.ones(400)
        mpi.broadcast(x, 0, comm=comm) if odd else mpi.allreduce(x, comm=comm)
    elif kind == "object":
        mpi.broadcast_object((lambda: 1) if odd else None, size - 1, comm=comm)
    elif odd:  # kind is "barrier"
        mpi.barrier(comm)
    else:
        mpi.allreduce(torch.ones(3), comm=comm)


def attempt(call):
    try:
        return call()
    except (mpi.TorchMPIError, AttributeError, pickle.PicklingError) as error:
        print(f"rank {rank}: {type(error).__name__}: {error}", flush=True)


attempt(mismatch)
for number in range(4):
    x = torch.full((1000,), float(10 + rank + 100 * number))
    wanted = sum(10 + each + 100 * number for each in range(size))
    if "launch" in sys.argv:
        result = attempt(lambda: mpi.allreduce_async(x, comm=comm).wait())
    else:
        result = attempt(lambda: mpi.allreduce(x, comm=comm))
    if result is not None and not bool((result == wanted).all()):
        print(f"rank {rank}: call {number} is WRONG: {result.unique().tolist()[:4]}, right is {wanted}", flush=True)
print(f"rank {rank}: at its end", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "num_ranks", "where"),
    [
        ("count", 2, "world"),
        ("dtype", 3, "group"),
        ("launch", 2, "world"),
        ("verb", 3, "group"),
        ("barrier", 2, "group"),
        ("object", 3, "world"),
    ],
)
def test_a_caught_mismatch_leads_to_no_wrong_number(tmp_path, kind, num_ranks, where):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [TORCHMPIRUN, "-n", str(num_ranks), "--env", "TORCHMPI_DEADLINE_SECONDS=40", program, kind, where],
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
    )
    printed = done.stdout + done.stderr
    assert "WRONG" not in printed, printed
    assert done.returncode != 0, printed
    first = "pickle" if kind == "object" else "RanksDisagree: "  # raised, or in the report of a rank that ends the job
    assert first in printed, printed
