"""Large batches: k ranks follow one rank with a k-fold batch; learning rates by their formulas."""

import copy
import math

import pytest
import torch
from torch.nn.functional import mse_loss
from torch.optim import lr_scheduler

from torchmpi_py import optim

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(120)]


def network():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(7, 9), torch.nn.Tanh(), torch.nn.Linear(9, 2)).double()


def batches(mpi, step):
    generator = torch.Generator().manual_seed(step)
    x, y = (torch.randn(mpi.size(), 5, n, generator=generator, dtype=torch.float64) for n in (7, 2))
    return x, y


def rates(optimizer, schedule, steps):
    found = []
    for _ in range(steps):
        found.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("warmup_steps", [0, 6])
def test_many_ranks_are_one_with_a_larger_batch(mpi, momentum, warmup_steps):
    """Of the same samples, with the learning rate that one rank would have."""
    module, alone = network(), network()
    ours = torch.optim.SGD(module.parameters(), 0.01, momentum=momentum)
    distributed = optim.DistributedOptimizer(ours, module)
    schedule = optim.large_batch(distributed, warmup_steps=warmup_steps)
    theirs = torch.optim.SGD(alone.parameters(), 0.01, momentum=momentum)
    for step in range(15):
        x, y = batches(mpi, step)
        share = min(1.0, step / warmup_steps) if warmup_steps else 1.0
        theirs.param_groups[0]["lr"] = 0.01 * (1 + (mpi.size() - 1) * share)
        for m, o, rank in ((module, distributed, slice(mpi.rank(), mpi.rank() + 1)), (alone, theirs, slice(None))):
            o.zero_grad()
            mse_loss(m(x[rank].flatten(0, 1)), y[rank].flatten(0, 1)).backward()
            o.step()
        schedule.step()
    distributed.remove()
    for p, q in zip(module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("rule", "scale"), [("linear", 8.0), ("sqrt", math.sqrt(8))])
def test_the_curve_of_a_warm_up(mpi, rule, scale):
    optimizer = torch.optim.SGD(network().parameters(), 0.1)
    expected = [0.1 * (1 + (scale - 1) * min(step, 5) / 5) for step in range(8)]
    schedule = optim.large_batch(optimizer, 8, rule=rule, warmup_steps=5)
    assert rates(optimizer, schedule, 8) == [[pytest.approx(lr)] for lr in expected]
    optimizer = torch.optim.SGD(network().parameters(), 0.1)
    schedule = optim.large_batch(optimizer, 8, rule=rule)
    assert rates(optimizer, schedule, 4) == [[pytest.approx(0.1 * scale)]] * 4


SCHEDULES = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.5 / (1 + step)),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.1),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 6, 0.001),
}


def two_groups(lr):
    groups = [{"params": [torch.nn.Parameter(torch.ones(3))], "lr": lr * share} for share in (1, 0.5)]
    return torch.optim.SGD(groups)


def followed(optimizer, then):
    warmup = optim.large_batch(optimizer, 8, warmup_steps=4)
    return lr_scheduler.SequentialLR(optimizer, [warmup, then(optimizer)], milestones=[4])


@pytest.mark.parametrize("then", SCHEDULES.values(), ids=SCHEDULES)
def test_schedules_after_a_warm_up(then):
    """They start at the full rate, as without a warm-up; also in a run that is resumed, in both parts."""
    plain, optimizer = two_groups(0.8), two_groups(0.1)
    expected = rates(plain, then(plain), 12)
    schedule = followed(optimizer, then)
    found = rates(optimizer, schedule, 2)
    for steps in (5, 9):
        states = copy.deepcopy((optimizer.state_dict(), schedule.state_dict()))
        optimizer = two_groups(0.1)
        schedule = followed(optimizer, then)
        optimizer.load_state_dict(states[0])
        schedule.load_state_dict(states[1])
        found += rates(optimizer, schedule, steps)
    assert found[:4] == [pytest.approx([lr, lr / 2]) for lr in (0.1 * (1 + 7 * step / 4) for step in range(4))]
    assert found[4:] == [pytest.approx(values) for values in expected]


@pytest.mark.parametrize("name", ["LARS", "Lamb"])
@pytest.mark.parametrize("is_sharded", [False, True])
def test_layerwise_optimizers_of_another_package(mpi, name, is_sharded):
    """Norms are those of averaged gradients and whole parameters, also where the optimizer's state is sharded."""
    make = getattr(pytest.importorskip("pytorch_optimizer"), name)
    module, alone = network(), network()
    ours, theirs = (make(m.parameters(), lr=0.1, weight_decay=0.01) for m in (module, alone))
    distributed = (
        optim.ShardedOptimizer.from_optimizer(ours) if is_sharded else optim.DistributedOptimizer(ours, module)
    )
    for step in range(8):
        x, y = batches(mpi, step)
        for m, o, rank in ((module, distributed, slice(mpi.rank(), mpi.rank() + 1)), (alone, theirs, slice(None))):
            o.zero_grad()
            mse_loss(m(x[rank].flatten(0, 1)), y[rank].flatten(0, 1)).backward()
            o.step()
    for p, q in zip(module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-9)
    distributed.remove()


def test_bad_input():
    optimizer = torch.optim.SGD(network().parameters(), 0.1)
    for options, told in (
        ({"factor": 0}, "factor=0"),
        ({"factor": True}, "factor=True"),
        ({"factor": 2, "rule": "cubic"}, "rule='cubic'"),
        ({"factor": 2, "warmup_steps": -1}, "warmup_steps=-1"),
        ({"factor": 2, "warmup_steps": 0.5}, "warmup_steps=0.5"),
        ({"factor": 0.5, "warmup_steps": 3}, "factor=0.5: a warm-up grows"),
    ):
        with pytest.raises(ValueError, match=told):
            optim.large_batch(optimizer, **options)
    assert optimizer.param_groups[0]["lr"] == 0.1
