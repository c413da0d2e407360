"""Parameters, buffers and gradients of a module become equal on all ranks, and the check that they are."""

import pytest
import torch

from torchmpi_py import nn as mpinn, optim
from torchmpi_py.core import config
from torchmpi_py.errors import RanksDisagree

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(240)]


def network(rank, dtype=torch.float32):
    """A network that is different on every rank."""
    torch.manual_seed(rank)
    net = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.ReLU(), torch.nn.Linear(7, 3))
    net[1].num_batches_tracked += rank
    net[1].running_mean += rank
    return net.to(dtype)


@pytest.mark.parametrize(("fuse_bytes", "dtype"), [(1, torch.float32), (100, torch.float64), (1 << 20, torch.bfloat16)])
def test_parameters(mpi, monkeypatch, fuse_bytes, dtype):
    monkeypatch.setattr(config, "current", config.Tuning(fuse_bytes=fuse_bytes))
    all_states = [network(rank, dtype).state_dict() for rank in range(mpi.size())]
    for average in (False, True):
        net = network(mpi.rank(), dtype)
        mpinn.synchronize_parameters(net, average=average)
        for name, value in net.state_dict().items():
            if average and value.is_floating_point():
                mean = torch.stack([state[name].double() for state in all_states]).mean(0)
                torch.testing.assert_close(value.double(), mean, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
            else:
                assert torch.equal(value, all_states[0][name]), name
        mpinn.check_with_allreduce(net)


@pytest.mark.parametrize(("how", "fuse_bytes"), [("average", 1), ("average", 1 << 20), ("root", 1 << 20)])
def test_buffers(mpi, monkeypatch, how, fuse_bytes):
    monkeypatch.setattr(config, "current", config.Tuning(fuse_bytes=fuse_bytes))
    net, size = network(mpi.rank()), mpi.size()
    weight = net[0].weight.clone()
    net.register_buffer("mask", torch.arange(5) % 2 == mpi.rank() % 2)
    net.register_buffer("phase", torch.complex(torch.arange(3.0), torch.full((3,), float(mpi.rank()))))
    constant = torch.rand(1000, generator=torch.Generator().manual_seed(5))
    net.register_buffer("constant", constant.clone())  # the mean of equal numbers may not be that number
    mpinn.synchronize_buffers(net, how)
    mean = (size - 1) / 2 if how == "average" else 0.0
    assert net[1].running_mean.tolist() == [mean] * 7
    assert net[1].num_batches_tracked == 0
    assert net.mask.tolist() == [True, False, True, False, True]
    assert net.phase.tolist() == [complex(index, mean) for index in range(3)]
    assert torch.equal(net.constant, constant)
    assert torch.equal(net[0].weight, weight)
    mpinn.synchronize_buffers(torch.nn.LazyBatchNorm1d())
    with pytest.raises(ValueError, match="how='mean'"):
        mpinn.synchronize_buffers(torch.nn.BatchNorm1d(2), "mean")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("call", ["synchronize_parameters", "synchronize_gradients", "register_async_backward"])
def test_modules_that_are_not_the_same(mpi, call):
    """Other orders of equal layers, and other shapes of as many elements, would be mixed up."""
    last = mpi.size() - 1
    layers = {name: torch.nn.Linear(3, 3) for name in ("ba" if mpi.rank() == last else "ab")}
    shapes = torch.nn.Linear(*((4, 2) if mpi.rank() == last else (2, 4)), bias=False)
    for module, here, there in (
        (torch.nn.ModuleDict(layers), "a.weight", "b.weight"),
        (shapes, r"weight', \(4, 2\)", r"weight', \(2, 4\)"),
    ):
        before = [p.detach().clone() for p in module.parameters()]
        with pytest.raises(RanksDisagree, match=f"{call}: rank 0 has .*{here}.*, rank {last} has .*{there}"):
            getattr(mpinn, call)(module)
        assert all(map(torch.equal, before, module.parameters()))


@pytest.mark.parametrize(
    "function",
    [
        "synchronize_parameters",
        "synchronize_buffers",
        "synchronize_gradients",
        "check_with_allreduce",
        "register_async_backward",
    ],
)
def test_modules_without_parameters_and_what_is_no_module(mpi, function):
    getattr(mpinn, function)(torch.nn.ReLU())
    network = torch.nn.Linear(3, 2)
    for wrong in (network.named_parameters(), network.state_dict(), list(network.parameters())):
        with pytest.raises(TypeError, match=f"expected a torch.nn.Module, found {type(wrong).__name__}"):
            getattr(mpinn, function)(wrong)
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module, found"):
        optim.DistributedOptimizer(torch.optim.SGD(network.parameters()), network.named_parameters())


def test_sparse_gradients(mpi):
    """Each rank looks up two rows, one of them the same everywhere; the last layer has no gradient on some ranks."""
    net = torch.nn.ModuleList([torch.nn.Embedding(7, 2, sparse=True), torch.nn.Linear(2, 1)])
    net.append(torch.nn.EmbeddingBag(5, 3, mode="sum", sparse=True))
    for average in (True, False):
        net[0](torch.tensor([mpi.rank(), 6])).sum().backward()
        if mpi.rank() == 0:
            net[2](torch.tensor([[1, 1, 4]])).sum().backward()
        mpinn.synchronize_gradients(net, average)
        scale = mpi.size() if average else 1
        expected = torch.zeros(7, 2)
        expected[: mpi.size()] += 1 / scale
        expected[6] += mpi.size() / scale
        assert net[0].weight.grad.is_sparse
        assert net[0].weight.grad._nnz() == len(expected.sum(1).nonzero())
        torch.testing.assert_close(net[0].weight.grad.to_dense(), expected)
        bag = torch.tensor([0.0, 2, 0, 0, 1])[:, None].expand(5, 3) / scale
        torch.testing.assert_close(net[2].weight.grad.to_dense(), bag)
        assert net[1].weight.grad is None
        net.zero_grad()


@pytest.mark.parametrize("is_everywhere", [True, False])
def test_a_layer_whose_gradients_become_sparse_or_dense(mpi, is_everywhere):
    """Also where rank 0 has no gradient, and sees by the layer alone what the others send."""
    net = torch.nn.Embedding(5, 2)
    looks_up = is_everywhere or mpi.rank() > 0 or mpi.size() == 1
    exact = 2.0 if is_everywhere or mpi.size() == 1 else 2.0 * (mpi.size() - 1) / mpi.size()
    for is_sparse in (False, True, False):
        net.sparse = is_sparse
        net.zero_grad()
        if looks_up:
            net(torch.tensor([mpi.rank() % 5])).sum().backward()
        mpinn.synchronize_gradients(net)
        assert net.weight.grad.is_sparse == is_sparse
        assert net.weight.grad.to_dense().sum().item() == pytest.approx(exact)


def test_sparse_gradients_of_other_layers_are_made_dense(mpi):
    net = torch.nn.Embedding(4, 2)
    net.weight.grad = (torch.eye(4)[:, :2] * (mpi.rank() + 1)).to_sparse()
    mpinn.synchronize_gradients(net, average=False)
    assert torch.equal(net.weight.grad, torch.eye(4)[:, :2] * sum(range(mpi.size() + 1)))


@pytest.mark.mpi(min_size=2)
def test_the_check_compares_bits_and_names_what_differs_and_ranks(mpi):
    net = network(0)
    mpinn.check_with_allreduce(net)
    net[1].running_mean.fill_(mpi.rank())
    with pytest.raises(RanksDisagree, match=r"buffer 1\.running_mean \(rank"):
        mpinn.check_with_allreduce(net)
    mpinn.synchronize_buffers(net)
    if mpi.rank() == mpi.size() - 1:
        net[3].weight.data[1, 2].neg_()  # same mean of absolute values, same variance: TorchMPI's check saw nothing
    ranks = rf" \(rank {mpi.size() - 1} of {mpi.size()}\)$" if mpi.size() > 2 else ""
    with pytest.raises(RanksDisagree, match=rf"values must be the same on all ranks, but .* differ: 3\.weight{ranks}"):
        mpinn.check_with_allreduce(net)
    with pytest.raises(RanksDisagree, match="the loss"):
        mpi.check_with_allreduce(0.5 + mpi.rank() * 1e-16 + (mpi.rank() == 1) * 1e-12, "the loss")
    with pytest.raises(RanksDisagree, match="the ranks check different values"):
        mpinn.check_with_allreduce(torch.nn.Linear(2, 2, bias=mpi.rank() == 0))
    mpi.check_with_allreduce(torch.tensor(float("nan")), "one element, NaN")
    with pytest.raises(RanksDisagree):
        mpi.check_with_allreduce(torch.zeros(1) if mpi.rank() else -torch.zeros(1))
