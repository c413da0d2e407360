"""Gradients that are reduced during the backward pass: what comes out, and which programs are refused."""

import copy
import gc

import pytest
import torch
from support import networks
from torch.utils.checkpoint import checkpoint

from torchmpi_py import nn as mpinn
from torchmpi_py.engine import AllReduceSGDEngine
from torchmpi_py.errors import RanksDisagree

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(240)]


def network(width=9):
    return networks.perceptron(4, width, width, 2)


def loss(net, rank, step=0):
    return net(networks.batch(6, 4, rank=rank, step=step)).square().mean()


def equal_gradients(a, b):
    """Equal but for the order in which MPI adds, which depends on how gradients are packed into messages."""
    torch.testing.assert_close(networks.flat_gradients(a), networks.flat_gradients(b), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("width", "average", "partitions"),
    [(9, True, 0), (200, False, 0), (9, False, 1), (9, True, 2), (200, True, 9)],  # small: posted to MPI; in a thread
)
def test_it_gives_what_synchronize_gradients_gives(mpi, width, average, partitions):
    a = network(width)
    b = mpinn.BlockSequential(partitions, *network(width)) if partitions else copy.deepcopy(a)
    backward = mpinn.register_async_backward(b, average=average)
    for step in range(3):
        a.zero_grad()
        b.zero_grad(set_to_none=step % 2 == 0)
        loss(a, mpi.rank(), step).backward()
        mpinn.synchronize_gradients(a, average=average)
        loss(b, mpi.rank(), step).backward()
        backward.synchronize()
        backward.synchronize()
        equal_gradients(a, b)
        for name, parameter in b.named_parameters():
            mpi.check_with_allreduce(parameter.grad, name)


@pytest.mark.parametrize(("frequency", "every_pass"), [(2, True), (3, False)])
def test_frequency(mpi, frequency, every_pass):
    a, b = network(), network()
    backward = mpinn.register_async_backward(b, frequency=frequency)
    for _ in range(2):
        a.zero_grad()
        b.zero_grad()
        for step in range(frequency):
            loss(a, mpi.rank(), step).backward()
            loss(b, mpi.rank(), step).backward()
            if every_pass:
                backward.synchronize()
            if step < frequency - 1:
                equal_gradients(a, b)  # this rank's own, so far
        backward.synchronize()
        mpinn.synchronize_gradients(a)
        equal_gradients(a, b)


def test_ranks_may_use_different_parts_of_a_network(mpi):
    """Launches come in one order on all ranks, with zeros for what was not used."""

    class Forked(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.left, self.right, self.never = (networks.perceptron(4, 4) for _ in range(4))

        def forward(self, x, left):
            x = self.first(x)
            return (self.left(x) if left else self.right(x)).sum()

    a, b = Forked(), Forked()
    backward = mpinn.register_async_backward(b)
    for step in range(3):
        for m in (a, b):
            m.zero_grad()
            m(networks.batch(6, 4, rank=mpi.rank(), step=step), (mpi.rank() + step) % 2 == 0).backward()
        mpinn.synchronize_gradients(a)
        backward.synchronize()
        equal_gradients(a, b)
        assert [p.grad is None for p in a.parameters()] == [p.grad is None for p in b.parameters()]
        assert b.never[0].weight.grad is None


def test_shared_parameters_are_reduced_once(mpi):
    """Also where two BlockSequentials hold one."""

    def tied():
        net = network()
        net[2].weight = torch.nn.Parameter(net[2].weight.detach().clone())
        return net.append(torch.nn.Linear(2, 4)).append(net[0])

    a = tied()
    b = copy.deepcopy(a)
    backward = mpinn.register_async_backward(b)
    loss(a, mpi.rank()).backward()
    mpinn.synchronize_gradients(a)
    loss(b, mpi.rank()).backward()
    backward.synchronize()
    equal_gradients(a, b)
    shared = torch.nn.Linear(4, 4)
    net = torch.nn.ModuleList([mpinn.BlockSequential(1, shared), mpinn.BlockSequential(1, shared)])
    backward = mpinn.register_async_backward(net, average=False)
    (net[0](torch.ones(1, 4)) + net[1](torch.ones(1, 4))).sum().backward()
    backward.synchronize()
    assert (shared.bias.grad == 2 * mpi.size()).all()


@pytest.mark.parametrize("blocks", [False, True])
def test_a_backward_that_breaks_off(mpi, blocks):
    """Every rank loses the same pass; the next one is right."""

    def plant(grad):
        raise ArithmeticError("planted")

    net = mpinn.BlockSequential(1, *network()) if blocks else network()
    backward = mpinn.register_async_backward(net)
    between = torch.nn.Sequential(*net[:3])(networks.batch(6, 4, rank=mpi.rank()))
    between.register_hook(plant)
    with pytest.raises(ArithmeticError, match="planted"):
        net[4](torch.tanh(between)).sum().backward()
    net.zero_grad()
    reference = network()
    loss(net, mpi.rank()).backward()
    backward.synchronize()
    loss(reference, mpi.rank()).backward()
    mpinn.synchronize_gradients(reference)
    equal_gradients(reference, net)


def test_remove_and_what_is_refused(mpi):
    net, alone = network(), network()
    backward = mpinn.register_async_backward(net)
    loss(net, mpi.rank()).backward()
    backward.remove()
    net.zero_grad()
    for m in (net, alone):
        loss(m, mpi.rank()).backward()
    equal_gradients(alone, net)
    backward.remove()
    mpinn.register_async_backward(net.double())
    net.float()
    with pytest.raises(RuntimeError, match="changed their shape, dtype or device"):
        loss(net, mpi.rank()).backward()
    with pytest.raises(ValueError, match="frequency=0"):
        mpinn.register_async_backward(net, frequency=0)


def test_a_registration_lives_as_long_as_its_model(mpi):
    """Also if nobody holds the registration. A second pass before ``synchronize`` is an error."""
    net = network()
    mpinn.register_async_backward(net)
    gc.collect()
    loss(net, mpi.rank()).backward()
    with pytest.raises(RuntimeError, match=r"ran again before synchronize\(\).*frequency"):
        loss(net, mpi.rank()).backward()


OVERLAPS = {
    "a parent": (lambda net: net[2], lambda net: net),
    "a shared parameter": (lambda net: net[:3], lambda net: net[2:]),
}


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_second_registration_of_a_parameter_is_refused(mpi, overlap):
    """With average=False it summed over the ranks twice. What was removed, or is gone, does not count."""
    net, alone = network(600), network(600)  # several buckets
    first, second = (part(net) for part in OVERLAPS[overlap])
    backward = mpinn.register_async_backward(first, average=False)
    with pytest.raises(ValueError, match=r"already reduces the gradients of (2|0)\.weight.*remove\(\)"):
        mpinn.register_async_backward(second, average=False)
    backward.remove()
    backward = mpinn.register_async_backward(second, average=False)
    for m in (net, alone):
        loss(m, mpi.rank()).backward()
    backward.synchronize()
    exact = mpi.allreduce(networks.flat_gradients(OVERLAPS[overlap][1](alone)))
    torch.testing.assert_close(networks.flat_gradients(second), exact, rtol=1e-4, atol=1e-6)
    del backward, second
    if overlap == "a shared parameter":  # net[2:] was a module of its own, and is gone
        gc.collect()
        mpinn.register_async_backward(net)


def test_registered_gradients_are_reduced_by_nobody_else(mpi):
    net = network()
    backward = mpinn.register_async_backward(net[2], average=False)
    loss(net, mpi.rank()).backward()
    backward.synchronize()
    with pytest.raises(ValueError, match=r"synchronize_gradients: .*reduces .* gradients of 2\.weight, 2\.bias"):
        mpinn.synchronize_gradients(net, average=False)
    batches = [(networks.batch(6, 4, rank=mpi.rank()), torch.zeros(6, 2))]
    for asynchronous in (True, False) if mpi.size() > 1 else ():
        engine = AllReduceSGDEngine(asynchronous=asynchronous)
        with pytest.raises(ValueError, match="already"):
            engine.train(network=net, criterion=torch.nn.MSELoss(), iterator=batches, lr=0.1, maxepoch=1)
    backward.remove()
    mpinn.synchronize_gradients(net, average=False)


def reentrant(module, x):
    return checkpoint(module, x.requires_grad_(), use_reentrant=True)


PARTS = {
    "the last layers": lambda net, x: reentrant(net[2:], net[:2](x)),
    "the first layers": lambda net, x: net[3:](reentrant(net[:3], x)),
    "all, in two": lambda net, x: reentrant(net[2:], reentrant(net[:2], x)),
    "one twice": lambda net, x: net[4](reentrant(net[2], reentrant(net[2], net[0](x)))),
}


@pytest.mark.parametrize(
    ("part", "frequency"),
    [("the last layers", 1), ("the first layers", 2), ("all, in two", 1), ("all, in two", 3), ("one twice", 2)],
)
def test_a_backward_pass_in_parts_is_refused(mpi, part, frequency):
    """Reentrant checkpointing: with average=False the first parts were reduced several times."""
    net = network(600)
    backward = mpinn.register_async_backward(net, average=False, frequency=frequency)

    def run():
        for step in range(frequency):
            PARTS[part](net, networks.batch(6, 4, rank=mpi.rank(), step=step)).square().mean().backward()
            backward.synchronize()

    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        run()
    backward.remove()


def test_reentrant_checkpointing_of_the_whole(mpi):
    """It is one pass, and so right, also after one that broke off."""
    net, alone = network(600), network(600)
    backward = mpinn.register_async_backward(net, average=False)

    def plant(module, grad):
        raise ArithmeticError("planted")

    planted = net[0].register_full_backward_pre_hook(plant)
    with pytest.raises(ArithmeticError, match="planted"):
        net(networks.batch(6, 4).requires_grad_()).sum().backward()
    planted.remove()
    for step in range(2):
        net.zero_grad()
        alone.zero_grad()
        reentrant(net, networks.batch(6, 4, rank=mpi.rank(), step=step)).square().mean().backward()
        backward.synchronize()
        loss(alone, mpi.rank(), step).backward()
        mpinn.synchronize_gradients(alone, average=False)
        equal_gradients(alone, net)


@pytest.mark.parametrize(("width", "is_alike"), [(3, True), (3, False), (300, False)])  # posted to MPI; in a thread
def test_two_registrations_that_one_pass_reaches(mpi, width, is_alike):
    """Their buckets have one size, so that no operation differs where the ranks reach them in another order."""
    a, b = (torch.nn.Linear(width, width, bias=False) for _ in "ab")
    registrations = [mpinn.register_async_backward(net) for net in (a, b)]
    factors = [(a, mpi.rank() + 1.0), (b, 10.0)]
    order = factors if is_alike or mpi.rank() < mpi.size() - 1 else factors[::-1]
    for _ in range(2):
        a.zero_grad()
        b.zero_grad()
        sum(net(torch.ones(1, width)).sum() * factor for net, factor in order).backward()
        for registered in registrations:
            if is_alike or mpi.size() == 1:
                registered.synchronize()
            else:
                with pytest.raises(RanksDisagree, match=r"in different orders.*ModuleList\(\[a, b\]\)"):
                    registered.synchronize()
        if is_alike or mpi.size() == 1:
            assert torch.equal(a.weight.grad, torch.full((width, width), (mpi.size() + 1) / 2))
            assert torch.equal(b.weight.grad, torch.full((width, width), 10.0))
