"""Every collective of torch.distributed on backend "torchmpi", in all forms, against closed-form answers."""

import datetime as dt
import operator

import pytest
import torch
import torch.distributed as dist

from torchmpi_py.torch_backend import ProcessGroup, monitored_barrier

pytestmark = pytest.mark.mpi
OPS = dist.ReduceOp
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int8]


def of(rank, count, dtype=torch.float32):
    """Element j on a rank: depends on both, and sums stay exact in 8 bits and bfloat16."""
    return ((torch.arange(count) * 3 + rank) % 7 - 2).to(dtype)


def total(size, count, dtype=torch.float32):
    return sum(of(rank, count, torch.int64) for rank in range(size)).to(dtype)


@pytest.fixture(params=["blocking", "asynchronous", "mixed"])
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


def test_it_is_ours(group):
    with pytest.raises(RuntimeError, match="error_on_collective"):  # what does not reach us is an error
        group._get_backend(torch.device("cpu")).allreduce([torch.ones(1)])
    assert isinstance(group, ProcessGroup)
    assert dist.get_backend() == "torchmpi"
    assert (group.rank(), group.size()) == (dist.get_rank(), dist.get_world_size())
    assert group.group_name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reductions(group, done, dtype):
    rank, size = group.rank(), group.size()
    expected = {OPS.SUM: total(size, 11, torch.int64)}
    values = torch.stack([of(other, 11, torch.int64) for other in range(size)])
    expected |= {OPS.MIN: values.amin(0), OPS.MAX: values.amax(0)}
    for op, right in expected.items():
        x = of(rank, 11, dtype)
        done(dist.all_reduce, x, op=op)
        assert torch.equal(x, right.to(dtype)), op
        for root in range(size):
            x = of(rank, 11, dtype)
            done(dist.reduce, x, root, op=op)
            assert torch.equal(x, right.to(dtype) if rank == root else of(rank, 11, dtype)), (op, root)


def test_average_and_premultiplied_sum(group, done):
    rank, size = group.rank(), group.size()
    x = of(rank, 5)
    done(dist.all_reduce, x, op=OPS.AVG)
    assert torch.allclose(x, total(size, 5) / size)
    twice = dist._make_nccl_premul_sum(2.0)
    x = of(rank, 5)
    done(dist.all_reduce, x, op=twice)
    assert torch.equal(x, 2 * total(size, 5))
    x = of(rank, 5)
    done(dist.reduce, x, 0, op=twice)
    assert torch.equal(x, 2 * total(size, 5) if rank == 0 else of(rank, 5))
    out, x = torch.empty(3), of(rank, 3 * size)
    done(dist.reduce_scatter_single, out, x, op=twice)
    assert torch.equal(out, 2 * total(size, 3 * size)[3 * rank : 3 * rank + 3])
    assert torch.equal(x, of(rank, 3 * size))  # an input stays as it is
    done(dist.reduce_scatter, out, list(x.split(3)), op=twice)
    assert torch.equal(out, 2 * total(size, 3 * size)[3 * rank : 3 * rank + 3])


def test_averages_of_whole_numbers_are_rounded_towards_zero(group, done):
    rank, size = group.rank(), group.size()
    for dtype in (torch.int32, torch.uint16):
        sign = -1 if dtype.is_signed else 1
        x = torch.tensor([sign * (1 + 2 * rank), 7], dtype=dtype)
        done(dist.reduce, x, 0, op=OPS.AVG)
        mean = [sign * (size * size // size), 7]
        assert x.tolist() == (mean if rank == 0 else [sign * (1 + 2 * rank), 7])
        x = torch.tensor([sign * (rank + 1)], dtype=dtype)
        done(dist.all_reduce, x, op=OPS.AVG)
        assert x.tolist() == [sign * (size * (size + 1) // 2 // size)]
        x = torch.tensor(sign * (rank + 1), dtype=dtype)  # without dimensions
        done(dist.all_reduce, x, op=OPS.AVG)
        assert x.item() == sign * (size * (size + 1) // 2 // size)


def test_other_ops(group, done):
    rank, size = group.rank(), group.size()
    functions = {OPS.BAND: operator.and_, OPS.BOR: operator.or_, OPS.BXOR: operator.xor, OPS.PRODUCT: operator.mul}
    for op, function in functions.items():
        x, right = of(rank, 6, torch.int32), of(0, 6, torch.int32)
        for other in range(1, size):
            right = function(right, of(other, 6, torch.int32))
        done(dist.all_reduce, x, op=op)
        assert torch.equal(x, right), op


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64, torch.float16, torch.uint8], ids=str)
def test_moves(group, done, dtype):
    rank, size = group.rank(), group.size()
    made = [
        (of(other, 12) > 0).to(dtype) if dtype == torch.bool else of(other, 12).abs().to(dtype) for other in range(size)
    ]
    for root in range(size):
        x = made[rank].clone()
        done(dist.broadcast, x, root)
        assert torch.equal(x, made[root])
        outs = [torch.empty_like(x) for _ in range(size)] if rank == root else None
        done(dist.gather, made[rank], outs, root)
        assert rank != root or all(map(torch.equal, outs, made))
        x = torch.empty(12, dtype=dtype)
        done(dist.scatter, x, [made[(root + r) % size] for r in range(size)] if rank == root else None, root)
        assert torch.equal(x, made[(root + rank) % size])
    outs = [torch.empty(12, dtype=dtype) for _ in range(size)]
    done(dist.all_gather, outs, made[rank])
    assert all(map(torch.equal, outs, made))


def test_gather_into_one_tensor(group, done):
    rank, size = group.rank(), group.size()
    right = torch.stack([of(other, 6).view(2, 3) for other in range(size)])
    for shape in ((size, 2, 3), (2 * size, 3)):
        out = torch.empty(shape)
        done(dist.all_gather_single, out, of(rank, 6).view(2, 3))
        assert torch.equal(out.view(right.shape), right)
    for count in (6, 300_000):  # in place, as FSDP2 does: the input is this rank's part of the output
        whole = torch.full((size, count), -9.0)
        whole[rank] = of(rank, count)
        done(dist.all_gather_single, whole, whole[rank])
        assert torch.equal(whole, torch.stack([of(other, count) for other in range(size)]))
    columns = torch.empty(6, size).t()  # not contiguous
    done(dist.all_gather_single, columns, of(rank, 6))
    assert torch.equal(columns, right.view(size, 6))


def test_reduce_scatter(group, done):
    rank, size = group.rank(), group.size()
    right = total(size, 4 * size)[4 * rank : 4 * rank + 4]
    out = torch.empty(4)
    done(dist.reduce_scatter_single, out, of(rank, 4 * size))
    assert torch.equal(out, right)
    out = torch.empty(2, 2)
    done(dist.reduce_scatter, out, [x.reshape(2, 2) for x in of(rank, 4 * size).split(4)])
    assert torch.equal(out.view(-1), right)
    x = of(rank, 4 * size)  # in place
    done(dist.reduce_scatter_single, x[4 * rank : 4 * rank + 4], x)
    assert torch.equal(x[4 * rank : 4 * rank + 4], right)


def test_uneven_lists(group, done):
    rank, size = group.rank(), group.size()
    outs = [torch.empty(other + 1, 2) for other in range(size)]
    done(dist.all_gather, outs, of(rank, 2 * rank + 2).view(-1, 2))
    assert all(torch.equal(out.view(-1), of(other, 2 * other + 2)) for other, out in enumerate(outs))
    out = torch.empty(rank + 1)
    done(dist.reduce_scatter, out, [of(rank + other, other + 1) for other in range(size)])
    assert torch.equal(out, sum(of(other + rank, rank + 1) for other in range(size)))


def test_all_to_all(group, done):
    rank, size = group.rank(), group.size()

    def sent(source, to, rows):
        return of(10 * source + to, 2 * rows).view(rows, 2)

    out = torch.empty(3 * size, 2)
    done(dist.all_to_all_single, out, torch.cat([sent(rank, to, 3) for to in range(size)]))
    assert torch.equal(out, torch.cat([sent(source, rank, 3) for source in range(size)]))
    for rows in (lambda source, to: source + 1, lambda source, to: (source + 2 * to) % 3):  # zero rows, too
        splits = [rows(source, rank) for source in range(size)], [rows(rank, to) for to in range(size)]
        out = torch.empty(sum(splits[0]), 2)
        parts = [sent(rank, to, rows(rank, to)) for to in range(size)]
        done(dist.all_to_all_single, out, torch.cat(parts), *splits)
        right = [sent(source, rank, rows(source, rank)) for source in range(size)]
        assert torch.equal(out, torch.cat(right))
        outs = [torch.empty_like(x) for x in right]
        done(dist.all_to_all, outs, parts)
        assert all(map(torch.equal, outs, right))


@pytest.mark.parametrize("count", [4, 40_000])  # messages that MPI keeps, and that wait for their receiver
def test_all_to_all_in_one_memory(group, done, count):
    rank, size = group.rank(), group.size()
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


@pytest.mark.parametrize("count", [4, 40_000])  # in one flat tensor, and as messages from and into the list
def test_gather_and_scatter_in_one_memory(group, done, count):
    """The part of root is its tensor in the list; what is written overlaps what is sent to others; strided ones."""
    rank, size = group.rank(), group.size()
    made = [of(other, count) for other in range(size)]
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


def test_strided_tensors(group, done):
    rank, size = group.rank(), group.size()
    base = of(rank, 20).view(4, 5).clone()
    x = base.t()[1:4:2]
    done(dist.all_reduce, x)
    right = total(size, 20).view(4, 5).t()[1:4:2]
    assert torch.equal(x, right)
    assert torch.equal(base.t()[0], of(rank, 20).view(4, 5).t()[0])
    y = torch.zeros(3, 2).t()
    done(dist.scatter, y, [of(r, 6).view(2, 3) for r in range(size)] if rank == 0 else None, 0)
    assert torch.equal(y, of(rank, 6).view(2, 3))


def test_what_is_overwritten_is_known_to_autograd(group):
    rank, size = group.rank(), group.size()
    calls = {
        "all_reduce": lambda x: dist.all_reduce(x),
        "broadcast": lambda x: dist.broadcast(x, 0),
        "all_gather": lambda x: dist.all_gather(
            [torch.empty(2)] * rank + [x] + [torch.empty(2)] * (size - 1 - rank), x
        ),
        "all_to_all": lambda x: dist.all_to_all([x] * size, [torch.ones(2)] * size),
        "scatter": lambda x: dist.scatter(x, [torch.ones(2)] * size if rank == 0 else None, 0),
        "reduce_scatter": lambda x: dist.reduce_scatter(x, [torch.ones(2)] * size),
    }
    for name, call in calls.items():
        w, x = torch.ones(2, requires_grad=True), torch.ones(2)
        y = (x * w).sum()
        call(x)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()
        assert w.grad is None, name


def test_sparse_sum(group, done):
    rank, size = group.rank(), group.size()
    x = torch.sparse_coo_tensor([[rank, size]], [[1.0, 2.0], [rank, 1.0]], (size + 1, 2), check_invariants=True)
    right = sum(
        torch.sparse_coo_tensor([[r, size]], [[1.0, 2.0], [r, 1.0]], (size + 1, 2), check_invariants=True).to_dense()
        for r in range(size)
    )
    done(dist.all_reduce, x)
    assert torch.equal(x.to_dense(), right)
    x = torch.sparse_coo_tensor([[rank, rank]], [1.0, 2.0], (size,), check_invariants=True)  # not coalesced
    done(dist.all_reduce, x, op=dist._make_nccl_premul_sum(0.5))
    assert torch.equal(x.to_dense(), torch.full((size,), 1.5))
    with pytest.raises(ValueError, match=r"premul_sum: torch.int64 .* cannot be multiplied by 0.5"):
        dist.all_reduce(x.long(), op=dist._make_nccl_premul_sum(0.5))
    with pytest.raises(ValueError, match="only the sum of sparse tensors"):
        dist.all_reduce(x, op=OPS.MAX)


def test_several_at_once(group):
    rank, size = group.rank(), group.size()
    tensors = [of(rank, count, dtype) for count in (1, 7, 300) for dtype in (torch.float32, torch.int64)]
    with dist._coalescing_manager():
        for x in tensors:
            dist.all_reduce(x)
    assert all(torch.equal(x, total(size, x.numel(), x.dtype)) for x in tensors)
    outs = [torch.empty(size * count) for count in (2, 5)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for out in outs:
            dist.all_gather_single(out, of(rank, out.numel() // size))
    manager.wait()
    assert all(torch.equal(out, torch.cat([of(r, out.numel() // size) for r in range(size)])) for out in outs)
    halves = [torch.empty(count) for count in (2, 5)]
    with dist._coalescing_manager(device=torch.device("cpu")):  # the old way
        dist.reduce_scatter_single(halves[0], of(rank, 2 * size), async_op=True)
        dist.reduce_scatter_single(halves[1], of(rank, 5 * size), async_op=True)
    for half in halves:
        n = half.numel()
        assert torch.equal(half, total(size, n * size)[n * rank : n * rank + n])


def test_objects(group):
    rank, size = group.rank(), group.size()
    got = [None] * size
    dist.all_gather_object(got, {"rank": rank, "text": "x" * rank})
    assert got == [{"rank": r, "text": "x" * r} for r in range(size)]
    told = [rank, "something"] if rank == size - 1 else [None, None]
    dist.broadcast_object_list(told, size - 1)
    assert told == [size - 1, "something"]
    out = [None]
    dist.scatter_object_list(out, [("for", r) for r in range(size)], 0)
    assert out == [("for", rank)]
    collected = [None] * size if rank == 0 else None
    dist.gather_object(rank, collected, 0)
    assert collected == (list(range(size)) if rank == 0 else None)


def test_messages(group):
    rank, size = group.rank(), group.size()
    if size == 1:
        return
    following, before = (rank + 1) % size, (rank - 1) % size
    second, first = torch.empty(3), torch.empty(4, dtype=torch.int64)
    works = [dist.irecv(second, before, tag=2), dist.irecv(first, before, tag=1)]  # not in the order of the sends
    works += [dist.isend(of(rank, 4, torch.int64), following, tag=1), dist.isend(of(rank, 3), following, tag=2)]
    for work in works:
        work.wait()
    assert torch.equal(second, of(before, 3))
    assert torch.equal(first, of(before, 4, torch.int64))
    if rank == 0:
        got = torch.empty(2)
        sources = {dist.recv(got, tag=7): got.tolist() for _ in range(size - 1)}
        assert sources == {r: of(r, 2).tolist() for r in range(1, size)}
    else:
        dist.send(of(rank, 2), 0, tag=7)
    columns = torch.empty(4, 2).t()
    operations = [dist.P2POp(dist.isend, of(rank, 8).view(2, 4), following), dist.P2POp(dist.irecv, columns, before)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert torch.equal(columns, of(before, 8).view(2, 4))
    if rank == 1:
        dist.send(torch.empty(0), 0, tag=3)
    if rank == 0:
        assert dist.recv(torch.empty(0), tag=3) == 1
        future = dist.irecv(got := torch.empty(2), 1, tag=9).get_future()
        assert torch.equal(future.wait()[0], of(1, 2))
        assert torch.equal(got, of(1, 2))
    if rank == 1:
        dist.send(of(1, 2), 0, tag=9)


def test_subgroups(group):
    """Overlapping ones, in any order of ranks, one of the same ranks again, and one within a group."""
    rank, size = group.rank(), group.size()
    sets = [list(range(size)), [0], [size - 1], list(range(size))[::-1], list(range(0, size, 2)), list(range(size))]
    groups = [dist.new_group(ranks) for ranks in map(sorted, sets)]
    for ranks, each in zip(map(sorted, sets), groups, strict=True):
        if rank in ranks:
            x = of(rank, 4)
            dist.all_reduce(x, group=each)
            assert torch.equal(x, sum(of(r, 4) for r in ranks))
            dist.broadcast(x := of(rank, 4), ranks[-1], group=each)
            assert torch.equal(x, of(ranks[-1], 4))
    if size > 2 and rank > 0:
        upper = dist.new_group(list(range(1, size)), use_local_synchronization=True)
        assert (upper.split_group([1]) is None) == (rank != 2)  # its ranks, not the world's
        dist.destroy_process_group(upper)
    inner = group.split_group(sets[4])
    assert (inner is None) == (rank not in sets[4])
    if inner is not None:
        x = of(rank, 4)
        inner.allreduce([x]).wait()
        assert torch.equal(x, sum(of(r, 4) for r in sets[4]))
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


def test_monitored_barrier(group):
    monitored_barrier()
    monitored_barrier(timeout=dt.timedelta(seconds=20), wait_all_ranks=True)
    monitored_barrier(group, 20.0)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda size: dist.all_gather([torch.empty(2)] * (size + 1), torch.ones(2)), "the group has"),
        (lambda size: dist.all_gather_single(torch.empty(5 * size + 1), torch.ones(5)), "it must have"),
        (lambda size: dist.reduce_scatter_single(torch.empty(3), torch.ones(2 * size + 7)), "it must have"),
        (lambda size: dist.reduce_scatter(torch.empty(3), [torch.ones(2)] * size), "has 2 elements"),
        (lambda size: dist.all_to_all([torch.empty(2)] * size, [torch.ones(3)] * size), "has 2 elements"),
        (lambda size: dist.all_to_all_single(torch.empty(2 * size), torch.ones(2 * size), [5] * size), "split sizes"),
        (lambda n: dist.all_to_all_single(torch.empty(n), torch.ones(n, dtype=torch.int32), [1] * n, [1] * n), "int32"),
        (lambda size: dist.all_reduce(torch.ones(2), op=OPS.BAND), "'band' is not defined for torch.float32"),
    ],
)
def test_what_is_wrong_is_told_on_every_rank(group, call, told):
    with pytest.raises(ValueError, match=told):
        call(group.size())
    dist.barrier()
