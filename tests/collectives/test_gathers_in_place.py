"""Gathers whose input lies in the output, or in symmetric memory: nothing is copied there, and the values are right."""

import pytest
import torch

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(120)]

FLAVOURS = [None, "mpi", "shared", "ring", "hierarchical", "gloo"]
COUNTS = [  # elements of each rank; the larger ones are staged in several chunks
    lambda rank: 3,
    lambda rank: 200_000,
    lambda rank: 150_000 * (rank + 1),
    lambda rank: 300_000 * (rank > 0),
]
every_count = pytest.mark.parametrize("count", COUNTS, ids=["small", "equal", "unequal", "none on rank 0"])
every_memory = pytest.mark.parametrize("is_symmetric", [False, True])


@pytest.fixture(params=FLAVOURS)
def gathers(mpi, request):
    """(allgather, gather) in a flavour; the latter does nothing where there is no such flavour for it."""
    options = {} if request.param is None else {"flavour": request.param}
    rows = {row.verb: row.status for row in mpi.availability() if (row.device, row.flavour) == ("cpu", request.param)}
    if rows.get("allgather", "available") != "available":
        pytest.skip(f"allgather is {rows['allgather']}")
    can_gather = rows.get("gather", "available") == "available"

    def gather(*args, **kwargs):
        return mpi.gather(*args, **kwargs, **options) if can_gather else None

    return lambda *args, **kwargs: mpi.allgather(*args, **kwargs, **options), gather, options


def values(rank, count):
    return torch.arange(count, dtype=torch.float32) % 1000 + 1000 * rank


def memory(mpi, count, is_symmetric):
    return (mpi.symmetric_empty(count) if is_symmetric else torch.empty(count)).fill_(-1)


@every_count
@every_memory
def test_the_input_lies_in_its_place(mpi, gathers, count, is_symmetric):
    """On all ranks, then on the even ones: the others may bring tensors of their own."""
    allgather, gather, options = gathers
    rank, counts = mpi.rank(), [count(rank) for rank in range(mpi.size())]
    whole = torch.cat([values(rank, each) for rank, each in enumerate(counts)])
    out = memory(mpi, len(whole), is_symmetric)
    own = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    for has_place in (True, rank % 2 == 0):
        for form in (allgather, lambda *args, **named: mpi.allgather_async(*args, **named, **options).wait()):
            out.fill_(-1)
            x = out[own].copy_(whole[own]) if has_place else whole[own].clone()
            assert form(x, out=out) is out
            assert torch.equal(out, whole)
    for root in range(mpi.size()):
        out.fill_(-1)
        x = out[own].copy_(whole[own])
        if gather(x, root, out=out) is not None:
            assert torch.equal(out, whole)
        assert torch.equal(x, whole[own])


@every_memory
def test_the_input_lies_elsewhere_in_the_output(mpi, gathers, is_symmetric):
    """It is not this rank's place, so that others' values would be written over it."""
    count = 200_000
    for shift in (1, count // 2):
        out = memory(mpi, mpi.size() * count, is_symmetric)
        begin = max(0, mpi.rank() * count - shift)
        x = out[begin : begin + count].copy_(values(mpi.rank(), count))
        gathers[0](x, out=out)
        assert torch.equal(out, torch.cat([values(rank, count) for rank in range(mpi.size())]))


@every_count
def test_a_symmetric_input_and_an_ordinary_output(mpi, gathers, count):
    allgather, gather, _ = gathers
    own = slice(1234, 1234 + count(mpi.rank()))
    x = mpi.symmetric_empty(600_000 + 150_000 * mpi.size())[own].copy_(values(mpi.rank(), count(mpi.rank())))
    whole = torch.cat([values(rank, count(rank)) for rank in range(mpi.size())])
    for _ in range(2):
        assert torch.equal(allgather(x), whole)
    for root in range(mpi.size()):
        got = gather(x, root)
        assert got is None or torch.equal(got, whole)
    x.fill_(7)  # a rank may, once the call is over, whatever the others still do
