"""Every collective of torch.distributed on backend "torchmpi", in all forms, against closed-form answers."""

import functools
import operator

import pytest
import torch
import torch.distributed as dist
from support.values import stacked, total, values as of

from torchmpi_py.torch_backend import ProcessGroup

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("group")]
OPS = dist.ReduceOp
WAYS = ["blocking", "asynchronous", "mixed"]


@pytest.fixture(params=WAYS)
def done(request, group):
    """Calls a collective in a way, and waits; "mixed": it blocks on some ranks, and does not on others."""
    if request.param != "mixed" and group.size() not in (2, 3):
        pytest.skip("it is as with 2 and 3 ranks")
    is_async = {"blocking": False, "asynchronous": True, "mixed": group.rank() % 2 == 0}[request.param]

    def call(collective, *args, **kwargs):
        work = collective(*args, async_op=is_async, **kwargs)
        assert (work is not None) == is_async
        if is_async:
            assert work.wait()
            assert work.is_completed()
            assert work.is_success()

    return call


def with_ways(name, *choices):
    """Pair each value of an argument with a way."""
    pairs = [(WAYS[number % 3], choice) for number, choice in enumerate(choices)]
    return pytest.mark.parametrize(("done", name), pairs, indirect=["done"], ids=lambda value: str(value))


def test_it_is_ours(group):
    with pytest.raises(RuntimeError, match="error_on_collective"):  # what does not reach us is an error
        group._get_backend(torch.device("cpu")).allreduce([torch.ones(1)])
    assert isinstance(group, ProcessGroup)
    assert dist.get_backend() == "torchmpi"
    assert (group.rank(), group.size()) == (dist.get_rank(), dist.get_world_size())
    assert group.group_name


@with_ways("dtype", torch.float32, torch.bfloat16, torch.int64, torch.int8, torch.float64, torch.float32)
def test_reductions(rank, size, done, dtype):
    made = stacked(size, 11, torch.int64)
    for op, right in {OPS.SUM: made.sum(0), OPS.MIN: made.amin(0), OPS.MAX: made.amax(0)}.items():
        done(dist.all_reduce, x := of(rank, 11, dtype), op=op)
        assert torch.equal(x, right.to(dtype)), op
        for root in range(size):
            done(dist.reduce, x := of(rank, 11, dtype), root, op=op)
            assert torch.equal(x, right.to(dtype) if rank == root else of(rank, 11, dtype)), (op, root)


def test_premultiplied_sum(group, done):
    rank, size, twice = group.rank(), group.size(), dist._make_nccl_premul_sum(2.0)
    done(dist.all_reduce, x := of(rank, 5), op=twice)
    assert torch.equal(x, 2 * total(size, 5))
    done(dist.reduce, x := of(rank, 5), 0, op=twice)
    assert torch.equal(x, 2 * total(size, 5) if rank == 0 else of(rank, 5))
    out, x, right = torch.empty(3), of(rank, 3 * size), 2 * total(size, 3 * size)[3 * rank : 3 * rank + 3]
    done(dist.reduce_scatter_single, out, x, op=twice)
    assert torch.equal(out, right)
    assert torch.equal(x, of(rank, 3 * size))  # an input stays as it is
    done(dist.reduce_scatter, out.zero_(), list(x.split(3)), op=twice)
    assert torch.equal(out, right)


def test_averages(rank, size, done):
    """Those of whole numbers are rounded towards zero, as NCCL does it; Lightning counts samples so."""
    done(dist.all_reduce, x := of(rank, 5), op=OPS.AVG)
    assert torch.allclose(x, total(size, 5) / size)
    for dtype, factors in ((torch.int64, [3, -3, 1, 10]), (torch.int32, [-1, 7, -5, 2]), (torch.uint16, [1, 3, 7, 4])):
        mine = torch.tensor(factors, dtype=dtype) * (rank + 1)
        means = [int(factor * size * (size + 1) / 2 / size) for factor in factors]
        done(dist.all_reduce, x := mine.clone(), op=OPS.AVG)
        assert x.tolist() == means
        done(dist.all_reduce, x := mine[0].clone(), op=OPS.AVG)  # without dimensions
        assert x.item() == means[0]
        done(dist.reduce, x := mine.clone(), size - 1, op=OPS.AVG)
        assert x.tolist() == (means if rank == size - 1 else mine.tolist())
        done(dist.reduce_scatter_single, x := torch.empty_like(mine), mine.repeat(size), op=OPS.AVG)
        assert x.tolist() == means


def test_other_ops(rank, size, done):
    functions = {OPS.BAND: operator.and_, OPS.BOR: operator.or_, OPS.BXOR: operator.xor, OPS.PRODUCT: operator.mul}
    for op, function in functions.items():
        done(dist.all_reduce, x := of(rank, 6, torch.int32), op=op)
        assert torch.equal(x, functools.reduce(function, stacked(size, 6, torch.int32))), op


@with_ways("dtype", torch.float32, torch.bool, torch.complex64, torch.float16, torch.uint8, torch.float32)
def test_moves(rank, size, done, dtype):
    made = list(stacked(size, 12, dtype))
    for root in range(size):
        done(dist.broadcast, x := made[rank].clone(), root)
        assert torch.equal(x, made[root])
        outs = [torch.empty_like(x) for _ in range(size)] if rank == root else None
        done(dist.gather, made[rank], outs, root)
        assert rank != root or all(map(torch.equal, outs, made))
        parts = [made[(root + r) % size] for r in range(size)] if rank == root else None
        done(dist.scatter, x := torch.empty(12, dtype=dtype), parts, root)
        assert torch.equal(x, made[(root + rank) % size])
    done(dist.all_gather, outs := [torch.empty(12, dtype=dtype) for _ in range(size)], made[rank])
    assert all(map(torch.equal, outs, made))


def test_gather_into_one_tensor(rank, size, done):
    right = stacked(size, 6).view(size, 2, 3)
    for shape in ((size, 2, 3), (2 * size, 3)):
        done(dist.all_gather_single, out := torch.empty(shape), of(rank, 6).view(2, 3))
        assert torch.equal(out.view(right.shape), right)
    for count in (6, 100_000):  # in place, as FSDP2 does: the input is this rank's part of the output
        whole = torch.full((size, count), -9.0)
        whole[rank] = of(rank, count)
        done(dist.all_gather_single, whole, whole[rank])
        assert torch.equal(whole, stacked(size, count))
    done(dist.all_gather_single, columns := torch.empty(6, size).t(), of(rank, 6))  # not contiguous
    assert torch.equal(columns, right.view(size, 6))


def test_reduce_scatter(rank, size, done):
    right = total(size, 4 * size)[4 * rank : 4 * rank + 4]
    done(dist.reduce_scatter_single, out := torch.empty(4), of(rank, 4 * size))
    assert torch.equal(out, right)
    done(dist.reduce_scatter, out := torch.empty(2, 2), [x.reshape(2, 2) for x in of(rank, 4 * size).split(4)])
    assert torch.equal(out.view(-1), right)
    x = of(rank, 4 * size)  # in place
    done(dist.reduce_scatter_single, x[4 * rank : 4 * rank + 4], x)
    assert torch.equal(x[4 * rank : 4 * rank + 4], right)


def test_uneven_lists(rank, size, done):
    outs = [torch.empty(other + 1, 2) for other in range(size)]
    done(dist.all_gather, outs, of(rank, 2 * rank + 2).view(-1, 2))
    assert all(torch.equal(out.view(-1), of(other, 2 * other + 2)) for other, out in enumerate(outs))
    done(dist.reduce_scatter, out := torch.empty(rank + 1), [of(rank + other, other + 1) for other in range(size)])
    assert torch.equal(out, sum(of(other + rank, rank + 1) for other in range(size)))


def test_all_to_all(rank, size, done):

    def sent(source, to, rows):
        return of(10 * source + to, 2 * rows).view(rows, 2)

    done(dist.all_to_all_single, out := torch.empty(3 * size, 2), torch.cat([sent(rank, to, 3) for to in range(size)]))
    assert torch.equal(out, torch.cat([sent(source, rank, 3) for source in range(size)]))
    for rows in (lambda source, to: source + 1, lambda source, to: (source + 2 * to) % 3):  # zero rows, too
        splits = [rows(source, rank) for source in range(size)], [rows(rank, to) for to in range(size)]
        parts = [sent(rank, to, rows(rank, to)) for to in range(size)]
        done(dist.all_to_all_single, out := torch.empty(sum(splits[0]), 2), torch.cat(parts), *splits)
        right = [sent(source, rank, rows(source, rank)) for source in range(size)]
        assert torch.equal(out, torch.cat(right))
        done(dist.all_to_all, outs := [torch.empty_like(x) for x in right], parts)
        assert all(map(torch.equal, outs, right))


@with_ways("count", 4, 40_000, 40_000)  # messages that MPI keeps, and that wait for their receiver
def test_all_to_all_in_one_memory(rank, size, done, count):
    right = torch.cat([of(10 * source + rank, count) for source in range(size)])
    for offset in (0, count // 2):  # the output is the input, or overlaps it
        memory = torch.empty(size * count + offset)
        x, out = memory[: size * count], memory[offset:]
        x.copy_(torch.cat([of(10 * rank + to, count) for to in range(size)]))
        done(dist.all_to_all_single, out, x, [count] * size, [count] * size)
        assert torch.equal(out, right), offset
    parts = [of(10 * rank + to, count) for to in range(size)]
    done(dist.all_to_all, parts, parts)
    assert torch.equal(torch.cat(parts), right)


@with_ways("count", 4, 40_000, 40_000)  # in one flat tensor, and as messages from and into the list
def test_gather_and_scatter_in_one_memory(rank, size, done, count):
    """The part of root is its tensor in the list; what is written overlaps what is sent to others; strided ones."""
    made = list(stacked(size, count))
    for root in range(size):
        x = made[rank].clone()
        outs = [torch.full((count,), -1.0) for _ in range(size)]
        outs[root] = x if rank == root else outs[root]
        done(dist.gather, x, outs if rank == root else None, root)
        assert rank != root or all(map(torch.equal, outs, made))
        parts = [part.clone() for part in made]
        done(dist.scatter, parts[root], parts if rank == root else None, root)
        assert torch.equal(parts[root], made[rank])
        memory = torch.cat(made)  # half of the output is the end of one part, half the beginning of the next
        begin = count // 2 if size > 1 else 0
        done(dist.scatter, memory[begin : begin + count], list(memory.split(count)) if rank == root else None, root)
        assert torch.equal(memory[begin : begin + count], made[rank])
        columns = [torch.full((2, count // 2), -1.0).t() for _ in range(size)]
        done(dist.gather, made[rank].view(-1, 2), columns if rank == root else None, root)
        assert rank != root or all(torch.equal(y.flatten(), x) for y, x in zip(columns, made, strict=True))
        done(dist.scatter, columns[0], [x.view(2, -1).t() for x in made] if rank == root else None, root)
        assert torch.equal(columns[0], made[rank].view(2, -1).t())


def test_strided_tensors(rank, size, done):
    base = of(rank, 20).view(4, 5).clone()
    x = base.t()[1:4:2]
    done(dist.all_reduce, x)
    assert torch.equal(x, total(size, 20).view(4, 5).t()[1:4:2])
    assert torch.equal(base.t()[0], of(rank, 20).view(4, 5).t()[0])


def test_what_is_overwritten_is_known_to_autograd(rank, size):
    ones = [torch.ones(2)] * size
    calls = {
        "all_reduce": lambda x: dist.all_reduce(x),
        "broadcast": lambda x: dist.broadcast(x, 0),
        "all_gather": lambda x: dist.all_gather([x if r == rank else torch.empty(2) for r in range(size)], x),
        "all_to_all": lambda x: dist.all_to_all([x] * size, ones),
        "scatter": lambda x: dist.scatter(x, ones if rank == 0 else None, 0),
        "reduce_scatter": lambda x: dist.reduce_scatter(x, ones),
    }
    for name, call in calls.items():
        w, x = torch.ones(2, requires_grad=True), torch.ones(2)
        y = (x * w).sum()
        call(x)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()
        assert w.grad is None, name


def test_sparse_sum(rank, size, done):

    def sparse(indices, elements, *shape):
        return torch.sparse_coo_tensor(indices, elements, shape, check_invariants=True)

    made = [sparse([[r, size]], [[1.0, 2.0], [r, 1.0]], size + 1, 2) for r in range(size)]
    done(dist.all_reduce, x := made[rank].clone())
    assert torch.equal(x.to_dense(), sum(each.to_dense() for each in made))
    done(dist.all_reduce, x := sparse([[0, rank]], [1 + 1j, 2.0 + 0j], size))
    assert x.to_dense().tolist() == [2 + size * (1 + 1j)] + [2] * (size - 1)
    x = sparse([[rank, rank]], [1.0, 2.0], size)  # not coalesced
    done(dist.all_reduce, x, op=dist._make_nccl_premul_sum(0.5))
    assert torch.equal(x.to_dense(), torch.full((size,), 1.5))
    with pytest.raises(ValueError, match=r"torch.int64 .* cannot be multiplied by 0.5"):
        dist.all_reduce(x.long(), op=dist._make_nccl_premul_sum(0.5))
    with pytest.raises(ValueError, match="only the sum of sparse tensors"):
        dist.all_reduce(x, op=OPS.MAX)


def test_several_at_once(rank, size):
    tensors = [of(rank, count, dtype) for count in (1, 7, 300) for dtype in (torch.float32, torch.int64)]
    with dist._coalescing_manager():
        for x in tensors:
            dist.all_reduce(x)
    assert all(torch.equal(x, total(size, x.numel(), x.dtype)) for x in tensors)
    outs = [torch.empty(size, count) for count in (2, 5)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for out in outs:
            dist.all_gather_single(out, of(rank, out.shape[1]))
    manager.wait()
    assert all(torch.equal(out, stacked(size, out.shape[1])) for out in outs)
    halves = [torch.empty(count) for count in (2, 5)]
    with dist._coalescing_manager(device=torch.device("cpu")):  # the old way
        for half in halves:
            dist.reduce_scatter_single(half, of(rank, half.numel() * size), async_op=True)
    for half in halves:
        assert torch.equal(half, total(size, half.numel() * size).chunk(size)[rank])


def test_objects(rank, size):
    got = [None] * size
    dist.all_gather_object(got, {"rank": rank, "text": "x" * rank})
    assert got == [{"rank": r, "text": "x" * r} for r in range(size)]
    told = [rank, "something"] if rank == size - 1 else [None, None]
    dist.broadcast_object_list(told, size - 1)
    assert told == [size - 1, "something"]


def test_subgroups(group, rank, size):
    """Overlapping ones, in any order of ranks, and one of the same ranks again."""
    sets = [list(range(size)), [0], [size - 1], list(range(size))[::-1], list(range(0, size, 2)), list(range(size))]
    groups = [dist.new_group(ranks) for ranks in map(sorted, sets)]
    for ranks, each in zip(map(sorted, sets), groups, strict=True):
        if rank in ranks:
            dist.all_reduce(x := of(rank, 4), group=each)
            assert torch.equal(x, sum(of(r, 4) for r in ranks))
            dist.broadcast(x := of(rank, 4), ranks[-1], group=each)
            assert torch.equal(x, of(ranks[-1], 4))
    if size > 2 and rank > 0:
        upper = dist.new_group(list(range(1, size)), use_local_synchronization=True)
        dist.all_reduce(x := of(rank, 4), group=upper)
        assert torch.equal(x, total(size, 4) - of(0, 4))
        dist.destroy_process_group(upper)
    with pytest.raises(RuntimeError, match=r"call dist\.new_group\(ranks\)"):
        group.split_group([0])
    for each in [g for g in groups if g is not dist.GroupMember.NON_GROUP_MEMBER][::-1]:
        dist.destroy_process_group(each)
    for _ in range(3):
        again = dist.new_group()
        assert dist.get_rank(again) == rank
        dist.all_reduce(x := of(rank, 4), group=again)
        assert torch.equal(x, total(size, 4))
        dist.destroy_process_group(again)
    with pytest.raises(Exception, match="destroyed"):
        again.allreduce([x])


def test_what_is_wrong_is_told_on_every_rank(group):
    def ones(count, dtype=torch.float32):
        return torch.ones(count, dtype=dtype)

    size, gather = group.size(), dist.all_gather_single
    for told, call, *args in (
        ("the group has", dist.all_gather, [ones(2)] * (size + 1), ones(2)),
        ("elements in the output", gather, ones(5 * size + 1), ones(5)),
        ("elements in the input", dist.reduce_scatter_single, ones(3), ones(2 * size + 7)),
        ("found 2", dist.reduce_scatter, ones(3), [ones(2)] * size),
        ("found 2", dist.all_to_all, [ones(2)] * size, [ones(3)] * size),
        ("0 outputs", dist.all_to_all, [], [ones(2)] * size),
        ("0 inputs", dist.all_to_all, [ones(2)] * size, []),
        ("split sizes", dist.all_to_all_single, ones(2 * size), ones(2 * size), [5] * size),
        ("int32", dist.all_to_all_single, ones(size), ones(size, torch.int32), [1] * size, [1] * size),
        ("'band'.* torch.float32", dist.all_reduce, ones(2), OPS.BAND),
        (f"dst={size + 5} is not a rank", group.gather, [[ones(2)] * size], [ones(2)], size + 5),
        (f"src={size + 5} is not a rank", group.scatter, [ones(50_000)], [[ones(50_000)] * size], size + 5),
    ):
        with pytest.raises(ValueError, match=told):
            call(*args)
    dist.barrier()
