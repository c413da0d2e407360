"""Ranks that end without having met the others: torchmpirun says which."""

import os
import subprocess
import sys

import pytest

from torchmpi_py.errors import LaunchError
from torchmpi_py.launch import exit_marks, mpirun

try:
    mpirun.find("", os.environ)
    MISSING = ""
except LaunchError as error:
    MISSING = str(error)

pytestmark = pytest.mark.timeout(240)

# Rank 2 becomes another program, of which nothing is known, until torchmpirun has seen it.
PROGRAM = """
import os, sys
from torchmpi_py.launch import variables
rank = variables.rank_in(os.environ)
if rank == 1 and os.fork() == 0:
    sys.exit(0)
if rank == 2:
    wait = 'while [ -e "$TORCHMPIRUN_JOB_DIR/running-2" ] && [ $((i+=1)) -lt 600 ]; do sleep 0.1; done'
    os.execv("/bin/sh", ["sh", "-c", wait])
"""
# As a worker that the rank has spawned: the place is the program's.
OWN_GROUP = """
import os, torch.distributed as dist
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
from torchmpi_py.torch_backend import registration
registration.register()
dist.init_process_group("gloo")
dist.destroy_process_group()
"""
# What a process does, one after the other, the groups in a forked child; whether that counts as a meeting.
STEPS = """
import os
from torchmpi_py.launch import exit_marks
print("nothing", exit_marks.has_met())
import torchmpi_py, torch.distributed as dist
torchmpi_py.engine
print("imports", exit_marks.has_met(), flush=True)
if os.fork() == 0:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()
    print("group", exit_marks.has_met(), flush=True)
    os._exit(0)
os.wait()
import mpi4py.MPI
print("MPI", exit_marks.has_met())
"""


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
def test_torchmpirun_names_them(program, no_leftovers):
    command = [sys.executable, "-m", "torchmpi_py.launch", "-n", "3", str(program(PROGRAM))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    told = "ranks 0, 1 each ran the whole program alone: it called neither mpi.start() nor init_process_group()"
    assert done.stderr == f"torchmpirun: {told}\n"


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
@pytest.mark.parametrize("call", ["import torchmpi_py as mpi; mpi.start()", OWN_GROUP])
def test_a_child_that_meets_is_enough(program, no_leftovers, call):
    run = f"subprocess.run([sys.executable, '-c', {call!r}], check=True, close_fds=False)"  # MPICH's PMI_FD
    text = f"import subprocess, sys\n{run}"
    command = [sys.executable, "-m", "torchmpi_py.launch", "-n", "2", str(program(text))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
def test_what_counts_as_a_meeting():
    done = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True, timeout=200, check=False)
    assert done.stdout.split("\n")[:-1] == ["nothing False", "imports False", "group True", "MPI True"], done.stderr


def test_one_rank_is_named():
    told = "rank 3 ran the whole program alone: it called neither mpi.start() nor init_process_group()"
    assert exit_marks.explain_alone([3]) == told
