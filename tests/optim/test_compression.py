"""Compressed gradients: what comes out, what waits for the next step, and how many bytes are sent."""

import copy
import math

import pytest
import torch

from torchmpi_py import errors, nn as mpinn, optim
from torchmpi_py.collectives import verbs
from torchmpi_py.optim import compression

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(240)]

ALL = {
    "BF16": lambda: compression.BF16(),
    "FP16": lambda: compression.FP16(),
    "TopK": lambda: compression.TopK(0.2),
    "PowerSGD": lambda: compression.PowerSGD(2),
}
every_one = pytest.mark.parametrize("name", ALL)


def gradient(rank, step=0, shape=(12, 10)):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(shape, generator=generator)


def compressor(mpi, compression, flat, shapes=None):
    shapes = shapes or [flat.shape]
    parts = torch.split(flat, [shape.numel() for shape in shapes])
    views = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
    return compression.compressor(flat, views, mpi.communicator())


def reduced(compressor, x, op="avg"):
    compressor.flat.copy_(x.reshape(-1))
    mpinn.buckets.wait_all(compressor.launch(op))
    compressor.finish(op)
    return compressor.flat.clone().view(x.shape)


@every_one
@pytest.mark.parametrize("op", ["avg", "sum"])
def test_all_ranks_have_the_same_bits(mpi, name, op):
    x = gradient(mpi.rank())
    made = compressor(mpi, ALL[name](), torch.zeros(x.numel()), [x.shape])
    for step in range(3):
        mpi.check_with_allreduce(reduced(made, gradient(mpi.rank(), step), op))


@pytest.mark.parametrize("name", ["TopK", "PowerSGD"])
def test_a_parameter_that_nobody_uses_for_a_while_gets_all_of_its_gradient(mpi, name):
    gradients = gradient(mpi.rank(), 0), gradient(mpi.rank(), 1)
    net = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(12, 10)) for _ in range(3))
    used, seldom, never = net
    ours = optim.DistributedOptimizer(torch.optim.SGD(net.parameters(), 1.0), net, compression=ALL[name]())
    for step in range(120):
        loss = (used * gradients[0] * (step == 0)).sum()
        if step == 0:
            loss = loss + (seldom * gradients[1]).sum()
        ours.zero_grad()
        loss.backward()
        assert never.grad is None
        mpi.check_with_allreduce(torch.zeros(12, 10) if seldom.grad is None else seldom.grad)
        ours.step()
    ours.remove()
    assert seldom.grad is None or seldom.grad.abs().max() < 1e-6
    for number, p in enumerate((used, seldom)):
        exact = sum(gradient(rank, number) for rank in range(mpi.size())) / mpi.size()
        torch.testing.assert_close(-p.detach(), exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["BF16", "FP16"])
@pytest.mark.parametrize("op", ["avg", "sum"])
def test_16_bits(mpi, name, op):
    made = compressor(mpi, ALL[name](), torch.zeros(120))
    digits = 2.0**-8 if name == "BF16" else 2.0**-11
    for step in range(3):
        exact = sum(gradient(rank, step).double() for rank in range(mpi.size()))
        scale = 1 if op == "sum" else mpi.size()
        largest = max(gradient(rank, step).abs().max() for rank in range(mpi.size()))
        found = reduced(made, gradient(mpi.rank(), step), op)
        error = (found - exact / scale).abs().max()
        assert error <= (mpi.size() + 1) * mpi.size() * digits * largest / scale
        assert error > 0 or mpi.size() == 1


def test_the_range_of_float16_is_guarded(mpi):
    """Values that would overflow, or vanish, in float16: the first ones go uncompressed, later ones are scaled."""
    for sizes in ([1e9, 1e9, 1e-9, 1e-9, 1e-9, 1e9], [1e-9, 1e-9, 0.0, 0.0, 1e-9, 1e-20, 1.0], [1e-38, 1e-38, 1.0]):
        made = compressor(mpi, compression.FP16(), torch.zeros(120))
        for size in sizes:
            exact = sum(gradient(rank).double() for rank in range(mpi.size())) / mpi.size() * size
            found = reduced(made, gradient(mpi.rank()) * size)
            torch.testing.assert_close(found.double(), exact, rtol=0.01, atol=0.01 * size)
    found = reduced(made, torch.full((120,), math.nan if mpi.rank() == 0 else 1.0))
    assert torch.isnan(found).all()


def test_nothing_is_lost(mpi):
    """What all steps gave, and what is left on the ranks, is the sum of all gradients."""
    made = compressor(mpi, ALL["TopK"](), torch.zeros(120))
    total = torch.zeros(12, 10)
    for step in range(5):
        found = reduced(made, gradient(mpi.rank(), step), "sum")
        assert (found != 0).sum() <= 24 * mpi.size()
        total += found
    total += mpi.allreduce(made.left.clone()).view(12, 10)
    exact = sum(gradient(rank, step) for rank in range(mpi.size()) for step in range(5))
    torch.testing.assert_close(total, exact, rtol=1e-5, atol=1e-5)


def test_topk_takes_the_largest(mpi):
    """Of each rank."""
    made = compressor(mpi, compression.TopK(0.05), torch.zeros(120))
    expected = torch.zeros(120)
    for rank in range(mpi.size()):
        x = gradient(rank).flatten()
        largest = x.abs().topk(6).indices
        expected[largest] += x[largest]
    torch.testing.assert_close(reduced(made, gradient(mpi.rank()), "sum").flatten(), expected)


@pytest.mark.parametrize("kind", ["normal", "alike", "in order", "with NaN"])
def test_topk_of_many_elements(mpi, kind):
    """What a sample calls large is only a hint; also where elements are alike, or the sample sees none of the large."""
    x = {
        "normal": torch.randn(700_001, generator=torch.Generator().manual_seed(3)),
        "alike": torch.ones(700_001),
        "in order": torch.arange(700_001.0).roll(5),
        "with NaN": torch.ones(700_001).index_fill_(0, torch.tensor([7, 600_000]), math.nan),
    }[kind]
    made = compressor(mpi, compression.TopK(0.01), torch.zeros(700_001))
    found = reduced(made, x, "avg")
    count = 7000
    assert (found != 0).sum() == count
    if kind == "with NaN":
        assert found[[7, 600_000]].isnan().all()
    else:
        torch.testing.assert_close(found.abs().sort().values[-count:], x.abs().sort().values[-count:])


def test_topk_where_the_sample_misses_what_is_large(mpi):
    x = torch.zeros(700_001)
    x[1::10][:9000] = torch.arange(9000.0) + 1  # every tenth element; a sample takes multiples of its step
    found = reduced(compressor(mpi, compression.TopK(0.01), torch.zeros(700_001)), x)
    torch.testing.assert_close(found[found != 0].sort().values, torch.arange(2000.0, 9000.0) + 1)


def test_powersgd_of_what_has_so_small_a_rank_is_exact(mpi):
    """A matrix of rank 2, the same on all ranks, with a bias that goes as it is."""
    a, b = gradient(0, shape=(12, 2)), gradient(1, shape=(2, 10))
    shapes = [torch.Size([12, 10]), torch.Size([5])]
    made = compressor(mpi, compression.PowerSGD(2), torch.zeros(125), shapes)
    x = torch.cat([(a @ b).flatten(), torch.arange(5.0) + mpi.rank()])
    found = reduced(made, x)
    torch.testing.assert_close(found[:120], x[:120], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[120:], torch.arange(5.0) + (mpi.size() - 1) / 2)
    assert made.left.abs().max() < 1e-4


def test_powersgd_errors_come_back(mpi):
    """The mean of many steps with the same gradients comes near the exact mean."""
    made = compressor(mpi, compression.PowerSGD(2), torch.zeros(120), [torch.Size([12, 10])])
    exact = sum(gradient(rank) for rank in range(mpi.size())) / mpi.size()
    total = sum(reduced(made, gradient(mpi.rank())) for _ in range(40)) / 40
    assert (total - exact).norm() < 0.15 * exact.norm()


@every_one
def test_a_step_that_overflows_leaves_nothing_behind(mpi, name):
    made = compressor(mpi, ALL[name](), torch.zeros(120), [torch.Size([12, 10])])
    reduced(made, gradient(mpi.rank()))
    x = gradient(mpi.rank())
    if mpi.rank() == 0:
        x[:] = math.inf
    assert not torch.isfinite(reduced(made, x)).all()
    for step in range(2):
        assert torch.isfinite(reduced(made, gradient(mpi.rank(), step))).all()


def test_gradients_of_tiny_doubles(mpi):
    made = compressor(mpi, compression.FP16(), torch.zeros(120, dtype=torch.float64))
    for size in (1e-307, 1e-307, 1.0):
        exact = sum(gradient(rank).double() for rank in range(mpi.size())) / mpi.size() * size
        found = reduced(made, gradient(mpi.rank()).double() * size)
        torch.testing.assert_close(found / size, exact / size, rtol=0.01, atol=0.01)


def test_other_ratios_on_other_ranks(mpi):
    if mpi.size() == 1:
        pytest.skip("one rank agrees with itself")
    made = compressor(mpi, compression.TopK(0.1 * (1 + (mpi.rank() == 0))), torch.zeros(120))
    with pytest.raises(errors.RanksDisagree, match=r"TopK: this rank takes .* of a bucket, all ranks together"):
        reduced(made, gradient(mpi.rank()))


@pytest.fixture
def sent(monkeypatch):
    """The bytes that reductions and gathers are given."""
    counted = []

    def count(verb):
        plain = getattr(verbs, verb)

        def counting(x, *args, **options):
            counted.append(getattr(x, "nbytes", 0))
            return plain(x, *args, **options)

        return counting

    for verb in ("allreduce", "allreduce_async", "allgather", "allgather_async"):
        monkeypatch.setattr(verbs, verb, count(verb))
    return counted


@pytest.mark.parametrize(
    ("made", "num_bytes"),
    [
        (compression.BF16, 2 * 100 * 80),
        (compression.FP16, 2 * 100 * 80),
        (lambda: compression.TopK(0.01), (4 + 4) * 80),
        (lambda: compression.PowerSGD(2), 4 * 2 * (100 + 80)),
    ],
    ids=["BF16", "FP16", "TopK", "PowerSGD"],
)
def test_bytes_on_the_wire(mpi, sent, made, num_bytes):
    compressor_of_bucket = compressor(mpi, made(), torch.zeros(8000), [torch.Size([100, 80])])
    reduced(compressor_of_bucket, gradient(mpi.rank(), shape=(100, 80)))
    reduced(compressor_of_bucket, gradient(mpi.rank(), 1, shape=(100, 80)))
    assert sum(sent) == 2 * num_bytes


def test_a_bucket_of_zeros_is_not_sent_twice(mpi, sent):
    made = compressor(mpi, compression.FP16(), torch.zeros(8000))
    reduced(made, torch.zeros(8000))
    assert sum(sent) == 2 * 8000


@pytest.mark.slow
@every_one
def test_training_learns(mpi, name):
    """Whole loops, by register_async_backward and by DistributedOptimizer: equal on all ranks, and near the exact."""
    losses = []
    for how in ("exact", "register", "optimizer"):
        torch.manual_seed(3)
        module = torch.nn.Sequential(torch.nn.Linear(10, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        teacher = copy.deepcopy(module)
        for p in teacher.parameters():
            p.data.mul_(1.5)
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        chosen = None if how == "exact" else ALL[name]()
        if how == "optimizer":
            ours = optimizer = optim.DistributedOptimizer(optimizer, module, compression=chosen)
        else:
            ours = mpinn.register_async_backward(module, compression=chosen)
        for step in range(100):
            x = gradient(mpi.rank(), step, (8, 10))
            optimizer.zero_grad()
            (module(x) - teacher(x)).pow(2).mean().backward()
            ours.synchronize()
            optimizer.step()
        mpinn.check_with_allreduce(module)
        ours.remove()
        x = gradient(99, 99, (200, 10))
        losses.append((module(x) - teacher(x)).pow(2).mean().item())
    torch.manual_seed(3)
    assert losses[1] == losses[2]
    assert losses[1] < max(1.5 * losses[0], 0.03)
    assert losses[1] != losses[0] or mpi.size() == 1


def test_buckets_of_other_dtypes_go_as_they_are(mpi):
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.ones(4, dtype=torch.complex64))
    ours = mpinn.register_async_backward(module, compression=compression.TopK(0.5))
    (module.weight.real * torch.arange(4) * (1 + mpi.rank())).sum().backward()
    ours.synchronize()
    torch.testing.assert_close(module.weight.grad.real, torch.arange(4.0) * (1 + mpi.size()) / 2)
    ours.remove()


def test_bad_options(mpi):
    for wrong in (0, 1.5, "half", True):
        with pytest.raises(ValueError, match=r"ratio="):
            compression.TopK(wrong)
    with pytest.raises(ValueError, match="rank=0"):
        compression.PowerSGD(0)
    with pytest.raises(TypeError, match="compression='BF16'"):
        mpinn.register_async_backward(torch.nn.Linear(2, 2), compression="BF16")
    with pytest.raises(AttributeError, match=r"RandomK was removed; use TopK"):
        _ = optim.compression.RandomK
