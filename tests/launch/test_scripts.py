"""The ready scripts of launch/, through the MPI of this environment."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from torchmpi_py.errors import LaunchError
from torchmpi_py.launch import __main__ as launcher
from torchmpi_py.launch import mpirun

try:
    FOUND = mpirun.find("", os.environ)
except LaunchError:
    FOUND = (None, "")
VENDOR, PROGRAM = FOUND
FOLDER = Path(__file__).parents[2] / "launch"
HOST_LINE = {"openmpi": "localhost slots=2\n", "mpich": "localhost:2\n"}

pytestmark = pytest.mark.timeout(240)

HELLO = """
import os, sys
from mpi4py import MPI
print(MPI.COMM_WORLD.allreduce(1), sys.argv[1:], os.environ.get("TORCHMPI_PROFILE"))
"""


@pytest.mark.parametrize("several", ["", "_hostfile"])
@pytest.mark.skipif(VENDOR is None or VENDOR.name not in HOST_LINE, reason="neither Open MPI nor MPICH here")
def test_script(tmp_path, several):
    program = tmp_path / "a program.py"
    program.write_text(HELLO)
    (tmp_path / "the hosts").write_text(HOST_LINE[VENDOR.name])
    where = {"HOSTFILE": str(tmp_path / "the hosts")} if several else {"NP": "2"}
    where |= {"PYTHON": sys.executable, "MPIRUN": PROGRAM, "MPIEXEC": PROGRAM, "LOG_DIR": str(tmp_path / "logs")}
    where |= {"PROFILE": "traces"}
    script = FOLDER / f"{VENDOR.name}{several}.sh"
    job = subprocess.run(
        [script, program, "a b", "$HOME"],
        env=launcher.inherited_environment(os.environ) | where,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert (job.returncode, job.stdout, job.stderr) == (0, "", "")
    for rank in range(2):
        log = (tmp_path / "logs" / f"rank-{rank}.log").read_text()
        assert log == f"2 ['a b', '$HOME'] {Path.cwd() / 'traces'}\n"


@pytest.mark.skipif(VENDOR is None or VENDOR.name not in HOST_LINE, reason="neither Open MPI nor MPICH here")
def test_a_rank_that_fails_before_mpi_starts_ends_the_job_without_torchmpirun(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import os\n"
        "if os.environ.get('OMPI_COMM_WORLD_RANK', os.environ.get('PMI_RANK')) == '1': raise RuntimeError('early')\n"
        "from mpi4py import MPI; MPI.COMM_WORLD.Barrier()\n"
    )
    environment = launcher.inherited_environment(os.environ) | {"NP": "2", "PYTHON": sys.executable}
    environment |= {"MPIRUN": PROGRAM, "MPIEXEC": PROGRAM}
    environment.pop("TORCHMPIRUN_JOB_DIR", None)
    script = FOLDER / f"{VENDOR.name}.sh"
    job = subprocess.run([script, program], env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert job.returncode != 0  # not always 1: some Open MPI starters crash over a rank that leaves this early
    assert job.stderr.count("Traceback") == 1


@pytest.mark.parametrize("name", ["openmpi.sh", "mpich.sh"])
def test_thread_settings_do_not_change_the_default_number_of_ranks(name):
    environment = os.environ | {"OMP_NUM_THREADS": "1000", "OMP_THREAD_LIMIT": "1", "MPIRUN": "echo", "MPIEXEC": "echo"}
    environment.pop("NP", None)
    job = subprocess.run([FOLDER / name, "a.py"], env=environment, capture_output=True, text=True, timeout=20)
    assert job.stdout.startswith(f"{len(os.sched_getaffinity(0))} ")  # echo takes the -n for itself


@pytest.mark.parametrize("script", sorted(FOLDER.iterdir()), ids=lambda path: path.name)
def test_scripts_are_executable_and_parse(script):
    assert os.access(script, os.X_OK)
    subprocess.run([shutil.which("bash"), "-n", script], check=True, timeout=20)
    lines = script.read_text().splitlines()
    assert all(line.startswith("#") for line in lines[:6])
    assert "set -euo pipefail" in lines
