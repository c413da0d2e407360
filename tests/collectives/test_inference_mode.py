"""torch.inference_mode: what calls keep there serves later ones, and tensors made there may be reduced outside."""

import pytest
import torch

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(240)]
FLAVOURS = ["mpi", "ring", "shared", "gloo"]
NUM_ELEMENTS = 300_000  # several chunks of each flavour


def values(mpi, rank, dtype=torch.float32, count=NUM_ELEMENTS):
    return (torch.arange(count) % 7 + rank).to(dtype)


def total(mpi, dtype=torch.float32, count=NUM_ELEMENTS):
    return sum(values(mpi, rank, dtype, count) for rank in range(mpi.size()))


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("is_symmetric", [False, True])
def test_a_call_in_the_mode_and_one_after_it(request, mpi, flavour, is_symmetric):
    """As of a validation run before training. A communicator of its own: nothing is kept there yet."""
    if flavour == "shared":
        request.getfixturevalue("one_node")
    x = mpi.symmetric_empty(NUM_ELEMENTS) if is_symmetric else torch.empty(NUM_ELEMENTS)
    with mpi.split(0) as comm:
        for mode in (True, False, True):
            for form in (mpi.allreduce, lambda *a, **k: mpi.allreduce_async(*a, **k).wait()):
                with torch.inference_mode(mode):
                    x.copy_(values(mpi, mpi.rank()))
                    form(x, flavour=flavour, comm=comm)
                    assert torch.equal(x, total(mpi))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("op", ["sum", "max", "avg"])
@pytest.mark.parametrize("count", [10, NUM_ELEMENTS])
def test_tensors_made_in_the_mode(mpi, dtype, op, count):
    if op == "avg" and dtype == torch.int8:
        pytest.skip("no average of whole numbers")
    with torch.inference_mode():
        made = [values(mpi, mpi.rank(), dtype, count) for _ in range(4)]
        strided = values(mpi, mpi.rank(), dtype, 2 * count)[::2]
    expected = total(mpi, torch.float32, count)
    if op != "sum":
        expected = values(mpi, mpi.size() - 1, torch.float32, count) if op == "max" else expected / mpi.size()
    for _ in range(2):  # the second call finds what the first one has kept
        x = made.pop()
        assert mpi.allreduce(x, op=op) is x
        torch.testing.assert_close(x.float(), expected, rtol=1e-2, atol=0)
        x = made.pop()
        mpi.allreduce_async(x, op=op).wait()
        torch.testing.assert_close(x.float(), expected, rtol=1e-2, atol=0)
    mpi.broadcast(strided, mpi.size() - 1)
    assert torch.equal(strided, values(mpi, mpi.size() - 1, dtype, 2 * count)[::2])


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
