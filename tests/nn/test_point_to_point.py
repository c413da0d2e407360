"""Activations that go to another rank: a pipeline of stages computes what one process does."""

import random
import threading

import pytest
import torch

from torchmpi_py import nn as mpinn

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(60)]

WIDTH = 9


def layers(size):
    torch.manual_seed(11)
    return [torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()).double() for _ in range(size)]


def batches(count, rows=5):
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(rows + k, WIDTH, generator=generator, dtype=torch.float64) for k in range(count)]


def forward(mpi, stage, batch):
    """(the tensor to call backward on, the output or None) of a batch on this rank's stage."""
    x = batch if mpi.rank() == 0 else mpinn.recv(mpi.rank() - 1)
    y = stage(x)
    if mpi.rank() < mpi.size() - 1:
        return mpinn.send(y, mpi.rank() + 1), None
    return (y**2).sum(), y


def in_a_ring(mpi, x, comm=None):
    """Send to the next rank, and return (the link, what came from the one before)."""
    rank, size = (mpi.rank(), mpi.size()) if comm is None else (comm.rank, comm.size)
    return mpinn.send(x, (rank + 1) % size, comm=comm), mpinn.recv((rank - 1) % size, comm=comm)


@pytest.mark.parametrize("order", ["one after the other", "reversed", "drawn"])
def test_a_pipeline_has_the_gradients_of_one_process(mpi, order):
    """Backward passes in another order than the batches came, on each rank; and beside other verbs."""
    count = 5
    whole, stage = layers(mpi.size()), layers(mpi.size())[mpi.rank()]
    outputs = []
    if order == "one after the other":  # of one batch while later stages compute the next one
        for batch in batches(count):
            end, y = forward(mpi, stage, batch)
            end.backward()
            outputs.append(y)
            mpi.allreduce(torch.ones(3))
    else:
        ends, outputs = zip(*[forward(mpi, stage, batch) for batch in batches(count)], strict=True)
        drawn = random.Random(mpi.rank()).sample(range(count), count)
        for k in drawn if order == "drawn" else reversed(range(count)):
            ends[k].backward()
    network = torch.nn.Sequential(*whole)
    for batch, output in zip(batches(count), outputs, strict=True):
        y = network(batch)
        (y**2).sum().backward()
        if output is not None:
            torch.testing.assert_close(output, y, rtol=1e-12, atol=1e-12)
    for p, q in zip(stage.parameters(), whole[mpi.rank()].parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-11, atol=1e-11)


@pytest.mark.mpi(min_size=2)
def test_a_second_backward_pass_is_refused(mpi):
    """One gradient travels for each message: that of a second pass would be lost, or waited for."""
    if mpi.rank() == 0:
        w = torch.ones(2, requires_grad=True)
        links = [mpinn.send(w * 1, rank) for rank in range(1, mpi.size())]
        sum(links).backward(retain_graph=True)
        assert w.grad.tolist() == [mpi.size() - 1] * 2
        with pytest.raises(RuntimeError, match="second backward pass through the link"):
            links[0].backward()
    else:
        y = mpinn.recv(0)
        y.sum().backward()
        with pytest.raises(RuntimeError, match="second backward pass through what"):
            (y * 10).sum().backward()


@pytest.mark.parametrize("num_elements", [0, 1, 1000, 300_000, 3_000_000])
def test_in_a_ring_at_every_size(mpi, num_elements):
    """All send at once, also themselves; what is sent may be overwritten. The loss's scale is in gradients, once."""
    rank, size = mpi.rank(), mpi.size()
    x = torch.arange(num_elements, dtype=torch.float32).add(rank).requires_grad_()
    y = x * 2
    link = mpinn.send(y, (rank + 1) % size)
    y.detach().zero_()
    got = mpinn.recv((rank - 1) % size)
    expected = 2 * (torch.arange(num_elements, dtype=torch.float32) + (rank - 1) % size)
    torch.testing.assert_close(got.detach(), expected)
    (1024 * ((got * (rank + 1)).sum() + link)).backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, 1024 * 2 * ((rank + 1) % size + 1)))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.int64, torch.bool], ids=str
)
def test_dtypes_and_layouts(mpi, dtype):
    whole = torch.arange(24).reshape(2, 3, 4).add(mpi.rank()).to(dtype)
    there = torch.arange(24).reshape(2, 3, 4).add((mpi.rank() - 1) % mpi.size()).to(dtype)
    for x in (whole, whole.transpose(0, 2), whole[:, 1], whole[1, 1, 1]):
        link, got = in_a_ring(mpi, x)
        assert not link.requires_grad
        assert not got.requires_grad
        assert torch.equal(got, torch.as_strided(there, x.shape, x.stride(), x.storage_offset()))


def test_complex_activations_and_layers_that_work_in_place_on_what_has_come(mpi):
    x = torch.tensor([1 + 2j], requires_grad=True)
    link, got = in_a_ring(mpi, x * 1)
    (got.abs().sum() ** 2 + link).backward()
    torch.testing.assert_close(x.grad, 2 * x.detach())
    x = torch.tensor([-1.0, 2.0], requires_grad=True)
    link, got = in_a_ring(mpi, x * 1)
    (torch.nn.ReLU(inplace=True)(got).sum() + link).backward()
    assert x.grad.tolist() == [0.0, 1.0]


def test_without_gradients_or_with_frozen_stages(mpi):
    """No gradient is waited for; training goes on afterwards."""
    stage = layers(mpi.size())[mpi.rank()]
    with torch.no_grad():
        end, _ = forward(mpi, stage, batches(1)[0])
        assert not end.requires_grad
    forward(mpi, stage, batches(1)[0])[0].backward()
    assert all(p.grad is not None for p in stage.parameters())
    stage.requires_grad_(mpi.rank() == mpi.size() - 1)
    end, _ = forward(mpi, stage, batches(1)[0])
    assert end.requires_grad == (mpi.rank() == mpi.size() - 1)
    if end.requires_grad:
        end.backward()


def test_groups_have_messages_of_their_own(mpi):
    with mpi.split(mpi.rank() % 2) as comm:
        x = torch.full((2,), float(mpi.rank()), requires_grad=True)
        link, got = in_a_ring(mpi, x * 1, comm)
        assert got[0] % 2 == mpi.rank() % 2
        (got.sum() * 3 + link).backward()
        assert x.grad.tolist() == [3.0, 3.0]


@pytest.mark.mpi(min_size=2)
def test_sends_of_two_threads_are_not_mixed(mpi):
    """A message has two parts."""
    if mpi.rank() == 0:
        mpinn.send(torch.zeros(1), 1)

        def send(k):
            for _ in range(100):
                mpinn.send(torch.full((3 * k + 1,), float(k)), 1)

        threads = [threading.Thread(target=send, args=(k,)) for k in (1, 2)]
        for step in (threading.Thread.start, threading.Thread.join):
            for thread in threads:
                step(thread)
    else:
        mpinn.recv(0) if mpi.rank() == 1 else mpinn.functional.own_communicator(None)
    if mpi.rank() == 1:
        got = [mpinn.recv(0) for _ in range(200)]
        assert all((x == (x.numel() - 1) // 3).all() for x in got)
    mpi.barrier()


def test_wrong_arguments(mpi):
    with pytest.raises(ValueError, match="destination=99 is not a rank"):
        mpinn.send(torch.ones(2), 99)
    with pytest.raises(TypeError, match="source must be a rank"):
        mpinn.recv(torch.ones(2))
    with pytest.raises(TypeError, match="not list"):
        mpinn.send([1.0], 0)
    with pytest.raises(ValueError, match="plain dtypes"):
        mpinn.send(torch.ones(2).to(torch.float8_e5m2), 0)
