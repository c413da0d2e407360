"""Flavour hierarchical: on two nodes, as MPICH can present one host; and how much goes between the groups."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch

from torchmpi_py.collectives import registry
from torchmpi_py.collectives.flavours.ring import Ring
from torchmpi_py.core import config
from torchmpi_py.launch import mpirun

pytestmark = pytest.mark.timeout(240)

PROGRAM = """
import torch, torchmpi_py as mpi
from torchmpi_py.memory import symmetric
from torchmpi_py.collectives import registry

mpi.start()
size, me = mpi.size(), mpi.rank()
assert (size, mpi.num_nodes(), mpi.local_size()) == (4, 2, 2)
status = {(row.verb, row.flavour): row.status for row in mpi.availability() if row.device == "cpu"}
assert status["allreduce", "shared"] == "unavailable: the communicator spreads over 2 nodes", status
assert {status[verb, "hierarchical"] for verb in ("allreduce", "broadcast", "reduce", "allgather")} == {"available"}
with mpi.at(1) as node:
    assert all(row.status in ("available", "unimplemented")
               for row in mpi.availability() if (row.flavour, row.device) == ("shared", "cpu"))
    neighbours = mpi.allgather(me)

def values(rank, count, dtype):
    return ((torch.arange(count) * 7 + rank * 3) % 11).to(dtype)

def check(place):
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for count in (0, 1, 7, 100003):
            inputs = [values(rank, count, dtype) for rank in range(size)]
            total = torch.stack([x.double() for x in inputs]).sum(0).to(dtype)
            x, out = place(inputs[me]), place(torch.ones(count, dtype=dtype))
            assert torch.equal(mpi.allreduce(x, out=out, flavour="hierarchical"), total)
            assert torch.equal(x, inputs[me])
            assert torch.equal(mpi.allreduce(x, flavour="hierarchical"), total)
            assert torch.equal(mpi.allreduce_async(place(inputs[me]), flavour="hierarchical").wait(), total)
            assert torch.equal(mpi.allgather(place(inputs[me]), flavour="hierarchical"), torch.cat(inputs))
            whole = torch.full((size * count,), 3, dtype=dtype)
            own = whole[me * count : (me + 1) * count].copy_(inputs[me])  # the input lies in its place
            assert torch.equal(mpi.allgather(own, out=whole, flavour="hierarchical"), torch.cat(inputs))
            for root in range(size):
                got = mpi.broadcast(place(inputs[me]), root, flavour="hierarchical")
                assert torch.equal(got, inputs[root])
                got = mpi.reduce(place(inputs[me]), root, flavour="hierarchical")
                assert torch.equal(got, total if me == root else inputs[me])
        parts = [values(rank, (rank * 5) % 7, dtype) for rank in range(size)]
        assert torch.equal(mpi.allgather(place(parts[me]), flavour="hierarchical"), torch.cat(parts))
        whole = torch.full((sum(map(len, parts)),), 3, dtype=dtype)
        own = whole.split(list(map(len, parts)))[me].copy_(parts[me])
        assert torch.equal(mpi.allgather(own, out=whole, flavour="hierarchical"), torch.cat(parts))

check(torch.clone)
pool = mpi.symmetric_empty(100003, dtype=torch.int64).view(torch.uint8)
other = mpi.symmetric_empty(100003, dtype=torch.int64).view(torch.uint8)
turns = [pool, other]

def symmetric_copy(x):
    turns.reverse()
    return turns[0][: x.nbytes].view(x.dtype).copy_(x)

check(symmetric_copy)

x = mpi.symmetric_empty(5000).fill_(me)
segment, _ = symmetric.find(x)
mpi.barrier()
assert sorted(segment.part_of) == [0, 1]
seen = {segment.view(index, x.dtype, 5000)[77].item() for index in segment.part_of}
assert seen == set(neighbours) and me in seen, (seen, neighbours)
mpi.barrier()
with mpi.at(1):
    assert (mpi.allreduce(x, flavour="shared") == sum(neighbours)).all()

taken = []
flavour = registry.BY_NAME["hierarchical"]
real = flavour.allreduce
flavour.allreduce = lambda *args: (taken.append("hierarchical"), real(*args))
assert (mpi.allreduce(torch.ones(1 << 20)) == size).all()
assert (mpi.allreduce(mpi.symmetric_empty(1 << 20).fill_(1)) == size).all()
assert taken == ["hierarchical"] * 2
mpi.allreduce(torch.ones(3))
assert len(taken) == 2

net = torch.nn.Linear(600, 700)
net.weight.grad = torch.full((700, 600), me + 1.0)
net.bias.grad = torch.full((700,), me + 1.0) if me == 3 else None
mpi.nn.synchronize_gradients(net, average=False)
assert (net.weight.grad == 10).all() and (net.bias.grad == 4).all()
mpi.stop()
"""


@pytest.mark.parametrize("by_block", [0, 1])
def test_two_nodes(tmp_path, by_block):
    """Ranks 0 2 | 1 3, then 0 1 | 2 3."""
    if mpirun.find("", os.environ)[0].name != "mpich":
        pytest.skip("only MPICH can present one host as two nodes")
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(PROGRAM))
    torchmpirun = os.path.join(os.path.dirname(sys.executable), "torchmpirun")
    options = ["--env", "MPIR_CVAR_NUM_CLIQUES=2", "--env", f"MPIR_CVAR_CLIQUES_BY_BLOCK={by_block}"]
    command = [torchmpirun, "-n", "4", "--timeout", "90", *options, path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr


# In one group alone there is no memory; the ranks of the other one wait for its part.
ONE_GROUP_FAILS = """
import os, torch, torchmpi_py as mpi
from torchmpi_py.collectives import registry
from torchmpi_py.errors import CommunicatorError, Unavailable

mpi.start()
mpi.set_collective_span(0, mpi.push_communicator(mpi.rank() // 2))
x = torch.ones(1000, 4)
calls = {
    "allreduce": lambda: mpi.allreduce(x, flavour="hierarchical"),
    "in the background": lambda: mpi.allreduce_async(x, flavour="hierarchical").wait(),
    "of unknown sizes": lambda: mpi.allgather(x, flavour="hierarchical"),
}

def refuse(*arguments):
    raise Unavailable("no room")

if mpi.rank() < 2:
    shared = registry.BY_NAME["shared"]
    shared.reduce_scatter = shared.allgather = refuse
    try:
        calls[os.environ["CALL"]]()
    except Unavailable:
        print("failed")
    try:
        calls[os.environ["CALL"]]()
    except CommunicatorError as error:
        print("refused:", error, flush=True)
    os._exit(3)
calls[os.environ["CALL"]]()
mpi.barrier()
"""


@pytest.mark.slow
@pytest.mark.parametrize("call", ["allreduce", "in the background", "of unknown sizes"])
def test_an_error_in_one_group_ends_the_calls_there(tmp_path, call):
    """The other group is one call behind: what the first one called then would meet that."""
    path = tmp_path / "program.py"
    path.write_text(ONE_GROUP_FAILS)
    torchmpirun = os.path.join(os.path.dirname(sys.executable), "torchmpirun")
    command = [torchmpirun, "-n", "4", "--timeout", "90", "--env", f"CALL={call}", path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode != 0
    assert "failed\n" in done.stdout
    assert "an earlier call on" in done.stdout, done.stdout + done.stderr


# Bytes between groups.


class Counted(Ring):
    """Ring, which counts the elements that it is given."""

    def __init__(self):
        verbs = ("allreduce", "broadcast", "reduce", "allgather", "reduce_scatter")
        self.given = dict.fromkeys(verbs, 0)
        self.is_within = False

    def _count(self, verb, x, *args):
        """What a verb hands to another one is counted once."""
        if not self.is_within:
            self.given[verb] += x.numel()
        outermost, self.is_within = not self.is_within, True
        try:
            return getattr(super(), verb)(*args)
        finally:
            self.is_within = not outermost

    def allreduce(self, channel, source, destination, op):
        return self._count("allreduce", source, channel, source, destination, op)

    def walk(self, verb, channel, x, *arguments):
        if not self.is_within:
            self.given[verb] += x.numel()
        return super().walk(verb, channel, x, *arguments)

    def broadcast(self, channel, x, root):
        return self._count("broadcast", x, channel, x, root)

    def reduce(self, channel, source, destination, op, root):
        return self._count("reduce", source, channel, source, destination, op, root)

    def allgather(self, channel, x, out, sizes):
        return self._count("allgather", x, channel, x, out, sizes)

    def reduce_scatter(self, channel, source, destination, op):
        return self._count("reduce_scatter", source, channel, source, destination, op)


COLOURS = {
    "odd and even": lambda rank: rank % 2,
    "first and rest": lambda rank: int(rank > 0),
    "three": lambda rank: rank % 3,
    "crossed": lambda rank: int(rank % 4 in (1, 2)),  # of the second ranks, that of the second group is the lower one
}


@pytest.fixture(params=list(COLOURS))
def groups(request, mpi):
    """Two or three groups: the ranks of each. They may be equal by chance."""
    size = mpi.size()
    colours = [COLOURS[request.param](rank) for rank in range(size)]
    level = mpi.push_communicator(colours[mpi.rank()])
    mpi.set_collective_span(0, level)
    yield [[rank for rank in range(size) if colours[rank] == colour] for colour in sorted(set(colours))]
    mpi.set_collective_span(0, 1)


@pytest.fixture
def outer(monkeypatch):
    counted = Counted()
    hierarchical = registry.BY_NAME["hierarchical"]
    members = hierarchical.members["cpu"]._replace(outer=counted)
    monkeypatch.setattr(hierarchical, "members", {**hierarchical.members, "cpu": members})
    return counted


def values(rank, count):
    return ((torch.arange(count) * 7 + rank * 3) % 11).float()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("count", [12, 180_000])  # in one chunk, and in three
def test_what_goes_between_groups(mpi, groups, outer, monkeypatch, count):
    """allreduce: S/m for every rank of equal groups, S for the roots of unequal ones. The others: S for the roots."""
    monkeypatch.setattr(config, "current", config.Tuning(wire_bytes=256 << 10))
    size, me = mpi.size(), mpi.rank()
    mine = next(members for members in groups if me in members)
    is_root, are_equal = me == mine[0], len({len(group) for group in groups}) == 1
    total = torch.stack([values(rank, count) for rank in range(size)]).sum(0)
    got = mpi.allreduce(values(me, count), flavour="hierarchical")
    assert torch.equal(got, total)
    expected = count // len(mine) if are_equal else count * is_root
    padding = 3 * len(mine) if count % len(mine) else 0
    assert expected <= outer.given["allreduce"] <= expected + padding
    for root in {0, size - 1}:
        for verb in outer.given:
            outer.given[verb] = 0
        assert torch.equal(mpi.broadcast(values(me, count), root, flavour="hierarchical"), values(root, count))
        got = mpi.reduce(values(me, count), root, flavour="hierarchical")
        assert torch.equal(got, total if me == root else values(me, count))
        wanted = {"broadcast": count, "reduce": count} if is_root else {}
        assert {verb: number for verb, number in outer.given.items() if number} == wanted


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("count", [(1 << 20) + 1, 3 << 19, (3 << 20) + 16_385])  # whole pieces, and a last short one
def test_pieces_of_unequal_length(mpi, groups, count):
    """A short piece may go down another tree than the long ones."""
    size, me = mpi.size(), mpi.rank()
    total = torch.stack([values(rank, count) for rank in range(size)]).sum(0)
    for root in range(size):
        assert torch.equal(mpi.broadcast(values(me, count), root, flavour="hierarchical"), values(root, count))
        got = mpi.reduce(values(me, count), root, flavour="hierarchical")
        assert torch.equal(got, total if me == root else values(me, count))
    assert torch.equal(mpi.allreduce(values(me, count), flavour="hierarchical"), total)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint64, torch.bool, torch.complex64, torch.float8_e5m2], ids=str)
def test_dtypes_of_slices_between_groups(mpi, groups, dtype):
    rows = [values(rank, 3001).to(dtype) for rank in range(mpi.size())]
    got = mpi.allgather(rows[mpi.rank()], flavour="hierarchical")
    assert torch.equal(got.view(torch.uint8), torch.cat(rows).view(torch.uint8))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("count", [0, 1, 35, 15_000, 300_001])  # elements of a rank; the last ones in several pieces
def test_slices_between_groups(mpi, groups, outer, count):
    """allgather and reduce_scatter: each rank of equal groups carries its own slice, else the roots carry all."""
    size, me = mpi.size(), mpi.rank()
    mine = next(members for members in groups if me in members)
    is_root, are_equal = me == mine[0], len({len(group) for group in groups}) == 1
    rows = [values(rank, count * size).view(size, count) for rank in range(size)]
    got = mpi.allgather(rows[me][me], flavour="hierarchical")
    assert torch.equal(got, torch.cat([rows[rank][rank] for rank in range(size)]))
    assert outer.given["allgather"] == (count if are_equal else count * len(mine) * is_root)
    got = mpi.reduce_scatter(rows[me].clone().view(-1), flavour="hierarchical")
    assert torch.equal(got, torch.stack([row[me] for row in rows]).sum(0))
    assert outer.given["reduce_scatter"] == count * (len(groups) if are_equal else size)
    got = mpi.reduce_scatter(rows[me].bfloat16().view(-1), op="avg", flavour="hierarchical")
    assert torch.equal(got, (torch.stack([row[me] for row in rows]).sum(0) / size).bfloat16())


@pytest.mark.mpi(min_size=2)
def test_what_goes_between_groups_is_in_the_form_of_partial_results(mpi, groups, outer):
    """16-bit floats leave a group as float32, rounded once in the end; of a size that no group divides."""
    size, count = mpi.size(), 30_011
    inputs = [torch.randn(count, generator=torch.Generator().manual_seed(rank)).bfloat16() for rank in range(size)]
    got = mpi.allreduce(inputs[mpi.rank()].clone(), op="avg", flavour="hierarchical")
    exact = torch.stack([x.double() for x in inputs]).mean(0)
    torch.testing.assert_close(got.double(), exact, rtol=2**-8, atol=1e-6)
    mpi.check_with_allreduce(got)
