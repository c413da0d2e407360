"""EASGD and EAMSGD against the recursions of the paper, between ranks and between groups of them."""

import pytest
import torch
from served_networks import fetch_together, served, wait_for_sends

from torchmpi_py import paramserver as ps

pytestmark = pytest.mark.mpi
RATE, MOMENTUM, BETA, PERIOD = 0.1, 0.8, 0.6, 3
CURVATURE = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)


def close(x, y):
    torch.testing.assert_close(x, y, rtol=0, atol=1e-12)


def elastic(x, centre):
    """The workers and the centre after an exchange of all with one and the same centre."""
    moves = [BETA / len(x) * (centre - one) for one in x]
    return [one + move for one, move in zip(x, moves, strict=True)], centre - sum(moves)


@pytest.mark.parametrize("in_groups", [False, True])
def test_easgd_moves_by_beta_over_the_workers(mpi, in_groups):
    """To rounding, for workers and centre; their sum stays what it is."""
    me = mpi.rank() // 2 if in_groups else mpi.rank()
    level = mpi.push_communicator(me) if in_groups else None
    net = torch.nn.Linear(2, 1, bias=False, dtype=torch.float64)
    options = {"dataparallel_communicator": level, "prefetch": 1, "beta": BETA}
    update = ps.EASGDUpdate(net, init_delay=0, update_frequency=1, **options)
    assert update.num_workers == ((mpi.size() + 1) // 2 if in_groups else mpi.size())
    x = [torch.tensor([10.0 * one + 1, -20.0 * one - 2], dtype=torch.float64) for one in range(update.num_workers)]
    centre, whole = x[0].clone(), sum(x) + x[0]
    with torch.no_grad():
        net.weight.copy_(x[me].view(1, 2))
    update.update(0)
    for step in range(1, 5):
        fetch_together(mpi, update)
        update.update(step)
        wait_for_sends(mpi, update)
        x, centre = elastic(x, centre)
        close(net.weight.detach().view(-1), x[me])
        close(served(update), centre)
        own = net.weight.detach().view(-1) * float(update.is_root)
        torch.testing.assert_close(mpi.allreduce(own.clone()) + served(update), whole, rtol=0, atol=1e-6)


def gradient(at, rank):
    """Of a quadratic that has its minimum elsewhere for every rank."""
    return CURVATURE * (at - torch.tensor([1.0, -1.0, 2.0], dtype=torch.float64) * (rank + 1))


def paper(size, num_steps):
    """The recursion of EAMSGD in x and v, as in the paper."""
    centre = torch.zeros(3, dtype=torch.float64)
    x, v = [centre.clone() for _ in range(size)], [torch.zeros_like(centre) for _ in range(size)]
    for step in range(1, num_steps + 1):
        for rank in range(size):
            v[rank] = MOMENTUM * v[rank] - RATE * gradient(x[rank] + MOMENTUM * v[rank], rank)
            x[rank] = x[rank] + v[rank]
        if step % PERIOD == 0:
            x, centre = elastic(x, centre)
    return x, v, centre


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=RATE, momentum=MOMENTUM, nesterov=True)


def test_eamsgd_is_the_recursion_of_the_paper(mpi, size, me):
    """Worker and centre, to rounding; the optimizer's own variable is x + momentum * v."""
    net = torch.nn.Linear(3, 1, bias=False, dtype=torch.float64)
    torch.nn.init.zeros_(net.weight)
    net.register_parameter("unused", torch.nn.Parameter(torch.ones(2, dtype=torch.float64)))
    optimizer = sgd(net.parameters())
    update = ps.EAMSGDUpdate(net, optimizer, beta=BETA, init_delay=0, update_frequency=PERIOD)
    update.update(0)
    for step in range(1, 11):
        net.weight.grad = gradient(net.weight.detach().view(-1), me).view(1, 3)
        optimizer.step()
        if step % PERIOD == 0:
            fetch_together(mpi, update)
            update.integrate(update.served)
            wait_for_sends(mpi, update)
    x, v, centre = paper(size, 10)
    close(net.weight.detach().view(-1), x[me] + MOMENTUM * v[me])
    close(update.position(net.weight).detach().view(-1), x[me])
    close(served(update), torch.cat([centre, torch.ones(2, dtype=torch.float64)]))


def test_mistakes_with_the_optimizer(mpi):
    """The optimizer has to train the network, all of it and nothing else, with Nesterov's momentum."""
    net, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    for error, optimizer, words in (
        (TypeError, torch.optim.Adam(net.parameters()), "found Adam; pass"),
        (ValueError, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), "nesterov=False"),
        (ValueError, sgd([net.weight]), r"lacks parameters of the network \(bias\)"),
        (ValueError, sgd([*net.parameters(), *other.parameters()]), r"outside the network: 2\)"),
    ):
        with pytest.raises(error, match=words):
            ps.EAMSGDUpdate(net, optimizer)
    net.bias.requires_grad_(False)
    ps.EAMSGDUpdate(net, sgd([net.weight]), beta=BETA).free()
