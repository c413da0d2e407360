"""Ranks that are in different steps, though their calls look the same; and programs that only look like it."""

import contextlib

import pytest
import torch

from torchmpi_py import errors, optim

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(120)]

BAD = 3  # the step that a rank leaves out
OPTIMIZERS = {
    "distributed": lambda m, **o: optim.DistributedOptimizer(torch.optim.SGD(m.parameters(), 0.1), m, **o),
    "sharded": lambda m, **o: optim.ShardedOptimizer(m.parameters(), torch.optim.SGD, lr=0.1, **o),
}
every_optimizer = pytest.mark.parametrize("kind", OPTIMIZERS)


def network():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2)).double()


def batch(rank, step):
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(3, 4, generator=generator, dtype=torch.float64)


def loss_of(module, rank, step):
    return module(batch(rank, step)).square().mean()


def bad(is_bad):
    if is_bad:
        raise ValueError("a bad batch")


def raises_before_forward(module, optimizer, rank, step, is_bad):
    optimizer.zero_grad()
    bad(is_bad)
    loss_of(module, rank, step).backward()
    optimizer.step()


def raises_before_step(module, optimizer, rank, step, is_bad):
    """The weights of the ranks then differ."""
    optimizer.zero_grad()
    loss_of(module, rank, step).backward()
    bad(is_bad)
    optimizer.step()


def raises_before_step_and_zeroes_last(module, optimizer, rank, step, is_bad):
    loss_of(module, rank, step).backward()
    try:
        bad(is_bad)
        optimizer.step()
    finally:
        optimizer.zero_grad()


LEAVES_OUT_UPDATE = [raises_before_step, raises_before_step_and_zeroes_last]


def run(mpi, module, optimizer, loop, bad_step):
    """Train, leaving a step out on the last rank; the number of the last step that began, and the error's text."""
    is_bad = mpi.rank() == mpi.size() - 1
    both = f"in its step {bad_step + 2}, another in its step {bad_step + 1},"
    for step in range(bad_step + 2):
        if is_bad and step == bad_step:
            with pytest.raises(ValueError, match="bad batch"):
                loop(module, optimizer, mpi.rank(), step, True)
        elif step <= bad_step:
            loop(module, optimizer, mpi.rank(), step, False)
        else:
            with pytest.raises(errors.RanksDisagree, match=both) as caught:
                loop(module, optimizer, mpi.rank(), step, False)
            return step, str(caught.value)
    raise AssertionError("no step was refused")


@pytest.mark.parametrize("loop", LEAVES_OUT_UPDATE)
def test_an_update_that_a_rank_leaves_out_is_an_error(mpi, loop):
    """The weights differ from then on. (A sharded update is collective, as is the first one of any optimizer.)"""
    if mpi.size() == 1:
        pytest.skip("one rank has nobody to differ from")
    module = network()
    optimizer = OPTIMIZERS["distributed"](module)
    last, message = run(mpi, module, optimizer, loop, BAD)
    assert last == BAD + 1
    assert f"this one in its step {BAD + 2 - (mpi.rank() == mpi.size() - 1)}," in message
    optimizer.remove()


def accumulate_unevenly(mpi, module, optimizer, step):
    optimizer.zero_grad()
    for half in range(2 if mpi.rank() or step != 2 else 1):
        loss_of(module, mpi.rank(), 2 * step + half).backward()
    optimizer.step()


def no_data_here_in_some_steps(mpi, module, optimizer, step):
    if mpi.rank() or step % 2:
        optimizer.zero_grad()
        for half in range(2):
            loss_of(module, mpi.rank(), 2 * step + half).backward()
    optimizer.step()
    optimizer.zero_grad()


def episodes_of_different_lengths(mpi, module, optimizer, step):
    optimizer.zero_grad()
    for _ in range(2):
        sum(loss_of(module, mpi.rank(), each) for each in range(1 + mpi.rank() + step)).backward()
    optimizer.step()


def rank_0_looks_at_outputs(mpi, module, optimizer, step):
    optimizer.zero_grad()
    for half in range(2):
        loss_of(module, mpi.rank(), 2 * step + half).backward()
    optimizer.step()
    if mpi.rank() == 0:
        loss_of(module, 0, 0)  # in training mode, and with a graph
        module.eval()
        with torch.no_grad():
            loss_of(module, 0, 0)
        module.train()


def a_forward_pass_is_tried_again(mpi, module, optimizer, step):
    optimizer.zero_grad()
    for half in range(2):
        try:
            bad(mpi.rank() == 0 and step == 2)
            loss = loss_of(module, mpi.rank(), 2 * step + half)
        except ValueError:
            loss = loss_of(module, mpi.rank(), 2 * step + half)
        loss.backward()
    optimizer.step()


def all_leave_out_a_batch_that_one_finds_bad(mpi, module, optimizer, step):
    is_bad = step == 2 and mpi.rank() == 0
    if not is_bad:
        optimizer.zero_grad()
    if mpi.allreduce(int(is_bad), op="max"):
        return
    for half in range(2):
        loss_of(module, mpi.rank(), 2 * step + half).backward()
    optimizer.step()


def rank_0_zeroes_once_more(mpi, module, optimizer, step):
    for _ in range(1 + (mpi.rank() == 0)):
        optimizer.zero_grad()
    for half in range(2):
        loss_of(module, mpi.rank(), 2 * step + half).backward()
    optimizer.step()


LEGITIMATE = [
    accumulate_unevenly,
    no_data_here_in_some_steps,
    episodes_of_different_lengths,
    rank_0_looks_at_outputs,
    a_forward_pass_is_tried_again,
    all_leave_out_a_batch_that_one_finds_bad,
    rank_0_zeroes_once_more,
]


@every_optimizer
@pytest.mark.parametrize("loop", LEGITIMATE)
def test_programs_that_keep_step_are_not_refused(mpi, kind, loop):
    module = network()
    optimizer = OPTIMIZERS[kind](module, backward_passes_per_step=2)
    for step in range(5):
        loop(mpi, module, optimizer, step)
    mpi_equal = mpi.allgather(torch.cat([p.detach().view(-1) for p in module.parameters()])).view(mpi.size(), -1)
    assert (mpi_equal == mpi_equal[0]).all()
    optimizer.remove()


def test_all_load_a_state_after_one_has_left_out_a_step(mpi):
    module = network()
    optimizer = OPTIMIZERS["distributed"](module)
    for step in range(4):
        saved = {name: x.clone() for name, x in module.state_dict().items()}, optimizer.state_dict()
        is_bad = step == 2 and mpi.rank() == 0
        with contextlib.suppress(ValueError):
            raises_before_step(module, optimizer, mpi.rank(), step, is_bad)
        if mpi.allreduce(int(is_bad), op="max"):
            module.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
    every = mpi.allgather(torch.cat([p.detach().view(-1) for p in module.parameters()])).view(mpi.size(), -1)
    assert (every == every[0]).all()
    optimizer.remove()


def test_grad_scaler_skips_steps_on_all_ranks(mpi):
    module = network()
    optimizer, scaler = OPTIMIZERS["distributed"](module), torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(4):
        optimizer.zero_grad()
        factor = float("inf") if step == 1 and mpi.rank() == 0 else 1.0
        scaler.scale(loss_of(module, mpi.rank(), step) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    optimizer.remove()


def test_in_join_ranks_may_leave_steps_out_and_go_on_together_after_it(mpi):
    module = network()
    optimizer = OPTIMIZERS["distributed"](module)
    for epoch in range(3):
        with mpi.join(optimizer):
            for step in range(2 + mpi.rank()):
                try:
                    raises_before_forward(module, optimizer, mpi.rank(), step, step == epoch and mpi.rank() == 1)
                except ValueError:
                    continue
        raises_before_forward(module, optimizer, mpi.rank(), epoch, False)
    optimizer.remove()


def test_two_networks_in_turns(mpi):
    """As a GAN's: each optimizer has counts of its own."""
    generator, critic = network(), network()
    ours = [OPTIMIZERS["distributed"](module) for module in (generator, critic)]
    for step in range(3):
        for _ in range(2):
            raises_before_forward(critic, ours[1], mpi.rank(), step, False)
        raises_before_forward(generator, ours[0], mpi.rank(), step, False)
    for each in ours:
        each.remove()
