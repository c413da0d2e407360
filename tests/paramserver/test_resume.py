"""A run that was saved and goes on is the run that was not interrupted."""

import pytest
import torch
from served_networks import saved_and_loaded
from torch.utils._pytree import tree_leaves

from torchmpi_py import paramserver as ps
from torchmpi_py.errors import ParameterServerError
from torchmpi_py.paramserver import tensor_lists

pytestmark = pytest.mark.mpi


@pytest.fixture(autouse=True)
def sends_in_order(mpi, monkeypatch):
    """Rank after rank sends, so that sums are the same, bit for bit, in every run."""
    send_tensors = tensor_lists.send_tensors

    def in_turns(served, *args, **options):
        for turn in range(mpi.size()):
            if turn == mpi.rank():
                handles = send_tensors(served, *args, **options)
                served._finish_sends()
            mpi.barrier()
        return handles

    monkeypatch.setattr(tensor_lists, "send_tensors", in_turns)


def in_step(kind, mpi):
    """Ranks meet in every step, and around each fetch."""

    class InStep(kind):
        def update(self, step):
            super().update(step)
            mpi.barrier()

        def prefetch(self, served):
            super().prefetch(served)
            mpi.wait_all(ps.prefetch_tensors(served))
            mpi.barrier()

    return InStep


RARELY = {"init_delay": 1, "update_frequency": 4, "send_frequency": 3}
ADAGRAD = {"optimizer": "adagrad", "optimizer_options": {"lr": 0.1}}
MAKERS = {
    "downpour": lambda mpi, net: in_step(ps.DownpourUpdate, mpi)(net, local_update=lambda g: g / -8, **RARELY),
    "adagrad": lambda mpi, net: in_step(ps.DownpourUpdate, mpi)(net, **ADAGRAD, **RARELY),
    "easgd": lambda mpi, net: in_step(ps.EASGDUpdate, mpi)(net, init_delay=1, update_frequency=3, prefetch=1),
    "difference": lambda mpi, net: in_step(ps.DifferenceUpdate, mpi)(net, init_delay=1, update_frequency=4, prefetch=2),
    "ssp": lambda _, net: ps.StaleSynchronousUpdate(net, init_delay=1, staleness=0),
}


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


def assert_same(found, expected):
    """Compare states with all that is in them, bit for bit."""
    for x, y in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y


CASES = "easgd 1, ssp 1, adagrad 1, ssp 5, downpour 6, easgd 8, adagrad 9, difference 6, difference 8"


@pytest.mark.parametrize("case", CASES.split(", "))
def test_two_parts_are_the_whole(mpi, case):
    """Before the server is seeded; between exchanges; while one is on its way. A run goes back in the same process."""
    kind, num_steps = case.split()
    rank, num_steps = mpi.rank(), int(num_steps)

    def begin(start):
        net = network(start)
        return net, MAKERS[kind](mpi, net)

    whole, update = begin(rank)
    train(whole, update, range(12), rank)
    expected = update.state_dict()
    update.free()
    net, update = begin(rank)
    train(net, update, range(num_steps), rank)
    saved = saved_and_loaded({"network": net.state_dict(), "update": update.state_dict()})
    train(net, update, range(num_steps, num_steps + 3), rank)  # is undone below
    update.free()
    net, update = begin(100)
    net.load_state_dict(saved["network"])
    update.load_state_dict(saved["update"])
    assert_same(update.state_dict(), saved["update"])
    train(net, update, range(num_steps, 12), rank)
    assert_same(update.state_dict(), expected)
    update.free()
    torch.testing.assert_close(net.state_dict(), whole.state_dict(), rtol=0, atol=0)


def test_what_does_not_fit(mpi):
    """An error on every rank, also of what rank 0 alone can know."""
    update = ps.EASGDUpdate(network(0), init_delay=0)
    update.update(0)
    state = update.state_dict()
    assert (state["server"] is None) == (mpi.rank() > 0)
    with pytest.raises(ParameterServerError, match="training has already started"):
        update.load_state_dict(state)
    update.free()
    with pytest.raises(ValueError, match="pass a state with the same kind, init_delay"):
        ps.DownpourUpdate(network(0), local_update=len).load_state_dict(state)
    update = ps.EASGDUpdate(network(0), init_delay=0)
    broken = {**state, "server": {**state["server"], "shapes": []} if mpi.rank() == 0 else None}
    with pytest.raises(ValueError, match="load_state_dict: the state was saved for tensors of shapes"):
        update.load_state_dict(broken)
    with pytest.raises(ParameterServerError, match="call load_state_dict before"):
        update.update(1)
