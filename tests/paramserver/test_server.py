"""Parameter servers on any number of ranks, with values that depend on element and rank."""

import re
import signal
import sys
import time

import pytest
import torch
from support import jobs
from support.values import values

from torchmpi_py import paramserver as ps
from torchmpi_py.core import backoff
from torchmpi_py.errors import CommunicatorError, NotStarted, ParameterServerError, RanksDisagree
from torchmpi_py.paramserver.shard import shards


@pytest.mark.mpi
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.uint8, torch.bool]
)
def test_seed_send_and_receive(mpi, size, me, comm, dtype):
    """TorchMPI's checks of its server (reference 9.3): seeding by all, zero, copy, and add by all at once."""
    many = 911 * 101 if dtype in (torch.float32, torch.bool) else 1024
    for count in (0, 1, size - 1, size, size + 1, many):
        server = ps.init(values(me, count, dtype), comm=comm)
        seeded = [values(rank, count, dtype)[begin:end] for rank, (begin, end) in enumerate(shards(count, size))]
        assert torch.equal(server.receive().wait(), torch.cat(seeded))
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
        mpi.barrier()
        mpi.wait_all([server.send(values(me, count, dtype, step)) for step in range(3)])
        mpi.barrier()
        sent = torch.stack([values(rank, count, dtype, step) for rank in range(size) for step in range(3)])
        expected = sent.any(0) if dtype == torch.bool else sent.sum(0).to(dtype)
        assert torch.equal(server.receive().wait(), expected)


@pytest.mark.mpi
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_a_rank_that_does_not_wait_has_its_requests_in_order(mpi, comm, layout):
    """What is received can be sent on, to the same server or another one; one tensor serves for many requests."""
    for count in (5, 30_000):  # of a shard: within a message, and in pieces
        shape = (mpi.size(), count)
        numbers = torch.arange(float(count * mpi.size())).view(shape) % 1009
        one, two = ps.init(numbers, comm=comm), ps.init(torch.zeros(shape), comm=comm)
        if mpi.rank() == 0:
            x = torch.full(shape, -1.0) if layout == "contiguous" else torch.full(shape[::-1], -1.0).t()
            a, b = 1, 0
            for _ in range(3):
                one.receive(x)
                two.send(x)
                two.receive(x)
                one.send(x, "copy")
                one.send(x)
                one.receive(x)
                two.send(x)
                a, b = 2 * (a + b), 3 * (a + b)
            got = [one.receive(), two.receive()]
            one.send(x, "zero")
            assert torch.equal(got[0].wait(), a * numbers)
            assert torch.equal(got[1].wait(), b * numbers)
            assert not one.receive().wait().any()


@pytest.mark.mpi
def test_nobody_sees_a_shard_half_changed(mpi, comm):
    def in_two_steps(shard, payload):
        shard[: len(shard) // 2] += 1
        time.sleep(0.01)
        shard[len(shard) // 2 :] += 1

    ps.register_rule("in two steps", in_two_steps)
    server = ps.init(torch.zeros(10 * mpi.size()), comm=comm)
    for _ in range(3):
        server.send(torch.zeros(10 * mpi.size()), "in two steps")
        got = server.receive().wait()
        assert all((got[begin:end] == got[begin]).all() for begin, end in server.bounds)


@pytest.mark.mpi
def test_layouts_shapes_and_modes_of_autograd(mpi, comm):
    """A server made and used in inference mode is as any other; options with a gradient leave no graph."""
    x = torch.arange(12.0).view(3, 4)
    with torch.inference_mode():
        server = ps.init(x.t(), comm=comm)
        server.send(torch.zeros(4, 3)).wait()
        assert torch.equal(server.receive(torch.zeros(3, 4).t()).wait(), x.t())
    flat = torch.zeros(12)
    server.receive(flat.view(4, 3)).wait()
    assert torch.equal(flat, x.t().reshape(-1))
    mpi.barrier()
    if mpi.rank() == 0:
        weight = torch.tensor(0.5, requires_grad=True)
        server.send(torch.zeros(4, 3, requires_grad=True), "elastic", weight=weight).wait()
    mpi.barrier()
    got = server.receive().wait()
    assert torch.equal(got, x.t() / 2)
    got += 1
    assert not server.state_dict()["values"].requires_grad


@pytest.mark.mpi
def test_mistakes(mpi):
    server = ps.init(torch.zeros(6))
    for error, words, call in (
        (ValueError, r"shape \(5,\) and torch.float32, but .* \(6,\)", lambda: server.send(torch.zeros(5))),
        (ValueError, r"torch\.float64, but ", lambda: server.receive(torch.zeros(6, dtype=torch.float64))),
        (TypeError, r"must be a torch\.Tensor", lambda: server.send([1.0])),
        (ValueError, "on meta", lambda: ps.init(torch.zeros(3, device="meta"))),
        (ValueError, "'rmsprop' is unknown; .* adagrad", lambda: ps.init(torch.zeros(3), optimizer="rmsprop")),
    ):
        with pytest.raises(error, match=words):
            call()
    for made, given in (((6,), (2, 3)), ((2, 3), (3, 2)), ((), (1,)), ((1,), ()), ((0, 2), (0,))):
        shaped, x = ps.init(torch.zeros(made)), torch.ones(given)
        for call in (shaped.send, shaped.receive):
            with pytest.raises(ValueError, match=re.escape(f"shape {given} and") + ".*; pass a view of shape"):
                call(x)
        assert torch.equal(x, torch.ones(given))
        shaped.send(x.view(made)).wait()
        mpi.barrier()
        assert torch.equal(shaped.receive(torch.zeros(made)).wait(), torch.full(made, float(mpi.size())))
    server.free()
    server.free()
    for call in (server.receive, lambda: server.send(torch.zeros(6))):
        with pytest.raises(ParameterServerError, match="was freed"):
            call()


@pytest.mark.mpi(min_size=2)
def test_ranks_that_disagree(mpi):
    """About shape, type, optimizer or its slots, and the order of a list of tensors: an error on all ranks."""
    me = mpi.rank()
    with pytest.raises(RanksDisagree, match=r"rank 0: \[3\] torch.float32, rank 1: \[4\] torch.float32"):
        ps.init(torch.zeros(3 + (me > 0)))
    for wrong in (lambda: ps.init([0.0] if me else torch.zeros(1)), lambda: ps.init_tensors([0.0] if me else [])):
        with pytest.raises(TypeError, match=r"must be a torch.* \(rank 1\)"):
            wrong()
    if me == 0:
        ps.register_rule("rank 0's", lambda *_: None, num_slots=1)
    with pytest.raises(ValueError, match=r"is unknown.* \(rank 1\)"):
        ps.init(torch.zeros(5), optimizer="rank 0's")
    ps.register_rule("of both", lambda *_: None, num_slots=1 + me % 2)
    with pytest.raises(RanksDisagree, match=r"'of both' with num_slots=1, rank 1: .* num_slots=2"):
        ps.init(torch.zeros(5), optimizer="of both")
    with pytest.raises(RanksDisagree, match=r"tensor 0 is \[[24]\] torch.float32 on cpu on rank \d and \[[24]\]"):
        ps.init_tensors([torch.zeros(n) for n in ([2, 4] if me == 1 else [4, 2])])


@pytest.mark.mpi(min_size=2)
def test_servers_that_are_freed_in_another_order(mpi, comm):
    """None is freed, and the memory and the service of all go with the communicator, or with the next ``free``."""
    servers = [ps.init(torch.zeros(mpi.size()), comm=comm) for _ in range(2)]
    for server in servers if mpi.rank() else servers[::-1]:
        with pytest.raises(RanksDisagree, match="free different parameter servers"):
            server.free()
    for server in servers:
        server.send(torch.ones(mpi.size())).wait()
    mpi.barrier()
    assert all((server.receive().wait() == mpi.size()).all() for server in servers)
    mpi.barrier()
    servers[0].free()
    with pytest.raises(ParameterServerError, match="was freed"):
        servers[0].receive()


@pytest.mark.mpi(min_size=2)
def test_a_free_that_breaks_off(mpi, comm, monkeypatch):
    """By a signal's handler, say: the communicator gives memory and service back, and other servers are freed."""
    lost, other = ps.init(torch.zeros(5), comm=comm), ps.init(torch.zeros(5))

    def interrupted(request, *_):
        request.Wait()  # all ranks are here, and MPI is done with the memory
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(backoff, "complete", interrupted)
        with pytest.raises(KeyboardInterrupt):
            lost.free()
    with pytest.raises(CommunicatorError, match="an earlier call"):
        lost.free()
    comm.free()
    with pytest.raises(ParameterServerError, match="was freed, or lost"):
        lost.receive()
    ps.free_all()
    with pytest.raises(ParameterServerError, match="was freed"):
        other.receive()


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
@jobs.needs_mpi
@pytest.mark.skipif(sys.platform != "linux", reason="for Linux")
@pytest.mark.parametrize("how", ["alone", "with a worker"])
def test_a_rank_that_dies_under_a_lock_does_not_stop_the_others(tmp_path, how):
    """Nor if a process that it has forked, such as a worker of a data loader, lives on."""
    program, over = jobs.write(tmp_path, PROGRAM), tmp_path / "over"
    job = jobs.torchmpirun("-n", 3, "--elastic", "--timeout", 150, program, how, over)
    over.touch()
    assert job.stdout.count("went on") == 2, (job.stdout, job.stderr, signal.SIGKILL)


def test_before_start():
    with pytest.raises(NotStarted):
        ps.init(torch.zeros(3))
