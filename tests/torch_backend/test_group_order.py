"""Calls of several groups, threads and callbacks at once; calls that nobody waits for. Right, and never stuck."""

import threading

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd
from torch.nn.parallel import DistributedDataParallel

from torchmpi_py.errors import RanksDisagree
from torchmpi_py.torch_backend import average

pytestmark = pytest.mark.mpi


@pytest.fixture(scope="module")
def pair(group):
    """Two groups of all ranks."""
    made = dist.new_group(), dist.new_group()
    yield made
    for each in made:
        dist.destroy_process_group(each)


def expected(size, shift=0):
    return size * shift + size * (size - 1) / 2


def test_two_groups_in_opposite_orders(group, pair):
    rank, size = group.rank(), group.size()
    order = pair if rank % 2 == 0 else pair[::-1]
    for _ in range(30):
        tensors = [torch.full((1000,), float(rank)) for _ in order]
        works = [dist.all_reduce(x, group=each, async_op=True) for x, each in zip(tensors, order, strict=True)]
        for work in works:
            work.wait()
        assert all((x == expected(size)).all() for x in tensors)


def test_two_groups_in_two_threads(group, pair):
    rank, size = group.rank(), group.size()
    wrong = []

    def many(each):
        for turn in range(100):
            x = torch.full((turn % 7 * 1000 + 1,), float(rank + turn))
            dist.all_reduce(x, group=each, async_op=turn % 3 == 0) and dist.barrier(group=each)
            if not (x == expected(size, turn)).all():
                wrong.append(turn)

    threads = [threading.Thread(target=many, args=(each,)) for each in pair]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_parts_of_the_ranks_at_the_same_time(group):
    rank, size = group.rank(), group.size()
    low = list(range((size + 1) // 2))
    high = [r for r in range(size) if r not in low]
    halves = [dist.new_group(ranks) for ranks in (low, high) if ranks]
    mine, ranks = (halves[0], low) if rank in low else (halves[1], high)
    for turn in range(50):
        x = torch.full((turn % 5 * 999 + 1,), float(rank))
        dist.all_reduce(x, group=mine)
        assert (x == sum(ranks)).all()
    dist.destroy_process_group(mine)


def test_what_nobody_waits_for(group):
    rank, size = group.rank(), group.size()
    kept = [torch.full((1 + i % 50 * 100,), float(rank)) for i in range(1000)]
    for x in kept:
        dist.all_reduce(x, async_op=True)
    for i in range(1000):  # nor keeps
        dist.all_gather_single(torch.empty(size * (1 + i)), torch.ones(1 + i), async_op=True)
    dist.barrier()
    assert all((x == expected(size)).all() for x in kept)


def test_a_callback_that_waits_for_another_collective(group):
    rank, size = group.rank(), group.size()

    def again(future):
        x = future.value()[0].clone()
        return dist.all_reduce(x, async_op=True).get_future().wait()[0]

    for late in (False, True):  # chained before others are launched, or after all are
        futures = [dist.all_reduce(torch.full((10,), float(rank + i)), async_op=True).get_future() for i in range(20)]
        if late:
            dist.barrier()
        chained = [future.then(again).then(lambda future: future.value() + 1) for future in futures]
        for i, future in enumerate(chained):
            assert (future.wait() == size * expected(size, i) + 1).all()


def test_a_callback_that_waits_for_a_later_call(group):
    size = group.size()
    gate = threading.Event()
    here = threading.current_thread()

    def hold(_):
        assert threading.current_thread() is here or gate.wait(60)

    dist.all_reduce(torch.ones(1), async_op=True).get_future().then(hold)  # all that follows queues, or it is over
    x, y = torch.ones(3), torch.ones(3)
    first, second = (dist.all_reduce(each, async_op=True) for each in (x, y))
    by_work = first.get_future().then(lambda future: (second.wait(), future.value()[0] + y)[1])
    third = dist.all_reduce(z := torch.ones(3), async_op=True).get_future().then(lambda future: future.value()[0])
    by_future = second.get_future().then(lambda _: third.wait() + 1)
    gate.set()
    assert (by_work.wait() == 2 * size).all()
    assert (by_future.wait() == size + 1).all()
    assert (z == size).all()


def test_callbacks_come_in_the_order_of_their_calls(group):
    """Also where one waits for the call of the other; on one rank both are chained when all is over."""
    rank, size = group.rank(), group.size()
    first, second = (dist.all_reduce(torch.ones(1), async_op=True) for _ in range(2))
    if rank == 0:
        second.wait()

    def one(_):
        second.wait()
        dist.all_reduce(x := torch.ones(2))
        return x

    def other(_):
        dist.all_reduce(x := torch.full((2,), 100.0))
        return x

    ones, others = first.get_future().then(one), second.get_future().then(other)
    assert (ones.wait() == size).all()
    assert (others.wait() == 100 * size).all()


def test_a_callback_of_several_futures(group):
    size = group.size()
    futures = [dist.all_reduce(torch.ones(1), async_op=True).get_future() for _ in range(3)]

    def again(_):
        dist.all_reduce(x := torch.ones(2))
        return x

    assert (torch.futures.collect_all(futures).then(again).wait() == size).all()


def test_callbacks_and_messages_do_not_meet(group):
    rank, size = group.rank(), group.size()
    if size < 2:
        return
    message = dist.irecv(torch.empty(1), (rank - 1) % size, tag=1)

    def exchange(_):
        out = torch.empty(size)
        dist.all_to_all_single(out, torch.arange(float(size)) + 10 * rank, [1] * size, [1] * size)
        return out

    got = dist.all_reduce(torch.ones(1), async_op=True).get_future().then(exchange).wait()
    assert got.tolist() == [10.0 * r + rank for r in range(size)]
    dist.send(torch.full((1,), -float(rank)), (rank + 1) % size, tag=1)
    message.wait()
    assert message.result()[0].item() == -((rank - 1) % size)


def test_a_group_does_not_get_messages_of_one_that_is_no_more(group):
    if group.size() < 2:
        return
    rank = group.rank()
    for turn in range(3):
        part = dist.new_group()
        if rank == 0:
            dist.isend(torch.full((2,), float(turn)), 1, group=part)
            lost = torch.zeros(2)
            dist.irecv(lost, 1, group=part, tag=7)  # which nobody sends
        if rank == 1 and turn == 2:
            dist.recv(x := torch.empty(2), 0, group=part)
            assert x.tolist() == [2.0, 2.0]
        dist.barrier()
        dist.destroy_process_group(part)


def test_a_message_that_is_too_large_and_nobody_waits_for(group):
    part = dist.new_group()
    if group.rank() == 0:
        for rank in range(1, group.size()):
            dist.isend(torch.ones(64), rank, group=part)
    else:
        memory = torch.zeros(64)
        message = dist.irecv(memory[:4], 0, group=part)
    dist.barrier(part)
    dist.barrier(part)
    dist.destroy_process_group(part)
    if group.rank() > 0:
        with pytest.raises(RanksDisagree, match=r"rank 0 sent .* where 16 bytes of torch.float32 were expected"):
            message.wait()


def test_inference_mode_holds_in_the_thread_too(group):
    size = group.size()
    with torch.inference_mode():
        x, y = torch.ones(4, 3).t(), torch.ones(5, dtype=torch.bfloat16)
        works = [dist.all_reduce(x, async_op=True), dist.all_reduce(y, op=dist.ReduceOp.AVG, async_op=True)]
    for work in works:
        work.wait()
    assert (x == size).all()
    assert (y == 1).all()


def test_two_modules_with_the_hook_in_one_backward(group):
    torch.manual_seed(0)
    x = torch.randn(6, 100)

    def gradients(*hook):
        torch.manual_seed(1)
        modules = [DistributedDataParallel(torch.nn.Linear(100, 100)) for _ in range(2)]
        for module in modules:
            for each in hook:
                module.register_comm_hook(None, each)
        for _ in range(3):
            for module in modules:
                module.zero_grad()
            (modules[0](x + group.rank()).pow(2).sum() + 3 * modules[1](x - group.rank()).pow(3).sum()).backward()
        return [p for module in modules for p in module.parameters()]

    hooked = gradients(average)
    for mine, theirs in zip(hooked, gradients(), strict=True):
        assert torch.allclose(mine.grad, theirs.grad, rtol=1e-4, atol=1e-4)


def test_an_error_in_a_callback(group):
    chained = dist.all_reduce(torch.ones(2), async_op=True).get_future().then(lambda future: future.value()[7])
    with pytest.raises(Exception, match="out of range"):
        chained.wait()
    assert dist.all_reduce(torch.ones(2), async_op=True).get_future().wait()[0].tolist() == [group.size()] * 2


def test_power_sgd(group):
    """Its hook chains two more collectives to the first one of each bucket."""
    size = group.size()
    network = torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(8)])
    network = DistributedDataParallel(network, bucket_cap_mb=0.01)
    state = power_sgd.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    network.register_comm_hook(state, power_sgd.powerSGD_hook)
    for step in range(6):
        torch.manual_seed(100 * step + group.rank())
        network(torch.randn(8, 32)).pow(2).mean().backward()
        gradient = torch.cat([p.grad.flatten() for p in network.parameters()])
        all_gradients = [torch.empty_like(gradient) for _ in range(size)]
        dist.all_gather(all_gradients, gradient)
        assert all(torch.equal(other, gradient) for other in all_gradients), step
        network.zero_grad()
