"""DDP's buckets move into memory that all ranks map: the same parameters as one process, and nothing stays behind."""

import _thread
import gc
import os
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from torchmpi_py import torch_backend
from torchmpi_py.errors import Unavailable
from torchmpi_py.memory import adopted, symmetric
from torchmpi_py.memory.adopted import AdoptedSegment

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(240)]
WIDTH = 300  # a layer of 360 kB: moved, while its bias alone is not
STEPS = 4


@pytest.fixture(autouse=True)
def the_group(group_for_frameworks, mpi):
    """All of these need it, and no bucket of theirs stays behind."""
    if mpi.num_nodes() > 1:
        pytest.skip("buckets move into memory that the ranks of one node share")
    gc.collect()
    symmetric.drop_unused()
    _of_other_tests.update(live())  # whose modules something else keeps alive
    yield group_for_frameworks
    # The group's thread may hold the last bucket's call for a moment after the program has gone on.
    deadline = time.monotonic() + 60
    while moved():
        assert time.monotonic() < deadline, "buckets of a module that is gone"
        time.sleep(0.01)
        gc.collect()
        symmetric.drop_unused()


_of_other_tests = weakref.WeakSet()


def live():
    return [segment for segment in symmetric.live.now[1] if isinstance(segment, AdoptedSegment)]


def moved():
    """The segments that this module's buckets were moved to."""
    return [segment for segment in live() if segment not in _of_other_tests]


def network(num_layers=3):
    torch.manual_seed(7)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(num_layers)]
    return torch.nn.Sequential(*(part for layer in layers for part in (layer, torch.nn.Tanh())))


def batch(rank, step):
    """A batch that depends on the place of each element."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(8, WIDTH, generator=generator)


def train(model, batches, optimizer=None):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.05)
    for x in batches:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def alone(size, steps=range(STEPS)):
    """The parameters that one process gets with the batches of all ranks."""
    model = network()
    train(model, [torch.cat([batch(rank, step) for rank in range(size)]) for step in steps])
    return list(model.parameters())


def assert_close(found, expected):
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x.detach(), y.detach(), rtol=1e-4, atol=1e-6)


HOW = [{}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 0.4}, {"static_graph": True}]


@pytest.mark.parametrize("how", HOW, ids=str)
@pytest.mark.parametrize("hook", [None, torch_backend.average], ids=["plain", "hook"])
def test_as_one_process(mpi, hook, how):
    if symmetric.why_unavailable():
        pytest.skip("no shared memory")
    ddp = DistributedDataParallel(network(), **how)
    if hook is not None:
        ddp.register_comm_hook(None, hook)
    train(ddp, [batch(mpi.rank(), step) for step in range(STEPS)])
    assert_close(ddp.parameters(), alone(mpi.size()))
    mpi.nn.check_with_allreduce(ddp.module)
    assert moved()
    if how.get("gradient_as_bucket_view"):
        assert isinstance(symmetric.find(ddp.module[0].weight.grad.view(-1))[0], AdoptedSegment)


def test_the_buckets_of_the_first_step_are_given_up(mpi):
    """DDP arranges its buckets anew after one step; those of the second step are all that is kept."""
    ddp, x = DistributedDataParallel(network()), batch(mpi.rank(), 0)
    train(ddp, [x])
    first = moved()
    train(ddp, [x, x])
    second = moved()
    assert second
    assert not set(first) & set(second)
    train(ddp, [x, x])
    assert moved() == second


def test_two_modules_and_a_program_that_uses_the_gradients(mpi):
    """A gradient in a bucket is an ordinary tensor to the verbs: the other ranks may pass another one."""
    one, other = (DistributedDataParallel(network(), gradient_as_bucket_view=True) for _ in range(2))
    for model in (one, other):
        train(model, [batch(mpi.rank(), step) for step in range(STEPS)])
    assert_close(one.parameters(), alone(mpi.size()))
    assert_close(other.parameters(), alone(mpi.size()))
    gradient = one.module[0].weight.grad
    expected = gradient.clone()
    x = gradient if mpi.rank() else gradient.clone()
    mpi.allreduce(x, op="avg")
    torch.testing.assert_close(x, expected)
    dist.all_reduce(x)
    torch.testing.assert_close(x, mpi.size() * expected)


@pytest.mark.parametrize("how", HOW[:2], ids=str)
def test_ranks_with_fewer_batches(mpi, how):
    """A rank that has joined reduces zeros, in memory that was never moved, with the buckets of the others."""
    ddp = DistributedDataParallel(network(), **how)
    num_steps = STEPS - (mpi.rank() == 0)
    with ddp.join():
        train(ddp, [batch(mpi.rank(), step) for step in range(num_steps)])
    expected = network()
    optimizer = torch.optim.SGD(expected.parameters(), 0.05)
    train(expected, [torch.cat([batch(r, step) for r in range(mpi.size())]) for step in range(num_steps)], optimizer)
    if mpi.rank() == 0 and mpi.size() > 1:
        last = torch.cat([batch(r, STEPS - 1) for r in range(1, mpi.size())])
        optimizer.zero_grad()
        (expected(last).square().mean() * (mpi.size() - 1) / mpi.size()).backward()
        optimizer.step()
        assert_close(ddp.parameters(), expected.parameters())
    mpi.nn.check_with_allreduce(ddp.module)


@pytest.fixture
def small_ones_in_place(mpi):
    """Symmetric tensors of any size take ``shared``, others ``mpi``, as a table of ``autotune`` might say."""
    rows, source = {key: mpi.selector[key] for key in mpi.selector}, mpi.selector.source
    mpi.selector["allreduce", "node", True] = "shared"
    mpi.selector["allreduce", "node", False] = "mpi"
    yield
    mpi.selector.load(rows, source)


def test_the_map_of_used_parameters_is_no_bucket(mpi, small_ones_in_place):
    """A rank that has joined has it reduced by a call from Python, the others from C++."""
    ddp = DistributedDataParallel(network(), find_unused_parameters=True)
    with ddp.join():
        train(ddp, [batch(mpi.rank(), step) for step in range(STEPS - (mpi.rank() == 0))])
    mpi.nn.check_with_allreduce(ddp.module)


def test_a_call_from_a_thread_of_c(mpi, the_group):
    """As autograd has for deeply nested backward passes: there is no frame of Python above the call."""
    floats, integers = torch.full((20_000,), 1.0 + mpi.rank()), torch.full((3,), 1 + mpi.rank())
    total = sum(1 + rank for rank in range(mpi.size()))
    for x in (floats, integers):
        _thread.start_new_thread(the_group.allreduce, ([x],))
        deadline = time.monotonic() + 60
        while not x.eq(total).all():
            assert time.monotonic() < deadline
            time.sleep(0.01)
    dist.barrier()


def test_an_address_taken_before_buckets_could_move(mpi):
    """The selector changes in the middle: a bucket that has been reduced elsewhere stays where it is."""
    rows, source = {key: mpi.selector[key] for key in mpi.selector}, mpi.selector.source
    mpi.selector["allreduce"] = "mpi"
    try:
        ddp = DistributedDataParallel(network(), gradient_as_bucket_view=True)
        train(ddp, [batch(mpi.rank(), step) for step in range(STEPS)])
        gradient = ddp.module[0].weight.grad
        array = gradient.numpy()
    finally:
        mpi.selector.load(rows, source)
    for parameter in ddp.parameters():
        parameter.grad.zero_()
    ddp(batch(mpi.rank(), STEPS)).square().mean().backward()
    assert ddp.module[0].weight.grad is gradient
    assert torch.from_numpy(array).equal(gradient)
    assert gradient.count_nonzero()
    assert not moved()


def test_one_descriptor_a_bucket(mpi):
    before = len(os.listdir("/proc/self/fd"))
    ddp = DistributedDataParallel(network(8), bucket_cap_mb=0.4)
    train(ddp, [batch(mpi.rank(), step) for step in range(STEPS)])
    assert len(moved()) >= 4
    assert len(os.listdir("/proc/self/fd")) - before <= len(moved()) + 2


def test_a_rank_without_any_batch(mpi):
    ddp = DistributedDataParallel(network())
    with ddp.join():
        train(ddp, [batch(mpi.rank(), step) for step in range(STEPS if mpi.rank() else 0)])
    mpi.nn.check_with_allreduce(ddp.module)


@pytest.mark.parametrize("refusal", ["before", "after"])
def test_where_one_rank_cannot_move_its_bucket(mpi, monkeypatch, refusal):
    """All go on with ordinary buckets, also with one that has moved."""
    group = dist.new_group(backend="torchmpi")
    if mpi.rank() == mpi.size() - 1:

        def refuse(*_):
            raise Unavailable("no room")

        monkeypatch.setattr(adopted, "_offer" if refusal == "before" else "_map_others", refuse)
    ddp = DistributedDataParallel(network(), process_group=group)
    train(ddp, [batch(mpi.rank(), step) for step in range(STEPS)])
    assert_close(ddp.parameters(), alone(mpi.size()))
    assert not moved()
    dist.destroy_process_group(group)


def test_a_bucket_that_has_moved_on_one_rank_alone(mpi):
    """Which takes two modules in different states; the sums are right all the same."""
    ddp = DistributedDataParallel(network(), gradient_as_bucket_view=True)
    train(ddp, [batch(mpi.rank(), step) for step in range(STEPS)])
    if mpi.rank() == 0:
        for segment in moved():
            symmetric.live.remove(segment)
    train(ddp, [batch(mpi.rank(), step) for step in range(STEPS, 2 * STEPS)])
    assert_close(ddp.parameters(), alone(mpi.size(), range(2 * STEPS)))


def test_a_forked_child(mpi):
    """It sees the gradients, and its parent goes on."""
    ddp = DistributedDataParallel(network(), gradient_as_bucket_view=True)
    train(ddp, [batch(mpi.rank(), step) for step in range(STEPS)])
    if (child := os.fork()) == 0:
        os._exit(not ddp.module[0].weight.grad.isfinite().all())
    assert os.waitpid(child, 0)[1] == 0
    train(ddp, [batch(mpi.rank(), step) for step in range(STEPS, 2 * STEPS)])
    assert_close(ddp.parameters(), alone(mpi.size(), range(2 * STEPS)))


def test_no_memory_of_a_module_that_is_gone(mpi):
    for _ in range(3):
        ddp = DistributedDataParallel(network())
        train(ddp, [batch(mpi.rank(), step) for step in range(STEPS)])
        assert 0 < len(moved()) <= 4
        del ddp
        gc.collect()
