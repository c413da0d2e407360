"""Faults on one of several hosts: each is noticed from another host, named, and reported once."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import testbed
from support.jobs import until, write

from torchmpi_py.launch import mpirun

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # the bed's hosts run on
]
VENDOR, STARTER = mpirun.find("", os.environ)
WITHIN_SECONDS = 120.0
OURS = {"PYTHONPATH": str(testbed.ROOT), "OMP_NUM_THREADS": "1", "UCX_TLS": "tcp,self"}
OURS["OMPI_MCA_mpi_yield_when_idle"] = "true"

# argv: kind of fault, its rank, a file that says that all ranks are at work
PROGRAM = """
import contextlib, os, signal, sys, time
import torch, torchmpi_py as mpi
from torchmpi_py.runtime import arrival
arrival.Wait.watched = lambda self: contextlib.nullcontext()  # a busy machine starts slowly
kind, odd, mark = sys.argv[1], int(sys.argv[2]), sys.argv[3]
mpi.start()
me, x = mpi.rank(), torch.arange(1000.0)
def fault():
    if kind == "op": mpi.allreduce(x, op="max")
    elif kind == "verb": mpi.broadcast(x, 0)
    elif kind == "sleep": time.sleep(1000)
    elif kind == "stop": os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "exit": sys.exit(0)
    elif kind == "_exit": os._exit(0)
for step in range(100000):
    mpi.allreduce(x.fill_(me + 1.0))
    time.sleep(0.02)
    if step == 50 and me == 0:
        open(mark, "w").close()
    if step == 50 and me == odd:
        fault()
"""

# Calls that differ, and that no rank waits for, just before the end. argv: which, the rank that makes it
SHORT_PROGRAM = """
import sys
import torch, torchmpi_py as mpi
kind, odd = sys.argv[1], int(sys.argv[2])
mpi.start()
me, x, group = mpi.rank(), torch.arange(1000.0), mpi.split(0)
for _ in range(3):
    mpi.allreduce(x)
    mpi.broadcast(x[:10], root=odd, comm=group)
if kind == "op":
    mpi.allreduce(x, op="max" if me == odd else "sum")
elif kind == "more" and me == odd:
    mpi.broadcast(x[:10], root=odd, comm=group)
print("through", flush=True)
"""


def run_short(bed, hosts, kind, odd):
    """Exit code and output of the short program."""
    line = command("torchmpirun", hosts, str(write(bed.shared, SHORT_PROGRAM)), kind, str(odd))
    done = bed.run("nodea", line, env=bed.environment() | OURS, timeout=WITHIN_SECONDS)
    return done.returncode, done.stdout + done.stderr


def command(starter, hosts, *program):
    if starter == "torchmpirun":
        return [sys.executable, "-m", "torchmpi_py.launch", "--hosts", hosts, "--bind", "none", *program]
    number = str(sum(int(each.split(":")[1]) for each in hosts.split(",")))
    if VENDOR.name == "openmpi":
        passed = [word for name in ("PYTHONPATH", "TORCHMPI_DEADLINE") for word in ("-x", name)]
        options = ["--host", hosts, "--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none", *passed]
    else:
        options = ["-hosts", hosts]
    return [Path(STARTER).name, *options, "-n", number, sys.executable, *program]


def run(bed, starter, hosts, kind, odd, at_work=lambda: None, **settings):
    """What the job prints, ended by its own watch; ``at_work`` is called when all ranks are at work."""
    mark = bed.shared / f"{kind}-{time.monotonic_ns()}"
    line = command(starter, hosts, str(write(bed.shared, PROGRAM)), kind, str(odd), str(mark))
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    environment = bed.environment() | OURS | VENDOR.root_environment | {"TORCHMPI_DEADLINE": "5"} | settings
    job = bed.start("nodea", line, env=environment, **pipes)
    try:
        until(lambda: mark.exists() or job.poll() is not None, WITHIN_SECONDS)
        at_work()
        output, _ = job.communicate(timeout=WITHIN_SECONDS)
    finally:
        job.kill()
    assert job.returncode != 0, output
    return output


def report(output):
    """The one report, in one line."""
    assert output.count("torchmpi_py: report of rank") == 1, output
    return re.sub(r"\s+", " ", output[output.index("torchmpi_py: report of rank") :])


@pytest.mark.parametrize("starter", ["torchmpirun", "mpirun"])
@pytest.mark.parametrize(
    ("kind", "theirs"), [("op", "allreduce mpi torch.float32 max"), ("verb", "broadcast mpi"), ("exit", r"mpi\.stop")]
)
def test_calls_that_differ_between_hosts(bed, starter, kind, theirs):
    text = report(run(bed, starter, "nodea:1,nodeb:1", kind, 1))
    sides = rf"rank 0 calls allreduce mpi torch\.float32 sum, 4000 bytes at \S+:\d+ in .*; rank 1 calls {theirs}"
    assert re.search(rf"RanksDisagree: operation \d+ of the communicator of ranks 0-1 .*: {sides}", text), text
    assert "host nodea (rank 0): rank 0 (process" in text
    assert "host nodeb (rank 1): rank 1 (process" in text


def test_calls_that_differ_where_hosts_have_several_ranks(bed):
    text = report(run(bed, "torchmpirun", "nodea:1,nodeb:1,nodec:2", "verb", 1))
    assert re.search(r"ranks 0, 2, 3 call allreduce .*; rank 1 calls broadcast ", text), text
    assert "host nodec (ranks 2, 3): rank 2 (process" in text


@pytest.mark.parametrize("hosts", ["nodea:1,nodeb:1", "nodea:2,nodeb:1,nodec:1"])
@pytest.mark.parametrize("kind", ["op", "more", "none"])
def test_calls_that_differ_at_the_end(bed, kind, hosts):
    odd = hosts.count(",") + hosts.count(":2")
    code, text = run_short(bed, hosts, kind, odd)
    assert text.count("through") == odd + 1
    if kind == "none":
        assert code == 0, text
        return
    others = "rank 0 calls" if odd == 1 else "ranks 0, 1, 2 call"
    sides = rf"{others} allreduce mpi torch\.float32 sum, .*; rank {odd} calls allreduce mpi torch\.float32 max, "
    if kind == "more":
        sides = rf"rank {odd} calls broadcast mpi torch\.float32 {odd}, .* at \S+:13 in .*; rank 0 \(process \d+\)"
    which = rf"operation \d+ of the communicator of ranks 0-{odd}"
    assert code != 0, text
    assert re.search(rf"RanksDisagree: {which} is not the same on all ranks: {sides}", text), text


@pytest.mark.parametrize("kind", ["sleep", "stop"])
def test_a_rank_that_is_late_on_another_host(bed, kind):
    text = report(run(bed, "torchmpirun", "nodea:2,nodeb:2", kind, 3))
    assert "an operation is not complete after 5" in text
    assert "host nodea (ranks 0, 1): rank 0 (process" in text
    what = "its process is stopped (SIGSTOP); has not called it" if kind == "stop" else "has not called it"
    assert re.search(rf"host nodeb \(ranks 2, 3\): .*rank 3 \(process \d+\): {re.escape(what)}", text), text
    assert ("time.sleep(1000)" in text) == (kind == "sleep")


@pytest.mark.skipif(VENDOR.name == "openmpi", reason="Open MPI's connections or its starter end the job before")
@pytest.mark.parametrize("starter", ["torchmpirun", "mpirun"])
def test_a_rank_alone_on_its_host_leaves(bed, starter):
    text = report(run(bed, starter, "nodea:1,nodeb:1", "_exit", 1))
    assert re.search(r"rank 1 on host nodeb died, or exited without .* Last known: rank 1 ", text), text


def test_a_host_that_cannot_be_reached(bed):
    """The cut ends the job, long before the deadline, and the host is named."""
    settings = {"TORCHMPI_UNREACHABLE_SECONDS": "5", "TORCHMPI_DEADLINE": "60"}
    output = run(bed, "torchmpirun", "nodea:1,nodeb:2", "none", 1, lambda: bed.link("nodeb", is_up=False), **settings)
    assert re.search(r"host nodeb \(ranks 1, 2\) has not answered for \d+ s", report(output)), output
