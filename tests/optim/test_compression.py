"""Compressed gradients: what comes out, what waits for the next step, and how many bytes are sent."""

import collections
import math

import pytest
import torch
from loops import COMPRESSIONS, loss_of, train
from support import networks

from torchmpi_py import errors, nn as mpinn, optim
from torchmpi_py.collectives import verbs
from torchmpi_py.core.handles import wait_all
from torchmpi_py.optim import compression

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(240)]

every_one = pytest.mark.parametrize("name", COMPRESSIONS)


def gradient(rank, step=0, shape=(12, 10)):
    return networks.batch(*shape, rank=rank, step=step)


def compressor(mpi, compression, *shape, dtype=torch.float32):
    flat = torch.zeros(math.prod(shape), dtype=dtype)
    return compression.compressor(flat, [flat.view(shape)], mpi.communicator())


def sharded(module, kind, name, placement):
    made = COMPRESSIONS[name]()
    return optim.ShardedOptimizer(module.parameters(), kind, lr=0.01, placement=placement, compression=made)


def reduced(compressor, x, op="avg"):
    compressor.flat.copy_(x.reshape(-1))
    wait_all(compressor.launch(op))
    compressor.finish(op)
    return compressor.flat.clone().view(x.shape)


@every_one
def test_all_ranks_have_the_same_bits_also_after_an_overflow(mpi, name):
    """A step that overflows leaves nothing behind."""
    made = compressor(mpi, COMPRESSIONS[name](), 12, 10)
    for step, op in enumerate(["avg", "sum", "avg", "avg", "sum"]):
        x = gradient(mpi.rank(), step)
        if step == 2 and mpi.rank() == 0:
            x[:] = math.inf
        found = reduced(made, x, op)
        mpi.check_with_allreduce(found)
        assert found.isfinite().all() == (step != 2)


@pytest.mark.parametrize(
    ("name", "placement"),
    [("BF16", "size"), ("FP16", "round_robin"), ("TopK", "size"), ("TopK", "round_robin"), ("PowerSGD", "size")],
)
def test_a_sharded_optimizer_leaves_out_an_overflow_on_all_ranks(mpi, name, placement):
    """GradScaler skips the step; the ones after it are as if it had not been."""
    module = networks.perceptron(12, 20, 7)
    ours = sharded(module, torch.optim.Adam, name, placement)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(3):
        ours.zero_grad()
        loss = loss_of(module, step, [mpi.rank()])
        if step == 1 and mpi.rank() == 0:
            loss = loss + module[0].weight[0, 0] * float("inf")
        scaler.scale(loss).backward()
        before = networks.flat(module)
        scaler.step(ours)
        scaler.update()
        assert torch.equal(networks.flat(module), before) == (step == 1)
        assert networks.flat(module).isfinite().all()
    assert scaler.get_scale() == 512.0
    mpinn.check_with_allreduce(module)


@pytest.mark.parametrize("name", ["TopK", "PowerSGD"])
def test_a_parameter_that_nobody_uses_for_a_while_gets_all_of_its_gradient(mpi, name):
    gradients = gradient(mpi.rank(), 0), gradient(mpi.rank(), 1)
    net = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(12, 10)) for _ in range(3))
    used, seldom, never = net
    made = compression.TopK(0.25) if name == "TopK" else compression.PowerSGD(5)
    ours = optim.DistributedOptimizer(torch.optim.SGD(net.parameters(), 1.0), net, compression=made)
    for step in range(8):
        loss = (used * gradients[0] * (step == 0)).sum()
        if step == 0:
            loss = loss + (seldom * gradients[1]).sum()
        ours.zero_grad()
        loss.backward()
        assert never.grad is None
        mpi.check_with_allreduce(torch.zeros(12, 10) if seldom.grad is None else seldom.grad)
        ours.step()
    assert seldom.grad is None or seldom.grad.abs().max() < 1e-4
    for number, p in enumerate((used, seldom)):
        exact = sum(gradient(rank, number) for rank in range(mpi.size())) / mpi.size()
        torch.testing.assert_close(-p.detach(), exact, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("name", "digits"), [("BF16", 2.0**-8), ("FP16", 2.0**-11)])
@pytest.mark.parametrize("op", ["avg", "sum"])
def test_16_bits(mpi, name, digits, op):
    made = compressor(mpi, COMPRESSIONS[name](), 12, 10)
    for step in range(3):
        exact = sum(gradient(rank, step).double() for rank in range(mpi.size()))
        scale = 1 if op == "sum" else mpi.size()
        largest = max(gradient(rank, step).abs().max() for rank in range(mpi.size()))
        error = (reduced(made, gradient(mpi.rank(), step), op) - exact / scale).abs().max()
        assert error <= (mpi.size() + 1) * mpi.size() * digits * largest / scale
        assert error > 0 or mpi.size() == 1


@pytest.mark.parametrize(
    "sizes",
    [
        [1e9, 1e9, 1e-9, 1e-9, 1e-9, 1e9],
        [1e-9, 1e-9, 0.0, 0.0, 1e-9, 1e-20, 1.0],
        [1e-38, 1e-38, 1.0],
        [1e-307, 1e-307, 1.0],
    ],
)
def test_the_range_of_float16_is_guarded(mpi, sizes):
    """Values that would overflow, or vanish, in float16: the first ones go uncompressed, later ones are scaled."""
    dtype = torch.float64 if sizes[0] < 1e-38 else torch.float32
    made = compressor(mpi, compression.FP16(), 120, dtype=dtype)
    for size in sizes:
        exact = sum(gradient(rank, shape=(120,)).double() for rank in range(mpi.size())) / mpi.size()
        found = reduced(made, gradient(mpi.rank(), shape=(120,)).to(dtype) * size)
        torch.testing.assert_close(found.double() / (size or 1), exact * bool(size), rtol=0.01, atol=0.01)
    assert reduced(made, torch.full((120,), math.nan if mpi.rank() == 0 else 1.0)).isnan().all()


def test_topk_takes_the_largest_of_each_rank(mpi):
    made = compressor(mpi, compression.TopK(0.05), 120)
    expected = torch.zeros(120)
    for rank in range(mpi.size()):
        x = gradient(rank, shape=(120,))
        largest = x.abs().topk(6).indices
        expected[largest] += x[largest]
    torch.testing.assert_close(reduced(made, gradient(mpi.rank(), shape=(120,)), "sum"), expected)


def every_tenth(count):
    """Not of those that a sample takes, which are the multiples of its step."""
    x = torch.zeros(count)
    x[1::10][:9000] = torch.arange(9000.0) + 1
    return x


MANY = {
    "normal": lambda count: torch.randn(count, generator=torch.Generator().manual_seed(3)),
    "alike": torch.ones,
    "in order": lambda count: torch.arange(float(count)).roll(5),
    "with NaN": lambda count: torch.ones(count).index_fill_(0, torch.tensor([7, 60_000]), math.nan),
    "every tenth": every_tenth,
}


@pytest.mark.parametrize("kind", MANY)
def test_topk_of_many_elements(mpi, kind):
    """What a sample calls large is only a hint; also where elements are alike, or the sample sees none of the large."""
    x, count = MANY[kind](700_001), 7000
    found = reduced(compressor(mpi, compression.TopK(0.01), 700_001), x)
    assert (found != 0).sum() == count
    if kind == "with NaN":
        assert found[[7, 60_000]].isnan().all()
    else:
        torch.testing.assert_close(found.abs().sort().values[-count:], x.abs().sort().values[-count:])


@pytest.mark.mpi(min_size=2)
def test_other_ratios_on_other_ranks(mpi):
    made = compressor(mpi, compression.TopK(0.1 * (1 + (mpi.rank() == 0))), 12, 10)
    with pytest.raises(errors.RanksDisagree, match=r"TopK: ratios differ \(this rank sends"):
        reduced(made, gradient(mpi.rank()))


@pytest.fixture
def sent(monkeypatch):
    """The bytes that reductions and gathers are given, by verb."""
    counted = collections.Counter()

    def count(verb):
        plain = getattr(verbs, verb)

        def counting(x, *args, **options):
            counted[verb] += getattr(x, "nbytes", 0)
            return plain(x, *args, **options)

        return counting

    for verb in ("allreduce", "allreduce_async", "allgather_async", "reduce_async", "reduce_scatter_async"):
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
    ids=COMPRESSIONS,
)
def test_bytes_on_the_wire(mpi, sent, made, num_bytes):
    one = compressor(mpi, made(), 100, 80)
    for step in range(2):
        reduced(one, gradient(mpi.rank(), step, shape=(100, 80)))
    assert sent.total() == 2 * num_bytes
    sent.clear()
    reduced(compressor(mpi, compression.FP16(), 8000), torch.zeros(8000))
    assert sent.total() == 2 * 8000  # zeros do not go twice, though nothing shows their scale


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("name", "placement", "verb"), [("BF16", "size", "reduce_scatter_async"), ("FP16", "round_robin", "reduce_async")]
)
def test_bytes_on_the_wire_of_a_sharded_optimizer(mpi, sent, name, placement, verb):
    module = networks.perceptron(60, 60, 60)  # a number of elements that 1 to 5 divides
    train(module, sharded(module, torch.optim.SGD, name, placement), range(2), [mpi.rank()])
    assert sent[verb] == 2 * 2 * sum(p.numel() for p in module.parameters())


def test_buckets_of_other_dtypes_go_as_they_are(mpi):
    module = torch.nn.ParameterList([torch.ones(4, dtype=torch.complex64)])
    ours = mpinn.register_async_backward(module, compression=compression.TopK(0.5))
    (module[0].real * torch.arange(4) * (1 + mpi.rank())).sum().backward()
    ours.synchronize()
    torch.testing.assert_close(module[0].grad.real, torch.arange(4.0) * (1 + mpi.size()) / 2)


def test_bad_options(mpi):
    for wrong in (0, 1.5, "half", True):
        with pytest.raises(ValueError, match="ratio="):
            compression.TopK(wrong)
    with pytest.raises(ValueError, match="rank=0"):
        compression.PowerSGD(0)
    module = torch.nn.Linear(2, 2)
    for make in (
        lambda: mpinn.register_async_backward(module, compression="BF16"),
        lambda: optim.ShardedOptimizer(module.parameters(), torch.optim.SGD, compression="BF16"),
    ):
        with pytest.raises(TypeError, match="compression='BF16'"):
            make()
