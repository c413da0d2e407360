"""What is used again and again does not grow: file descriptors, shared memory, threads, processes' memory."""

import json
import sys

import harness
import pytest

pytestmark = [
    pytest.mark.timeout(1500),
    pytest.mark.skipif(bool(harness.MISSING), reason=harness.MISSING),
    pytest.mark.skipif(not harness.ALL, reason="scripts/test_faults runs it"),
]

# What may come on top after the warm-up: MPIs keep pools that grow in steps.
DESCRIPTORS = 3
THREADS = 0
RSS_KIB = 6 << 10

PROGRAM = """
import gc, json, os, sys, threading
from pathlib import Path
import torch, torchmpi_py as mpi

what, number = sys.argv[1], int(sys.argv[2])
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


work, per_turn = {"split": (split, 1), "asynchronous": (asynchronous, 10), "symmetric": (symmetric, 1)}[what]
turns = number // per_turn
for turn in range(turns):
    work()
    if turn == turns // 4:
        before = measured()
after = measured()
folder = Path(os.environ["FAULTS_JOB"])
for rank in range(size):
    mpi.barrier()
    if rank == me:
        print(json.dumps([before, after]), flush=True)
mpi.stop()
"""
ONCE = "import torchmpi_py as mpi\nmpi.start()\nassert mpi.allreduce(1) == mpi.size()\nmpi.stop()\n"
NUMBERS = {"split": 1000, "asynchronous": 10_000, "symmetric": 1000}


def _in_words(grown):
    return " ".join(f"{key} {value:+d}" for key, value in grown.items())


@pytest.mark.parametrize("what", NUMBERS)
def test_nothing_grows(judge, tmp_path, what):
    (tmp_path / "program.py").write_text(PROGRAM)
    number = NUMBERS[what]
    line = harness.command(2, tmp_path / "program.py", what, str(number))
    outcome = harness.run(f"{number} times {what}", line, {"TORCHMPI_DEADLINE_SECONDS": "60"}, 400)
    outcome.expect(outcome.code == 0, "it failed")
    for before, after in map(json.loads, outcome.output.splitlines()):
        grown = {key: after[key] - before[key] for key in before}
        outcome.name += f", {_in_words(grown)}"
        outcome.expect(grown["descriptors"] <= DESCRIPTORS, f"file descriptors: {before} {after}")
        outcome.expect(grown["threads"] <= THREADS, f"threads: {before} {after}")
        outcome.expect(grown["shared"] <= 0, f"shared memory: {before} {after}")
        outcome.expect(grown["rss"] <= RSS_KIB, f"memory: {before} {after}")
    judge(outcome.name, [outcome])


def test_start_and_stop_in_one_process(judge, tmp_path):
    """Again and again: all that there was is given back."""
    program = PROGRAM.split("work, per_turn")[0].replace("mpi.start()\n", "mpi.start()\nmpi.stop()\n", 1).replace(
        "me, size = mpi.rank(), mpi.size()", "size = 2"
    ) + (
        "for turn in range(number):\n"
        "    mpi.start()\n    assert mpi.allreduce(1) == 2\n    mpi.allreduce(torch.ones(100_000))\n"
        "    if turn in (number // 4, number - 1):\n        print(json.dumps(measured()), mpi.rank(), flush=True)\n"
        "    mpi.stop()\n"
    )
    (tmp_path / "program.py").write_text(program)
    number = 60
    outcome = harness.run(
        f"{number} starts in one process", harness.command(2, tmp_path / "program.py", "", str(number)), None, 200
    )
    outcome.expect(outcome.code == 0, "it failed")
    measured = {0: [], 1: []}
    for line in outcome.output.splitlines():
        measured[int(line[-1])].append(json.loads(line[:-2]))
    for before, after in measured.values():
        grown = {key: after[key] - before[key] for key in before}
        outcome.name += f", {_in_words(grown)}"
        within = grown["descriptors"] <= DESCRIPTORS and grown["threads"] <= THREADS and grown["shared"] <= 0
        outcome.expect(within and grown["rss"] <= RSS_KIB, f"{before} {after}")
    judge(outcome.name, [outcome])


def test_start_and_stop_in_fresh_processes(judge, tmp_path):
    """A world of one, and of two: they end well, and leave nothing."""
    (tmp_path / "program.py").write_text(ONCE)

    def alone(number):
        line = [sys.executable, str(tmp_path / "program.py")]
        return harness.run(f"start alone {number}", line, None, 60)

    def together(number):
        starter = ("torchmpirun", "mpirun")[number % 2]
        return harness.run(f"start {number}", harness.command(2, tmp_path / "program.py", starter=starter), None, 60)

    for what, each in (("a world of one", alone), ("two ranks", together)):
        outcomes = harness.at_once(3, range(100), each)
        for outcome in outcomes:
            outcome.expect(outcome.code == 0, "it failed")
            outcome.expect(not outcome.errors.strip(), "it wrote to standard error")
        judge(f"start and stop, {what}", outcomes)
