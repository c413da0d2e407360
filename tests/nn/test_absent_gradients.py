"""What reads or changes ``p.grad`` while the gradient is elsewhere: as on one process, or an error on every rank."""

import pytest
import torch
from support import networks
from torch.utils.data import TensorDataset

from torchmpi_py import nn as mpinn, optim
from torchmpi_py.engine import AllReduceSGDEngine, DatasetIterator

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(240)]


def network():
    return networks.perceptron(7, 300, 3, dtype=torch.float64)


def loss_of(module, ranks, step=0):
    """The mean over the batches of these ranks, whose gradients are far above the bounds of clipping."""
    x = torch.cat([50 * networks.batch(5, 7, rank=rank, step=step, dtype=torch.float64) for rank in ranks])
    return module(x).pow(2).mean() * 1000


def present(module):
    return [p.grad for p in module.parameters() if p.grad is not None]


def unscale(module):
    """GradScaler, with a plain optimizer of the module's parameters."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    scaler.unscale_(torch.optim.SGD(module.parameters(), 0.1))


USES = {
    "clip the norm": lambda m: torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0),
    "clip the norm, foreach": lambda m: torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0, foreach=True),
    "clip values": lambda m: torch.nn.utils.clip_grad_value_(m.parameters(), 0.01),
    "norms for a log": lambda m: [float(x.norm()) for x in present(m)],
    "unscale": unscale,
    "noise": lambda m: [x.add_(0.125) for x in present(m)],
    "by data": lambda m: [x.data.mul_(0.5) for x in present(m)],
    "new data": lambda m: [setattr(p.grad, "data", 2 * p.detach()) for p in m.parameters() if p.grad is not None],
    "zero_grad of the module": lambda m: m.zero_grad(set_to_none=False),
    "numpy": lambda m: [x.numpy().sum() for x in present(m)],
    "clone": lambda m: [x.clone() for x in present(m)],
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


def assert_as_on_one_process(mpi, module, use, num_steps=1):
    alone = network()
    theirs = torch.optim.SGD(alone.parameters(), 0.1)
    for step in range(num_steps):
        stepped(theirs, alone, loss_of(alone, range(mpi.size()), step), use)
    torch.testing.assert_close(networks.flat(module), networks.flat(alone), rtol=1e-9, atol=1e-9)


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
    if kind != "owners":  # an owner may have used gradients of its own before it met one of another rank
        ours.step()
        assert all(p.grad is None for p in module.parameters())
    if kind == "slices":
        assert_as_on_one_process(mpi, module, lambda m: None)
    ours.remove()


def test_the_engine_refuses_with_a_sharded_optimizer(mpi):
    samples = TensorDataset(torch.randn(24, 7, dtype=torch.float64), torch.randn(24, 3, dtype=torch.float64))
    for use in ("clip the norm", "noise", "zero_grad of the module"):
        engine = AllReduceSGDEngine(sharded=True)
        engine.hooks.on_backward = lambda state, use=use: USES[use](state.network)
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
    stepped(plain, module, loss_of(module, [mpi.rank()]), USES[use], averaged.synchronize)
    assert_as_on_one_process(mpi, module, USES[use])


@every_use
def test_a_distributed_optimizer_is_exact_when_backward_returns(mpi, use):
    """Also in a join."""
    module = network()
    ours = optim.DistributedOptimizer(torch.optim.SGD(module.parameters(), 0.1), module)
    stepped(ours, module, loss_of(module, [mpi.rank()]), USES[use])
    with mpi.join(ours):
        stepped(ours, module, loss_of(module, [mpi.rank()], 1), USES[use])
    assert_as_on_one_process(mpi, module, USES[use], 2)


def test_sparse_gradients_are_absent_too(mpi):
    module = torch.nn.Embedding(11, 3, sparse=True)
    averaged = mpinn.register_async_backward(module)
    module(torch.tensor([mpi.rank(), 4])).sum().backward()
    with pytest.raises(RuntimeError, match=r"synchronize\(\)"):
        module.weight.grad.mul_(2)
    averaged.synchronize()
    assert module.weight.grad.to_dense()[:, 0].sum().item() == pytest.approx(2)


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
        assert_as_on_one_process(mpi, early, lambda m: [x.mul_(0.5) for x in present(m)])
    else:
        holder.synchronize()
        alone = network()
        loss_of(alone, range(mpi.size())).backward()
        right = networks.flat_gradients(alone) / 2
        torch.testing.assert_close(networks.flat_gradients(early), right, rtol=1e-9, atol=1e-9)
