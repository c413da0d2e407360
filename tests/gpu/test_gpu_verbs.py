"""The tests of test_verbs on GPU tensors, in the flavours for them, on a stream that is not the default one."""

import pytest
import test_verbs
import torch
from test_verbs import (  # noqa: F401 - collected here again
    Way,
    test_allgather,
    test_allreduce,
    test_alltoall,
    test_broadcast,
    test_gather,
    test_reduce,
    test_reduce_scatter,
    test_scatter,
    test_sendreceive_around_the_ring,
)

if not torch.cuda.is_available():
    pytest.skip("no GPU that torch can use", allow_module_level=True)

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(120)]

WAYS = [
    "blocking",
    "staged",
    "staged asynchronous",
    "cudaipc",
    "cudaipc asynchronous",
    "cudaipc symmetric",
    "hierarchical",
    "mpi",
    "nccl",
]


@pytest.fixture(scope="module", params=WAYS)
def way(request, mpi):
    """Each way in turn; hierarchical combines the odd and the even ranks."""
    test_verbs.FORCED.extend(name for name in ("mpi", "nccl") if name not in test_verbs.FORCED)
    if request.param != "hierarchical":
        yield Way(mpi, request.param, device="cuda")
        return
    level = mpi.push_communicator(mpi.rank() % 2)
    mpi.set_collective_span(0, level)
    yield Way(mpi, request.param, device="cuda")
    mpi.set_collective_span(0, 1)


@pytest.fixture(autouse=True)
def on_another_stream(stream):
    """All of it."""
