"""Ranks that train one copy of the parameters, and memory that outlives whoever made it."""

import gc

import pytest
import torch

from torchmpi_py import paramserver as ps
from torchmpi_py.errors import RanksDisagree, Unavailable

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(240)]


class Odd(torch.nn.Module):
    """Several dtypes, tied, overlapping, strided and empty parameters, one that is not trained, and a buffer."""

    def __init__(self, rank):
        super().__init__()
        self.first = torch.nn.Linear(3, 4)
        self.tied = torch.nn.Linear(3, 4)
        self.tied.weight = self.first.weight
        line = torch.arange(10, dtype=torch.float64) + 100 * rank
        self.low = torch.nn.Parameter(line[:6])
        self.high = torch.nn.Parameter(line[4:])
        self.across = torch.nn.Parameter(torch.arange(6.0).view(2, 3).t() + rank)
        self.empty = torch.nn.Parameter(torch.empty(0, 3))
        self.frozen = torch.nn.Parameter(torch.full((3,), rank, dtype=torch.int64), requires_grad=False)
        self.register_buffer("own", torch.tensor(float(rank)))


def test_one_copy(mpi, comm):
    """What one rank writes all have; ties, overlaps and strides stay; buffers are each rank's own."""
    if comm.num_nodes > 1:
        with pytest.raises(Unavailable, match=r"comm=mpi.communicator\(1\).*DifferenceUpdate"):
            ps.Hogwild(Odd(0), comm=comm)
        return
    size, me = mpi.size(), mpi.rank()
    torch.manual_seed(me)
    net = Odd(me)
    before = [p.detach().clone() for p in net.parameters()]
    shared = ps.Hogwild(net, comm=comm)
    mpi.nn.check_with_allreduce(torch.nn.ParameterList(net.parameters()))
    if me == 0:
        assert all(torch.equal(p, old) for p, old in zip(net.parameters(), before, strict=True))
    assert net.tied.weight is net.first.weight
    assert net.across.stride() == (1, 3)
    assert net.own.item() == me
    for rank in range(size):
        if rank == me:
            with torch.no_grad():
                for p in net.parameters():
                    p.add_(rank + 1)
        mpi.barrier()
    added = size * (size + 1) // 2
    assert torch.equal(net.across, torch.arange(6.0).view(2, 3).t() + added)
    assert net.frozen.tolist() == [added] * 3
    twice = torch.arange(10, dtype=torch.float64) + added
    twice[4:6] += added
    assert torch.equal(net.low, twice[:6])
    assert torch.equal(net.high, twice[4:])
    mpi.barrier()
    shared.free()
    shared.free()
    mpi.barrier()
    with torch.no_grad():
        net.low[4] = me
        net.across.fill_(me)
    mpi.barrier()
    assert net.high[0].item() == me  # still one memory, but this rank's own
    assert (net.across == me).all()
    assert net.frozen.tolist() == [added] * 3


def test_training(mpi):
    """All ranks' optimizers fit the same parameters; no step is due, and no lock is taken."""
    me = mpi.rank()
    torch.manual_seed(11)
    target = torch.nn.Linear(5, 2)
    torch.manual_seed(me)
    net = torch.nn.Linear(5, 2)
    shared = ps.Hogwild(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    x = torch.randn(64, 5)

    def loss():
        return torch.nn.functional.mse_loss(net(x), target(x).detach())

    mpi.barrier()
    for _ in range(200):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    shared.free()
    mpi.nn.check_with_allreduce(net)
    assert loss().item() < 0.01


def test_the_memory_outlives_its_maker(mpi):
    """Views of the copy stay valid, on every rank, when nothing else is left of it."""
    me = mpi.rank()
    net = torch.nn.Linear(200, 100)
    torch.nn.init.constant_(net.weight, me + 5)
    shared = ps.Hogwild(net)
    view = net.weight.detach()[3:]
    shared.free()
    del shared, net
    gc.collect()
    more = [ps.init(torch.ones(50_000)) for _ in range(3)]  # takes the place, if there is one
    assert (view == 5).all()
    for server in more:
        server.free()


def test_mistakes(mpi):
    """Errors on every rank, whoever makes the mistake."""
    me, size = mpi.rank(), mpi.size()
    net = torch.nn.Linear(2, 2, device="meta" if me == size - 1 else "cpu")
    with pytest.raises(ValueError, match=f"rank {size - 1} has parameters on meta"):
        ps.Hogwild(net)
    if size > 1:
        with pytest.raises(RanksDisagree, match="the parameters of rank 1 differ"):
            ps.Hogwild(torch.nn.Linear(2, 2 + me))
