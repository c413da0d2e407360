import copy
import gc
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from torchmpi_py.errors import RanksDisagree

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(240)]


@pytest.fixture
def mpinn(mpi):
    return mpi.nn


def network(width=9):
    torch.manual_seed(1)
    layers = [torch.nn.Linear(4, width), torch.nn.Tanh(), torch.nn.Linear(width, width), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(width, 2))


def batch(rank, step=0):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(6, 4, generator=generator)


def loss(net, x):
    return net(x).square().mean()


def equal_gradients(a, b):
    """Equal but for the order in which MPI adds, which depends on how gradients are packed into messages."""
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("width", [9, 200])  # posted to MPI, and in the communication thread
def test_it_gives_what_synchronize_gradients_gives(mpi, mpinn, average, width):
    a = network(width)
    b = copy.deepcopy(a)
    backward = mpinn.register_async_backward(b, average=average)
    for step in range(3):
        x = batch(mpi.rank(), step)
        a.zero_grad()
        b.zero_grad(set_to_none=step % 2 == 0)
        loss(a, x).backward()
        mpinn.synchronize_gradients(a, average=average)
        loss(b, x).backward()
        backward.synchronize()
        backward.synchronize()
        equal_gradients(a, b)
        for name, parameter in b.named_parameters():
            mpi.check_with_allreduce(parameter.grad, name)


@pytest.mark.parametrize("frequency", [2, 3])
@pytest.mark.parametrize("every_pass", [True, False])
def test_frequency(mpi, mpinn, frequency, every_pass):
    a, b = network(), network()
    backward = mpinn.register_async_backward(b, frequency=frequency)
    for _ in range(2):
        a.zero_grad()
        b.zero_grad()
        for step in range(frequency):
            loss(a, batch(mpi.rank(), step)).backward()
            loss(b, batch(mpi.rank(), step)).backward()
            if every_pass:
                backward.synchronize()
            if step < frequency - 1:
                equal_gradients(a, b)  # this rank's own, so far
        backward.synchronize()
        mpinn.synchronize_gradients(a)
        equal_gradients(a, b)


def test_ranks_may_use_different_parts_of_a_network(mpi, mpinn):
    """Launches come in one order on all ranks, with zeros for what was not used."""

    class Forked(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.left, self.right = (torch.nn.Linear(4, 4) for _ in range(3))
            self.never = torch.nn.Linear(4, 4)

        def forward(self, x, left):
            x = self.first(x)
            return (self.left(x) if left else self.right(x)).sum()

    a = Forked()
    b = copy.deepcopy(a)
    backward = mpinn.register_async_backward(b)
    for step in range(4):
        left = (mpi.rank() + step) % 2 == 0
        a.zero_grad()
        b.zero_grad()
        a(batch(mpi.rank(), step), left).backward()
        b(batch(mpi.rank(), step), left).backward()
        mpinn.synchronize_gradients(a)
        backward.synchronize()
        for (name, p), q in zip(a.named_parameters(), b.named_parameters(), strict=True):
            assert (p.grad is None) == (q[1].grad is None), name
            if p.grad is not None:
                torch.testing.assert_close(p.grad, q[1].grad)
        assert b.never.weight.grad is None


def test_shared_parameters_are_reduced_once(mpi, mpinn):
    def tied():
        net = network()
        net[2].weight = torch.nn.Parameter(net[2].weight.detach().clone())
        net.append(torch.nn.Linear(2, 4)).append(net[0])
        return net

    a, b = tied(), tied()
    backward = mpinn.register_async_backward(b)
    loss(a, batch(mpi.rank())).backward()
    mpinn.synchronize_gradients(a)
    loss(b, batch(mpi.rank())).backward()
    backward.synchronize()
    equal_gradients(a, b)


def test_a_second_backward_before_synchronize_is_an_error(mpi, mpinn):
    net = network()
    backward = mpinn.register_async_backward(net)
    loss(net, batch(mpi.rank())).backward()
    with pytest.raises(RuntimeError, match=r"ran again before synchronize\(\).*frequency"):
        loss(net, batch(mpi.rank())).backward()
    backward.synchronize()


@pytest.mark.parametrize("blocks", [False, True])
def test_a_backward_that_breaks_off(mpi, mpinn, blocks):
    """Every rank loses the same pass; the next one is right."""

    class Breaks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ArithmeticError("planted")

    net = mpinn.BlockSequential(1, *network()) if blocks else network()
    backward = mpinn.register_async_backward(net)
    broken = torch.nn.Sequential(*net[:3])
    with pytest.raises(ArithmeticError, match="planted"):
        net[4](torch.tanh(Breaks.apply(broken(batch(mpi.rank()))))).sum().backward()
    net.zero_grad()
    reference = network()
    loss(net, batch(mpi.rank())).backward()
    backward.synchronize()
    loss(reference, batch(mpi.rank())).backward()
    mpinn.synchronize_gradients(reference)
    equal_gradients(reference, net)


def test_remove(mpi, mpinn):
    net = network()
    backward = mpinn.register_async_backward(net)
    loss(net, batch(mpi.rank())).backward()
    backward.remove()
    net.zero_grad()
    loss(net, batch(mpi.rank())).backward()
    alone = network()
    loss(alone, batch(mpi.rank())).backward()
    equal_gradients(alone, net)
    backward.remove()
    with pytest.raises(ValueError, match="frequency=0: give a whole number"):
        mpinn.register_async_backward(net, frequency=0)


@pytest.mark.parametrize("partitions", [1, 2, 3, 9])
def test_blocks_are_reduced_whole(mpi, mpinn, partitions):
    a = network()
    b = mpinn.BlockSequential(partitions, *network())
    backward = mpinn.register_async_backward(b)
    for step in range(3):
        x = batch(mpi.rank(), step)
        a.zero_grad()
        b.zero_grad(set_to_none=step % 2 == 0)
        loss(a, x).backward()
        mpinn.synchronize_gradients(a)
        loss(b, x).backward()
        backward.synchronize()
        equal_gradients(a, b)


def test_a_dropped_model_gives_its_memory_back(mpi, mpinn):
    net = network()
    backward = mpinn.register_async_backward(net)
    loss(net, batch(mpi.rank())).backward()
    backward.synchronize()
    weight = weakref.ref(net[0].weight)
    del net, backward
    gc.collect()
    assert weight() is None


def test_a_registration_nobody_holds_goes_on(mpi, mpinn):
    net = network()
    mpinn.register_async_backward(net)
    gc.collect()
    loss(net, batch(mpi.rank())).backward()
    with pytest.raises(RuntimeError, match="before synchronize"):
        loss(net, batch(mpi.rank())).backward()


def test_a_pass_of_none_of_the_registered_parameters(mpi, mpinn):
    net = network()
    net[0].requires_grad_(False)
    backward = mpinn.register_async_backward(net)
    net.requires_grad_(False)
    net[0].requires_grad_(True)
    loss(net, batch(mpi.rank())).backward()
    with pytest.raises(RuntimeError, match=r"0\.weight, 0\.bias: new or trainable only since"):
        backward.synchronize()
    backward.remove()


def test_parameters_that_become_trainable(mpi, mpinn):
    net = network()
    net[0].weight.requires_grad_(False)
    backward = mpinn.register_async_backward(net)
    loss(net, batch(mpi.rank())).backward()
    backward.synchronize()
    net[0].weight.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"0\.weight: new or trainable only since register_async_backward"):
        loss(net, batch(mpi.rank())).backward()


def test_a_module_converted_after_registration(mpi, mpinn):
    net = network()
    mpinn.register_async_backward(net)
    net.double()
    with pytest.raises(RuntimeError, match="another shape, dtype or device"):
        loss(net, batch(mpi.rank()).double()).backward()


def test_blocks_that_share_a_parameter(mpi, mpinn):
    """It is reduced once, also where two BlockSequentials hold it."""
    shared = torch.nn.Linear(4, 4)
    net = torch.nn.ModuleList([mpinn.BlockSequential(1, shared), mpinn.BlockSequential(1, shared)])
    backward = mpinn.register_async_backward(net, average=False)
    (net[0](torch.ones(1, 4)) + net[1](torch.ones(1, 4))).sum().backward()
    backward.synchronize()
    assert (shared.bias.grad == 2 * mpi.size()).all()


OVERLAPS = {
    "the same": (lambda net: net, lambda net: net),
    "a child": (lambda net: net, lambda net: net[2]),
    "a parent": (lambda net: net[2], lambda net: net),
    "a shared parameter": (lambda net: net[:3], lambda net: net[2:]),
}


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_second_registration_of_a_parameter_is_refused(mpi, mpinn, overlap):
    """With average=False it summed over the ranks twice. What was removed, or is gone, does not count."""
    net = network(600)  # several buckets
    first, second = (part(net) for part in OVERLAPS[overlap])
    backward = mpinn.register_async_backward(first, average=False)
    with pytest.raises(ValueError, match=r"gradients of (2\.|0\.)?weight.*already.*remove\(\)"):
        mpinn.register_async_backward(second, average=False)
    backward.remove()
    backward = mpinn.register_async_backward(second, average=False)
    loss(net, batch(mpi.rank())).backward()
    backward.synchronize()
    alone = network(600)
    loss(alone, batch(mpi.rank())).backward()
    for p, q in zip(OVERLAPS[overlap][1](alone).parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(q.grad, mpi.allreduce(p.grad.clone()), rtol=1e-5, atol=1e-7)
    del backward, second
    if overlap == "a shared parameter":  # net[2:] was a module of its own, and is gone
        gc.collect()
        mpinn.register_async_backward(net)


def test_registered_gradients_are_reduced_by_nobody_else(mpi, mpinn):
    from torchmpi_py.engine import AllReduceSGDEngine

    net = network()
    backward = mpinn.register_async_backward(net[2], average=False)
    loss(net, batch(mpi.rank())).backward()
    backward.synchronize()
    with pytest.raises(ValueError, match=r"synchronize_gradients: .*gradients of 2\.weight, 2\.bias already"):
        mpinn.synchronize_gradients(net, average=False)
    batches = [(batch(mpi.rank()), torch.zeros(6, 2))]
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


@pytest.mark.parametrize("frequency", [1, 2, 3])
@pytest.mark.parametrize("part", PARTS)
def test_a_backward_pass_in_parts_is_refused(mpi, mpinn, part, frequency):
    """Reentrant checkpointing: with average=False the first parts were reduced several times."""
    net = network(600)
    backward = mpinn.register_async_backward(net, average=False, frequency=frequency)

    def run():
        for step in range(frequency):
            PARTS[part](net, batch(mpi.rank(), step)).square().mean().backward()
            backward.synchronize()

    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        run()
    backward.remove()


def test_reentrant_checkpointing_of_the_whole(mpi, mpinn):
    """It is one pass, and so right, also after one that broke off."""
    net, alone = network(600), network(600)
    backward = mpinn.register_async_backward(net, average=False)

    def plant(module, grad):
        raise ArithmeticError("planted")

    planted = net[0].register_full_backward_pre_hook(plant)
    with pytest.raises(ArithmeticError, match="planted"):
        loss(net, batch(mpi.rank()).requires_grad_()).backward()
    planted.remove()
    net.zero_grad()
    for step in range(2):
        net.zero_grad()
        alone.zero_grad()
        reentrant(net, batch(mpi.rank(), step)).square().mean().backward()
        backward.synchronize()
        loss(alone, batch(mpi.rank(), step)).backward()
        mpinn.synchronize_gradients(alone, average=False)
        equal_gradients(alone, net)


@pytest.mark.parametrize("is_alike", [True, False])
@pytest.mark.parametrize("width", [3, 300])  # posted to MPI, and in the communication thread
def test_two_registrations_that_one_pass_reaches(mpi, mpinn, width, is_alike):
    """Their buckets have one size, so that no operation differs where the ranks reach them in another order."""
    a, b = (torch.nn.Linear(width, width, bias=False) for _ in "ab")
    registrations = [mpinn.register_async_backward(net) for net in (a, b)]
    factors = [(a, mpi.rank() + 1.0), (b, 10.0)]
    for _ in range(2):
        x = torch.ones(1, width)
        order = factors if is_alike or mpi.rank() < mpi.size() - 1 else factors[::-1]
        terms = [net(x).sum() * factor for net, factor in order]
        a.zero_grad()
        b.zero_grad()
        sum(terms).backward()
        if is_alike or mpi.size() == 1:
            for registered in registrations:
                registered.synchronize()
            assert torch.equal(a.weight.grad, torch.full((width, width), (mpi.size() + 1) / 2))
            assert torch.equal(b.weight.grad, torch.full((width, width), 10.0))
        else:
            for registered in registrations:
                with pytest.raises(RanksDisagree, match=r"in different orders.*ModuleList\(\[a, b\]\)"):
                    registered.synchronize()


def test_tensors_are_made_elsewhere_by_default(mpi, mpinn):
    """Where a program sets a default device, what travels beside gradients still lies on the host."""
    net = network()
    backward = mpinn.register_async_backward(net, frequency=2)
    loss(net, batch(mpi.rank())).backward()
    torch.set_default_device("meta")
    try:
        backward.reduce_now()
    finally:
        torch.set_default_device(None)
    mpi.check_with_allreduce(net[0].weight.grad, "gradient")
