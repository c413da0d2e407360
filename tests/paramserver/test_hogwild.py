"""Ranks that train one copy of the parameters, and memory that outlives whoever made it."""

import copy
import gc

import pytest
import torch
from support import networks
from support.values import values

from torchmpi_py import nn, paramserver as ps
from torchmpi_py.errors import ParameterServerError, RanksDisagree, Unavailable

pytestmark = pytest.mark.mpi


@pytest.fixture(autouse=True)
def of_one_node(mpi, request):
    """Only these have memory in common; that others are refused is a part of the first test."""
    if mpi.num_nodes() > 1 and not request.node.name.startswith("test_one_copy"):
        pytest.skip("ranks on several nodes have no memory in common")


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


def test_one_copy(mpi, size, me, comm):
    """What one rank writes all have; ties, overlaps and strides stay; buffers are each rank's own."""
    if comm.num_nodes > 1:
        with pytest.raises(Unavailable, match=r"comm=mpi.communicator\(1\).*DifferenceUpdate"):
            ps.Hogwild(Odd(0), comm=comm)
        return
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


def test_the_memory_outlives_its_maker(mpi):
    """Views of the copy stay valid, on every rank, when nothing else is left of it."""
    net = torch.nn.Linear(200, 100)
    torch.nn.init.constant_(net.weight, mpi.rank() + 5)
    shared = ps.Hogwild(net)
    view = net.weight.detach()[3:]
    shared.free()
    del shared, net
    gc.collect()
    for _ in range(3):
        ps.init(torch.ones(50_000))  # takes the place, if there is one
    assert (view == 5).all()


def step_in_turns(mpi, net, optimizer, by):
    """Rank after rank adds to the parameters: ``by`` times 1, 2, 3 and so on."""
    for rank in range(mpi.size()):
        if rank == mpi.rank():
            for number, p in enumerate(net.parameters(), 1):
                p.grad = torch.full_like(p, -by * number)
            optimizer.step()
        mpi.barrier()


def counted():
    """Two layers whose parameters hold 1, 2, 3 and 4."""
    net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2))
    for number, p in enumerate(net.parameters()):
        torch.nn.init.constant_(p, number + 1.0)
    return net


@pytest.mark.parametrize("copied", [False, True])
def test_blocks_stay_in_the_shared_memory(mpi, copied):
    """They are flat there, also after calls of the network; and flat in each rank's own memory at the end."""
    inner = nn.BlockSequential(2, torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    net = nn.BlockSequential(2, torch.nn.Linear(3, 4), inner)
    net[0] = torch.nn.Linear(3, 4)  # since the blocks were cut
    net = copy.deepcopy(net) if copied else net
    start = values(0, len(networks.flat(net)))
    networks.fill(net, start - 1000.0 * mpi.rank())
    shared = ps.Hogwild(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    output = net(torch.zeros(1, 3))
    assert len(list(net.backward_blocks(torch.ones_like(output)))) == len(net.blocks) == 2
    mpi.barrier()  # backward has read the parameters
    step_in_turns(mpi, net, optimizer, 10.0 ** mpi.rank())
    net(torch.zeros(1, 3))
    numbers = torch.cat([torch.full((p.numel(),), float(number)) for number, p in enumerate(net.parameters(), 1)])
    expected = start + numbers * sum(10.0**rank for rank in range(mpi.size()))
    assert torch.equal(networks.flat(net), expected)
    mpi.barrier()
    shared.free()
    mpi.barrier()
    net.blocks[0].weights.fill_(mpi.rank())
    mpi.barrier()
    expected[: len(net.blocks[0].weights)] = mpi.rank()
    assert torch.equal(networks.flat(net), expected)


def replace(net):
    net[1].bias = torch.nn.Parameter(net[1].bias.detach())
    net[1].bias.data = net[1].bias.data.clone()


CHANGES = {
    "dtype": ("0.weight", lambda net: net.double()),
    "replaced": ("1.bias", replace),
    "assigned": ("0.weight", lambda net: net.load_state_dict(copy.deepcopy(net.state_dict()), assign=True)),
    "added": ("2.weight", lambda net: net.append(torch.nn.Linear(2, 1))),
}


@pytest.mark.parametrize("change", list(CHANGES))
def test_a_parameter_that_leaves_the_shared_memory(mpi, size, me, change):
    """An error at the next step on its rank, and at the end on all; the others' values have not been lost."""
    name, apply = CHANGES[change]
    net = counted()
    shared = ps.Hogwild(net)
    mpi.barrier()
    if me == size - 1:
        apply(net)
        before = networks.flat(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        net(torch.ones(1, 3, dtype=net[0].weight.dtype)).sum().backward()
        with pytest.raises(ParameterServerError, match=rf"SGD\.step: parameter {name} is not in .* call free\(\)"):
            optimizer.step()
        assert torch.equal(networks.flat(net), before)
    with pytest.raises(ParameterServerError, match=rf"Hogwild.free: rank {size - 1}: parameter {name} is not in"):
        shared.free()
    shared.free()
    assert me == size - 1 or [p.unique().item() for p in net.parameters()] == [1, 2, 3, 4]
    torch.optim.SGD(net.parameters(), lr=1.0).step()  # nobody looks any more


def test_what_is_no_parameter_that_has_left(mpi):
    """Copies, other networks and tensors in the place of parameters train; a second Hogwild takes the network over."""
    net = counted()
    first = ps.Hogwild(net)
    for other in (copy.deepcopy(net), torch.nn.Linear(3, 2)):
        optimizer = torch.optim.SGD(other.parameters(), lr=1.0)
        other(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    doubled = {name: 2 * p for name, p in net.named_parameters()}
    assert torch.func.functional_call(net, doubled, torch.ones(1, 3)).unique().item() == 2 * 2 * 6 * (3 + 2) + 8
    second = ps.Hogwild(net)
    mpi.barrier()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    step_in_turns(mpi, net, optimizer, 1.0)
    first.free()
    second.free()
    assert [p.unique().item() for p in net.parameters()] == [(mpi.size() + 1) * number for number in range(1, 5)]


def test_mistakes(size, me):
    """Errors on every rank, whoever makes the mistake."""
    net = torch.nn.Linear(2, 2, device="meta" if me == size - 1 else "cpu")
    with pytest.raises(ValueError, match=f"rank {size - 1} has parameters on meta"):
        ps.Hogwild(net)
    if size > 1:
        with pytest.raises(RanksDisagree, match="the parameters of rank 1 differ"):
            ps.Hogwild(torch.nn.Linear(2, 2 + me))
