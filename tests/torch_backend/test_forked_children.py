"""A forked child of a rank gets NotStarted from everything that would call MPI, and its parent goes on."""

import os
import signal

import pytest
import torch
import torch.distributed as dist

from torchmpi_py import nn as mpinn, paramserver as ps

pytestmark = pytest.mark.mpi


def neighbours(mpi):
    """Of a rank in a ring: whom it receives from, and whom it sends to."""
    return (mpi.rank() - 1) % mpi.size(), (mpi.rank() + 1) % mpi.size()


def in_child(call):
    """What the call raises in a forked child; "hangs" if it does not return."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, lambda *_: os._exit(os.write(writing, b"hangs") and 0))
        signal.alarm(10)
        try:
            told = f"returned {call()!r}"
        except BaseException as error:
            told = f"{type(error).__name__}: {error}"
        os.write(writing, told[:2000].encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        told = pipe.read()
    os.waitpid(child, 0)
    return told


def refused(*calls):
    for call in calls:
        told = in_child(call)
        assert told.startswith("NotStarted: "), told
        assert "forked" in told, told


@pytest.mark.slow
@pytest.mark.mpi(min_size=2)
def test_messages_and_groups(mpi, group):
    (left, right), x = neighbours(mpi), torch.ones(3)
    refused(
        lambda: dist.send(x, right), lambda: dist.isend(x, right), lambda: dist.recv(x, left), lambda: dist.recv(x),
        lambda: dist.batch_isend_irecv([dist.P2POp(dist.irecv, x, left)]), lambda: dist.all_reduce(x),
        dist.barrier,
    )  # fmt: skip
    assert in_child(dist.new_group).startswith("NotStarted: ")
    sent = dist.isend(torch.full((3,), 2.0 + mpi.rank()), right)  # what the children have posted would have taken it
    dist.recv(x, left)
    sent.wait()
    assert (x == 2.0 + left).all()


@pytest.mark.mpi(min_size=2)
def test_what_is_under_way(mpi, group):
    """It is the parent's, who gets it; what was complete before the fork has its result in the child too."""
    (left, right), size, x, y = neighbours(mpi), mpi.size(), torch.zeros(3), torch.zeros(3)
    work = dist.irecv(x, left, tag=1)
    handle = mpi.recv_async(y, left)
    complete = mpi.allreduce_async(1)
    assert complete.wait() == size
    if mpi.rank() == 0:  # its collectives are queued: the others have yet to come
        queued, later = mpi.allreduce_async(torch.ones(100_000)), dist.all_reduce(torch.ones(1), async_op=True)
        refused(queued.wait, queued.done, later.wait, later.get_future().wait)
        refused(work.wait, handle.wait, handle.done, handle.synchronize)
        assert in_child(complete.wait) == f"returned {size}"
        for other in range(1, size):
            dist.send(torch.zeros(1), other)
    else:
        dist.recv(torch.zeros(1), 0)
        queued, later = mpi.allreduce_async(torch.ones(100_000)), dist.all_reduce(torch.ones(1), async_op=True)
    assert (queued.wait() == size).all()
    later.wait()
    sent = dist.isend(torch.full((3,), 1.0 + mpi.rank()), right, tag=1)
    mpi.send(torch.full((3,), 2.0 * mpi.rank()), right)
    assert work.wait()
    assert handle.wait() is y
    sent.wait()
    assert (x == 1 + left).all()
    assert (y == 2 * left).all()


@pytest.mark.slow
def test_the_package(mpi):
    server, served, comm = ps.init(torch.zeros(4)), ps.init_tensors([torch.zeros(2)]), mpi.split(0)
    net = torch.nn.Linear(2, 2)
    backward = mpinn.register_async_backward(net)
    refused(
        server.receive, server.free, ps.free_all, served.free, server.state_dict, lambda: server.send(torch.ones(4)),
        lambda: ps.send_tensors(served, [torch.ones(2)]), lambda: ps.init(torch.ones(2)), comm.free,
        lambda: mpi.split(0), lambda: mpi.push_communicator("x"), lambda: mpi.symmetric_empty(2), mpi.barrier,
        lambda: mpi.send(1, 0), lambda: mpi.allreduce(torch.ones(2), comm=comm), mpi.availability,
        lambda: mpi.check_with_allreduce(1), lambda: mpinn.synchronize_parameters(net),
        lambda: net(torch.ones(2)).sum().backward(),
    )  # fmt: skip
    net(torch.ones(2)).sum().backward()
    backward.synchronize()
    before = [p.grad.clone() for p in net.parameters()]

    def train():  # as a worker of a data loader may that makes samples with the network
        assert all(p.grad is None for p in net.parameters())
        net.zero_grad(set_to_none=False)
        net(torch.full((2,), 1000.0)).sum().backward()

    refused(train)
    assert all(torch.equal(p.grad, x) for p, x in zip(net.parameters(), before, strict=True))
    assert in_child(mpi.start).startswith("NotStarted: ")
    backward.remove()
    for each in (comm, server, served):
        each.free()
    assert mpi.allreduce(1) == mpi.size()
