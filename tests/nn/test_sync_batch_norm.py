"""SyncBatchNorm on several ranks equals BatchNorm of one process on the batches of all."""

import pytest
import torch

from torchmpi_py.nn import SyncBatchNorm

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(240)]
PLAIN = {2: torch.nn.BatchNorm1d, 3: torch.nn.BatchNorm1d, 4: torch.nn.BatchNorm2d, 5: torch.nn.BatchNorm3d}
SHAPES = [(), (5,), (3, 4), (2, 3, 2)]
CLOSE = {
    torch.float64: {"rtol": 1e-10, "atol": 1e-11},
    torch.float32: {"rtol": 1e-4, "atol": 1e-5},
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
}


def values(shape, step, dtype=torch.float64):
    generator = torch.Generator().manual_seed(11 + step)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def layers(dims, channels=3, dtype=torch.float64, comm=None, **options):
    """One of ours and one of torch's, with the same parameters."""
    ours, torchs = SyncBatchNorm(channels, comm=comm, **options), PLAIN[dims](channels, **options)
    with torch.no_grad():
        for layer in (ours, torchs):
            for number, parameter in enumerate(layer.parameters(), 1):
                parameter.copy_(torch.arange(1.0, channels + 1) * number)
    return ours.to(dtype), torchs.to(dtype)


def run(layer, x, dy):
    x = x.detach().clone().requires_grad_()
    y = layer(x)
    y.backward(dy)
    return y.detach(), x.grad


def counts(mpi, uneven):
    """How many samples each rank has."""
    return [(rank * 2 + 1) % 5 if uneven and mpi.size() > 1 else 3 for rank in range(mpi.size())]


def compare(mpi, ours, torchs, shape, *, uneven=True, dtype=torch.float64, steps=3, offset=0.0):
    """Some steps of training and one of evaluation, on this rank's part and on the whole."""
    close = CLOSE[dtype]
    sizes = counts(mpi, uneven)
    begin = sum(sizes[: mpi.rank()])
    mine = slice(begin, begin + sizes[mpi.rank()])
    for step in range(steps + 1):
        if step == steps:
            ours.eval(), torchs.eval()
        x = values((sum(sizes), ours.num_features, *shape), step, dtype) * 3 + offset
        dy = values(x.shape, 100 + step, dtype)
        expected, dx = run(torchs, x, dy)
        y, my_dx = run(ours, x[mine], dy[mine])
        assert y.dtype == my_dx.dtype == dtype
        torch.testing.assert_close(y, expected[mine], **close)
        torch.testing.assert_close(my_dx, dx[mine], **close)
        for (name, p), q in zip(ours.named_parameters(), torchs.parameters(), strict=True):
            grad = mpi.allreduce(p.grad.clone())
            torch.testing.assert_close(grad, q.grad, rtol=close["rtol"], atol=20 * close["atol"], msg=name)
            p.grad = q.grad = None
        torch.testing.assert_close(dict(ours.named_buffers()), dict(torchs.named_buffers()), **close)
        if sizes[mpi.rank()] and not torchs.training:
            assert torch.equal(run(ours, x[mine], dy[mine])[0], y)
    mpi.nn.check_with_allreduce(ours)  # the running statistics have the same bits


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=len)
def test_as_one_process(mpi, shape, uneven):
    compare(mpi, *layers(len(shape) + 2), shape, uneven=uneven)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes(mpi, dtype):
    compare(mpi, *layers(4, dtype=dtype), (3, 4), dtype=dtype, steps=1)


def test_16_bit_inputs_with_wider_parameters(mpi):
    ours, _ = layers(3, dtype=torch.float32)
    other, _ = layers(3, dtype=torch.float32)
    x = values((4, 3, 5), mpi.rank(), torch.bfloat16)
    y, dx = run(ours, x, values(x.shape, 9, torch.bfloat16))
    wide, wide_dx = run(other, x.float(), values(x.shape, 9, torch.bfloat16).float())
    torch.testing.assert_close(y.float(), wide, **CLOSE[torch.bfloat16])
    torch.testing.assert_close(dx.float(), wide_dx, **CLOSE[torch.bfloat16])
    torch.testing.assert_close(ours.running_var, other.running_var)
    torch.testing.assert_close(ours.weight.grad, other.weight.grad, **CLOSE[torch.bfloat16])


@pytest.mark.parametrize(
    "options",
    [
        {"momentum": None},
        {"momentum": 0.7, "eps": 0.1},
        {"affine": False},
        {"track_running_stats": False},
        {"affine": False, "track_running_stats": False},
    ],
    ids=str,
)
def test_options(mpi, options):
    steps = 2 if options.get("track_running_stats", True) else 1
    ours, torchs = layers(3, **options)
    if not options.get("track_running_stats", True):  # in evaluation each rank has its own batch
        torchs.eval = ours.eval = lambda: None
    compare(mpi, ours, torchs, (4,), steps=steps)


def test_a_mean_that_is_large_against_the_spread(mpi):
    ours, torchs = layers(2, dtype=torch.float32, momentum=1.0)
    x = (1e4 + values((50 * mpi.size(), 3), 1)).float()
    ours(x[50 * mpi.rank() :][:50])
    torchs.double()(x.double())
    torch.testing.assert_close(ours.running_var, torchs.running_var.float(), rtol=1e-5, atol=0)


def test_channels_last(mpi):
    ours, torchs = layers(4)
    x = values((2 * mpi.size(), 3, 4, 5), 1).contiguous(memory_format=torch.channels_last)
    expected, dx = run(torchs, x, values(x.shape, 2))
    mine = slice(2 * mpi.rank(), 2 * mpi.rank() + 2)
    y, my_dx = run(ours, x[mine], values(x.shape, 2)[mine])
    torch.testing.assert_close(y, expected[mine], **CLOSE[torch.float64])
    torch.testing.assert_close(my_dx, dx[mine], **CLOSE[torch.float64])
    assert y.is_contiguous(memory_format=torch.channels_last)


def test_one_value_on_each_rank_is_enough_if_there_are_several(mpi):
    ours, _ = layers(2)
    if mpi.size() == 1:
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            ours(torch.ones(1, 3, dtype=torch.float64))
        return
    y = ours(torch.full((1, 3), float(mpi.rank()), dtype=torch.float64))
    assert mpi.allreduce(y.detach().clone()).sum(0)[0].item() == pytest.approx(mpi.size() * ours.bias[0].item())
    with pytest.raises(ValueError, match="at least 2 values per channel when training, not 1 on all ranks"):
        ours(torch.ones(1 if mpi.rank() == 0 else 0, 3, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"expected \(N, 3, \.\.\.\), not \(2, 4\)"):
        ours(torch.ones(2, 4, dtype=torch.float64))


@pytest.mark.mpi(min_size=2)
def test_a_batch_that_stands_in_for_none(mpi):
    """Outputs, gradients and statistics of the other ranks are those without it, and nothing comes of its own."""
    ours, torchs = layers(3)
    me, last = mpi.rank(), mpi.size() - 1
    ours.has_samples = me != last
    for step in range(2):
        x, dy = values((3 * last, 3, 5), step), values((3 * last, 3, 5), 10 + step)
        expected, dx = run(torchs, x, dy)
        if me == last:
            y, mine = run(ours, values((4, 3, 5), 20) + 7, torch.zeros(4, 3, 5, dtype=torch.float64))
            assert not mine.any()
            assert y.abs().sum() > 0
        else:
            part = slice(3 * me, 3 * me + 3)
            y, mine = run(ours, x[part], dy[part])
            torch.testing.assert_close((y, mine), (expected[part], dx[part]), rtol=1e-10, atol=1e-11)
        for p, q in zip(ours.parameters(), torchs.parameters(), strict=True):
            torch.testing.assert_close(mpi.allreduce(p.grad.clone()), q.grad, rtol=1e-10, atol=1e-10)
            p.grad = q.grad = None
        torch.testing.assert_close(dict(ours.named_buffers()), dict(torchs.named_buffers()), rtol=1e-10, atol=1e-11)


@pytest.mark.mpi(min_size=4)
def test_over_a_group(mpi):
    group = mpi.split(mpi.rank() % 2)
    ours, torchs = layers(2, comm=group)
    x = values((3 * group.size, 3), mpi.rank() % 2)
    mine = slice(3 * group.rank, 3 * group.rank + 3)
    torch.testing.assert_close(ours(x[mine]), torchs(x)[mine], **CLOSE[torch.float64])
    with mpi.at(mpi.push_communicator(f"group {mpi.rank() % 2}")):
        ours, torchs = layers(2)
        torch.testing.assert_close(ours(x[mine]), torchs(x)[mine], **CLOSE[torch.float64])


def test_convert(mpi):
    network = torch.nn.Sequential(
        torch.nn.Linear(4, 3),
        torch.nn.BatchNorm1d(3, eps=0.1, momentum=None),
        torch.nn.Sequential(torch.nn.BatchNorm1d(3, affine=False), torch.nn.SyncBatchNorm(3)),
    )
    network[2][1].eval()
    network.append(network[1])  # one layer in two places
    before = dict(network.named_parameters()), dict(network.named_buffers())
    converted = SyncBatchNorm.convert_sync_batchnorm(network)
    assert converted is network
    assert [type(layer) for layer in (network[1], *network[2])] == [SyncBatchNorm] * 3
    assert network[3] is network[1]
    assert (network[1].eps, network[1].momentum, network[2][0].affine) == (0.1, None, False)
    assert (network[1].training, network[2][1].training) == (True, False)
    for old, new in zip(before, (dict(network.named_parameters()), dict(network.named_buffers())), strict=True):
        assert old.keys() == new.keys()
        assert all(old[name] is new[name] for name in old)
    assert type(SyncBatchNorm.convert_sync_batchnorm(torch.nn.BatchNorm2d(2))) is SyncBatchNorm


def test_without_a_session_it_is_batch_norm(mpi, monkeypatch):
    ours, torchs = layers(2)
    x = values((4, 3), mpi.rank())
    monkeypatch.setattr("torchmpi_py.core.communicators.current_stack", None)
    assert torch.equal(ours(x), torchs(x))
