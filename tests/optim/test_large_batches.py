"""Large batches: k ranks follow one rank with a k-fold batch; learning rates, LARS and LAMB by their formulas."""

import copy
import math

import pytest
import torch
from torch.nn.functional import mse_loss
from torch.optim import lr_scheduler, swa_utils
from torch.optim.lr_scheduler import StepLR

from torchmpi_py import nn, optim

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


def gradients(module, step):
    generator = torch.Generator().manual_seed(step)
    for p in module.parameters():
        p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)


def everything(p):
    return True


@pytest.mark.parametrize("only", [None, everything])
def test_lars_by_its_formula(only):
    """Algorithm 1 of the paper: v = m v + lr ratio (g + d w); w = w - v."""
    module = network()
    options = {} if only is None else {"only": only}
    lars = optim.LARS(
        torch.optim.SGD(module.parameters(), 0.1, momentum=0.9, weight_decay=0.01), trust_coefficient=0.02, **options
    )
    weights = [p.detach().clone() for p in module.parameters()]
    momenta = [torch.zeros_like(w) for w in weights]
    for step in range(10):
        gradients(module, step)
        for w, v, p in zip(weights, momenta, module.parameters(), strict=True):
            ratio = 0.02 * w.norm() / (p.grad.norm() + 0.01 * w.norm()) if only or w.dim() > 1 else 1.0
            v.mul_(0.9).add_(0.1 * ratio * (p.grad + 0.01 * w))
            w -= v
        lars.step()
        for w, p in zip(weights, module.parameters(), strict=True):
            torch.testing.assert_close(p.detach(), w, rtol=1e-12, atol=1e-12)
    assert lars.param_groups[0]["weight_decay"] == 0.01


@pytest.mark.parametrize("most", [None, 0.5])
@pytest.mark.parametrize("only", [None, everything])
def test_lamb_by_its_formula(only, most):
    """Algorithm 2 of the paper: r = m / (sqrt(v) + eps), both corrected; w = w - lr phi(|w|) (r + d w) / |r + d w|."""
    module = network()
    options = {} if only is None else {"only": only}
    lamb = optim.LAMB(torch.optim.AdamW(module.parameters(), 0.01, weight_decay=0.1), most=most, **options)
    state = [(p.detach().clone(), torch.zeros_like(p), torch.zeros_like(p)) for p in module.parameters()]
    for step in range(10):
        gradients(module, step)
        for (w, m, v), p in zip(state, module.parameters(), strict=True):
            m.mul_(0.9).add_(0.1 * p.grad)
            v.mul_(0.999).add_(0.001 * p.grad**2)
            r = (m / (1 - 0.9 ** (step + 1))) / ((v / (1 - 0.999 ** (step + 1))).sqrt() + 1e-8) + 0.1 * w
            length = 1.0
            if only or w.dim() > 1:
                length = min(w.norm(), math.inf if most is None else most) / r.norm()
            w -= 0.01 * length * r
        lamb.step()
        for (w, _, _), p in zip(state, module.parameters(), strict=True):
            torch.testing.assert_close(p.detach(), w, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("make", [lambda o: optim.LARS(o, 0.1), optim.LAMB], ids=["LARS", "LAMB"])
def test_zeros_are_not_scaled(make):
    """A parameter of zeros takes the optimizer's step; a gradient of zeros changes nothing; None neither."""
    weights = [torch.nn.Parameter(x) for x in (torch.zeros(2, 2), torch.ones(2, 2), torch.ones(2, 2))]
    weights[0].grad, weights[1].grad = torch.ones(2, 2), torch.zeros(2, 2)
    make(torch.optim.SGD(weights, 0.5)).step()
    assert [w.mean().item() for w in weights] == [-0.5, 1.0, 1.0]


@pytest.mark.parametrize("name", ["ASGD", "Adadelta", "Adagrad", "Adam", "Adamax", "NAdam", "RAdam", "RMSprop", "SGD"])
@pytest.mark.parametrize("maximize", [False, True])
def test_lars_decays_as_its_optimizer(name, maximize):
    """Parameters that are not scaled get the optimizer's own step."""
    module, alone = network(), network()
    ours, theirs = (
        getattr(torch.optim, name)(m.parameters(), lr=0.1, weight_decay=0.3, maximize=maximize) for m in (module, alone)
    )
    ours = optim.LARS(ours, only=lambda p: False)
    for step in range(3):
        for m, o in ((module, ours), (alone, theirs)):
            gradients(m, step)
            o.step()
    assert all(map(torch.equal, module.parameters(), alone.parameters()))


@pytest.mark.parametrize("make", [lambda o: optim.LARS(o, 0.1), optim.LAMB], ids=["LARS", "LAMB"])
@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_maximize(make, name):
    """Ascent is descent with the gradients' signs turned, and weight decay shrinks in both."""
    module, alone = network(), network()
    ours, theirs = (
        make(getattr(torch.optim, name)(m.parameters(), lr=0.1, weight_decay=0.3, maximize=maximize))
        for m, maximize in ((module, True), (alone, False))
    )
    for step in range(5):
        gradients(module, step)
        gradients(alone, step)
        for p in alone.parameters():
            p.grad.neg_()
        ours.step()
        theirs.step()
    for p, q in zip(module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)


def decoupled_optimizers(parameters, decay):
    parameters = [p for p in parameters if p.dim() > 1]  # Muon takes no others
    for name in ("AdamW", "Adafactor", "Muon"):
        if hasattr(torch.optim, name):
            yield name, getattr(torch.optim, name)(parameters, lr=0.1, weight_decay=decay)
    for name in ("NAdam", "RAdam"):
        yield name, getattr(torch.optim, name)(parameters, lr=0.1, weight_decay=decay, decoupled_weight_decay=True)


def test_lars_refuses_decoupled_decay():
    for name, optimizer in decoupled_optimizers(network().parameters(), 0.25):
        with pytest.raises(ValueError, match=f"{name} has a decoupled weight_decay=0.25.*optim.LAMB"):
            optim.LARS(optimizer)
    for name, optimizer in decoupled_optimizers(network().parameters(), 0.0):
        lars = optim.LARS(optimizer)
        p = lars.param_groups[0]["params"][0]
        p.grad = torch.ones_like(p)
        lars.step()
        before, gradient = p.detach().clone(), p.grad.clone()
        lars.param_groups[0]["weight_decay"] = 0.5
        with pytest.raises(ValueError, match=f"{name} has a decoupled weight_decay=0.5"):
            lars.step()
        assert torch.equal(p, before)
        assert torch.equal(p.grad, gradient)


class SplitNetwork(torch.nn.Sequential):
    """A network whose third row of the embedding gets no gradient."""

    def __init__(self, comm=None, split=True):
        torch.manual_seed(5)
        table, first, second = torch.nn.Embedding(3, 7), torch.nn.Linear(7, 9), torch.nn.Linear(9, 2)
        if split:
            table = nn.ParallelEmbedding.from_embedding(table, comm=comm)
            first = nn.ColumnParallelLinear.from_linear(first, comm=comm, gather_output=False)
            second = nn.RowParallelLinear.from_linear(second, comm=comm, input_is_split=True)
        super().__init__(table, first, torch.nn.Tanh(), second)
        self.double()


TRUST_RATIOS = {
    "LARS": lambda p: optim.LARS(torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01), 0.02, only=everything),
    "LAMB": lambda p: optim.LAMB(torch.optim.AdamW(p, 0.01, weight_decay=0.1), most=1.5, only=everything),
}


@pytest.mark.parametrize("make", TRUST_RATIOS.values(), ids=TRUST_RATIOS)
@pytest.mark.parametrize("groups", [1, 2])
def test_split_layers(mpi, make, groups):
    """Ratios are those of whole parameters, also where a rank has an empty part, and with several groups of ranks."""
    if mpi.size() % groups:
        pytest.skip("an even number of ranks")
    group = mpi.rank() * groups // mpi.size()
    module, alone = SplitNetwork(mpi.split(group)), SplitNetwork(split=False)
    ours, theirs = make(module.parameters()), make(alone.parameters())
    distributed = optim.DistributedOptimizer(ours, module)
    for step in range(5):
        generator = torch.Generator().manual_seed(step)
        x = torch.randint(2, (groups, 6), generator=generator)
        y = torch.randn(groups, 6, 2, generator=generator, dtype=torch.double)
        for m, o, own in ((module, distributed, slice(group, group + 1)), (alone, theirs, slice(None))):
            o.zero_grad()
            mse_loss(m(x[own].flatten()), y[own].flatten(0, 1)).backward()
            o.step()
    torch.testing.assert_close(module.state_dict(), alone.state_dict(), rtol=1e-9, atol=1e-9)
    distributed.remove()


@pytest.mark.parametrize("make", [optim.LARS, optim.LAMB])
def test_split_parameters_are_scaled_on_all_ranks_or_none(mpi, make):
    if mpi.size() == 1:
        pytest.skip("one rank agrees with itself")
    module = SplitNetwork()
    ours = make(torch.optim.SGD(module.parameters(), 0.1), only=lambda p: p.dim() > 1 and mpi.rank() != 0)
    module(torch.tensor([0, 1])).sum().backward()
    with pytest.raises(ValueError, match=f"split parameter 0 is scaled on {mpi.size() - 1} of the {mpi.size()} ranks"):
        ours.step()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("make", [lambda o: optim.LARS(o, 0.1), optim.LAMB], ids=["LARS", "LAMB"])
def test_with_grad_scaler(make, fused):
    """Also around an optimizer that could unscale by itself."""
    module, other = network(), network()
    ours, theirs = (make(torch.optim.Adam(m.parameters(), 0.01, fused=fused)) for m in (module, other))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(3):
        x = torch.randn(4, 7, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        scaler.scale(module(x).pow(2).mean()).backward()
        scaler.step(ours)
        scaler.update()
        other(x).pow(2).mean().backward()
        theirs.step()
        ours.zero_grad()
        theirs.zero_grad()
    for p, q in zip(module.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("make", [lambda o: optim.LARS(o, 0.1), optim.LAMB], ids=["LARS", "LAMB"])
@pytest.mark.parametrize("how", ["averaged", "sharded"])
def test_with_many_ranks(mpi, make, how):
    """Ratios come from averages; with divided state each parameter has one owner, and its norm is whole."""
    module, alone = network(), network()
    ours = make(torch.optim.SGD(module.parameters(), 0.1, momentum=0.9, weight_decay=0.01))
    theirs = make(torch.optim.SGD(alone.parameters(), 0.1, momentum=0.9, weight_decay=0.01))
    divided = optim.ShardedOptimizer.from_optimizer(ours) if how == "sharded" else None
    distributed = divided or optim.DistributedOptimizer(ours, module)
    for step in range(8):
        x, y = batches(mpi, step)
        for m, o, rank in ((module, distributed, slice(mpi.rank(), mpi.rank() + 1)), (alone, theirs, slice(None))):
            o.zero_grad()
            mse_loss(m(x[rank].flatten(0, 1)), y[rank].flatten(0, 1)).backward()
            o.step()
    for p, q in zip(module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-9)
    state = copy.deepcopy(distributed.state_dict())
    torch.testing.assert_close(state["state"], theirs.state_dict()["state"], rtol=1e-8, atol=1e-9)
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
    with pytest.raises(ValueError, match="trust_coefficient=0"):
        optim.LARS(optimizer, 0)
    with pytest.raises(ValueError, match="most=-1"):
        optim.LAMB(optimizer, most=-1)
    for made in (optim.LARS, optim.LAMB):
        with pytest.raises(TypeError, match="not a LBFGS"):
            made(torch.optim.LBFGS(network().parameters()))
        with pytest.raises(TypeError, match="not a list"):
            made([1])
        with pytest.raises(TypeError, match="that the LocalSGD holds"):
            made(optim.LocalSGD(optimizer, period=2))
