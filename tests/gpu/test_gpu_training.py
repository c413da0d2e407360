"""Training on GPUs, against the same training on the CPU."""

import copy

import pytest
import torch
from torch.utils.data import TensorDataset

if not torch.cuda.is_available():
    pytest.skip("no GPU that torch can use", allow_module_level=True)

pytestmark = pytest.mark.mpi


def trained(mpi, network, data, device, **options):
    from torchmpi_py.engine import AllReduceSGDEngine, DatasetIterator

    engine = AllReduceSGDEngine(usegpu=device == "cuda", **options)
    iterator = DatasetIterator(data, 16, seed=3)
    engine.train(
        network=network, criterion=torch.nn.CrossEntropyLoss(), iterator=iterator, lr=0.05, maxepoch=3, optimizer=None
    )
    return [p.detach().cpu() for p in network.parameters()]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_as_on_the_cpu(mpi, asynchronous):
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(333, 20), torch.randint(5, (333,)))
    network = torch.nn.Sequential(torch.nn.Linear(20, 700), torch.nn.ReLU(), torch.nn.Linear(700, 5))
    on_cpu = trained(mpi, copy.deepcopy(network), data, "cpu", asynchronous=asynchronous)
    on_gpu = trained(mpi, network, data, "cuda", asynchronous=asynchronous)
    for x, y in zip(on_cpu, on_gpu, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4)
    mpi.nn.check_with_allreduce(network)


def test_gradients_meet_in_symmetric_memory(mpi):
    from torchmpi_py.memory import symmetric

    network = torch.nn.Linear(2000, 300).cuda()
    for scale in (1.0, 2.0):
        network.zero_grad()
        (network(torch.ones(4, 2000, device="cuda")).sum() * scale * (mpi.rank() + 1)).backward()
        mpi.nn.synchronize_gradients(network, average=False)
        total = scale * 4 * sum(range(1, mpi.size() + 1))
        assert (network.weight.grad == total).all()
        if mpi.size() > 1:
            assert symmetric.find(network.weight.grad.view(-1)) is not None
