"""Rules that remember: the running mean, and optimizers, which do as those of torch.optim; and how they are saved."""

import pytest
import torch

from torchmpi_py import paramserver as ps

pytestmark = pytest.mark.timeout(240)
in_a_job = pytest.mark.mpi
OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.01, "weight_decay": 0.01}),
    "adam": (torch.optim.Adam, {"lr": 0.01, "betas": (0.8, 0.99), "weight_decay": 0.01}),
}


def grads(count, steps, dtype=torch.float64):
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(count, generator=generator, dtype=dtype) for _ in range(steps)]


def by_torch(name, start, given, options):
    """What torch's optimizer makes of it."""
    p = start.clone().requires_grad_()
    optimizer = OPTIMIZERS[name][0]([p], **options)
    for grad in given:
        p.grad = grad.clone()
        optimizer.step()
    return p.detach()


@in_a_job
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_server_steps_as_torch_does(mpi, comm, name, dtype):
    """Ranks take turns: the sends of all are the steps of one optimizer."""
    count, options = 2 * mpi.size() + 1, OPTIMIZERS[name][1]
    start, given = grads(count, 1, dtype)[0], grads(count, 2 * mpi.size(), dtype)
    server = ps.init(start, comm=comm, optimizer=name)
    for turn, grad in enumerate(given):
        if turn % mpi.size() == mpi.rank():
            server.send(grad, name, **options).wait()
        mpi.barrier()
    torch.testing.assert_close(server.receive().wait(), by_torch(name, start, given, options))
    server.free()


@in_a_job
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_is_saved_goes_on_as_if_nothing_had_been(mpi, comm, name, tmp_path):
    """Three steps, saved, taken up by another server, on other ranks, and three more."""
    options = OPTIMIZERS[name][1]
    start, *given = grads(11, 7)
    server = ps.init(start, comm=comm, optimizer=name)
    if mpi.rank() == 0:
        for grad in given[:3]:
            server.send(grad, name, **options)
        torch.save(server.state_dict(), tmp_path / "state")
        alone = torch.load(tmp_path / "state")
    mpi.barrier()
    server.free()
    with mpi.split(mpi.rank()) as one:  # a server for each number of ranks: one, and all
        for where in (one, comm):
            again = ps.init(torch.zeros(11, dtype=torch.float64), comm=where, optimizer=name)
            if mpi.rank() == 0:
                again.load_state_dict(alone)
                for grad in given[3:]:
                    again.send(grad, name, **options).wait()
                torch.testing.assert_close(again.receive().wait(), by_torch(name, start, given, options))
            again.free()


@in_a_job
def test_saved_from_another_kind(mpi):
    server = ps.init(torch.zeros(5), optimizer="adam")
    state = server.state_dict()
    other = ps.init(torch.zeros(5))
    with pytest.raises(
        ValueError, match=r"saved from a server of shape \(5,\), torch.float32, optimizer 'adam' with 2 slots, but"
    ):
        other.load_state_dict(state)
    for nothing in ({}, state | {"values": 1}):
        with pytest.raises(ValueError, match="this is no state_dict"):
            other.load_state_dict(nothing)
    ps.free_all()


@in_a_job
def test_the_running_mean(mpi, comm):
    """In whichever order they come; begun anew by a copy, whose value does not count."""
    count, size = 3 * mpi.size() + 1, mpi.size()
    server = ps.init(torch.full((count,), 99.0), comm=comm)
    for start in range(2):
        values = [torch.arange(count) * (rank + 1.0) + start for rank in range(size)]
        server.send(values[mpi.rank()], "average").wait()
        mpi.barrier()
        torch.testing.assert_close(server.receive().wait(), sum(values) / size)
        mpi.barrier()
        if mpi.rank() == size - 1:
            server.send(torch.full((count,), 7.0), "copy").wait()
        mpi.barrier()
    server.free()


@in_a_job
def test_take_in(mpi, comm):
    """The gradients of all ranks are summed; every rank does the step of its shard; what was summed is zero again."""
    size, me, count = mpi.size(), mpi.rank(), 2 * mpi.size() - 1
    start, *given = grads(count, 3 * size + 1)
    weights, sums = ps.init(start, comm=comm, optimizer="sgd"), ps.init(torch.zeros_like(start), comm=comm)
    options = {"lr": 0.1, "momentum": 0.9}
    for turn in range(3):
        sums.send(given[turn * size + me]).wait()
        mpi.barrier()
        weights.take_in(sums, "sgd", **options).wait()
        mpi.barrier()
    summed = [sum(given[turn * size : (turn + 1) * size]) for turn in range(3)]
    torch.testing.assert_close(weights.receive().wait(), by_torch("sgd", start, summed, options))
    assert not sums.receive().wait().any()
    with pytest.raises(ValueError, match="take_in: source must be another server"):
        weights.take_in(weights)
    ps.free_all()


@in_a_job
def test_registered_optimizers(mpi, comm):
    def largest(shard, payload, memory, *, keep=1):
        torch.maximum(memory.slots[0], payload, out=memory.slots[0])
        memory.times.add_(1)
        shard.copy_(memory.slots[0] * keep + memory.times.item())

    ps.register_rule("largest", largest, num_slots=1)
    server = ps.init(torch.zeros(2 * mpi.size()), comm=comm, optimizer="largest")
    server.send(torch.arange(2.0 * mpi.size()) * (mpi.rank() + 1), "largest", keep=2).wait()
    mpi.barrier()
    assert torch.equal(server.receive().wait(), torch.arange(2.0 * mpi.size()) * mpi.size() * 2 + mpi.size())
    server.free()


@in_a_job
def test_momentum_that_begins_later(mpi):
    start, *given = grads(6, 4)
    options = [{"lr": 0.1, "momentum": momentum, "dampening": 0.5 * momentum} for momentum in (0.0, 0.9, 0.9)]
    with mpi.split(mpi.rank()) as alone:
        server = ps.init(start, comm=alone, optimizer="sgd")
        p = start.clone().requires_grad_()
        optimizer = torch.optim.SGD([p], lr=0.1)
        for grad, option in zip(given, options, strict=False):
            server.send(grad, "sgd", **option)
            p.grad = grad.clone()
            optimizer.param_groups[0].update(option)
            optimizer.step()
        torch.testing.assert_close(server.receive().wait(), p.detach())
        server.free()


@in_a_job
def test_mistakes_with_optimizers(mpi):
    with pytest.raises(ValueError, match="optimizer='rmsprop' is unknown; known optimizers: sgd, adagrad, adam"):
        ps.init(torch.zeros(3), optimizer="rmsprop")
    server = ps.init(torch.zeros(3), optimizer="sgd")
    with pytest.raises(ValueError, match=r"made for optimizer 'sgd': paramserver.init\(tensor, optimizer='adam'\)"):
        server.send(torch.zeros(3), "adam")
    with pytest.raises(TypeError, match="'sgd' does not take the options"):
        server.send(torch.zeros(3), "sgd", beta=3)
    whole = ps.init(torch.zeros(3, dtype=torch.int32))
    for rule in ("average", "elastic"):
        with pytest.raises(ValueError, match=r"needs floating-point numbers.*; this server holds torch\.int32"):
            whole.send(torch.zeros(3, dtype=torch.int32), rule)
    ps.free_all()


@in_a_job
def test_no_mean_in_low_precision(mpi):
    """With 8 bits of mantissa the mean of a thousand values stands still."""
    server = ps.init(torch.zeros(3, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"'average' needs floating-point numbers of at least 32 bits; .*bfloat16"):
        server.send(torch.zeros(3, dtype=torch.bfloat16), "average")
    server.free()
