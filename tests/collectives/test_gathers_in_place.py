"""Gathers whose input lies in the output, or in symmetric memory: nothing is copied there, and the values are right."""

import pytest
import torch

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(120)]

FLAVOURS = [None, "mpi", "shared", "ring", "hierarchical", "gloo"]
every_flavour = pytest.mark.parametrize("flavour", FLAVOURS)
COUNTS = {  # elements of each rank; the larger ones are staged in several chunks
    "small": lambda rank: 3,
    "equal": lambda rank: 200_000,
    "unequal": lambda rank: 150_000 * (rank + 1),
    "none on rank 0": lambda rank: 300_000 * (rank > 0),
}
every_count = pytest.mark.parametrize("kind", COUNTS)


@pytest.fixture
def options(mpi, request, flavour):
    """Of a call that takes the flavour, if there is one for this job."""
    if flavour is None:
        return {}
    rows = {(row.verb, row.device, row.flavour): row.status for row in mpi.availability()}
    verbs = ["allgather"] if request.node.name.startswith("test_allgather") else ["allgather", "gather"]
    for verb in verbs:
        if (status := rows[verb, "cpu", flavour]) != "available":
            pytest.skip(f"{verb} is {status}")
    return {"flavour": flavour}


def values(rank, count):
    return torch.arange(count, dtype=torch.float32) % 1000 + 1000 * rank


def expected(mpi, kind):
    return torch.cat([values(rank, COUNTS[kind](rank)) for rank in range(mpi.size())])


def memory(mpi, count, is_symmetric):
    return mpi.symmetric_empty(count) if is_symmetric else torch.empty(count)


def place(mpi, kind, out):
    """This rank's place in ``out``, with its values in it."""
    begin = sum(COUNTS[kind](rank) for rank in range(mpi.rank()))
    x = out[begin : begin + COUNTS[kind](mpi.rank())]
    return x.copy_(values(mpi.rank(), x.numel()))


@every_count
@every_flavour
@pytest.mark.parametrize("is_symmetric", [False, True])
@pytest.mark.parametrize("who", ["all", "even ranks"])
def test_allgather_into_the_memory_that_holds_the_input(mpi, options, kind, is_symmetric, who):
    """The others may bring tensors of their own."""
    whole = expected(mpi, kind)
    out = memory(mpi, whole.numel(), is_symmetric)
    for turn in range(3):
        out.fill_(-1)
        x = place(mpi, kind, out)
        if who != "all" and mpi.rank() % 2:
            x = x.clone()
            out.fill_(-1)
        form = mpi.allgather if turn else lambda *args, **named: mpi.allgather_async(*args, **named).wait()
        assert form(x, out=out, **options) is out
        assert torch.equal(out, whole)


@every_count
@every_flavour
@pytest.mark.parametrize("is_symmetric", [False, True])
def test_gather_into_the_memory_that_holds_the_input(mpi, options, kind, is_symmetric):
    whole = expected(mpi, kind)
    for root in range(mpi.size()):
        out = memory(mpi, whole.numel(), is_symmetric).fill_(-1)
        x = place(mpi, kind, out)
        mpi.gather(x, root, out=out, **options)
        if mpi.rank() == root:
            assert torch.equal(out, whole)
        else:
            assert torch.equal(x, values(mpi.rank(), x.numel()))


@every_flavour
@pytest.mark.parametrize("is_symmetric", [False, True])
def test_an_input_elsewhere_in_the_output(mpi, options, is_symmetric):
    """It is not this rank's place, so that others' values would be written over it."""
    count = 200_000
    for shift in (1, count // 2):
        out = memory(mpi, mpi.size() * count, is_symmetric)
        begin = max(0, mpi.rank() * count - shift)
        x = out[begin : begin + count].copy_(values(mpi.rank(), count))
        mpi.allgather(x, out=out, **options)
        assert torch.equal(out, torch.cat([values(rank, count) for rank in range(mpi.size())]))


@every_count
@every_flavour
def test_a_symmetric_input_and_an_ordinary_output(mpi, options, kind):
    count = COUNTS[kind](mpi.rank())
    x = mpi.symmetric_empty(600_000 + 150_000 * mpi.size())[1234 : 1234 + count].copy_(values(mpi.rank(), count))
    whole = expected(mpi, kind)
    for _ in range(2):
        assert torch.equal(mpi.allgather(x, **options), whole)
    for root in range(mpi.size()):
        got = mpi.gather(x, root, **options)
        assert got is None or torch.equal(got, whole)
    x.fill_(7)  # a rank may, once the call is over, whatever the others still do
