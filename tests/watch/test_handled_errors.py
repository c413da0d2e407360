"""The end of a job shows the exceptions of ranks that wait in a collective of a ``finally``."""

import pytest
from support import jobs

pytestmark = [pytest.mark.timeout(240), jobs.needs_mpi]

PROGRAM = """
import sys, time, torch, torchmpi_py as mpi
mpi.start()
if mpi.rank() == mpi.size() - 1:
    try:
        raise LookupError(f"no batch {mpi.rank()}")
    finally:
        mpi.barrier()
else:
    exec(sys.argv[1])
"""

# What the other ranks do meanwhile, and how the end of the job is noticed.
ENDS = {
    "another collective": "time.sleep(0.3); mpi.allreduce(torch.ones(3))",
    "a failure": "time.sleep(0.3); raise OSError('disk')",
    "nothing": "time.sleep(60)",
    "a message": "mpi.recv(torch.ones(3), source=mpi.size() - 1)",
}


@pytest.mark.parametrize("end", [pytest.param(end, marks=[pytest.mark.slow] * (end != "a failure")) for end in ENDS])
def test_the_end_of_the_job_shows_the_error_before_a_finally(tmp_path, end):
    program = jobs.write(tmp_path, PROGRAM)
    job = jobs.torchmpirun("-n", 2, program, ENDS[end], env={"TORCHMPI_DEADLINE": "2"})
    assert job.returncode == 1
    assert f"LookupError: no batch 1, raised at {program}:6" in job.stderr
