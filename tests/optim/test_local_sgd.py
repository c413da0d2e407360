"""Steps of each rank's own, and averages of parameters now and then, against the same arithmetic on one process."""

import copy

import pytest
import torch
from loops import assert_close, loss_of, pair, train
from support import networks

from torchmpi_py import nn as mpinn, optim

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(120)]


class Simulated:
    """All ranks in this process: a network and an optimizer of each."""

    def __init__(self, mpi, make):
        self.mpi, self.everyone = mpi, range(mpi.size())
        self.modules = [pair()[0] for _ in self.everyone]
        self.optimizers = [make(module) for module in self.modules]

    def step(self, number):
        for rank, (module, optimizer) in enumerate(zip(self.modules, self.optimizers, strict=True)):
            train(module, optimizer, [number], [rank])

    def average(self, ranks=None):
        """Replace the parameters of these ranks, by default all, by their mean; return it."""
        ranks = ranks or self.everyone
        mean = sum(networks.flat(self.modules[rank]) for rank in ranks) / len(ranks)
        self.fill(mean, ranks)
        return mean

    def fill(self, values, ranks=None):
        for rank in ranks or self.everyone:
            networks.fill(self.modules[rank], values)

    def assert_close(self, module):
        assert_close(module, self.modules[self.mpi.rank()])


def momentum(module):
    return torch.optim.SGD(module.parameters(), 0.05, momentum=0.9)


def adam(module):
    return torch.optim.Adam(module.parameters(), 0.01)


@pytest.mark.parametrize(("make", "start"), [(momentum, 0), (adam, 5)])
def test_averages_now_and_then(mpi, make, start):
    module, all_ranks = pair()[0], Simulated(mpi, make)
    ours = optim.LocalSGD(make(module), 3, start=start)
    for step in range(10):
        train(module, ours, [step], [mpi.rank()])
        all_ranks.step(step)
        if step < start or (step + 1) % 3 == 0:
            all_ranks.average()
            mpinn.check_with_allreduce(module)
        all_ranks.assert_close(module)
    ours.average()
    all_ranks.average()
    all_ranks.assert_close(module)


def test_inside_groups_often_and_between_them_seldom(mpi):
    world = mpi.communicator()
    with mpi.split(mpi.rank() % 2) as inner:
        module, all_ranks = pair()[0], Simulated(mpi, momentum)
        ours = optim.LocalSGD(momentum(module), {world: 6, inner: 2})
        for step in range(13):
            train(module, ours, [step], [mpi.rank()])
            all_ranks.step(step)
            if (step + 1) % 6 == 0:
                all_ranks.average()
            elif (step + 1) % 2 == 0:
                for parity in range(min(2, mpi.size())):
                    all_ranks.average(range(parity, mpi.size(), 2))
            all_ranks.assert_close(module)
            is_equal = len({tuple(x) for x in mpi.allgather_object(networks.flat(module).tolist())}) == 1
            assert is_equal == ((step + 1) % 6 == 0 or mpi.size() == 1)


@pytest.mark.parametrize(("slow_momentum", "start"), [(0.5, 0), (0.8, 3)])
def test_slow_momentum_by_its_formula(mpi, slow_momentum, start):
    """In units of parameters; saved and gone on with in the middle, with rates that change and end at zero."""
    module, all_ranks = pair()[0], Simulated(mpi, momentum)
    options = {"slow_momentum": slow_momentum, "start": start}
    ours = optim.LocalSGD(momentum(module), 3, **options)
    before, v = networks.flat(module), 0.0
    rates = [0.05, 0.02, 0.01, 0.05, 0.05, 0.05, 0.05, 0.001, 0.0, 0.0, 0.0, 0.0, 0.0, 0.02, 0.0]
    for step, lr in enumerate(rates):
        for each in (ours, *all_ranks.optimizers):
            each.param_groups[0]["lr"] = lr
        train(module, ours, [step], [mpi.rank()])
        all_ranks.step(step)
        if step < start:
            before = all_ranks.average()
        elif (step + 1) % 3 == 0:
            v = slow_momentum * v + before - all_ranks.average()
            before = before - v
            all_ranks.fill(before)
        all_ranks.assert_close(module)
        if step == 7:
            state, module = copy.deepcopy(ours.state_dict()), copy.deepcopy(module)
            ours = optim.LocalSGD(momentum(module), 3, **options)
            ours.load_state_dict(state)
    ours.average()  # without a step in between, nothing moves
    mpinn.check_with_allreduce(module)
    all_ranks.assert_close(module)


def test_slow_momentum_begins_where_the_first_step_does(mpi):
    """Parameters that are made equal after the optimizer was made are equal after each average."""
    module, _ = pair()
    with torch.no_grad():
        module[0].weight += mpi.rank()
    ours = optim.LocalSGD(momentum(module), 1, slow_momentum=0.5)
    mpinn.synchronize_parameters(module)
    for step in range(2):
        train(module, ours, [step], [mpi.rank()])
        mpinn.check_with_allreduce(module)


def test_slow_momentum_and_a_group_that_was_added(mpi):
    """Saved before the first step of its parameters."""

    def made(module):
        return optim.LocalSGD(momentum(module[0]), 3, slow_momentum=0.5)

    module, _ = pair()
    ours = made(module)
    train(module, ours, [0], [mpi.rank()])
    ours.add_param_group({"params": list(module[2].parameters())})
    state, other = copy.deepcopy(ours.state_dict()), copy.deepcopy(module)
    again = made(other)
    again.add_param_group({"params": list(other[2].parameters())})
    again.load_state_dict(state)
    for m, o in ((module, ours), (other, again)):
        m.zero_grad()
        train(m, o, range(1, 7), [mpi.rank()])
    assert torch.equal(networks.flat(module), networks.flat(other))


@pytest.mark.parametrize("unscales", [False, True])
def test_an_overflow_on_one_rank(mpi, unscales):
    """GradScaler leaves out its update; the other ranks take theirs, and all meet for the average."""
    module, all_ranks = pair()[0], Simulated(mpi, momentum)
    ours = optim.LocalSGD(momentum(module), 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(5):
        ours.zero_grad()
        loss = loss_of(module, step, [mpi.rank()])
        if step == 2 and mpi.rank() == 0:
            loss = loss + module[0].weight[0, 0] * float("inf")
        scaler.scale(loss).backward()
        if unscales:
            scaler.unscale_(ours)
        scaler.step(ours)
        scaler.update()
        left_out = networks.flat(all_ranks.modules[0]), copy.deepcopy(all_ranks.optimizers[0].state_dict())
        all_ranks.step(step)
        if step == 2:
            all_ranks.fill(left_out[0], [0])
            all_ranks.optimizers[0].load_state_dict(left_out[1])
        if (step + 1) % 2 == 0:
            all_ranks.average()
        all_ranks.assert_close(module)
    assert scaler.get_scale() == (512.0 if mpi.rank() == 0 else 1024.0)


def test_bad_input(mpi):
    optimizer = momentum(pair()[0])
    world = mpi.communicator()
    for options, told in (
        ({"period": 0}, "period=0"),
        ({"period": {}}, "period={}"),
        ({"period": {world: 2}, "comm": world}, "excludes comm="),
        ({"start": -1}, "start=-1"),
        ({"slow_momentum": 1.0}, r"slow_momentum=1\.0"),
    ):
        with pytest.raises(ValueError, match=told):
            optim.LocalSGD(optimizer, **options)
    with pytest.raises(TypeError, match="found a DistributedOptimizer; pass the plain optimizer"):
        optim.Gossip(optim.DistributedOptimizer(momentum(module := pair()[0]), module))
    with mpi.split(0) as other, pytest.raises(ValueError, match="pass multiples"):
        optim.LocalSGD(optimizer, {world: 3, other: 2})
    if mpi.size() > 1:
        with mpi.split(mpi.rank()) as alone, pytest.raises(ValueError, match="the longer period for more ranks"):
            optim.LocalSGD(optimizer, {world: 2, alone: 4})
