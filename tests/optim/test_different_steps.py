"""Ranks that are in different steps, though their calls look the same; and programs that only look like it."""

import contextlib

import pytest
import torch
from loops import loss_of, train
from support import networks

from torchmpi_py import errors, nn as mpinn, optim

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(120)]

BAD = 3  # the step that a rank leaves out
OPTIMIZERS = {
    "distributed": lambda m, **o: optim.DistributedOptimizer(torch.optim.SGD(m.parameters(), 0.1), m, **o),
    "sharded": lambda m, **o: optim.ShardedOptimizer(m.parameters(), torch.optim.SGD, lr=0.1, **o),
}


def made(kind="distributed", **options):
    module = networks.perceptron(4, 6, 2)
    return module, OPTIMIZERS[kind](module, **options)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("zeroes_last", [False, True])
def test_an_update_that_a_rank_leaves_out_is_an_error(mpi, zeroes_last):
    """The weights differ from then on. (A sharded update is collective, as is the first one of any optimizer.)"""
    module, optimizer = made()
    leaves_out = mpi.rank() == mpi.size() - 1

    def step(number):
        if not zeroes_last:
            optimizer.zero_grad()
        loss_of(module, number, [mpi.rank()]).backward()
        if number != BAD or not leaves_out:
            optimizer.step()
        if zeroes_last:
            optimizer.zero_grad()

    for number in range(BAD + 1):
        step(number)
    with pytest.raises(errors.RanksDisagree, match=f"step {BAD + 2}, another in step {BAD + 1},") as caught:
        step(BAD + 1)
    assert f"this rank in step {BAD + 1 if leaves_out else BAD + 2}." in str(caught.value)


def no_data_here_in_some_steps(mpi, module, optimizer, step):
    """And in another one less than the others have."""
    if mpi.rank() or step % 2:
        optimizer.zero_grad()
        for half in range(2 if mpi.rank() or step != 3 else 1):
            loss_of(module, 2 * step + half, [mpi.rank()]).backward()
    optimizer.step()
    optimizer.zero_grad()


def episodes_of_different_lengths(mpi, module, optimizer, step):
    optimizer.zero_grad()
    for _ in range(2):
        sum(loss_of(module, each, [mpi.rank()]) for each in range(1 + mpi.rank() + step)).backward()
    optimizer.step()


def rank_0_looks_at_outputs_and_zeroes_once_more(mpi, module, optimizer, step):
    train(module, optimizer, [step], [mpi.rank()], passes=2)
    if mpi.rank() == 0:
        loss_of(module, 0, [0])  # in training mode, and with a graph
        module.eval()
        with torch.no_grad():
            loss_of(module, 0, [0])
        module.train()
        optimizer.zero_grad()


def all_leave_out_a_batch_that_one_finds_bad(mpi, module, optimizer, step):
    is_bad = step == 2 and mpi.rank() == 0
    if not is_bad:
        optimizer.zero_grad()
    if not mpi.allreduce(int(is_bad), op="max"):
        train(module, optimizer, [step], [mpi.rank()], passes=2)


LEGITIMATE = [
    no_data_here_in_some_steps,
    episodes_of_different_lengths,
    rank_0_looks_at_outputs_and_zeroes_once_more,
    all_leave_out_a_batch_that_one_finds_bad,
]


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("loop", LEGITIMATE)
def test_programs_that_keep_step_are_not_refused(mpi, kind, loop):
    module, optimizer = made(kind, backward_passes_per_step=2)
    for step in range(4):
        loop(mpi, module, optimizer, step)
    mpinn.check_with_allreduce(module)


def test_all_load_a_state_after_one_has_left_out_a_step(mpi):
    module, optimizer = made()
    for step in range(3):
        saved = networks.flat(module), optimizer.state_dict()
        loss_of(module, step, [mpi.rank()]).backward()
        is_bad = step == 1 and mpi.rank() == 0
        if not is_bad:
            optimizer.step()
        optimizer.zero_grad()
        if mpi.allreduce(int(is_bad), op="max"):
            networks.fill(module, saved[0])
            optimizer.load_state_dict(saved[1])
    mpinn.check_with_allreduce(module)


def test_in_join_ranks_may_leave_steps_out_and_go_on_together_after_it(mpi):
    module, optimizer = made()
    for epoch in range(3):
        with mpi.join(optimizer):
            for step in range(2 + mpi.rank()):
                with contextlib.suppress(ValueError):
                    if step == epoch and mpi.rank() == 1:
                        raise ValueError("a bad batch")
                    train(module, optimizer, [step], [mpi.rank()])
        train(module, optimizer, [epoch], [mpi.rank()])
    mpinn.check_with_allreduce(module)
