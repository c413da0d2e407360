"""Backend "torchmpi" of torch.distributed on GPU tensors: its calls, in stream order, and what is built on them."""

import pytest
import regression
import torch
import torch.distributed as dist
from test_frameworks_ddp import (  # noqa: F401 - collected here again
    test_as_one_process,
    test_hooks_of_torch,
    test_join,
    test_power_sgd,
    test_the_hook_compressed,
    test_zero_redundancy_optimizer,
)
from test_frameworks_sharded import (  # noqa: F401
    test_fully_shard_trains_as_one_process,
    test_gradients_of_several_backwards_are_added,
    test_replicas_of_shards,
)

if not torch.cuda.is_available():
    pytest.skip("no GPU that torch can use", allow_module_level=True)

pytestmark = pytest.mark.mpi

COUNTS = 7, 300_001
SLOW = 2_000_000  # cycles; about a millisecond
# Before torch 2.13 they had other names.
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@pytest.fixture(scope="module")
def group(request, mpi):
    """The default group of torch.distributed, over "torchmpi"."""
    import torchmpi_py.torch_backend  # noqa: F401

    dist.init_process_group("torchmpi")
    regression.device = "cuda"
    yield dist.group.WORLD
    regression.device = "cpu"
    if not request.session.testsfailed:
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def the_group(group):
    """All of these need it."""


def late(value, count, dtype=torch.float32):
    """A tensor whose values are still being computed: value, value + 1, ... of a period of 100."""
    x = torch.full((count,), -1, dtype=dtype, device="cuda")
    torch.cuda._sleep(SLOW)
    return x.copy_(torch.arange(count, device="cuda") % 100 + value)


def expected(value, count, dtype=torch.float32):
    return (torch.arange(count, device="cuda") % 100 + value).to(dtype)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("is_async", [False, True])
def test_calls(mpi, stream, is_async, count):
    """Each on values that come late, read at once on the same stream."""
    size, me, last = mpi.size(), mpi.rank(), mpi.size() - 1

    def done(call, *args, **options):
        work = call(*args, **options, async_op=is_async)
        if is_async:
            work.wait()

    def empty(number=1):
        return torch.empty(number * count, device="cuda")

    total = expected(0, size * count) * size + size * (size - 1) // 2
    whole = torch.cat([expected(rank, count) for rank in range(size)])
    done(dist.all_reduce, x := late(me, count))
    assert torch.equal(x, total[:count])
    done(dist.all_reduce, x := late(me, count, torch.bfloat16), dist.ReduceOp.MAX)
    assert torch.equal(x, expected(last, count, torch.bfloat16))
    done(dist.broadcast, x := late(me, count), last)
    assert torch.equal(x, expected(last, count))
    done(dist.reduce, x := late(me, count), last)
    assert me != last or torch.equal(x, total[:count])
    done(ALL_GATHER, out := empty(size), late(me, count))
    assert torch.equal(out, whole)
    done(dist.all_gather, parts := [empty() for _ in range(size)], late(me, count))
    assert torch.equal(torch.cat(parts), whole)
    done(REDUCE_SCATTER, out := empty(), late(me, size * count))
    assert torch.equal(out, total[me * count : (me + 1) * count])
    done(dist.all_to_all_single, out := empty(size), late(me, count).repeat(size))
    assert torch.equal(out, whole)
    done(dist.scatter, out := empty(), [late(rank, count) for rank in range(size)] if me == last else None, src=last)
    assert torch.equal(out, expected(me, count))
    done(dist.gather, late(me, count), parts := [empty() for _ in range(size)] if me == last else None, dst=last)
    assert me != last or torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("count", COUNTS)
def test_messages(size, me, stream, count):
    """Around a ring, blocking and as a batch."""
    if size == 1:
        pytest.skip("nobody to send to")
    right, left = (me + 1) % size, (me - 1) % size
    y = torch.empty(count, device="cuda")
    if me % 2 == 0:
        dist.send(late(me, count), right)
        dist.recv(y, left)
    else:
        x = late(me, count)
        dist.recv(y, left)
        dist.send(x, right)
    assert torch.equal(y, expected(left, count))
    y = torch.empty(count, device="cuda")
    calls = [dist.P2POp(dist.isend, late(me, count), right), dist.P2POp(dist.irecv, y, left)]
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    assert torch.equal(y, expected(left, count))


def test_what_a_callback_has_copied_is_not_given_to_others(mpi):
    """A callback reads, late and on a stream of its own, what was taken on the program's, where others follow."""
    for turn in range(20):
        x = torch.ones(1000, device="cuda")
        copied = torch.full((1000,), float(turn), device="cuda")

        def callback(_, held=copied):
            torch.cuda._sleep(SLOW)
            return held + 1

        following = dist.all_reduce(x, async_op=True).get_future().then(callback)
        del copied, callback
        for _ in range(200):
            torch.empty(1000, device="cuda").fill_(-1)
        assert (following.wait() == turn + 1).all()


def test_a_receive_comes_after_what_was_queued_before(mpi, stream):
    if mpi.size() == 1:
        pytest.skip("nobody to send to")
    right, left = (mpi.rank() + 1) % mpi.size(), (mpi.rank() - 1) % mpi.size()
    for _ in range(10):
        y = torch.zeros(1000, device="cuda")
        torch.cuda._sleep(SLOW)
        y.fill_(-1)  # late
        receipt = dist.irecv(y, left)
        sent = dist.isend(torch.full((1000,), float(mpi.rank()), device="cuda"), right)
        receipt.get_future().wait()
        sent.wait()
        assert (y == left).all()


def test_two_groups_at_once(mpi, stream):
    """Large tensors of two groups are under way at the same time; no result depends on the other."""
    groups = [dist.new_group(range(mpi.size()), backend="torchmpi") for _ in range(2)]
    count = 5_000_003
    for turn in range(5):
        xs = [late(mpi.rank() + 10 * which + turn, count) for which in range(2)]
        works = [dist.all_reduce(x, group=group, async_op=True) for x, group in zip(xs, groups, strict=True)]
        for which, (x, work) in enumerate(zip(xs, works, strict=True)):
            work.wait()
            total = sum(rank + 10 * which + turn for rank in range(mpi.size()))
            assert torch.equal(x, expected(0, count) * mpi.size() + total)
