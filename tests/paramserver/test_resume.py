"""A run that was saved and goes on is the run that was not interrupted."""

import io

import pytest
import torch

from torchmpi_py import paramserver as ps
from torchmpi_py.errors import ParameterServerError

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(240)]


def in_step(kind, mpi):
    """Ranks meet in every step, and before they fetch: the result is one and the same in every run."""

    class InStep(kind):
        def update(self, step):
            super().update(step)
            if self.served is not None:
                self.served._finish_sends()
            mpi.barrier()

        def prefetch(self, served):
            super().prefetch(served)
            served._finish_sends()
            mpi.barrier()
            mpi.wait_all(ps.prefetch_tensors(served))
            mpi.barrier()

    return InStep


def downpour(mpi, net):
    options = {"init_delay": 1, "update_frequency": 4, "send_frequency": 3}
    return in_step(ps.DownpourUpdate, mpi)(net, local_update=lambda g: g.mul_(-0.25 / mpi.size()), **options)


def adagrad(mpi, net):
    options = {"init_delay": 1, "update_frequency": 4, "send_frequency": 3}
    return in_step(ps.DownpourUpdate, mpi)(net, optimizer="adagrad", optimizer_options={"lr": 0.1}, **options)


def easgd(mpi, net):
    return in_step(ps.EASGDUpdate, mpi)(net, init_delay=1, update_frequency=3, prefetch=1)


def difference(mpi, net):
    return in_step(ps.DifferenceUpdate, mpi)(net, init_delay=1, update_frequency=4, prefetch=2)


def ssp(mpi, net):
    return ps.StaleSynchronousUpdate(net, init_delay=1, staleness=0)


def network(start):
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1).double())
    for index, p in enumerate(net.parameters()):
        torch.nn.init.constant_(p, start + index)
    return net


def train(net, update, steps, rank):
    for step in steps:
        with torch.no_grad():
            for p in net.parameters():
                p.grad = (rank + 1) * p / 8 + step
                p -= 0.25 * p.grad
        update.update(step)


def saved_and_loaded(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("num_steps", [1, 5, 8])
@pytest.mark.parametrize("make", [downpour, adagrad, easgd, difference, ssp])
def test_two_parts_are_the_whole(mpi, make, num_steps):
    """Before the server is seeded; between exchanges; while one is on its way."""
    rank = 0 if make is adagrad else mpi.rank()  # there the order of sends counts, unless they are alike
    whole = network(rank)
    update = make(mpi, whole)
    train(whole, update, range(12), rank)
    update.take_result()
    update.free()
    net = network(rank)
    update = make(mpi, net)
    train(net, update, range(num_steps), rank)
    saved = saved_and_loaded({"network": net.state_dict(), "update": update.state_dict()})
    update.free()
    net = network(100)
    net.load_state_dict(saved["network"])
    update = make(mpi, net)
    update.load_state_dict(saved["update"])
    train(net, update, range(num_steps, 12), rank)
    update.take_result()
    update.free()
    for mine, other in zip(net.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def test_what_does_not_fit(mpi):
    """An error on every rank, also of what rank 0 alone can know."""
    update = ps.EASGDUpdate(network(0), init_delay=0)
    update.update(0)
    state = update.state_dict()
    assert (state["server"] is None) == (mpi.rank() > 0)
    with pytest.raises(ParameterServerError, match="before the first update"):
        update.load_state_dict(state)
    update.free()
    with pytest.raises(ValueError, match="was saved with another kind, init_delay"):
        ps.DownpourUpdate(network(0), local_update=len).load_state_dict(state)
    update = ps.EASGDUpdate(network(0), init_delay=0)
    broken = {**state, "server": {**state["server"], "shapes": []} if mpi.rank() == 0 else None}
    with pytest.raises(ValueError, match="load_state_dict: saved from tensors of shapes"):
        update.load_state_dict(broken)
    with pytest.raises(ParameterServerError, match="call load_state_dict before"):
        update.update(1)
    update.free()
