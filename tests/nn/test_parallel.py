"""Split layers give what the plain layer gives in one process: values, outputs, gradients, checkpoints.

All ranks draw the same inputs, of sizes that no number of ranks but 1 divides.
"""

import copy

import pytest
import torch
from torch.nn.functional import cross_entropy

from torchmpi_py import errors, nn as mpinn, optim
from torchmpi_py.core import config

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(240)]

IN, OUT, ROWS = 13, 11, 7
DTYPES = [torch.float32, torch.float64]
LINEAR = [mpinn.ColumnParallelLinear, mpinn.RowParallelLinear]


@pytest.fixture(autouse=True)
def default_dtype(request):
    """Make layers in the dtype of the test's case, or in float64."""
    before = torch.get_default_dtype()
    callspec = getattr(request.node, "callspec", None)
    torch.set_default_dtype(callspec.params.get("dtype", torch.float64) if callspec else torch.float64)
    yield
    torch.set_default_dtype(before)


def made(layer, *args, **options):
    torch.manual_seed(3)
    return layer(*args, **options)


def inputs(*shape):
    torch.manual_seed(7)
    return torch.randn(*shape, requires_grad=True)


def share_of(mpi, size):
    return size // mpi.size() + (mpi.rank() < size % mpi.size())


def assert_equal(x, y):
    """But for rounding, against the largest element."""
    tolerance = 1e-5 if x.dtype == torch.float32 else 1e-12
    scale = max(1.0, y.detach().abs().max().item())
    torch.testing.assert_close(x / scale, y / scale, rtol=tolerance, atol=tolerance)


def whole_gradients(layer):
    """Return gradients by name; those of a split layer in the shape of the plain one's."""
    splits = getattr(layer, "_splits", {})
    return {name: splits[name].whole_of(p.grad) if name in splits else p.grad for name, p in layer.named_parameters()}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layer", LINEAR)
@pytest.mark.parametrize(("bias", "shape"), [(True, (ROWS, IN)), (True, (2, 3, IN)), (False, (IN,))])
def test_a_split_linear_is_the_linear(mpi, layer, bias, shape, dtype):
    """Outputs, gradients, and gradients of gradients."""
    plain, split = made(torch.nn.Linear, IN, OUT, bias), made(layer, IN, OUT, bias)
    dim = LINEAR.index(layer)
    assert split.weight.shape[dim] == share_of(mpi, plain.weight.shape[dim])
    weights = torch.linspace(-1, 2, OUT)
    found = []
    for each in (split, plain):
        x = inputs(*shape)
        y = each(x)
        (y * weights).pow(2).sum().backward()
        (dx,) = torch.autograd.grad((each(x) * weights).pow(3).sum(), x, create_graph=True)
        (ddx,) = torch.autograd.grad(dx.pow(2).sum(), x)
        found.append({"y": y, "x": x.grad, "ddx": ddx, **whole_gradients(each)})
    for name, value in found[1].items():
        assert_equal(found[0][name], value)


def test_embedding(mpi):
    plain, split = made(torch.nn.Embedding, IN, OUT), made(mpinn.ParallelEmbedding, IN, OUT)
    torch.manual_seed(1)
    x = torch.randint(IN, (4, 5))
    for layer in (plain, split):
        (layer(x) * torch.arange(20.0).view(4, 5, 1)).sum().backward()
    assert_equal(split(x), plain(x))
    assert_equal(whole_gradients(split)["weight"], plain.weight.grad)
    assert torch.equal(split.to_embedding().weight, plain.weight)
    assert torch.equal(mpinn.ParallelEmbedding.from_embedding(plain).weight, split.weight)
    for wrong in (IN, -1):
        with pytest.raises(IndexError, match=f"{wrong} is not in 0 to {IN - 1}"):
            split(torch.tensor([0, wrong]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("classes", "reduction"), [(11, "mean"), (11, "sum"), (11, "none"), (3, "mean")])
def test_cross_entropy(mpi, classes, reduction, dtype):
    whole = (inputs(ROWS, classes).detach() * 200).requires_grad_()  # exp would overflow
    sizes = [classes // mpi.size() + (rank < classes % mpi.size()) for rank in range(mpi.size())]
    part = torch.split(whole.detach(), sizes, 1)[mpi.rank()].clone().requires_grad_()
    target = torch.arange(ROWS) % classes
    target[2] = -100
    ours = mpinn.parallel_cross_entropy(part, target, reduction=reduction)
    theirs = cross_entropy(whole, target, reduction=reduction)
    assert_equal(ours, theirs)
    ours.sum().backward()
    theirs.sum().backward()
    torch.testing.assert_close(part.grad, torch.split(whole.grad, sizes, 1)[mpi.rank()], rtol=1e-5, atol=1e-5)


def test_the_loss_of_wrong_targets(mpi):
    part, target = torch.zeros(2, 3), torch.zeros(2, dtype=torch.long)
    for wrong, reduction, error, told in (
        (target + 3 * mpi.size(), "mean", IndexError, f"target {3 * mpi.size()} is not in 0 to"),
        (target.float(), "mean", TypeError, "float32"),
        (target[:1], "mean", ValueError, r"target \(1,\)"),
        (target, "max", ValueError, "reduction='max'"),
    ):
        with pytest.raises(error, match=told):
            mpinn.parallel_cross_entropy(part, wrong, reduction=reduction)


@pytest.mark.parametrize("layer", LINEAR)
def test_checkpoints_are_those_of_the_plain_layer(mpi, layer):
    plain, split = made(torch.nn.Linear, IN, OUT), made(layer, IN, OUT)
    state = split.state_dict()
    assert list(state) == ["weight", "bias"]
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())
    torch.manual_seed(5)
    other = torch.nn.Linear(IN, OUT)
    network = torch.nn.Sequential(torch.nn.ReLU(), split)
    network.load_state_dict({f"1.{name}": value for name, value in other.state_dict().items()})
    assigned = made(layer, IN, OUT)
    assigned.load_state_dict(other.state_dict(), assign=True)
    copied = copy.deepcopy(network)
    mpinn.synchronize_parameters(copied)  # a copy is split as well
    for each in (split, assigned, copied[1], layer.from_linear(other)):
        assert torch.equal(each.weight, split.weight)
        assert torch.equal(each.to_linear().weight, other.weight)
        assert torch.equal(each.to_linear().bias, other.bias)
    if mpi.size() > 1:
        with pytest.raises(RuntimeError, match=r"1\.weight has shape .*, but the whole parameter"):
            network.load_state_dict({f"1.{name}": value[:1] for name, value in other.state_dict().items()})
    with pytest.raises(RuntimeError, match=r"Missing key.*1\.weight"):
        network.load_state_dict({"1.bias": other.bias})


def test_bad_inputs_and_other_seeds(mpi):
    with pytest.raises(ValueError, match=rf"shape \(2, {IN + 1}\).*{IN}, in_features"):
        mpinn.ColumnParallelLinear(IN, OUT)(torch.zeros(2, IN + 1))
    torch.manual_seed(mpi.rank())
    split = mpinn.RowParallelLinear(IN, OUT, input_is_split=True)
    mpi.check_with_allreduce(split.bias, "bias")  # what is whole is equal on all ranks
    if mpi.size() > 1:
        with pytest.raises(ValueError, match="this rank's part of in_features"):
            split(torch.zeros(2, IN))
        differs = torch.nn.Linear(2, 2)
        torch.nn.init.constant_(differs.weight, mpi.rank())
        with pytest.raises(errors.RanksDisagree, match="weight"):
            mpinn.RowParallelLinear.from_linear(differs)
    with pytest.raises(ValueError, match="padding_idx"):
        mpinn.ParallelEmbedding.from_embedding(torch.nn.Embedding(3, 2, padding_idx=0))


class Hybrid(torch.nn.Module):
    """Convolutions, then two linear layers; those split over ``comm``, if given."""

    def __init__(self, comm=None):
        super().__init__()
        torch.manual_seed(3)
        self.conv = torch.nn.Sequential(torch.nn.Conv2d(1, 3, 3), torch.nn.ReLU(), torch.nn.Flatten())
        if comm is None:
            self.head = torch.nn.Sequential(torch.nn.Linear(27, 11), torch.nn.Tanh(), torch.nn.Linear(11, 5))
        else:
            first = mpinn.ColumnParallelLinear(27, 11, comm=comm, gather_output=False)
            last = mpinn.RowParallelLinear(11, 5, comm=comm, input_is_split=True)
            self.head = mpinn.ModelParallel(first, torch.nn.Tanh(), last, comm=comm)

    def forward(self, x):
        return self.head(self.conv(x))


@pytest.mark.parametrize("reduction", ["synchronous", "asynchronous", "sum"])
@pytest.mark.parametrize("ranks_per_group", [1, 2, 3])
def test_a_hybrid_network_trains_as_in_one_process(mpi, ranks_per_group, reduction):
    """Convolutions data-parallel over all ranks, linear layers split over few; every rank has its own batch."""
    if mpi.size() % ranks_per_group:
        pytest.skip(f"{mpi.size()} ranks make no groups of {ranks_per_group}")
    with mpi.split(mpi.rank() // ranks_per_group) as comm:
        network, plain = Hybrid(comm), Hybrid()
        torch.manual_seed(11)
        batches, targets = torch.randn(mpi.size(), 3, 1, 5, 5), torch.randint(5, (mpi.size(), 3))
        scale = mpi.size() if reduction == "sum" else 1
        optimizer = torch.optim.SGD(network.parameters(), 0.3 / scale, 0.9)
        theirs = torch.optim.SGD(plain.parameters(), 0.3, 0.9)
        registration = mpinn.register_async_backward(network) if reduction == "asynchronous" else None
        for _ in range(3):
            optimizer.zero_grad()
            cross_entropy(network(batches[mpi.rank()]), targets[mpi.rank()]).backward()
            if registration is not None:
                registration.synchronize()
            else:
                mpinn.synchronize_gradients(network, average=reduction != "sum")
            optimizer.step()
            theirs.zero_grad()
            cross_entropy(plain(batches.flatten(0, 1)), targets.flatten()).backward()
            theirs.step()
        ours = network.state_dict()
        for name, value in plain.state_dict().items():
            assert_equal(ours[name], value)
        mpinn.check_with_allreduce(network)
        if registration is not None:
            registration.remove()


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_clipping_counts_all_parts(mpi, norm_type):
    network, plain = Hybrid(mpi.communicator()), Hybrid()
    x, y = inputs(3, 1, 5, 5).detach(), torch.tensor([1, 2, 3])
    for m in (network, plain):
        cross_entropy(m(x), y).backward()
    mpinn.synchronize_gradients(network)
    norm = mpinn.clip_grad_norm_(network.parameters(), 0.1, norm_type)
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1, norm_type))
    assert_equal(network.conv[0].weight.grad, plain.conv[0].weight.grad)
    assert_equal(network.head[2].bias.grad, plain.head[2].bias.grad)


@pytest.mark.parametrize("how", ["synchronous", "optimizer"])
def test_a_part_that_overflows_skips_the_step_on_all_ranks(mpi, how):
    network = Hybrid(mpi.communicator())
    before = copy.deepcopy(network.state_dict())
    sgd = torch.optim.SGD(network.parameters(), 1.0)
    optimizer = optim.DistributedOptimizer(sgd, network) if how == "optimizer" else sgd
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    loss = cross_entropy(network(torch.ones(2, 1, 5, 5)), torch.tensor([0, 1]))
    if mpi.rank() == 0:
        loss = loss + network.head[0].weight[0, 0] * float("inf")
    scaler.scale(loss).backward()
    if how == "synchronous":
        mpinn.synchronize_gradients(network)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())


def test_replicas_of_a_part_are_kept_equal(mpi):
    """``synchronize_parameters`` gives each part to its replicas; ``check_with_allreduce`` compares these, on all."""
    if mpi.size() != 4:
        pytest.skip("4 ranks make two groups of two")
    with mpi.split(mpi.rank() // 2) as comm:
        torch.manual_seed(mpi.rank())
        layer = mpinn.ColumnParallelLinear(IN, OUT, comm=comm)
        with pytest.raises(errors.RanksDisagree, match="weight"):
            mpinn.check_with_allreduce(layer)
        mpinn.synchronize_parameters(layer)
        mpinn.check_with_allreduce(layer)
        torch.manual_seed(comm.rank)
        assert torch.equal(layer.weight, torch.split(torch.nn.Linear(IN, OUT).weight, [6, 5])[comm.rank])
        if mpi.rank() == 3:
            layer.bias.data[0] += 1
        with pytest.raises(errors.RanksDisagree, match="bias"):
            mpinn.check_with_allreduce(layer)


@pytest.mark.mpi(min_size=2)
def test_parts_of_unequal_size_may_fall_into_other_buckets(mpi, monkeypatch):
    """Rank 0 has a row more than the others, which makes its part large enough for a bucket of its own."""
    monkeypatch.setattr(config, "current", config.Tuning(alone_bytes=300, fuse_bytes=800))
    torch.manual_seed(3)
    width = 25  # a row of 200 bytes
    net = torch.nn.Sequential(
        mpinn.ColumnParallelLinear(width, mpi.size() + 1),
        torch.nn.Linear(mpi.size() + 1, width),
        mpinn.ColumnParallelLinear(width, mpi.size() + 1),
    )
    gradients = []
    for reduction in (mpinn.register_async_backward(net), None):
        net.zero_grad()
        net(torch.ones(2, width)).square().sum().backward()
        if reduction is None:
            mpinn.synchronize_gradients(net)
        else:
            reduction.synchronize()
            counts = mpi.allgather(len(reduction.buckets.all))
            reduction.remove()
        gradients.append([p.grad.clone() for p in net.parameters()])
    assert len(set(counts)) == 2
    for x, y in zip(*gradients, strict=True):
        torch.testing.assert_close(x, y)
