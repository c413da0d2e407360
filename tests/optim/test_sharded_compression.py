"""A sharded optimizer with compressed gradients trains as a DistributedOptimizer with the same compression does."""

import copy

import pytest
import torch

from torchmpi_py import nn as mpinn, optim
from torchmpi_py.collectives import verbs
from torchmpi_py.optim import compression

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(240)]

ALL = {
    "BF16": lambda: compression.BF16(),
    "FP16": lambda: compression.FP16(),
    "TopK": lambda: compression.TopK(0.25),
    "PowerSGD": lambda: compression.PowerSGD(2),
}
PLACEMENTS = {"slices": "size", "owners": "round_robin"}
every_one = pytest.mark.parametrize("name", ALL)
every_placement = pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS)


def network(sizes=(12, 20, 7)):
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(*sizes[:2]), torch.nn.Tanh(), torch.nn.Linear(*sizes[1:]))


def loss_of(mpi, module, step, scale=1.0):
    """Of a batch of this rank."""
    generator = torch.Generator().manual_seed(100 * step + mpi.rank())
    x = torch.randn(8, module[0].in_features, generator=generator).to(module[0].weight.dtype)
    return scale * (module(x) - x[:, :1].sin()).pow(2).mean()


def train(mpi, module, optimizer, steps, scale=1.0):
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(mpi, module, step, scale).backward()
        optimizer.step()


@every_placement
@pytest.mark.parametrize("name", ["BF16", "FP16"])
@pytest.mark.parametrize("average", [True, False])
def test_16_bits(mpi, name, average, placement):
    """One step is off by the digits that 16 bits lack; also where the values leave the range of float16."""
    digits = 2.0**-8 if name == "BF16" else 2.0**-11
    for scale in (1.0, 1e8, 1e-8):
        module, exact = network(), network()
        plain = optim.DistributedOptimizer(torch.optim.SGD(exact.parameters(), 0.1 / scale), exact, average=average)
        ours = optim.ShardedOptimizer(
            module.parameters(),
            torch.optim.SGD,
            lr=0.1 / scale,
            placement=placement,
            average=average,
            compression=ALL[name](),
        )
        for step in range(3):
            before = copy.deepcopy(exact)
            for p, q in zip(module.parameters(), before.parameters(), strict=True):
                p.data.copy_(q)
            for each, optimizer in ((exact, plain), (module, ours)):
                optimizer.zero_grad()
                loss_of(mpi, each, step, scale).backward()
                optimizer.step()
            for p, q, r in zip(module.parameters(), exact.parameters(), before.parameters(), strict=True):
                largest = (q - r).abs().max()
                assert (p - q).abs().max() <= (mpi.size() + 1) * digits * largest + 1e-6
            mpinn.check_with_allreduce(module)
        plain.remove()
        ours.remove()


@every_placement
@every_one
def test_training_is_that_of_plain_averaging_with_this_compression(mpi, name, placement):
    """Where buckets are the same, as with slices, parameters too."""
    module, other, exact = (network().double() for _ in range(3))  # rounding could decide what TopK takes
    ours = optim.ShardedOptimizer(
        module.parameters(), torch.optim.SGD, lr=0.1, placement=placement, compression=ALL[name]()
    )
    theirs = optim.DistributedOptimizer(torch.optim.SGD(other.parameters(), 0.1), other, compression=ALL[name]())
    plain = optim.DistributedOptimizer(torch.optim.SGD(exact.parameters(), 0.1), exact)
    for each, optimizer in ((module, ours), (other, theirs), (exact, plain)):
        train(mpi, each, optimizer, 60)
        optimizer.remove()
    mpinn.check_with_allreduce(module)
    losses = [mpi.allreduce(loss_of(mpi, each, 99).item(), op="avg") for each in (module, other, exact)]
    assert losses[0] < max(1.5 * losses[2], 0.1)
    if placement == "size":
        tolerance = 0.02 if name in ("BF16", "FP16") else 1e-6
        for p, q in zip(module.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)
    if mpi.size() > 1:
        assert any(not torch.equal(p, q) for p, q in zip(module.parameters(), exact.parameters(), strict=True))


@every_placement
@every_one
def test_an_overflow_is_left_out_on_all_ranks(mpi, name, placement):
    """GradScaler skips the step; the ones after it are as if it had not been."""
    module = network()
    ours = optim.ShardedOptimizer(
        module.parameters(), torch.optim.Adam, lr=0.01, placement=placement, compression=ALL[name]()
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(4):
        ours.zero_grad()
        loss = loss_of(mpi, module, step)
        if step == 1 and mpi.rank() == 0:
            loss = loss + module[0].weight[0, 0] * float("inf")
        scaler.scale(loss).backward()
        before = copy.deepcopy(module)
        scaler.step(ours)
        is_equal = all(torch.equal(p, q) for p, q in zip(module.parameters(), before.parameters(), strict=True))
        assert is_equal == (step == 1)
        scaler.update()
        assert all(torch.isfinite(p).all() for p in module.parameters())
    assert scaler.get_scale() == 512.0
    mpinn.check_with_allreduce(module)
    ours.remove()


@pytest.mark.parametrize(
    ("placement", "verb"), [("size", "reduce_scatter_async"), ("round_robin", "reduce_async")], ids=PLACEMENTS
)
@pytest.mark.parametrize("name", ["BF16", "FP16"])
def test_bytes_on_the_wire(mpi, monkeypatch, name, placement, verb):
    if mpi.size() == 1:
        pytest.skip("nothing is sent")
    counted = []
    plain = getattr(verbs, verb)

    def counting(x, *args, **options):
        counted.append(x.nbytes)
        return plain(x, *args, **options)

    monkeypatch.setattr(verbs, verb, counting)
    module = network((60, 60, 60))  # a number of elements that 1 to 5 divides
    ours = optim.ShardedOptimizer(
        module.parameters(), torch.optim.SGD, lr=0.01, placement=placement, compression=ALL[name]()
    )
    train(mpi, module, ours, 2)
    assert sum(counted) == 2 * 2 * sum(p.numel() for p in module.parameters())
    ours.remove()


def test_it_can_be_given_to_what_makes_a_sharded_optimizer(mpi):
    module = network()
    made = optim.ShardedOptimizer.from_optimizer(
        torch.optim.SGD(module.parameters(), 0.1), compression=compression.BF16()
    )
    assert repr(made.compression) == "BF16()"
    made.remove()
    with pytest.raises(TypeError, match="compression='BF16'"):
        optim.ShardedOptimizer(network().parameters(), torch.optim.SGD, compression="BF16")
