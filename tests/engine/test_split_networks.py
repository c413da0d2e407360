"""The engine with a network that is partly split: what it gives is what the same network unsplit gives."""

import pytest
import torch
from runs import classes, train

from torchmpi_py import nn as mpinn
from torchmpi_py.engine import AllReduceSGDEngine, DatasetIterator
from torchmpi_py.nn.compression import BF16

pytestmark = pytest.mark.mpi


def network(comm):
    """Two layers that all ranks have, then two that are split over ``comm``, if given."""
    torch.manual_seed(0)
    below = [torch.nn.Linear(6, 16), torch.nn.Tanh()]
    head = [torch.nn.Linear(16, 11), torch.nn.Tanh(), torch.nn.Linear(11, 3)]
    if comm is None:
        return torch.nn.Sequential(*below, torch.nn.Sequential(*head))
    head[0] = mpinn.ColumnParallelLinear.from_linear(head[0], comm=comm, gather_output=False)
    head[2] = mpinn.RowParallelLinear.from_linear(head[2], comm=comm, input_is_split=True)
    return torch.nn.Sequential(*below, mpinn.ModelParallel(*head, comm=comm))


def trained(comm, *, asynchronous=False, compression=None, **options):
    """Return the network's state after training; None if it was killed."""
    net, iterator = network(comm), DatasetIterator(classes(43), 4, seed=1)
    engine = AllReduceSGDEngine(asynchronous=asynchronous, debug=True, compression=compression)
    options |= {"engine": engine, "maxepoch": 2}
    state = train(net, iterator, optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01), **options)
    return None if state is None else dict(net.state_dict())


def assert_close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-5)  # Adam divides by what is nearly zero


@pytest.fixture
def comm(mpi):
    """Groups of two ranks, or where that leaves one over all ranks."""
    with mpi.split(mpi.rank() // 2 if mpi.size() % 2 == 0 else 0) as comm:
        yield comm


@pytest.mark.parametrize("asynchronous", [pytest.param(False, marks=pytest.mark.slow), True])
def test_training_is_that_of_the_unsplit_network(mpi, comm, asynchronous):
    assert_close(trained(comm, asynchronous=asynchronous), trained(None))


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
def test_gradients_may_be_compressed(mpi, comm, asynchronous):
    """Replicas have the same bits (``debug`` looks), which are near those of uncompressed training."""
    found, exact = trained(comm, asynchronous=asynchronous, compression=BF16()), trained(None)
    for name, value in exact.items():
        assert (found[name] - value).norm() < 0.05 * value.norm(), name
    assert mpi.size() < 3 or any(not torch.equal(found[name], value) for name, value in exact.items())


def test_checkpoints_hold_whole_parameters_and_moments(mpi, comm, folder):
    """Saved by the split network, gone on with by the unsplit one, and the other way round."""
    expected = trained(None)
    for number, (before, after) in enumerate([(comm, comm), (comm, None), (None, comm)]):
        saved = {"checkpoint": folder / str(number), "every": 3}
        assert trained(before, killed_at=4, **saved) is None
        assert_close(trained(after, **saved), expected)
