"""What is short, missing, or not as one would have it: open files, threads in MPI, another MPI than the launcher's."""

import os

import pytest
from support import jobs

from torchmpi_py.errors import LaunchError
from torchmpi_py.launch import checks, mpirun

pytestmark = pytest.mark.timeout(240)
MPICH = mpirun.vendor_named("mpich")

# Some other files are open already: let 20 more be.
FILES = """
import os, resource, torch, torchmpi_py as mpi
mpi.start()
numbers = map(int, os.listdir("/proc/self/fd"))  # a rank's pipe to torchmpirun has a high one
resource.setrlimit(resource.RLIMIT_NOFILE, (max(n for n in numbers if n < 900) + 20, 4096))
kept = []
try:
    for _ in range(100):
        kept.append(mpi.symmetric_empty(1000))
except mpi.Unavailable as error:
    assert "ulimit -n" in str(error), error
assert 5 < len(kept) < 30
kept.clear()
x = torch.ones(100_000)
mpi.allreduce(x)
assert x[0] == mpi.size()
mpi.symmetric_empty(1000)
"""

THREADS = """
import torch, torchmpi_py as mpi
mpi.start()
from mpi4py import MPI
assert MPI.Query_thread() < MPI.THREAD_MULTIPLE
handles = [mpi.allreduce_async(torch.full((count,), float(mpi.rank()))) for count in (1, 1000, 1_000_000)]
for handle in handles:
    assert handle.wait()[-1] == mpi.size() * (mpi.size() - 1) / 2
server = mpi.paramserver.init(torch.zeros(10))
server.send(torch.ones(10), "add").wait()
mpi.barrier()
assert server.receive().wait()[0] == mpi.size()
"""


def test_too_many_open_files(tmp_path):
    job = jobs.torchmpirun("-n", 2, jobs.write(tmp_path, FILES))
    assert job.returncode == 0, job.stderr


@pytest.mark.slow
def test_an_mpi_for_fewer_threads(tmp_path):
    level = "MPI4PY_RC_THREAD_LEVEL=serialized"
    job = jobs.torchmpirun("-n", 2, "--env", level, jobs.write(tmp_path, THREADS))
    assert job.returncode == 0, job.stderr
    assert "this MPI does not provide MPI_THREAD_MULTIPLE" in job.stderr


def test_another_mpi_than_the_launchers():
    """The rank is refused, and its 16 MiB of shared memory are removed: under srun no starter does that."""
    code = """import os, torchmpi_py as mpi
from torchmpi_py.launch import cleanup
from torchmpi_py.runtime import placement
check = placement.check_world
placement.check_world = lambda size: (print(*cleanup.shared_memory([os.getpid()])), check(size))
mpi.start()"""
    one = jobs.python(code, env={"OMPI_COMM_WORLD_SIZE": "2", "PYTHONWARNINGS": "ignore"})
    assert (one.returncode, [name for name in one.stdout.split() if os.path.exists(name)]) == (1, [])
    assert ("sm_segment" in one.stdout) is (jobs.VENDOR != "mpich")
    assert "TorchMPIError: the launcher started 2 ranks, but MPI sees each as a separate job" in one.stderr
    assert "unset OMPI_COMM_WORLD_SIZE" in one.stderr


def test_shared_memory_for_mpich(tmp_path, capfd):
    checks.check_shared_memory(MPICH, 2, str(tmp_path))
    assert capfd.readouterr().err == ""
    checks.check_shared_memory(MPICH, 1 << 30, str(tmp_path))
    assert f"ranks may crash (signal 7); enlarge {tmp_path} (docker" in capfd.readouterr().err
    with pytest.raises(LaunchError, match=r"mpich needs a writable .*/none; mount"):
        checks.check_shared_memory(MPICH, 2, str(tmp_path / "none"))
