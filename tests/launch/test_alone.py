"""Ranks that end without having met the others: torchmpirun says which."""

import pytest
from support import jobs

from torchmpi_py.launch import exit_marks

pytestmark = [pytest.mark.timeout(240), jobs.needs_mpi]

# Rank 2 becomes another program, of which nothing is known, until torchmpirun has seen it.
PROGRAM = """
import atexit, os, sys, time
rank = os.environ["RANK"]
if os.fork() == 0:
    os._exit(7)  # is no death of the rank
if rank == "1" and os.fork() == 0:
    sys.exit(0)
if rank == "2":
    wait = 'while [ -e "$TORCHMPIRUN_JOB_DIR/running-2" ] && [ $((i+=1)) -lt 600 ]; do sleep 0.1; done'
    os.execv("/bin/sh", ["sh", "-c", f"{wait}; echo another program"])
atexit.register(time.sleep, 0.3)
"""
# What a process does, one after the other, the groups in forked children; whether that counts as a meeting.
STEPS = """
import os, sys
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
if os.fork() == 0:  # as a worker that a rank has spawned: the place is the program's
    os.environ |= {"TORCHMPIRUN_JOB_DIR": sys.argv[1], "OMPI_COMM_WORLD_RANK": "3"}
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    from torchmpi_py.torch_backend import registration
    registration.register()
    dist.init_process_group("gloo")
    print("a child's group", os.listdir(sys.argv[1]), flush=True)
    os._exit(0)
os.wait()
import mpi4py.MPI
print("MPI", exit_marks.has_met())
"""


def test_torchmpirun_names_them_and_sees_no_death(program, no_leftovers):
    done = jobs.torchmpirun("-n", 3, program(PROGRAM))
    told = "ranks 0, 1 each ran the whole program alone; to connect the ranks, call mpi.start() or init_process_group()"
    assert (done.returncode, done.stdout, done.stderr) == (0, "another program\n", f"torchmpirun: {told}\n")
    assert exit_marks.explain_alone([3]).startswith("rank 3 ran the whole program alone")


def test_a_child_that_meets_is_enough(program, no_leftovers):
    call = "subprocess.run([sys.executable, '-c', 'import torchmpi_py as mpi; mpi.start()'], check=True"
    done = jobs.torchmpirun("-n", 2, program(f"import subprocess, sys\n{call}, close_fds=False)"))  # MPICH's PMI_FD
    assert (done.returncode, done.stderr) == (0, "")


def test_what_counts_as_a_meeting(tmp_path):
    done = jobs.python(STEPS, tmp_path)
    found = ["nothing False", "imports False", "group True", "a child's group ['met-3']", "MPI True"]
    assert done.stdout.splitlines() == found, done.stderr
