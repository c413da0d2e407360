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

TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}
every_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
IN, OUT, ROWS = 13, 11, 7


@pytest.fixture(autouse=True)
def default_dtype(request):
    """The dtype of the test's case, which layers are made in."""
    dtype = request.node.callspec.params.get("dtype") if hasattr(request.node, "callspec") else None
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
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


def assert_equal(x, y, dtype):
    torch.testing.assert_close(x, y, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def whole_gradients(layer):
    """The gradients of a split layer, in the shape of the plain one's."""
    return {
        name: layer._splits[name].whole_of(p.grad) if name in layer._splits else p.grad
        for name, p in layer.named_parameters()
    }


def compare(split, plain, x, dtype):
    """Outputs, gradients, and gradients of gradients."""
    weights = torch.linspace(-1, 2, OUT)
    found = []
    for layer in (split, plain):
        x_here = x.detach().clone().requires_grad_()
        y = layer(x_here)
        (y * weights).pow(2).sum().backward()
        (dx,) = torch.autograd.grad((layer(x_here) * weights).pow(3).sum(), x_here, create_graph=True)
        (ddx,) = torch.autograd.grad(dx.pow(2).sum(), x_here)
        gradients = whole_gradients(layer) if layer is split else {n: p.grad for n, p in layer.named_parameters()}
        found.append([y, x_here.grad, ddx, *(gradients[name] for name in sorted(gradients))])
    for ours, theirs in zip(*found, strict=True):
        assert_equal(ours / theirs.abs().max(), theirs / theirs.abs().max(), dtype)


@every_dtype
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("layer", [mpinn.ColumnParallelLinear, mpinn.RowParallelLinear])
def test_a_split_linear_is_the_linear(mpi, layer, bias, dtype):
    plain = made(torch.nn.Linear, IN, OUT, bias)
    split = made(layer, IN, OUT, bias)
    dim = 0 if layer is mpinn.ColumnParallelLinear else 1
    assert split.weight.shape[dim] == share_of(mpi, plain.weight.shape[dim])
    compare(split, plain, inputs(ROWS, IN), dtype)
    compare(split, plain, inputs(2, 3, IN), dtype)
    compare(split, plain, inputs(IN), dtype)


@every_dtype
def test_a_pair_keeps_what_is_between_split(mpi, dtype):
    plain = [made(torch.nn.Linear, IN, 9), made(torch.nn.Linear, 9, OUT)]
    split = [
        made(mpinn.ColumnParallelLinear, IN, 9, gather_output=False),
        made(mpinn.RowParallelLinear, 9, OUT, input_is_split=True),
    ]
    x = inputs(ROWS, IN)
    between = torch.relu(split[0](x))
    assert between.shape == (ROWS, share_of(mpi, 9))
    y = split[1](between)
    expected = plain[1](torch.relu(plain[0](x)))
    assert_equal(y, expected, dtype)
    (ours,) = torch.autograd.grad(y.pow(2).sum(), x)
    (theirs,) = torch.autograd.grad(expected.pow(2).sum(), x)
    assert_equal(ours, theirs, dtype)


@every_dtype
def test_embedding(mpi, dtype):
    plain = made(torch.nn.Embedding, IN, OUT)
    split = made(mpinn.ParallelEmbedding, IN, OUT)
    torch.manual_seed(1)
    x = torch.randint(IN, (4, 5))
    for layer in (plain, split):
        (layer(x) * torch.arange(20.0).view(4, 5, 1)).sum().backward()
    assert_equal(split(x), plain(x), dtype)
    assert_equal(whole_gradients(split)["weight"], plain.weight.grad, dtype)
    assert torch.equal(split.to_embedding().weight, plain.weight)
    assert torch.equal(mpinn.ParallelEmbedding.from_embedding(plain).weight, split.weight)
    for wrong in (IN, -1):
        with pytest.raises(IndexError, match=f"{wrong} is not in 0 to {IN - 1}"):
            split(torch.tensor([0, wrong]))


@every_dtype
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("classes", [11, 3])
def test_cross_entropy(mpi, classes, reduction, dtype):
    whole = (inputs(ROWS, classes).detach() * 200).requires_grad_()  # exp would overflow
    sizes = [classes // mpi.size() + (rank < classes % mpi.size()) for rank in range(mpi.size())]
    part = torch.split(whole.detach(), sizes, 1)[mpi.rank()].clone().requires_grad_()
    target = torch.arange(ROWS) % classes
    target[2] = -100
    ours = mpinn.parallel_cross_entropy(part, target, reduction=reduction)
    theirs = cross_entropy(whole, target, reduction=reduction)
    assert_equal(ours / 1000, theirs / 1000, dtype)
    ours.sum().backward()
    theirs.sum().backward()
    assert_equal(part.grad, torch.split(whole.grad, sizes, 1)[mpi.rank()], dtype)


def test_the_loss_of_wrong_targets(mpi):
    part = torch.zeros(2, 3)
    with pytest.raises(IndexError, match=f"target {3 * mpi.size()} is not in 0 to"):
        mpinn.parallel_cross_entropy(part, torch.tensor([0, 3 * mpi.size()]))
    with pytest.raises(TypeError, match="float32"):
        mpinn.parallel_cross_entropy(part, torch.zeros(2))
    with pytest.raises(ValueError, match=r"target \(3,\)"):
        mpinn.parallel_cross_entropy(part, torch.zeros(3, dtype=torch.long))
    with pytest.raises(ValueError, match="reduction='max'"):
        mpinn.parallel_cross_entropy(part, torch.zeros(2, dtype=torch.long), reduction="max")


def test_a_network_of_all(mpi):
    """A language model of split layers: its loss, and all gradients, are those of the plain one."""

    def run(table, first, second, last, loss):
        tokens = torch.arange(12).view(3, 4) % IN
        hidden = table(tokens).flatten(0, 1)
        hidden = hidden + second(torch.tanh(first(hidden)))
        value = loss(last(hidden), (tokens.flatten() + 1) % IN)
        value.backward()
        return value

    plain = [
        made(torch.nn.Embedding, IN, 6),
        made(torch.nn.Linear, 6, 9),
        made(torch.nn.Linear, 9, 6),
        made(torch.nn.Linear, 6, IN),
    ]
    split = [
        made(mpinn.ParallelEmbedding, IN, 6),
        made(mpinn.ColumnParallelLinear, 6, 9, gather_output=False),
        made(mpinn.RowParallelLinear, 9, 6, input_is_split=True),
        made(mpinn.ColumnParallelLinear, 6, IN, gather_output=False),
    ]
    assert_equal(run(*split, mpinn.parallel_cross_entropy), run(*plain, cross_entropy), torch.float32)
    for ours, theirs in zip(split, plain, strict=True):
        for name, gradient in whole_gradients(ours).items():
            assert_equal(gradient, theirs.get_parameter(name).grad, torch.float32)


@pytest.mark.parametrize("layer", [mpinn.ColumnParallelLinear, mpinn.RowParallelLinear])
def test_checkpoints_are_those_of_the_plain_layer(mpi, layer, tmp_path):
    plain, split = made(torch.nn.Linear, IN, OUT), made(layer, IN, OUT)
    state = split.state_dict()
    assert list(state) == ["weight", "bias"]
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())
    torch.manual_seed(5)
    other = torch.nn.Linear(IN, OUT)
    network = torch.nn.Sequential(torch.nn.ReLU(), split)
    network.load_state_dict({f"1.{name}": value for name, value in other.state_dict().items()})
    assert torch.equal(split.to_linear().weight, other.weight)
    assert torch.equal(split.to_linear().bias, other.bias)
    taken = layer.from_linear(other)
    assert torch.equal(taken.weight, split.weight)
    assert torch.equal(taken.bias, split.bias)
    if mpi.size() > 1:
        with pytest.raises(RuntimeError, match=r"1\.weight has shape .*, but the whole parameter"):
            network.load_state_dict({f"1.{name}": value[:1] for name, value in other.state_dict().items()})
    with pytest.raises(RuntimeError, match=r"Missing key.*1\.weight"):
        network.load_state_dict({"1.bias": other.bias})
    copied = copy.deepcopy(network)
    mpinn.synchronize_parameters(copied)  # a copy is split as well
    assert torch.equal(copied[1].weight, split.weight)


def test_bad_inputs(mpi):
    split = mpinn.ColumnParallelLinear(IN, OUT)
    with pytest.raises(ValueError, match=rf"shape \(2, {IN + 1}\).*{IN}, in_features"):
        split(torch.zeros(2, IN + 1))
    split = mpinn.RowParallelLinear(IN, OUT, input_is_split=True)
    if mpi.size() > 1:
        with pytest.raises(ValueError, match="this rank's part of in_features"):
            split(torch.zeros(2, IN))
        differs = torch.nn.Linear(2, 2)
        torch.nn.init.constant_(differs.weight, mpi.rank())
        with pytest.raises(errors.RanksDisagree, match="weight"):
            mpinn.RowParallelLinear.from_linear(differs)
    with pytest.raises(ValueError, match="padding_idx"):
        mpinn.ParallelEmbedding.from_embedding(torch.nn.Embedding(3, 2, padding_idx=0))


def test_ranks_with_other_seeds_share_what_is_whole(mpi):
    torch.manual_seed(mpi.rank())
    split = mpinn.RowParallelLinear(IN, OUT)
    mpi.check_with_allreduce(split.bias, "bias")


def test_assigned_states_stay_split(mpi):
    layer = made(mpinn.ColumnParallelLinear, IN, OUT)
    torch.manual_seed(5)
    other = torch.nn.Linear(IN, OUT)
    layer.load_state_dict(other.state_dict(), assign=True)
    mpinn.synchronize_parameters(layer)
    assert torch.equal(layer.to_linear().weight, other.weight)


class Hybrid(torch.nn.Module):
    """Convolutions, then two linear layers; those split over ``comm``, if given."""

    def __init__(self, comm=None):
        super().__init__()
        torch.manual_seed(3)
        self.conv = torch.nn.Sequential(torch.nn.Conv2d(1, 3, 3), torch.nn.ReLU(), torch.nn.Flatten())
        layers = [torch.nn.Linear(27, 11), torch.nn.Tanh(), torch.nn.Linear(11, 5)]
        if comm is not None:
            layers[0] = mpinn.ColumnParallelLinear.from_linear(layers[0], comm=comm, gather_output=False)
            layers[2] = mpinn.RowParallelLinear.from_linear(layers[2], comm=comm, input_is_split=True)
        self.head = torch.nn.Sequential(*layers) if comm is None else mpinn.ModelParallel(*layers, comm=comm)

    def forward(self, x):
        return self.head(self.conv(x))


def groups_of(mpi, ranks_per_group):
    return mpi.split(mpi.rank() // ranks_per_group)


@pytest.mark.parametrize("reduction", ["synchronous", "asynchronous", "sum"])
@pytest.mark.parametrize("ranks_per_group", [1, 2, 3])
def test_a_hybrid_network_trains_as_in_one_process(mpi, ranks_per_group, reduction):
    """Convolutions data-parallel over all ranks, linear layers split over few; every rank has its own batch."""
    if mpi.size() % ranks_per_group:
        pytest.skip(f"{mpi.size()} ranks make no groups of {ranks_per_group}")
    with groups_of(mpi, ranks_per_group) as comm:
        network, plain = Hybrid(comm), Hybrid()
        torch.manual_seed(11)
        batches = [torch.randn(3, 1, 5, 5) for _ in range(mpi.size())]
        targets = [torch.randint(5, (3,)) for _ in range(mpi.size())]
        scale = mpi.size() if reduction == "sum" else 1
        optimizer = torch.optim.SGD(network.parameters(), 0.3 / scale, 0.9)
        theirs = torch.optim.SGD(plain.parameters(), 0.3, 0.9)
        registration = mpinn.register_async_backward(network) if reduction == "asynchronous" else None
        for _ in range(4):
            optimizer.zero_grad()
            cross_entropy(network(batches[mpi.rank()]), targets[mpi.rank()]).backward()
            if registration is not None:
                registration.synchronize()
            else:
                mpinn.synchronize_gradients(network, average=reduction != "sum")
            optimizer.step()
            theirs.zero_grad()
            cross_entropy(plain(torch.cat(batches)), torch.cat(targets)).backward()
            theirs.step()
        ours = network.state_dict()
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-6)
        mpinn.check_with_allreduce(network)
        if registration is not None:
            registration.remove()


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_clipping_counts_all_parts(mpi, norm_type):
    network, plain = made(lambda: Hybrid(mpi.communicator())), Hybrid()
    x, y = torch.randn(3, 1, 5, 5, generator=torch.Generator().manual_seed(1)), torch.tensor([1, 2, 3])
    for m in (network, plain):
        cross_entropy(m(x), y).backward()
    mpinn.synchronize_gradients(network)
    norm = mpinn.clip_grad_norm_(network.parameters(), 0.1, norm_type)
    torch.testing.assert_close(norm.float(), torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1, norm_type))
    torch.testing.assert_close(network.conv[0].weight.grad, plain.conv[0].weight.grad)
    torch.testing.assert_close(network.head[2].bias.grad, plain.head[2].bias.grad)


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
    if how == "optimizer":
        optimizer.remove()


def test_replicas_of_a_part_are_kept_equal(mpi):
    """``synchronize_parameters`` gives each part to its replicas; ``check_with_allreduce`` compares these, on all."""
    if mpi.size() != 4:
        pytest.skip("4 ranks make two groups of two")
    with groups_of(mpi, 2) as comm:
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
    monkeypatch.setattr(config, "current", config.Tuning(alone_bytes=150, fuse_bytes=400))
    torch.manual_seed(3)
    width = 25  # a row of 100 bytes
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
