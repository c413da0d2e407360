"""Means with partners: the average over ranks stays, and what sets them apart shrinks as the theory says."""

import math

import pytest
import torch
from support import networks

from torchmpi_py import nn as mpinn, optim

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(120)]


def parameters(mpi):
    """Different on each rank; one is not contiguous."""
    shapes = [(5, 3), (), (40,), (0, 2), (4, 6)]
    made = [networks.batch(*shape, rank=mpi.rank(), dtype=torch.float64) for shape in shapes]
    return torch.nn.ParameterList([*made[:4], made[4].t()])


def still(own):
    """An optimizer whose steps change nothing."""
    for p in own:
        p.grad = torch.zeros_like(p)
    return torch.optim.SGD(own, 0.1)


@pytest.mark.parametrize(("partners", "asynchronous"), [("ring", True), ("ring", False), ("random", True)])
def test_the_average_stays_and_ranks_come_together(mpi, partners, asynchronous):
    own = parameters(mpi)
    before = mpi.allgather(networks.flat(own)[None])
    gossip = optim.Gossip(still(own), partners, asynchronous=asynchronous, seed=5)
    for _ in range(50):
        gossip.step()
    gossip.finish()
    after = mpi.allgather(networks.flat(own)[None])
    torch.testing.assert_close(after.mean(0), before.mean(0), rtol=1e-12, atol=1e-12)
    assert after.std(0, unbiased=False).max() < 1e-3 * before.std(0, unbiased=False).max() + 1e-12
    gossip.average()
    torch.testing.assert_close(networks.flat(own), before.mean(0), rtol=1e-12, atol=1e-12)


def test_the_ring_shrinks_by_its_spectrum(mpi):
    """What is an eigenvector of the ring shrinks by its eigenvalue in each step, exactly."""
    size, rank = mpi.size(), mpi.rank()
    for wave in range(size):
        factor = (1 + 2 * math.cos(2 * math.pi * wave / size)) / 3
        if size == 2:
            factor = 1.0 if wave == 0 else 0.0  # the two neighbours are one, with the weight 1/2
        own = [torch.nn.Parameter(torch.tensor([math.cos(2 * math.pi * wave * rank / size)], dtype=torch.float64))]
        start = own[0].item()
        gossip = optim.Gossip(still(own))
        for step in range(1, 6):
            gossip.step()
            assert own[0].item() == pytest.approx(start * factor**step, abs=1e-12)


def test_random_partners_meet_in_pairs(mpi):
    """In each step the same pairs on all ranks; in the long run everybody meets everybody."""
    size, rank = mpi.size(), mpi.rank()
    own = [torch.nn.Parameter(torch.zeros(size, dtype=torch.float64))]
    gossip = optim.Gossip(still(own), "random", seed=2)
    met = set()
    for _ in range(40):
        own[0].data.zero_()[rank] = 1.0
        gossip.step()
        partners = [r for r in range(size) if own[0][r] != 0 and r != rank]
        assert own[0].sum() == 1.0
        assert len(partners) <= 1
        if partners:
            assert own[0].tolist() == [0.5 * (r in (rank, *partners)) for r in range(size)]
        met |= set(partners)
        pairs = mpi.allgather_object((rank, *partners))
        assert all((b, a) in pairs for a, b in (pair for pair in pairs if len(pair) == 2))
        assert sum(len(pair) == 1 for pair in pairs) == size % 2
    assert met == set(range(size)) - {rank}


def test_training_on_other_samples(mpi):
    """Each rank has samples of its own; together they find what fits all."""
    module = networks.perceptron(4, 1, dtype=torch.float64)
    gossip = optim.Gossip(torch.optim.SGD(module.parameters(), 0.1), asynchronous=True)
    teacher = torch.arange(4.0, dtype=torch.float64)
    for step in range(100):
        x = networks.batch(6, 4, rank=mpi.rank(), step=step, dtype=torch.float64)
        gossip.zero_grad()
        (module(x)[:, 0] - x @ teacher - 1).pow(2).mean().backward()
        gossip.step()
    gossip.average()
    mpinn.check_with_allreduce(module)
    torch.testing.assert_close(module[0].weight[0], teacher, rtol=0.01, atol=0.01)


def test_bad_input_and_a_state_of_the_optimizer_alone(mpi):
    gossip = optim.Gossip(torch.optim.SGD(parameters(mpi), 0.1))
    gossip.load_state_dict(torch.optim.SGD(parameters(mpi), 0.2).state_dict())
    assert gossip.param_groups[0]["lr"] == 0.2
    with pytest.raises(ValueError, match="partners='all'"):
        optim.Gossip(torch.optim.SGD(parameters(mpi), 0.1), "all")
