"""Parameter servers on any number of ranks, with values that depend on element and rank."""

import gc
import os
import re
import signal
import subprocess
import sys
import threading

import pytest
import torch

from torchmpi_py import paramserver as ps
from torchmpi_py.errors import NotStarted, ParameterServerError, RanksDisagree

pytestmark = pytest.mark.timeout(240)
in_a_job = pytest.mark.mpi


def values(rank, count, dtype=torch.float32):
    return ((torch.arange(count) * 7 + rank * 3) % 101).to(dtype)


def seeded(size, count, dtype=torch.float32):
    """What a server holds at first: part r of rank r's tensor."""
    from torchmpi_py.paramserver.shard import shards

    return torch.cat([values(r, count, dtype)[begin:end] for r, (begin, end) in enumerate(shards(count, size))])


@in_a_job
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.uint8, torch.bool]
)
def test_seed_send_and_receive(mpi, comm, dtype):
    size, me = mpi.size(), mpi.rank()
    for count in (0, 1, size - 1, size, size + 1, 1024, 911 * 101):
        server = ps.init(values(me, count, dtype), comm=comm)
        assert torch.equal(server.receive().wait(), seeded(size, count, dtype))
        mpi.barrier()
        if me == size - 1:
            server.send(values(5, count, dtype), "copy").wait()
        mpi.barrier()
        got = torch.empty(count, dtype=dtype)
        assert server.receive(got).wait() is got
        assert torch.equal(got, values(5, count, dtype))
        mpi.barrier()
        if me == 0:
            server.send(got, "zero").wait()
        mpi.barrier()
        assert not server.receive().wait().any()
        server.free()


@in_a_job
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_a_send_comes_after_a_receive_into_its_tensor(mpi, comm, layout):
    """Also if nobody waits for the receive: what is sent is what was received."""
    count = 40_000
    for turn in range(5):
        server = ps.init(values(0, count).view(200, 200), comm=comm)
        if mpi.rank() == 0:
            tensor = torch.zeros(200, 200) if layout == "contiguous" else torch.zeros(200, 200).t()
            server.receive(tensor)
            server.send(tensor, "add").wait()
            assert torch.equal(server.receive().wait(), 2 * values(0, count).view(200, 200)), turn
        mpi.barrier()
        server.free()


@in_a_job
def test_every_rank_adds_at_once(mpi, comm):
    """No update is lost, and none counts twice."""
    size, me, count = mpi.size(), mpi.rank(), 10_007
    server = ps.init(torch.zeros(count, dtype=torch.float64), comm=comm)
    mpi.wait_all([server.send(values(me + turn, count, torch.float64)) for turn in range(100)])
    mpi.barrier()
    expected = sum(values(rank + turn, count, torch.float64) for rank in range(size) for turn in range(100))
    assert torch.equal(server.receive().wait(), expected)
    server.free()


@in_a_job
def test_a_rank_sees_its_own_sends_without_waiting(mpi):
    me = mpi.rank()
    with mpi.split(me) as alone:
        server = ps.init(torch.zeros(100), comm=alone)
        for turn in range(50):
            server.send(values(turn, 100), "copy")
            server.send(torch.ones(100))
            got = server.receive()
            server.send(torch.ones(100), "zero")
            assert torch.equal(got.wait(), values(turn, 100) + 1)
        server.free()


@in_a_job
def test_a_shard_is_never_seen_half_changed(mpi, comm):
    """Every send adds the same to all elements of a shard, so all are equal whenever someone looks."""
    count = 200_000
    server = ps.init(torch.zeros(count, dtype=torch.int64), comm=comm)
    for turn in range(30):
        server.send(torch.full((count,), turn + mpi.rank()))
        got = server.receive().wait()
        for begin, end in server.bounds:
            assert (got[begin:end] == got[begin]).all()
    server.free()


@in_a_job
def test_layouts_and_shapes(mpi, comm):
    x = torch.arange(12.0).view(3, 4)
    server = ps.init(x.t(), comm=comm)
    assert server.shape == (4, 3)
    assert torch.equal(server.receive().wait(), x.t())
    got = torch.zeros(3, 4).t()
    assert torch.equal(server.receive(got).wait(), x.t())
    flat = torch.zeros(12)
    server.receive(flat.view(4, 3)).wait()
    assert torch.equal(flat, x.t().reshape(-1))
    server.free()


@in_a_job
def test_registered_rules_and_their_errors(mpi):
    def halve(shard, payload, *, times=1):
        if payload[0] < 0:
            raise RuntimeError("negative")
        shard.div_(2**times)

    ps.register_rule("halve", halve)
    with mpi.split(mpi.rank()) as alone:
        server = ps.init(torch.full((5,), 8.0), comm=alone)
        server.send(torch.zeros(5), "halve", times=2)
        assert (server.receive().wait() == 2).all()
        failing = server.send(torch.full((5,), -1.0), "halve")
        after = server.send(torch.zeros(5), "halve")
        with pytest.raises(RuntimeError, match="negative"):
            failing.wait()
        after.wait()
        assert (server.receive().wait() == 1).all()
        server.free()


@in_a_job
def test_mistakes(mpi):
    server = ps.init(torch.zeros(6))
    with pytest.raises(
        ValueError, match=r"send: the tensor has shape \(5,\) and torch.float32, but the parameter server"
    ):
        server.send(torch.zeros(5))
    with pytest.raises(ValueError, match=r"torch\.float64, but the parameter server has"):
        server.receive(torch.zeros(6, dtype=torch.float64))
    with pytest.raises(TypeError, match=r"tensor must be a torch\.Tensor"):
        server.send([1.0])
    for made, given in (((6,), (2, 3)), ((2, 3), (3, 2)), ((2, 3), (6,)), ((), (1,)), ((1,), ()), ((0, 2), (0,))):
        words = (
            f"the tensor has shape {given} and torch.float32",
            f"the parameter server has {made} and torch.float32",
        )
        shaped, x = ps.init(torch.zeros(made)), torch.ones(given)
        for call in (shaped.send, shaped.receive):
            with pytest.raises(ValueError, match=f"{re.escape(words[0])}.*{re.escape(words[1])}; pass a view of shape"):
                call(x)
        assert torch.equal(x, torch.ones(given))
        shaped.send(x.view(made)).wait()
        mpi.barrier()
        assert torch.equal(shaped.receive(torch.zeros(made)).wait(), torch.full(made, float(mpi.size())))
        shaped.free()
    with pytest.raises(ValueError, match="the tensor is on meta"):
        ps.init(torch.zeros(3, device="meta"))
    server.free()
    server.free()
    for call in (server.receive, lambda: server.send(torch.zeros(6))):
        with pytest.raises(ParameterServerError, match="was freed"):
            call()


@pytest.mark.mpi(min_size=2)
def test_ranks_that_disagree(mpi):
    with pytest.raises(RanksDisagree, match=r"rank 0: \[3\] torch.float32, rank 1: \[4\] torch.float32"):
        ps.init(torch.zeros(3 + (mpi.rank() > 0)))


@in_a_job
def test_nothing_is_left_behind(mpi, comm):
    """500 servers, many at a time: no descriptor, mapping or thread more than before; freeing waits for requests."""

    def held():
        gc.collect()  # what earlier tests have left
        with open("/proc/self/maps") as maps:
            return len(os.listdir("/proc/self/fd")), sum("torchmpi_py" in line for line in maps)

    ps.init(torch.zeros(1), comm=comm).free()
    before = held()
    for _ in range(50):
        servers = [ps.init(torch.zeros(100), comm=comm) for _ in range(10)]
        for server in servers:
            server.send(torch.ones(100))
        ps.free_all()
    assert held() == before
    assert "parameter-serv" not in " ".join(thread.name for thread in threading.enumerate())


PROGRAM = """
import os, pathlib, signal, sys, time, torch, torchmpi_py as mpi
from torchmpi_py import paramserver as ps
mpi.start()
me = mpi.rank()

def slow(shard, payload):
    shard.add_(payload)
    if payload[0] == 7:
        if sys.argv[1] == "with a worker" and os.fork() == 0:
            for stream in (1, 2):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
            end = time.monotonic() + 60
            while time.monotonic() < end and not pathlib.Path(sys.argv[2]).exists():
                time.sleep(0.1)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)

ps.register_rule("slow", slow)
server = ps.init(torch.zeros(10))
mpi.barrier()
if me == 1:
    server.send(torch.full((10,), 7.0), "slow").wait()
time.sleep(1)
server.send(torch.ones(10)).wait(20)
print("went on", flush=True)
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="for Linux")
@pytest.mark.parametrize("how", ["alone", "with a worker"])
def test_a_rank_that_dies_under_a_lock_does_not_stop_the_others(tmp_path, how):
    """Nor if a process that it has forked, such as a worker of a data loader, lives on."""
    (tmp_path / "program.py").write_text(PROGRAM)
    torchmpirun = os.path.join(os.path.dirname(sys.executable), "torchmpirun")
    launcher = [torchmpirun, "-n", "3", "--elastic", "--timeout", "150"]
    over = tmp_path / "over"
    job = subprocess.run([*launcher, tmp_path / "program.py", how, over], capture_output=True, text=True, timeout=200)
    over.touch()
    assert job.stdout.count("went on") == 2, (job.stdout, job.stderr, signal.SIGKILL)


def test_before_start():
    with pytest.raises(NotStarted):
        ps.init(torch.zeros(3))
