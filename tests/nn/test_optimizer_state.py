"""An optimizer's state becomes that of one rank, on all ranks."""

import pytest
import torch
from support import networks

from torchmpi_py.collectives import verbs
from torchmpi_py.errors import RanksDisagree
from torchmpi_py.nn.optimizer_state import broadcast_optimizer_state

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(240)]

OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1, amsgrad=True),
    "tensor as lr": lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(0.1), foreach=False),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
    "LBFGS": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=4),
}


def made(name="Adam", dtype=torch.float32):
    net = networks.perceptron(6, 4, 2, dtype=dtype)
    return net, OPTIMIZERS[name](list(net.parameters()))


def step(net, optimizer, number):
    def closure():
        optimizer.zero_grad()
        loss = net(networks.batch(4, 6, step=number, dtype=net[0].weight.dtype)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)


@pytest.mark.parametrize("has_state", ["root", "others", "all"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_all_ranks_get_roots_state(mpi, name, has_state):
    root = mpi.size() - 1

    def at(rank):
        net, optimizer = made(name)
        if has_state == "all" or (rank == root) == (has_state == "root"):
            for number in range(2 + (rank == root)):
                step(net, optimizer, 10 * rank + number)
        for index, group in enumerate(optimizer.param_groups):
            group["weight_decay"] = 0.5 * rank + index
        return net, optimizer

    (expected_net, expected), (net, optimizer) = at(root), at(mpi.rank())
    net.load_state_dict(expected_net.state_dict())
    broadcast_optimizer_state(optimizer, root)
    assert optimizer.param_groups[0]["weight_decay"] == 0.5 * root
    step(net, optimizer, 5)
    step(expected_net, expected, 5)
    torch.testing.assert_close(optimizer.state_dict(), expected.state_dict(), rtol=0, atol=0)
    mpi.nn.check_with_allreduce(net)


def test_where_nothing_differs_nothing_but_a_digest_travels(mpi, monkeypatch):
    net, optimizer = made()
    step(net, optimizer, 1)
    if mpi.rank() == 0:  # in another order: that is no difference
        optimizer.state = type(optimizer.state)(dict, reversed(list(optimizer.state.items())))
    monkeypatch.setattr(verbs, "broadcast_object", None)
    broadcast_optimizer_state(optimizer)
    broadcast_optimizer_state(object())  # has no state, and is left alone


@pytest.mark.mpi(min_size=2)
def test_one_bit_is_a_difference(mpi):
    net, optimizer = made(dtype=torch.bfloat16)
    step(net, optimizer, 1)
    moments = optimizer.state[net[2].weight]["exp_avg"]
    expected = moments.clone()
    if mpi.rank() == mpi.size() - 1:
        moments[1, 3].neg_()
    broadcast_optimizer_state(optimizer)
    assert torch.equal(optimizer.state[net[2].weight]["exp_avg"], expected)


@pytest.mark.mpi(min_size=2)
def test_optimizers_that_do_not_fit_are_refused_on_all_ranks(mpi):
    net, _ = made()
    last = mpi.size() - 1
    of_kind = OPTIMIZERS["Adam" if mpi.rank() == last else "SGD"](net.parameters())
    of_some = OPTIMIZERS["SGD"](list(net.parameters())[int(mpi.rank() == last) :])
    for optimizer, of_rank_0, of_last in (
        (of_kind, r"SGD of \[4\]", r"Adam of \[4\]"),
        (of_some, r"SGD of \[4\]", r"SGD of \[3\]"),
        (mpi.optim.LocalSGD(of_kind, 2), r"LocalSGD\(SGD\) of", r"LocalSGD\(Adam\) of"),
    ):
        with pytest.raises(RanksDisagree, match=rf"rank 0: {of_rank_0}.*rank {last}: {of_last}"):
            broadcast_optimizer_state(optimizer)


@pytest.mark.mpi(min_size=2)
def test_a_state_that_is_changed_when_it_is_loaded_is_an_error(mpi):
    net, optimizer = made("SGD", torch.bfloat16)
    if mpi.rank() == 0:  # as an optimizer of the user's might keep it
        optimizer.state[net[2].weight]["moment"] = torch.full((2, 4), 1 / 3)
    others = ", ".join(map(str, range(1, mpi.size())))
    with pytest.raises(RanksDisagree, match=rf"on these ranks: {others};"):
        broadcast_optimizer_state(optimizer)


def test_over_a_group(mpi):
    with mpi.split(mpi.rank() % 2) as group:
        net, optimizer = made()
        if group.rank == 0:
            step(net, optimizer, mpi.rank())
        net_of_root, root_optimizer = made()
        step(net_of_root, root_optimizer, mpi.rank() % 2)
        broadcast_optimizer_state(optimizer, comm=group)
        torch.testing.assert_close(optimizer.state_dict(), root_optimizer.state_dict(), rtol=0, atol=0)
