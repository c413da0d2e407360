"""Every verb x dtype x op x layout x size x form x flavour, on any number of ranks, against closed-form answers.

Element j on rank r holds a value that depends on both, so that a swapped chunk shows. Every rank computes what every
other one holds, so the expected result needs no communication. A family of dtypes is one test, with all ops, for pytest
takes longer than a call does; a failure names the call: verb, dtype, size, layout, op, flavour and rank. One test, on 2
ranks, in seconds::

    torchmpirun -n 2 -m pytest -q --only-mpi "tests/collectives/test_verbs.py::test_reductions[shared-allreduce-floats]"

The ways to call a verb come from the registry of flavours: a new flavour is tested without a change here.
"""

import contextlib
import functools
import inspect

import numpy as np
import pytest
import torch

from torchmpi_py.collectives import registry
from torchmpi_py.core import config
from torchmpi_py.core.tensors import ops_of

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(240)]

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
COMPLEX = [torch.complex64, torch.complex128, torch.complex32]
SIGNED = [torch.int8, torch.int16, torch.int32, torch.int64]
UNSIGNED = [torch.uint8, torch.uint16, torch.uint32, torch.uint64]
FAMILIES = {"floats": FLOATS, "complex": COMPLEX, "signed": SIGNED, "unsigned": UNSIGNED, "bool": [torch.bool]}
DTYPES = [dtype for family in FAMILIES.values() for dtype in family]
SIZES = [0, 1, 7, 1000, 20011]  # the last one is beyond what is posted natively, for most dtypes
CASES = [(dtype, op) for dtype in DTYPES for op in ops_of(dtype)]
FORMS = ["blocking", "asynchronous"]  # in the flavour that the selector takes: for these sizes the first one, mpi
# Flavours for GPU tensors that can be told their devices are carried out on the host: all but streams, events and IPC
# handles is the same.
GPU_FLAVOURS = [
    flavour.name
    for flavour in registry.FLAVOURS
    if "cpu" not in flavour.devices and "devices" in inspect.signature(type(flavour)).parameters
]
FORCED = [each.name for each in registry.FLAVOURS[1:] if "cpu" in each.devices or each.name in GPU_FLAVOURS]
# On tensors from mpi.symmetric_empty: the flavours whose ranks exchange headers work on these in place.
SYMMETRIC = [f"{name} symmetric" for name in FORCED if registry.BY_NAME[name].exchanges_headers]
WAYS = [*FORMS, *FORCED, *SYMMETRIC]


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


@functools.cache
def reduction(dtype, op, count, size):
    """What each of ``size`` ranks holds, and what becomes of it: the same for all ways, so nobody changes it."""
    inputs = [values(dtype, rank, count, op) for rank in range(size)]
    return inputs, reference(dtype, op, inputs)


def same(got, expected, op=None):
    """Equal bits; after a reduction equal values, and an average may be off by a rounding of its last place."""
    got, expected = got.cpu(), expected.cpu()
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    if op is None:
        np.testing.assert_array_equal(bits(got), bits(expected))
        return
    if np.array_equal(bits(got), bits(expected)):  # which is much faster than what follows
        return
    if got.dtype.is_floating_point or got.dtype.is_complex:
        wide = torch.complex128 if got.dtype.is_complex else torch.float64
        tolerance = torch.finfo(got.dtype).eps if op == "avg" else 0
        torch.testing.assert_close(got.to(wide), expected.to(wide), rtol=tolerance, atol=0)
    else:
        np.testing.assert_array_equal(got.numpy(), expected.numpy())


def bits(x):
    return x.cpu().contiguous().reshape(-1).view(torch.uint8).numpy() if x.numel() else np.empty(0)


def layout(x):
    """The name of a tensor's layout, as in ``Way.layouts``."""
    if not x.dim():
        return "no dimensions"
    if x.is_contiguous():
        return "offset" if x.storage_offset() else "flat"
    return "transposed" if x.dim() == 2 and x.t().is_contiguous() else "strided"


def describe(argument):
    """An argument of a verb, for the message of a failure."""
    if not isinstance(argument, torch.Tensor):
        return repr(argument)
    return f"{name(argument.dtype)} {tuple(argument.shape)} {layout(argument)}"


class Way:
    """How a verb is called: the flavour forced, if any; blocking or not; on which tensors.

    ``text``: the name of a flavour, "symmetric", "asynchronous" or several of these. Forced flavours see flat tensors
    only, so their layouts are fewer.
    """

    def __init__(self, mpi, text, device="cpu"):
        self.mpi = mpi
        self.text = text
        self.device = device
        words = text.split()
        self.flavour = next((word for word in words if word in registry.BY_NAME), None)
        self.is_symmetric = "symmetric" in words
        self.is_asynchronous = "asynchronous" in words
        self.last_call = None
        self.pool = mpi.symmetric_empty(16 << 20, dtype=torch.uint8, device=device) if self.is_symmetric else None
        self.used = 0
        self.sizes = [0, 7, 20011] if mpi.size() > 3 or self.flavour else SIZES
        if self.flavour and mpi.size() > 3:  # many ranks on few cores: each meeting takes long
            self.sizes = [7, 5003]
        self.wanted_ops = None  # all

    @functools.cached_property
    def statuses(self):
        """Of the verbs, for the flavour that is forced."""
        rows = self.mpi.availability()
        return {row.verb: row.status for row in rows if (row.flavour, row.device) == (self.flavour, self.device)}

    def skip_unless_available(self, verb):
        if self.flavour is not None and self.statuses[verb] != "available":
            pytest.skip(f"{self.flavour}: {self.statuses[verb]}")

    def ops(self, dtype):
        """Those to try: with a flavour on many ranks every third one, each dtype another third."""
        ops = ops_of(dtype)
        if self.wanted_ops is not None:
            return [op for op in ops if op in self.wanted_ops]
        if self.mpi.size() <= 3 or not (self.flavour or self.is_asynchronous):
            return ops
        return ops[DTYPES.index(dtype) % 3 :: 3]

    def __call__(self, verb, *args, **kwargs):
        """Call a verb, blocking or not."""
        self.last_call = verb, args, kwargs
        if not self.is_asynchronous:
            return getattr(self.mpi, verb)(*args, flavour=self.flavour, **kwargs)
        handle = getattr(self.mpi, f"{verb}_async")(*args, flavour=self.flavour, **kwargs)
        result = handle.wait()
        assert handle.wait() is result
        return result

    @contextlib.contextmanager
    def naming_the_case(self):
        """In this block a failure becomes an AssertionError that names the last call, flavour and rank."""
        try:
            yield
        except Exception as error:
            verb, args, kwargs = self.last_call or ("no call", (), {})
            given = ", ".join([*map(describe, args), *(f"{key}={describe(each)}" for key, each in kwargs.items())])
            where = f"rank {self.mpi.rank()} of {self.mpi.size()}"
            raise AssertionError(f"{verb}({given}), {self.text}, on {where}: {error}") from error

    def place(self, x):
        """A copy of ``x``, in symmetric memory if that is the way."""
        if self.pool is None:
            return x.clone() if self.device == "cpu" else x.to(self.device)
        begin = self.used = self.used if self.used + x.nbytes <= self.pool.numel() else 0
        self.used += -(-x.nbytes // 64) * 64
        placed = self.pool[begin : begin + x.nbytes].view(x.dtype).view(x.shape)
        return placed.copy_(x)

    def layouts(self, x):
        """The same values in the layouts that a user may pass: (name, tensor)."""
        yield "flat", self.place(x)
        if self.flavour is not None:
            return
        if x.numel() > 1:
            wide = torch.zeros(2 * x.numel(), dtype=x.dtype)
            wide[::2] = x
            yield "strided", wide.to(self.device)[::2]
            yield "offset", torch.cat([x[:1], x]).to(self.device)[1:]
        if x.numel() % 4 == 0:
            yield "transposed", x.view(4, -1).clone().t().contiguous().to(self.device).t()
        if x.numel() == 1:
            yield "no dimensions", x.clone().reshape(()).to(self.device)


@pytest.fixture(scope="module")
def gpu_flavours_on_the_host():
    """They serve CPU tensors too."""
    with pytest.MonkeyPatch.context() as patch:
        for flavour in GPU_FLAVOURS:
            patch.setattr(registry.BY_NAME[flavour], "devices", frozenset({"cpu", "cuda"}))
        yield patch


@pytest.fixture(scope="module", params=WAYS)
def way(request, mpi, gpu_flavours_on_the_host):
    """Each way in turn; hierarchical combines the odd and the even ranks."""
    if request.param != "hierarchical":
        yield Way(mpi, request.param)
        return
    level = mpi.push_communicator(mpi.rank() % 2)
    mpi.set_collective_span(0, level)
    yield Way(mpi, request.param)
    mpi.set_collective_span(0, 1)


def allreduce(mpi, dtype, op, way):
    for count in way.sizes:
        inputs, expected = reduction(dtype, op, count, mpi.size())
        for layout, x in way.layouts(inputs[mpi.rank()]):
            shape = x.shape
            before = x.clone()
            out = way.place(torch.full_like(x, 1))
            assert way("allreduce", x, out=out, op=op) is out
            same(out, expected.view(shape), op)
            np.testing.assert_array_equal(bits(x), bits(before), err_msg=f"{layout}: the input was overwritten")
            assert way("allreduce", x, op=op) is x
            same(x, expected.view(shape), op)
        mpi.check_with_allreduce(x, f"allreduce of {count} {dtype} with {op}")


def reduce(mpi, dtype, op, way):
    for count in way.sizes:
        inputs, expected = reduction(dtype, op, count, mpi.size())
        for root in range(mpi.size()):
            for _, x in way.layouts(inputs[mpi.rank()]):
                before = x.clone()
                out = torch.full_like(x, 1)
                way("reduce", x, root, out=out, op=op)
                same(out, expected.view(x.shape) if mpi.rank() == root else torch.full_like(out, 1), op)
                assert way("reduce", x, root, op=op) is x
                same(x, expected.view(x.shape) if mpi.rank() == root else before, op)


def reduce_scatter(mpi, dtype, op, way):
    size = mpi.size()
    for rows in (0, 1, 3, 4000):
        inputs, reduced = reduction(dtype, op, size * rows * 2, size)
        given = inputs[mpi.rank()].view(size * rows, 2)
        expected = reduced.view(size * rows, 2)[mpi.rank() * rows : (mpi.rank() + 1) * rows]
        x = way.place(given)
        same(way("reduce_scatter", x, op=op), expected, op)
        out = torch.empty(2, rows, dtype=dtype, device=x.device).t()
        assert way("reduce_scatter", x, op=op, out=out) is out
        same(out, expected, op)
        np.testing.assert_array_equal(bits(x), bits(given))


def broadcast(mpi, dtype, way):
    for count in way.sizes:
        for root in range(mpi.size()):
            for _, x in way.layouts(values(dtype, mpi.rank(), count)):
                assert way("broadcast", x, root) is x
                same(x, values(dtype, root, count).view(x.shape))


def allgather(mpi, dtype, way):
    size = mpi.size()
    for rows in ([2] * size, list(range(size)), [0] * size, [3000 + 7 * r for r in range(size)]):
        parts = [values(dtype, rank, rows[rank] * 3).view(rows[rank], 3) for rank in range(size)]
        expected = torch.cat(parts)
        x = way.place(parts[mpi.rank()])
        same(way("allgather", x if way.flavour else x.t().contiguous().t()), expected)
        out = torch.full_like(expected, 1, device=x.device)
        assert way("allgather", x, out=out) is out
        same(out, expected)
    single = values(dtype, mpi.rank(), 1).reshape(()).to(way.device)
    same(way("allgather", single), torch.cat([values(dtype, rank, 1) for rank in range(size)]))


def gather(mpi, dtype, way):
    for rows in ([2] * mpi.size(), [0] * mpi.size(), [3000 + 7 * r for r in range(mpi.size())]):
        parts = [values(dtype, rank, rows[rank] * 3).view(rows[rank], 3) for rank in range(mpi.size())]
        for root in range(mpi.size()):
            got = way("gather", way.place(parts[mpi.rank()]), root)
            assert (got is None) == (mpi.rank() != root)
            if got is not None:
                same(got, torch.cat(parts))


def scatter(mpi, dtype, way):
    size, me = mpi.size(), mpi.rank()
    for rows in (0, 1, 3000):
        inputs = [values(dtype, rank, size * rows * 2).view(size * rows, 2) for rank in range(size)]
        for root in range(size):
            same(way("scatter", way.place(inputs[me]), root), inputs[root][me * rows : (me + 1) * rows])


def alltoall(mpi, dtype, way):
    size, me = mpi.size(), mpi.rank()
    for rows in (0, 1, 3000):
        inputs = [values(dtype, rank, size * rows * 2).view(size * rows, 2) for rank in range(size)]
        x = way.place(inputs[me])
        expected = torch.cat([part[me * rows : (me + 1) * rows] for part in inputs])
        out = torch.full_like(x, 1)
        assert way("alltoall", x, out=out) is out
        same(out, expected)
        same(x, inputs[me])
        assert way("alltoall", x) is x
        same(x, expected)


def sendreceive_around_the_ring(mpi, dtype, way):
    size, me = mpi.size(), mpi.rank()
    for count in way.sizes:
        for _, x in way.layouts(values(dtype, me, count)):
            assert way("sendreceive", x, (me - 1) % size, (me + 1) % size) is x
            same(x, values(dtype, (me - 1) % size, count).view(x.shape))


REDUCTIONS = {"allreduce": allreduce, "reduce": reduce, "reduce_scatter": reduce_scatter}
MOVES = {
    "broadcast": broadcast,
    "allgather": allgather,
    "gather": gather,
    "scatter": scatter,
    "alltoall": alltoall,
    "sendreceive": sendreceive_around_the_ring,
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("verb", REDUCTIONS)
def test_reductions(mpi, verb, family, way):
    way.skip_unless_available(verb)
    with way.naming_the_case():
        for dtype in FAMILIES[family]:
            for op in way.ops(dtype):
                REDUCTIONS[verb](mpi, dtype, op, way)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("verb", MOVES)
def test_moves(mpi, verb, family, way):
    way.skip_unless_available(verb)
    with way.naming_the_case():
        for dtype in FAMILIES[family]:
            MOVES[verb](mpi, dtype, way)


def test_a_failure_names_its_case(mpi, gpu_flavours_on_the_host):
    way = Way(mpi, "ring asynchronous")
    expected = rf"allreduce\(float16 \(2, 3\) transposed, op='max'\), ring asynchronous, on rank {mpi.rank()} of .*: it"

    def fail():
        with way.naming_the_case():
            way("allreduce", torch.ones(3, 2, dtype=torch.float16).t(), op="max")
            raise ValueError("it is wrong")

    with pytest.raises(AssertionError, match=expected):
        fail()


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_send_and_recv(mpi, dtype):
    size, me = mpi.size(), mpi.rank()
    for count in SIZES:
        for _, x in Way(mpi, "blocking").layouts(values(dtype, me, count)):
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


def call(mpi, form, verb, *args, **kwargs):
    return Way(mpi, form)(verb, *args, **kwargs)


@pytest.mark.parametrize("forced", [*FORCED, *SYMMETRIC])
def test_flavours_in_the_communication_thread(mpi, forced, gpu_flavours_on_the_host):
    """Blocking and asynchronous calls take turns, so that the two threads' memory would show if it were one."""
    background, direct = Way(mpi, f"{forced} asynchronous"), Way(mpi, forced)
    background.skip_unless_available("allreduce")
    dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.bool]
    for turn, root in enumerate(range(mpi.size()) if mpi.size() <= 3 else (0, mpi.size() - 1)):
        for dtype in dtypes if mpi.size() <= 3 else dtypes[turn::2]:
            inputs = [values(dtype, rank, 600_001) for rank in range(mpi.size())]
            background.used = 0  # the three must not overlap
            x, y, z = (background.place(inputs[mpi.rank()]) for _ in range(3))
            handles = [mpi.allreduce_async(x, flavour=background.flavour)]
            handles += [mpi.broadcast_async(y, root, flavour=background.flavour)]
            same(direct("allreduce", z), reference(dtype, "sum", inputs), "sum")
            mpi.wait_all(handles)
            same(x, reference(dtype, "sum", inputs), "sum")
            same(y, inputs[root])


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


@pytest.mark.parametrize("dtype", SIGNED + UNSIGNED, ids=name)
@pytest.mark.parametrize("form", FORMS)
def test_sums_wrap_around(mpi, form, dtype):
    """In every order, as in torch: 100 + 100 - 100 is 100 in int8, though 100 + 100 does not fit."""
    rank, size, count, kind = mpi.rank(), mpi.size(), 1000, np.dtype(name(dtype))
    j = np.arange(count * size)
    arrays = [((j + r) % 5).astype(kind) * (np.iinfo(kind).max // 3) + j.astype(kind) for r in range(size)]
    expected, mine = torch.from_numpy(np.add.reduce(arrays, dtype=kind)), torch.from_numpy(arrays[rank])
    assert torch.equal(call(mpi, form, "allreduce", mine.clone()), expected)
    assert torch.equal(call(mpi, form, "reduce_scatter", mine), expected[count * rank : count * (rank + 1)])
    reduced = call(mpi, form, "reduce", mine.clone(), size - 1)
    assert torch.equal(reduced, expected if rank == size - 1 else mine)


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


@pytest.mark.parametrize("form", FORMS)
def test_alone_with_one_memory_for_both(mpi, form):
    """A rank that is alone may give its tensor as ``out`` too, which MPI forbids."""
    x, expected = torch.arange(1000) + mpi.rank(), torch.arange(1000) + mpi.rank()
    with mpi.split(mpi.rank()) as alone:
        for verb in ("scatter", "reduce_scatter", "alltoall", "allreduce", "reduce", "allgather", "gather"):
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

    def called(verb, *args, **kwargs):
        if form == "asynchronous":
            return getattr(mpi, f"{verb}_async")(*args, **kwargs).wait()
        return getattr(mpi, verb)(*args, **kwargs)

    weight = torch.ones(4, requires_grad=True)
    for verb, args in (("allreduce", ()), ("broadcast", (0,)), ("sendreceive", (mpi.rank(), mpi.rank()))):
        for view in (lambda x: x, lambda x: x[1:3], lambda x: x.reshape(2, 2).t()):
            x = view(weight * 2)
            result = called(verb, x, *args)
            with pytest.raises(RuntimeError, match=rf"that {verb} has overwritten.*nn\.functional\.{verb}"):
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
    with pytest.raises(ValueError, match=r"part of autograd's graph; pass x.detach\(\)"):
        called("allreduce", (weight * 2).unbind()[0])


def test_long_messages_travel_in_pieces(mpi, monkeypatch):
    """With messages of at most 1000 bytes every verb takes the path of tensors beyond 2^31 bytes."""

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


@pytest.mark.parametrize("flavour", ["mpi", "shared", "ring", "gloo"])
def test_true_is_any_byte_but_zero(request, mpi, flavour):
    """As in a view of a mask of bytes; torch takes each for True."""
    if flavour == "shared":
        request.getfixturevalue("one_node")
    rank, size = mpi.rank(), mpi.size()
    make = torch.tensor([1 << rank % 8, 255 if rank % 2 else 1, 0, rank], dtype=torch.uint8).view(torch.bool)
    expected = {
        "min": [True, True, False, size == 1 and rank > 0],
        "bxor": [size % 2 == 1, size % 2 == 1, False, (size - 1) % 2 == 1],
        "max": [True, True, False, size > 1],
    }
    for op, right in expected.items():
        assert mpi.allreduce(make.clone(), op=op, flavour=flavour).ne(0).tolist() == right, op
    parts = mpi.reduce_scatter(make.repeat(size), op="land", flavour=flavour)
    assert parts.tolist() == expected["min"]
