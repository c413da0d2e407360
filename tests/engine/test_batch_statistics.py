"""Batch statistics in data-parallel training: each rank's own, brought together, or those of all ranks' batches."""

import copy

import pytest
import torch
from torch.utils.data import TensorDataset

from torchmpi_py import errors
from torchmpi_py.core import config
from torchmpi_py.engine import AllReduceSGDEngine, Average, DatasetIterator, SGDEngine
from torchmpi_py.nn import SyncBatchNorm

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(240)]
cross_entropy = torch.nn.CrossEntropyLoss()


def data(total):
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(total, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(x * torch.linspace(1, 3, total).unsqueeze(1), torch.randint(3, (total,), generator=generator))


def network(norm=torch.nn.BatchNorm1d):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(4, 8), norm(8), torch.nn.Tanh(), torch.nn.Linear(8, 8), norm(8), torch.nn.Linear(8, 3)]
    return torch.nn.Sequential(*layers).double()


def train(mpi, engine, net, *, total=None, maxepoch=2, **place):
    """On full batches of 4 for each rank."""
    batch_size = 4 * mpi.size() // place.get("size", mpi.size())
    iterator = DatasetIterator(data(total or 12 * mpi.size()), batch_size, **place)
    engine.train(network=net, criterion=cross_entropy, iterator=iterator, lr=0.2, maxepoch=maxepoch)
    return net


def statistics(net):
    return torch.stack([net[1].running_mean, net[1].running_var]).clone()


@pytest.fixture
def everything_by_mpi(mpi, monkeypatch):
    """Each gradient has a bucket of its own, and is posted to MPI as soon as it is there."""
    monkeypatch.setattr(config, "current", config.Tuning(fuse_bytes=1))
    rows = {key: mpi.selector[key] for key in mpi.selector}
    source = mpi.selector.source
    for is_symmetric in (False, True):
        mpi.selector["allreduce", "node", is_symmetric] = "mpi"
    yield
    mpi.selector.load(rows, source)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("buffers", ["average", "root", "leave"])
def test_at_the_end_of_training(mpi, buffers):
    engine = AllReduceSGDEngine(debug=True, buffers=buffers)
    own, ended = [], []
    engine.hooks.on_start_epoch = lambda state: state.network[1].num_batches_tracked.fill_(10 * mpi.rank())
    engine.hooks.on_end_epoch = lambda state: own.append(statistics(state.network))
    engine.hooks.on_end = lambda state: ended.append(statistics(state.network))
    net = train(mpi, engine, network())
    with pytest.raises(errors.RanksDisagree):
        mpi.check_with_allreduce(own[-1])
    if buffers == "leave":
        assert torch.equal(ended[0], own[-1])
        with pytest.raises(errors.RanksDisagree, match=r"on all ranks: buffer 1\.running_mean \(rank 1"):
            mpi.nn.check_with_allreduce(net)
        return
    mean, root = mpi.allreduce(own[-1].clone(), op="avg"), mpi.broadcast(own[-1].clone())
    torch.testing.assert_close(ended[0], mean if buffers == "average" else root)
    assert net[1].num_batches_tracked == 3
    mpi.nn.check_with_allreduce(net)


@pytest.mark.mpi(min_size=2)
def test_before_a_test(mpi):
    net, losses, engine = network(), [], AllReduceSGDEngine()
    net[1].running_mean += mpi.rank()
    expected = (mpi.size() - 1) / 2
    engine.hooks.on_start = lambda state: losses.append(state.network[1].running_mean[0].item())
    engine.test(network=net, criterion=cross_entropy, iterator=DatasetIterator(data(8), 4, rank=0, size=1))
    assert losses == [expected]
    mpi.nn.check_with_allreduce(net)
    assert net[1].num_batches_tracked == 0  # and it is a test


def test_all_ranks_evaluate_one_network(mpi):
    engine, loss = AllReduceSGDEngine(), Average()
    net = train(mpi, engine, network()).eval()
    engine.hooks.on_forward_criterion = lambda state: loss.add(state.loss, state.num_samples)
    dataset = data(9 * mpi.size())
    engine.test(network=net, criterion=cross_entropy, iterator=DatasetIterator(dataset, 4, shuffle=False))
    inputs, targets = dataset.tensors
    assert loss.reduced() == pytest.approx(cross_entropy(net(inputs), targets).item())


@pytest.mark.parametrize("asynchronous", [False, True])
def test_synchronized_statistics_train_as_one_rank(mpi, asynchronous):
    # The last batch is smaller, and not of the same size on all ranks.
    total = 12 * mpi.size() + 2 * mpi.size() + mpi.size() // 2
    net = SyncBatchNorm.convert_sync_batchnorm(network())
    train(mpi, AllReduceSGDEngine(asynchronous=asynchronous, debug=True), net, total=total)
    mpi.nn.check_with_allreduce(net)
    one = train(mpi, SGDEngine(), network(), total=total, rank=0, size=1)
    torch.testing.assert_close(net.state_dict(), one.state_dict())


@pytest.mark.mpi(min_size=2)
def test_layers_that_one_rank_does_not_use_beside_synchronized_statistics(mpi, everything_by_mpi):
    """Some ranks then post a bucket before they meet at the layer, others after that, to the same MPI."""

    class Network(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm = torch.nn.Linear(4, 8), SyncBatchNorm(8)
            self.more, self.last = torch.nn.Linear(8, 8), torch.nn.Linear(8, 3)

        def forward(self, x):
            x = self.norm(self.first(x))
            return self.last(self.more(x) if mpi.rank() % 2 else x)

    net = Network().double()
    train(mpi, AllReduceSGDEngine(asynchronous=True), net)
    mpi.nn.check_with_allreduce(net)


def test_an_unknown_way_is_refused(mpi):
    with pytest.raises(ValueError, match="buffers='mean': give 'average', 'root' or 'leave'"):
        AllReduceSGDEngine(buffers="mean")


@pytest.mark.mpi(min_size=3)
def test_a_rank_without_samples_in_the_last_batch(mpi):
    """One process trains alike; later batches of that rank count again."""
    total = 9 * mpi.size() - 1  # two batches of 4 a rank, and one with a sample less than there are ranks
    engine, copies = AllReduceSGDEngine(), []
    engine.hooks.on_backward = lambda state: copies.append(copy.deepcopy(state.network))
    engine.hooks.on_update = lambda state: copies.append(state.network)
    net = train(mpi, engine, network(SyncBatchNorm), total=total)
    alone = train(mpi, SGDEngine(), network(), total=total, rank=0, size=1)
    torch.testing.assert_close(dict(net.state_dict()), dict(alone.state_dict()), rtol=1e-9, atol=1e-10)
    assert all(each[1].has_samples for each in copies)


def test_one_sample_on_all_ranks(mpi):
    """As on one process, which has no variance of it."""
    with pytest.raises(ValueError, match="per channel when training"):
        train(mpi, AllReduceSGDEngine(), network(SyncBatchNorm), total=4 * mpi.size() + 1)
