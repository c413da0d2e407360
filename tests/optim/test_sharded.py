"""A sharded optimizer updates as a plain one does with averaged gradients; each rank holds its share of the state."""

import copy

import pytest
import torch
from loops import assert_close, loss_of, pair, sides, train

from torchmpi_py import nn as mpinn, optim

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(240)]

SIZES = (33, 57, 41, 5)
CLASSES = {
    "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}),
    "Adam": (torch.optim.Adam, {"lr": 0.01}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.01}),  # not element by element
}


def groups(module):
    """Two, with options of their own."""
    return [{"params": module[:3].parameters(), "weight_decay": 0.1}, {"params": module[3:].parameters(), "lr": 0.02}]


def sharded(mpi, parameters, kind, placement, **options):
    """Where ``placement`` is "last", that rank owns all."""
    where = (lambda number, parameter: mpi.size() - 1) if placement == "last" else placement
    return optim.ShardedOptimizer(parameters, kind, placement=where, **options)


@pytest.fixture
def small_buckets(mpi, monkeypatch):
    """So that the network has several buckets, one of a single parameter."""
    monkeypatch.setattr("torchmpi_py.core.config.current", mpi.Tuning(fuse_bytes=16000, alone_bytes=18000))


@pytest.mark.parametrize(
    ("kind", "placement"),
    [
        ("SGD", "size"),
        ("SGD", "last"),
        ("Adam", "size"),
        ("Adam", "hash"),
        ("AdamW", "size"),
        ("AdamW", "round_robin"),
        ("Adafactor", "size"),
        ("Adafactor", "round_robin"),
    ],
)
@pytest.mark.usefixtures("small_buckets")
def test_parameters_and_state_are_those_of_the_plain_optimizer(mpi, kind, placement):
    """Saved and loaded in all four directions, between placements, and gone on with."""
    made, options = CLASSES[kind]
    module, alone = pair(*SIZES)  # float64, for rounding does not count where Adam divides by little
    ours, theirs = sharded(mpi, groups(module), made, placement, **options), made(groups(alone), **options)
    both = sides(mpi, module, ours, alone, theirs)
    schedules = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in (ours, theirs)]
    for step in range(3):
        for (m, o, ranks), schedule in zip(both, schedules, strict=True):
            train(m, o, [step], ranks)
            schedule.step()
    assert_close(module, alone, 1e-6, 1e-7)
    assert all(p.grad is None for p in module.parameters())
    state, expected = ours.state_dict(), copy.deepcopy(theirs.state_dict())
    assert state["param_groups"] == expected["param_groups"]
    assert state["state"].keys() == expected["state"].keys()
    for number, entries in expected["state"].items():
        assert state["state"][number].keys() == entries.keys()
        for name, value in entries.items():
            torch.testing.assert_close(state["state"][number][name], value, rtol=1e-5, atol=1e-7)
    successor, plain = copy.deepcopy(alone), copy.deepcopy(module)  # each takes the state of the other's kind
    other = sharded(mpi, groups(successor), made, "size", **options)
    other.load_state_dict(expected)
    plain_optimizer = made(groups(plain), **options)
    plain_optimizer.load_state_dict(copy.deepcopy(state))  # torch shares tensors with what it loads
    ours.load_state_dict(state)
    for m, o, ranks in (*both, *sides(mpi, successor, other, plain, plain_optimizer)):
        train(m, o, range(3, 5), ranks)
    for each in (module, successor, plain):
        assert_close(each, alone, 1e-6, 1e-7)
    mpinn.check_with_allreduce(module)


def num_elements(optimizer):
    state = optimizer.state.values()
    return sum(x.numel() for entries in state for x in entries.values() if isinstance(x, torch.Tensor) and x.dim())


@pytest.mark.parametrize("placement", ["size", "round_robin"])
def test_the_state_is_divided(mpi, placement):
    module, alone = pair(*SIZES)
    ours = sharded(mpi, module.named_parameters(), torch.optim.Adam, placement)
    theirs = torch.optim.Adam(alone.parameters())
    train(module, ours, [0], [mpi.rank()])
    train(alone, theirs, [0], [0])
    here, whole = num_elements(ours), num_elements(theirs)
    if placement == "size":
        assert here <= 1.05 * whole / mpi.size()
        assert whole <= mpi.allreduce(here) <= 1.05 * whole
    else:
        assert mpi.allreduce(here) == whole


@pytest.mark.parametrize("placement", ["size", "round_robin"])
def test_grad_scaler_skips_where_no_gradient_is_contiguous(mpi, placement):
    """An overflow in what one rank owns; the others hear of it by a gradient of their own."""
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(3, 3, 3, padding=1, bias=False) for _ in range(max(2, mpi.size()))]
    module = torch.nn.Sequential(*layers).to(memory_format=torch.channels_last)
    ours = sharded(mpi, module.parameters(), torch.optim.SGD, placement, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = [p.detach().clone() for p in module.parameters()]
    loss = module(torch.randn(2, 3, 4, 4)).square().mean() + layers[0].weight[0, 0, 0, 0] * float("inf")
    scaler.scale(loss).backward()
    scaler.step(ours)
    scaler.update()
    assert scaler.get_scale() == 2.0
    assert all(map(torch.equal, before, module.parameters()))


class Counting(torch.optim.SGD):
    """Counts steps in its groups, as schedule-free optimizers do, and divides by their number."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.div_(group["count"])
        return super().step(closure)


@pytest.mark.parametrize("placement", ["size", "round_robin"])
@pytest.mark.usefixtures("small_buckets")
def test_what_is_counted_in_groups_counts_once_a_step(mpi, placement):
    module, alone = pair(*SIZES)
    ours = sharded(mpi, groups(module), Counting, placement, lr=0.05)
    for m, o, ranks in sides(mpi, module, ours, alone, Counting(groups(alone), lr=0.05)):
        train(m, o, range(3), ranks)
    assert_close(module, alone)
    assert [group["count"] for group in ours.state_dict()["param_groups"]] == [3, 3]


@pytest.mark.parametrize("placement", ["size", "round_robin"])
def test_a_layer_that_is_frozen_for_some_steps_is_left_as_it_is(mpi, placement):
    """Neither moments nor weight decay move it, and its number of steps stays."""
    module, alone = pair(*SIZES)
    ours = sharded(mpi, module.parameters(), torch.optim.AdamW, placement, lr=0.01)
    theirs = torch.optim.AdamW(alone.parameters(), lr=0.01)
    for step in range(6):
        for m, o, ranks in sides(mpi, module, ours, alone, theirs):
            m[2].requires_grad_(step not in (2, 3))
            train(m, o, [step], ranks)
    assert_close(module, alone, 1e-6, 1e-7)
    steps = [entries["step"] for entries in ours.state_dict()["state"].values()]
    assert steps == [6, 6, 4, 4, 6, 6]


@pytest.mark.parametrize("placement", ["size", "hash"])
def test_gradients_that_the_user_drops_move_nothing(mpi, placement):
    module, _ = pair(*SIZES)
    ours = optim.ShardedOptimizer(module.parameters(), torch.optim.SGD, placement=placement, lr=0.1)
    before = copy.deepcopy(module)
    loss_of(module, 0, [mpi.rank()]).backward()
    module[2].zero_grad()
    ours.step()
    assert torch.equal(module[2].weight, before[2].weight)
    assert not torch.equal(module[0].weight, before[0].weight)
    loss_of(module, 1, [mpi.rank()]).backward()
    ours.load_state_dict(ours.state_dict())  # drops the gradients, so that another pass may begin
    loss_of(module, 1, [mpi.rank()]).backward()
    ours.remove()
    assert all(p.grad is None or type(p.grad) is torch.Tensor for p in module.parameters())
    with pytest.raises(RuntimeError, match=r"ShardedOptimizer: .* after remove\(\)"):
        ours.step()


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_bad_input(mpi):
    module, _ = pair(*SIZES)
    for parameters, error, message in (
        ([], ValueError, "empty parameter list"),
        ([torch.zeros(2)], TypeError, "number 0 is a Tensor"),
        ([module[0].weight, module[0].weight], ValueError, "twice"),
    ):
        with pytest.raises(error, match=message):
            optim.ShardedOptimizer(parameters, torch.optim.SGD)
    for kind in (torch.optim.LBFGS, type("ScheduleFree", (torch.optim.SGD,), {"eval": None})):
        with pytest.raises(TypeError, match=f"{kind.__name__} cannot update shards"):
            optim.ShardedOptimizer(module.parameters(), kind)
    for wrong, told in (("even", "placement='even'"), (lambda number, p: mpi.size(), f"parameter 0={mpi.size()}")):
        with pytest.raises(ValueError, match=told):
            optim.ShardedOptimizer(module.parameters(), torch.optim.SGD, placement=wrong)
    ours = optim.ShardedOptimizer(module.parameters(), torch.optim.SGD)
    with pytest.raises(TypeError, match=r"use the plain optimizer that to_optimizer\(\) returns"):
        ours.add_param_group({"params": []})
    with pytest.raises(ValueError, match="doesn't match the size"):
        ours.load_state_dict(torch.optim.SGD(module[0].parameters()).state_dict())
    loss_of(module, 0, [mpi.rank()]).backward()
    with pytest.raises(RuntimeError, match=r"ran again before .*step\(\)"):
        loss_of(module, 0, [mpi.rank()]).backward()
    module[0].weight.data = module[0].weight.data.clone()
    with pytest.raises(RuntimeError, match="moved to other memory"):
        train(module, ours, [0], [mpi.rank()])
