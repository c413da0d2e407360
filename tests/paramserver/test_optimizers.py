"""Rules that remember: the running mean, and optimizers, which do as those of torch.optim; and how they are saved."""

import pytest
import torch
from served_networks import saved_and_loaded

from torchmpi_py import paramserver as ps

pytestmark = pytest.mark.mpi
OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01}, torch.float64),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.01, "weight_decay": 0.01}, torch.float32),
    "adam": (torch.optim.Adam, {"lr": 0.01, "betas": (0.8, 0.99), "weight_decay": 0.01}, torch.float64),
}


def grads(count, steps, dtype=torch.float64):
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(count, generator=generator, dtype=dtype) for _ in range(steps)]


def options_at(name, step):
    """The options of a step; momentum begins in the second one."""
    options = OPTIMIZERS[name][1]
    return options | {"momentum": 0.0, "dampening": 0.0} if name == "sgd" and step == 0 else options


def by_torch(name, start, given):
    """What torch's optimizer makes of it."""
    p = start.clone().requires_grad_()
    optimizer = OPTIMIZERS[name][0]([p], **options_at(name, 0))
    for step, grad in enumerate(given):
        optimizer.param_groups[0].update(options_at(name, step))
        p.grad = grad.clone()
        optimizer.step()
    return p.detach()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_server_steps_as_torch_does(mpi, size, me, comm, name):
    """Ranks take turns. What is saved goes on as if nothing had been, at one rank, and at all."""
    count, half = 2 * size + 1, size + 1
    start, *given = grads(count, 2 * half + 1, OPTIMIZERS[name][2])

    def send(server, steps, senders):
        for step in steps:
            if me in senders and senders[step % len(senders)] == me:
                server.send(given[step], name, **options_at(name, step)).wait()
            if len(senders) > 1:
                mpi.barrier()

    server = ps.init(start, comm=comm, optimizer=name)
    send(server, range(half), range(size))
    torch.testing.assert_close(server.receive().wait(), by_torch(name, start, given[:half]))
    state = saved_and_loaded(server.state_dict())
    mpi.barrier()
    server.free()
    with mpi.split(me) as one:
        for where, senders in ((one, [me]), (comm, range(size))):
            again = ps.init(torch.zeros_like(start), comm=where, optimizer=name)
            if me == senders[0]:
                again.load_state_dict(state)
            mpi.barrier(where)
            send(again, range(half, 2 * half), senders)
            torch.testing.assert_close(again.receive().wait(), by_torch(name, start, given))
            again.free()


def test_saved_from_another_kind(mpi):
    state = ps.init(torch.zeros(5), optimizer="adam").state_dict()
    other = ps.init(torch.zeros(5))
    with pytest.raises(ValueError, match=r"found \(5,\), .*, 'adam', 2; pass the state"):
        other.load_state_dict(state)
    for nothing in ({}, state | {"values": 1}):
        with pytest.raises(ValueError, match=r"pass a server's state_dict\(\)"):
            other.load_state_dict(nothing)
    with pytest.raises(ValueError, match=r"created without an optimizer; use paramserver.init\(tensor, optimizer="):
        other.send(torch.zeros(5), "sgd")


def test_the_running_mean(mpi, comm):
    """In whichever order they come; begun anew by a copy, whose value does not count, and when it was taken in."""
    count, size = 3 * mpi.size() + 1, mpi.size()
    server, taken = ps.init(torch.full((count,), 99.0), comm=comm), ps.init(torch.zeros(count), comm=comm)
    expected = torch.zeros(count)
    for start in range(3):
        values = [torch.arange(count) * (rank + 1.0) + start for rank in range(size)]
        server.send(values[mpi.rank()], "average").wait()
        mpi.barrier()
        torch.testing.assert_close(server.receive().wait(), sum(values) / size)
        mpi.barrier()
        if start == 0 and mpi.rank() == size - 1:
            server.send(torch.full((count,), 7.0), "copy").wait()
        elif start > 0:
            taken.take_in(server).wait()
            expected += sum(values) / size
        mpi.barrier()
    torch.testing.assert_close(taken.receive().wait(), expected)
    with pytest.raises(ValueError, match="take_in: wrong source; pass another server"):
        taken.take_in(taken)
