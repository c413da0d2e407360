"""Means with partners: the average over ranks stays, and what sets them apart shrinks as the theory says."""

import math

import pytest
import torch

from torchmpi_py import nn as mpinn, optim

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(120)]


def parameters(mpi):
    """Of this rank, different on each; two dtypes, one that is not contiguous."""
    generator = torch.Generator().manual_seed(mpi.rank())
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((5, 3), (), (40,), (0, 2))]
    return [torch.nn.Parameter(x) for x in (*made, torch.randn(4, 6, generator=generator, dtype=torch.float64).t())]


def flat(own):
    return torch.cat([p.detach().reshape(-1) for p in own])


def everywhere(mpi, own):
    """The parameters of all ranks, a row each."""
    return mpi.allgather(flat(own)[None])


def still(own):
    """An optimizer whose steps change nothing."""
    for p in own:
        p.grad = torch.zeros_like(p)
    return torch.optim.SGD(own, 0.1)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("partners", ["ring", "random"])
def test_the_average_stays_and_ranks_come_together(mpi, partners, asynchronous):
    own = parameters(mpi)
    before = everywhere(mpi, own)
    gossip = optim.Gossip(still(own), partners, asynchronous=asynchronous, seed=5)
    for _ in range(60):
        gossip.step()
    gossip.finish()
    after = everywhere(mpi, own)
    torch.testing.assert_close(after.mean(0), before.mean(0), rtol=1e-12, atol=1e-12)
    assert after.std(0, unbiased=False).max() < 1e-3 * before.std(0, unbiased=False).max() + 1e-12
    gossip.average()
    torch.testing.assert_close(flat(own), before.mean(0), rtol=1e-12, atol=1e-12)


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
    for _ in range(60):
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


def test_random_partners_go_on_from_a_state(mpi):
    own = parameters(mpi)
    gossip = optim.Gossip(still(own), "random", seed=2)
    for _ in range(3):
        gossip.step()
    other = [torch.nn.Parameter(p.detach().clone()) for p in own]
    again = optim.Gossip(still(other), "random", seed=2)
    again.load_state_dict(gossip.state_dict())
    for _ in range(6):
        gossip.step()
        again.step()
        assert torch.equal(flat(own), flat(other))
    again.load_state_dict(torch.optim.SGD(other, 0.2).state_dict())  # of the optimizer alone
    assert again.param_groups[0]["lr"] == 0.2


@pytest.mark.parametrize("asynchronous", [False, True])
def test_training_on_other_samples(mpi, asynchronous):
    """Each rank has samples of its own; together they find what fits all."""
    torch.manual_seed(1)
    module = torch.nn.Linear(4, 1).double()
    gossip = optim.Gossip(torch.optim.SGD(module.parameters(), 0.1), asynchronous=asynchronous)
    generator = torch.Generator().manual_seed(mpi.rank())
    teacher = torch.arange(4.0, dtype=torch.float64)
    for _ in range(300):
        x = torch.randn(6, 4, generator=generator, dtype=torch.float64)
        gossip.zero_grad()
        (module(x)[:, 0] - x @ teacher - 1).pow(2).mean().backward()
        gossip.step()
    gossip.average()
    mpinn.check_with_allreduce(module)
    torch.testing.assert_close(module.weight[0], teacher, rtol=1e-3, atol=1e-3)


def test_bad_input(mpi):
    with pytest.raises(ValueError, match="partners='all'"):
        optim.Gossip(torch.optim.SGD(parameters(mpi), 0.1), "all")
    with pytest.raises(ValueError, match="split"):
        optim.Gossip(torch.optim.SGD(mpinn.ColumnParallelLinear(4, 4).parameters(), 0.1))
