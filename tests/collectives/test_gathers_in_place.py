"""Gathers whose input lies in the output: nothing is copied there, and the values are right."""

import contextlib

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
every_memory = pytest.mark.parametrize("is_symmetric", [False, True])


@pytest.fixture(scope="module", params=FLAVOURS)
def options(mpi, request):
    """Of a call that takes the flavour, if there is one for this job; with ``gather`` where it has one."""
    options = {} if request.param is None else {"flavour": request.param}
    with contextlib.ExitStack() as stack:
        if request.param == "hierarchical":  # the odd and the even ranks are groups
            mpi.set_collective_span(0, mpi.push_communicator(mpi.rank() % 2))
            stack.callback(mpi.set_collective_span, 0, 1)
        rows = [row for row in mpi.availability() if (row.device, row.flavour) == ("cpu", request.param)]
        status = {row.verb: row.status for row in rows}
        if status.get("allgather", "available") != "available":
            pytest.skip(f"allgather is {status['allgather']}")
        yield options, status.get("gather", "available") == "available"


def values(rank, count):
    return torch.arange(count, dtype=torch.float32) % 1000 + 1000 * rank


def memory(mpi, count, is_symmetric):
    return (mpi.symmetric_empty(count) if is_symmetric else torch.empty(count)).fill_(-1)


@pytest.mark.parametrize("count", COUNTS, ids=["small", "equal", "unequal", "none on rank 0"])
@every_memory
def test_the_input_lies_in_its_place(mpi, options, count, is_symmetric):
    """On all ranks, then on the even ones: the others may bring tensors of their own."""
    options, can_gather = options
    rank, counts = mpi.rank(), [count(rank) for rank in range(mpi.size())]
    whole = torch.cat([values(rank, each) for rank, each in enumerate(counts)])
    out = memory(mpi, len(whole), is_symmetric)
    own = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    for has_place in (True, rank % 2 == 0):
        for form in (mpi.allgather, lambda *args, **named: mpi.allgather_async(*args, **named).wait()):
            out.fill_(-1)
            x = out[own].copy_(whole[own]) if has_place else whole[own].clone()
            assert form(x, out=out, **options) is out
            assert torch.equal(out, whole)
    for root in range(mpi.size()) if can_gather else ():
        out.fill_(-1)
        x = out[own].copy_(whole[own])
        mpi.gather(x, root, out=out, **options)
        assert torch.equal(*((out, whole) if rank == root else (x, whole[own])))


@every_memory
def test_the_input_lies_elsewhere_in_the_output(mpi, options, is_symmetric):
    """It is not this rank's place, so that others' values would be written over it."""
    count = 200_000
    for shift in (1, count // 2):
        out = memory(mpi, mpi.size() * count, is_symmetric)
        begin = max(0, mpi.rank() * count - shift)
        x = out[begin : begin + count].copy_(values(mpi.rank(), count))
        mpi.allgather(x, out=out, **options[0])
        assert torch.equal(out, torch.cat([values(rank, count) for rank in range(mpi.size())]))
