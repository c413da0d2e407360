"""Calls of several groups, threads and callbacks at once; calls that nobody waits for. Right, and never stuck."""

import threading

import pytest
import torch
import torch.distributed as dist

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("group")]


@pytest.fixture(scope="module")
def pair(group):
    """Two groups of all ranks."""
    made = dist.new_group(), dist.new_group()
    yield made
    for each in made:
        dist.destroy_process_group(each)


def mine(group, count, shift=0):
    """Values of this rank."""
    return torch.full((count,), float(group.rank() + shift))


def expected(size, shift=0):
    """Their sum over all ranks."""
    return size * shift + size * (size - 1) / 2


def future(x):
    return dist.all_reduce(x, async_op=True).get_future()


def test_two_groups_in_two_threads(group, pair):
    wrong = []

    def many(each):
        for turn in range(100):
            x = mine(group, turn % 7 * 1000 + 1, turn)
            dist.all_reduce(x, group=each, async_op=turn % 3 == 0) and dist.barrier(group=each)
            if not (x == expected(group.size(), turn)).all():
                wrong.append(turn)

    threads = [threading.Thread(target=many, args=(each,)) for each in pair]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_parts_of_the_ranks_at_the_same_time(group):
    low = list(range((group.size() + 1) // 2))
    high = [rank for rank in range(group.size()) if rank not in low]
    halves = [dist.new_group(ranks) for ranks in (low, high) if ranks]
    half, ranks = (halves[0], low) if group.rank() in low else (halves[1], high)
    for turn in range(50):
        dist.all_reduce(x := mine(group, turn % 5 * 999 + 1), group=half)
        assert (x == sum(ranks)).all()
    dist.destroy_process_group(half)


def test_what_nobody_waits_for(group):
    kept = [mine(group, 1 + i % 50 * 100) for i in range(300)]
    for x in kept:
        dist.all_reduce(x, async_op=True)
    for i in range(300):  # nor keeps
        dist.all_gather_single(torch.empty(group.size() * (1 + i)), torch.ones(1 + i), async_op=True)
    dist.barrier()
    assert all((x == expected(group.size())).all() for x in kept)


@pytest.mark.parametrize("late", [False, True])
def test_a_callback_that_waits_for_another_collective(group, late):
    """Chained before others are launched, or after all are."""
    size = group.size()

    def again(done):
        return future(done.value()[0].clone()).wait()[0]

    futures = [future(mine(group, 10, i)) for i in range(20)]
    if late:
        dist.barrier()
    chained = [each.then(again).then(lambda done: done.value() + 1) for each in futures]
    for i, each in enumerate(chained):
        assert (each.wait() == size * expected(size, i) + 1).all()
    assert (torch.futures.collect_all(futures).then(lambda _: again(futures[0])).wait() == size * expected(size)).all()


def test_a_callback_that_waits_for_a_later_call(group):
    size = group.size()
    gate = threading.Event()
    here = threading.current_thread()

    def hold(_):
        assert threading.current_thread() is here or gate.wait(60)

    future(torch.ones(1)).then(hold)  # all that follows queues, or it is over
    x, y = torch.ones(3), torch.ones(3)
    first, second = (dist.all_reduce(each, async_op=True) for each in (x, y))
    by_work = first.get_future().then(lambda done: (second.wait(), done.value()[0] + y)[1])
    third = future(z := torch.ones(3)).then(lambda done: done.value()[0])
    by_future = second.get_future().then(lambda _: third.wait() + 1)
    gate.set()
    assert (by_work.wait() == 2 * size).all()
    assert (by_future.wait() == size + 1).all()
    assert (z == size).all()


def test_callbacks_come_in_the_order_of_their_calls(group):
    """Also where one waits for the call of the other; on one rank both are chained when all is over."""
    first, second = (dist.all_reduce(torch.ones(1), async_op=True) for _ in range(2))
    if group.rank() == 0:
        second.wait()

    def one(_):
        second.wait()
        dist.all_reduce(x := torch.ones(2))
        return x

    def other(_):
        dist.all_reduce(x := torch.full((2,), 100.0))
        return x

    ones, others = first.get_future().then(one), second.get_future().then(other)
    assert (ones.wait() == group.size()).all()
    assert (others.wait() == 100 * group.size()).all()


@pytest.mark.mpi(min_size=2)
def test_callbacks_and_messages_do_not_meet(rank, size):
    message = dist.irecv(torch.empty(1), (rank - 1) % size, tag=1)

    def exchange(_):
        out = torch.empty(size)
        dist.all_to_all_single(out, torch.arange(float(size)) + 10 * rank, [1] * size, [1] * size)
        return out

    assert future(torch.ones(1)).then(exchange).wait().tolist() == [10.0 * r + rank for r in range(size)]
    dist.send(torch.full((1,), -float(rank)), (rank + 1) % size, tag=1)
    message.wait()
    assert message.result()[0].item() == -((rank - 1) % size)


def test_an_error_in_a_callback(group):
    with pytest.raises(Exception, match="out of range"):
        future(torch.ones(2)).then(lambda done: done.value()[7]).wait()
    assert future(torch.ones(2)).wait()[0].tolist() == [group.size()] * 2
