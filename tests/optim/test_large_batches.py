"""Large batches: k ranks follow one rank with a k-fold batch; learning rates by their formulas."""

import copy
import math

import pytest
import torch
from torch.nn.functional import mse_loss
from torch.optim import lr_scheduler, swa_utils
from torch.optim.lr_scheduler import StepLR

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
        found.append(optimizer.param_groups[0]["lr"])
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
    schedule = optim.large_batch(optimizer, 8, rule=rule, warmup_steps=5, then=lambda o: StepLR(o, 2, 0.1))
    expected = [0.1 * (1 + (scale - 1) * step / 5) for step in range(5)]
    expected += [0.1 * scale * factor for factor in (1, 1, 0.1, 0.1, 0.01)]
    assert rates(optimizer, schedule, 10) == pytest.approx(expected)
    optimizer = torch.optim.SGD(network().parameters(), 0.1)
    schedule = optim.large_batch(optimizer, 8, rule=rule, then=lambda o: StepLR(o, 2, 0.1))
    assert rates(optimizer, schedule, 4) == pytest.approx([0.1 * scale * factor for factor in (1, 1, 0.1, 0.1)])
    optimizer = torch.optim.SGD(network().parameters(), 0.1)
    assert rates(optimizer, optim.large_batch(optimizer, 8, rule=rule), 4) == pytest.approx([0.1 * scale] * 4)


SCHEDULES = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.5 / (1 + step)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 5]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 3),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.3, 0.7, 5),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 6, 2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 6, 0.001),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.5, 3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.8, total_steps=20),
    "SWALR": lambda o: swa_utils.SWALR(o, 0.05, 4),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ExponentialLR(o, 0.9), lr_scheduler.ConstantLR(o, 0.5, 3)], o
    ),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.5, 10), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
}


def two_groups(lr):
    groups = [{"params": [torch.nn.Parameter(torch.ones(3))], "lr": lr * share} for share in (1, 0.5)]
    return torch.optim.SGD(groups, momentum=0.85)


def group_values(optimizer, schedule, steps):
    found = []
    for _ in range(steps):
        found.append([x for group in optimizer.param_groups for x in (float(group["lr"]), group["momentum"])])
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize("then", SCHEDULES.values(), ids=SCHEDULES)
def test_schedules_after_a_warm_up(then):
    """They begin at the full rate, as without a warm-up; also in a run that is resumed, in both parts."""
    plain, optimizer = two_groups(0.8), two_groups(0.1)
    expected = group_values(plain, then(plain), 12)
    schedule = optim.large_batch(optimizer, 8, warmup_steps=4, then=then)
    found = group_values(optimizer, schedule, 2)
    for steps in (5, 9):
        states = copy.deepcopy((optimizer.state_dict(), schedule.state_dict()))
        optimizer = two_groups(0.1)
        schedule = optim.large_batch(optimizer, 8, warmup_steps=4, then=then)
        optimizer.load_state_dict(states[0])
        schedule.load_state_dict(states[1])
        assert schedule.get_last_lr() == [group["lr"] for group in optimizer.param_groups]
        found += group_values(optimizer, schedule, steps)
    ramp = [0.1 * (1 + 7 * step / 4) for step in range(4)]
    assert [values[::2] for values in found[:4]] == [pytest.approx([lr, lr / 2]) for lr in ramp]
    assert found[4:] == [pytest.approx(values) for values in expected]


def test_rates_in_tensors():
    """They stay the same tensors, which a captured step reads."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], torch.tensor(0.1))
    schedule = optim.large_batch(optimizer, 8, warmup_steps=4, then=lambda o: lr_scheduler.ExponentialLR(o, 0.5))
    lr = optimizer.param_groups[0]["lr"]
    found = []
    for _ in range(7):
        found.append(float(lr))
        optimizer.step()
        schedule.step()
    assert found == pytest.approx([0.1, 0.275, 0.45, 0.625, 0.8, 0.4, 0.2])


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
    for then, told in ((lr_scheduler.ReduceLROnPlateau, "made a ReduceLROnPlateau"), (id, "made a int")):
        with pytest.raises(TypeError, match=told):
            optim.large_batch(optimizer, 2, warmup_steps=3, then=then)
