"""Loops of users with DistributedOptimizer: what P ranks get from their shares is what one process gets from all."""

import copy
import gc
import weakref

import pytest
import torch
from torch.nn.functional import mse_loss

from torchmpi_py import errors, nn as mpinn, optim

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(240)]

ROWS = 4
OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, 0.01),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, 0.01),
}


def network():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 2))


def batches(mpi, step):
    """The inputs and targets of all ranks."""
    generator = torch.Generator().manual_seed(step)
    shape = (mpi.size(), ROWS)
    return torch.randn(*shape, 6, generator=generator), torch.randn(*shape, 2, generator=generator)


def loss_here(mpi, module, step):
    x, y = batches(mpi, step)
    return mse_loss(module(x[mpi.rank()]), y[mpi.rank()])


def loss_of_all(mpi, module, step):
    x, y = batches(mpi, step)
    return mse_loss(module(x.flatten(0, 1)), y.flatten(0, 1))


def assert_close(module, other, rtol=1e-5, atol=1e-6):
    for (name, p), q in zip(module.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=rtol, atol=atol, msg=lambda m, name=name: f"{name}: {m}")


@pytest.fixture
def pair():
    """A module, and a copy that one process trains alone."""
    module = network()
    return module, copy.deepcopy(module)


@pytest.fixture
def distributed():
    """DistributedOptimizer, ended after the test."""
    made = []

    def make(*args, **options):
        made.append(optim.DistributedOptimizer(*args, **options))
        return made[-1]

    yield make
    for each in made:
        each.remove()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_plain_loop_with_a_scheduler(mpi, pair, distributed, name):
    module, alone = pair
    ours, theirs = distributed(OPTIMIZERS[name](module.parameters()), module), OPTIMIZERS[name](alone.parameters())
    schedules = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in (ours, theirs)]
    for step in range(5):
        for optimizer, schedule, loss in (
            (ours, schedules[0], loss_here(mpi, module, step)),
            (theirs, schedules[1], loss_of_all(mpi, alone, step)),
        ):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    assert_close(module, alone)
    mpi.check_with_allreduce(torch.cat([p.detach().flatten() for p in module.parameters()]))
    assert ours.param_groups[0]["lr"] == theirs.param_groups[0]["lr"] < 0.1
    assert isinstance(ours, torch.optim.Optimizer)
    saved = ours.state_dict()
    other = OPTIMIZERS[name](copy.deepcopy(module).parameters())
    other.load_state_dict(saved)
    assert str(other.state_dict()) == str(saved)


@pytest.mark.parametrize("passes", [1, 2])
def test_another_part_of_the_network_is_trained_from_then_on(mpi, pair, distributed, passes):
    """A pass that reaches no parameter of those that are averaged."""
    module, _ = pair
    module[0].requires_grad_(False)
    ours = distributed(torch.optim.SGD(module.parameters(), 0.1), module, backward_passes_per_step=passes)
    module[0].requires_grad_(True)
    module[2].requires_grad_(False)
    before = copy.deepcopy(module.state_dict())
    loss_here(mpi, module, 0).backward()
    with pytest.raises(RuntimeError, match=r"0\.weight, 0\.bias: new or trainable only since .* make another one"):
        ours.step()
    assert str(module.state_dict()) == str(before)
    ours.remove()
    ours = distributed(ours.optimizer, module)
    module.zero_grad()
    loss_here(mpi, module, 0).backward()
    ours.step()
    mpi.nn.check_with_allreduce(module)


def test_sums(mpi, pair, distributed):
    module, alone = pair
    ours = distributed(torch.optim.SGD(module.parameters(), 0.1 / mpi.size()), module, average=False)
    theirs = torch.optim.SGD(alone.parameters(), 0.1)
    loss_here(mpi, module, 0).backward()
    loss_of_all(mpi, alone, 0).backward()
    ours.step()
    theirs.step()
    assert_close(module, alone)


def test_accumulation_and_clipping(mpi, pair, distributed):
    """Gradients of two passes are added up; what is clipped between backward and step is the average."""
    module, alone = pair
    ours = distributed(torch.optim.SGD(module.parameters(), 0.1), module, backward_passes_per_step=2)
    theirs = torch.optim.SGD(alone.parameters(), 0.1)
    for step in range(3):
        for loss, m, o in ((loss_here, module, ours), (loss_of_all, alone, theirs)):
            o.zero_grad()
            for half in range(2):
                loss(mpi, m, 2 * step + half).backward()
            norm = torch.nn.utils.clip_grad_norm_(m.parameters(), 0.05)
            assert norm > 0.05
            o.step()
    assert_close(module, alone)


def test_horovod_s_way_of_clipping(mpi, pair, distributed):
    module, alone = pair
    ours = distributed(torch.optim.SGD(module.parameters(), 0.1), module)
    theirs = torch.optim.SGD(alone.parameters(), 0.1)
    loss_here(mpi, module, 0).backward()
    ours.synchronize()
    torch.nn.utils.clip_grad_norm_(module.parameters(), 0.05)
    with ours.skip_synchronize():
        ours.step()
    loss_of_all(mpi, alone, 0).backward()
    torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.05)
    theirs.step()
    assert_close(module, alone)


def test_a_rank_without_a_backward_pass(mpi, pair, distributed):
    """It brings zeros, and meets the others in step()."""
    module, alone = pair
    ours = distributed(torch.optim.SGD(module.parameters(), 0.1), module)
    theirs = torch.optim.SGD(alone.parameters(), 0.1)
    if mpi.rank() != mpi.size() - 1 or mpi.size() == 1:
        loss_here(mpi, module, 0).backward()
    ours.step()
    x, y = batches(mpi, 0)
    present = max(1, mpi.size() - 1)
    loss = mse_loss(alone(x[:present].flatten(0, 1)), y[:present].flatten(0, 1))
    (loss * present / mpi.size()).backward()
    theirs.step()
    assert_close(module, alone)


def test_closures(mpi, pair, distributed):
    """L-BFGS with a line search: all ranks decide alike, by the mean loss."""
    module, alone = pair
    ours = distributed(torch.optim.LBFGS(module.parameters(), line_search_fn="strong_wolfe", max_iter=6), module)
    theirs = torch.optim.LBFGS(alone.parameters(), line_search_fn="strong_wolfe", max_iter=6)

    def closure(optimizer, loss, m):
        def evaluate():
            optimizer.zero_grad()
            value = loss(mpi, m, 0)
            value.backward()
            return value

        return evaluate

    first = ours.step(closure(ours, loss_here, module))
    torch.testing.assert_close(first, theirs.step(closure(theirs, loss_of_all, alone)))
    assert_close(module, alone, rtol=1e-3, atol=1e-4)
    mpi.check_with_allreduce(torch.cat([p.detach().flatten() for p in module.parameters()]))


def test_grad_scaler(mpi, pair, distributed):
    """It unscales averages; where one rank overflows, all skip the step."""
    module, alone = pair
    ours = distributed(torch.optim.SGD(module.parameters(), 0.1), module)
    theirs = torch.optim.SGD(alone.parameters(), 0.1)
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in range(2)]
    for step in range(3):
        for loss, m, o, scaler in ((loss_here, module, ours, scalers[0]), (loss_of_all, alone, theirs, scalers[1])):
            o.zero_grad()
            value = loss(mpi, m, step)
            if step == 1 and (m is alone or mpi.rank() == 0):
                value = value * float("inf")
            scaler.scale(value).backward()
            scaler.step(o)
            scaler.update()
    assert scalers[0].get_scale() == scalers[1].get_scale() == 512.0
    assert_close(module, alone)


@pytest.mark.parametrize("overflow", [False, True])
def test_grad_scaler_after_fewer_passes(mpi, pair, distributed, overflow):
    """At an epoch's end two of four passes are made, on rank 0 one: what is unscaled is reduced all the same."""
    module, alone = pair
    ours = distributed(torch.optim.SGD(module.parameters(), 0.1), module, backward_passes_per_step=4)
    theirs = torch.optim.SGD(alone.parameters(), 0.1)
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in range(2)]
    for step in range(3):
        for rank in range(mpi.size()):
            for number in range(1 + (rank > 0)):
                x, y = (part[rank] for part in batches(mpi, 2 * step + number))
                factor = float("inf") if overflow and (step, rank) == (1, 0) else 1.0
                scalers[1].scale(mse_loss(alone(x), y) * factor / mpi.size()).backward()
                if rank == mpi.rank():
                    scalers[0].scale(mse_loss(module(x), y) * factor).backward()
        for o, scaler in zip((ours, theirs), scalers, strict=True):
            scaler.step(o)
            scaler.update()
            o.zero_grad()
    assert scalers[0].get_scale() == scalers[1].get_scale() == (512.0 if overflow else 1024.0)
    assert_close(module, alone)


def test_parts_of_a_module_and_layers_added_later(mpi, pair, distributed):
    """The optimizer's parameters alone are reduced; those of a group that is added are from then on."""
    module, alone = pair
    ours = distributed(torch.optim.SGD(module[2].parameters(), 0.1), module)
    theirs = torch.optim.SGD(alone[2].parameters(), 0.1)
    for step in range(4):
        if step == 2:
            ours.add_param_group({"params": list(module[0].parameters())})
            theirs.add_param_group({"params": list(alone[0].parameters())})
        for loss, m, o in ((loss_here, module, ours), (loss_of_all, alone, theirs)):
            m.zero_grad()
            loss(mpi, m, step).backward()
            o.step()
            if m is module:
                assert ours._is_reduced is False
    assert_close(module, alone)


def test_two_networks(mpi, distributed):
    """A GAN's loop: the generator's pass does not train the discriminator."""
    results = []
    for loss_scale in (1, None):
        torch.manual_seed(3)
        first, second = torch.nn.Linear(6, 5), torch.nn.Linear(5, 1)
        optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (first, second)]
        if loss_scale:
            optimizers = [distributed(o, m) for o, m in zip(optimizers, (first, second), strict=True)]
        for step in range(3):
            x = batches(mpi, step)[0]
            x = x[mpi.rank()] if loss_scale else x.flatten(0, 1)
            optimizers[1].zero_grad()
            second(first(x).detach()).pow(2).mean().backward()
            optimizers[1].step()
            optimizers[0].zero_grad()
            second.requires_grad_(False)
            second(first(x)).mean().backward()
            second.requires_grad_(True)
            optimizers[0].step()
        results.append(torch.nn.ModuleList([first, second]))
    assert_close(*results)


def test_it_goes_with_its_module(mpi):
    module = network()
    made = optim.DistributedOptimizer(torch.optim.SGD(module.parameters(), 0.1), module)
    weights = [weakref.ref(made), weakref.ref(module), weakref.ref(module[0].weight)]
    other = network()
    made = optim.ShardedOptimizer(other.parameters(), torch.optim.SGD)
    weights += [weakref.ref(made), weakref.ref(other), weakref.ref(other[0].weight)]
    del made, module, other
    gc.collect()
    assert [weight() for weight in weights] == [None] * 6


def test_a_skipped_step_whose_gradients_the_module_drops(mpi, pair, distributed):
    """``module.zero_grad()`` in place of the optimizer's, with a step between that GradScaler skips."""
    module, _ = pair
    ours = distributed(torch.optim.SGD(module.parameters(), 0.1), module)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(3):
        module.zero_grad()
        scaler.scale(loss_here(mpi, module, step) * (float("inf") if step == 1 else 1)).backward()
        scaler.step(ours)
        scaler.update()
    assert scaler.get_scale() == 4.0


def test_blocks_of_which_some_are_not_optimized(mpi, distributed):
    module = mpinn.BlockSequential(2, torch.nn.Linear(6, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    mpinn.synchronize_parameters(module)
    ours = distributed(torch.optim.SGD(module[2].parameters(), 0.1), module)
    loss_here(mpi, module, 0).backward()
    ours.step()
    mpinn.check_with_allreduce(module)


def test_split_layers_of_unequal_parts(mpi, distributed):
    module = mpinn.ColumnParallelLinear(6, 7)
    ours = distributed(torch.optim.SGD(module.parameters(), 0.1), module)
    module(torch.ones(2, 6)).sum().backward()
    ours.step()


def test_wrong_orders(mpi, pair, distributed):
    module, _ = pair
    ours = distributed(torch.optim.SGD(module.parameters(), 0.1), module, backward_passes_per_step=2)
    loss_here(mpi, module, 0).backward()
    with pytest.raises(RuntimeError, match="after 1 of 2 backward passes"):
        ours.zero_grad()
    loss_here(mpi, module, 1).backward()
    with pytest.raises(RuntimeError, match=r"backward\(\) ran again before step"):
        loss_here(mpi, module, 2).backward()
    ours.zero_grad()  # dropped on purpose
    loss_here(mpi, module, 3).backward()
    ours.step()  # one pass of two, on all ranks
    with pytest.raises(TypeError, match="state_dict"):
        copy.deepcopy(ours)


def test_bad_input(mpi, pair, distributed):
    """An error on every rank, also of ranks whose own arguments are right."""
    module, alone = pair
    with pytest.raises(ValueError, match="4 on rank 0"):
        distributed(torch.optim.SGD(alone.parameters(), 0.1), module)
    with pytest.raises(ValueError, match="frequency=0"):
        distributed(torch.optim.SGD(module.parameters(), 0.1), module, backward_passes_per_step=0)
    with pytest.raises(TypeError, match="compression='bf16'"):
        distributed(torch.optim.SGD(module.parameters(), 0.1), module, compression="bf16")
    if mpi.size() == 1:
        return
    last = mpi.size() - 1
    own = alone if mpi.rank() == last else module
    with pytest.raises(ValueError, match=f"4 on rank {last}"):
        distributed(torch.optim.SGD(own.parameters(), 0.1), module)
    other = torch.nn.Linear(6, 3 + (mpi.rank() == last))
    with pytest.raises(errors.RanksDisagree, match=rf"rank 0 has .*\(3, 6\).*rank {last} has .*\(4, 6\)"):
        distributed(torch.optim.SGD(other.parameters(), 0.1), other)
    ours = distributed(torch.optim.SGD(module.parameters(), 0.1), module)
    with pytest.raises(ValueError, match=r"reduces the gradients of 0\.weight"):
        distributed(torch.optim.SGD(module.parameters(), 0.1), module)
    if mpi.rank() == last:
        module[2].bias.data[0] += 1
    loss_here(mpi, module, 0).backward()
    with pytest.raises(errors.RanksDisagree, match=r"2\.bias"):
        ours.step()


@pytest.mark.parametrize("split", [False, True])
def test_over_a_group_of_ranks(mpi, pair, distributed, split):
    """Ranks of another group do not take part."""
    module, alone = pair
    color = mpi.rank() % 2 if split else 0
    with mpi.split(color) as comm:
        ours = distributed(torch.optim.SGD(module.parameters(), 0.1), module, comm=comm)
        theirs = torch.optim.SGD(alone.parameters(), 0.1)
        loss_here(mpi, module, 0).backward()
        ours.step()
        x, y = batches(mpi, 0)
        members = slice(color, None, 2) if split else slice(None)
        mse_loss(alone(x[members].flatten(0, 1)), y[members].flatten(0, 1)).backward()
        theirs.step()
        assert_close(module, alone)
        ours.remove()


@pytest.mark.parametrize("num_passes", [1, 2])
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # by torch's Adagrad
@pytest.mark.parametrize("as_dense", [False, True])
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam])
def test_sparse_gradients(mpi, distributed, make, as_dense, num_passes):
    """Ranks look up other rows; some rows are looked up by none. The weight of the second layer is used twice."""
    torch.manual_seed(1)
    is_sparse = make is torch.optim.SparseAdam
    if is_sparse and as_dense:
        pytest.skip("SparseAdam takes sparse gradients alone")
    module = torch.nn.ModuleList([torch.nn.Embedding(11, 3, sparse=True), torch.nn.Embedding(5, 3, sparse=True)])
    alone = copy.deepcopy(module)
    for embedding in alone:
        embedding.sparse = is_sparse
    ours = distributed(
        make(module.parameters(), 0.1),
        module,
        sparse_as_dense=as_dense,
        backward_passes_per_step=num_passes,
    )
    theirs = make(alone.parameters(), 0.1)
    for step in range(3):
        for part in range(num_passes):
            rows = [torch.tensor([(rank + step + part) % 7, rank % 3]) for rank in range(mpi.size())]
            for m, indices, scale in ((module, rows[mpi.rank()], 1), (alone, torch.cat(rows), mpi.size())):
                loss = (m[0](indices) ** 2).sum() + (m[1](indices % 5) * m[1](indices % 2)).sum()
                loss.div(scale).backward()
        if not as_dense:
            assert all(p.grad.is_sparse for p in module.parameters())
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad(set_to_none=step != 1)
    assert_close(module, alone)
    mpinn.check_with_allreduce(module)


def test_sparse_gradients_where_a_rank_has_none(mpi, distributed):
    """Its rows count as zero; with join the mean is over the ranks that have data."""
    module = torch.nn.Embedding(6, 2, sparse=True)
    mpinn.synchronize_parameters(module)
    before = module.weight.detach().clone()
    ours = distributed(torch.optim.SGD(module.parameters(), 1.0), module)
    if mpi.rank() == 0:
        module(torch.tensor([2])).sum().backward()
    ours.step()
    expected = torch.zeros(6, 2)
    expected[2] = 1 / mpi.size()
    torch.testing.assert_close(before - module.weight, expected)
    before = module.weight.detach().clone()
    with mpi.join(ours):
        for _ in range(1 + (mpi.rank() == 0)):
            ours.zero_grad()
            module(torch.tensor([mpi.rank()])).sum().backward()
            ours.step()
    expected = torch.zeros(6, 2)
    expected[: mpi.size()] = 1 / mpi.size()
    expected[0] += 1
    torch.testing.assert_close(before - module.weight, expected)


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam])
def test_a_weight_that_is_an_output_layer_too(mpi, distributed, make):
    """Its gradient is dense, as that of tied weights is in torch; also in a step without the output layer."""
    torch.manual_seed(1)
    module = torch.nn.Embedding(6, 2, sparse=True)
    alone = copy.deepcopy(module)
    alone.sparse = False
    ours = distributed(make(module.parameters(), 0.1), module)
    theirs = make(alone.parameters(), 0.1)
    for step in range(4):
        for m, ranks, optimizer in ((module, [mpi.rank()], ours), (alone, range(mpi.size()), theirs)):
            optimizer.zero_grad()
            x = m(torch.tensor([rank + step % 2 for rank in ranks]))
            (x if step == 2 else x @ m.weight.T).pow(2).sum().div(len(ranks)).backward()
            optimizer.step()
    assert_close(module, alone)
    ours.zero_grad()
    module(torch.tensor([0])).sum().backward()
    with pytest.raises(RuntimeError, match="ran again before step"):
        (module(torch.tensor([0])) @ module.weight.T).sum().backward()
    ours.zero_grad()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sparse_gradients_of_16_bits_are_added_in_float32(mpi, distributed, dtype):
    """No overflow where the mean has none, and no digits lost but in the result."""
    module = torch.nn.Embedding(4, 2, sparse=True, dtype=dtype)
    ours = distributed(torch.optim.SGD(module.parameters(), 1.0), module)
    largest = 40000.0 if dtype == torch.float16 else 1.0
    (module(torch.tensor([1])) * torch.tensor(largest, dtype=dtype)).sum().backward()
    assert module.weight.grad.dtype == dtype
    assert module.weight.grad.to_dense()[1].tolist() == [torch.tensor(largest, dtype=dtype).item()] * 2
    ours.zero_grad()
    (module(torch.tensor([1])) * (1.0 + mpi.rank() * 2.0**-7)).sum().backward()
    mean = torch.tensor(1 + (mpi.size() - 1) / 2 * 2.0**-7).to(dtype)
    assert module.weight.grad.to_dense()[1].tolist() == [mean.item()] * 2


def test_sparse_gradients_that_were_there_before(mpi):
    """Of a backward pass before the optimizer was made."""
    for as_dense in (False, True):
        module = torch.nn.Embedding(5, 2, sparse=True)
        mpinn.synchronize_parameters(module)
        module(torch.tensor([mpi.rank() % 5])).sum().backward()
        ours = optim.DistributedOptimizer(torch.optim.SGD(module.parameters(), 1.0), module, sparse_as_dense=as_dense)
        before = module.weight.detach().clone()
        ours.step()
        assert torch.allclose((before - module.weight).sum(), torch.tensor(2.0))
        ours.remove()


def test_sparse_gradients_of_other_layers_name_the_remedy(mpi, distributed):
    module = torch.nn.Embedding(4, 2)
    ours = distributed(torch.optim.SGD(module.parameters(), 0.1), module)
    module.sparse = True
    with pytest.raises(TypeError, match="sparse_as_dense=True"):
        module(torch.tensor([1])).sum().backward()
    ours.zero_grad()
