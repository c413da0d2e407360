"""Large batches: k ranks follow one rank with a k-fold batch; learning rates by their formulas."""

import copy

import pytest
import torch
from loops import assert_close, pair, sides, train
from torch.optim import lr_scheduler

from torchmpi_py import optim

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(120)]


def one_parameter(lr):
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr)


def rates(optimizer, schedule, steps):
    found = []
    for _ in range(steps):
        found.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize("warmup_steps", [0, 4])
def test_many_ranks_are_one_with_a_larger_batch(mpi, warmup_steps):
    """Of the same samples, with the learning rate that one rank would have."""
    module, alone = pair()
    inner, theirs = (torch.optim.SGD(m.parameters(), 0.01, momentum=0.9) for m in (module, alone))
    ours = optim.DistributedOptimizer(inner, module)
    schedule = optim.large_batch(ours, warmup_steps=warmup_steps)
    for step in range(7):
        share = min(1.0, step / warmup_steps) if warmup_steps else 1.0
        theirs.param_groups[0]["lr"] = 0.01 * (1 + (mpi.size() - 1) * share)
        for m, o, ranks in sides(mpi, module, ours, alone, theirs):
            train(m, o, [step], ranks)
        schedule.step()
    assert_close(module, alone)


@pytest.mark.parametrize("warmup_steps", [0, 5])
def test_the_curve_of_the_square_root(mpi, warmup_steps):
    optimizer = one_parameter(0.1)
    schedule = optim.large_batch(optimizer, 8, rule="sqrt", warmup_steps=warmup_steps)
    shares = [min(1.0, step / warmup_steps) if warmup_steps else 1.0 for step in range(8)]
    expected = [[pytest.approx(0.1 * (1 + (8**0.5 - 1) * share))] for share in shares]
    assert rates(optimizer, schedule, 8) == expected


SCHEDULES = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.5 / (1 + step)),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.1),
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


@pytest.mark.parametrize(("name", "is_sharded"), [("LARS", False), ("LARS", True), ("Lamb", True)])
def test_layerwise_optimizers_of_another_package(mpi, name, is_sharded):
    """Norms are those of averaged gradients and whole parameters, also where the optimizer's state is sharded."""
    make = getattr(pytest.importorskip("pytorch_optimizer"), name)
    module, alone = pair()
    inner, theirs = (make(m.parameters(), lr=0.1, weight_decay=0.01) for m in (module, alone))
    ours = optim.ShardedOptimizer.from_optimizer(inner) if is_sharded else optim.DistributedOptimizer(inner, module)
    for m, o, ranks in sides(mpi, module, ours, alone, theirs):
        train(m, o, range(4), ranks)
    assert_close(module, alone)


def test_bad_input():
    optimizer = one_parameter(0.1)
    for options, told in (
        ({"factor": 0}, "factor=0"),
        ({"factor": True}, "factor=True"),
        ({"factor": 2, "rule": "cubic"}, "rule='cubic'"),
        ({"factor": 2, "warmup_steps": -1}, "warmup_steps=-1"),
        ({"factor": 2, "warmup_steps": 0.5}, "warmup_steps=0.5"),
        ({"factor": 0.5, "warmup_steps": 3}, "a warm-up needs factor >= 1, found factor=0.5"),
    ):
        with pytest.raises(ValueError, match=told):
            optim.large_batch(optimizer, **options)
    assert optimizer.param_groups[0]["lr"] == 0.1
