"""The engine with a network that is partly split: what it gives is what the same network unsplit gives."""

import pytest
import torch
from torch.utils.data import TensorDataset

from torchmpi_py import nn as mpinn
from torchmpi_py.engine import AllReduceSGDEngine, DatasetIterator, resume
from torchmpi_py.nn.compression import BF16

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(240)]


class Killed(Exception):
    """Stands for a kill, in between steps, on all ranks."""


def made(comm):
    """Two layers that all ranks have, then two that are split over ``comm``, if given."""
    below = [torch.nn.Linear(6, 16), torch.nn.Tanh()]
    head = [torch.nn.Linear(16, 11), torch.nn.Tanh(), torch.nn.Linear(11, 3)]
    if comm is not None:
        head[0] = mpinn.ColumnParallelLinear.from_linear(head[0], comm=comm, gather_output=False)
        head[2] = mpinn.RowParallelLinear.from_linear(head[2], comm=comm, input_is_split=True)
        return torch.nn.Sequential(*below, mpinn.ModelParallel(*head, comm=comm))
    return torch.nn.Sequential(*below, torch.nn.Sequential(*head))


def trained(comm, *, asynchronous=False, killed_at=None, compression=None, **options):
    """The network's state after training."""
    torch.manual_seed(0)
    resume.completed.clear()  # as if in a process of its own
    network = made(comm)
    generator = torch.Generator().manual_seed(7)
    samples = TensorDataset(torch.randn(83, 6, generator=generator), torch.arange(83) % 3)

    def on_update(state):
        if state.t == killed_at:
            raise Killed

    engine = AllReduceSGDEngine(asynchronous=asynchronous, debug=True, compression=compression)
    engine.hooks.on_update = on_update
    try:
        engine.train(
            network=network,
            criterion=torch.nn.CrossEntropyLoss(),
            iterator=DatasetIterator(samples, 4, seed=1),
            optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01),
            maxepoch=2,
            **options,
        )
    except Killed:
        return None
    return network.state_dict()


def assert_equal(ours, theirs):
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=2e-4, atol=2e-5)  # Adam divides by what is nearly zero


@pytest.fixture
def comm(mpi):
    """Groups of two ranks, or where that leaves one over all ranks."""
    with mpi.split(mpi.rank() // 2 if mpi.size() % 2 == 0 else 0) as comm:
        yield comm


@pytest.mark.parametrize("asynchronous", [False, True])
def test_training_is_that_of_the_unsplit_network(mpi, comm, asynchronous):
    assert_equal(trained(comm, asynchronous=asynchronous), trained(None))


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
def test_gradients_may_be_compressed(mpi, comm, asynchronous):
    """Replicas have the same bits (``debug`` looks), which are near those of uncompressed training."""
    found, exact = trained(comm, asynchronous=asynchronous, compression=BF16()), trained(None)
    for name, value in exact.items():
        assert (found[name] - value).norm() < 0.05 * value.norm(), name
    assert mpi.size() < 3 or any(not torch.equal(found[name], value) for name, value in exact.items())


@pytest.mark.slow
def test_checkpoints_hold_whole_parameters_and_moments(mpi, comm, folder):
    """Saved by the split network, gone on with by the unsplit one, and the other way round."""
    expected = trained(None)
    for number, (before, after) in enumerate([(comm, comm), (comm, None), (None, comm)]):
        saved = {"checkpoint": folder / str(number), "every": 3}
        assert trained(before, killed_at=4, **saved) is None
        assert_equal(trained(after, **saved), expected)
