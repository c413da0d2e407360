"""Flavour hierarchical: values, how much goes between the groups, and errors. tests/hosts has it on several nodes."""

import types

import pytest
import torch
from support.values import stacked, total, values

from torchmpi_py.collectives.flavours import hierarchical, ring
from torchmpi_py.collectives.plan import Plan
from torchmpi_py.collectives.registry import BY_NAME
from torchmpi_py.errors import Unavailable

pytestmark = pytest.mark.timeout(240)

X = torch.ones(4)


@pytest.mark.parametrize(
    ("verb", "arguments"),
    [
        *(("allreduce", (X, X, "sum")), ("reduce", (X, X, "sum", 0)), ("broadcast", (X, 0))),
        *(("reduce_scatter", (X, X, "sum")), ("allgather", (X, X, None))),
    ],
)
def test_an_error_in_one_group_is_none_of_all_ranks(monkeypatch, verb, arguments):
    """The other group is one call behind: what the first one calls next would meet that."""

    def refuse(_):
        raise Unavailable("no room")

    monkeypatch.setattr(hierarchical, "groups_of", refuse)
    with pytest.raises(Unavailable) as caught:
        getattr(BY_NAME["hierarchical"], verb)(types.SimpleNamespace(size=2), *arguments)
    assert not Plan.is_of_all(types.SimpleNamespace(name=verb), caught.value)


# Values, and elements that go between groups.

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
    mpi.set_collective_span(0, mpi.push_communicator(colours[mpi.rank()]))
    yield [[rank for rank in range(size) if colours[rank] == colour] for colour in sorted(set(colours))]
    mpi.set_collective_span(0, 1)


@pytest.fixture
def small_pieces(monkeypatch):
    """Chunks and pieces are a 64th of their true sizes."""
    for module in (hierarchical, ring):
        for name in ("CHUNK_BYTES", "LEAST_CHUNK_BYTES"):
            monkeypatch.setattr(module, name, getattr(module, name) // 64)


@pytest.fixture
def sent(mpi, posted):
    """Elements of float32 that all ranks have sent between groups, by flavour ring, since it was asked last."""

    def ask():
        number = sum(given for given, _ in posted) // 4
        posted.clear()
        return mpi.allreduce(number, flavour="mpi")

    return ask


def are_equal(groups):
    return len({len(group) for group in groups}) == 1


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("count", [12, 16_385, 24_576, 49_409])  # one piece; whole pieces, and a last short one
def test_allreduce_broadcast_and_reduce(mpi, groups, small_pieces, sent, count):
    """Twice the tensor to each other group, and once. A short piece may go down another tree than the long ones."""
    size, me = mpi.size(), mpi.rank()
    mine, reduced, others = values(me, count), total(size, count), len(groups) - 1
    assert torch.equal(mpi.allreduce(mine.clone(), flavour="hierarchical"), reduced)
    padding = -count % len(groups[0]) if are_equal(groups) else 0
    assert sent() == 2 * others * (count + padding)
    for root in range(size):
        assert torch.equal(mpi.broadcast(mine.clone(), root, flavour="hierarchical"), values(root, count))
        assert sent() == others * count
        got = mpi.reduce(mine.clone(), root, flavour="hierarchical")
        assert torch.equal(got, reduced if me == root else mine)
        assert sent() == others * count


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("count", [0, 1, 35, 5001])  # elements of a rank; the last ones in several pieces
def test_allgather_and_reduce_scatter(mpi, groups, small_pieces, sent, count):
    """What a group has or gets goes to each other group once; unequal groups scatter as if each rank were one."""
    size, me, others = mpi.size(), mpi.rank(), len(groups) - 1
    rows = stacked(size, count * size).view(size, size, count)
    got = mpi.allgather(rows[me, me], flavour="hierarchical")
    assert torch.equal(got, torch.cat([rows[rank, rank] for rank in range(size)]))
    assert sent() == size * count * others
    got = mpi.reduce_scatter(rows[me].reshape(-1), flavour="hierarchical")
    assert torch.equal(got, rows[:, me].sum(0))
    assert sent() == size * count * (others if are_equal(groups) else size - 1)
    got = mpi.reduce_scatter(rows[me].bfloat16().view(-1), op="avg", flavour="hierarchical")
    assert torch.equal(got, (rows[:, me].sum(0) / size).bfloat16())
    for dtype in (torch.uint16, torch.uint64, torch.bool, torch.complex64, torch.float8_e5m2):
        parts = [rows[rank, rank].to(dtype).view(torch.uint8) for rank in range(size)]
        got = mpi.allgather(parts[me].view(dtype), flavour="hierarchical")
        assert torch.equal(got.view(torch.uint8), torch.cat(parts))


@pytest.mark.mpi(min_size=2)
def test_what_goes_between_groups_is_in_the_form_of_partial_results(mpi, groups):
    """16-bit floats leave a group as float32, rounded once in the end; of a size that no group divides."""
    size, count = mpi.size(), 30_011
    inputs = [torch.randn(count, generator=torch.Generator().manual_seed(rank)).bfloat16() for rank in range(size)]
    got = mpi.allreduce(inputs[mpi.rank()].clone(), op="avg", flavour="hierarchical")
    exact = torch.stack([x.double() for x in inputs]).mean(0)
    torch.testing.assert_close(got.double(), exact, rtol=2**-8, atol=1e-6)
    mpi.check_with_allreduce(got)
