"""A sharded optimizer with compressed gradients; what comes of them in the end is in ``test_compressed_layouts``."""

import pytest
import torch
from loops import loss_of, train
from support import networks

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


@pytest.mark.parametrize(
    ("name", "placement"),
    [("BF16", "size"), ("FP16", "round_robin"), ("TopK", "size"), ("TopK", "round_robin"), ("PowerSGD", "size")],
)
def test_an_overflow_is_left_out_on_all_ranks(mpi, name, placement):
    """GradScaler skips the step; the ones after it are as if it had not been."""
    module = networks.perceptron(12, 20, 7)
    ours = optim.ShardedOptimizer(
        module.parameters(), torch.optim.Adam, lr=0.01, placement=placement, compression=ALL[name]()
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(3):
        ours.zero_grad()
        loss = loss_of(module, step, [mpi.rank()])
        if step == 1 and mpi.rank() == 0:
            loss = loss + module[0].weight[0, 0] * float("inf")
        scaler.scale(loss).backward()
        before = networks.flat(module)
        scaler.step(ours)
        scaler.update()
        assert torch.equal(networks.flat(module), before) == (step == 1)
        assert networks.flat(module).isfinite().all()
    assert scaler.get_scale() == 512.0
    mpinn.check_with_allreduce(module)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("name", "placement", "verb"), [("BF16", "size", "reduce_scatter_async"), ("FP16", "round_robin", "reduce_async")]
)
def test_bytes_on_the_wire(mpi, monkeypatch, name, placement, verb):
    counted = []
    plain = getattr(verbs, verb)

    def counting(x, *args, **options):
        counted.append(x.nbytes)
        return plain(x, *args, **options)

    monkeypatch.setattr(verbs, verb, counting)
    module = networks.perceptron(60, 60, 60)  # a number of elements that 1 to 5 divides
    made = ALL[name]()
    ours = optim.ShardedOptimizer(module.parameters(), torch.optim.SGD, lr=0.01, placement=placement, compression=made)
    train(module, ours, range(2), [mpi.rank()])
    assert sum(counted) == 2 * 2 * sum(p.numel() for p in module.parameters())


def test_it_can_be_given_to_what_makes_a_sharded_optimizer(mpi):
    module = networks.perceptron(12, 7)
    inner = torch.optim.SGD(module.parameters(), 0.1)
    assert repr(optim.ShardedOptimizer.from_optimizer(inner, compression=ALL["BF16"]()).compression) == "BF16()"
    with pytest.raises(TypeError, match="compression='BF16'"):
        optim.ShardedOptimizer(networks.perceptron(12, 7).parameters(), torch.optim.SGD, compression="BF16")
