"""The tests of test_verbs on GPU tensors, in the flavours for them, on a stream that is not the default one."""

import os

import pytest
import torch
from test_verbs import Way, test_moves, test_reductions  # noqa: F401 - collected here again

from torchmpi_py.core.tensors import OPS
from torchmpi_py.launch import variables

if not torch.cuda.is_available():
    pytest.skip("no GPU that torch can use", allow_module_level=True)

pytestmark = pytest.mark.mpi

WHOLE_WAYS = ["staged", "cudaipc", "cudaipc symmetric"]  # each dtype with each op
OTHER_WAYS = ["blocking", "hierarchical", "mpi", "nccl"]
OTHER_WAYS += [f"{name} asynchronous" for name in ("staged", "cudaipc", "nccl")]
SOME_OPS = ("sum", "max")  # for those
IS_CROWDED = (
    variables.size_in(os.environ) or 1
) > 2  # many ranks take turns on a GPU, and all ways would take too long


@pytest.fixture(scope="module", params=WHOLE_WAYS if IS_CROWDED else [*WHOLE_WAYS, *OTHER_WAYS])
def way(request, mpi):
    """Each way in turn; hierarchical combines the odd and the even ranks."""
    made = Way(mpi, request.param, device="cuda")
    made.wanted_ops = OPS if request.param in WHOLE_WAYS else SOME_OPS
    if request.param != "hierarchical":
        yield made
        return
    level = mpi.push_communicator(mpi.rank() % 2)
    mpi.set_collective_span(0, level)
    yield made
    mpi.set_collective_span(0, 1)


@pytest.fixture(autouse=True)
def on_another_stream(stream):
    """All of it."""
