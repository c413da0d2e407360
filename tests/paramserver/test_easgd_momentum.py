"""EAMSGD against the recursion of the paper, and on any number of ranks."""

import pytest
import torch

from torchmpi_py import paramserver as ps

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(240)]
RATE, MOMENTUM, BETA, PERIOD = 0.1, 0.8, 0.6, 3
CURVATURE = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)


def gradient(at, rank):
    """Of a quadratic that has its minimum elsewhere for every rank."""
    return CURVATURE * (at - torch.tensor([1.0, -1.0, 2.0], dtype=torch.float64) * (rank + 1))


def paper(size, num_steps):
    """The recursion in x and v, as in the paper; all workers exchange with one and the same centre."""
    centre = torch.zeros(3, dtype=torch.float64)
    x, v = [centre.clone() for _ in range(size)], [torch.zeros_like(centre) for _ in range(size)]
    for step in range(1, num_steps + 1):
        for rank in range(size):
            v[rank] = MOMENTUM * v[rank] - RATE * gradient(x[rank] + MOMENTUM * v[rank], rank)
            x[rank] = x[rank] + v[rank]
        if step % PERIOD == 0:
            moves = [BETA / size * (centre - one) for one in x]
            x = [one + move for one, move in zip(x, moves, strict=True)]
            centre = centre - sum(moves)
    return x, v, centre


def sgd(parameters, **options):
    return torch.optim.SGD(parameters, lr=RATE, momentum=MOMENTUM, nesterov=True, **options)


def test_it_is_the_recursion_of_the_paper(mpi):
    """Worker and centre, to rounding; the optimizer's own variable is x + momentum * v."""
    size, me = mpi.size(), mpi.rank()
    net = torch.nn.Linear(3, 1, bias=False, dtype=torch.float64)
    torch.nn.init.zeros_(net.weight)
    net.register_parameter("unused", torch.nn.Parameter(torch.ones(2, dtype=torch.float64)))
    optimizer = sgd(net.parameters())
    update = ps.EAMSGDUpdate(net, optimizer, beta=BETA, init_delay=0, update_frequency=PERIOD)
    update.update(0)
    for step in range(1, 11):
        net.weight.grad = gradient(net.weight.detach().view(-1), me).view(1, 3)
        optimizer.step()
        if step % PERIOD == 0:  # in between all fetch, before anybody sends
            ps.prefetch_tensors(update.served)[0].wait()
            mpi.barrier()
            update.integrate(update.served)
            update.served.packs[0].sending.wait()
            mpi.barrier()
    x, v, centre = paper(size, 10)
    torch.testing.assert_close(net.weight.detach().view(-1), x[me] + MOMENTUM * v[me], rtol=0, atol=1e-12)
    torch.testing.assert_close(update.position(net.weight).detach().view(-1), x[me], rtol=0, atol=1e-12)
    served = update.served.packs[0].server.receive().wait()
    torch.testing.assert_close(served[:3], centre, rtol=0, atol=1e-12)
    assert (served[3:] == 1).all()
    update.free()


def test_mistakes(mpi):
    """The optimizer has to train the network, all of it and nothing else, with Nesterov's momentum."""
    net, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    with pytest.raises(TypeError, match="optimizer=Adam"):
        ps.EAMSGDUpdate(net, torch.optim.Adam(net.parameters()))
    with pytest.raises(ValueError, match="nesterov=False"):
        ps.EAMSGDUpdate(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    with pytest.raises(ValueError, match=r"lacks parameters of the network \(bias\)"):
        ps.EAMSGDUpdate(net, sgd([net.weight]))
    with pytest.raises(ValueError, match="holds 2 parameters that are not the network's"):
        ps.EAMSGDUpdate(net, sgd([*net.parameters(), *other.parameters()]))
    with pytest.raises(TypeError, match="EAMSGDUpdate takes no send_frequency"):
        ps.EAMSGDUpdate(net, sgd(net.parameters()), send_frequency=2)
    net.bias.requires_grad_(False)
    update = ps.EAMSGDUpdate(net, sgd([net.weight]), beta=BETA)
    update.free()
