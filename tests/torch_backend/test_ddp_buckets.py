"""DDP's buckets move into memory that all ranks map: the same parameters as one process, and nothing stays behind."""

import _thread
import gc
import os
import weakref

import pytest
import torch
import torch.distributed as dist
from support import jobs, networks
from torch.nn.parallel import DistributedDataParallel

from torchmpi_py import torch_backend
from torchmpi_py.errors import Unavailable
from torchmpi_py.memory import adopted, symmetric
from torchmpi_py.memory.adopted import AdoptedSegment

pytestmark = pytest.mark.mpi
WIDTH = 300  # a layer of 360 kB: moved, while its bias alone is not
STEPS = 4
VIEW = {"gradient_as_bucket_view": True}
_of_other_tests = weakref.WeakSet()


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
    jobs.until(lambda: gc.collect() >= 0 and not (symmetric.drop_unused() or moved()))


def live():
    return [segment for segment in symmetric.live.now[1] if isinstance(segment, AdoptedSegment)]


def moved():
    """The segments that this module's buckets were moved to."""
    return [segment for segment in live() if segment not in _of_other_tests]


def network(num_layers=3):
    return networks.perceptron(*[WIDTH] * (num_layers + 1))


def train(model, batches):
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for x in batches:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def of_rank(mpi, steps):
    return [networks.batch(8, WIDTH, rank=mpi.rank(), step=step) for step in steps]


def of_all(ranks, step):
    return torch.cat([networks.batch(8, WIDTH, rank=rank, step=step) for rank in ranks])


def train_and_check(mpi, ddp, begin=0, end=STEPS):
    """Train on, from the step ``begin``: the parameters are those of one process that has the batches of all ranks."""
    train(ddp, of_rank(mpi, range(begin, end)))
    alone = network()
    train(alone, [of_all(range(mpi.size()), step) for step in range(end)])
    torch.testing.assert_close(networks.flat(ddp), networks.flat(alone), rtol=1e-4, atol=1e-6)
    mpi.nn.check_with_allreduce(ddp.module)


@pytest.mark.parametrize(
    ("hook", "how"),
    [(None, {}), (None, VIEW), (None, {"static_graph": True}), ("average", {"bucket_cap_mb": 0.4}), ("average", VIEW)],
    ids=str,
)
def test_as_one_process(mpi, hook, how):
    """Also where the buckets of the first step, which DDP arranges anew, are given up."""
    if symmetric.unavailable_because:
        pytest.skip("no shared memory")
    ddp = DistributedDataParallel(network(), **how)
    if hook:
        ddp.register_comm_hook(None, torch_backend.average)
    train_and_check(mpi, ddp, end=1)
    first = moved()
    train_and_check(mpi, ddp, begin=1)
    assert (second := moved())
    assert "static_graph" in how or not set(first) & set(second)
    train_and_check(mpi, ddp, begin=STEPS, end=STEPS + 1)
    assert moved() == second
    if how == VIEW:
        assert isinstance(symmetric.find(ddp.module[0].weight.grad.view(-1))[0], AdoptedSegment)


def test_two_modules_and_a_program_that_uses_the_gradients(mpi):
    """A gradient in a bucket is an ordinary tensor to the verbs, whatever others pass, and to a forked child."""
    one, other = (DistributedDataParallel(network(), **VIEW) for _ in range(2))
    for model in (one, other):
        train_and_check(mpi, model)
    gradient = one.module[0].weight.grad
    expected = gradient.clone()
    if (child := os.fork()) == 0:
        os._exit(not torch.equal(gradient, expected))
    assert os.waitpid(child, 0)[1] == 0
    x = gradient if mpi.rank() else gradient.clone()
    mpi.allreduce(x, op="avg")
    torch.testing.assert_close(x, expected)
    dist.all_reduce(x)
    torch.testing.assert_close(x, mpi.size() * expected)
    train_and_check(mpi, other, begin=STEPS, end=STEPS + 2)


@pytest.mark.parametrize("how", [{}, VIEW], ids=str)
def test_ranks_with_fewer_batches(mpi, how):
    """A rank that has joined reduces zeros, in memory that was never moved, with the buckets of the others."""
    ddp = DistributedDataParallel(network(), **how)
    num_steps = STEPS - (mpi.rank() == 0)
    with ddp.join():
        train(ddp, of_rank(mpi, range(num_steps)))
    if mpi.rank() == 0 and mpi.size() > 1:
        expected = network()
        train(expected, [of_all(range(mpi.size()), step) for step in range(num_steps)])
        expected.zero_grad()
        (expected(of_all(range(1, mpi.size()), num_steps)).square().mean() * (mpi.size() - 1) / mpi.size()).backward()
        gone = networks.flat(expected) - 0.05 * networks.flat_gradients(expected)
        torch.testing.assert_close(networks.flat(ddp), gone, rtol=1e-4, atol=1e-6)
    mpi.nn.check_with_allreduce(ddp.module)
    with ddp.join():  # a rank without any batch
        train(ddp, of_rank(mpi, range(2 * bool(mpi.rank()))))
    mpi.nn.check_with_allreduce(ddp.module)


def test_the_map_of_used_parameters_is_no_bucket(mpi, selector):
    """A rank that has joined has it reduced by a call from Python, the others from C++."""
    selector["allreduce", "node", True], selector["allreduce", "node", False] = "shared", "mpi"
    ddp = DistributedDataParallel(network(), find_unused_parameters=True)
    with ddp.join():
        train(ddp, of_rank(mpi, range(STEPS - (mpi.rank() == 0))))
    mpi.nn.check_with_allreduce(ddp.module)


def test_a_call_from_a_thread_of_c(mpi, the_group):
    """As autograd has for deeply nested backward passes: there is no frame of Python above the call."""
    floats, integers = torch.full((20_000,), 1.0 + mpi.rank()), torch.full((3,), 1 + mpi.rank())
    total = sum(1 + rank for rank in range(mpi.size()))
    for x in (floats, integers):
        _thread.start_new_thread(the_group.allreduce, ([x],))
        jobs.until(lambda x=x: x.eq(total).all())
    dist.barrier()


def test_an_address_taken_before_buckets_could_move(mpi, selector):
    """The selector changes in the middle: a bucket that has been reduced elsewhere stays where it is."""
    selector["allreduce", "node", True] = selector["allreduce", "node", False] = "mpi"
    ddp = DistributedDataParallel(network(), **VIEW)
    train(ddp, of_rank(mpi, range(STEPS)))
    gradient = ddp.module[0].weight.grad
    array = gradient.numpy()
    selector["allreduce", "node", True] = selector["allreduce", "node", False] = "shared"
    for parameter in ddp.parameters():
        parameter.grad.zero_()
    ddp(*of_rank(mpi, [STEPS])).square().mean().backward()
    assert ddp.module[0].weight.grad is gradient
    assert torch.from_numpy(array).equal(gradient)
    assert gradient.count_nonzero()
    assert not moved()


@pytest.mark.parametrize("refusal", ["_offer", "_map_others"])
def test_where_one_rank_cannot_move_its_bucket(mpi, monkeypatch, refusal):
    """All go on with ordinary buckets, also with one that has moved."""
    group = dist.new_group(backend="torchmpi")
    if mpi.rank() == mpi.size() - 1:

        def refuse(*_):
            raise Unavailable("no room")

        monkeypatch.setattr(adopted, refusal, refuse)
    train_and_check(mpi, DistributedDataParallel(network(), process_group=group))
    assert not moved()
    dist.destroy_process_group(group)


def test_a_bucket_that_has_moved_on_one_rank_alone(mpi):
    """Which takes two modules in different states; the sums are right all the same."""
    ddp = DistributedDataParallel(network(), **VIEW)
    train(ddp, of_rank(mpi, range(STEPS)))
    if mpi.rank() == 0:
        for segment in moved():
            symmetric.live.remove(segment)
    train_and_check(mpi, ddp, begin=STEPS, end=2 * STEPS)


def test_no_memory_of_a_module_that_is_gone_and_one_descriptor_a_bucket(mpi):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        ddp = DistributedDataParallel(network(8), bucket_cap_mb=0.4)
        train(ddp, of_rank(mpi, range(STEPS)))
        assert 4 <= len(moved()) <= 9
        assert len(os.listdir("/proc/self/fd")) - before <= len(moved()) + 2
        del ddp
        gc.collect()
