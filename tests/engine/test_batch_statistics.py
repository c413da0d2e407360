"""Batch statistics in data-parallel training: each rank's own, brought together, or those of all ranks' batches."""

import pytest
import torch
from runs import classes, loss_of, train
from support import networks

from torchmpi_py import errors
from torchmpi_py.core import config
from torchmpi_py.engine import AllReduceSGDEngine, DatasetIterator, SGDEngine
from torchmpi_py.nn import SyncBatchNorm

pytestmark = pytest.mark.mpi


def network(norm=torch.nn.BatchNorm1d):
    return networks.perceptron(6, 8, 3, norm=norm, dtype=torch.float64)


def data(total):
    samples = classes(total, dtype=torch.float64)
    samples.tensors[0].mul_(torch.linspace(1, 3, total).unsqueeze(1))  # other statistics in each batch
    return samples


def trained(mpi, engine, net, *, total=None, place=None, **hooks):
    """Return the network after two epochs of batches of 4 on each rank, or of as many on one."""
    batch_size = 4 * mpi.size() // (place or {"size": mpi.size()})["size"]
    iterator = DatasetIterator(data(total or 12 * mpi.size()), batch_size, **place or {})
    train(net, iterator, engine=engine, lr=0.2, maxepoch=2, **hooks)
    return net


def trained_alone(mpi, net, total):
    return trained(mpi, SGDEngine(), net, total=total, place={"rank": 0, "size": 1})


def statistics(net):
    return torch.stack([net[1].running_mean, net[1].running_var]).clone()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("buffers", ["average", "root", "leave"])
def test_at_the_end_of_training(mpi, buffers):
    own, ended = [], []
    net = trained(
        mpi,
        AllReduceSGDEngine(debug=True, buffers=buffers),
        network(),
        on_start_epoch=lambda state: state.network[1].num_batches_tracked.fill_(10 * mpi.rank()),
        on_end_epoch=lambda state: own.append(statistics(state.network)),
        on_end=lambda state: ended.append(statistics(state.network)),
    )
    with pytest.raises(errors.RanksDisagree):
        mpi.check_with_allreduce(own[-1])
    if buffers == "leave":
        assert torch.equal(ended[0], own[-1])
        with pytest.raises(errors.RanksDisagree, match=r"buffer 1\.running_mean"):
            mpi.nn.check_with_allreduce(net)
        return
    mean, root = mpi.allreduce(own[-1].clone(), op="avg"), mpi.broadcast(own[-1].clone())
    torch.testing.assert_close(ended[0], mean if buffers == "average" else root)
    assert net[1].num_batches_tracked == 3
    mpi.nn.check_with_allreduce(net)


@pytest.mark.mpi(min_size=2)
def test_before_a_test(mpi):
    net, means, engine = network(), [], AllReduceSGDEngine()
    net[1].running_mean += mpi.rank()
    engine.hooks.on_start = lambda state: means.append(state.network[1].running_mean[0].item())
    engine.test(network=net, criterion=loss_of, iterator=DatasetIterator(data(8), 4, rank=0, size=1))
    assert means == [(mpi.size() - 1) / 2]
    mpi.nn.check_with_allreduce(net)
    assert net[1].num_batches_tracked == 0  # and it is a test


@pytest.mark.parametrize("asynchronous", [False, True])
def test_synchronized_statistics_train_as_one_rank(mpi, asynchronous):
    # The last batch is smaller, and not of the same size on all ranks.
    total = 12 * mpi.size() + 2 * mpi.size() + mpi.size() // 2
    net = SyncBatchNorm.convert_sync_batchnorm(network())
    trained(mpi, AllReduceSGDEngine(asynchronous=asynchronous, debug=True), net, total=total)
    mpi.nn.check_with_allreduce(net)
    torch.testing.assert_close(net.state_dict(), trained_alone(mpi, network(), total).state_dict())


@pytest.mark.mpi(min_size=2)
def test_layers_that_one_rank_does_not_use_beside_synchronized_statistics(mpi, selector, monkeypatch):
    """Some ranks post a bucket, of one gradient, before they meet at the layer, others after that, to the same MPI."""
    monkeypatch.setattr(config, "current", config.Tuning(fuse_bytes=1))
    selector["allreduce", "node", False] = selector["allreduce", "node", True] = "mpi"

    class Network(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm = torch.nn.Linear(6, 8), SyncBatchNorm(8)
            self.more, self.last = torch.nn.Linear(8, 8), torch.nn.Linear(8, 3)

        def forward(self, x):
            x = self.norm(self.first(x))
            return self.last(self.more(x) if mpi.rank() % 2 else x)

    net = Network().double()
    trained(mpi, AllReduceSGDEngine(asynchronous=True), net)
    mpi.nn.check_with_allreduce(net)


@pytest.mark.mpi(min_size=3)
def test_a_rank_that_may_have_no_samples_is_refused(mpi):
    """It would call no layer, and the others wait for it there."""
    total = 9 * mpi.size() - 1  # two batches of 4 a rank, and one with a sample less than there are ranks
    with pytest.raises(ValueError, match=r"SyncBatchNorm needs every rank .* pass drop_last=True to"):
        trained(mpi, AllReduceSGDEngine(), network(SyncBatchNorm), total=total)
    trained(mpi, AllReduceSGDEngine(), network(SyncBatchNorm), total=9 * mpi.size())
    iterator = DatasetIterator(data(total), 4, drop_last=True)
    assert train(network(SyncBatchNorm), iterator).t == 2


def test_another_way_is_refused(mpi):
    with pytest.raises(ValueError, match="buffers='mean'; pass 'average', 'root' or 'leave'"):
        AllReduceSGDEngine(buffers="mean")
