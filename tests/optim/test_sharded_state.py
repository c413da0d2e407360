"""States of a sharded optimizer: of parameters that some lack, and to and from plain optimizers."""

import copy

import pytest
import torch
from loops import assert_close, pair, train

from torchmpi_py import errors, optim

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(240)]

SIZES = (12, 9, 8, 5)
ELEMENTWISE = ["ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]


def test_a_state_that_lacks_some_parameters(mpi):
    """As of a layer that was not used yet: it counts as zero; numbers of steps that differ cannot share a slice."""
    module, alone = pair(*SIZES)
    theirs = torch.optim.Adam(alone.parameters())
    alone[4].requires_grad_(False)
    train(alone, theirs, range(2), [0])
    ours = optim.ShardedOptimizer(module.parameters(), torch.optim.Adam)
    ours.load_state_dict(theirs.state_dict())
    state, expected = ours.state_dict()["state"], theirs.state_dict()["state"]
    for number, entries in expected.items():
        assert torch.equal(state[number]["exp_avg"], entries["exp_avg"])
        assert state[number]["step"] == entries["step"] == 2
    alone[4].requires_grad_(True)
    train(alone, theirs, [2], [0])
    with pytest.raises(ValueError, match=r"step is .*round_robin"):
        ours.load_state_dict(theirs.state_dict())
    apart = optim.ShardedOptimizer(pair(*SIZES)[0].parameters(), torch.optim.Adam, placement="round_robin")
    apart.load_state_dict(theirs.state_dict())
    assert apart.state_dict()["state"][5]["step"] == 1


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_a_state_that_lacks_a_parameter_starts_as_torch_starts_it(mpi, name):
    """Entries of the parameter's shape: those of a plain optimizer after a first gradient of zero."""
    kind = getattr(torch.optim, name)
    options = {"lr": 0.25, "momentum": 0.9} if name in ("SGD", "RMSprop") else {"lr": 0.25}
    (module, alone), (fresh, _) = pair(12, 9, 7), pair(12, 9, 7)
    plain, starts = kind(alone.parameters(), **options), kind(fresh.parameters(), **options)
    alone[2].weight.requires_grad_(False)
    train(alone, plain, [0], [0])
    state = plain.state_dict()
    state["state"].pop(2, None)  # Adagrad has it from the start
    ours = optim.ShardedOptimizer(module.parameters(), kind, **options)
    ours.load_state_dict(state)
    for p in fresh.parameters():
        p.grad = torch.zeros_like(p)
    starts.step()
    found = ours.state_dict()["state"][2]
    for key, expected in starts.state_dict()["state"][2].items():
        if isinstance(expected, torch.Tensor) and expected.shape == fresh[2].weight.shape:
            torch.testing.assert_close(found[key], expected, rtol=1e-3, atol=1e-6, msg=lambda m, key=key: f"{key}: {m}")


def test_a_state_that_cannot_be_divided_leaves_the_optimizer_as_it_was(mpi):
    """Parameters of one bucket with other numbers of steps; whole parameters have owners, and can be divided."""
    module, _ = pair(*SIZES)
    optimizer = torch.optim.Adam(list(module.parameters())[:2], lr=0.01)
    train(module, optimizer, [0], [0])
    optimizer.param_groups[0]["params"] += list(module.parameters())[2:]
    train(module, optimizer, [1], [0])
    before = str(optimizer.state_dict())
    with pytest.raises(ValueError, match="placement='round_robin'"):
        optim.ShardedOptimizer.from_optimizer(optimizer)
    assert optimizer.param_groups[0]["params"] == list(module.parameters())
    assert str(optimizer.state_dict()) == before
    divided = optim.ShardedOptimizer.from_optimizer(optimizer, placement="round_robin")
    assert str(divided.state_dict()) == before
    assert divided.to_optimizer() is optimizer
    assert str(optimizer.state_dict()) == before


def test_frozen_parameters_keep_their_state(mpi):
    module, _ = pair(*SIZES)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    train(module, optimizer, [0], [0])
    module[0].requires_grad_(False)
    before = str(optimizer.state_dict())
    divided = optim.ShardedOptimizer.from_optimizer(optimizer)
    assert str(divided.state_dict()) == before
    divided.to_optimizer()
    assert str(optimizer.state_dict()) == before


def test_parameters_that_are_numbers(mpi):
    """Their state has no dimensions, as the number of steps has none."""
    module = torch.nn.ParameterList([torch.nn.Parameter(torch.tensor(float(k))) for k in range(3)])
    alone = copy.deepcopy(module)
    optimizer, plain = (torch.optim.Adam(m.parameters(), lr=0.1) for m in (module, alone))
    for _ in range(2):
        divided = optim.ShardedOptimizer.from_optimizer(optimizer)
        for parameters, each in ((module, divided), (alone, plain)):
            for _ in range(2):
                sum((p - 5) ** 2 for p in parameters).backward()
                each.step()
                each.zero_grad()
        divided.to_optimizer()
    assert_close(module, alone, 1e-5, 1e-6)
    assert str(optimizer.state_dict()["param_groups"]) == str(plain.state_dict()["param_groups"])


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("placement", ["size", "round_robin"])
def test_a_state_that_one_rank_alone_has_loaded(mpi, placement):
    module, _ = pair(*SIZES)
    optimizer = optim.ShardedOptimizer(module.parameters(), torch.optim.Adam, lr=0.01, placement=placement)
    state = optimizer.state_dict()
    if mpi.rank() == 0:
        optimizer.load_state_dict(state)
    for call in (optimizer.state_dict, lambda: optim.broadcast_optimizer_state(optimizer)):
        with pytest.raises(errors.RanksDisagree, match="every rank loads the same"):
            call()
