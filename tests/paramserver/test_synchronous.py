"""The synchronous parameter server is torch's optimizer with the gradients of all data."""

import pytest
import torch

from torchmpi_py import paramserver as ps
from torchmpi_py.errors import ParameterServerError

pytestmark = pytest.mark.mpi
OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "adam": (torch.optim.Adam, {"lr": 0.01, "betas": (0.8, 0.9)}),
}


class Two(torch.nn.Module):
    """Two dtypes, a parameter that is frozen, and one that gets a gradient on some ranks only."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(4, 3).double()
        self.last = torch.nn.Linear(3, 2)
        self.extra = torch.nn.Parameter(torch.ones(2))
        self.frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, x, with_extra):
        y = self.last(torch.tanh(self.first(x.double())).float()) + self.frozen
        return y * self.extra if with_extra else y


def loss(net, x, y, rank):
    return torch.nn.functional.mse_loss(net(x, with_extra=rank != 1), y)


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_it_is_one_process_with_all_the_data(mpi, comm, name):
    """With a learning rate that changes; on one node and on two."""
    size, me = comm.size, comm.rank
    make, options = OPTIMIZERS[name]
    torch.manual_seed(3)
    alone = Two()
    x, y = torch.randn(6, size, 8, 4), torch.randn(6, size, 8, 2)
    torch.manual_seed(3 if me == 0 else 4)
    net = Two()
    update = ps.SynchronousUpdate(net, optimizer=name, comm=comm, **options)
    optimizer = make([p for p in alone.parameters() if p.requires_grad], **options)
    for step in range(6):
        if step == 3:
            update.options["lr"] = optimizer.param_groups[0]["lr"] = options["lr"] / 2
        optimizer.zero_grad()
        sum(loss(alone, x[step, rank], y[step, rank], rank) / size for rank in range(size)).backward()
        optimizer.step()
        net.zero_grad()
        loss(net, x[step, me], y[step, me], me).backward()
        update.update(step)
        for mine, other in zip(net.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
    update.free()
    update.free()
    with pytest.raises(ParameterServerError, match="this SynchronousUpdate was freed"):
        update.update(6)


def test_sparse_gradients(size, me):
    """Are sent as dense ones."""
    net = torch.nn.Embedding(size + 1, 2, sparse=True)
    torch.nn.init.zeros_(net.weight)
    update = ps.SynchronousUpdate(net, lr=1.0)
    net(torch.tensor([me, me, size])).sum().backward()
    update.update()
    torch.testing.assert_close(net.weight.detach()[:, 0], torch.tensor([-2.0 / size] * size + [-1.0]))


def test_a_parameter_that_is_frozen_later(mpi):
    net = torch.nn.Linear(2, 2)
    update = ps.SynchronousUpdate(net, optimizer="adam", lr=0.1)
    net(torch.ones(1, 2)).sum().backward()
    update.update()
    before = net.weight.detach().clone()
    net.weight.requires_grad_(False)
    with pytest.raises(RuntimeError, match="parameter 0 was frozen"):
        update.update()
    assert torch.equal(net.weight, before)
