"""torch.inference_mode: what calls keep there serves later ones, and tensors made there may be reduced outside."""

import pytest
import torch
from support.values import stacked, total, values

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(240)]
COUNT = 300_000  # several chunks of each flavour


@pytest.mark.parametrize("flavour", ["mpi", "ring", "shared", "gloo"])
def test_a_call_in_the_mode_and_one_after_it(request, mpi, flavour):
    """As of a validation run before training. A communicator of its own: nothing is kept there yet."""
    if flavour == "shared":
        request.getfixturevalue("one_node")
    mine, expected = values(mpi.rank(), COUNT), total(mpi.size(), COUNT)
    for x in (mpi.symmetric_empty(COUNT), torch.empty(COUNT)):
        with mpi.split(0) as comm:
            for mode in (True, False, True):
                for form in (mpi.allreduce, lambda *a, **k: mpi.allreduce_async(*a, **k).wait()):
                    with torch.inference_mode(mode):
                        form(x.copy_(mine), flavour=flavour, comm=comm)
                        assert torch.equal(x, expected)


@pytest.mark.parametrize("count", [10, COUNT])
@pytest.mark.parametrize(
    ("dtype", "op"), [(torch.float32, "avg"), (torch.bfloat16, "sum"), (torch.bfloat16, "max"), (torch.int8, "sum")]
)
def test_tensors_made_in_the_mode(mpi, dtype, op, count):
    rank, size = mpi.rank(), mpi.size()
    with torch.inference_mode():
        made = [values(rank, count, dtype) for _ in range(4)]
        strided = values(rank, 2 * count, dtype)[::2]
    expected = stacked(size, count).amax(0) if op == "max" else total(size, count) / (size if op == "avg" else 1)
    for _ in range(2):  # the second call finds what the first one has kept
        x, y = made.pop(), made.pop()
        assert mpi.allreduce(x, op=op) is x
        assert mpi.allreduce_async(y, op=op).wait() is y
        for got in (x, y):
            torch.testing.assert_close(got.float(), expected)
    mpi.broadcast(strided, size - 1)
    assert torch.equal(strided, values(size - 1, 2 * count, dtype)[::2])


def test_complex_tensors_made_in_the_mode(mpi):
    with torch.inference_mode():
        x = torch.full((5,), 1 + 2j * (mpi.rank() + 1)).conj()
    mpi.allreduce(x)
    assert torch.equal(x, torch.full((5,), mpi.size() - 1j * mpi.size() * (mpi.size() + 1)))


@pytest.mark.parametrize("op", ["sum", "avg"])
def test_small_calls_that_end_outside(mpi, op):
    with torch.inference_mode():
        made = [torch.ones(5, dtype=torch.bfloat16), torch.ones(5, 3).t(), torch.ones(5)]
        handles = [mpi.allreduce_async(x, op=op) for x in made]
    for x, handle in zip(made, handles, strict=True):
        assert handle.wait() is x
        assert (x == (mpi.size() if op == "sum" else 1)).all()
