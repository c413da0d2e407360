"""Optimizers and compressed gradients on GPUs, against one process with all samples, or the exact sums."""

import pytest
import regression
import torch

from torchmpi_py import nn as mpinn, optim
from torchmpi_py.core.handles import wait_all
from torchmpi_py.optim import compression

if not torch.cuda.is_available():
    pytest.skip("no GPU that torch can use", allow_module_level=True)

pytestmark = pytest.mark.mpi

COMPRESSIONS = {
    "BF16": compression.BF16,
    "FP16": compression.FP16,
    "TopK": lambda: compression.TopK(1.0),
    "PowerSGD": lambda: compression.PowerSGD(2),
}


@pytest.fixture(autouse=True)
def on_the_gpu():
    """The networks and batches of ``regression``."""
    regression.device = "cuda"
    yield
    regression.device = "cpu"


@pytest.mark.parametrize("kind", ["plain", "distributed", "sharded"])
def test_as_one_process(mpi, stream, kind):
    network = regression.network()
    if kind == "sharded":
        optimizer = optim.ShardedOptimizer(network.parameters(), torch.optim.Adam, lr=0.01)
    else:
        optimizer = regression.adam(network.parameters())
    if kind == "distributed":
        optimizer = optim.DistributedOptimizer(optimizer, network)
    if kind == "plain":
        averaged = mpinn.register_async_backward(network)
        for step in range(regression.STEPS):
            optimizer.zero_grad()
            regression.loss(network, step, mpi.rank(), mpi.size()).backward()
            averaged.synchronize()
            optimizer.step()
        averaged.remove()
    else:
        regression.train(network, optimizer, mpi.rank(), mpi.size())
        optimizer.remove()
    mpinn.check_with_allreduce(network)
    regression.assert_equal(network.state_dict(), regression.trained_alone())


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_compressed_gradients(mpi, stream, name):
    """Where all of a gradient is taken nothing is left out, but for digits; PowerSGD gives what it does on the CPU."""
    shape = 300, 7
    flat = torch.zeros(2100, device="cuda")
    made = COMPRESSIONS[name]().compressor(flat, [flat.view(shape)], mpi.communicator())
    zeros = torch.zeros(2100)
    on_the_host = COMPRESSIONS[name]().compressor(zeros, [zeros.view(shape)], mpi.communicator())
    for step in range(3):
        values = [
            torch.randn(shape, generator=torch.Generator().manual_seed(100 * step + rank)).cuda()
            for rank in range(mpi.size())
        ]
        torch.cuda._sleep(2_000_000)
        flat.copy_(values[mpi.rank()].reshape(-1))
        wait_all(made.launch("avg"))
        made.finish("avg")
        mpi.check_with_allreduce(flat)
        exact = sum(value.double() for value in values).reshape(-1) / mpi.size()
        if name == "PowerSGD":
            on_the_host.flat.copy_(values[mpi.rank()].reshape(-1))
            wait_all(on_the_host.launch("avg"))
            on_the_host.finish("avg")
            exact = on_the_host.flat.double().cuda()
        tolerance = {"BF16": 0.05, "FP16": 0.01, "PowerSGD": 1e-3}.get(name, 1e-6)
        torch.testing.assert_close(flat.double(), exact, rtol=tolerance, atol=tolerance)


def test_batch_statistics(mpi, stream):
    """SyncBatchNorm of the package, in training by all ranks and by one."""

    def model():
        torch.manual_seed(7)
        layers = [torch.nn.Linear(6, 11, bias=False), torch.nn.BatchNorm1d(11), torch.nn.Tanh(), torch.nn.Linear(11, 3)]
        return torch.nn.Sequential(*layers).double().cuda()

    one, synchronized = model(), mpinn.SyncBatchNorm.convert_sync_batchnorm(model())
    regression.train(one, regression.adam(one.parameters()))
    optimizer = optim.DistributedOptimizer(regression.adam(synchronized.parameters()), synchronized)
    regression.train(synchronized, optimizer, mpi.rank(), mpi.size())
    optimizer.remove()
    regression.assert_equal(synchronized.state_dict(), one.state_dict())
