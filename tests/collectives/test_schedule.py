"""Slices and chunks, and the algorithms of shared memory that follow them, on 1 to 13 simulated ranks.

Simulated ranks take turns, and the memory that they share is ordinary. Where bits are compared the numbers are random.
That nothing is overwritten too early, whatever the order, is for ``test_protocol_model.py``.
"""

import itertools
import random

import pytest
import torch
from hypothesis import given, settings, strategies as st
from support.values import stacked, total, values

from torchmpi_py.collectives.flavours import staging, two_shot
from torchmpi_py.collectives.flavours.schedule import ALIGNMENT, chunks, pipeline, slices
from torchmpi_py.collectives.reductions import kernel

pytestmark = pytest.mark.timeout(240)

SIZES = [1, 2, 3, 4, 5, 8, 13]
FEW_SIZES = [1, 2, 3, 8]
SUM = kernel(torch.float32, "sum")


def noise(rank, count, dtype=torch.float32):
    return torch.randn(count, generator=torch.Generator().manual_seed(rank)).to(dtype)


def same_bits(x, y):
    return torch.equal(x.view(torch.uint8), y.view(torch.uint8))


@given(size=st.integers(1, 37), count=st.integers(0, 1 << 33))
@settings(deadline=None)
def test_slices(size, count):
    found = slices(count, size)
    begins, ends = [begin for begin, _ in found], [end for _, end in found]
    assert len(found) == size
    assert [0, *ends] == [*begins, count]
    assert all(begin % ALIGNMENT == 0 or begin == count for begin in begins)
    lengths = [end - begin for begin, end in found]
    assert 0 <= min(lengths) <= max(lengths) < min(lengths) + 2 * ALIGNMENT


@given(begin=st.integers(0, 500), length=st.integers(0, 500), step=st.integers(1, 600))
@settings(deadline=None)
def test_chunks(begin, length, step):
    found = chunks(begin, begin + length, step)
    assert [at for piece in found for at in range(*piece)] == list(range(begin, begin + length))
    assert all(end - at == step for at, end in found[:-1])
    assert all(0 < end - at <= step for at, end in found)


# The algorithms of staging, in lockstep.


class Node:
    """What ``NodeGroup`` is to the algorithms. ``ticks`` is what this rank is going to do, parted by its meetings."""

    def __init__(self, rank, size, chunk_bytes, memory):
        self.rank, self.size, self.chunk_bytes = rank, size, chunk_bytes
        self.memory, self.ticks = memory, [[]]

    def barrier(self):
        self.ticks.append([])

    def given(self, rank, chunk, dtype, count):
        return self._slot(rank, chunk % 2, dtype, count)

    def reduced(self, rank, chunk, dtype, count):
        return self._slot(rank, 2 + chunk % 2, dtype, count)

    def two_slots(self, rank, chunk, dtype, count):
        return self._slot(rank, 2 * (chunk % 2), dtype, count)

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

    def run(size, program, chunk_bytes=256, slot_bytes=None, seed=0):
        memory = torch.full((size, 4, slot_bytes or -(-chunk_bytes // 64) * 64), 0x55, dtype=torch.uint8)
        ranks = [Node(rank, size, chunk_bytes, memory) for rank in range(size)]
        nodes.update(zip(ranks, ranks, strict=True))
        results, order = [program(node) for node in ranks], random.Random(seed)
        for tick in zip(*(node.ticks for node in ranks), strict=True):
            for rank in order.sample(range(size), size):
                for stage, chunk in tick[rank]:
                    stage(chunk)
        return results

    monkeypatch.setattr(staging, "pipeline", planned)
    return run


@pytest.mark.parametrize("size", SIZES)
def test_staged_reductions(size, on_ranks):
    """To all ranks and to a root, in place and into another tensor; no elements, and one chunk to several."""
    for (count, chunk_bytes), root in itertools.product(
        [(0, 64), (1, 64), (300, 256), (size * 64 + 1, 1 << 20)], {None, size // 2, size - 1}
    ):
        inputs, reduced = [values(rank, count) for rank in range(size)], total(size, count)

        def program(node, inputs=inputs, root=root):
            x, out = inputs[node.rank].clone(), torch.full_like(inputs[node.rank], -1)
            staging.allreduce(node, inputs[node.rank], out, SUM, root)
            staging.allreduce(node, x, x, SUM, root)
            return out, x

        for rank, (out, x) in enumerate(on_ranks(size, program, chunk_bytes)):
            has_result = root in (None, rank)
            assert torch.equal(out, reduced if has_result else torch.full_like(out, -1))
            assert torch.equal(x, reduced if has_result else inputs[rank])
            assert torch.equal(inputs[rank], values(rank, count))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("size", FEW_SIZES)
def test_all_ranks_get_the_same_bits(size, dtype, on_ranks):
    def program(node):
        x, out = noise(node.rank, 900, dtype), torch.empty(900, dtype=dtype)
        staging.allreduce(node, x, out, kernel(dtype, "avg"))
        return out

    first, *others = on_ranks(size, program) + on_ranks(size, program, seed=1)
    assert all(same_bits(out, first) for out in others)
    exact = torch.stack([noise(rank, 900, dtype).double() for rank in range(size)]).mean(0)
    tolerance = {torch.bfloat16: 1e-2, torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
    torch.testing.assert_close(first.double(), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("size", SIZES)
def test_staged_broadcast_and_gather(size, on_ranks):
    for counts in ([40] * size, [(rank * 29) % 53 for rank in range(size)], [0] * size):
        whole = torch.cat([values(rank, count) for rank, count in enumerate(counts)])
        for root in (None, size // 2, size - 1):

            def program(node, counts=counts, root=root):
                sent = values(node.rank, 99)
                staging.broadcast(node, sent, root or 0)
                out = torch.full((sum(counts),), -1.0) if root in (None, node.rank) else None
                parts = None if out is None else list(torch.split(out, counts))
                staging.gather(node, values(node.rank, counts[node.rank]), parts, counts)
                return sent, out

            for rank, (sent, out) in enumerate(on_ranks(size, program, chunk_bytes=80)):
                assert torch.equal(sent, values(root or 0, 99))
                assert out is None if root not in (None, rank) else torch.equal(out, whole)


@pytest.mark.parametrize("chunk_bytes", [16, 400])  # fewer bytes than there are ranks: an element a rank at a time
@pytest.mark.parametrize("size", SIZES)
def test_staged_exchange(size, chunk_bytes, on_ranks):
    inputs = stacked(size, size * 7).view(size, size, 7)

    def program(node):
        """reduce_scatter, alltoall, and scatter from the last rank."""
        rows, outs = inputs[node.rank], [torch.full(shape, -1.0) for shape in ((7,), (size, 7), (7,))]
        staging.exchange(node, rows, [outs[0]], SUM, None)
        staging.exchange(node, rows, list(outs[1]), None, None)
        staging.exchange(node, rows if node.rank == size - 1 else None, [outs[2]], None, size - 1)
        return outs

    results = zip(*on_ranks(size, program, chunk_bytes, max(chunk_bytes, size * 4)), strict=True)
    expected = inputs.sum(0), inputs.transpose(0, 1), inputs[size - 1]
    assert all(torch.equal(torch.stack(outs), wanted) for outs, wanted in zip(results, expected, strict=True))


# Two shots: here no rank waits for another one, so they take their turns in any order.


def turns(size, seed=1):
    return random.Random(seed).sample(range(size), size)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("cache_bytes", [1, 1 << 20])  # 1024 elements at a time, or all at once
def test_two_shots(size, cache_bytes):
    for count in (0, 1, 64 * size + 1, 5000):
        reduced, at_root = total(size, count), torch.full((count,), -1.0)
        sources = [values(rank, count) for rank in range(size)]
        outs = [torch.full((count,), -1.0) for _ in range(size)]
        for rank in turns(size):
            two_shot.carry_out(two_shot.allreduce(sources, outs, rank, cache_bytes), SUM)
            two_shot.carry_out(two_shot.reduce(sources, at_root, rank, cache_bytes), SUM)
        assert all(torch.equal(out, reduced) for out in (*outs, at_root))
        assert all(torch.equal(x, values(rank, count)) for rank, x in enumerate(sources))
        for rank in turns(size):  # in place
            two_shot.carry_out(two_shot.allreduce(sources, sources, rank, cache_bytes), SUM)
        assert all(torch.equal(x, reduced) for x in sources)
    rows = [values(rank, size * 50).bfloat16() for rank in range(size)]
    for rank in turns(size):
        out = torch.zeros(50).bfloat16()
        two_shot.carry_out(two_shot.reduce_scatter(rows, out, rank, cache_bytes), kernel(torch.bfloat16, "max"))
        assert torch.equal(out, torch.stack(rows).amax(0)[rank * 50 : (rank + 1) * 50])


@pytest.mark.parametrize("size", FEW_SIZES)
def test_two_shots_of_what_was_published(size):
    """Each rank lays into its result what the others reduce, and reads the rest from where it is."""
    inputs, results = [noise(rank, 900) for rank in range(size)], []
    for seed in (1, 2):
        outs = [torch.full((900,), float("nan")) for _ in range(size)]
        for rank in turns(size, seed):
            two_shot.publish(inputs[rank], outs[rank], rank, size)
        for rank in turns(size, seed):
            sources = [inputs[rank] if peer == rank else out for peer, out in enumerate(outs)]
            two_shot.carry_out(two_shot.allreduce(sources, outs, rank, 1), kernel(torch.float32, "avg"))
        results += outs
    assert all(same_bits(out, results[0]) for out in results)
    torch.testing.assert_close(results[0], torch.stack(inputs).mean(0), rtol=1e-4, atol=1e-5)
