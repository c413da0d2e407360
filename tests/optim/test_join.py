"""Ranks with unequal numbers of batches: each step is the mean over those that have one, and all end alike."""

import copy
from types import SimpleNamespace

import pytest
import torch
from loops import loss_of
from support import networks

import torchmpi_py
from torchmpi_py import nn as mpinn, optim

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(240)]

COUNTS = {  # batches of each rank, of 5
    "falling": [5, 4, 2, 2, 0],
    "rising": [0, 1, 3, 3, 4],
    "first alone": [3, 0, 0, 0, 0],
    "equal": [2, 2, 2, 2, 2],
    "none": [0, 0, 0, 0, 0],
}


def network():
    return networks.perceptron(6, 9, 2, norm=torch.nn.BatchNorm1d, dtype=torch.float64)


def stepped(module):
    return torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)


def assert_as_on_one_process(mpi, module, counts, average=True):
    """Which computes the batches of all ranks, each with the buffers of a network of its own; return its optimizer."""
    counts = counts[: mpi.size()]
    alone = network()
    optimizer = stepped(alone)
    buffers = [copy.deepcopy(list(alone.buffers())) for _ in counts]
    for step in range(max(counts)):
        present = [rank for rank, count in enumerate(counts) if count > step]
        optimizer.zero_grad()
        for rank in present:
            for mine, of_rank in zip(alone.buffers(), buffers[rank], strict=True):
                mine.copy_(of_rank)
            (loss_of(alone, step, [rank]) / (len(present) if average else 1)).backward()
            buffers[rank] = copy.deepcopy(list(alone.buffers()))
        optimizer.step()
    root = counts.index(max(counts))
    for name, p in alone.named_parameters():
        torch.testing.assert_close(module.get_parameter(name), p, rtol=1e-9, atol=1e-9)
    for (name, found), exact in zip(module.named_buffers(), buffers[root], strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-9, msg=name)
    mpinn.check_with_allreduce(module)
    return optimizer


def run(mpi, counts, optimizer, module, after_backward=lambda: None):
    for step in range(counts[mpi.rank()]):
        optimizer.zero_grad()
        loss_of(module, step, [mpi.rank()]).backward()
        after_backward()
        optimizer.step()


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_an_optimizer(mpi, counts):
    module = network()
    optimizer = optim.DistributedOptimizer(stepped(module), module)
    with torchmpi_py.join(optimizer):
        run(mpi, counts, optimizer, module)
    alone = assert_as_on_one_process(mpi, module, counts)
    torch.testing.assert_close(optimizer.state_dict()["state"], alone.state_dict()["state"], rtol=1e-9, atol=1e-9)
    with torchmpi_py.join(optimizer):  # once more
        pass


def test_a_communicator_in_another_order(mpi):
    """In which the rank with the most steps is the last, not the first."""
    module, counts = network(), COUNTS["falling"]
    with mpi.split(0, key=-mpi.rank()) as comm:
        optimizer = optim.DistributedOptimizer(stepped(module), module, comm=comm)
        with torchmpi_py.join(optimizer):
            run(mpi, counts, optimizer, module)
    assert_as_on_one_process(mpi, module, counts)


@pytest.mark.parametrize(
    ("counts", "average"), [("falling", True), ("rising", False), ("first alone", True), ("none", False)]
)
def test_a_module(mpi, counts, average):
    module = network()
    optimizer = stepped(module)
    registration = mpinn.register_async_backward(module, average=average)
    with torchmpi_py.join(module):
        run(mpi, COUNTS[counts], optimizer, module, registration.synchronize)
    assert_as_on_one_process(mpi, module, COUNTS[counts], average)


def test_compressed_and_accumulated(mpi):
    """Two passes a step, of which the last may be alone; what travels is compressed. Passes after it are dropped."""
    count = COUNTS["falling"][mpi.rank()]
    module = networks.perceptron(6, 2)
    optimizer = optim.DistributedOptimizer(
        torch.optim.SGD(module.parameters(), 0.1),
        module,
        backward_passes_per_step=2,
        compression=optim.compression.BF16(),
    )
    for has_rest in (False, True):
        with torchmpi_py.join(optimizer):
            optimizer.zero_grad()
            for step in range(count):
                loss_of(module, step, [mpi.rank()]).backward()
                if step % 2 or (step == count - 1 and not has_rest):
                    optimizer.step()
                    optimizer.zero_grad()
    mpinn.check_with_allreduce(module)


def test_schedulers_and_scalers_end_alike(mpi):
    counts = COUNTS["falling"]
    module = network()
    optimizer = optim.DistributedOptimizer(torch.optim.SGD(module.parameters(), 0.1), module)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    steps = set()  # which rank 0 alone completes
    own = SimpleNamespace(
        state_dict=lambda: {"steps": steps}, load_state_dict=lambda state: steps.update(state["steps"])
    )
    with torchmpi_py.join(optimizer, schedule, scaler, own):
        for step in range(counts[mpi.rank()]):
            optimizer.zero_grad()
            scaler.scale(loss_of(module, step, [mpi.rank()])).backward()
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            steps.add(step)
    assert schedule.last_epoch == len(steps) == 5
    assert scaler.get_scale() == 8.0 * 2**5
    mpi.check_with_allreduce(optimizer.param_groups[0]["lr"])


def test_errors(mpi):
    with pytest.raises(TypeError, match="found SGD"), torchmpi_py.join(stepped(network())):
        pass
    module = network()
    with pytest.raises(ValueError, match="call register_async_backward"), torchmpi_py.join(module):
        pass
    registration = mpinn.register_async_backward(module)
    with pytest.raises(ZeroDivisionError), torchmpi_py.join(module):
        raise ZeroDivisionError
    with torchmpi_py.join(module):  # it can be used again
        run(mpi, COUNTS["equal"], stepped(module), module, registration.synchronize)
    assert_as_on_one_process(mpi, module, COUNTS["equal"])
