"""Tensors that overlap, that autograd knows, whose sums do not fit, that earlier calls write; sparse ones."""

import time
import warnings

import pytest
import torch
import torch.distributed as dist

from torchmpi_py.errors import RanksDisagree

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("group")]
AVG = dist.ReduceOp.AVG


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32], ids=str
)
def test_a_mean_of_whole_numbers_whose_sum_does_not_fit(rank, size, dtype):
    most = torch.iinfo(dtype).max
    x = torch.full((3,), most - rank, dtype=dtype)
    mean = (most * size - size * (size - 1) // 2) // size
    dist.all_reduce(y := x.clone(), op=AVG)
    assert y.tolist() == [mean] * 3
    dist.reduce(y := x.clone(), size - 1, op=AVG)
    assert y.tolist() == ([mean] * 3 if rank == size - 1 else x.tolist())
    out = torch.empty(3, dtype=dtype)
    dist.reduce_scatter(out, [x] * size, op=AVG)
    assert out.tolist() == [mean] * 3
    dist.reduce_scatter_single(out.zero_(), x.repeat(size), op=AVG)
    assert out.tolist() == [mean] * 3
    with dist._coalescing_manager():
        dist.all_reduce(y := x.clone(), op=AVG)
        dist.all_reduce(z := x[:2].float(), op=AVG)
    assert y.tolist() == [mean] * 3
    assert torch.equal(z, torch.full((2,), sum(float(most - r) for r in range(size)) / size)) or dtype.itemsize > 2


def test_tensors_that_an_earlier_call_writes(rank, size):
    """Their means, and a gather of slots of its own output: what is computed before MPI begins has to wait."""
    for dtype in (torch.int16, torch.int64):
        x, out = torch.full((2 * size,), rank, dtype=dtype), torch.empty(2, dtype=dtype)
        time.sleep(0.2 * (rank == size - 1))
        works = [dist.all_reduce(x, async_op=True), dist.all_reduce(x, op=AVG, async_op=True)]
        works.append(dist.reduce_scatter_single(out, x, op=AVG, async_op=True))
        for work in works:
            work.wait()
        assert x.tolist() == [sum(range(size))] * 2 * size
        assert out.tolist() == [sum(range(size))] * 2
    outs = [torch.full((size, 2), float(10 * part + rank)) for part in range(2)]
    time.sleep(0.2 * (rank == size - 1))
    for out in outs:
        dist.all_reduce(out[rank], async_op=True)
    with dist._coalescing_manager(async_ops=True) as manager:
        for out in outs:
            dist.all_gather_single(out.view(-1), out[rank])
    manager.wait()
    for part, out in enumerate(outs):
        assert torch.equal(out, torch.full((size, 2), float(10 * part * size + sum(range(size)))))


def test_a_mean_of_whole_numbers_into_unusual_memory(group):
    with torch.inference_mode():
        x = torch.full((4,), 100, dtype=torch.int8)
    dist.all_reduce(x, op=AVG)
    with torch.inference_mode():  # also in the thread
        y, z = torch.ones(4, 3).t(), torch.ones(5, dtype=torch.bfloat16)
        works = [dist.all_reduce(each, op=AVG, async_op=True) for each in (x, y, z)]
    for work in works:
        work.wait()
    assert x.tolist() == [100] * 4
    assert torch.equal(y, torch.ones(3, 4))
    assert torch.equal(z, torch.ones(5, dtype=torch.bfloat16))
    columns = torch.arange(6, dtype=torch.int16).view(2, 3).t()
    dist.all_reduce(columns, op=AVG)
    assert columns.tolist() == [[0, 3], [1, 4], [2, 5]]
    with pytest.raises(ValueError, match="expanded tensor"):
        dist.all_reduce(torch.ones(1, dtype=torch.int32).expand(group.size() + 1), op=AVG)
    dist.barrier()


def test_an_output_over_the_input_of_a_later_part(rank, size):
    counts = [2 + r for r in range(size)]  # a reduce for each rank
    memory = torch.arange(sum(counts)) + 10.0 * rank
    right = list((size * torch.arange(sum(counts)) + 10.0 * sum(range(size))).split(counts))[rank]
    # The place of this rank's output is among the inputs for the next ranks.
    place = min(sum(counts[: rank + 1]), sum(counts) - counts[rank])
    out = memory[place : place + counts[rank]]
    dist.reduce_scatter(out, list(memory.split(counts)), op=dist.ReduceOp.SUM)
    assert torch.equal(out, right)
    memory = torch.arange(4.0 * size) + rank
    with dist._coalescing_manager():
        dist.reduce_scatter_single(memory[2 * size : 2 * size + 2], memory[: 2 * size])
        dist.reduce_scatter_single(second := torch.empty(2), memory[2 * size :])
    right = size * torch.arange(4.0 * size) + sum(range(size))
    assert torch.equal(memory[2 * size : 2 * size + 2], right[2 * rank : 2 * rank + 2])
    assert torch.equal(second, right[2 * size + 2 * rank : 2 * size + 2 * rank + 2])
    memory = torch.full((size + 1,), float(rank))
    with dist._coalescing_manager():
        dist.all_gather_single(memory[:size], torch.full((1,), float(rank)))
        dist.all_gather_single(gathered := torch.empty(size), memory[size - 1 : size])
    assert memory[:size].tolist() == gathered.tolist() == list(range(size))


def test_backward_through_what_a_call_has_overwritten_warns(group):
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    dist.all_reduce(y)
    with pytest.warns(UserWarning, match="allreduce has overwritten"):
        y.sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dist.all_reduce(x)  # a parameter, whose new values are what is wanted
        (x * 2).sum().backward()
        with torch.no_grad():
            dist.all_reduce(y := x * 2)
        y = x * 2
        dist.all_reduce(y.detach())
        y.sum().backward()
        y = x * 2
        dist.broadcast(y if group.rank() == 0 else torch.empty(2), 0)  # which writes nothing on rank 0
        y.sum().backward()


def test_sparse_tensors_that_differ(rank, size):
    """In shape, or in how many of their dimensions are sparse. The next call is right."""
    if size == 1:
        return
    for shape, other, wrong in (
        ((4,), (8,), "rank 0: shape .*; rank 1: shape"),
        ((4, 4), (4, 2), "rank 0: shape .*; rank 1: shape"),
        ((4, 1), (4,), "rank 0: shape .*; rank 1: shape"),
        ((2, 2), (2, 2), "1 of its dimensions sparse"),
    ):
        mine = torch.ones(shape if rank == 0 else other)
        x = mine.to_sparse(1) if rank == 0 and shape == other else mine.to_sparse()
        with pytest.raises(RanksDisagree, match=wrong):
            dist.all_reduce(x)
        assert torch.equal(x.to_dense(), mine)
        dist.all_reduce(x := torch.eye(3).to_sparse())
        assert torch.equal(x.to_dense(), size * torch.eye(3))
