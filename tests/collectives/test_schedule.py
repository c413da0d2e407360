"""Slices, chunks and pipelines, and the algorithms of shared memory that follow them: 1 to 37 simulated ranks.

Simulated ranks take turns, and the memory that they share is ordinary. Element j on rank r holds a whole number that
depends on both; sums of small ones are exact, and where bits are compared the numbers are random.
"""

import itertools
import random

import pytest
import torch
from hypothesis import given, settings, strategies as st

from torchmpi_py.collectives.flavours import staging, two_shot
from torchmpi_py.collectives.flavours.schedule import ALIGNMENT, chunks, pipeline, slices
from torchmpi_py.collectives.reductions import kernel

pytestmark = pytest.mark.timeout(240)

SIZES = [1, 2, 3, 4, 5, 8, 13, 37]

# Slices and chunks.


@given(size=st.integers(1, 37), count=st.integers(0, 1 << 33))
@settings(deadline=None, max_examples=300)
def test_slices(size, count):
    found = slices(count, size)
    assert len(found) == size
    assert found[0][0] == 0
    assert found[-1][1] == count
    assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(found))
    assert all(0 <= begin <= end for begin, end in found)
    assert all(begin % ALIGNMENT == 0 or begin == count for begin, _ in found)
    lengths = [end - begin for begin, end in found]
    assert max(lengths) - min(lengths) < 2 * ALIGNMENT


@given(begin=st.integers(0, 500), length=st.integers(0, 500), step=st.integers(1, 600))
@settings(deadline=None)
def test_chunks(begin, length, step):
    found = chunks(begin, begin + length, step)
    assert [at for piece in found for at in range(*piece)] == list(range(begin, begin + length))
    assert all(end - at == step for at, end in found[:-1])
    assert all(0 < end - at <= step for at, end in found)
    assert (found == []) == (length == 0)


# Pipelines, in lockstep.


def simulate(size, num_chunks, num_stages, num_buffers, seed=0):
    """The chunks as the last stage saw them, by rank.

    Stage s leaves its result in the rank's buffer (s, chunk modulo num_buffers); the next stage reads those of all.
    Between two meetings ranks take turns in any order: each carries out its whole tick when it is its turn.
    """
    order = random.Random(seed)
    buffers = [[[None] * num_buffers for _ in range(num_stages)] for _ in range(size)]
    seen = [[] for _ in range(size)]

    def stage(rank, depth):
        def work(chunk):
            if depth == 0:
                values = [(rank, chunk)]
            else:
                values = [buffers[peer][depth - 1][chunk % num_buffers] for peer in range(size)]
            if depth == num_stages - 1:
                seen[rank].append(values)
            else:
                buffers[rank][depth][chunk % num_buffers] = (depth, chunk, tuple(values))

        return work

    def ticks(rank):
        """What a rank does in each tick: pipeline() runs to its end, and its meetings part the work."""
        plan = [[]]
        works = [stage(rank, depth) for depth in range(num_stages)]
        stages = [lambda k, work=work: plan[-1].append((work, k)) for work in works]
        pipeline(num_chunks, stages, lambda: plan.append([]))
        assert plan.pop() == []
        return plan

    plans = [ticks(rank) for rank in range(size)]
    assert {len(plan) for plan in plans} == {num_chunks + num_stages - 1}
    for tick in range(len(plans[0])):
        for rank in order.sample(range(size), size):
            for work, chunk in plans[rank][tick]:
                work(chunk)
    return seen


def right(size, num_chunks, num_stages):
    def left_by(depth, rank, chunk):
        if depth == 0:
            return (0, chunk, ((rank, chunk),))
        return (depth, chunk, tuple(left_by(depth - 1, peer, chunk) for peer in range(size)))

    return [[left_by(num_stages - 2, peer, chunk) for peer in range(size)] for chunk in range(num_chunks)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_stages", [2, 3])
def test_two_alternating_buffers_suffice(size, num_stages):
    for num_chunks in (0, 1, 2, 7) if size < 9 or num_stages == 2 else (3,):
        for seed in range(2):
            expected = right(size, num_chunks, num_stages)
            assert simulate(size, num_chunks, num_stages, 2, seed) == [expected] * size


@pytest.mark.parametrize("num_stages", [2, 3])
def test_one_buffer_does_not(num_stages):
    """So the simulation would see a buffer that is used too early."""
    results = [simulate(3, 5, num_stages, 1, seed) for seed in range(5)]
    assert all(result != [right(3, 5, num_stages)] * 3 for result in results)


def test_the_order_within_a_rank():
    log = []
    pipeline(2, [lambda k: log.append(f"in {k}"), lambda k: log.append(f"out {k}")], lambda: log.append("meet"))
    assert log == ["in 0", "meet", "in 1", "out 0", "meet", "out 1", "meet"]


# The algorithms of staging, in lockstep.


class Node:
    """What ``NodeGroup`` is to the algorithms. ``ticks`` is what this rank is going to do, parted by its meetings."""

    def __init__(self, rank, size, chunk_bytes, memory, num_buffers):
        self.rank, self.size, self.chunk_bytes = rank, size, chunk_bytes
        self.memory, self.num_buffers, self.ticks = memory, num_buffers, [[]]

    def barrier(self):
        self.ticks.append([])

    def given(self, rank, chunk, dtype, count):
        return self._slot(rank, chunk % self.num_buffers, dtype, count)

    def reduced(self, rank, chunk, dtype, count):
        return self._slot(rank, 2 + chunk % self.num_buffers, dtype, count)

    def two_slots(self, rank, chunk, dtype, count):
        return self._slot(rank, 2 * (chunk % self.num_buffers), dtype, count)

    def _slot(self, rank, slot, dtype, count):
        slots = self.memory[rank, slot : slot + 2 - slot % 2].view(-1)
        assert count * dtype.itemsize <= len(slots)
        return slots[: count * dtype.itemsize].view(dtype)


@pytest.fixture
def on_ranks(monkeypatch):
    """``on_ranks(size, program)``: what ``program(node)`` returns on every rank, once all have done their work.

    Between two meetings ranks work one after the other, in any order.
    """
    nodes = {}

    def planned(num_chunks, stages, meet):
        ticks = nodes[meet.__self__].ticks
        plans = [lambda k, stage=stage: ticks[-1].append((stage, k)) for stage in stages]
        pipeline(num_chunks, plans, meet)

    def run(size, program, chunk_bytes=256, slot_bytes=None, seed=0, num_buffers=2):
        memory = torch.full((size, 4, slot_bytes or -(-chunk_bytes // 64) * 64), 0x55, dtype=torch.uint8)
        ranks = [Node(rank, size, chunk_bytes, memory, num_buffers) for rank in range(size)]
        nodes.update(zip(ranks, ranks, strict=True))
        results, order = [program(node) for node in ranks], random.Random(seed)
        for tick in zip(*(node.ticks for node in ranks), strict=True):
            for rank in order.sample(range(size), size):
                for stage, chunk in tick[rank]:
                    stage(chunk)
        return results

    monkeypatch.setattr(staging, "pipeline", planned)
    return run


def values(rank, count, dtype=torch.float32):
    return ((torch.arange(count) * 7 + rank * 3) % 11).to(dtype)


def total(size, count, dtype=torch.float32):
    return torch.stack([values(rank, count, torch.int64) for rank in range(size)]).sum(0).to(dtype)


def noise(rank, count, dtype=torch.float32):
    return torch.randn(count, generator=torch.Generator().manual_seed(rank)).to(dtype)


@pytest.mark.parametrize("size", SIZES)
def test_staged_allreduce(size, on_ranks):
    how = kernel(torch.float32, "sum")
    for count, chunk_bytes in ((0, 64), (1, 64), (300, 256), (size * 64 + 1, 1 << 20)):
        inputs = [values(rank, count) for rank in range(size)]

        def program(node, count=count, inputs=inputs):
            x, out = values(node.rank, count), torch.full((count,), -1.0)
            staging.allreduce(node, inputs[node.rank], out, how)
            staging.allreduce(node, x, x, how)  # in place
            return out, x

        for out, x in on_ranks(size, program, chunk_bytes):
            assert torch.equal(out, total(size, count))
            assert torch.equal(x, total(size, count))
        assert all(torch.equal(x, values(rank, count)) for rank, x in enumerate(inputs))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_all_ranks_get_the_same_bits(size, dtype, on_ranks):
    how = kernel(dtype, "avg")

    def program(node):
        x, out = noise(node.rank, 900, dtype), torch.empty(900, dtype=dtype)
        staging.allreduce(node, x, out, how)
        return out

    first = on_ranks(size, program)
    for out in first + on_ranks(size, program, seed=1):
        assert torch.equal(out.view(torch.uint8), first[0].view(torch.uint8))
    exact = torch.stack([noise(rank, 900, dtype).double() for rank in range(size)]).mean(0)
    tolerance = {torch.bfloat16: 1e-2, torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
    torch.testing.assert_close(first[0].double(), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("size", SIZES)
def test_staged_reduce_and_broadcast(size, on_ranks):
    how, count, dtype = kernel(torch.int32, "sum"), 200, torch.int32
    expected = total(size, count, dtype)
    for root in range(size):
        inputs = [values(rank, count, dtype) for rank in range(size)]

        def program(node, root=root, inputs=inputs):
            x, out, sent = values(node.rank, count, dtype), torch.full((count,), -1, dtype=dtype), noise(node.rank, 99)
            staging.allreduce(node, inputs[node.rank], out, how, root)
            staging.allreduce(node, x, x, how, root)  # in place
            staging.broadcast(node, sent, root)
            return out, x, sent

        for rank, (out, x, sent) in enumerate(on_ranks(size, program)):
            assert torch.equal(out, expected if rank == root else torch.full_like(out, -1))
            assert torch.equal(x, expected if rank == root else inputs[rank])
            assert torch.equal(sent, noise(root, 99))
            assert torch.equal(inputs[rank], values(rank, count, dtype))


@pytest.mark.parametrize("size", SIZES)
def test_staged_gather(size, on_ranks):
    for counts in ([40] * size, [(rank * 29) % 53 for rank in range(size)], [0] * size):
        whole = torch.cat([values(rank, count) for rank, count in enumerate(counts)])
        for root in (None, size - 1):

            def program(node, counts=counts, root=root):
                out = torch.full((sum(counts),), -1.0) if root in (None, node.rank) else None
                parts = None if out is None else list(torch.split(out, counts))
                staging.gather(node, values(node.rank, counts[node.rank]), parts, counts)
                return out

            for rank, out in enumerate(on_ranks(size, program, chunk_bytes=80)):
                assert out is None if root not in (None, rank) else torch.equal(out, whole)


@pytest.mark.parametrize("size", SIZES)
def test_staged_exchange(size, on_ranks):
    """reduce_scatter, alltoall, and scatter from the last rank."""
    how, count = kernel(torch.float32, "sum"), 7
    inputs = torch.stack([values(rank, size * count) for rank in range(size)]).view(size, size, count)

    def reduce_scatter(node):
        out = torch.full((count,), -1.0)
        staging.exchange(node, inputs[node.rank], [out], how, None)
        return out

    def alltoall(node):
        out = torch.full((size, count), -1.0)
        staging.exchange(node, inputs[node.rank], list(out), None, None)
        return out

    def scatter(node):
        out = torch.full((count,), -1.0)
        staging.exchange(node, inputs[node.rank] if node.rank == size - 1 else None, [out], None, size - 1)
        return out

    for chunk_bytes in (16, 400):  # fewer bytes than there are ranks: an element a rank at a time
        room = max(chunk_bytes, size * 4)
        assert torch.equal(torch.stack(on_ranks(size, reduce_scatter, chunk_bytes, room)), inputs.sum(0))
        assert torch.equal(torch.stack(on_ranks(size, alltoall, chunk_bytes, room)), inputs.transpose(0, 1))
        assert torch.equal(torch.stack(on_ranks(size, scatter, chunk_bytes, room)), inputs[size - 1])


def test_one_slot_for_all_chunks_does_not_suffice(on_ranks):
    """So the simulation would see a slot that is used too early."""
    how = kernel(torch.float32, "sum")

    def allreduce(node):
        out = torch.empty(1000)
        staging.allreduce(node, values(node.rank, 1000), out, how)
        return out

    def broadcast(node):
        x = values(node.rank, 1000)
        staging.broadcast(node, x, 0)
        return x

    for program, expected in ((allreduce, total(3, 1000)), (broadcast, values(0, 1000))):
        assert all(torch.equal(x, expected) for x in on_ranks(3, program))
        assert not all(torch.equal(x, expected) for x in on_ranks(3, program, num_buffers=1))
    assert all(torch.equal(x, total(2, 1000)) for x in on_ranks(2, allreduce))
    assert not all(torch.equal(x, total(2, 1000)) for x in on_ranks(2, allreduce, num_buffers=1))


# Two shots: here no rank waits for another one, so they take their turns in any order.


def turns(size, seed=1):
    return random.Random(seed).sample(range(size), size)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("cache_bytes", [1, 1 << 20])  # 1024 elements at a time, or all at once
def test_two_shots(size, cache_bytes):
    how = kernel(torch.float32, "sum")
    for count in (0, 1, 64 * size + 1, 5000):
        expected = total(size, count)
        sources = [values(rank, count) for rank in range(size)]
        before, outs = [x.clone() for x in sources], [torch.full((count,), -1.0) for _ in range(size)]
        for rank in turns(size):
            two_shot.carry_out(two_shot.allreduce(sources, outs, rank, cache_bytes), how)
        assert all(torch.equal(out, expected) for out in outs)
        at_root = torch.full((count,), -1.0)
        for rank in turns(size):
            two_shot.carry_out(two_shot.reduce(sources, at_root, rank, cache_bytes), how)
        assert torch.equal(at_root, expected)
        assert all(torch.equal(x, y) for x, y in zip(sources, before, strict=True))
        for rank in turns(size):  # in place
            two_shot.carry_out(two_shot.allreduce(sources, sources, rank, cache_bytes), how)
        assert all(torch.equal(x, expected) for x in sources)


@pytest.mark.parametrize("size", SIZES)
def test_two_shots_of_what_was_published(size):
    """Each rank lays into its result what the others reduce, and reads the rest from where it is."""
    how, count = kernel(torch.float32, "avg"), 900
    inputs = [noise(rank, count) for rank in range(size)]
    results = []
    for seed in (1, 2):
        outs = [torch.full((count,), float("nan")) for _ in range(size)]
        for rank in turns(size, seed):
            two_shot.publish(inputs[rank], outs[rank], rank, size)
        for rank in turns(size, seed):
            sources = [inputs[rank] if peer == rank else out for peer, out in enumerate(outs)]
            two_shot.carry_out(two_shot.allreduce(sources, outs, rank, 1), how)
        results += outs
    assert all(torch.equal(out.view(torch.int32), results[0].view(torch.int32)) for out in results)
    torch.testing.assert_close(results[0], torch.stack(inputs).mean(0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", SIZES)
def test_two_shots_reduce_scatter(size):
    how, count = kernel(torch.bfloat16, "max"), 50
    sources = [values(rank, size * count, torch.bfloat16) for rank in range(size)]
    expected = torch.stack(sources).amax(0)
    for rank in turns(size):
        out = torch.zeros(count, dtype=torch.bfloat16)
        two_shot.carry_out(two_shot.reduce_scatter(sources, out, rank, 1), how)
        assert torch.equal(out, expected[rank * count : (rank + 1) * count])


def test_nobody_writes_what_another_rank_reads():
    """In place a rank writes only elements that it alone reads."""
    for size in SIZES:
        views = [torch.zeros(64 * size + 7) for _ in range(size)]
        owners = torch.zeros(64 * size + 7)
        for rank in range(size):
            for sources, first, others in two_shot.allreduce(views, views, rank, 1):
                begins = {x.storage_offset() for x in (*sources, first, *others)}
                assert len(begins) == 1
                owners[begins.pop() :][: first.numel()] += 1
                assert {x.untyped_storage().data_ptr() for x in sources} == {v.data_ptr() for v in views}
                assert len({x.data_ptr() for x in (first, *others)}) == size
        assert (owners == 1).all()
