"""Loops of users with DistributedOptimizer: what P ranks get from their shares is what one process gets from all."""

import copy

import pytest
import torch
from loops import assert_close, loss_of, pair, sides, train
from support import networks

from torchmpi_py import nn as mpinn
from torchmpi_py.optim import DistributedOptimizer

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(240)]

OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, 0.01),
}


def sgd(module, lr=0.1):
    return torch.optim.SGD(module.parameters(), lr)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_plain_loop_with_a_scheduler(mpi, name):
    module, alone = pair()
    ours = DistributedOptimizer(OPTIMIZERS[name](module.parameters()), module)
    theirs = OPTIMIZERS[name](alone.parameters())
    schedules = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in (ours, theirs)]
    for step in range(4):
        for schedule, (m, o, ranks) in zip(schedules, sides(mpi, module, ours, alone, theirs), strict=True):
            train(m, o, [step], ranks)
            schedule.step()
    assert_close(module, alone)
    mpinn.check_with_allreduce(module)
    assert ours.param_groups[0]["lr"] == theirs.param_groups[0]["lr"] < 0.1
    assert isinstance(ours, torch.optim.Optimizer)
    other = OPTIMIZERS[name](copy.deepcopy(module).parameters())
    other.load_state_dict(ours.state_dict())
    assert str(other.state_dict()) == str(ours.state_dict())


def test_closures(mpi):
    """L-BFGS with a line search: all ranks decide alike, by the mean loss."""
    module, alone = pair()
    ours, theirs = (
        torch.optim.LBFGS(m.parameters(), line_search_fn="strong_wolfe", max_iter=6) for m in (module, alone)
    )
    losses = []
    for m, o, ranks in sides(mpi, module, DistributedOptimizer(ours, module), alone, theirs):

        def closure(m=m, o=o, ranks=ranks):
            o.zero_grad()
            loss = loss_of(m, 0, ranks)
            loss.backward()
            return loss

        losses.append(o.step(closure))
    torch.testing.assert_close(*losses)
    assert_close(module, alone, 1e-6, 1e-6)
    mpinn.check_with_allreduce(module)


def test_parts_of_a_module_and_layers_added_later(mpi):
    """The optimizer's parameters alone are reduced; for a group that is added there is another wrapper."""
    module, alone = pair()
    ours, theirs = DistributedOptimizer(sgd(module[2]), module), sgd(alone[2])
    for step in range(4):
        for m, o, ranks in sides(mpi, module, ours, alone, theirs):
            if step == 2:
                getattr(o, "optimizer", o).add_param_group({"params": list(m[0].parameters())})
            if step == 2 and o is ours:
                ours.remove()
                o = ours = DistributedOptimizer(ours.optimizer, module)
            m.zero_grad()
            train(m, o, [step], ranks)
    assert_close(module, alone)


def test_two_networks(mpi):
    """A GAN's loop: the generator's pass does not train the critic, which takes two steps for each of the other's."""
    (first, alone), (second, also_alone) = pair(6, 5), pair(5, 1)
    optimizers = [DistributedOptimizer(sgd(m), m) for m in (first, second)], [sgd(alone), sgd(also_alone)]
    for generator, critic, (ours, theirs), ranks in (
        (first, second, optimizers[0], [mpi.rank()]),
        (alone, also_alone, optimizers[1], range(mpi.size())),
    ):
        for step in range(2):
            x = torch.cat([networks.batch(4, 6, rank=rank, step=step, dtype=torch.float64) for rank in ranks])
            for half in range(2):
                theirs.zero_grad()
                critic(generator(x).detach() + half).pow(2).mean().backward()
                theirs.step()
            ours.zero_grad()
            critic.requires_grad_(False)
            critic(generator(x)).pow(2).mean().backward()
            critic.requires_grad_(True)
            ours.step()
    assert_close(first, alone)
    assert_close(second, also_alone)


def test_blocks_of_which_some_are_not_optimized(mpi):
    module = mpinn.BlockSequential(2, *pair(6, 4, 4, 2)[0])
    train(module, DistributedOptimizer(sgd(module[2]), module), [0], [mpi.rank()])
    mpinn.check_with_allreduce(module)


def test_wrong_orders(mpi):
    module, _ = pair()
    ours = DistributedOptimizer(sgd(module), module, backward_passes_per_step=2)

    def backward(step):
        loss_of(module, step, [mpi.rank()]).backward()

    backward(0)
    with pytest.raises(RuntimeError, match="after 1 of 2 backward passes"):
        ours.zero_grad()
    backward(1)
    with pytest.raises(RuntimeError, match=r"backward\(\) ran again before step"):
        backward(2)
    ours.zero_grad()  # dropped on purpose
    backward(3)
    ours.step()  # one pass of two, on all ranks
    with pytest.raises(TypeError, match="state_dict"):
        copy.deepcopy(ours)


def test_bad_input(mpi):
    """An error on every rank, also of ranks whose own arguments are right."""
    module, alone = pair()
    with pytest.raises(ValueError, match=r"number by rank: \[4,? ?.*\]"):
        DistributedOptimizer(sgd(alone), module)
    with pytest.raises(ValueError, match="DistributedOptimizer: backward_passes_per_step=0"):
        DistributedOptimizer(sgd(module), module, backward_passes_per_step=0)
    with pytest.raises(TypeError, match="compression='bf16'"):
        DistributedOptimizer(sgd(module), module, compression="bf16")
    if mpi.size() == 1:
        return
    last = mpi.size() - 1
    own = alone if mpi.rank() == last else module
    with pytest.raises(ValueError, match=r"number by rank: .*0, 4\]"):
        DistributedOptimizer(sgd(own), module)
    DistributedOptimizer(sgd(module), module)  # gone at once, so that the next one may be made
    ours = DistributedOptimizer(sgd(module), module)
    with pytest.raises(ValueError, match=r"reduces the gradients of 0\.weight"):
        DistributedOptimizer(sgd(module), module)
    ours.remove()


def test_what_others_do_with_its_optimizer_is_told(mpi):
    module, _ = pair()
    ours = DistributedOptimizer(sgd(module[0]), module)
    ours.optimizer.add_param_group({"params": list(module[2].parameters())})
    with pytest.raises(RuntimeError, match=r"2\.weight, 2\.bias: added or made trainable .* create a new one"):
        loss_of(module, 0, [mpi.rank()]).backward()
    with pytest.raises(TypeError, match="cannot take new parameters"):
        ours.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
    ours.remove()
    with pytest.raises(RuntimeError, match=r"DistributedOptimizer: .* after remove\(\)"):
        ours.step()
    with pytest.raises(TypeError, match="expected a torch optimizer, found <class"):
        DistributedOptimizer(torch.optim.SGD, module)


def test_an_interrupted_wait_goes_on_in_the_step(mpi, monkeypatch):
    """A signal ends the wait of backward() for its reduction: step() waits for the same one."""
    module, alone = pair()
    ours, theirs = DistributedOptimizer(sgd(module), module), sgd(alone)
    plain, calls = ours.reduction._finish, []

    def interrupted():
        calls.append(None)
        if len(calls) == 1 and mpi.rank() == 0:
            raise KeyboardInterrupt
        plain()

    monkeypatch.setattr(ours.reduction, "_finish", interrupted)
    if mpi.rank() == 0:
        with pytest.raises(KeyboardInterrupt):
            loss_of(module, 0, [0]).backward()
        ours.step()
    else:
        train(module, ours, [0], [mpi.rank()])
    train(alone, theirs, [0], range(mpi.size()))
    assert_close(module, alone)
