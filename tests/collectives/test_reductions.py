"""The arithmetic of reductions: every dtype and op, for one source and several, into any of them or beside them."""

import math

import pytest
import torch

from torchmpi_py.collectives.reductions import kernel
from torchmpi_py.core.tensors import ops_of

pytestmark = pytest.mark.timeout(240)

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
COMPLEX = [torch.complex64, torch.complex128, torch.complex32]
INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64]
DTYPES = [*FLOATS, *COMPLEX, *INTEGERS, torch.bool]
CASES = [(dtype, op) for dtype in DTYPES for op in ops_of(dtype)]
COUNT = 301


def name(value):
    return str(value).removeprefix("torch.")


def bits(x):
    return x.contiguous().view(torch.uint8)


def values(dtype, source, op):
    """Small whole numbers, so that every result is exact; for bitwise ops and order also the highest bits."""
    j = torch.arange(COUNT)
    if dtype == torch.bool:
        return (j + source) % 3 == 0
    whole = (j + source) % 2 + 1 if op == "prod" else (j * 7 + source * 3) % 13 - 6
    if dtype.is_complex:
        return torch.complex(whole.double(), ((j + source) % 3).double()).to(dtype)
    if dtype.is_floating_point:
        return whole.double().to(dtype)
    if op in ("land", "lor"):
        return (whole.abs() // 3).to(dtype)
    if not dtype.is_signed and op in ("sum", "prod"):
        return whole.abs().to(dtype)
    return whole.to(dtype)  # as unsigned: near the top and near 0


def python_reduction(dtype, op, columns):
    """Python's own integers, element by element; they have no width."""
    functions = {
        "sum": sum,
        "prod": math.prod,
        "min": min,
        "max": max,
        "land": lambda column: int(all(column)),
        "lor": lambda column: int(any(column)),
    }
    return [functions[op](column) if op in functions else bitwise(op, column) for column in columns]


def bitwise(op, column):
    result = column[0]
    for value in column[1:]:
        result = {"band": result & value, "bor": result | value, "bxor": result ^ value}[op]
    return result


def reference(dtype, op, sources):
    if dtype == torch.bool:
        op = {"sum": "lor", "max": "lor", "prod": "land", "min": "land"}.get(op, op)
        columns = zip(*(source.tolist() for source in sources), strict=True)
        return torch.tensor([bool(value) for value in python_reduction(dtype, op, columns)])
    if dtype in INTEGERS:
        columns = zip(*(source.tolist() for source in sources), strict=True)
        results = python_reduction(dtype, op, columns)
        assert all(torch.iinfo(dtype).min <= value <= torch.iinfo(dtype).max for value in results)
        return torch.tensor(results, dtype=dtype)
    stack = torch.stack([source.to(torch.complex128 if dtype.is_complex else torch.float64) for source in sources])
    if op == "avg":
        return (stack.sum(0) / len(sources)).to(dtype)
    return {"sum": torch.sum, "prod": torch.prod, "min": torch.amin, "max": torch.amax}[op](stack, 0).to(dtype)


def same(got, expected, op):
    assert got.dtype == expected.dtype
    if op == "avg":
        wide = torch.complex128 if got.dtype.is_complex else torch.float64
        eps = torch.finfo(got.dtype).eps
        torch.testing.assert_close(got.to(wide), expected.to(wide), rtol=eps, atol=0)
    elif got.dtype.is_floating_point or got.dtype.is_complex:
        assert torch.equal(got.to(torch.complex128), expected.to(torch.complex128))
    else:
        assert torch.equal(bits(got), bits(expected))


@pytest.mark.parametrize(("dtype", "op"), CASES, ids=name)
def test_every_dtype_and_op(dtype, op):
    for num_sources in (1, 2, 3, 5):
        every_target(dtype, op, num_sources)


def every_target(dtype, op, num_sources):
    given = [values(dtype, source, op) for source in range(num_sources)]
    expected = reference(dtype, op, given)
    how = kernel(dtype, op)
    for target in (None, *range(num_sources)):
        sources = [x.clone() for x in given]
        out = torch.ones(COUNT).to(dtype) if target is None else sources[target]
        how.reduce(sources, out)
        same(out, expected, op)
        for index, (x, before) in enumerate(zip(sources, given, strict=True)):
            assert index == target or torch.equal(bits(x), bits(before)), index
    empty = [torch.empty(0, dtype=dtype) for _ in range(num_sources)]
    how.reduce(empty, empty[0])


@pytest.mark.parametrize(("dtype", "op"), CASES, ids=name)
def test_partials(dtype, op):
    """What flavours do that combine partial results by themselves; the values given are not overwritten."""
    given = [values(dtype, source, op) for source in range(3)]
    before = [x.clone() for x in given]
    how = kernel(dtype, op)
    partials = [how.partial(x) for x in given]
    assert all(partial.dtype == how.dtype for partial in partials)
    assert how.is_plain == all(p.data_ptr() == x.data_ptr() for p, x in zip(partials, given, strict=True))
    total = how.combine(how.combine(partials[0], partials[1]), partials[2])
    assert all(torch.equal(bits(x), bits(y)) for x, y in zip(given, before, strict=True))
    got = how.result(total, 3, dtype).to(dtype)
    same(got, reference(dtype, op, given), op)
    together = torch.empty(COUNT, dtype=dtype)
    how.reduce(given, together)
    assert torch.equal(bits(got), bits(together))


@pytest.mark.parametrize("op", ["min", "max"])
@pytest.mark.parametrize("dtype", FLOATS, ids=name)
def test_special_values(dtype, op):
    """NaN wins, whatever comes first; -0.0 is less than +0.0; infinities keep their place."""
    nan, inf = float("nan"), float("inf")
    specials = [nan, -nan, 0.0, -0.0, 1.5, -1.5] + ([inf, -inf] if dtype != torch.float8_e4m3fn else [])
    pairs = torch.tensor([(a, b) for a in specials for b in specials])
    for first, second in ((0, 1), (1, 0)):
        sources = [pairs[:, first].to(dtype), pairs[:, second].to(dtype), pairs[:, first].to(dtype)]
        for num_sources in (1, 2, 3):
            out = torch.empty(len(pairs)).to(dtype)
            kernel(dtype, op).reduce(sources[:num_sources], out)
            expected = getattr(torch, f"{op}imum")(sources[0].float(), sources[min(1, num_sources - 1)].float())
            torch.testing.assert_close(out.float(), expected, equal_nan=True, rtol=0, atol=0)
            for got, *column in zip(out.float(), *(x.float() for x in sources[:num_sources]), strict=True):
                if got == 0 and all(x == 0 for x in column):
                    negative = (any if op == "min" else all)(bool(x.signbit()) for x in column)
                    assert bool(got.signbit()) == negative
    payload = torch.tensor([0x7FC00001, -0x3FFFFF, 0x7F800001], dtype=torch.int32).view(torch.float32)
    out = torch.empty(3)
    kernel(torch.float32, op).reduce([torch.tensor([inf, -inf, 0.0]), payload], out)
    assert out.isnan().all()


def test_sums_of_special_values():
    nan, inf = float("nan"), float("inf")
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e5m2):
        sources = [
            torch.tensor(column).to(dtype) for column in ([nan, inf, inf, -inf, -0.0], [1.0, 1.0, -inf, 2.0, -0.0])
        ]
        out = torch.empty(5).to(dtype)
        kernel(dtype, "sum").reduce(sources, out)
        assert [str(value) for value in out.float().tolist()] == ["nan", "inf", "nan", "-inf", "-0.0"]


def test_uint64_on_both_sides_of_2_to_63():
    numbers = [0, 1, (1 << 63) - 1, 1 << 63, (1 << 63) + 1, (1 << 64) - 1]
    columns = [(a, b, c) for a in numbers for b in numbers for c in numbers]
    sources = [torch.tensor(row, dtype=torch.uint64) for row in zip(*columns, strict=True)]
    for op in ("min", "max", "band", "bor", "bxor", "land", "lor", "sum", "prod"):
        out = torch.empty(len(columns), dtype=torch.uint64)
        kernel(torch.uint64, op).reduce(sources, out)
        assert out.tolist() == [value % (1 << 64) for value in python_reduction(torch.uint64, op, columns)], op


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32], ids=name)
def test_smaller_unsigned_at_the_top(dtype):
    top = torch.iinfo(dtype).max
    sources = [torch.tensor([0, top, top // 2, top // 2 + 1]).to(dtype), torch.tensor([top, top - 1, top, 5]).to(dtype)]
    for op, expected in (("min", [0, top - 1, top // 2, 5]), ("max", [top, top, top, top // 2 + 1])):
        out = torch.empty(4, dtype=dtype)
        kernel(dtype, op).reduce(sources, out)
        assert out.tolist() == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e5m2, torch.complex32], ids=name)
def test_short_floats_are_rounded_once(dtype):
    """256 + 1 + 1 + ...: rounded at every step it would stay at 256 or 8."""
    big = {torch.float16: 2048.0, torch.complex32: 2048.0, torch.bfloat16: 256.0, torch.float8_e5m2: 8.0}[dtype]
    sources = [torch.full((3,), value).to(dtype) for value in [big] + [1.0] * int(big // 4)]
    out = torch.empty(3, dtype=dtype)
    kernel(dtype, "sum").reduce(sources, out)
    assert (out.to(torch.complex64).real == big * 1.25).all()
    kernel(dtype, "avg").reduce(sources, out)
    exact = torch.full((3,), big * 1.25 / len(sources))
    torch.testing.assert_close(out.to(torch.complex64).real, exact.to(dtype).to(torch.complex64).real, rtol=0, atol=0)


def test_the_same_order_gives_the_same_bits():
    """Sums go in the order of the sources, whichever of them the result is written into."""
    generator = torch.Generator().manual_seed(5)
    given = [torch.randn(1000, generator=generator) for _ in range(5)]
    wanted = (((given[0] + given[1]) + given[2]) + given[3]) + given[4]
    for target in range(5):
        sources = [x.clone() for x in given]
        kernel(torch.float32, "sum").reduce(sources, sources[target])
        assert torch.equal(sources[target], wanted)
