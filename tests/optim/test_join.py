"""Ranks with unequal numbers of batches: each step is the mean over those that have one, and all end alike."""

import copy

import pytest
import torch
from torch.nn.functional import mse_loss

import torchmpi_py
from torchmpi_py import nn as mpinn, optim

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(240)]

COUNTS = {  # batches of each rank, of 5
    "falling": [5, 4, 2, 2, 0],
    "rising": [0, 1, 3, 3, 4],
    "first alone": [4, 0, 0, 0, 0],
    "equal": [3, 3, 3, 3, 3],
    "none": [0, 0, 0, 0, 0],
}
every_count = pytest.mark.parametrize("counts", COUNTS)


def batch(rank, step):
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(4, 6, generator=generator), torch.randn(4, 2, generator=generator)


def network():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.BatchNorm1d(9), torch.nn.Linear(9, 2))


def stepped(parameters):
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


def expected(mpi, counts, average=True):
    """What one process gets that computes the batches of all ranks, each with the buffers of a network of its own."""
    counts = counts[: mpi.size()]
    module = network()
    optimizer = stepped(module.parameters())
    buffers = [copy.deepcopy(dict(module.named_buffers())) for _ in counts]
    for step in range(max(counts)):
        present = [rank for rank, count in enumerate(counts) if count > step]
        optimizer.zero_grad()
        for rank in present:
            x, y = batch(rank, step)
            output = torch.func.functional_call(module, buffers[rank], (x,))
            (mse_loss(output, y) / (len(present) if average else 1)).backward()
        optimizer.step()
    root = counts.index(max(counts))
    return {**dict(module.named_parameters()), **buffers[root]}, optimizer.state_dict()["state"]


def assert_as_expected(mpi, module, counts, average=True):
    values, _ = expected(mpi, counts, average)
    for name, value in module.state_dict().items():
        torch.testing.assert_close(value, values[name], rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")
    mpinn.check_with_allreduce(module)


def run(mpi, counts, optimizer, module, after_backward=lambda: None):
    for step in range(counts[mpi.rank()]):
        x, y = batch(mpi.rank(), step)
        optimizer.zero_grad()
        mse_loss(module(x), y).backward()
        after_backward()
        optimizer.step()


@every_count
def test_an_optimizer(mpi, counts):
    counts = COUNTS[counts]
    module = network()
    optimizer = optim.DistributedOptimizer(stepped(module.parameters()), module)
    with torchmpi_py.join(optimizer):
        run(mpi, counts, optimizer, module)
    assert_as_expected(mpi, module, counts)
    _, state = expected(mpi, counts)
    found = optimizer.state_dict()["state"]
    assert found.keys() == state.keys()
    for index in state:
        torch.testing.assert_close(
            found[index]["momentum_buffer"], state[index]["momentum_buffer"], rtol=1e-4, atol=1e-5
        )
    with torchmpi_py.join(optimizer):  # once more
        pass
    optimizer.remove()


@every_count
@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("how", ["registered", "synchronized"])
def test_a_module(mpi, counts, how, average):
    counts = COUNTS[counts]
    module = network()
    optimizer = stepped(module.parameters())
    registration = mpinn.register_async_backward(module, average=average) if how == "registered" else None

    def reduce_gradients():
        if registration is not None:
            registration.synchronize()
        else:
            mpinn.synchronize_gradients(module, average)

    with torchmpi_py.join(module):
        run(mpi, counts, optimizer, module, reduce_gradients)
    assert_as_expected(mpi, module, counts, average)
    if registration is not None:
        registration.remove()


def test_compressed_and_accumulated(mpi):
    """Two passes a step, of which the last may be alone; what travels is compressed."""
    counts = COUNTS["falling"]
    module = torch.nn.Linear(6, 2)
    optimizer = optim.DistributedOptimizer(
        torch.optim.SGD(module.parameters(), 0.1),
        module,
        backward_passes_per_step=2,
        compression=optim.compression.BF16(),
    )
    mpinn.synchronize_parameters(module)
    with torchmpi_py.join(optimizer):
        for step in range(counts[mpi.rank()]):
            x, y = batch(mpi.rank(), step)
            mse_loss(module(x), y).backward()
            if step % 2 or step == counts[mpi.rank()] - 1:
                optimizer.step()
                optimizer.zero_grad()
    mpinn.check_with_allreduce(module)
    optimizer.remove()


def test_schedulers_and_scalers_end_alike(mpi):
    counts = COUNTS["falling"]
    module = network()
    optimizer = optim.DistributedOptimizer(torch.optim.SGD(module.parameters(), 0.1), module)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    with torchmpi_py.join(optimizer, schedule, scaler):
        for step in range(counts[mpi.rank()]):
            x, y = batch(mpi.rank(), step)
            optimizer.zero_grad()
            scaler.scale(mse_loss(module(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
    assert schedule.last_epoch == max(counts[: mpi.size()])
    mpi.check_with_allreduce(scaler.get_scale())
    mpi.check_with_allreduce(optimizer.param_groups[0]["lr"])
    optimizer.remove()


def test_passes_after_the_last_step_are_dropped(mpi):
    module = torch.nn.Linear(6, 2)
    mpinn.synchronize_parameters(module)
    optimizer = optim.DistributedOptimizer(
        torch.optim.SGD(module.parameters(), 0.1), module, backward_passes_per_step=2
    )
    for _ in range(2):
        with torchmpi_py.join(optimizer):
            optimizer.zero_grad()
            for step in range(3):
                x, y = batch(mpi.rank(), step)
                mse_loss(module(x), y).backward()
                if step == 1:
                    optimizer.step()
                    optimizer.zero_grad()
    mpinn.check_with_allreduce(module)
    optimizer.remove()


def test_errors(mpi):
    with pytest.raises(TypeError, match="not a SGD"), torchmpi_py.join(stepped(network().parameters())):
        pass
    with pytest.raises(ValueError, match="split"), torchmpi_py.join(mpinn.ColumnParallelLinear(3, 2)):
        pass
    module = network()
    with pytest.raises(ZeroDivisionError), torchmpi_py.join(module):
        raise ZeroDivisionError
    with torchmpi_py.join(module):  # it can be used again
        run(mpi, COUNTS["equal"], stepped(module.parameters()), module, lambda: mpinn.synchronize_gradients(module))
    assert_as_expected(mpi, module, COUNTS["equal"])
