"""What everything that reduces gradients has in common: a registration, and the optimizers around an optimizer."""

import contextlib
import functools
import gc
import weakref

import pytest
import torch
from loops import assert_close, loss_of, pair, sides, train
from support import networks

from torchmpi_py import errors, nn as mpinn, optim

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(240)]


class Registered:
    """A registration and an optimizer, in the form of the other wrappers."""

    def __init__(self, module):
        self.optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        self.reduction = mpinn.register_async_backward(module)
        self.zero_grad, self.remove = self.optimizer.zero_grad, self.reduction.remove

    def step(self):
        self.reduction.synchronize()
        self.optimizer.step()


def distributed(module, kind=torch.optim.SGD, **options):
    return optim.DistributedOptimizer(kind(module.parameters(), lr=0.1), module, **options)


def sharded(placement):
    def make(module, kind=torch.optim.SGD, **options):
        return optim.ShardedOptimizer(module.parameters(), kind, lr=0.1, placement=placement, **options)

    return make


OPTIMIZERS = {
    "distributed": distributed,
    "slices": sharded("size"),
    "owners": sharded("round_robin"),
    "one owner": sharded(lambda number, parameter: 0),
}
every_optimizer = pytest.mark.parametrize("kind", OPTIMIZERS)
KINDS = {"registered": Registered, **OPTIMIZERS}
every_kind = pytest.mark.parametrize("kind", KINDS)


def sgd(module):
    return torch.optim.SGD(module.parameters(), lr=0.1)


@every_kind
@pytest.mark.parametrize("reaches_others", [True, False])
def test_a_layer_that_thaws_is_told_of(mpi, kind, reaches_others):
    """Also by a pass that reaches nothing that is reduced. Nothing is updated, and another wrapper goes on."""
    module, _ = pair()
    module[2].requires_grad_(False)
    ours = KINDS[kind](module)
    module[2].requires_grad_(True)
    module[0].requires_grad_(reaches_others)
    before = networks.flat(module)
    with pytest.raises(RuntimeError, match=r"(2\.weight, 2\.bias|parameter 2, parameter 3): added or made trainable"):
        train(module, ours, [0], [mpi.rank()])
    assert torch.equal(networks.flat(module), before)
    ours.remove()
    module.zero_grad()
    train(module, KINDS[kind](module), [0], [mpi.rank()])
    assert not torch.equal(networks.flat(module), before)
    mpinn.check_with_allreduce(module)


@every_kind
def test_a_backward_pass_that_breaks_off(mpi, kind):
    """What it left behind counts neither in a pass that uses other layers, nor in one that uses all."""

    def fail(gradient):
        raise ZeroDivisionError

    module, alone = pair(6, 9, 9, 2)
    ours, theirs = KINDS[kind](module), sgd(alone)
    x = [networks.batch(4, 6, rank=rank, dtype=torch.float64) for rank in range(mpi.size())]
    between = module[:3](x[mpi.rank()])
    between.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        module[3:](between).sum().backward()
    with pytest.raises(RuntimeError, match="zero_grad"):
        loss_of(module, 0, [mpi.rank()]).backward()
    for m, o, ranks in sides(mpi, module, ours, alone, theirs):
        o.zero_grad()
        m[:3](torch.cat([x[rank] for rank in ranks])).pow(2).mean().backward()
        o.step()
        train(m, o, [1], ranks)
    assert_close(module, alone)


@every_optimizer
def test_a_rank_without_a_backward_pass(mpi, kind):
    """It brings zeros, and meets the others in step()."""
    module, alone = pair()
    ours, theirs = OPTIMIZERS[kind](module), sgd(alone)
    present = max(1, mpi.size() - 1)
    if mpi.rank() < present:
        loss_of(module, 0, [mpi.rank()]).backward()
    ours.step()
    (loss_of(alone, 0, range(present)) * present / mpi.size()).backward()
    theirs.step()
    assert_close(module, alone)


@every_optimizer
@pytest.mark.parametrize("average", [True, False])
def test_accumulation_and_clipping(mpi, kind, average):
    """Gradients of two passes are added up, and clipped as their average, or sum; also where a pass is missing."""
    module, alone = pair()
    scale = 1 if average else mpi.size()
    ours, theirs = OPTIMIZERS[kind](module, average=average, backward_passes_per_step=2), sgd(alone)
    ours.param_groups[0]["lr"] = 0.1 / scale
    of_torch = functools.partial(torch.nn.utils.clip_grad_norm_, list(module.parameters()))
    clip = getattr(ours, "clip_grad_norm_", of_torch)
    for step in range(3):
        for m, o, ranks in sides(mpi, module, ours, alone, theirs):
            o.zero_grad()
            for half in range(1 if step == 2 else 2):
                loss_of(m, 2 * step + half, ranks).backward()
        is_as_with_horovod = step == 2 and kind == "distributed"
        if is_as_with_horovod:
            ours.synchronize()
        for norm_type, bound in ((2.0, 0.05), (float("inf"), 0.01)):
            norm = clip(bound * scale, norm_type)
            exact = torch.nn.utils.clip_grad_norm_(alone.parameters(), bound, norm_type)
            assert norm.item() / scale == pytest.approx(exact.item(), rel=1e-3)  # clipping adds 1e-6 to the norm
            assert exact > bound
        with ours.skip_synchronize() if is_as_with_horovod else contextlib.nullcontext():
            ours.step()
        theirs.step()
    assert_close(module, alone, 1e-5, 1e-6)


@every_optimizer
@pytest.mark.parametrize("passes", [1, 4])
def test_grad_scaler(mpi, kind, passes):
    """It unscales averages; where one element of one rank overflows, all ranks skip the step.

    At an epoch's end two of four passes are made, on rank 0 one: what is unscaled is reduced all the same. Some call
    ``zero_grad`` of the module in place of the optimizer's.
    """
    module, alone = pair(33, 57, 41, 5)
    ours = OPTIMIZERS[kind](module, torch.optim.Adam, backward_passes_per_step=passes)
    theirs = torch.optim.Adam(alone.parameters(), lr=0.1)
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in range(2)]
    for step in range(3):
        for rank in range(mpi.size()):
            for number in range(1 + (rank > 0 and passes > 1)):
                for scaler, m, share in ((scalers[0], module, 1), (scalers[1], alone, mpi.size())):
                    if m is alone or rank == mpi.rank():
                        loss = loss_of(m, 2 * step + number, [rank]) / share
                        overflow = m[0].weight[0, 0] * float("inf") if (step, rank) == (1, 0) else 0.0
                        scaler.scale(loss + overflow).backward()
        for scaler, (m, o, _) in zip(scalers, sides(mpi, module, ours, alone, theirs), strict=True):
            scaler.step(o)
            scaler.update()
            (m if passes == 1 and m is alone else o).zero_grad()
    assert scalers[0].get_scale() == scalers[1].get_scale() == 512.0
    assert_close(module, alone, 1e-6, 1e-7)


@every_kind
def test_it_goes_with_its_module(mpi, kind):
    module, _ = pair()
    ours = KINDS[kind](module)
    references = [weakref.ref(x) for x in (ours, module, module[0].weight)]
    del ours, module
    gc.collect()
    assert [reference() for reference in references] == [None] * 3


@every_optimizer
def test_over_a_group_of_ranks(mpi, kind):
    """Ranks of another group do not take part."""
    module, alone = pair()
    color = mpi.rank() % 2
    with mpi.split(color) as comm:
        ours = OPTIMIZERS[kind](module, comm=comm)
        train(module, ours, [0], [mpi.rank()])
        train(alone, sgd(alone), [0], range(color, mpi.size(), 2))
        assert_close(module, alone)
        ours.remove()


@pytest.mark.mpi(min_size=2)
@every_optimizer
def test_parameters_that_differ(mpi, kind):
    module, _ = pair()
    module[2].bias.data[0] += mpi.rank()
    ours = OPTIMIZERS[kind](module)
    with pytest.raises(errors.RanksDisagree, match=r"2\.bias|3 "):
        train(module, ours, [0], [mpi.rank()])
