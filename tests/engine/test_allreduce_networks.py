"""Data-parallel training of networks and criteria that are not plain stacks of layers."""

import pytest
import torch
from torch.utils.data import TensorDataset

from torchmpi_py import errors
from torchmpi_py.engine import AllReduceSGDEngine, DatasetIterator, SGDEngine

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(240)]
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


@pytest.mark.parametrize("dynamicnetwork", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_parameters_that_only_the_optimizer_holds(mpi, asynchronous, dynamicnetwork):
    net, factor = network(mpi.rank()), torch.nn.Parameter(torch.tensor(1.0 + mpi.rank()))
    engine = AllReduceSGDEngine(asynchronous=asynchronous, dynamicnetwork=dynamicnetwork, debug=True)
    started = []
    engine.hooks.on_start = lambda state: started.append(factor.item())
    engine.train(
        network=net,
        criterion=lambda output, target: cross_entropy(output * factor, target),
        iterator=DatasetIterator(data(30), 4),
        optimizer=torch.optim.SGD([*net.parameters(), factor], lr=0.2),
    )
    assert started == [1.0]
    assert factor != 1.0
    mpi.check_with_allreduce(factor, "factor")
    mpi.nn.check_with_allreduce(net)


@pytest.mark.mpi(min_size=2)
def test_a_plain_tensor_in_the_optimizer_is_refused(mpi):
    net, factor = network(0), torch.ones((), requires_grad=True)
    with pytest.raises(TypeError, match=r"make it a torch\.nn\.Parameter"):
        AllReduceSGDEngine().train(
            network=net,
            criterion=lambda output, target: cross_entropy(output * factor, target),
            iterator=DatasetIterator(data(30), 4),
            optimizer=torch.optim.SGD([*net.parameters(), factor], lr=0.2),
        )


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_network_that_grows_at_a_sample_is_followed_at_once(mpi, asynchronous):
    net = torch.nn.Sequential(torch.nn.Linear(5, 3))
    engine = AllReduceSGDEngine(asynchronous=asynchronous)
    seen = []

    def grow(state):
        if state.t == 1:
            torch.manual_seed(100 + mpi.rank())
            net.append(torch.nn.Linear(3, 3))
            state.optimizer.add_param_group({"params": net[1].parameters()})

    def look(state):
        if state.t == 1:
            seen.append(net[1].weight.detach().clone())

    engine.hooks.on_sample = grow
    engine.hooks.on_forward = look
    engine.hooks.on_backward = lambda state: state.t != 1 or seen.append(net[1].weight.grad.clone())
    engine.train(network=net, criterion=cross_entropy, iterator=DatasetIterator(data(8 * mpi.size()), 4), lr=0.1)
    mpi.check_with_allreduce(seen[0], "weight of the new layer")
    mpi.check_with_allreduce(seen[1], "its gradient")
    mpi.nn.check_with_allreduce(net)


@pytest.mark.mpi(min_size=2)
def test_debug_finds_what_a_hook_spoils_at_the_sample(mpi):
    def spoil(state):
        with torch.no_grad():
            state.network[0].bias.add_(mpi.rank())

    engine = AllReduceSGDEngine(debug=True)
    engine.hooks.on_sample = spoil
    engine.hooks.on_forward = lambda state: pytest.fail("not found before the forward pass")
    with pytest.raises(errors.RanksDisagree, match=r"network\.0\.bias"):
        engine.train(network=network(0), criterion=cross_entropy, iterator=DatasetIterator(data(30), 4), lr=0.1)


def test_buffers_without_parameters_are_shared(mpi):
    class Shift(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("shift", torch.full((3,), 1.0 + mpi.rank()))

        def forward(self, x):
            return x + self.shift

    criterion = torch.nn.CrossEntropyLoss(weight=torch.full((3,), 1.0 + mpi.rank()))
    iterator = DatasetIterator(data(30), 4)
    AllReduceSGDEngine().train(network=network(0), criterion=criterion, iterator=iterator, lr=0.1)
    assert criterion.weight.tolist() == [1.0] * 3
    fixed, scale = Shift(), Scale(1.0 + mpi.rank())
    AllReduceSGDEngine().train(
        network=torch.nn.Sequential(torch.nn.Linear(5, 3).requires_grad_(False), fixed),
        criterion=scale.requires_grad_(False),
        iterator=iterator,
        lr=0,
    )
    assert fixed.shift.tolist() == [1.0] * 3
    assert scale.factor == scale.shift == 1.0


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_network_that_is_all_frozen_runs_through(mpi, asynchronous):
    engine = AllReduceSGDEngine(asynchronous=asynchronous, debug=True)
    net = network(mpi.rank()).requires_grad_(False)
    state = engine.train(network=net, criterion=cross_entropy, iterator=DatasetIterator(data(9), 4), lr=0)
    assert state.loss is not None
    mpi.nn.check_with_allreduce(net)
