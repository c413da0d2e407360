"""Every verb x dtype x op x layout x size x form, on any number of ranks, against closed-form or float64 answers.

Element j on rank r holds a value that depends on both, so that a swapped chunk shows. Every rank computes what every
other one holds, so the expected result needs no communication.
"""

import numpy as np
import pytest
import torch

from torchmpi_py.tensors import ops_of

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(120)]

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
COMPLEX = [torch.complex64, torch.complex128, torch.complex32]
SIGNED = [torch.int8, torch.int16, torch.int32, torch.int64]
UNSIGNED = [torch.uint8, torch.uint16, torch.uint32, torch.uint64]
DTYPES = [*FLOATS, *COMPLEX, *SIGNED, *UNSIGNED, torch.bool]
SIZES = [0, 1, 7, 1000, 20011]  # the last one is beyond what is posted natively, for most dtypes
CASES = [(dtype, op) for dtype in DTYPES for op in ops_of(dtype)]
FORMS = ["blocking", "asynchronous"]


def name(value):
    return str(value).removeprefix("torch.")


def integers(dtype, rank, count, op="sum"):
    """Whole numbers that depend on the element and the rank; small enough for every sum and product to be exact."""
    j = torch.arange(count)
    if op == "prod":
        return (j + rank) % 2 + 1
    values = (j * 7 + j // 11 + rank * 3) % 13
    if dtype in UNSIGNED or op in ("band", "bor", "bxor", "land", "lor"):
        return values
    return values - 6


def values(dtype, rank, count, op="sum"):
    """What rank ``rank`` holds."""
    whole = integers(dtype, rank, count, op)
    if dtype == torch.bool:
        return whole % 3 == 0
    if dtype.is_complex:
        return torch.complex(whole.double(), (whole.double() + rank) % 3).to(dtype)
    return whole.double().to(dtype) if dtype.is_floating_point else whole.to(dtype)


def reference(dtype, op, tensors):
    """The reduction in a wide type, in rank order, rounded once."""
    if dtype == torch.bool:
        stack = np.stack([t.numpy() for t in tensors])
        kind = {"sum": "or", "max": "or", "bor": "or", "lor": "or", "bxor": "xor"}.get(op, "and")
        return torch.from_numpy(getattr(np, f"logical_{kind}").reduce(stack))
    wide = torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else torch.int64
    stack = torch.stack([t.to(wide) for t in tensors])
    if op == "avg":
        return (stack.sum(0) / len(tensors)).to(dtype)
    if op in ("land", "lor"):
        return (stack.bool().all(0) if op == "land" else stack.bool().any(0)).to(dtype)
    if op in ("band", "bor", "bxor"):
        ufunc = getattr(np, {"band": "bitwise_and", "bor": "bitwise_or", "bxor": "bitwise_xor"}[op])
        return torch.from_numpy(ufunc.reduce(stack.numpy())).to(dtype)
    reduced = {"sum": torch.sum, "prod": torch.prod, "min": torch.amin, "max": torch.amax}[op](stack, 0)
    return reduced.to(dtype)


def same(got, expected, op=None):
    """Equal bits; after a reduction equal values, and an average may be off by a rounding of its last place."""
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    if op is None:
        np.testing.assert_array_equal(bits(got), bits(expected))
        return
    if got.dtype.is_floating_point or got.dtype.is_complex:
        wide = torch.complex128 if got.dtype.is_complex else torch.float64
        tolerance = torch.finfo(got.dtype).eps if op == "avg" else 0
        torch.testing.assert_close(got.to(wide), expected.to(wide), rtol=tolerance, atol=0)
    else:
        np.testing.assert_array_equal(got.numpy(), expected.numpy())


def bits(x):
    return x.contiguous().reshape(-1).view(torch.uint8).numpy() if x.numel() else np.empty(0)


def call(mpi, form, verb, *args, **kwargs):
    if form == "blocking":
        return getattr(mpi, verb)(*args, **kwargs)
    handle = getattr(mpi, f"{verb}_async")(*args, **kwargs)
    result = handle.wait()
    assert handle.wait() is result
    return result


def layouts(x):
    """The same values in every layout that a user may pass: (name, tensor)."""
    yield "flat", x.clone()
    if x.numel() > 1:
        wide = torch.zeros(2 * x.numel(), dtype=x.dtype)
        wide[::2] = x
        yield "strided", wide[::2]
        yield "offset", torch.cat([x[:1], x])[1:]
    if x.numel() % 4 == 0:
        yield "transposed", x.view(4, -1).clone().t().contiguous().t()
    if x.numel() == 1:
        yield "no dimensions", x.clone().reshape(())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("dtype", "op"), CASES, ids=name)
def test_allreduce(mpi, dtype, op, form):
    for count in SIZES:
        inputs = [values(dtype, rank, count, op) for rank in range(mpi.size())]
        expected = reference(dtype, op, inputs)
        for layout, x in layouts(inputs[mpi.rank()]):
            shape = x.shape
            before = x.clone()
            out = torch.full_like(x, 1)
            assert call(mpi, form, "allreduce", x, out=out, op=op) is out
            same(out, expected.view(shape), op)
            np.testing.assert_array_equal(bits(x), bits(before), err_msg=f"{layout}: the input was overwritten")
            assert call(mpi, form, "allreduce", x, op=op) is x
            same(x, expected.view(shape), op)
        mpi.check_with_allreduce(x, f"allreduce of {count} {dtype} with {op}")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("dtype", "op"), CASES, ids=name)
def test_reduce(mpi, dtype, op, form):
    for count in SIZES:
        inputs = [values(dtype, rank, count, op) for rank in range(mpi.size())]
        expected = reference(dtype, op, inputs)
        for root in range(mpi.size()):
            for _, x in layouts(inputs[mpi.rank()]):
                before = x.clone()
                out = torch.full_like(x, 1)
                call(mpi, form, "reduce", x, root, out=out, op=op)
                same(out, expected.view(x.shape) if mpi.rank() == root else torch.full_like(out, 1), op)
                assert call(mpi, form, "reduce", x, root, op=op) is x
                same(x, expected.view(x.shape) if mpi.rank() == root else before, op)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("dtype", "op"), CASES, ids=name)
def test_reduce_scatter(mpi, dtype, op, form):
    size = mpi.size()
    for rows in (0, 1, 3, 4000):
        inputs = [values(dtype, rank, size * rows * 2, op).view(size * rows, 2) for rank in range(size)]
        expected = reference(dtype, op, inputs)[mpi.rank() * rows : (mpi.rank() + 1) * rows]
        x = inputs[mpi.rank()].clone()
        same(call(mpi, form, "reduce_scatter", x, op=op), expected, op)
        out = torch.empty(2, rows, dtype=dtype).t()
        assert call(mpi, form, "reduce_scatter", x, op=op, out=out) is out
        same(out, expected, op)
        np.testing.assert_array_equal(bits(x), bits(inputs[mpi.rank()]))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_broadcast(mpi, dtype, form):
    for count in SIZES:
        for root in range(mpi.size()):
            for _, x in layouts(values(dtype, mpi.rank(), count)):
                assert call(mpi, form, "broadcast", x, root) is x
                same(x, values(dtype, root, count).view(x.shape))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_allgather_and_gather(mpi, dtype, form):
    size = mpi.size()
    for rows in ([2] * size, list(range(size)), [0] * size, [3000 + 7 * r for r in range(size)]):
        parts = [values(dtype, rank, rows[rank] * 3).view(rows[rank], 3) for rank in range(size)]
        expected = torch.cat(parts)
        x = parts[mpi.rank()].clone().t().contiguous().t()
        same(call(mpi, form, "allgather", x), expected)
        out = torch.full_like(expected, 1)
        assert call(mpi, form, "allgather", x, out=out) is out
        same(out, expected)
        for root in range(size):
            got = call(mpi, form, "gather", x, root)
            assert (got is None) == (mpi.rank() != root)
            if got is not None:
                same(got, expected)
    single = values(dtype, mpi.rank(), 1).reshape(())
    same(call(mpi, form, "allgather", single), torch.cat([values(dtype, rank, 1) for rank in range(size)]))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_scatter_and_alltoall(mpi, dtype, form):
    size, me = mpi.size(), mpi.rank()
    for rows in (0, 1, 3000):
        inputs = [values(dtype, rank, size * rows * 2).view(size * rows, 2) for rank in range(size)]
        x = inputs[me].clone()
        for root in range(size):
            same(call(mpi, form, "scatter", x, root), inputs[root][me * rows : (me + 1) * rows])
        expected = torch.cat([part[me * rows : (me + 1) * rows] for part in inputs])
        out = torch.full_like(x, 1)
        assert call(mpi, form, "alltoall", x, out=out) is out
        same(out, expected)
        same(x, inputs[me])
        assert call(mpi, form, "alltoall", x) is x
        same(x, expected)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_sendreceive_around_the_ring(mpi, dtype, form):
    size, me = mpi.size(), mpi.rank()
    for count in SIZES:
        for _, x in layouts(values(dtype, me, count)):
            assert call(mpi, form, "sendreceive", x, (me - 1) % size, (me + 1) % size) is x
            same(x, values(dtype, (me - 1) % size, count).view(x.shape))


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_send_and_recv(mpi, dtype):
    size, me = mpi.size(), mpi.rank()
    for count in SIZES:
        for _, x in layouts(values(dtype, me, count)):
            got = torch.zeros_like(x)
            receiving = mpi.recv_async(got, (me - 1) % size)  # launched first on all ranks: it must not block the send
            sending = mpi.send_async(x, (me + 1) % size)
            mpi.wait_all([receiving, sending])
            same(got, values(dtype, (me - 1) % size, count).view(x.shape))
    if me == 0 and size > 1:
        mpi.send(values(dtype, 0, 50000), 1)
    if me == 1:
        got = torch.empty(50000, dtype=dtype)
        assert mpi.recv(got, 0) is got
        same(got, values(dtype, 0, 50000))


@pytest.mark.parametrize("form", FORMS)
def test_objects(mpi, form):
    for root in range(mpi.size()):
        thing = {"rank": mpi.rank(), "x": torch.arange(3) + mpi.rank()}
        got = call(mpi, form, "broadcast_object", thing, root)
        assert got["rank"] == root
        assert torch.equal(got["x"], torch.arange(3) + root)
    assert call(mpi, form, "allgather_object", (mpi.rank(), "é")) == [(r, "é") for r in range(mpi.size())]


@pytest.mark.parametrize("dtype", FLOATS, ids=name)
def test_random_sums_are_rounded_once(mpi, dtype):
    """16-bit floats accumulate in float32: the error against float64 stays below one rounding of the dtype."""
    inputs = [torch.randn(5000, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(mpi.size())]
    x = mpi.allreduce(inputs[mpi.rank()].clone())
    exact = torch.stack([t.double() for t in inputs]).sum(0)
    scale = torch.stack([t.double().abs() for t in inputs]).sum(0)
    # a rounding of the result, plus those of accumulation; 1e-3 is float8's smallest step near zero
    bound = (
        torch.finfo(dtype).eps * exact.abs() + mpi.size() * 2.0**-23 * scale + (1e-2 if dtype.itemsize == 1 else 1e-7)
    )
    if dtype == torch.float64:
        bound = mpi.size() * 2.0**-52 * scale
    assert ((x.double() - exact).abs() <= bound).all()
    mpi.check_with_allreduce(x)


@pytest.mark.parametrize("dtype", [t for t in FLOATS if t != torch.float8_e4m3fn], ids=name)
def test_special_values(mpi, dtype):
    """NaN wins in min and max on every rank; infinities and signed zeros keep their order."""
    inf, nan = float("inf"), float("nan")
    first = torch.tensor([nan, 1.0, -inf, inf, -0.0, 3.0, -1.0]).to(dtype)
    other = torch.tensor([2.0, nan, 5.0, -inf, 0.0, -4.0, -2.0]).to(dtype)
    last = mpi.rank() == mpi.size() - 1
    for op in ("min", "max"):
        x = mpi.allreduce((first if last else other).clone(), op=op)
        both = getattr(torch, f"{op}imum")(first.float(), other.float() if mpi.size() > 1 else first.float())
        torch.testing.assert_close(x.float(), both, equal_nan=True, rtol=0, atol=0)
        zero = x[4].item()
        expected = "-0.0" if op == "min" or mpi.size() == 1 else "0.0"
        assert str(zero) == expected
        mpi.check_with_allreduce(x)
    x = mpi.allreduce((first if last else other).clone())
    assert x[0].isnan()
    assert x[1].isnan() or mpi.size() == 1


def test_lazy_conjugation_and_negation(mpi):
    z = torch.complex(torch.arange(4.0), torch.ones(4) + mpi.rank())
    total = sum(torch.complex(torch.arange(4.0), torch.ones(4) + rank) for rank in range(mpi.size()))
    torch.testing.assert_close(mpi.allreduce(z.conj().clone().conj(), out=torch.empty(4, dtype=z.dtype)), total)
    torch.testing.assert_close(mpi.allreduce(z.conj(), out=torch.empty(4, dtype=z.dtype)), total.conj())
    torch.testing.assert_close(mpi.allreduce(z.conj().imag, out=torch.empty(4)), total.conj().imag)


def test_long_messages_travel_in_pieces(mpi, monkeypatch):
    """With messages of at most 1000 bytes every verb takes the path of tensors beyond 2^31 bytes."""
    from torchmpi_py import config

    monkeypatch.setattr(config, "current", config.Tuning(native_async_bytes=8, message_bytes=1000, wire_bytes=600))
    size, me, rows = mpi.size(), mpi.rank(), 701
    for dtype in (torch.float32, torch.bfloat16, torch.uint8, torch.complex128):
        for form in FORMS:
            inputs = [values(dtype, rank, size * rows) for rank in range(size)]
            x, total, mine = inputs[me], reference(dtype, "sum", inputs), slice(me * rows, (me + 1) * rows)
            same(call(mpi, form, "allreduce", x.clone()), total, "sum")
            same(call(mpi, form, "allreduce", x, out=torch.empty_like(x)), total, "sum")
            same(call(mpi, form, "reduce", x.clone(), size - 1), total if me == size - 1 else x, "sum")
            same(call(mpi, form, "reduce_scatter", x), total[mine], "sum")
            same(call(mpi, form, "broadcast", x.clone(), size - 1), inputs[size - 1])
            same(call(mpi, form, "alltoall", x.clone()), torch.cat([part[mine] for part in inputs]))
            same(call(mpi, form, "scatter", x, size - 1), inputs[size - 1][mine])
            parts = [part[: 300 * (rank + 1)] for rank, part in enumerate(inputs)]
            same(call(mpi, form, "allgather", parts[me]), torch.cat(parts))
            got = call(mpi, form, "gather", parts[me], size - 1)
            if me == size - 1:
                same(got, torch.cat(parts))
            same(call(mpi, form, "sendreceive", x.clone(), (me - 1) % size, (me + 1) % size), inputs[me - 1])
            received = torch.empty_like(x)
            mpi.wait_all([mpi.recv_async(received, (me - 1) % size), mpi.send_async(x, (me + 1) % size)])
            same(received, inputs[me - 1])
