"""States of a sharded optimizer: of parameters that some lack, and to and from plain optimizers."""

import copy

import pytest
import torch
from loops import assert_close, pair, train
from support import networks

from torchmpi_py import errors, optim

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(240)]

SIZES = (12, 9, 8, 5)
ELEMENTWISE = ["ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_a_state_that_lacks_some_parameters(mpi, name):
    """As of a layer that was not used yet. It goes on as with torch, with its own number of steps."""
    kind = getattr(torch.optim, name)
    options = {"lr": 0.25, "momentum": 0.9} if name in ("SGD", "RMSprop") else {"lr": 0.25}
    module, alone = pair(*SIZES)
    theirs = kind(alone.parameters(), **options)
    alone[4].requires_grad_(False)
    train(alone, theirs, range(2), [0])
    alone[4].requires_grad_(True)
    ours = optim.ShardedOptimizer(module.parameters(), kind, **options)
    for step in range(2, 4):
        networks.fill(module, networks.flat(alone))
        ours.load_state_dict(theirs.state_dict())
        torch.testing.assert_close(ours.state_dict()["state"], theirs.state_dict()["state"], check_dtype=False)
        for m, o in ((module, ours), (alone, theirs)):
            train(m, o, [step], [0])
        assert_close(module, alone, 1e-6, 1e-7)


@pytest.mark.parametrize("placement", ["size", "round_robin"])
def test_from_an_optimizer_and_back(mpi, placement):
    """With parameters of one bucket that have taken other numbers of steps."""
    module, _ = pair(*SIZES)
    optimizer = torch.optim.Adam(list(module.parameters())[:2], lr=0.01)
    train(module, optimizer, [0], [0])
    optimizer.param_groups[0]["params"] += list(module.parameters())[2:]
    train(module, optimizer, [1], [0])
    before = str(optimizer.state_dict())
    divided = optim.ShardedOptimizer.from_optimizer(optimizer, placement=placement)
    assert str(divided.state_dict()) == before
    assert divided.to_optimizer() is optimizer
    assert optimizer.param_groups[0]["params"] == list(module.parameters())
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
        with pytest.raises(errors.RanksDisagree, match="call it on every rank"):
            call()
