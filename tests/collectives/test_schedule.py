"""Slices and chunks, and the two shots that follow them, on 1 to 13 simulated ranks.

The pipelines through slots are in ``test_protocol_model.py``.
"""

import random

import pytest
import torch
from hypothesis import given, settings, strategies as st
from support.values import total, values

from torchmpi_py.collectives.flavours import two_shot
from torchmpi_py.collectives.flavours.schedule import ALIGNMENT, chunks, slices
from torchmpi_py.collectives.reductions import kernel

pytestmark = pytest.mark.timeout(240)

SIZES = [1, 2, 3, 4, 5, 8, 13]
SUM = kernel(torch.float32, "sum")


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


# Two shots: here no rank waits for another one, so they take their turns in any order.


def turns(size):
    return random.Random(1).sample(range(size), size)


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
