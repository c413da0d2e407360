"""The arithmetic of reductions: every dtype and op, for one source and several, into any of them or beside them."""

import itertools
import math

import pytest
import torch
from test_verbs import CASES, FLOATS, bits, name, reference, same, values

from torchmpi_py.collectives.reductions import kernel

pytestmark = pytest.mark.timeout(240)
COUNT = 301


def equal_bits(x, y):
    return bits(x).tobytes() == bits(y).tobytes()


@pytest.mark.parametrize(("dtype", "op"), CASES, ids=name)
def test_every_dtype_and_op(dtype, op):
    how = kernel(dtype, op)
    for num_sources in (1, 2, 3, 5):
        given = [values(dtype, source, COUNT, op) for source in range(num_sources)]
        expected = reference(dtype, op, given)
        for target in (None, *range(num_sources)):
            sources = [x.clone() for x in given]
            out = torch.ones(COUNT).to(dtype) if target is None else sources[target]
            how.reduce(sources, out)
            same(out, expected, op)
            for index, (x, before) in enumerate(zip(sources, given, strict=True)):
                assert index == target or equal_bits(x, before), index
    empty = [torch.empty(0, dtype=dtype) for _ in range(3)]
    how.reduce(empty, empty[0])


@pytest.mark.parametrize("op", ["min", "max"])
@pytest.mark.parametrize("dtype", FLOATS, ids=name)
def test_special_values(dtype, op):
    """NaN wins, whatever comes first; -0.0 is less than +0.0; infinities keep their place."""
    nan, inf = math.nan, math.inf
    specials = [nan, -nan, 0.0, -0.0, 1.5, -1.5] + ([inf, -inf] if dtype != torch.float8_e4m3fn else [])
    sources = [x.to(dtype) for x in torch.tensor(list(itertools.product(specials, repeat=3))).t()]
    for num_sources in (1, 2, 3):
        out = torch.empty(len(sources[0])).to(dtype)
        kernel(dtype, op).reduce(sources[:num_sources], out)
        for got, *column in zip(out.tolist(), *(x.tolist() for x in sources[:num_sources]), strict=True):
            ordered = sorted(column, key=lambda x: (x, math.copysign(1, x)))
            expected = nan if any(map(math.isnan, column)) else ordered[0 if op == "min" else -1]
            assert str(got) == str(expected), column
    payload = torch.tensor([0x7FC00001, -0x3FFFFF, 0x7F800001], dtype=torch.int32).view(torch.float32)
    out = torch.empty(3)
    kernel(torch.float32, op).reduce([torch.tensor([inf, -inf, 0.0]), payload], out)
    assert out.isnan().all()


def test_sums_of_special_values():
    nan, inf = math.nan, math.inf
    columns = [nan, inf, inf, -inf, -0.0], [1.0, 1.0, -inf, 2.0, -0.0]
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e5m2):
        out = torch.empty(5).to(dtype)
        kernel(dtype, "sum").reduce([torch.tensor(column).to(dtype) for column in columns], out)
        assert [str(value) for value in out.float().tolist()] == ["nan", "inf", "nan", "-inf", "-0.0"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e5m2, torch.complex32], ids=name)
def test_short_floats_are_rounded_once(dtype):
    """256 + 1 + 1 + ...: rounded at every step it would stay at 256 or 8."""
    big = {torch.float16: 2048.0, torch.complex32: 2048.0, torch.bfloat16: 256.0, torch.float8_e5m2: 8.0}[dtype]
    sources = [torch.full((3,), value).to(dtype) for value in [big] + [1.0] * int(big // 4)]
    for op, exact in (("sum", big * 1.25), ("avg", big * 1.25 / len(sources))):
        out = torch.empty(3, dtype=dtype)
        kernel(dtype, op).reduce(sources, out)
        assert equal_bits(out, torch.full((3,), exact).to(dtype)), op


def test_the_same_order_gives_the_same_bits():
    """Sums go in the order of the sources, whichever of them the result is written into."""
    generator = torch.Generator().manual_seed(5)
    given = [torch.randn(1000, generator=generator) for _ in range(5)]
    wanted = (((given[0] + given[1]) + given[2]) + given[3]) + given[4]
    for target in range(5):
        sources = [x.clone() for x in given]
        kernel(torch.float32, "sum").reduce(sources, sources[target])
        assert torch.equal(sources[target], wanted)
