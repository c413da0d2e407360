"""Activations that go to another rank: a pipeline of stages computes what one process does."""

import random
import threading

import pytest
import torch

from torchmpi_py import nn as mpinn

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(60)]

WIDTH = 9


def layers(size, dtype=torch.float64):
    torch.manual_seed(11)
    return [torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()).to(dtype) for _ in range(size)]


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


def orders(mpi, count):
    """Of the backward passes: as the batches came, reversed, another one on each rank."""
    drawn = random.Random(mpi.rank()).sample(range(count), count)
    return {"in order": range(count), "reversed": range(count)[::-1], "drawn": drawn}


@pytest.mark.parametrize("order", ["in order", "reversed", "drawn"])
def test_a_pipeline_has_the_gradients_of_one_process(mpi, order):
    count = 5
    whole, stage = layers(mpi.size()), layers(mpi.size())[mpi.rank()]
    ends = [forward(mpi, stage, batch) for batch in batches(count)]
    for k in orders(mpi, count)[order]:
        ends[k][0].backward()
    network = torch.nn.Sequential(*whole)
    for k, batch in enumerate(batches(count)):
        y = network(batch)
        (y**2).sum().backward()
        if ends[k][1] is not None:
            torch.testing.assert_close(ends[k][1], y, rtol=1e-12, atol=1e-12)
    for p, q in zip(stage.parameters(), whole[mpi.rank()].parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-11, atol=1e-11)


def test_one_batch_after_the_other(mpi):
    """Backward of one batch while later stages compute the next one, on the same communicator as other verbs."""
    whole, stage = layers(mpi.size()), layers(mpi.size())[mpi.rank()]
    for batch in batches(4):
        forward(mpi, stage, batch)[0].backward()
        mpi.allreduce(torch.ones(3))
    network = torch.nn.Sequential(*whole)
    for batch in batches(4):
        (network(batch) ** 2).sum().backward()
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
    """All send at once, also themselves; what is sent may be overwritten."""
    rank, size = mpi.rank(), mpi.size()
    x = torch.arange(num_elements, dtype=torch.float32).add(rank).requires_grad_()
    y = x * 2
    link = mpinn.send(y, (rank + 1) % size)
    y.detach().zero_()
    got = mpinn.recv((rank - 1) % size)
    expected = 2 * (torch.arange(num_elements, dtype=torch.float32) + (rank - 1) % size)
    torch.testing.assert_close(got.detach(), expected)
    ((got * (rank + 1)).sum() + link).backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, 2 * ((rank + 1) % size + 1)))


def test_in_a_ring_with_links_that_are_scaled(mpi):
    """The scale of a loss is in the gradient that comes back, once."""
    rank, size = mpi.rank(), mpi.size()
    x = torch.ones(3, requires_grad=True)
    link = mpinn.send(x * 1, (rank + 1) % size)
    got = mpinn.recv((rank - 1) % size)
    (1024 * (got.sum() + link)).backward()
    assert x.grad.tolist() == [1024] * 3


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.int64, torch.bool], ids=str
)
def test_dtypes_and_layouts(mpi, dtype):
    rank, size = mpi.rank(), mpi.size()
    whole = torch.arange(24).reshape(2, 3, 4).add(rank).to(dtype)
    for x in (whole, whole.transpose(0, 2), whole[:, 1], whole[1, 1, 1]):
        link = mpinn.send(x, (rank + 1) % size)
        assert not link.requires_grad
        got = mpinn.recv((rank - 1) % size)
        assert not got.requires_grad
        there = torch.arange(24).reshape(2, 3, 4).add((rank - 1) % size).to(dtype)
        view = torch.as_strided(there, x.shape, x.stride(), x.storage_offset())
        assert torch.equal(got, view)


def test_without_gradients(mpi):
    """In evaluation no gradient is waited for; training goes on afterwards."""
    stage = layers(mpi.size())[mpi.rank()]
    with torch.no_grad():
        end, _ = forward(mpi, stage, batches(1)[0])
        assert not end.requires_grad
    forward(mpi, stage, batches(1)[0])[0].backward()
    assert all(p.grad is not None for p in stage.parameters())


def test_frozen_stages_have_no_gradient_to_wait_for(mpi):
    stage = layers(mpi.size())[mpi.rank()].requires_grad_(mpi.rank() == mpi.size() - 1)
    end, _ = forward(mpi, stage, batches(1)[0])
    assert end.requires_grad == (mpi.rank() == mpi.size() - 1)
    if end.requires_grad:
        end.backward()


def test_groups_have_messages_of_their_own(mpi):
    with mpi.split(mpi.rank() % 2) as comm:
        x = torch.full((2,), float(mpi.rank()), requires_grad=True)
        link = mpinn.send(x * 1, (comm.rank + 1) % comm.size, comm=comm)
        got = mpinn.recv((comm.rank - 1) % comm.size, comm=comm)
        assert got[0] % 2 == mpi.rank() % 2
        (got.sum() * 3 + link).backward()
        assert x.grad.tolist() == [3.0, 3.0]


@pytest.mark.mpi(min_size=2)
def test_sends_of_two_threads_are_not_mixed(mpi):
    """A message has two parts."""
    if mpi.rank() == 0:
        mpi.nn.send(torch.zeros(1), 1)

        def send(k):
            for _ in range(200):
                mpi.nn.send(torch.full((3 * k + 1,), float(k)), 1)

        threads = [threading.Thread(target=send, args=(k,)) for k in (1, 2)]
        for step in (threading.Thread.start, threading.Thread.join):
            for thread in threads:
                step(thread)
    else:
        mpi.nn.recv(0) if mpi.rank() == 1 else mpinn.functional.own_communicator(None)
    if mpi.rank() == 1:
        got = [mpi.nn.recv(0) for _ in range(400)]
        assert all((x == (x.numel() - 1) // 3).all() for x in got)
    mpi.barrier()


def test_wrong_arguments(mpi):
    with pytest.raises(ValueError, match=r"nn.send: destination=99 is not a rank"):
        mpinn.send(torch.ones(2), 99)
    with pytest.raises(TypeError, match=r"nn.recv: source must be a rank"):
        mpinn.recv(torch.ones(2))
    with pytest.raises(TypeError, match=r"nn.send: x must be a torch.Tensor"):
        mpinn.send([1.0], 0)
    with pytest.raises(ValueError, match="plain dtypes"):
        mpinn.send(torch.ones(2).to(torch.float8_e5m2), 0)


def test_layers_may_work_in_place_on_what_has_come(mpi):
    x = torch.tensor([-1.0, 2.0], requires_grad=True)
    link = mpinn.send(x * 1, (mpi.rank() + 1) % mpi.size())
    y = torch.nn.ReLU(inplace=True)(mpinn.recv((mpi.rank() - 1) % mpi.size()))
    (y.sum() + link).backward()
    assert x.grad.tolist() == [0.0, 1.0]


def test_complex_activations(mpi):
    x = torch.tensor([1 + 2j], requires_grad=True)
    link = mpinn.send(x * 1, (mpi.rank() + 1) % mpi.size())
    got = mpinn.recv((mpi.rank() - 1) % mpi.size())
    (got.abs().sum() ** 2 + link).backward()
    torch.testing.assert_close(x.grad, 2 * x.detach())
