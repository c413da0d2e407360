"""What reads or changes ``p.grad`` while the gradient is elsewhere: as on one process, or an error on every rank."""

import pytest
import torch
from torch.utils.data import TensorDataset

from torchmpi_py import nn as mpinn, optim
from torchmpi_py.engine import AllReduceSGDEngine, DatasetIterator

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(240)]


def network():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(7, 300), torch.nn.Tanh(), torch.nn.Linear(300, 3)).double()


def loss_of(module, ranks, step=0):
    """The mean over the batches of these ranks, whose gradients are far above the bounds of clipping."""
    generator = torch.Generator().manual_seed(step)
    x = 50 * torch.randn(8, 5, 7, generator=generator, dtype=torch.float64)
    return module(x[ranks].flatten(0, 1)).pow(2).mean() * 1000


def parameters(module):
    return list(module.parameters())


def unscale(module):
    """GradScaler, with a plain optimizer of the module's parameters."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    scaler.unscale_(torch.optim.SGD(module.parameters(), 0.1))


USES = {
    "clip the norm": lambda m: torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0),
    "clip the norm, foreach": lambda m: torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0, foreach=True),
    "clip values": lambda m: torch.nn.utils.clip_grad_value_(m.parameters(), 0.01),
    "norms for a log": lambda m: [float(p.grad.norm()) for p in parameters(m) if p.grad is not None],
    "unscale": unscale,
    "nan check": lambda m: [bool(p.grad.isnan().any()) for p in parameters(m) if p.grad is not None],
    "noise": lambda m: [p.grad.add_(0.125) for p in parameters(m) if p.grad is not None],
    "by data": lambda m: [p.grad.data.mul_(0.5) for p in parameters(m) if p.grad is not None],
    "new data": lambda m: [setattr(p.grad, "data", 2 * p.detach()) for p in parameters(m) if p.grad is not None],
    "zero_": lambda m: [p.grad.zero_() for p in parameters(m) if p.grad is not None],
    "zero_grad of the module": lambda m: m.zero_grad(set_to_none=False),
    "numpy": lambda m: [p.grad.numpy().sum() for p in parameters(m) if p.grad is not None],
    "clone": lambda m: [p.grad.clone() for p in parameters(m) if p.grad is not None],
    "a second optimizer": lambda m: torch.optim.SGD(m.parameters(), 0.1).step(),
}
SHARDED = {
    "slices": {"placement": "size"},
    "owners": {"placement": "round_robin"},
    "compressed": {"placement": "size", "compression": optim.compression.BF16()},
}
every_use = pytest.mark.parametrize("use", USES)


def stepped(optimizer, module, loss, use, before=lambda: None):
    optimizer.zero_grad()
    loss.backward()
    before()
    use(module)
    optimizer.step()
    return [p.detach().clone() for p in module.parameters()]


def truth(mpi, use, num_steps=1):
    alone = network()
    theirs = torch.optim.SGD(alone.parameters(), 0.1)
    for step in range(num_steps):
        result = stepped(theirs, alone, loss_of(alone, slice(mpi.size()), step), use)
    return result


@every_use
@pytest.mark.parametrize("kind", SHARDED)
def test_a_sharded_optimizer_refuses_what_is_divided(mpi, kind, use):
    if mpi.size() == 1 and kind == "owners":
        pytest.skip("one rank owns all gradients")
    module = network()
    ours = optim.ShardedOptimizer(module.parameters(), torch.optim.SGD, lr=0.1, **SHARDED[kind])
    ours.zero_grad()
    loss_of(module, [mpi.rank()]).backward()
    with pytest.raises(RuntimeError, match=r"optimizer\.clip_grad_norm_"):
        USES[use](module)
    assert all(p.grad is not None and p.grad.shape == p.shape for p in module.parameters())
    if kind == "owners":  # an owner may have used gradients of its own before it met one of another rank
        ours.remove()
        return
    ours.step()
    assert all(p.grad is None for p in module.parameters())
    if kind != "compressed":
        torch.testing.assert_close(parameters(module), truth(mpi, lambda m: None), rtol=1e-9, atol=1e-9)
    ours.remove()


def test_the_engine_refuses_with_a_sharded_optimizer(mpi):
    samples = TensorDataset(torch.randn(24, 7, dtype=torch.float64), torch.randn(24, 3, dtype=torch.float64))
    for use in USES.values():
        engine = AllReduceSGDEngine(sharded=True)
        engine.hooks.on_backward = lambda state, use=use: use(state.network)
        with pytest.raises(RuntimeError, match=r"optimizer\.clip_grad_norm_"):
            engine.train(network=network(), criterion=torch.nn.MSELoss(), iterator=DatasetIterator(samples, 4), lr=0.1)


@every_use
def test_a_registration_refuses_before_synchronize_and_is_exact_after_it(mpi, use):
    module = network()
    averaged = mpinn.register_async_backward(module)
    plain = torch.optim.SGD(module.parameters(), 0.1)
    loss_of(module, [mpi.rank()]).backward()
    with pytest.raises(RuntimeError, match=r"synchronize\(\)"):
        USES[use](module)
    averaged.synchronize()
    plain.zero_grad()
    ours = stepped(plain, module, loss_of(module, [mpi.rank()]), USES[use], averaged.synchronize)
    torch.testing.assert_close(ours, truth(mpi, USES[use]), rtol=1e-9, atol=1e-9)
    averaged.remove()


@every_use
@pytest.mark.parametrize("joining", [False, True])
def test_a_distributed_optimizer_is_exact_when_backward_returns(mpi, use, joining):
    module = network()
    ours = optim.DistributedOptimizer(torch.optim.SGD(module.parameters(), 0.1), module)
    if joining:
        with mpi.join(ours):
            for step in range(2):
                result = stepped(ours, module, loss_of(module, [mpi.rank()], step), USES[use])
    else:
        result = stepped(ours, module, loss_of(module, [mpi.rank()]), USES[use])
    torch.testing.assert_close(result, truth(mpi, USES[use], 1 + joining), rtol=1e-9, atol=1e-9)
    ours.remove()


def test_sparse_gradients_are_absent_too(mpi):
    module = torch.nn.Embedding(11, 3, sparse=True)
    averaged = mpinn.register_async_backward(module)
    (module(torch.tensor([mpi.rank(), 4])) * torch.arange(1.0, 4.0)).sum().backward()
    with pytest.raises(RuntimeError, match=r"synchronize\(\)"):
        module.weight.grad.mul_(2)
    averaged.synchronize()
    right = torch.zeros(11, 3)
    for row in [*range(mpi.size()), *[4] * mpi.size()]:
        right[row] += torch.arange(1.0, 4.0) / mpi.size()
    torch.testing.assert_close(module.weight.grad.to_dense(), right)
    averaged.remove()


HOLDERS = {
    "registration": lambda m: mpinn.register_async_backward(m),
    "distributed": lambda m: optim.DistributedOptimizer(torch.optim.SGD(m.parameters(), 0.1), m),
    "sharded": lambda m: optim.ShardedOptimizer(m.parameters(), torch.optim.SGD, lr=0.1),
    "a bucket alone": lambda m: mpinn.register_async_backward(m),
}


@pytest.mark.parametrize("kind", HOLDERS)
def test_a_hook_of_a_gradient_runs_before_the_reduction_or_is_refused(mpi, kind, monkeypatch):
    """It wrote into the bucket while the ranks reduced it."""
    if kind == "a bucket alone":
        monkeypatch.setattr("torchmpi_py.core.config.current", mpi.Tuning(alone_bytes=8))

    def hook(p):
        p.grad.mul_(0.5)

    late, early = network(), network()
    holder = HOLDERS[kind](late)
    hooks = [p.register_post_accumulate_grad_hook(hook) for p in late.parameters()]
    with pytest.raises(RuntimeError, match="zero_grad"):
        loss_of(late, [mpi.rank()]).backward()
    for each in hooks:
        each.remove()
    holder.remove()
    for p in early.parameters():
        p.register_post_accumulate_grad_hook(hook)
    holder = HOLDERS[kind](early)
    loss_of(early, [mpi.rank()]).backward()
    if kind == "sharded":
        holder.step()
        right = truth(mpi, lambda m: [p.grad.mul_(0.5) for p in m.parameters()])
        torch.testing.assert_close(parameters(early), right, rtol=1e-9, atol=1e-9)
    else:
        holder.synchronize()
        alone = network()
        loss_of(alone, slice(mpi.size())).backward()
        for p, q in zip(early.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad / 2, rtol=1e-9, atol=1e-9)
    holder.remove()


def test_after_a_pass_that_raised_gradients_are_dropped_or_refused(mpi):
    module = network()
    ours = optim.DistributedOptimizer(torch.optim.SGD(module.parameters(), 0.1), module)

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ValueError("a bad batch, on all ranks")

    x = torch.ones(2, 7, dtype=torch.float64)
    with pytest.raises(ValueError, match="bad batch"):
        module[2](Broken.apply(module[1](module[0](x)))).sum().backward()
    with pytest.raises(RuntimeError, match="zero_grad"):
        loss_of(module, [mpi.rank()]).backward()
    result = stepped(ours, module, loss_of(module, [mpi.rank()]), lambda m: None)
    torch.testing.assert_close(result, truth(mpi, lambda m: None), rtol=1e-9, atol=1e-9)
    ours.remove()
