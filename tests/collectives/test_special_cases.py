"""What verbs do beside reducing and moving ordinary values: special ones, objects, lazy tensors, gradients."""

import functools

import pytest
import torch
from test_verbs import FLOATS, FORMS, Way, name

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(240)]


def call(mpi, form, verb, *args, **kwargs):
    return Way(mpi, form)(verb, *args, **kwargs)


def test_objects(mpi):
    for form in FORMS:
        for root in range(mpi.size()):
            thing = {"rank": mpi.rank(), "x": torch.arange(3) + mpi.rank()}
            got = call(mpi, form, "broadcast_object", thing, root)
            assert got["rank"] == root
            assert torch.equal(got["x"], torch.arange(3) + root)
        assert call(mpi, form, "allgather_object", (mpi.rank(), "é")) == [(r, "é") for r in range(mpi.size())]


@pytest.mark.parametrize("dtype", FLOATS, ids=name)
def test_random_sums_are_rounded_once(mpi, dtype):
    """16-bit floats accumulate in float32: the error against float64 stays below one rounding of the dtype."""
    size = mpi.size()
    inputs = [torch.randn(5000, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(size)]
    x = mpi.allreduce(inputs[mpi.rank()].clone())
    exact = torch.stack([t.double() for t in inputs]).sum(0)
    scale = torch.stack([t.double().abs() for t in inputs]).sum(0)
    least = 1e-2 if dtype.itemsize == 1 else 1e-7  # near the smallest step of float8
    bound = torch.finfo(dtype).eps * exact.abs() + size * 2.0**-23 * scale + least
    if dtype == torch.float64:
        bound = size * 2.0**-52 * scale
    assert ((x.double() - exact).abs() <= bound).all()
    mpi.check_with_allreduce(x)


@pytest.mark.parametrize("dtype", [t for t in FLOATS if t != torch.float8_e4m3fn], ids=name)
def test_special_values(mpi, dtype):
    """NaN wins in min and max on every rank; infinities and signed zeros keep their order."""
    inf, nan = float("inf"), float("nan")
    first = torch.tensor([nan, 1.0, -inf, inf, -0.0, 3.0, -1.0]).to(dtype)
    other = torch.tensor([2.0, nan, 5.0, -inf, 0.0, -4.0, -2.0]).to(dtype)
    mine, is_alone = first if mpi.rank() == mpi.size() - 1 else other, mpi.size() == 1
    for op in ("min", "max"):
        x = mpi.allreduce(mine.clone(), op=op)
        both = getattr(torch, f"{op}imum")(first.float(), (first if is_alone else other).float())
        torch.testing.assert_close(x.float(), both, equal_nan=True, rtol=0, atol=0)
        assert str(x[4].item()) == ("-0.0" if op == "min" or is_alone else "0.0")
        mpi.check_with_allreduce(x)
    x = mpi.allreduce(mine.clone())
    assert x[0].isnan()
    assert x[1].isnan() or is_alone


def test_alone_with_one_memory_for_both(mpi):
    """A rank that is alone may give its tensor as ``out`` too, which MPI forbids."""
    x, expected = torch.arange(1000) + mpi.rank(), torch.arange(1000) + mpi.rank()
    with mpi.split(mpi.rank()) as alone:
        for verb in ("scatter", "reduce_scatter", "alltoall", "allreduce", "reduce", "allgather", "gather"):
            for form in FORMS:
                assert call(mpi, form, verb, x, out=x, comm=alone) is x
                assert torch.equal(x, expected), verb


def test_lazy_conjugation_and_negation(mpi):
    z = torch.complex(torch.arange(4.0), torch.ones(4) + mpi.rank())
    total = sum(torch.complex(torch.arange(4.0), torch.ones(4) + rank) for rank in range(mpi.size()))
    torch.testing.assert_close(mpi.allreduce(z.conj().clone().conj(), out=torch.empty(4, dtype=z.dtype)), total)
    torch.testing.assert_close(mpi.allreduce(z.conj(), out=torch.empty(4, dtype=z.dtype)), total.conj())
    torch.testing.assert_close(mpi.allreduce(z.conj().imag, out=torch.empty(4)), total.conj().imag)


@pytest.mark.parametrize("form", FORMS)
def test_no_gradient_goes_through_what_a_verb_has_written(mpi, form):
    """It would be that of a verb that changes nothing. Values may be averaged for a log all the same."""
    called = functools.partial(call, mpi, form)
    weight = torch.ones(4, requires_grad=True)
    for verb, args in (("allreduce", ()), ("broadcast", (0,)), ("sendreceive", (mpi.rank(), mpi.rank()))):
        for view in (lambda x: x, lambda x: x[1:3], lambda x: x.reshape(2, 2).t()):
            result = called(verb, view(weight * 2), *args)
            with pytest.raises(RuntimeError, match=rf"{verb} has overwritten.*nn\.functional\.{verb}"):
                (result**2).sum().backward()
            assert weight.grad is None
    out = weight * 3
    called("allreduce", torch.ones(4), out=out)
    with pytest.raises(RuntimeError, match="has overwritten"):
        out.sum().backward()
    loss = (weight * 2).sum()
    loss.backward()
    assert called("allreduce", loss).item() == 8 * mpi.size()
    assert weight.grad.tolist() == [2.0] * 4
    assert called("allreduce", weight).requires_grad  # a leaf: parameters are broadcast and averaged
    with torch.no_grad():
        assert called("allreduce", torch.ones(4, requires_grad=True) * 2)[0] == 2 * mpi.size()
    x = torch.ones(4, requires_grad=True) * 2
    with pytest.raises(ValueError, match="op 'mean' is unknown"):
        called("allreduce", x, op="mean")
    x.sum().backward()  # nothing was written
    for view in (lambda p: p.view(-1), lambda p: p[0], lambda p: p.chunk(2)[1]):
        parameter = torch.nn.Parameter(torch.ones(4, 2))
        called("allreduce", view(parameter))  # of a parameter
        parameter.sum().backward()
    with pytest.raises(ValueError, match=r"autograd's graph; pass x.detach\(\)"):
        called("allreduce", (weight * 2).unbind()[0])


@pytest.mark.parametrize("flavour", ["mpi", "shared", "ring", "gloo"])
def test_true_is_any_byte_but_zero(request, mpi, flavour):
    """As in a view of a mask of bytes; torch takes each for True."""
    if flavour == "shared":
        request.getfixturevalue("one_node")
    rank, size = mpi.rank(), mpi.size()
    x = torch.tensor([1 << rank % 8, 255 if rank % 2 else 1, 0, rank], dtype=torch.uint8).view(torch.bool)
    for op, right in (
        ("min", [True, True, False, False]),
        ("bxor", [size % 2 == 1, size % 2 == 1, False, size % 2 == 0]),
        ("max", [True, True, False, size > 1]),
    ):
        assert mpi.allreduce(x.clone(), op=op, flavour=flavour).ne(0).tolist() == right, op
    parts = mpi.reduce_scatter(x.repeat(size), op="land", flavour=flavour)
    assert parts.tolist() == [True, True, False, False]
