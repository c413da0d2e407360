"""Tensors that overlap, that autograd knows, whose sums do not fit, sparse ones that differ; wrong lists and roots."""

import time
import warnings

import pytest
import torch
import torch.distributed as dist

from torchmpi_py.errors import RanksDisagree

pytestmark = pytest.mark.mpi
AVG = dist.ReduceOp.AVG
WHOLE = [torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32]


@pytest.mark.parametrize("dtype", WHOLE, ids=str)
def test_a_mean_of_whole_numbers_whose_sum_does_not_fit(group, dtype):
    rank, size = group.rank(), group.size()
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


@pytest.mark.parametrize("dtype", [torch.int16, torch.int64])
def test_a_mean_of_what_an_earlier_call_writes(group, dtype):
    rank, size = group.rank(), group.size()
    x, out = torch.full((2 * size,), rank, dtype=dtype), torch.empty(2, dtype=dtype)
    if rank == size - 1:
        time.sleep(0.2)
    works = [dist.all_reduce(x, async_op=True), dist.all_reduce(x, op=AVG, async_op=True)]
    works.append(dist.reduce_scatter_single(out, x, op=AVG, async_op=True))
    for work in works:
        work.wait()
    assert x.tolist() == [sum(range(size))] * 2 * size
    assert out.tolist() == [sum(range(size))] * 2


def test_slots_of_outputs_that_an_earlier_call_writes(group):
    rank, size = group.rank(), group.size()
    outs = [torch.full((size, 2), float(10 * part + rank)) for part in range(2)]
    if rank == size - 1:
        time.sleep(0.2)
    works = [dist.all_reduce(out[rank], async_op=True) for out in outs]
    with dist._coalescing_manager(async_ops=True) as manager:
        for out in outs:
            dist.all_gather_single(out.view(-1), out[rank])
    manager.wait()
    for work in works:
        work.wait()
    for part, out in enumerate(outs):
        assert torch.equal(out, torch.full((size, 2), float(10 * part * size + sum(range(size)))))


def test_a_mean_of_whole_numbers_into_unusual_memory(group):
    size = group.size()
    with torch.inference_mode():
        x = torch.full((4,), 100, dtype=torch.int8)
    dist.all_reduce(x, op=AVG)
    assert x.tolist() == [100] * 4
    with torch.inference_mode():
        dist.all_reduce(x, op=AVG, async_op=True).wait()
    assert x.tolist() == [100] * 4
    columns = torch.arange(6, dtype=torch.int16).view(2, 3).t()
    dist.all_reduce(columns, op=AVG)
    assert columns.tolist() == [[0, 3], [1, 4], [2, 5]]
    with pytest.raises(ValueError, match="avg: cannot write into an expanded tensor"):
        dist.all_reduce(torch.ones(1, dtype=torch.int32).expand(size + 1), op=AVG)
    dist.barrier()


def test_an_output_over_the_input_of_a_later_part(group):
    rank, size = group.rank(), group.size()
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
    with pytest.warns(UserWarning, match="torch.distributed's allreduce has overwritten"):
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
        if group.rank() == 0:
            dist.broadcast(y, 0)  # which writes nothing here
            y.sum().backward()
        else:
            dist.broadcast(torch.empty(2), 0)


def test_a_sparse_sum_of_complex_numbers(group):
    rank, size = group.rank(), group.size()
    x = torch.sparse_coo_tensor([[0, rank]], [1 + 1j, 2.0 + 0j], (size,), check_invariants=True)
    dist.all_reduce(x)
    right = torch.full((size,), 2.0 + 0j)
    right[0] += size * (1 + 1j)
    assert torch.equal(x.to_dense(), right)


@pytest.mark.parametrize(("shape", "other"), [((4,), (8,)), ((4, 4), (4, 2)), ((4, 1), (4,))])
def test_sparse_tensors_that_differ(group, shape, other):
    rank, size = group.rank(), group.size()
    mine = shape if rank == 0 else other
    x = torch.ones(mine).to_sparse()
    if size == 1:
        return
    with pytest.raises(RanksDisagree, match=r"rank 0: shape .*; rank 1: shape"):
        dist.all_reduce(x)
    assert x.shape == torch.Size(mine)
    dist.all_reduce(x := torch.eye(3).to_sparse())
    assert torch.equal(x.to_dense(), size * torch.eye(3))


def test_sparse_tensors_with_other_sparse_dimensions(group):
    x = torch.ones(2, 2).to_sparse(1 if group.rank() == 0 else 2)
    if group.size() > 1:
        with pytest.raises(RanksDisagree, match="1 of its dimensions sparse"):
            dist.all_reduce(x)


@pytest.mark.parametrize("count", [2, 50_000])
def test_a_root_that_is_no_rank(group, count):
    size = group.size()
    parts = [torch.empty(count) for _ in range(size)]
    with pytest.raises(ValueError, match=f"dst={size + 5} is not a rank"):
        group.gather([parts], [torch.ones(count)], size + 5)
    with pytest.raises(ValueError, match=f"src={size + 5} is not a rank"):
        group.scatter([torch.ones(count)], [parts], size + 5)
    with pytest.raises(ValueError, match=f"0 outputs, but the group has {size} ranks"):
        dist.all_to_all([], [torch.ones(count)] * size)
    with pytest.raises(ValueError, match=f"0 inputs, but the group has {size} ranks"):
        dist.all_to_all([torch.ones(count)] * size, [])
    dist.barrier()
