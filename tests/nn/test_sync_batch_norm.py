"""SyncBatchNorm on several ranks equals BatchNorm of one process on the batches of all."""

import pytest
import torch

from torchmpi_py.nn import SyncBatchNorm

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(240)]
PLAIN = {2: torch.nn.BatchNorm1d, 3: torch.nn.BatchNorm1d, 4: torch.nn.BatchNorm2d, 5: torch.nn.BatchNorm3d}
CLOSE = {
    torch.float64: {"rtol": 1e-10, "atol": 1e-10},
    torch.float32: {"rtol": 1e-4, "atol": 1e-4},
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
}


def values(shape, step, dtype=torch.float64):
    generator = torch.Generator().manual_seed(11 + step)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def layers(dims, dtype=torch.float64, comm=None, **options):
    """One of ours and one of torch's, with the same parameters."""
    ours, torchs = SyncBatchNorm(3, comm=comm, **options), PLAIN[dims](3, **options)
    with torch.no_grad():
        for layer in (ours, torchs):
            for number, parameter in enumerate(layer.parameters(), 1):
                parameter.copy_(torch.arange(1.0, 4.0) * number)
    return ours.to(dtype), torchs.to(dtype)


def run(layer, x, dy):
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    y = layer(x)
    y.backward(dy)
    return y.detach(), x.grad


def assert_alike(mpi, ours, torchs, dtype=torch.float64):
    """Gradients, of all ranks together, and running statistics; the former are dropped."""
    close = CLOSE[dtype]
    for (name, p), q in zip(ours.named_parameters(), torchs.parameters(), strict=True):
        grad = mpi.allreduce(p.grad.clone())
        torch.testing.assert_close(grad, q.grad, rtol=close["rtol"], atol=20 * close["atol"], msg=name)
        p.grad = q.grad = None
    torch.testing.assert_close(dict(ours.named_buffers()), dict(torchs.named_buffers()), **close)


CASES = [
    {"shape": ()},
    {"shape": (5,), "uneven": False},
    {"shape": (3, 4)},
    {"shape": (3, 4), "dtype": torch.float32},
    {"shape": (3, 4), "dtype": torch.bfloat16},
    {"shape": (4, 5), "uneven": False, "layout": torch.channels_last},
    {"shape": (2, 3, 2)},
    {"shape": (4,), "momentum": None},
    {"shape": (4,), "momentum": 0.7, "eps": 0.1},
    {"shape": (4,), "affine": False},
    {"shape": (4,), "affine": False, "track_running_stats": False},
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_as_one_process(mpi, case):
    """Some steps of training and one of evaluation, on this rank's part and on the whole."""
    given = {"uneven": True, "dtype": torch.float64, "layout": torch.contiguous_format}
    shape, uneven, dtype, layout = ((given | case)[name] for name in ("shape", *given))
    options = {name: value for name, value in case.items() if name not in ("shape", *given)}
    ours, torchs = layers(len(shape) + 2, dtype, **options)
    steps = 2 if dtype == torch.float64 else 1
    sizes = [(rank * 2 + 1) % 5 if uneven and mpi.size() > 1 else 3 for rank in range(mpi.size())]
    begin = sum(sizes[: mpi.rank()])
    mine = slice(begin, begin + sizes[mpi.rank()])
    for step in range(steps + 1):
        if step == steps and "track_running_stats" not in options:  # without them each rank has its own batch
            ours.eval(), torchs.eval()
        x = (values((sum(sizes), 3, *shape), step, dtype) * 3).contiguous(memory_format=layout)
        dy = values(x.shape, 100 + step, dtype)
        expected, dx = run(torchs, x, dy)
        y, my_dx = run(ours, x[mine], dy[mine])
        assert y.dtype == my_dx.dtype == dtype
        assert y.is_contiguous(memory_format=layout)
        torch.testing.assert_close(y, expected[mine], **CLOSE[dtype])
        torch.testing.assert_close(my_dx, dx[mine], **CLOSE[dtype])
        assert_alike(mpi, ours, torchs, dtype)
    mpi.nn.check_with_allreduce(ours)  # the running statistics have the same bits


def test_16_bit_inputs_with_wider_parameters(mpi):
    ours, other = (layers(3, torch.float32)[0] for _ in range(2))
    x, dy = (values((4, 3, 5), seed, torch.bfloat16) for seed in (mpi.rank(), 9))
    (y, dx), wide = run(ours, x, dy), run(other, x.float(), dy.float())
    torch.testing.assert_close((y.float(), dx.float()), wide, **CLOSE[torch.bfloat16])
    torch.testing.assert_close(ours.running_var, other.running_var)
    torch.testing.assert_close(ours.weight.grad, other.weight.grad, **CLOSE[torch.bfloat16])


def test_a_mean_that_is_large_against_the_spread(mpi):
    ours, torchs = layers(2, torch.float32, momentum=1.0)
    x = (1e4 + values((50 * mpi.size(), 3), 1)).float()
    ours(x[50 * mpi.rank() :][:50])
    torchs.double()(x.double())
    torch.testing.assert_close(ours.running_var, torchs.running_var.float(), rtol=1e-5, atol=0)


def test_one_value_on_each_rank_is_enough_if_there_are_several(mpi):
    ours, _ = layers(2)
    if mpi.size() == 1:
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            ours(torch.ones(1, 3, dtype=torch.float64))
        return
    y = ours(torch.full((1, 3), float(mpi.rank()), dtype=torch.float64))
    assert mpi.allreduce(y.detach().clone()).sum(0)[0].item() == pytest.approx(mpi.size() * ours.bias[0].item())
    with pytest.raises(ValueError, match="at least 2 values per channel in training, found 1 on all ranks"):
        ours(torch.ones(1 if mpi.rank() == 0 else 0, 3, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"not \(2, 4\)"):
        ours(torch.ones(2, 4, dtype=torch.float64))


@pytest.mark.mpi(min_size=4)
def test_over_a_group(mpi):
    group = mpi.split(mpi.rank() % 2)
    x = values((3 * group.size, 3), mpi.rank() % 2)
    mine = slice(3 * group.rank, 3 * group.rank + 3)
    ours, torchs = layers(2, comm=group)
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
    before = {**dict(network.named_parameters()), **dict(network.named_buffers())}
    assert SyncBatchNorm.convert_sync_batchnorm(network) is network
    assert [type(layer) for layer in (network[1], *network[2])] == [SyncBatchNorm] * 3
    assert network[3] is network[1]
    assert (network[1].eps, network[1].momentum, network[2][0].affine) == (0.1, None, False)
    assert (network[1].training, network[2][1].training) == (True, False)
    after = {**dict(network.named_parameters()), **dict(network.named_buffers())}
    assert before.keys() == after.keys()
    assert all(before[name] is after[name] for name in before)
    assert type(SyncBatchNorm.convert_sync_batchnorm(torch.nn.BatchNorm2d(2))) is SyncBatchNorm
    with pytest.raises(ValueError, match="a LazyBatchNorm1d is not initialized"):
        SyncBatchNorm.convert_sync_batchnorm(torch.nn.LazyBatchNorm1d())


def test_without_a_session_it_is_batch_norm(mpi, monkeypatch):
    ours, torchs = layers(2)
    x = values((4, 3), mpi.rank())
    monkeypatch.setattr("torchmpi_py.core.communicators.current_stack", None)
    assert torch.equal(ours(x), torchs(x))
