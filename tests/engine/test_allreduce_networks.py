"""Data-parallel training of networks and criteria that are not plain stacks of layers."""

import pytest
import torch
from torch.utils.data import TensorDataset

from torchmpi_py.engine import AllReduceSGDEngine, DatasetIterator, SGDEngine

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(60)]
cross_entropy = torch.nn.CrossEntropyLoss()


def data(total):
    generator = torch.Generator().manual_seed(7)
    return TensorDataset(torch.randn(total, 5, generator=generator), torch.randint(3, (total,), generator=generator))


def network(seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(5, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))


class Scale(torch.nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor(factor))
        self.register_buffer("shift", torch.tensor(factor))

    def forward(self, output, target):
        return cross_entropy(output * self.factor + self.shift, target)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_parameters_and_buffers_of_the_criterion_are_shared_and_trained(mpi, asynchronous):
    criterion = Scale(1.0 + mpi.rank())
    iterator = DatasetIterator(data(30), 4)
    engine = AllReduceSGDEngine(asynchronous=asynchronous)
    engine.train(network=network(mpi.rank()), criterion=criterion, iterator=iterator, lr=0.2)
    assert criterion.shift == 1.0
    assert criterion.factor != 1.0
    mpi.nn.check_with_allreduce(criterion)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_penalty_on_parameters_in_the_loss(mpi, asynchronous):
    net = network(0)

    def criterion(output, target):
        return cross_entropy(output, target) + 0.1 * net[0].weight.square().sum()

    iterator = DatasetIterator(data(8 * mpi.size()), 4)
    engine = AllReduceSGDEngine(asynchronous=asynchronous)
    seen = []
    engine.hooks.on_backward = lambda state: seen.append(net[0].weight.grad.clone())
    engine.train(network=net, criterion=criterion, iterator=iterator, lr=0)
    alone = SGDEngine()
    alone.hooks.on_backward = engine.hooks.on_backward
    alone.train(
        network=net,
        criterion=criterion,
        iterator=DatasetIterator(data(8 * mpi.size()), 4 * mpi.size(), rank=0, size=1),
        lr=0,
    )
    assert torch.allclose(seen[0], seen[2], atol=1e-6)
    assert torch.allclose(seen[1], seen[3], atol=1e-6)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_layers_used_on_some_ranks_only(mpi, asynchronous):
    class Branches(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.even, self.odd, self.never = (torch.nn.Linear(5, 3) for _ in range(3))

        def forward(self, x):
            return (self.odd if mpi.rank() % 2 else self.even)(x)

    net = Branches()
    engine = AllReduceSGDEngine(asynchronous=asynchronous)
    engine.train(network=net, criterion=cross_entropy, iterator=DatasetIterator(data(20), 2), lr=0.1)
    mpi.nn.check_with_allreduce(net)
    assert net.even.weight.grad is not None
    assert (net.odd.weight.grad is not None) == (mpi.size() > 1)
    assert net.never.weight.grad is None


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_network_that_grows(mpi, asynchronous):
    net = torch.nn.Sequential(torch.nn.Linear(5, 3))
    engine = AllReduceSGDEngine(asynchronous=asynchronous, debug=True)

    def grow(state):
        if state.epoch == 1:
            torch.manual_seed(100 + mpi.rank())  # the new layer starts out different on each rank
            net.append(torch.nn.Linear(3, 3))
            state.optimizer.add_param_group({"params": net[1].parameters()})
            grow.initial = net[1].weight.detach().clone()

    engine.hooks.on_start_epoch = grow
    engine.train(network=net, criterion=cross_entropy, iterator=DatasetIterator(data(30), 4), lr=0.1, maxepoch=3)
    mpi.nn.check_with_allreduce(net)
    assert not torch.equal(net[1].weight, mpi.broadcast(grow.initial))


def test_debug_allows_batch_statistics_of_each_rank(mpi):
    net = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.BatchNorm1d(3))
    engine = AllReduceSGDEngine(debug=True)
    state = engine.train(
        network=net, criterion=cross_entropy, iterator=DatasetIterator(data(4 * mpi.size()), 2), lr=0.1, maxepoch=2
    )
    assert state.t == 4
