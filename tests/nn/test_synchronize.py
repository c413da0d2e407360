import pytest
import torch

from torchmpi_py import optim
from torchmpi_py.core import config
from torchmpi_py.errors import RanksDisagree

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(240)]


@pytest.fixture
def mpinn(mpi):
    return mpi.nn


def network(rank, dtype=torch.float32):
    """A network that is different on every rank."""
    torch.manual_seed(rank)
    net = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.ReLU(), torch.nn.Linear(7, 3))
    net[1].num_batches_tracked += rank
    net[1].running_mean += rank
    return net.to(dtype)


@pytest.mark.parametrize("fuse_bytes", [1, 100, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_parameters(mpi, mpinn, monkeypatch, fuse_bytes, dtype):
    monkeypatch.setattr(config, "current", config.Tuning(fuse_bytes=fuse_bytes))
    all_states = [network(rank, dtype).state_dict() for rank in range(mpi.size())]
    net = network(mpi.rank(), dtype)
    mpinn.synchronize_parameters(net)
    for name, value in net.state_dict().items():
        assert torch.equal(value, all_states[0][name]), name
    mpinn.check_with_allreduce(net)

    net = network(mpi.rank(), dtype)
    mpinn.synchronize_parameters(net, average=True)
    for name, value in net.state_dict().items():
        if value.is_floating_point():
            mean = torch.stack([state[name].double() for state in all_states]).mean(0)
            torch.testing.assert_close(value.double(), mean, rtol=torch.finfo(dtype).eps, atol=1e-6)
        else:
            assert torch.equal(value, all_states[0][name])
    mpinn.check_with_allreduce(net)


@pytest.mark.parametrize("fuse_bytes", [1, 1 << 20])
@pytest.mark.parametrize("how", ["average", "root"])
def test_buffers(mpi, mpinn, monkeypatch, how, fuse_bytes):
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
    mpinn.synchronize_buffers(torch.nn.Linear(2, 2))
    mpinn.synchronize_buffers(torch.nn.LazyBatchNorm1d())


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("call", ["synchronize_parameters", "synchronize_gradients", "register_async_backward"])
def test_modules_that_are_not_the_same(mpi, mpinn, call):
    """Other orders of equal layers, and other shapes of as many elements, would be mixed up."""
    is_other = mpi.rank() == mpi.size() - 1
    layers = {name: torch.nn.Linear(3, 3) for name in ("ba" if is_other else "ab")}
    shapes = torch.nn.Linear(4, 2, bias=False) if is_other else torch.nn.Linear(2, 4, bias=False)
    for module, here, there in (
        (torch.nn.ModuleDict(layers), "a.weight", "b.weight"),
        (shapes, r"weight', \(4, 2\)", r"weight', \(2, 4\)"),
    ):
        before = [p.detach().clone() for p in module.parameters()]
        with pytest.raises(
            RanksDisagree, match=f"{call}: .* rank 0 has .*{here}.*, rank {mpi.size() - 1} has .*{there}"
        ):
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
def test_parameters_in_place_of_the_module(mpi, mpinn, function):
    network = torch.nn.Linear(3, 2)
    for wrong in (network.named_parameters(), network.state_dict(), list(network.parameters())):
        with pytest.raises(TypeError, match=f"give the module itself.*{type(wrong).__name__} is none"):
            getattr(mpinn, function)(wrong)
    with pytest.raises(TypeError, match="DistributedOptimizer: give the module itself"):
        optim.DistributedOptimizer(torch.optim.SGD(network.parameters()), network.named_parameters())


def test_another_way_to_bring_buffers_together_is_refused(mpi, mpinn):
    with pytest.raises(ValueError, match="how='mean': give 'average' or 'root'"):
        mpinn.synchronize_buffers(torch.nn.BatchNorm1d(2), "mean")


@pytest.mark.mpi(min_size=2)
def test_the_check_says_which_buffer_differs(mpi, mpinn):
    net = network(0)
    net[1].running_mean.fill_(mpi.rank())
    with pytest.raises(RanksDisagree, match=r"on all ranks: buffer 1\.running_mean \(rank"):
        mpinn.check_with_allreduce(net)
    mpinn.synchronize_buffers(net)
    mpinn.check_with_allreduce(net)


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("fuse_bytes", [1, 100, 1 << 20])
def test_gradients(mpi, mpinn, monkeypatch, average, fuse_bytes):
    monkeypatch.setattr(config, "current", config.Tuning(fuse_bytes=fuse_bytes))
    net = network(0)
    for i, parameter in enumerate(net.parameters()):
        parameter.grad = (torch.arange(parameter.numel()) * (mpi.rank() + 1.0) + i).view_as(parameter)
    mpinn.synchronize_gradients(net, average=average)
    total = sum(range(1, mpi.size() + 1))
    for i, parameter in enumerate(net.parameters()):
        expected = (torch.arange(parameter.numel()) * total + i * mpi.size()).view_as(parameter).float()
        torch.testing.assert_close(parameter.grad, expected / mpi.size() if average else expected)


def test_gradients_that_are_missing(mpi, mpinn):
    """None here and a gradient elsewhere counts as zero; None everywhere stays None; frozen ones take no part."""
    net = torch.nn.ParameterDict({name: torch.ones(2) for name in ("all", "some", "never", "frozen")})
    net["frozen"].requires_grad_(False)
    net["all"].grad = torch.tensor([1.0, mpi.rank()])
    if mpi.rank() == mpi.size() - 1:
        net["some"].grad = torch.tensor([5.0, 7.0])
    mpinn.synchronize_gradients(net, average=False)
    assert net["all"].grad.tolist() == [mpi.size(), sum(range(mpi.size()))]
    assert net["some"].grad.tolist() == [5, 7]
    assert net["never"].grad is None
    assert net["frozen"].grad is None


def test_sparse_gradients(mpi, mpinn):
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
def test_a_layer_whose_gradients_become_sparse_or_dense(mpi, mpinn, is_everywhere):
    """Also where rank 0 has no gradient, and sees by the layer alone what the others send."""
    net = torch.nn.Embedding(5, 2)
    looks_up = is_everywhere or mpi.rank() > 0 or mpi.size() == 1
    total = 2.0 if is_everywhere or mpi.size() == 1 else 2.0 * (mpi.size() - 1) / mpi.size()
    for is_sparse in (False, True, False):
        net.sparse = is_sparse
        net.zero_grad()
        if looks_up:
            net(torch.tensor([mpi.rank() % 5])).sum().backward()
        mpinn.synchronize_gradients(net)
        assert net.weight.grad.is_sparse == is_sparse
        torch.testing.assert_close(net.weight.grad.to_dense().sum(), torch.tensor(total))


def test_sparse_gradients_are_clipped(mpi, mpinn):
    net = torch.nn.Embedding(5, 2, sparse=True)
    net(torch.tensor([1, 1, 3])).sum().backward()
    norm = mpinn.clip_grad_norm_(net.parameters(), 1.0)
    torch.testing.assert_close(norm.float(), torch.tensor(10.0**0.5))
    torch.testing.assert_close(net.weight.grad.to_dense().norm(), torch.tensor(1.0))


def test_sparse_gradients_of_other_layers_are_refused(mpi, mpinn):
    net = torch.nn.Embedding(4, 2)
    net.weight.grad = torch.eye(4)[:, :2].to_sparse()
    with pytest.raises(TypeError, match=r"gradient of weight is torch.sparse_coo.*sparse=False"):
        mpinn.synchronize_gradients(net)


def test_a_module_without_parameters(mpi, mpinn):
    mpinn.synchronize_parameters(torch.nn.ReLU())
    mpinn.synchronize_gradients(torch.nn.ReLU())
    mpinn.check_with_allreduce(torch.nn.ReLU())


@pytest.mark.mpi(min_size=2)
def test_the_check_compares_bits_and_names_parameter_and_ranks(mpi, mpinn):
    net = network(0)
    net[1].running_mean.zero_()
    mpinn.check_with_allreduce(net)
    with torch.no_grad():
        if mpi.rank() == mpi.size() - 1:
            net[3].weight[1, 2].neg_()  # same mean of absolute values, same variance: TorchMPI's check saw nothing
    if mpi.size() > 2:
        expected = rf"not the same bits on all ranks: 3.weight \(rank {mpi.size() - 1} of {mpi.size()}\)$"
    else:
        expected = "not the same bits on all ranks: 3.weight"
    with pytest.raises(RanksDisagree, match=expected):
        mpinn.check_with_allreduce(net)
    with pytest.raises(RanksDisagree, match="the loss"):
        mpi.check_with_allreduce(0.5 + mpi.rank() * 1e-16 + (mpi.rank() == 1) * 1e-12, "the loss")
    with pytest.raises(RanksDisagree, match="the ranks check different things"):
        mpinn.check_with_allreduce(torch.nn.Linear(2, 2, bias=mpi.rank() == 0))
    mpi.check_with_allreduce(torch.tensor(float("nan")), "one element, NaN")
    zero = torch.zeros(1) if mpi.rank() else -torch.zeros(1)
    with pytest.raises(RanksDisagree):
        mpi.check_with_allreduce(zero)
