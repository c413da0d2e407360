"""What is used again and again does not grow: file descriptors, shared memory, threads, processes' memory."""

import json

import harness
import pytest
from support.jobs import needs_mpi, write

pytestmark = [pytest.mark.timeout(1500), pytest.mark.slow, needs_mpi]

# What may come on top after the warm-up: MPIs keep pools that grow in steps.
MORE = {"descriptors": 3, "threads": 0, "shared": 0, "rss": 6 << 10}
TURNS = {"split": 1000, "asynchronous": 1000, "symmetric": 1000, "session": 60}
PROGRAM = """
import gc, json, os, sys, threading
import torch, torchmpi_py as mpi

what, turns = sys.argv[1], int(sys.argv[2])
mpi.start()
me, size = mpi.rank(), mpi.size()


def measured():
    for thread in threading.enumerate():
        if thread.name == "torchmpi_py-arrival":
            thread.join()  # it ends by itself, a little later
    gc.collect()
    mpi.barrier()
    mapped = {line.split(maxsplit=5)[5] for line in open("/proc/self/maps") if "/dev/shm/" in line}
    rss = int(next(line for line in open("/proc/self/status") if line.startswith("VmRSS")).split()[1])
    counts = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), len(mapped), rss
    mpi.barrier()
    return dict(zip(("descriptors", "threads", "shared", "rss"), counts))


def split():
    with mpi.split(me % 2) as comm:
        assert mpi.allreduce(1, comm=comm) == comm.size


def asynchronous():
    count = (3, 3, 3, 30_000)[turn % 4]
    handles = [mpi.allreduce_async(torch.ones(count)) for _ in range(10)]
    handles[3] = None
    assert all((handle.wait() == size).all() for handle in handles if handle is not None)


def symmetric():
    x = mpi.symmetric_empty(40_000).fill_(1)
    assert (mpi.allreduce(x) == size).all()


def session():
    mpi.stop()
    mpi.start()
    assert mpi.allreduce(1) == size
    mpi.allreduce(torch.ones(100_000))


for turn in range(turns):
    globals()[what]()
    if turn == turns // 4:
        before = measured()
after = measured()
for rank in range(size):
    mpi.barrier()
    if rank == me:
        print(json.dumps([before, after]), flush=True)
mpi.stop()
"""


@pytest.mark.parametrize("what", TURNS)
def test_nothing_grows(judge, tmp_path, what):
    line = harness.command(2, write(tmp_path, PROGRAM), what, str(TURNS[what]))
    outcome = harness.run(f"{TURNS[what]} times {what}", line, {"TORCHMPI_DEADLINE_SECONDS": "60"}, 400)
    outcome.expect(outcome.code == 0, "it failed")
    for before, after in map(json.loads, outcome.output.splitlines()):
        outcome.name += ", " + " ".join(f"{key} {after[key] - before[key]:+d}" for key in MORE)
        for key, allowed in MORE.items():
            outcome.expect(after[key] - before[key] <= allowed, f"{key}: {before} {after}")
    judge(outcome.name, [outcome])
