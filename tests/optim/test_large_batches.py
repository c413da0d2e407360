"""Large batches: k ranks follow one rank with a k-fold batch; learning rates, LARS and LAMB by their formulas."""

import copy
import math

import pytest
import torch
from torch.nn.functional import mse_loss
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
    ):
        with pytest.raises(ValueError, match=told):
            optim.large_batch(optimizer, **options)
    assert optimizer.param_groups[0]["lr"] == 0.1
    with pytest.raises(ValueError, match="trust_coefficient=0"):
        optim.LARS(optimizer, 0)
    with pytest.raises(ValueError, match="most=-1"):
        optim.LAMB(optimizer, most=-1)
    for made in (optim.LARS, optim.LAMB):
        with pytest.raises(TypeError, match="not a LBFGS"):
            made(torch.optim.LBFGS(network().parameters()))
        with pytest.raises(TypeError, match="not a list"):
            made([1])
