"""Flavour nccl: what it hands to NCCL, and when it refuses. Values go through gloo; through NCCL where it can run."""

import types
from pathlib import Path

import pytest
import torch
from support import jobs
from test_verbs import CASES, DTYPES, name, reference, same, values
from torch import Tensor, distributed

from torchmpi_py.collectives.flavour import exchange_sizes
from torchmpi_py.collectives.flavours import torch_group
from torchmpi_py.collectives.flavours.torch_group import Gloo, GlooGroup, Nccl, NcclGroup
from torchmpi_py.collectives.reductions import kernel
from torchmpi_py.core.channels import DIRECT, Channel, Place
from torchmpi_py.core.tensors import ops_of
from torchmpi_py.errors import CommunicatorError
from torchmpi_py.memory import gpus

pytestmark = pytest.mark.timeout(240)

KNOWN_DTYPES = {torch.int8, torch.uint8, torch.int32, torch.int64, torch.float32, torch.float64}
KNOWN_OPS = ("SUM", "PRODUCT", "MIN", "MAX")


class StandIn(GlooGroup):
    """Gloo in the place of NCCL: takes what NCCL takes, and nothing else."""

    def run(self, call, *arguments, **fields):
        for x in tensors(arguments):
            assert x.dtype in KNOWN_DTYPES, call
            assert x.dim() == 1, call
            assert x.is_contiguous(), call
            assert x.numel() or call == "alltoall_base", f"{call} of an empty tensor"
        if "reduceOp" in fields:
            assert fields["reduceOp"] in [getattr(distributed.ReduceOp, known) for known in KNOWN_OPS]
        if call == "_reduce_scatter_base":  # not in every gloo
            out, x = arguments
            total = x.clone()
            super().run("allreduce", [total], **fields)
            out.copy_(total.view(self._mpi.size, -1)[self._mpi.rank])
        else:
            super().run(call, *arguments, **fields)


class NcclByGloo(Nccl):
    """All that nccl decides, on CPU tensors."""

    devices = frozenset({"cpu"})
    group = StandIn


def tensors(arguments):
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, list):
            yield from tensors(argument)


@pytest.fixture(scope="module")
def channel(mpi):
    with mpi.split(0) as comm:
        yield comm.direct


@pytest.mark.mpi
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_reductions(channel, dtype):
    size, me, nccl = channel.size, channel.rank, NcclByGloo()
    cases = [(op, rows, (turn + rows) % size) for turn, op in enumerate(ops_of(dtype)) for rows in (turn % 2, 501)]
    for op, rows, root in cases:
        inputs = [values(dtype, rank, size * rows, op) for rank in range(size)]
        expected, x, untouched = reference(dtype, op, inputs), inputs[me].clone(), torch.full_like(inputs[me], 1)
        nccl.allreduce(channel, x, out := untouched.clone(), op)
        same(out, expected, op)
        nccl.reduce(channel, x, out := untouched.clone(), op, root)
        same(out, expected if me == root else untouched, op)
        nccl.reduce_scatter(channel, x, out := untouched[:rows].clone(), op)
        same(out, expected[me * rows : (me + 1) * rows], op)
        same(x, inputs[me])
        nccl.reduce(channel, x, x, op, root)
        same(x, expected if me == root else inputs[me], op)
        nccl.allreduce(channel, x := inputs[me].clone(), x, op)
        same(x, expected, op)


@pytest.mark.mpi
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_moves(channel, dtype):
    size, me, nccl = channel.size, channel.rank, NcclByGloo()
    for turn, rows in enumerate((0, 1, 501), DTYPES.index(dtype)):
        inputs, root = [values(dtype, rank, size * rows) for rank in range(size)], turn % size
        mine = slice(me * rows, (me + 1) * rows)
        nccl.alltoall(channel, inputs[me], out := torch.full_like(inputs[me], 1))
        same(out, torch.cat([x[mine] for x in inputs]))
        nccl.broadcast(channel, x := inputs[me].clone(), root)
        same(x, inputs[root])
        nccl.scatter(channel, inputs[me], out := torch.full_like(inputs[me][mine], 1), root)
        same(out, inputs[root][mine])
        for parts in (inputs, [x[: rows * rank] for rank, x in enumerate(inputs)]):
            expected, sizes = torch.cat(parts), exchange_sizes(channel.mpi, parts[me], None)
            nccl.allgather(channel, parts[me], out := torch.full_like(expected, 1), sizes)
            same(out, expected)
            nccl.gather(channel, parts[me], out := torch.full_like(expected, 1) if me == root else None, root, sizes)
            if out is not None:
                same(out, expected)


def test_what_is_gathered():
    """Bitwise ops, those on truth values, and products of complex numbers; gloo lacks only the last."""
    for dtype, op in CASES:
        is_product = dtype.is_complex and op == "prod"
        is_bitwise = op in ("band", "bor", "bxor", "land", "lor") or dtype == torch.bool
        assert Nccl()._knows(kernel(dtype, op)) == (not is_product and not is_bitwise), (dtype, op)
        assert Gloo()._knows(kernel(dtype, op)) == (not is_product), (dtype, op)


def test_what_is_missing(monkeypatch):
    """What is asked first is missing first; then the next one is."""
    checks = [
        (distributed, "is_available", False, True, "without torch.distributed"),
        (distributed, "is_nccl_available", False, True, "without NCCL"),
        (torch.cuda, "is_available", False, True, "sees no CUDA device"),
        (gpus, "table", None, {}, "start(with_cuda=True)"),
    ]
    for owner, check, missing, there, words in checks:
        monkeypatch.setattr(owner, check, lambda missing=missing: missing)
        assert words in Nccl().missing("cuda")
        monkeypatch.setattr(owner, check, lambda there=there: there)
    assert Nccl().missing("cuda") == ""


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        ("ABCD", ""),
        ("ABAC", "ranks 0 and 2 share GPU-A; NCCL needs one GPU a rank"),
        ("ABBB", "ranks 1, 2 and 3 share GPU-B; "),
    ],
)
def test_who_shares_a_gpu(monkeypatch, names, reason):
    places = [Place(0, 0), Place(0, 1), Place(2, 0), Place(2, 1)]
    elsewhere = {Place(4, 0): "GPU-A"}  # a rank of the world that is not in this communicator
    table = {place: f"GPU-{letter}" for place, letter in zip(places, names, strict=True)} | elsewhere
    monkeypatch.setattr(gpus, "table", lambda: table)
    channel = Channel(types.SimpleNamespace(rank=1, size=len(places)), places, DIRECT)
    for comm in (channel, types.SimpleNamespace(direct=channel)):
        told = Nccl().refuses(comm)
        assert told.startswith(reason)
        assert bool(told) == bool(reason)


@pytest.mark.mpi
def test_availability(mpi, monkeypatch):
    def statuses(device):
        return {row.status for row in mpi.availability() if (row.flavour, row.device) == ("nccl", device)}

    assert statuses("cpu") == {"unimplemented", "unavailable: serves cuda tensors only"}
    if not torch.cuda.is_available():
        assert any(status.startswith("unavailable: this torch") for status in statuses("cuda"))
    monkeypatch.setattr(Nccl, "_lacks", lambda self: "")
    places = mpi.communicator().direct.places
    monkeypatch.setattr(gpus, "table", lambda: {place: f"GPU-{place}" for place in places})
    assert statuses("cuda") == {"unimplemented", "available"}


class Library:
    """What NcclGroup uses of ProcessGroupNCCL."""

    Options = types.SimpleNamespace
    log: list = []

    def __init__(self, store, rank, size, options):
        self.log.append(f"made by {rank} of {size}")
        assert options._timeout.total_seconds() == 1800

    def allreduce(self, tensors, options):
        """Newer versions return nothing when they use the current stream."""
        self.log.append("allreduce")
        assert options.reduceOp == distributed.ReduceOp.MAX
        assert not getattr(options, "asyncOp", False)

    def broadcast(self, tensors, options):
        self.log.append("broadcast")
        return types.SimpleNamespace(wait=lambda: self.log.append("wait"))

    def reduce(self, tensors, options):
        raise RuntimeError("unhandled system error")

    def shutdown(self):
        self.log.append("shutdown")


@pytest.mark.mpi
def test_a_group_from_its_making_to_its_end(mpi, monkeypatch):
    monkeypatch.setattr(distributed, "ProcessGroupNCCL", Library, raising=False)
    monkeypatch.setattr(torch_group.torch.cuda, "synchronize", lambda: Library.log.append("synchronize"))
    monkeypatch.setattr(Library, "log", [])
    with mpi.split(0) as comm:
        x = torch.ones(3)
        Nccl().allreduce(comm.direct, x, x, "max")
        Nccl().broadcast(comm.direct, x, 0)
        with pytest.raises(CommunicatorError, match="nccl's reduce failed: unhandled system error"):
            Nccl().reduce(comm.direct, x, x, "sum", 0)
        assert Library.log == [f"made by {comm.rank} of {comm.size}", "allreduce", "broadcast", "wait"]
    assert Library.log[4:] == ["synchronize", "shutdown"]


@pytest.mark.mpi
def test_a_group_that_cannot_be_made(mpi, monkeypatch):
    def factory(store, rank, size, options):
        if rank == size - 1:
            raise ValueError("no GPUs found")

    factory.Options = types.SimpleNamespace
    monkeypatch.setattr(distributed, "ProcessGroupNCCL", factory, raising=False)
    with (
        mpi.split(0) as comm,
        pytest.raises(CommunicatorError, match=r"flavour nccl: .*rank \d+: no GPUs found.*NCCL_DEBUG=INFO"),
    ):
        NcclGroup(comm.direct)


PROGRAM = """
import sys
import torch
import torchmpi_py as mpi
sys.path.insert(0, sys.argv[1])
from test_verbs import CASES, DTYPES, reference, same, values

mpi.start(with_cuda=True)
size, me, device = mpi.size(), mpi.rank(), mpi.device()
statuses = {row.status for row in mpi.availability() if (row.flavour, row.device) == ("nccl", device.type)}
assert statuses == {"unimplemented", "available"}, statuses

def call(form, verb, *args, **kwargs):
    got = getattr(mpi, verb + form)(*args, flavour="nccl", **kwargs)
    got = got.wait() if form else got
    return None if got is None else got.cpu()

for turn, (dtype, op) in enumerate(CASES):
    for rows in (0, 1, 5003):
        form = ("", "_async")[(turn + rows) % 2]
        inputs = [values(dtype, rank, size * rows, op) for rank in range(size)]
        expected, x, mine = reference(dtype, op, inputs), inputs[me].to(device), slice(me * rows, (me + 1) * rows)
        same(call(form, "allreduce", x, out=torch.empty_like(x), op=op), expected, op)
        same(call(form, "allreduce", x.clone(), op=op), expected, op)
        same(call(form, "reduce", x.clone(), size - 1, op=op), expected if me == size - 1 else inputs[me], op)
        same(call(form, "reduce_scatter", x, op=op), expected[mine], op)

for turn, dtype in enumerate(DTYPES):
    for rows in (0, 1, 5003):
        form = ("", "_async")[(turn + rows) % 2]
        inputs = [values(dtype, rank, size * rows) for rank in range(size)]
        x, mine = inputs[me].to(device), slice(me * rows, (me + 1) * rows)
        same(call(form, "broadcast", x.clone(), size - 1), inputs[-1])
        same(call(form, "scatter", x, size - 1), inputs[-1][mine])
        same(call(form, "alltoall", x.clone()), torch.cat([part[mine] for part in inputs]))
        for parts in (inputs, [part[: rows * rank] for rank, part in enumerate(inputs)]):
            same(call(form, "allgather", parts[me].to(device)), torch.cat(parts))
            got = call(form, "gather", parts[me].to(device), size - 1)
            assert (got is None) == (me != size - 1)
            if got is not None:
                same(got, torch.cat(parts))

with torch.cuda.stream(torch.cuda.Stream()):  # results are ordered on the stream of the call
    for form in ("", "_async"):
        x = torch.zeros(1 << 20, device=device)
        torch.cuda._sleep(200_000_000)
        x += me + 1
        assert call(form, "allreduce", x).eq(size * (size + 1) / 2).all()
with mpi.split(me % 2) as comm:
    assert mpi.allreduce(torch.ones(3, device=device), comm=comm, flavour="nccl").tolist() == [comm.size] * 3
mpi.stop()
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_nccl_itself(tmp_path, ranks):
    if not (distributed.is_available() and distributed.is_nccl_available()):
        pytest.skip("this torch has no NCCL")
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"NCCL needs one GPU a rank; there are {torch.cuda.device_count()}, for {ranks} ranks")
    done = jobs.torchmpirun("-n", ranks, "--timeout", "110", jobs.write(tmp_path, PROGRAM), Path(__file__).parent)
    assert done.returncode == 0, done.stdout + done.stderr
