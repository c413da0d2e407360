"""Bounded staleness: the bound holds for steps and values, 0 is synchronous training, the finished hold up nobody."""

import logging
import time

import pytest
import torch
from served_networks import served
from support import networks

from torchmpi_py import paramserver as ps
from torchmpi_py.core import communicators
from torchmpi_py.errors import ParameterServerError
from torchmpi_py.memory import symmetric
from torchmpi_py.paramserver import stale

pytestmark = pytest.mark.mpi


class Counting(torch.nn.Module):
    """A parameter with one number for each worker."""

    def __init__(self, num_workers):
        super().__init__()
        self.steps = torch.nn.Parameter(torch.zeros(num_workers))


def train_step(net, optimizer, x, y):
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(net(x), y).backward()
    optimizer.step()


def test_without_staleness_it_is_synchronous_training(size, me, comm, monkeypatch):
    """As one process with all the data, whoever is late; on one node and on two."""
    monkeypatch.setattr(communicators, "communicator", lambda level: comm)
    alone, net = (networks.perceptron(4, 3, 2, dtype=torch.float64) for _ in range(2))
    if me > 0:
        torch.nn.init.ones_(net[0].weight)  # rank 0's values count
    optimizer, reference = (
        torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, nesterov=True) for module in (net, alone)
    )
    update = ps.StaleSynchronousUpdate(net, staleness=0, init_delay=0)
    update.update(0)
    for step in range(10):
        x, y = (networks.batch(size, 8, width, step=step, dtype=torch.float64) for width in (4, 2))
        train_step(alone, reference, x.flatten(0, 1), y.flatten(0, 1))
        train_step(net, optimizer, x[me], y[me])
        if step % size == me:
            time.sleep(0.005)
        update.update(step + 1)
        torch.testing.assert_close(networks.flat(net), networks.flat(alone), rtol=0, atol=1e-12)


def test_the_bound_holds(mpi, comm, monkeypatch):
    """Nobody is too far ahead when it begins a step, and everybody sees what it has to see, and all of its own."""
    if mpi.num_nodes() > 1:
        pytest.skip("ranks count their steps in memory of their node")
    size, me, staleness, num_steps = mpi.size(), mpi.rank(), 3, 25
    completed = mpi.symmetric_empty(1, dtype=torch.int64).zero_()
    segment, _ = symmetric.find(completed)
    mpi.barrier()
    everyone = [segment.view(place.local, torch.int64, 1) for place in communicators.communicator(0).direct.places]
    net = Counting(size)
    monkeypatch.setattr(communicators, "communicator", lambda level: comm)
    update = ps.StaleSynchronousUpdate(net, staleness=staleness, scale=1, init_delay=2)
    for step in range(3):
        update.update(step)
    for step in range(3, 3 + num_steps):
        with torch.no_grad():
            net.steps[me] += 1  # the optimizer's step
        if me == size - 1:
            time.sleep(0.003)
        completed += 1
        update.update(step)
        assert update.clock == step - 2 == completed.item()
        assert completed.item() - min(clock.item() for clock in everyone) <= staleness
        assert net.steps[me].item() == update.clock
        assert net.steps.min().item() >= update.clock - staleness
    update.finish()
    mpi.barrier()
    assert served(update).tolist() == [num_steps] * size


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_worker_that_has_finished(mpi, size, me, staleness):
    """The others go on."""
    net = Counting(size)
    update = ps.StaleSynchronousUpdate(net, staleness=staleness, init_delay=0)
    num_steps = 3 if me == 0 else 12
    for step in range(num_steps + 1):
        with torch.no_grad():
            net.steps[me] += size
        update.update(step)
    update.finish()
    update.finish()
    with pytest.raises(ParameterServerError, match="has called finish"):
        update.update(num_steps + 1)
    mpi.barrier()
    # the first step is before the server was seeded with rank 0's values
    torch.testing.assert_close(served(update), torch.tensor([size + 3.0] + [12.0] * (size - 1)))
    update.free()
    update.free()


def test_groups_of_ranks_as_workers(mpi, size, me):
    """Roots talk to the server; the ranks of a group stay equal, also where nothing was fetched."""
    level = mpi.push_communicator(me // 2)
    net = Counting(size)
    update = ps.StaleSynchronousUpdate(net, staleness=2, scale=0.5, init_delay=0, dataparallel_communicator=level)
    assert update.num_workers == (size + 1) // 2
    for step in range(8):
        if step > 0:
            with torch.no_grad():
                net.steps[me // 2] += 1
        update.update(step)
        with mpi.at(level):
            mpi.nn.check_with_allreduce(net)
        assert net.steps[me // 2].item() == 0.5 * step
    update.finish()
    mpi.barrier()
    assert served(update).tolist() == [3.5] * update.num_workers + [0.0] * (size - update.num_workers)


def test_it_fetches_when_it_has_to(mpi):
    """One worker every s + 1 steps, and once in the beginning."""
    net = Counting(6)
    update = ps.StaleSynchronousUpdate(net, staleness=3, init_delay=0, dataparallel_communicator=0)
    for step in range(25):
        update.update(step)
    if update.is_root:
        assert update.served.num_bytes_received == net.steps.nbytes * (1 + 24 // 4)
        assert update.served.num_bytes_sent == net.steps.nbytes * (24 + 1)


def test_a_send_that_failed(mpi):
    """Raised by finish, or free, on its rank; nobody waits for it, and the servers are freed."""

    def fail(shard, payload):
        raise KeyError("the send failed")

    ps.register_rule("fail", fail)
    net = Counting(2)
    update = ps.StaleSynchronousUpdate(net, staleness=1, init_delay=0)
    for step in range(4):
        update.update(step)
    if mpi.rank() == 0:
        ps.send_tensors(update.served, [torch.ones(2)], "fail")
        with pytest.raises(ParameterServerError, match=r"of steps .* \(rule 'fail', .* KeyError: 'the send failed'"):
            update.free()
    else:
        for step in range(4, 12):
            update.update(step)
        update.free()
    assert update.served is None


def test_who_keeps_the_others_waiting_is_named(comm, caplog, monkeypatch):
    """Rank 0 comes when all others have warned; on one node and on two."""
    talk = comm.direct.mpi
    clocks = stale.Clocks(comm)
    clocks.advance(3 if comm.rank == 0 else 9)
    assert clocks.wait_for(0) <= 9  # asked after the advance, so answered after it
    talk.Barrier()
    take = stale.Nap.take
    warned = []

    def take_and_say(nap, *options):
        if caplog.records and not warned:
            warned.append(talk.send(None, 0, 77))
        take(nap, *options)

    monkeypatch.setattr(stale, "WARN_AFTER_SECONDS", 0.0)
    monkeypatch.setattr(stale.Nap, "take", take_and_say)
    with caplog.at_level(logging.WARNING, "torchmpi_py"):
        if comm.rank > 0:
            assert clocks.wait_for(7) >= 7
            assert "for step 7 of rank 0 (at step 3)" in caplog.text
        else:
            for _ in range(comm.size - 1):
                talk.recv(None, tag=77)
            clocks.advance(4)
    clocks.free()
