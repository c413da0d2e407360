"""Lists of tensors, Downpour and EASGD on any number of ranks."""

import pytest
import torch

from torchmpi_py import paramserver as ps
from torchmpi_py.errors import ParameterServerError, RanksDisagree

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(240)]


def tensors(rank):
    """Several shapes and dtypes, one tensor without elements."""
    shapes = [(3, 4), (7,), (0,), (2, 1, 5), ()]
    dtypes = [torch.float32, torch.float64, torch.float32, torch.float64, torch.float32]
    return [
        (torch.arange(torch.Size(shape).numel()).view(shape) + 10 * rank).to(dtype)
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]


def network(rank=0):
    torch.manual_seed(rank)
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))


def total(mpi, module):
    """The sum of the parameters of all ranks, flat."""
    flat = torch.cat([p.detach().reshape(-1) for p in module.parameters()]).double()
    return mpi.allreduce(flat)


def test_lists(mpi):
    """One server a dtype; rank 0's values; fetched into buffers, and from there wherever the function says."""
    size, me = mpi.size(), mpi.rank()
    mine = tensors(me)
    served = ps.init_tensors(mine)
    assert len(served.packs) == 2
    assert all(torch.equal(x, y) for x, y in zip(mine, tensors(me), strict=True))
    ps.integrate_tensors(served, lambda fetched, x: x.copy_(fetched))
    assert all(torch.equal(x, y) for x, y in zip(mine, tensors(0), strict=True))
    mpi.barrier()
    updates = [torch.ones_like(x) for x in mine]
    for _ in range(3):
        mpi.wait_all(ps.send_tensors(served, updates, "add", lambda update: update.mul_(me + 1)))
    assert all((update == 1).all() for update in updates)
    mpi.barrier()
    mpi.wait_all(ps.prefetch_tensors(served))
    ps.integrate_tensors(served, lambda fetched, x: x.copy_(fetched))
    added = 3 * size * (size + 1) // 2
    assert all(torch.equal(x, y + added) for x, y in zip(mine, tensors(0), strict=True))
    with pytest.raises(ValueError, match="1 updates for 5 tensors"):
        ps.send_tensors(served, updates[:1])
    served.free()


def test_a_synchronous_exchange_of_easgd_keeps_the_sum(mpi):
    """The sum of all workers and the centre does not change, and the centre moves."""
    net = network(mpi.rank())
    update = ps.EASGDUpdate(net, init_delay=0, update_frequency=2, beta=0.5)
    update.update(0)
    before = centre(update)
    sums = total(mpi, net) + before
    update.update(1)
    assert torch.equal(centre(update), before)
    ps.prefetch_tensors(update.served)[0].wait()  # all fetch before anybody sends
    mpi.barrier()
    update.integrate(update.served)
    update.served.packs[0].sending.wait()
    mpi.barrier()
    after = centre(update)
    torch.testing.assert_close(total(mpi, net) + after, sums, rtol=0, atol=1e-5)
    assert mpi.size() == 1 or (after - before).abs().max() > 1e-3
    update.free()


def centre(update):
    return update.served.packs[0].server.receive().wait().double()


def trained(mpi, make, steps=400):
    """Workers with different data fit one function; the mean loss over all of it, with the server's values."""
    torch.manual_seed(mpi.rank())
    target = network(99)
    net = network(mpi.rank())
    update = make(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for step in range(steps):
        x = torch.randn(16, 6)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(net(x), target(x).detach()).backward()
        optimizer.step()
        update.update(step)
    mpi.barrier()
    ps.integrate_tensors(update.served, lambda fetched, p: p.copy_(fetched))
    x = torch.randn(500, 6, generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        loss = torch.nn.functional.mse_loss(net(x), target(x)).item()
        start = torch.nn.functional.mse_loss(network(0)(x), target(x)).item()
    mpi.barrier()
    update.free()
    return loss / start


@pytest.mark.parametrize("prefetch", [0, 2])
def test_downpour_learns(mpi, prefetch):
    def make(net):
        rate = 0.05 / mpi.size()
        return ps.DownpourUpdate(
            net, init_delay=20, update_frequency=5, prefetch=prefetch, local_update=lambda g: g.mul_(-rate)
        )

    assert trained(mpi, make) < 0.3


@pytest.mark.parametrize("prefetch", [0, 2])
def test_easgd_learns(mpi, prefetch):
    assert trained(mpi, lambda net: ps.EASGDUpdate(net, init_delay=20, update_frequency=5, prefetch=prefetch)) < 0.3


def test_what_downpour_sends(mpi):
    """The sums of the steps since the server was seeded, of every rank, and no step twice."""
    size, me = mpi.size(), mpi.rank()
    net = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.zeros_(net.weight)
    update = ps.DownpourUpdate(
        net, init_delay=3, update_frequency=100, send_frequency=2, local_update=lambda g: g.mul_(10)
    )
    for step in range(8):
        net.weight.grad = torch.full((1, 2), float(2**step + me))
        update.update(step)
    update.served.packs[0].sending.wait()
    mpi.barrier()
    steps = sum(2**step for step in (4, 5, 6, 7))  # of two sends
    assert (centre(update) == 10 * (size * steps + 4 * sum(range(size)))).all()
    update.free()


def test_prefetching_as_early_as_can_be(mpi):
    """With prefetch equal to update_frequency: what comes in is what the server had at the integration before."""
    net = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.zeros_(net.weight)
    net.weight.grad = torch.ones(1, 2)
    update = ps.DownpourUpdate(net, init_delay=0, update_frequency=2, prefetch=2, local_update=lambda g: g)
    seen = []
    for step in range(7):
        mpi.barrier()
        update.update(step)
        update.served.packs[0].server.receive().wait()  # after all that was asked
        seen.append(net.weight[0, 0].item() / mpi.size())
    assert seen[:4] == [0, 0, 0, 0]  # fetched in step 0, where nothing had been sent
    assert seen[4] == seen[5]
    assert 1 < seen[4] <= 2 < seen[6] <= 4  # fetched in step 2, and in step 4, when others may not yet have sent
    update.free()


def test_downpour_with_an_optimizer_at_the_server(mpi):
    """One step of Adagrad for each sum that a worker sends."""
    size = mpi.size()
    net = torch.nn.Linear(3, 2)
    reference = [p.detach().clone().requires_grad_() for p in synchronized(mpi, net).parameters()]
    update = ps.DownpourUpdate(
        net, optimizer="adagrad", optimizer_options={"lr": 0.5}, init_delay=0, update_frequency=100, send_frequency=2
    )
    adagrad = torch.optim.Adagrad(reference, lr=0.5)
    update.update(0)
    for step in range(1, 5):
        net.weight.grad = torch.full_like(net.weight, float(step))  # and none for the bias
        update.update(step)
    for _ in range(size):
        reference[0].grad = torch.full_like(reference[0], 3.0)
        adagrad.step()
    for _ in range(size):
        reference[0].grad = torch.full_like(reference[0], 7.0)
        adagrad.step()
    update.served.packs[0].sending.wait()
    mpi.barrier()
    if size == 1:  # with others the order of the sends is open
        torch.testing.assert_close(centre(update)[:6].float(), reference[0].detach().view(-1))
    squares = size * (3.0**2 + 7.0**2)
    assert update.served.packs[0].server.state_dict()["slots"][0][:6].tolist() == [squares] * 6
    assert torch.equal(centre(update)[6:].float(), reference[1].detach())
    update.free()


def synchronized(mpi, net):
    mpi.nn.synchronize_parameters(net)
    return net


def test_groups_of_ranks_as_workers(mpi):
    """Only roots talk to the server, and the others follow."""
    size, me = mpi.size(), mpi.rank()
    level = mpi.push_communicator(me // 2)
    net = network(me)
    update = ps.EASGDUpdate(net, dataparallel_communicator=level, init_delay=0, update_frequency=1)
    assert update.num_workers == (size + 1) // 2
    for step in range(4):
        update.update(step)
    with mpi.at(level):
        mpi.nn.check_with_allreduce(net)
    mpi.barrier()
    update.free()


def test_mistakes(mpi):
    net = network()
    with pytest.raises(ValueError, match="beta=1"):
        ps.EASGDUpdate(net, beta=1)
    with pytest.raises(TypeError, match="no send_frequency"):
        ps.EASGDUpdate(net, send_frequency=3)
    with pytest.raises(TypeError, match="local_update=3"):
        ps.DownpourUpdate(net, local_update=3)
    with pytest.raises(TypeError, match="local_update=None"):
        ps.DownpourUpdate(net)
    with pytest.raises(TypeError, match="does not take the options"):
        ps.DownpourUpdate(net, optimizer="adam", optimizer_options={"momentum": 1})
    with pytest.raises(TypeError, match="none is given"):
        ps.DownpourUpdate(net, local_update=lambda g: g, optimizer_options={"lr": 1})
    update = ps.EASGDUpdate(net, init_delay=5)
    update.update(4)
    with pytest.raises(ParameterServerError, match=r"update\(6\): the parameter server is seeded in step 5"):
        update.update(6)
    update.free()
    update.free()
    with pytest.raises(ParameterServerError, match=r"update\(5\): this EASGDUpdate was freed"):
        update.update(5)
    if mpi.size() > 1:
        with pytest.raises(RanksDisagree, match="EASGDUpdate: init_delay by rank"):
            ps.EASGDUpdate(net, init_delay=mpi.rank())
