"""Gradient buckets: how parameters fall into them, and that what comes out is the plain allreduce of every gradient."""

import copy
import gc
import types

import pytest
import torch

from torchmpi_py.core import config
from torchmpi_py.errors import Unavailable
from torchmpi_py.memory import symmetric
from torchmpi_py.nn import buckets, synchronize
from torchmpi_py.nn.buckets import Buckets, grouped

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(240)]


@pytest.fixture(params=["symmetric", "ordinary"])
def memory(request, monkeypatch):
    """Buckets in symmetric memory, and where there is none."""

    def none_to_be_had(*args, **kwargs):
        raise Unavailable("planted")

    if request.param == "ordinary":
        monkeypatch.setattr(buckets, "symmetric_empty", none_to_be_had)
    return request.param


@pytest.fixture
def tune(monkeypatch):
    def use(**sizes):
        monkeypatch.setattr(config, "current", config.Tuning(**sizes))

    return use


def gradient(parameter, rank, step, index):
    """Whole numbers that depend on the element, the rank, the step and the parameter, in the parameter's layout."""
    whole = (torch.arange(parameter.numel()) * 7 + rank * 3 + step * 5 + index).remainder(11) - 5.0
    return torch.empty_like(parameter).copy_(whole.view(parameter.shape)).detach()


def trained(net):
    return [p for p in net.parameters() if p.requires_grad]


def give_gradients(mpi, net, step, has=lambda rank, index: True):
    for index, p in enumerate(trained(net)):
        p.grad = gradient(p, mpi.rank(), step, index) if has(mpi.rank(), index) else None


def expected(mpi, net, op):
    """A plain allreduce of each gradient there is; zero stands for one that is missing here, None for none at all."""
    reduced = []
    for p in trained(net):
        anywhere = mpi.allreduce(int(p.grad is not None), op="max", flavour="mpi")
        own = torch.zeros_like(p) if p.grad is None else p.grad
        out = torch.empty(p.shape, dtype=p.dtype)
        reduced.append(mpi.allreduce(own.detach(), out=out, op=op, flavour="mpi") if anywhere else None)
    return reduced


def check(mpi, net, average=True):
    """Reduce the gradients and compare: averages of whole numbers have one right answer."""
    wanted = expected(mpi, net, "avg" if average else "sum")
    mpi.nn.synchronize_gradients(net, average=average)
    for p, right in zip(trained(net), wanted, strict=True):
        assert (p.grad is None) == (right is None)
        if right is not None:
            assert p.grad.dtype == p.dtype
            assert torch.equal(p.grad, right)
    return synchronize.buckets_of(net)


def network(dtype=torch.float32):
    return torch.nn.Sequential(*(torch.nn.Linear(6, 6) for _ in range(4))).to(dtype)


# How parameters fall into buckets.


def numbers(made, net):
    names = {p: index for index, p in enumerate(net.parameters())}
    return [[names[p] for p in bucket.parameters] for bucket in made.all]


def test_grouping(mpi, tune):
    tune(alone_bytes=100, fuse_bytes=160)
    sizes = [10, 25, 10, 20, 9, 24, 1, 300]  # floats
    tensors = [torch.empty(size) for size in sizes]
    groups = [[group_of.numel() for group_of in group] for group in grouped(tensors)]
    assert groups == [[25], [10, 10, 20], [300], [9, 24, 1]]
    mixed = [torch.empty(10), torch.empty(10, dtype=torch.float64), torch.empty(10), torch.empty(5).double()]
    assert [[x.dtype for x in group] for group in grouped(mixed)] == [[torch.float32] * 2, [torch.float64] * 2]
    assert list(grouped([])) == []


def test_the_order_in_which_backward_reaches_them(mpi, memory, tune):
    net = network()  # weights of 144 bytes, biases of 24
    world = mpi.communicator(0)
    tune(alone_bytes=1 << 20, fuse_bytes=1 << 20)
    assert numbers(Buckets(list(net.parameters()), world), net) == [[7, 6, 5, 4, 3, 2, 1, 0]]
    tune(alone_bytes=1, fuse_bytes=1 << 20)
    assert numbers(Buckets(list(net.parameters()), world), net) == [[7], [6], [5], [4], [3], [2], [1], [0]]
    tune(alone_bytes=144, fuse_bytes=50)
    assert numbers(Buckets(list(net.parameters()), world), net) == [[6], [7, 5], [4], [2], [3, 1], [0]]
    tune(alone_bytes=1 << 20, fuse_bytes=170)
    assert numbers(Buckets(list(net.parameters()), world), net) == [[7, 6], [5, 4], [3, 2], [1, 0]]
    parameters = list(net.parameters())
    made = Buckets(parameters, world, [parameters[2:4], parameters[6:8]])
    assert numbers(made, net) == [[6, 7], [5, 4], [2, 3], [1, 0]]
    assert [made.index_of[p] for p in parameters] == [3, 3, 2, 2, 1, 1, 0, 0]


# What comes out.


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("sizes", [{}, {"alone_bytes": 1}, {"alone_bytes": 100, "fuse_bytes": 60}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gradients_are_views_of_the_average(mpi, memory, tune, dtype, sizes, average):
    tune(**sizes)
    net = network(dtype)
    for step in range(3):
        give_gradients(mpi, net, step)
        made = check(mpi, net, average)
        for bucket in made.all:
            found = [symmetric.find(p.grad) is not None for p in bucket.parameters]
            assert found == [memory == "symmetric" and mpi.size() > 1] * len(found)
            for p in bucket.parameters:
                assert p.grad.untyped_storage().data_ptr() == bucket.flat.untyped_storage().data_ptr()
                assert p.grad.is_contiguous()
    assert synchronize.buckets_of(net) is made


@pytest.mark.parametrize("set_to_none", [True, False])
def test_training(mpi, memory, tune, set_to_none):
    """With accumulation over two backward passes; against a twin whose gradients are reduced one by one."""
    tune(alone_bytes=140, fuse_bytes=60)
    torch.manual_seed(3)
    net = network(torch.float64)
    twin = copy.deepcopy(net)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (net, twin)]
    for step in range(4):
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(10 * step + mpi.rank())).double()
        for each, optimizer in zip((net, twin), optimizers, strict=True):
            optimizer.zero_grad(set_to_none=set_to_none)
            for part in (x[:2], x[2:]):
                each(part).square().sum().backward()
        mpi.nn.synchronize_gradients(net)
        for p, q in zip(net.parameters(), twin.parameters(), strict=True):
            mpi.allreduce(q.grad, op="avg", flavour="mpi")
            torch.testing.assert_close(p.grad, q.grad)
        for optimizer in optimizers:
            optimizer.step()
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q)
    mpi.nn.check_with_allreduce(net)


@pytest.mark.parametrize("alone_bytes", [1, 1 << 20])
def test_gradients_that_are_missing(mpi, memory, tune, alone_bytes):
    tune(alone_bytes=alone_bytes)
    net, last = network(), mpi.size() - 1
    patterns = [
        lambda rank, index: index % 2 == 0,  # None on all ranks
        lambda rank, index: rank == last,
        lambda rank, index: rank != last or index == 3,
        lambda rank, index: (rank + index) % 2 == 0,
        lambda rank, index: False,
        lambda rank, index: True,
    ]
    for step, has in enumerate(patterns):
        give_gradients(mpi, net, step, has)
        check(mpi, net)
        check(mpi, net, average=False)  # the gradients are the views themselves now, or None


@pytest.mark.parametrize("op", ["avg", "sum"])
def test_large_gradients(mpi, memory, op):
    """Of at least alone_bytes, so by themselves, and large enough for shared memory; on some ranks they are missing."""
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((600, 701), (300_000,), (5,), (1, 262_144))]
    net = torch.nn.ParameterList(parameters)
    patterns = [lambda rank, index: True, lambda rank, index: (rank + index) % 2 == 0, lambda rank, index: rank == 0]
    for step, has in enumerate(patterns):
        give_gradients(mpi, net, step, has)
        given = [p.grad for p in net]
        before = [None if x is None else x.clone() for x in given]
        made = check(mpi, net, op == "avg")
        assert [len(bucket.parameters) for bucket in made.all] == [1] * 4
        for x, y in zip(given, before, strict=True):
            assert x is None or torch.equal(x, y)  # what backward left is only read
        check(mpi, net, op == "avg")


# Unusual parameters.


def test_tied_and_frozen_parameters(mpi, memory, tune):
    tune(alone_bytes=100)
    net = network()
    net[2].weight = net[0].weight
    net[1].weight.requires_grad_(False)
    give_gradients(mpi, net, 0)
    made = check(mpi, net)
    assert sum(len(bucket.parameters) for bucket in made.all) == 6
    assert net[1].weight.grad is None
    assert net[2].weight.grad is net[0].weight.grad


def test_dtypes_and_layouts_mixed(mpi, memory, tune):
    tune(alone_bytes=400, fuse_bytes=2000)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last),
        torch.nn.Linear(9, 5).bfloat16(),
        torch.nn.Conv2d(4, 2, 3).double().to(memory_format=torch.channels_last),
        torch.nn.Linear(3, 2).double(),
    )
    net.append(
        torch.nn.ParameterList([torch.zeros(4, 6).t(), torch.zeros(8, 3)[::2], torch.tensor(1.0), torch.zeros(0)])
    )
    for step in range(2):
        give_gradients(mpi, net, step)
        made = check(mpi, net)
        assert net[0].weight.grad.stride() == net[0].weight.stride()
        assert all(len({p.dtype for p in bucket.parameters}) == 1 for bucket in made.all)
        assert torch.optim.SGD(net.parameters(), lr=1.0).step() is None
    for p in trained(net):  # what autograd leaves may lie in another way than the parameter
        p.grad = gradient(p, mpi.rank(), 7, 1).contiguous()
    check(mpi, net)


def test_parameters_that_change_between_calls(mpi, memory, tune):
    tune(alone_bytes=100)
    net = network()

    def again(made, *, is_new=True):
        for step in range(2):
            give_gradients(mpi, net, step)
            now = check(mpi, net)
        assert (now is not made) == is_new
        return now

    made = again(None)
    net.append(torch.nn.Linear(6, 3))
    made = again(made)
    del net[1]
    made = again(made)
    net[0].weight.requires_grad_(False)
    made = again(made)
    net[0].weight.requires_grad_(True)
    made = again(made)
    if (
        mpi.rank() == 0
    ):  # another object of the same shape, on one rank alone: no reason to make buckets, which all must
        net[0].weight = torch.nn.Parameter(torch.zeros(6, 6))
    made = again(made, is_new=False)
    net[0].weight.grad, net[0].weight.data = None, torch.zeros(3, 12)
    made = again(made)
    net.zero_grad()
    net.double()
    again(made)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("alone_bytes", [1, 1 << 20])
@pytest.mark.parametrize("kinds", [[torch.float64], [torch.float64, torch.float32], [torch.bfloat16]], ids=str)
def test_a_module_that_is_converted_with_its_gradients(mpi, memory, tune, kinds, alone_bytes):
    tune(alone_bytes=alone_bytes)
    net = network()
    give_gradients(mpi, net, 0)
    check(mpi, net)
    for dtype in kinds:
        net.to(dtype)
    give_gradients(mpi, net, 1)
    wanted = expected(mpi, net, "avg")
    mpi.nn.synchronize_gradients(net)
    right = all(torch.equal(p.grad, q) for p, q in zip(net.parameters(), wanted, strict=True))
    assert mpi.allreduce(int(right), op="min")  # on all ranks or on none


@pytest.mark.filterwarnings("ignore:.*create_graph")
def test_gradients_with_a_history(mpi, memory, tune):
    """After backward(create_graph=True) gradients have one; buckets have none, or they would keep every step alive."""
    for alone_bytes in (1, 1 << 20):
        tune(alone_bytes=alone_bytes)
        net = network()
        for _ in range(2):
            net.zero_grad()
            net(torch.full((2, 6), mpi.rank() + 1.0)).square().sum().backward(create_graph=True)
            mpi.nn.synchronize_gradients(net)
            assert not any(bucket.flat.requires_grad for bucket in synchronize.buckets_of(net).all)
            assert not any(p.grad.requires_grad for p in net.parameters())


@pytest.mark.filterwarnings("ignore:.*create_graph")
def test_a_gradient_with_a_history_is_refused_in_backward(mpi):
    """Which would give a constant in place of a function, without a word."""
    net = network()
    backward = mpi.nn.register_async_backward(net)
    with pytest.raises(RuntimeError, match=r"the gradient of .* is part of a graph"):
        net(torch.ones(2, 6)).square().sum().backward(create_graph=True)
    backward.remove()


@pytest.mark.parametrize("alone_bytes", [1, 1 << 20])
def test_gradients_of_another_dtype_are_refused(mpi, memory, tune, alone_bytes):
    net = network(torch.bfloat16)
    if not hasattr(next(net.parameters()), "grad_dtype"):
        pytest.skip("this torch has gradients of the parameters' dtype alone")
    tune(alone_bytes=alone_bytes)
    for parameter in net.parameters():
        parameter.grad_dtype = None
        parameter.grad = torch.full_like(parameter, 1.001, dtype=torch.float32)
    with pytest.raises(TypeError, match=r"is torch.float32, and its parameter torch.bfloat16"):
        mpi.nn.synchronize_gradients(net)


# Levels, sessions, and the end.


def test_parameters_on_several_gpus_have_buckets_on_each(mpi, monkeypatch):
    gpus = [torch.device("cuda", index) for index in range(2)]
    runs = [[types.SimpleNamespace(device=gpu, dtype=torch.float32, itemsize=4, numel=lambda: 3)] for gpu in gpus]
    monkeypatch.setattr(buckets.gpus, "why_no_ipc", lambda: "")
    monkeypatch.setattr(buckets, "symmetric_empty", lambda *args, **kwargs: pytest.fail("it would lie on one of them"))
    monkeypatch.setattr(torch, "zeros", lambda count, dtype, device: (count, device))
    assert buckets.flat_memory(runs, mpi.communicator()) == [(3, gpu) for gpu in gpus]


def test_another_level(mpi, memory, tune):
    tune(alone_bytes=100)
    net = network()
    give_gradients(mpi, net, 0)
    made = check(mpi, net)
    with mpi.at(mpi.push_communicator(mpi.rank() % 2)):
        give_gradients(mpi, net, 1)
        within = check(mpi, net)
        assert within is not made
        assert within.comm.size < mpi.communicator(0).size or mpi.communicator(0).size == 1
    give_gradients(mpi, net, 2)
    check(mpi, net)


def test_stop_and_start_between_calls(mpi, memory, tune):
    net = network()
    for step in range(2):
        tune(alone_bytes=100)  # start() installs the defaults
        give_gradients(mpi, net, step)
        check(mpi, net)
        check(mpi, net)
        mpi.stop()
        mpi.start()
    check(mpi, net)


def test_buckets_go_with_their_module(mpi, tune):
    gc.collect()
    before = symmetric.num_live()
    for size in ({"alone_bytes": 1}, {}):
        tune(**size)
        net = network()
        for step in range(2):
            give_gradients(mpi, net, step)
            check(mpi, net)
        kept = net[0].weight.grad
        assert (symmetric.num_live() > before) == (mpi.size() > 1)
        del net
        gc.collect()
        assert symmetric.num_live() <= before + 1  # for whoever still has a gradient
        del kept
        gc.collect()
        assert symmetric.num_live() == before
