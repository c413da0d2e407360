"""A sharded optimizer updates as a plain one does with averaged gradients; each rank holds its share of the state."""

import copy
import itertools

import pytest
import torch
from torch.nn.functional import mse_loss

from torchmpi_py import errors, nn as mpinn, optim

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(240)]

SIZES = [33, 57, 41, 5]
CLASSES = {
    "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}),
    "Adam": (torch.optim.Adam, {"lr": 0.01}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.01}),  # not element by element
}
PLACEMENTS = {
    "size": "size",
    "round_robin": "round_robin",
    "hash": "hash",
    "all on the last": lambda number, parameter: last[0],
}
last = [0]  # rank
every_class = pytest.mark.parametrize("kind", CLASSES)
every_placement = pytest.mark.parametrize("placement", PLACEMENTS)


@pytest.fixture(autouse=True)
def number_of_the_last(mpi):
    last[0] = mpi.size() - 1


def network():
    torch.manual_seed(3)
    layers = [torch.nn.Linear(m, n) for m, n in itertools.pairwise(SIZES)]
    return torch.nn.Sequential(layers[0], torch.nn.Tanh(), layers[1], torch.nn.Tanh(), layers[2])


def loss_of(mpi, module, step, rank=None):
    """Of the batch of a rank, or of those of all."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(mpi.size(), 6, SIZES[0], generator=generator)
    y = torch.randn(mpi.size(), 6, SIZES[-1], generator=generator)
    x, y = (x.flatten(0, 1), y.flatten(0, 1)) if rank is None else (x[rank], y[rank])
    dtype = next(module.parameters()).dtype
    return mse_loss(module(x.to(dtype)), y.to(dtype))


def groups(module):
    """Two, with options of their own."""
    return [{"params": module[:3].parameters(), "weight_decay": 0.1}, {"params": module[3:].parameters(), "lr": 0.02}]


@pytest.fixture
def sharded():
    """ShardedOptimizer, ended after the test."""
    made = []

    def make(*args, **options):
        made.append(optim.ShardedOptimizer(*args, **options))
        return made[-1]

    yield make
    for each in made:
        each.remove()


@pytest.fixture
def small_buckets(mpi, monkeypatch):
    """So that the network has several buckets, one of a single parameter."""
    from torchmpi_py.core import config

    monkeypatch.setattr(config, "current", copy.copy(config.current))
    object.__setattr__(config.current, "fuse_bytes", 8000)
    object.__setattr__(config.current, "alone_bytes", 9000)


def trained(mpi, module, optimizer, steps, rank=None, schedule=None):
    for step in steps:
        optimizer.zero_grad()
        loss_of(mpi, module, step, rank).backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()


def assert_close(module, other, tolerance=1e-6):
    for (name, p), q in zip(module.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=10 * tolerance, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}")


@every_class
@every_placement
def test_twenty_steps_are_those_of_plain_averaging(mpi, sharded, small_buckets, kind, placement):
    made, options = CLASSES[kind]
    module, alone = network(), network()
    ours = sharded(groups(module), made, placement=PLACEMENTS[placement], **options)
    theirs = made(groups(alone), **options)
    assert len(ours._buckets) > 2
    schedules = [torch.optim.lr_scheduler.StepLR(o, 7, 0.5) for o in (ours, theirs)]
    averaged = mpinn.register_async_backward(alone)
    for step in range(20):
        trained(mpi, module, ours, [step], mpi.rank(), schedules[0])
        theirs.zero_grad()
        loss_of(mpi, alone, step, mpi.rank()).backward()
        averaged.synchronize()
        theirs.step()
        schedules[1].step()
    averaged.remove()
    assert_close(module, alone, 1e-5 if kind == "Adafactor" else 1e-6)
    mpinn.check_with_allreduce(module)
    assert all(p.grad is None for p in module.parameters())


def num_elements(optimizer):
    state = optimizer.state.values()
    return sum(x.numel() for entries in state for x in entries.values() if isinstance(x, torch.Tensor) and x.dim())


@pytest.mark.parametrize("placement", ["size", "round_robin"])
def test_the_state_is_divided(mpi, sharded, placement):
    module, alone = network(), network()
    ours = sharded(module.parameters(), torch.optim.Adam, placement=placement)
    theirs = torch.optim.Adam(alone.parameters())
    trained(mpi, module, ours, [0], mpi.rank())
    trained(mpi, alone, theirs, [0])
    here, whole = num_elements(ours), num_elements(theirs)
    if placement == "size":
        assert here <= 1.05 * whole / mpi.size()
        assert mpi.allreduce(here) <= 1.05 * whole
    else:
        assert mpi.allreduce(here) == whole


@every_class
@every_placement
def test_the_state_is_that_of_the_plain_optimizer(mpi, sharded, small_buckets, kind, placement):
    """Saved and loaded in all four directions, between placements, and gone on with."""
    made, options = CLASSES[kind]
    module, alone = network().double(), network().double()  # rounding does not count, where Adam divides by little
    ours = sharded(groups(module), made, placement=PLACEMENTS[placement], **options)
    theirs = made(groups(alone), **options)
    trained(mpi, module, ours, range(3), mpi.rank())
    trained(mpi, alone, theirs, range(3))
    state, expected = ours.state_dict(), copy.deepcopy(theirs.state_dict())
    assert state["param_groups"] == expected["param_groups"]
    assert state["state"].keys() == expected["state"].keys()
    for number, entries in expected["state"].items():
        assert state["state"][number].keys() == entries.keys()
        for name, value in entries.items():
            torch.testing.assert_close(state["state"][number][name], value, rtol=1e-5, atol=1e-7)
    successor = copy.deepcopy(alone)  # the plain optimizer's state, taken by a sharded one, and the other way round
    other = sharded(groups(successor), made, placement="size", **options)
    other.load_state_dict(expected)
    plain = copy.deepcopy(module)
    plain_optimizer = made(groups(plain), **options)
    plain_optimizer.load_state_dict(copy.deepcopy(state))  # torch shares tensors with what it loads
    ours.load_state_dict(state)
    trained(mpi, module, ours, range(3, 6), mpi.rank())
    trained(mpi, successor, other, range(3, 6), mpi.rank())
    trained(mpi, alone, theirs, range(3, 6))
    trained(mpi, plain, plain_optimizer, range(3, 6))
    for each in (module, successor, plain):
        assert_close(each, alone)


@every_placement
def test_accumulation_clipping_and_sums(mpi, sharded, placement):
    module, alone = network(), network()
    ours = sharded(
        module.parameters(),
        torch.optim.SGD,
        lr=0.1 / mpi.size(),
        average=False,
        backward_passes_per_step=2,
        placement=PLACEMENTS[placement],
    )
    theirs = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(3):
        ours.zero_grad()
        theirs.zero_grad()
        for half in range(2):
            loss_of(mpi, module, 2 * step + half, mpi.rank()).backward()
            loss_of(mpi, alone, 2 * step + half).backward()
        for norm_type in (2.0, float("inf")):
            bound = 0.01 if norm_type == 2 else 0.002
            norm = ours.clip_grad_norm_(bound * mpi.size(), norm_type)
            exact = torch.nn.utils.clip_grad_norm_(alone.parameters(), bound, norm_type)
            torch.testing.assert_close(norm.float() / mpi.size(), exact, rtol=1e-4, atol=1e-6)
        ours.step()
        theirs.step()
    assert_close(module, alone)


@every_placement
def test_clipping_after_fewer_passes_than_a_step_has(mpi, sharded, placement):
    module, alone = network(), network()
    options = {"lr": 1.0, "backward_passes_per_step": 3, "placement": PLACEMENTS[placement]}
    ours, theirs = sharded(module.parameters(), torch.optim.SGD, **options), torch.optim.SGD(alone.parameters(), 1.0)
    loss_of(mpi, module, 0, mpi.rank()).backward()
    loss_of(mpi, alone, 0).backward()
    norm, exact = ours.clip_grad_norm_(0.01), torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.01)
    torch.testing.assert_close(norm.float(), exact, rtol=1e-4, atol=1e-6)
    ours.step()
    theirs.step()
    assert_close(module, alone)


@every_placement
def test_grad_scaler_skips_on_all_ranks(mpi, sharded, placement):
    module, alone = network(), network()
    ours = sharded(module.parameters(), torch.optim.Adam, placement=PLACEMENTS[placement])
    theirs = torch.optim.Adam(alone.parameters())
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in range(2)]
    for step in range(3):
        for m, o, scaler, rank in ((module, ours, scalers[0], mpi.rank()), (alone, theirs, scalers[1], None)):
            o.zero_grad()
            loss = loss_of(mpi, m, step, rank)
            if step == 1 and rank in (None, 0):
                loss = loss + m[0].weight[0, 0] * float("inf")  # on one element, of one owner
            scaler.scale(loss).backward()
            scaler.step(o)
            scaler.update()
    assert scalers[0].get_scale() == scalers[1].get_scale() == 512.0
    assert_close(module, alone, 1e-5)


@every_placement
def test_grad_scaler_skips_where_no_gradient_is_contiguous(mpi, sharded, placement):
    """An overflow in what one rank owns; the others hear of it by a gradient of their own."""
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(3, 3, 3, padding=1, bias=False) for _ in range(max(2, mpi.size()))]
    module = torch.nn.Sequential(*layers).to(memory_format=torch.channels_last)
    ours = sharded(module.parameters(), torch.optim.SGD, lr=0.1, placement=PLACEMENTS[placement])
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = [p.detach().clone() for p in module.parameters()]
    loss = module(torch.randn(2, 3, 4, 4)).square().mean() + layers[0].weight[0, 0, 0, 0] * float("inf")
    scaler.scale(loss).backward()
    scaler.step(ours)
    scaler.update()
    assert scaler.get_scale() == 2.0
    assert all(map(torch.equal, before, module.parameters()))


@every_placement
def test_grad_scaler_after_fewer_passes(mpi, sharded, placement):
    """What is unscaled is reduced, also where passes of the step are missing at an epoch's end."""
    module, alone = network(), network()
    how = {"placement": PLACEMENTS[placement], "backward_passes_per_step": 4}
    ours, theirs = sharded(module.parameters(), torch.optim.Adam, **how), torch.optim.Adam(alone.parameters())
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in range(2)]
    for step in range(3):
        for m, o, scaler, rank in ((module, ours, scalers[0], mpi.rank()), (alone, theirs, scalers[1], None)):
            for number in range(2):
                scaler.scale(loss_of(mpi, m, 2 * step + number, rank)).backward()
            scaler.step(o)
            scaler.update()
            o.zero_grad()
    assert scalers[0].get_scale() == 1024.0
    assert_close(module, alone, 1e-5)


class Counting(torch.optim.SGD):
    """Counts steps in its groups, as schedule-free optimizers do, and divides by their number."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.div_(group["count"])
        return super().step(closure)


@every_placement
@pytest.mark.usefixtures("small_buckets")
def test_what_is_counted_in_groups_counts_once_a_step(mpi, sharded, placement):
    module, alone = network(), network()
    ours = sharded(groups(module), Counting, lr=0.05, placement=PLACEMENTS[placement])
    theirs = Counting(groups(alone), lr=0.05)
    for step in range(3):
        for m, o, rank in ((module, ours, mpi.rank()), (alone, theirs, None)):
            o.zero_grad()
            loss_of(mpi, m, step, rank).backward()
            o.step()
    assert_close(module, alone, 1e-5)
    assert [group["count"] for group in ours.state_dict()["param_groups"]] == [3, 3]


def test_a_rank_without_a_backward_pass_and_a_layer_that_is_not_used(mpi, sharded):
    module = torch.nn.ModuleDict({"used": torch.nn.Linear(3, 2), "unused": torch.nn.Linear(3, 2)})
    mpinn.synchronize_parameters(module)
    before = copy.deepcopy(module)
    ours = sharded(module.parameters(), torch.optim.SGD, lr=1.0)
    if mpi.rank() == 0:
        module["used"](torch.ones(1, 3)).sum().backward()
    ours.step()
    torch.testing.assert_close(before["used"].bias - module["used"].bias, torch.full((2,), 1 / mpi.size()))
    assert torch.equal(before["unused"].weight, module["unused"].weight)


def test_a_backward_pass_that_broke_off(mpi, sharded):
    """What it left behind does not count in the next one, which uses another layer."""
    module = torch.nn.ModuleDict({"first": torch.nn.Linear(3, 3), "second": torch.nn.Linear(3, 3)})
    mpinn.synchronize_parameters(module)
    before = copy.deepcopy(module)
    ours = sharded(module.parameters(), torch.optim.SGD, lr=1.0)

    def fail(gradient):
        raise ZeroDivisionError

    x = 2 * torch.ones(1, 3, requires_grad=True)
    x.register_hook(fail)  # after the gradients of the layer
    with pytest.raises(ZeroDivisionError):
        module["first"](x).sum().backward()
    ours.zero_grad()
    module["second"](torch.ones(1, 3)).sum().backward()
    ours.step()
    assert torch.equal(module["first"].weight, before["first"].weight)
    assert not torch.equal(module["second"].weight, before["second"].weight)


def test_frozen_parameters_and_named_ones(mpi, sharded):
    module, alone = network(), network()
    for m in (module, alone):
        m[2].requires_grad_(False)
    ours = sharded(module.named_parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    theirs = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    trained(mpi, module, ours, range(3), mpi.rank())
    trained(mpi, alone, theirs, range(3))
    assert_close(module, alone)
    assert ours.state_dict()["state"].keys() == theirs.state_dict()["state"].keys()


def test_a_state_that_lacks_some_parameters(mpi, sharded):
    """As of a layer that was not used yet: it counts as zero; numbers of steps that differ cannot share a slice."""
    module, alone = network(), network()
    theirs = torch.optim.Adam(alone.parameters())
    alone[4].requires_grad_(False)
    trained(mpi, alone, theirs, range(2))
    ours = sharded(module.parameters(), torch.optim.Adam)
    ours.load_state_dict(theirs.state_dict())
    state, expected = ours.state_dict()["state"], theirs.state_dict()["state"]
    for number, entries in expected.items():
        assert torch.equal(state[number]["exp_avg"], entries["exp_avg"])
        assert state[number]["step"] == entries["step"] == 2
    alone[4].requires_grad_(True)
    trained(mpi, alone, theirs, range(2, 3))
    with pytest.raises(ValueError, match=r"step is .*round_robin"):
        ours.load_state_dict(theirs.state_dict())
    apart = sharded(network().parameters(), torch.optim.Adam, placement="round_robin")
    apart.load_state_dict(theirs.state_dict())
    assert apart.state_dict()["state"][5]["step"] == 1


@pytest.mark.parametrize("placement", ["size", "round_robin"])
def test_sparse_gradients_made_dense(mpi, sharded, placement):
    torch.manual_seed(1)
    module = torch.nn.Embedding(11, 3, sparse=True)
    alone = torch.nn.Embedding.from_pretrained(module.weight.detach().clone(), freeze=False)
    ours = sharded(module.parameters(), torch.optim.Adam, placement=placement, sparse_as_dense=True)
    theirs = torch.optim.Adam(alone.parameters())
    for step in range(3):
        rows = [torch.tensor([(rank + step) % 7, rank % 3]) for rank in range(mpi.size())]
        (module(rows[mpi.rank()]) ** 2).sum().backward()
        (alone(torch.cat(rows)) ** 2).sum().div(mpi.size()).backward()
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert_close(module, alone, 1e-5)
    plain = torch.nn.Embedding(4, 2, sparse=True)
    sharded(plain.parameters(), torch.optim.SGD)
    with pytest.raises(TypeError, match="ShardedOptimizer sparse_as_dense=True"):
        plain(torch.tensor([1])).sum().backward()


def test_a_layer_that_thaws_is_told_of(mpi, sharded):
    module = network()
    module[2].requires_grad_(False)
    ours = sharded(module.parameters(), torch.optim.SGD)
    module[2].requires_grad_(True)
    with pytest.raises(RuntimeError, match="parameter 2 has become trainable"):
        loss_of(mpi, module, 0, mpi.rank()).backward()
    ours.zero_grad()
    module.requires_grad_(False)
    module[2].requires_grad_(True)  # the pass reaches nothing that is reduced
    loss_of(mpi, module, 0, mpi.rank()).backward()
    with pytest.raises(RuntimeError, match="parameter 2 has become trainable"):
        ours.step()


def test_a_layer_that_is_frozen_later_is_told_of(mpi, sharded):
    """Its moments would go on moving it. While another optimizer takes a step it may be frozen."""
    module = network()
    ours = sharded(module.parameters(), torch.optim.Adam, lr=0.1)
    trained(mpi, module, ours, range(2))
    before = module[2].weight.detach().clone()
    module[2].requires_grad_(False)
    ours.zero_grad()
    loss_of(mpi, module, 2, mpi.rank()).backward()
    with pytest.raises(RuntimeError, match="parameter 2 was frozen"):
        ours.step()
    assert torch.equal(module[2].weight, before)
    module[2].requires_grad_(True)
    ours.zero_grad()
    trained(mpi, module, ours, [3])
    assert not torch.equal(module[2].weight, before)


def test_bad_input(mpi, sharded):
    module = network()
    for parameters, error, message in (
        ([], ValueError, "no parameters"),
        ([torch.zeros(2)], TypeError, "parameter 0 is a Tensor"),
        ([module[0].weight, module[0].weight], ValueError, "twice"),
        (mpinn.ColumnParallelLinear(4, 4).parameters(), ValueError, "split"),
    ):
        with pytest.raises(error, match=message):
            sharded(parameters, torch.optim.SGD)
    with pytest.raises(TypeError, match="LBFGS"):
        sharded(module.parameters(), torch.optim.LBFGS)
    with pytest.raises(ValueError, match="placement='even'"):
        sharded(module.parameters(), torch.optim.SGD, placement="even")
    with pytest.raises(ValueError, match=f"parameter 0={mpi.size()}"):
        sharded(module.parameters(), torch.optim.SGD, placement=lambda number, p: mpi.size())
    ours = sharded(module.parameters(), torch.optim.SGD)
    with pytest.raises(TypeError, match="no more parameters"):
        ours.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
    with pytest.raises(ValueError, match=r"groups of \[2\] parameters, this optimizer of \[6\]"):
        ours.load_state_dict(torch.optim.SGD(module[0].parameters()).state_dict())
    loss_of(mpi, module, 0, mpi.rank()).backward()
    with pytest.raises(RuntimeError, match="ran again before step"):
        loss_of(mpi, module, 0, mpi.rank()).backward()
    ours.zero_grad()
    module[0].weight.data = module[0].weight.data.clone()
    with pytest.raises(RuntimeError, match="other memory"):
        loss_of(mpi, module, 0, mpi.rank()).backward()


def test_parameters_that_differ(mpi, sharded):
    if mpi.size() == 1:
        pytest.skip("one rank agrees with itself")
    module = network()
    module[0].bias.data[0] += mpi.rank()
    ours = sharded(module.parameters(), torch.optim.SGD)
    loss_of(mpi, module, 0, mpi.rank()).backward()
    with pytest.raises(errors.RanksDisagree, match="1 "):
        ours.step()


def test_a_state_that_cannot_be_divided_leaves_the_optimizer_as_it_was(mpi):
    """Parameters of one bucket with other numbers of steps; whole parameters have owners, and can be divided."""
    module = network()
    optimizer = torch.optim.Adam(list(module.parameters())[:2], lr=0.01)
    for _ in range(2):
        loss_of(mpi, module, 0).backward()
        optimizer.step()
        if len(optimizer.param_groups[0]["params"]) == 2:
            optimizer.param_groups[0]["params"] += list(module.parameters())[2:]
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match="placement='round_robin'"):
        optim.ShardedOptimizer.from_optimizer(optimizer)
    assert optimizer.param_groups[0]["params"] == list(module.parameters())
    after = optimizer.state_dict()
    assert str(before) == str(after)
    divided = optim.ShardedOptimizer.from_optimizer(optimizer, placement="round_robin")
    assert str(divided.state_dict()) == str(before)
    assert divided.to_optimizer() is optimizer
    assert str(optimizer.state_dict()) == str(before)


def test_parameters_that_are_numbers(mpi):
    """Their state has no dimensions, as the number of steps has none."""
    module = torch.nn.ParameterList([torch.nn.Parameter(torch.tensor(float(k))) for k in range(3)])
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    alone = copy.deepcopy(module)
    plain = torch.optim.Adam(alone.parameters(), lr=0.1)
    for _ in range(2):
        divided = optim.ShardedOptimizer.from_optimizer(optimizer)
        for _ in range(2):
            for parameters, each in ((module, divided), (alone, plain)):
                sum((p - 5) ** 2 for p in parameters).backward()
                each.step()
                each.zero_grad()
        divided.to_optimizer()
    for p, q in zip(module, alone, strict=True):
        torch.testing.assert_close(p, q)
    assert str(optimizer.state_dict()["param_groups"]) == str(plain.state_dict()["param_groups"])


def test_frozen_parameters_keep_their_state(mpi):
    module = network()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    loss_of(mpi, module, 0).backward()
    optimizer.step()
    module[0].requires_grad_(False)
    before = copy.deepcopy(optimizer.state_dict())
    divided = optim.ShardedOptimizer.from_optimizer(optimizer)
    assert str(divided.state_dict()) == str(before)
    divided.to_optimizer()
    assert str(optimizer.state_dict()) == str(before)


@pytest.mark.parametrize("placement", ["size", "round_robin"])
def test_a_state_that_one_rank_alone_has_loaded(mpi, sharded, placement):
    if mpi.size() == 1:
        pytest.skip("one rank is all ranks")
    module = network()
    optimizer = sharded(module.parameters(), torch.optim.Adam, lr=0.01, placement=placement)
    state = optimizer.state_dict()
    if mpi.rank() == 0:
        optimizer.load_state_dict(state)
    for call in (optimizer.state_dict, lambda: optim.broadcast_optimizer_state(optimizer)):
        with pytest.raises(errors.RanksDisagree, match="every rank loads the same"):
            call()
