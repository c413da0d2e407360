"""``torch.set_default_device``: the package's own tensors are where they belong, whatever the program's default is.

The default is "meta" here, so that a tensor made by default has no values, and fails.
"""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from torchmpi_py import nn as mpinn, optim, paramserver as ps
from torchmpi_py.optim import compression

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(240)]
CPU = torch.device("cpu")
FLAVOURS = ["mpi", "shared", "ring", "gloo", None]


@pytest.fixture(autouse=True)
def meta(mpi):
    """As the default device, with the package started."""
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


@pytest.fixture
def network():
    with CPU:
        torch.manual_seed(3)
        return torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.BatchNorm1d(9), torch.nn.Linear(9, 2))


def backward(module):
    module.zero_grad()
    module(torch.ones(4, 6, device=CPU)).sum().backward()


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
def test_verbs(mpi, flavour, dtype):
    size = mpi.size()
    for count in (3, 100_000, 2_000_000):
        x, whole = torch.ones(count, device=CPU, dtype=dtype), torch.ones(count * size, device=CPU, dtype=dtype)
        for found in (
            mpi.allreduce(x.clone(), flavour=flavour),
            mpi.allreduce_async(x.clone(), flavour=flavour).wait(),
            mpi.reduce_scatter(whole, flavour=flavour),
        ):
            assert (found == size).all()
        for found in (mpi.allgather(x, flavour=flavour), mpi.alltoall(whole, flavour=flavour)):
            assert (found == 1).all()
        assert (mpi.broadcast(x.clone(), root=0, flavour=flavour) == 1).all()
    assert mpi.allreduce(3) == 3 * size
    assert (mpi.allreduce(mpi.symmetric_empty(100_000, device="cpu").fill_(1)) == size).all()


@pytest.mark.parametrize(
    "made",
    [
        None,
        compression.BF16(),
        compression.FP16(),
        compression.TopK(0.5),
        compression.PowerSGD(1),
    ],
    ids=str,
)
def test_gradients(mpi, network, made):
    mpinn.synchronize_parameters(network)
    averaged = mpinn.register_async_backward(network, compression=made)
    for _ in range(2):
        backward(network)
        averaged.synchronize()
    averaged.remove()
    assert all(p.grad.isfinite().all() for p in network.parameters())


def test_optimizers(mpi, network):
    for make in (
        lambda: optim.DistributedOptimizer(torch.optim.Adam(network.parameters()), network),
        lambda: optim.ShardedOptimizer(network.parameters(), torch.optim.Adam, lr=0.01),
    ):
        optimizer = make()
        backward(network)
        optimizer.step()
        optimizer.remove()
    for optimizer in (
        optim.LocalSGD(torch.optim.SGD(network.parameters(), 0.1), 1, slow_momentum=0.5),
        optim.Gossip(torch.optim.SGD(network.parameters(), 0.1), partners="random"),
    ):
        backward(network)
        optimizer.step()
    assert all(p.isfinite().all() for p in network.parameters())


def test_sparse_gradients_and_clipping(mpi):
    embedding = torch.nn.Embedding(5, 3, sparse=True, device=CPU)
    torch.nn.init.ones_(embedding.weight)
    embedding(torch.tensor([mpi.rank() % 5, 0], device=CPU)).sum().backward()
    mpinn.synchronize_gradients(embedding)
    assert embedding.weight.grad.to_dense()[0, 0] >= 1
    with CPU:
        split = mpinn.ColumnParallelLinear(6, 2 * mpi.size(), bias=False)
    split(torch.ones(4, 6, device=CPU)).sum().backward()
    assert mpinn.clip_grad_norm_(split.parameters(), 0.1) > 0.1


def test_activations_travel(mpi):
    if mpi.size() == 1:
        pytest.skip("nobody to send to")
    if mpi.rank() == 0:
        x = torch.ones(3, device=CPU, requires_grad=True)
        mpinn.send(2 * x, 1).backward()
        assert x.grad.tolist() == [6] * 3
    elif mpi.rank() == 1:
        (3 * mpinn.recv(0)).sum().backward()


def test_a_parameter_server(mpi):
    server = ps.init(torch.zeros(1000, device=CPU))
    server.send(torch.ones(1000, device=CPU), "add").wait()
    mpi.barrier()
    assert (server.receive().wait() == mpi.size()).all()
    server.free()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_engine(mpi, network, num_workers):
    data = TensorDataset(torch.ones(64, 6, device=CPU), torch.zeros(64, dtype=torch.long, device=CPU))
    loader = DataLoader(data, 8, shuffle=True, num_workers=num_workers, generator=torch.Generator())
    engine = mpi.engine.AllReduceSGDEngine()
    criterion = torch.nn.CrossEntropyLoss()
    if mpi.size() > 1:  # else it is torch's own, which fails
        engine.train(network=network, criterion=criterion, iterator=loader, lr=0.1, maxepoch=2)
    iterator = mpi.engine.DatasetIterator(mpi.engine.Source(data, num_workers=num_workers), 8, seed=3)
    engine.train(network=network, criterion=criterion, iterator=iterator, lr=0.1, maxepoch=2)
    assert all(p.isfinite().all() for p in network.parameters())
