"""Steps of each rank's own, and averages of parameters now and then, against the same arithmetic on one process."""

import copy

import pytest
import torch
from torch.nn.functional import mse_loss

from torchmpi_py import nn as mpinn, optim

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(120)]


def network():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(7, 9), torch.nn.Tanh(), torch.nn.Linear(9, 2)).double()


def train(module, optimizer, rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    x, y = (torch.randn(5, n, generator=generator, dtype=torch.float64) for n in (7, 2))
    optimizer.zero_grad()
    mse_loss(module(x), y).backward()
    optimizer.step()


def values(module):
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


def put(module, flat):
    with torch.no_grad():
        for p, part in zip(module.parameters(), flat.split([p.numel() for p in module.parameters()]), strict=True):
            p.copy_(part.view_as(p))


class Simulated:
    """All ranks in this process: a network and an optimizer of each."""

    def __init__(self, size, make):
        self.modules = [network() for _ in range(size)]
        self.optimizers = [make(module.parameters()) for module in self.modules]

    def step(self, number):
        for rank, (module, optimizer) in enumerate(zip(self.modules, self.optimizers, strict=True)):
            train(module, optimizer, rank, number)

    def average(self, ranks):
        mean = sum(values(self.modules[rank]) for rank in ranks) / len(ranks)
        for rank in ranks:
            put(self.modules[rank], mean)
        return mean


def momentum(parameters):
    return torch.optim.SGD(parameters, 0.05, momentum=0.9)


def adam(parameters):
    return torch.optim.Adam(parameters, 0.01)


@pytest.mark.parametrize("make", [momentum, adam])
@pytest.mark.parametrize("start", [0, 5])
def test_averages_now_and_then(mpi, make, start):
    module, all_ranks = network(), Simulated(mpi.size(), make)
    ours = optim.LocalSGD(make(module.parameters()), 3, start=start)
    for step in range(11):
        train(module, ours, mpi.rank(), step)
        all_ranks.step(step)
        if step < start or (step + 1) % 3 == 0:
            all_ranks.average(range(mpi.size()))
            mpinn.check_with_allreduce(module)
        torch.testing.assert_close(values(module), values(all_ranks.modules[mpi.rank()]), rtol=1e-9, atol=1e-9)
    ours.average()
    torch.testing.assert_close(values(module), all_ranks.average(range(mpi.size())), rtol=1e-9, atol=1e-9)


def test_one_local_step_is_averaging(mpi):
    """Of gradients, with SGD and momentum, whose steps are linear in them."""
    module, other = network(), network()
    ours = optim.LocalSGD(momentum(module.parameters()), 1)
    theirs = optim.DistributedOptimizer(momentum(other.parameters()), other)
    for step in range(20):
        train(module, ours, mpi.rank(), step)
        train(other, theirs, mpi.rank(), step)
    theirs.remove()
    torch.testing.assert_close(values(module), values(other), rtol=1e-9, atol=1e-9)


def test_inside_groups_often_and_between_them_seldom(mpi):
    world = mpi.communicator()
    with mpi.split(mpi.rank() % 2) as inner:
        module, all_ranks = network(), Simulated(mpi.size(), momentum)
        ours = optim.LocalSGD(momentum(module.parameters()), {world: 6, inner: 2})
        for step in range(13):
            train(module, ours, mpi.rank(), step)
            all_ranks.step(step)
            if (step + 1) % 6 == 0:
                all_ranks.average(range(mpi.size()))
            elif (step + 1) % 2 == 0:
                for parity in (0, 1):
                    if members := range(parity, mpi.size(), 2):
                        all_ranks.average(members)
            torch.testing.assert_close(values(module), values(all_ranks.modules[mpi.rank()]), rtol=1e-9, atol=1e-9)
            is_equal = len({tuple(x) for x in mpi.allgather_object(values(module).tolist())}) == 1
            assert is_equal == ((step + 1) % 6 == 0 or mpi.size() == 1)


@pytest.mark.parametrize(("slow_momentum", "slow_lr", "start"), [(0.5, 1.0, 0), (0.0, 0.7, 0), (0.8, 0.9, 3)])
def test_slow_momentum_by_its_formula(mpi, slow_momentum, slow_lr, start):
    """SlowMo, algorithm 1; saved and gone on with in the middle."""
    module, all_ranks = network(), Simulated(mpi.size(), momentum)
    options = {"slow_momentum": slow_momentum, "slow_lr": slow_lr, "start": start}
    ours = optim.LocalSGD(momentum(module.parameters()), 4, **options)
    before, u = values(module), 0.0
    for step in range(16):
        train(module, ours, mpi.rank(), step)
        all_ranks.step(step)
        if step < start:
            before = all_ranks.average(range(mpi.size()))
        elif (step + 1) % 4 == 0:
            u = slow_momentum * u + (before - all_ranks.average(range(mpi.size()))) / 0.05
            before = before - slow_lr * 0.05 * u
            for each in all_ranks.modules:
                put(each, before)
        torch.testing.assert_close(values(module), values(all_ranks.modules[mpi.rank()]), rtol=1e-9, atol=1e-9)
        if step == 9:
            state = copy.deepcopy(ours.state_dict())
            module = copy.deepcopy(module)
            ours = optim.LocalSGD(momentum(module.parameters()), 4, **options)
            ours.load_state_dict(state)


def test_slow_momentum_with_rates_that_end_at_zero(mpi):
    """What a step of SlowMo divides by is the rate that the steps had, and not the one that the next will have."""
    module, all_ranks = network(), Simulated(mpi.size(), momentum)
    ours = optim.LocalSGD(momentum(module.parameters()), 3, slow_momentum=0.5)
    before, u, rates = values(module), 0.0, [0.05, 0.02, 0.01, 0.05, 0.001, 0.0, 0.0, 0.0, 0.0, 0.02, 0.0, 0.0]
    for step, lr in enumerate(rates):
        for each in (ours, *all_ranks.optimizers):
            each.param_groups[0]["lr"] = lr
        train(module, ours, mpi.rank(), step)
        all_ranks.step(step)
        if (step + 1) % 3 == 0 and (mean_rate := sum(rates[step - 2 : step + 1]) / 3):
            u = 0.5 * u + (before - all_ranks.average(range(mpi.size()))) / mean_rate
            before = before - mean_rate * u
            for each in all_ranks.modules:
                put(each, before)
        torch.testing.assert_close(values(module), values(all_ranks.modules[mpi.rank()]), rtol=1e-9, atol=1e-9)
    ours.average()  # without a step in between, nothing moves
    assert torch.equal(values(module), mpi.broadcast(values(module), 0))
    torch.testing.assert_close(values(module), before, rtol=1e-9, atol=1e-9)


def test_slow_momentum_begins_where_the_first_step_does(mpi):
    """Parameters that are made equal after the optimizer was made are equal after each average."""
    module = network()
    with torch.no_grad():
        module[0].weight += mpi.rank()
    ours = optim.LocalSGD(momentum(module.parameters()), 1, slow_momentum=0.5)
    mpinn.synchronize_parameters(module)
    for step in range(2):
        train(module, ours, mpi.rank(), step)
        assert torch.equal(values(module), mpi.broadcast(values(module), 0))


def test_slow_momentum_and_a_group_that_was_added(mpi):
    """Saved before the first step of its parameters."""

    def made(module):
        return optim.LocalSGD(momentum(module[0].parameters()), 3, slow_momentum=0.5)

    module = network()
    ours = made(module)
    train(module, ours, mpi.rank(), 0)
    ours.add_param_group({"params": list(module[2].parameters())})
    state, other = copy.deepcopy(ours.state_dict()), copy.deepcopy(module)
    again = made(other)
    again.add_param_group({"params": list(other[2].parameters())})
    again.load_state_dict(state)
    for step in range(1, 7):
        train(module, ours, mpi.rank(), step)
        train(other, again, mpi.rank(), step)
        assert torch.equal(values(module), values(other))


@pytest.mark.parametrize("unscales", [False, True])
def test_an_overflow_on_one_rank(mpi, unscales):
    """GradScaler leaves out its update; the other ranks take theirs, and all meet for the average."""
    module, all_ranks = network(), Simulated(mpi.size(), momentum)
    ours = optim.LocalSGD(momentum(module.parameters()), 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(6):
        overflows = step == 2
        generator = torch.Generator().manual_seed(100 * step + mpi.rank())
        x, y = (torch.randn(5, n, generator=generator, dtype=torch.float64) for n in (7, 2))
        ours.zero_grad()
        loss = mse_loss(module(x), y)
        if overflows and mpi.rank() == 0:
            loss = loss + module[0].weight[0, 0] * float("inf")
        scaler.scale(loss).backward()
        if unscales:
            scaler.unscale_(ours)
        scaler.step(ours)
        scaler.update()
        left_out = values(all_ranks.modules[0]), copy.deepcopy(all_ranks.optimizers[0].state_dict())
        all_ranks.step(step)
        if overflows:
            put(all_ranks.modules[0], left_out[0])
            all_ranks.optimizers[0].load_state_dict(left_out[1])
        if (step + 1) % 2 == 0:
            all_ranks.average(range(mpi.size()))
        torch.testing.assert_close(values(module), values(all_ranks.modules[mpi.rank()]), rtol=1e-9, atol=1e-9)
    assert scaler.get_scale() == (512.0 if mpi.rank() == 0 else 1024.0)


def test_bad_input(mpi):
    optimizer = momentum(network().parameters())
    world = mpi.communicator()
    for options, told in (
        ({"period": 0}, "period=0"),
        ({"period": {}}, "period={}"),
        ({"period": {world: 2}, "comm": world}, "not both"),
        ({"start": -1}, "start=-1"),
        ({"slow_momentum": 1.0}, r"slow_momentum=1\.0"),
        ({"slow_lr": 0}, "slow_lr=0"),
    ):
        with pytest.raises(ValueError, match=told):
            optim.LocalSGD(optimizer, **options)
    with mpi.split(0) as other, pytest.raises(ValueError, match="give multiples"):
        optim.LocalSGD(optimizer, {world: 3, other: 2})
    if mpi.size() > 1:
        with mpi.split(mpi.rank()) as alone, pytest.raises(ValueError, match="the more ranks, the longer"):
            optim.LocalSGD(optimizer, {world: 2, alone: 4})
    with pytest.raises(ValueError, match="split"):
        optim.LocalSGD(momentum(mpinn.ColumnParallelLinear(4, 4).parameters()))
