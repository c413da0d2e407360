"""Every verb in every flavour and form, with every dtype and op, on any number of ranks.

Element j on rank r holds a value that depends on both, so that a swapped chunk shows. Every rank computes what every
other one holds, so the expected result needs no communication. Each flavour meets each verb with each dtype, and each
dtype with each op in one of the three reductions (in all of them with ``--all``); root, size, layout and ``out`` change
from one call to the next. A failure names the call, its flavour and rank. One test, on 2 ranks, in seconds::

    torchmpirun -n 2 -m pytest -q --only-mpi "tests/collectives/test_verbs.py::test_reductions[shared-allreduce]"

The ways to call a verb come from the registry of flavours: a new flavour is tested without a change here.
"""

import contextlib
import functools
import inspect

import numpy as np
import pytest
import torch
from torch import distributed
from torch.utils._pytree import tree_leaves

from torchmpi_py.collectives import registry
from torchmpi_py.collectives.flavours.torch_group import Gloo
from torchmpi_py.core import config
from torchmpi_py.core.tensors import ops_of

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(240)]

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
COMPLEX = [torch.complex64, torch.complex128, torch.complex32]
INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64]
DTYPES = [*FLOATS, *COMPLEX, *INTEGERS, torch.bool]
CASES = [(dtype, op) for dtype in DTYPES for op in ops_of(dtype)]
SMALL, LARGE = (0, 1, 2, 7), (1000, 20011)  # 20011: beyond what is posted natively, for most dtypes
FORMS = ["blocking", "asynchronous"]  # in the flavour that the selector takes: for these sizes the first one, mpi
# Flavours for GPU tensors that can be told their devices are carried out on the host: all but streams, events and IPC
# handles is the same.
GPU_FLAVOURS = [
    flavour.name
    for flavour in registry.FLAVOURS
    if "cpu" not in flavour.devices and "devices" in inspect.signature(type(flavour)).parameters
]
# nccl decides what it hands to a library: here to gloo.
FORCED = [each.name for each in registry.FLAVOURS[1:] if "cpu" in each.devices or each.name in (*GPU_FLAVOURS, "nccl")]
# On tensors from mpi.symmetric_empty: the flavours whose ranks exchange headers work on these in place.
SYMMETRIC = [f"{name} symmetric" for name in FORCED if registry.BY_NAME[name].exchanges_headers]
WAYS = [*FORMS, *FORCED, *SYMMETRIC]
UFUNCS = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}
UFUNCS |= {"band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor}
UFUNCS |= {"land": np.logical_and, "lor": np.logical_or}
OF_BOOL = {"bxor": np.logical_xor} | dict.fromkeys(("sum", "max", "bor", "lor"), np.logical_or)
OF_BOOL |= dict.fromkeys(("prod", "min", "band", "land"), np.logical_and)


def name(value):
    return str(value).removeprefix("torch.")


def values(dtype, rank, count, op="sum"):
    """What a rank holds. Floats are small enough for exact results; integers have all bits, and their sums overflow."""
    j = torch.arange(count)
    whole = (j * 7 + j // 11 + rank * 3) % 13 - 6
    if dtype == torch.bool:
        return whole % 3 == 0
    if op == "prod":
        whole = (j + rank) % 2 + 1
    if dtype.is_complex:
        return torch.complex(whole.double(), (whole.double() + rank) % 3).to(dtype)
    if dtype.is_floating_point:
        return whole.double().to(dtype)
    if op in ("land", "lor"):
        return (whole // 5).to(dtype)
    return (whole if op == "prod" else whole * (torch.iinfo(dtype).max // 7 | 1)).to(dtype)


def reference(dtype, op, tensors):
    """The reduction in a wide type, in rank order, rounded once; of integers the lowest bits, as in torch."""
    if dtype == torch.bool or dtype in INTEGERS:
        stack = np.stack([x.numpy() for x in tensors])
        ufunc = OF_BOOL[op] if dtype == torch.bool else UFUNCS[op]
        return torch.from_numpy(ufunc.reduce(stack).astype(stack.dtype))
    stack = torch.stack([x.to(torch.complex128 if dtype.is_complex else torch.float64) for x in tensors])
    if op == "avg":
        return (stack.sum(0) / len(tensors)).to(dtype)
    return {"sum": torch.sum, "prod": torch.prod, "min": torch.amin, "max": torch.amax}[op](stack, 0).to(dtype)


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
    if np.array_equal(bits(got), bits(expected)):
        return
    assert op is not None, "other bits"
    assert got.dtype.is_floating_point or got.dtype.is_complex, (got, expected)
    wide = torch.complex128 if got.dtype.is_complex else torch.float64
    tolerance = torch.finfo(got.dtype).eps if op == "avg" else 0
    torch.testing.assert_close(got.to(wide), expected.to(wide), rtol=tolerance, atol=0)


def bits(x):
    return x.cpu().contiguous().reshape(-1).view(torch.uint8).numpy() if x.numel() else np.empty(0)


class Way:
    """How a verb is called: the flavour forced, if any; blocking or not; on which tensors; on a communicator of all.

    ``text``: the name of a flavour, "symmetric", "asynchronous" or several of these. Forced flavours see flat tensors
    only, so they get no others.
    """

    def __init__(self, mpi, text, device="cpu", comm=None):
        self.mpi, self.text, self.device, self.comm = mpi, text, device, comm
        self.rank, self.size = mpi.rank(), mpi.size()
        words = text.split()
        self.flavour = next((word for word in words if word in registry.BY_NAME), None)
        self.is_asynchronous = "asynchronous" in words
        self.last_call = None
        self.pool = mpi.symmetric_empty(16 << 20, dtype=torch.uint8, device=device) if "symmetric" in words else None
        self.used = 0
        self.wanted_ops = None  # all
        self.number = None  # of a way that takes a third of all dtypes and ops in each reduction

    def skip_unless_available(self, *verbs):
        for row in self.mpi.availability() if self.flavour else ():
            is_ours = {row.flavour, row.device} == {self.flavour, self.device} and row.verb in verbs
            if is_ours and row.status != "available":
                pytest.skip(f"{self.flavour}: {row.status}")

    def takes(self, dtype, op, call):
        """Whether this way is to reduce the dtype with the op in this verb."""
        if self.number is None:
            return self.wanted_ops is None or op in self.wanted_ops
        place = DTYPES.index(dtype) + ops_of(dtype).index(op)
        return (place + REDUCTIONS.index(call) + self.number) % 3 == 0

    def __call__(self, verb, *args, **kwargs):
        """Call a verb, blocking or not."""
        self.last_call = verb, *args, *kwargs.values()
        kwargs = {"comm": self.comm, "flavour": self.flavour} | kwargs
        if not self.is_asynchronous:
            return getattr(self.mpi, verb)(*args, **kwargs)
        handle = getattr(self.mpi, f"{verb}_async")(*args, **kwargs)
        result = handle.wait()
        assert handle.wait() is result
        return result

    @contextlib.contextmanager
    def naming_the_case(self):
        """In this block a failure becomes an AssertionError that names the last call, flavour and rank."""
        try:
            yield
        except Exception as error:
            verb, *given = self.last_call or ("no call",)
            given = [(x.dtype, x.shape, x.stride()) if isinstance(x, torch.Tensor) else x for x in given]
            case = f"{verb}{given}, {self.text}, on rank {self.rank} of {self.size}"
            raise AssertionError(f"{case}: {error}") from error

    def place(self, x):
        """A copy of ``x``, in symmetric memory if that is the way."""
        if self.pool is None:
            return x.clone() if self.device == "cpu" else x.to(self.device)
        begin = self.used = self.used if self.used + x.nbytes <= self.pool.numel() else 0
        self.used += -(-x.nbytes // 64) * 64
        placed = self.pool[begin : begin + x.nbytes].view(x.dtype).view(x.shape)
        return placed.copy_(x)

    def laid_out(self, x, turn):
        """The same values in one of the layouts that a user may pass."""
        made = [self.place(x)]
        if self.flavour is None and x.numel() > 1:
            strided = torch.zeros(2 * x.numel(), dtype=x.dtype)
            strided[::2] = x
            made += [strided.to(self.device)[::2], torch.cat([x[:1], x]).to(self.device)[1:]]
        if self.flavour is None and x.numel() % 4 == 0:
            made.append(x.view(4, -1).clone().t().contiguous().to(self.device).t())
        if self.flavour is None and x.numel() == 1:
            made.append(x.clone().reshape(()).to(self.device))
        return made[turn % len(made)]


class NcclByGloo:
    """Gloo in the place of NCCL: takes what NCCL takes, and nothing else."""

    dtypes = frozenset({torch.int8, torch.uint8, torch.int32, torch.int64, torch.float32, torch.float64})
    ops = [getattr(distributed.ReduceOp, known) for known in ("SUM", "PRODUCT", "MIN", "MAX")]

    def __init__(self, store, channel):
        self.group, self.rank, self.size = Gloo().connect(store, channel), channel.rank, channel.size

    def __getattr__(self, call):
        return lambda *arguments: self.run(call, *arguments)

    def run(self, call, *arguments):
        for x in filter(torch.is_tensor, tree_leaves(arguments)):
            assert x.dtype in self.dtypes, call
            assert x.dim() == 1, call
            assert x.is_contiguous(), call
            assert x.numel() or call == "alltoall_base", f"{call} of an empty tensor"
        assert any(getattr(arguments[-1], "reduceOp", known) == known for known in self.ops)
        if call != "_reduce_scatter_base":
            return getattr(self.group, call)(*arguments)
        out, x, given = arguments  # not in every gloo
        total, options = x.clone(), distributed.AllreduceOptions()
        options.reduceOp = given.reduceOp
        self.group.allreduce([total], options).wait()
        out.copy_(total.view(self.size, -1)[self.rank])
        return None


@pytest.fixture(scope="module")
def gpu_flavours_on_the_host():
    """They serve CPU tensors too."""
    with pytest.MonkeyPatch.context() as patch:
        for flavour in (*GPU_FLAVOURS, "nccl"):
            patch.setattr(registry.BY_NAME[flavour], "devices", frozenset({"cpu", "cuda"}))
        patch.setattr(registry.BY_NAME["nccl"], "connect", NcclByGloo)
        for name in ("missing", "refuses", "close"):
            patch.setattr(registry.BY_NAME["nccl"], name, lambda *_: "")
        yield patch


@pytest.fixture(scope="module", params=WAYS)
def way(request, mpi, gpu_flavours_on_the_host):
    """Each way in turn; hierarchical combines the odd and the even ranks."""
    made = Way(mpi, request.param)
    if request.param != "blocking" and not request.config.getoption("--all"):
        made.number = WAYS.index(request.param)
    if request.param != "hierarchical":
        yield made
        return
    level = mpi.push_communicator(mpi.rank() % 2)
    mpi.set_collective_span(0, level)
    yield made
    mpi.set_collective_span(0, 1)


def sizes_of(turn):
    """(turn, root, elements) of two calls: a small and a large one."""
    return [(turn // 4, SMALL[turn % 4]), (turn // 4 + 1, LARGE[turn % 2])]


def allreduce(way, dtype, op, turn):
    for step, count in sizes_of(turn):
        inputs, expected = reduction(dtype, op, count, way.size)
        x = way.laid_out(inputs[way.rank], step)
        before = x.clone()
        if (turn + step) % 2 or count == LARGE[1]:
            out = way.place(torch.full_like(x, 1))
            assert way("allreduce", x, out=out, op=op) is out
            same(out, expected.view(x.shape), op)
            same(x, before)
        assert way("allreduce", x, op=op) is x
        same(x, expected.view(x.shape), op)
    if op == "avg":
        way.mpi.check_with_allreduce(x, f"average of {dtype}")


def reduce(way, dtype, op, turn):
    for step, count in sizes_of(turn):
        inputs, expected = reduction(dtype, op, count, way.size)
        root = step % way.size
        x = way.laid_out(inputs[way.rank], step)
        before = x.clone()
        if (turn + step) % 2:
            out = torch.full_like(x, 1)
            way("reduce", x, root, out=out, op=op)
            same(out, expected.view(x.shape) if way.rank == root else torch.full_like(out, 1), op)
            same(x, before)
        else:
            assert way("reduce", x, root, op=op) is x
            same(x, expected.view(x.shape) if way.rank == root else before, op)


def reduce_scatter(way, dtype, op, turn):
    size, me = way.size, way.rank
    for step, count in sizes_of(turn):
        rows = count // 5 if count > 7 else count
        inputs, reduced = reduction(dtype, op, size * rows * 2, size)
        given = inputs[me].view(size * rows, 2)
        expected = reduced.view(size * rows, 2)[me * rows : (me + 1) * rows]
        x = way.place(given)
        out = torch.empty(2, rows, dtype=dtype, device=x.device).t() if (turn + step) % 2 else None
        got = way("reduce_scatter", x, op=op, out=out)
        assert out is None or got is out
        same(got, expected, op)
        same(x, given)


def broadcast(way, dtype, turn):
    for step, count in enumerate((*SMALL, *LARGE), turn):
        root = step % way.size
        x = way.laid_out(values(dtype, way.rank, count), step)
        assert way("broadcast", x, root) is x
        same(x, values(dtype, root, count).view(x.shape))


def rows_of_ranks(size):
    return [2] * size, range(size), [0] * size, range(3000, 3000 + 7 * size, 7)


def allgather(way, dtype, turn):
    size, me = way.size, way.rank
    for step, rows in enumerate(rows_of_ranks(size), turn):
        parts = [values(dtype, rank, rows[rank] * 3).view(rows[rank], 3) for rank in range(size)]
        expected, x = torch.cat(parts), way.place(parts[me])
        if step % 2:
            out = torch.full_like(expected, 1, device=x.device)
            assert way("allgather", x, out=out) is out
            same(out, expected)
        else:
            same(way("allgather", x if way.flavour else x.t().contiguous().t()), expected)
    single = values(dtype, me, 1).reshape(()).to(way.device)
    same(way("allgather", single), torch.cat([values(dtype, rank, 1) for rank in range(size)]))


def gather(way, dtype, turn):
    size, me = way.size, way.rank
    for step, rows in enumerate(rows_of_ranks(size), turn):
        parts = [values(dtype, rank, rows[rank] * 3).view(rows[rank], 3) for rank in range(size)]
        root, expected, x = step % size, torch.cat(parts), way.place(parts[me])
        untouched = torch.full_like(expected, 1)
        out = untouched.clone().to(x.device) if step % 2 else None
        got = way("gather", x, root, out=out)
        assert got is None if me != root else out is None or got is out
        for result in (got, out):
            if result is not None:
                same(result, expected if me == root else untouched)


def scatter(way, dtype, turn):
    size, me = way.size, way.rank
    for step, rows in enumerate((0, 1, 3000), turn):
        root = step % size
        inputs = [values(dtype, rank, size * rows * 2).view(size * rows, 2) for rank in range(size)]
        x = way.place(inputs[me])
        out = torch.full_like(x[:rows], 1) if step % 2 else None
        got = way("scatter", x, root, out=out)
        assert out is None or got is out
        same(got, inputs[root][me * rows : (me + 1) * rows])


def alltoall(way, dtype, turn):
    size, me = way.size, way.rank
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


def sendreceive(way, dtype, turn):
    for step, count in enumerate((*SMALL, *LARGE), turn):
        before, after = (way.rank - 1) % way.size, (way.rank + 1) % way.size
        x = way.laid_out(values(dtype, way.rank, count), step)
        assert way("sendreceive", x, before, after) is x
        same(x, values(dtype, before, count).view(x.shape))


REDUCTIONS = [allreduce, reduce, reduce_scatter]
MOVES = [broadcast, allgather, gather, scatter, alltoall, sendreceive]


@pytest.mark.parametrize("call", REDUCTIONS, ids=lambda call: call.__name__)
def test_reductions(call, way):
    way.skip_unless_available(call.__name__)
    with way.naming_the_case():
        for turn, (dtype, op) in enumerate(CASES):
            if way.takes(dtype, op, call):
                call(way, dtype, op, turn)


@pytest.mark.parametrize("call", MOVES, ids=lambda call: call.__name__)
def test_moves(call, way):
    way.skip_unless_available(call.__name__)
    with way.naming_the_case():
        for turn, dtype in enumerate(DTYPES):
            call(way, dtype, turn)


def send_and_recv(way, dtype, turn):
    before, after = (way.rank - 1) % way.size, (way.rank + 1) % way.size
    for step, count in enumerate((*SMALL, *LARGE)[turn % 2 :: 2], turn):
        x = way.laid_out(values(dtype, way.rank, count), step)
        got = torch.zeros_like(x)
        receiving = way.mpi.recv_async(got, before)  # launched first on all ranks: it must not block the send
        way.mpi.wait_all([receiving, way.mpi.send_async(x, after)])
        same(got, values(dtype, before, count).view(x.shape))


def test_send_and_recv(mpi):
    for turn, dtype in enumerate(DTYPES):
        send_and_recv(Way(mpi, "blocking"), dtype, turn)
        if mpi.rank() == 0 and mpi.size() > 1:
            mpi.send(values(dtype, 0, 50000), 1)
        if mpi.rank() == 1:
            got = torch.empty(50000, dtype=dtype)
            assert mpi.recv(got, 0) is got
            same(got, values(dtype, 0, 50000))


@pytest.mark.parametrize("form", FORMS)
def test_long_messages_travel_in_pieces(mpi, monkeypatch, form):
    """With messages of at most 9001 bytes every verb takes the path of tensors beyond 2^31 bytes."""
    monkeypatch.setattr(config, "current", config.Tuning(native_async_bytes=8, message_bytes=9001, wire_bytes=6001))
    way = Way(mpi, form)
    with way.naming_the_case():
        dtypes = (torch.float32, torch.bfloat16) if form == "blocking" else (torch.uint8, torch.complex128)
        for turn, dtype in enumerate(dtypes):
            for number, reduced in enumerate(REDUCTIONS, turn):
                reduced(way, dtype, "sum", number)
            for number, moved in enumerate([*MOVES, send_and_recv], turn):
                moved(way, dtype, number)


@pytest.mark.parametrize("forced", [way for way in (*FORCED, *SYMMETRIC) if way != "nccl"])  # which is gloo here
def test_flavours_in_the_communication_thread(mpi, forced, gpu_flavours_on_the_host):
    """Blocking and asynchronous calls take turns, so that the two threads' memory would show if it were one."""
    background, direct = Way(mpi, f"{forced} asynchronous"), Way(mpi, forced)
    background.skip_unless_available("allreduce", "broadcast")
    for root, dtype in ((0, torch.float32), (mpi.size() - 1, torch.bfloat16), (0, torch.int64), (0, torch.bool)):
        count = 600_001 if dtype == torch.float32 else 20_011
        inputs, total = reduction(dtype, "sum", count, mpi.size())
        background.used = 0  # the three must not overlap
        x, y, z = (background.place(inputs[mpi.rank()]) for _ in range(3))
        name = background.flavour
        handles = [mpi.allreduce_async(x, flavour=name), mpi.broadcast_async(y, root, flavour=name)]
        same(direct("allreduce", z), total, "sum")
        mpi.wait_all(handles)
        same(x, total, "sum")
        same(y, inputs[root])
