"""Gradient buckets: what comes out is the plain allreduce of every gradient, however parameters fall into buckets."""

import gc
import types

import pytest
import torch
from support.values import values

from torchmpi_py.core import config
from torchmpi_py.errors import Unavailable
from torchmpi_py.memory import symmetric
from torchmpi_py.nn import buckets, synchronize
from torchmpi_py.nn.buckets import buckets_of, grouped

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(240)]


@pytest.fixture
def tune(monkeypatch):
    """Use other sizes of buckets, and ordinary memory in place of the symmetric one."""

    def none_to_be_had(*args, **kwargs):
        raise Unavailable("planted")

    def use(ordinary=False, **sizes):
        monkeypatch.setattr(config, "current", config.Tuning(**sizes))
        if ordinary:
            monkeypatch.setattr(buckets, "symmetric_empty", none_to_be_had)

    return use


def trained(net):
    return [p for p in net.parameters() if p.requires_grad]


def gradient(p, rank, step):
    """Whole numbers that depend on the element, the rank and the step, in the parameter's layout."""
    return torch.empty_like(p).copy_(values(rank, p.numel(), step=step).view(p.shape) - 5).detach()


def give_gradients(mpi, net, step, has=lambda rank, index: True):
    for index, p in enumerate(trained(net)):
        p.grad = gradient(p, mpi.rank(), step + 2 * index) if has(mpi.rank(), index) else None


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
    return synchronize._buckets[net]


def network(dtype=torch.float32):
    return torch.nn.Sequential(*(torch.nn.Linear(6, 6) for _ in range(4))).to(dtype)


# How parameters fall into buckets.


def test_grouping(mpi, tune):
    tune(alone_bytes=100, fuse_bytes=160)
    tensors = [torch.empty(size) for size in (10, 25, 10, 20, 9, 24, 1, 300)]  # floats
    assert [[x.numel() for x in group] for group in grouped(tensors)] == [[25], [10, 10, 20], [300], [9, 24, 1]]
    mixed = [torch.empty(10), torch.empty(10).double(), torch.empty(10), torch.empty(5).double()]
    assert [[x.dtype for x in group] for group in grouped(mixed)] == [[torch.float32] * 2, [torch.float64] * 2]
    net = network()
    parameters = list(net.parameters())  # weights of 144 bytes, biases of 24: the last ones come first
    tune(alone_bytes=144, fuse_bytes=50)
    made = buckets_of(net, parameters, mpi.communicator(0))
    assert [made.index_of[p] for p in parameters] == [5, 4, 3, 4, 2, 1, 0, 1]


# What comes out.


@pytest.mark.parametrize(
    ("ordinary", "dtype", "sizes", "average"),
    [
        (False, torch.float32, {}, True),
        (True, torch.float32, {"alone_bytes": 100, "fuse_bytes": 60}, False),
        (False, torch.float64, {"alone_bytes": 1}, False),
        (True, torch.float64, {}, True),
        (False, torch.bfloat16, {"alone_bytes": 100, "fuse_bytes": 60}, True),
        (True, torch.bfloat16, {"alone_bytes": 1}, False),
    ],
)
def test_gradients_are_views_of_the_average(mpi, tune, ordinary, dtype, sizes, average):
    tune(ordinary, **sizes)
    net = network(dtype)
    for step in range(3):
        give_gradients(mpi, net, step)
        made = check(mpi, net, average)
        for bucket in made.all:
            found = [symmetric.find(p.grad) is not None for p in bucket.parameters]
            assert found == [not ordinary and mpi.size() > 1] * len(found)
            for p in bucket.parameters:
                assert p.grad.untyped_storage().data_ptr() == bucket.flat.untyped_storage().data_ptr()
                assert p.grad.is_contiguous()
    assert synchronize._buckets[net] is made


@pytest.mark.parametrize(("ordinary", "alone_bytes"), [(False, 1), (False, 1 << 20), (True, 1 << 20)])
def test_gradients_that_are_missing(mpi, tune, ordinary, alone_bytes):
    tune(ordinary, alone_bytes=alone_bytes)
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


@pytest.mark.parametrize(("ordinary", "average"), [(False, True), (True, False)])
def test_large_gradients(mpi, tune, ordinary, average):
    """Of at least alone_bytes, so by themselves, and large enough for shared memory; on some ranks they are missing."""
    tune(ordinary)
    net = torch.nn.ParameterList([torch.zeros(shape) for shape in ((600, 701), (5,), (1, 262_144))])
    patterns = [lambda rank, index: True, lambda rank, index: (rank + index) % 2 == 0, lambda rank, index: rank == 0]
    for step, has in enumerate(patterns):
        give_gradients(mpi, net, step, has)
        given = [p.grad for p in net]
        before = [None if x is None else x.clone() for x in given]
        made = check(mpi, net, average)
        assert [len(bucket.parameters) for bucket in made.all] == [1] * 3
        for x, y in zip(given, before, strict=True):
            assert x is None or torch.equal(x, y)  # what backward left is only read
        check(mpi, net, average)


# Unusual parameters.


@pytest.mark.parametrize("ordinary", [False, True])
def test_dtypes_and_layouts_mixed(mpi, tune, ordinary):
    tune(ordinary, alone_bytes=400, fuse_bytes=2000)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last),
        torch.nn.Linear(9, 5).bfloat16(),
        torch.nn.Conv2d(4, 2, 3).double().to(memory_format=torch.channels_last),
        torch.nn.Linear(3, 2).double(),
        torch.nn.ParameterList([torch.zeros(4, 6).t(), torch.zeros(8, 3)[::2], torch.tensor(1.0), torch.zeros(0)]),
        torch.nn.Linear(3, 2),
    )
    net.append(torch.nn.Linear(3, 2))
    net[6].weight = net[5].weight
    net[6].bias.requires_grad_(False)
    for step in range(2):
        give_gradients(mpi, net, step)
        made = check(mpi, net)
        assert net[0].weight.grad.stride() == net[0].weight.stride()
        assert all(len({p.dtype for p in bucket.parameters}) == 1 for bucket in made.all)
        torch.optim.SGD(net.parameters(), lr=1.0).step()
    assert sum(len(bucket.parameters) for bucket in made.all) == len(trained(net))
    assert net[6].bias.grad is None
    for p in trained(net):  # what autograd leaves may lie in another way than the parameter
        p.grad = gradient(p, mpi.rank(), 7).contiguous()
    check(mpi, net)


def test_parameters_that_change_between_calls(mpi, tune):
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
    net[0].weight = torch.nn.Parameter(torch.zeros(6, 6))
    made = again(made)
    net[0].weight.grad, net[0].weight.data = None, torch.zeros(3, 12)
    made = again(made)
    net.zero_grad()
    net.double()
    again(made)


@pytest.mark.parametrize(
    ("kinds", "alone_bytes"),
    [([torch.float64], 1), ([torch.float64, torch.float32], 1 << 20), ([torch.bfloat16], 1 << 20)],
)
def test_a_module_that_is_converted_with_its_gradients(mpi, tune, kinds, alone_bytes):
    tune(alone_bytes=alone_bytes)
    net = network()
    give_gradients(mpi, net, 0)
    check(mpi, net)
    for dtype in kinds:
        net.to(dtype)
    give_gradients(mpi, net, 1)
    check(mpi, net)


@pytest.mark.filterwarnings("ignore:.*create_graph")
def test_gradients_with_a_history(mpi, tune):
    """After backward(create_graph=True) gradients have one; buckets have none, or they would keep every step alive.

    In a backward pass they are refused: it would give a constant in place of a function, without a word.
    """
    for alone_bytes in (1, 1 << 20):
        tune(alone_bytes=alone_bytes)
        net = network()
        for _ in range(2):
            net.zero_grad()
            net(torch.full((2, 6), mpi.rank() + 1.0)).square().sum().backward(create_graph=True)
            mpi.nn.synchronize_gradients(net)
            assert not any(bucket.flat.requires_grad for bucket in synchronize._buckets[net].all)
            assert not any(p.grad.requires_grad for p in net.parameters())
    net = network()
    mpi.nn.register_async_backward(net)
    with pytest.raises(RuntimeError, match=r"the gradient of .* is part of a graph"):
        net(torch.ones(2, 6)).square().sum().backward(create_graph=True)


@pytest.mark.parametrize("alone_bytes", [1, 1 << 20])
def test_gradients_of_another_dtype_are_refused(mpi, tune, alone_bytes):
    net = network(torch.bfloat16)
    if not hasattr(next(net.parameters()), "grad_dtype"):
        pytest.skip("this torch has gradients of the parameters' dtype alone")
    tune(alone_bytes=alone_bytes)
    for parameter in net.parameters():
        parameter.grad_dtype = None
        parameter.grad = torch.full_like(parameter, 1.001, dtype=torch.float32)
    with pytest.raises(TypeError, match=r"is torch.float32, but its parameter is torch.bfloat16"):
        mpi.nn.synchronize_gradients(net)


# Devices, levels, sessions, and the end.


def test_parameters_on_several_gpus_have_buckets_on_each(mpi, monkeypatch):
    gpus = [torch.device("cuda", index) for index in range(2)]
    runs = [[types.SimpleNamespace(device=gpu, dtype=torch.float32, itemsize=4, numel=lambda: 3)] for gpu in gpus]
    monkeypatch.setattr(buckets.gpus, "why_no_ipc", lambda: "")
    monkeypatch.setattr(buckets, "symmetric_empty", lambda *args, **kwargs: pytest.fail("it would lie on one of them"))
    monkeypatch.setattr(torch, "zeros", lambda count, dtype, device: (count, device))
    assert buckets.flat_memory(runs, mpi.communicator()) == [(3, gpu) for gpu in gpus]


@pytest.mark.parametrize("ordinary", [False, True])
def test_another_level_and_another_session(mpi, tune, ordinary):
    tune(ordinary, alone_bytes=100)
    net = network()
    give_gradients(mpi, net, 0)
    made = check(mpi, net)
    with mpi.at(mpi.push_communicator(mpi.rank() % 2)):
        give_gradients(mpi, net, 1)
        within = check(mpi, net)
        assert within is not made
        assert within.comm.size < mpi.communicator(0).size or mpi.communicator(0).size == 1
    mpi.stop()
    mpi.start()
    for step in range(2, 4):
        give_gradients(mpi, net, step)
        check(mpi, net)
        check(mpi, net)


def test_buckets_go_with_their_module(mpi, tune):
    gc.collect()
    before = len(symmetric.live.now[0])
    for size in ({"alone_bytes": 1}, {}):
        tune(**size)
        net = network()
        give_gradients(mpi, net, 0)
        check(mpi, net)
        kept = net[0].weight.grad
        assert (len(symmetric.live.now[0]) > before) == (mpi.size() > 1)
        del net
        gc.collect()
        assert len(symmetric.live.now[0]) <= before + 1  # for whoever still has a gradient
        del kept
        gc.collect()
        assert len(symmetric.live.now[0]) == before
