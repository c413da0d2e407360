"""``torch.set_default_device``: the package's own tensors are where they belong, whatever the program's default is.

The default is "meta" here, so that a tensor made by default has no values, and fails.
"""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from torchmpi_py import nn as mpinn, optim, paramserver as ps
from torchmpi_py.optim import compression

pytestmark = pytest.mark.mpi
CPU = torch.device("cpu")


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


@pytest.mark.parametrize("flavour", ["mpi", "shared", "ring", "gloo", None])
def test_verbs(mpi, flavour):
    size = mpi.size()
    for count, dtype in ((3, torch.int32), (100_000, torch.bfloat16), (1_000_000, torch.float32)):
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
    "made", [None, compression.BF16(), compression.FP16(), compression.TopK(0.5), compression.PowerSGD(1)], ids=str
)
def test_gradients(mpi, network, made):
    mpinn.synchronize_parameters(network)
    averaged = mpinn.register_async_backward(network, compression=made)
    for _ in range(2):
        backward(network)
        averaged.synchronize()
    averaged.remove()
    averaged = mpinn.register_async_backward(network, frequency=2)
    backward(network)
    averaged.reduce_now()
    averaged.remove()
    assert all(p.grad.isfinite().all() for p in network.parameters())


def test_optimizers(mpi, network):
    for make in (
        lambda: optim.DistributedOptimizer(torch.optim.Adam(network.parameters()), network),
        lambda: optim.ShardedOptimizer(network.parameters(), torch.optim.Adam, lr=0.01),
        lambda: optim.LocalSGD(torch.optim.SGD(network.parameters(), 0.1), 1, slow_momentum=0.5),
        lambda: optim.Gossip(torch.optim.SGD(network.parameters(), 0.1), partners="random"),
    ):
        optimizer = make()
        backward(network)
        optimizer.step()
        getattr(optimizer, "remove", list)()
    assert all(p.isfinite().all() for p in network.parameters())


def test_sparse_gradients(mpi):
    embedding = torch.nn.Embedding(5, 3, sparse=True, device=CPU)
    torch.nn.init.ones_(embedding.weight)
    embedding(torch.tensor([mpi.rank() % 5, 0], device=CPU)).sum().backward()
    mpinn.synchronize_gradients(embedding)
    assert embedding.weight.grad.to_dense()[0, 0] >= 1


def test_a_parameter_server(mpi):
    server = ps.init(torch.zeros(1000, device=CPU))
    server.send(torch.ones(1000, device=CPU), "add").wait()
    mpi.barrier()
    assert (server.receive().wait() == mpi.size()).all()
    server.free()


def test_the_engine(mpi, network):
    data = TensorDataset(torch.ones(64, 6, device=CPU), torch.zeros(64, dtype=torch.long, device=CPU))
    engine = mpi.engine.AllReduceSGDEngine()
    options = {"network": network, "criterion": torch.nn.CrossEntropyLoss(), "lr": 0.1, "maxepoch": 1}
    if mpi.size() > 1:  # else it is torch's own, which fails
        engine.train(iterator=DataLoader(data, 8, shuffle=True, generator=torch.Generator()), **options)
    engine.train(iterator=mpi.engine.DatasetIterator(mpi.engine.Source(data, num_workers=1), 8, seed=3), **options)
    assert all(p.isfinite().all() for p in network.parameters())
