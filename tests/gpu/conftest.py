"""Tests on GPUs: the package is started with them, for the tests of a file."""

import os
import pathlib

import pytest
import torch

from torchmpi_py.launch import variables

WHOLE_WAYS = ("staged", "cudaipc", "cudaipc symmetric")  # each dtype with each op; the others with some ops
SOME_OPS = ("sum", "max", None)


def pytest_collection_modifyitems(config, items):
    """Where many ranks share a GPU they take turns on it, and all verbs in all ways would take too long."""
    many = (variables.size(os.environ) or 1) > 2
    here = pathlib.Path(__file__).parent  # the items are those of all folders
    verbs = [item for item in items if item.path.is_relative_to(here) and hasattr(item, "callspec")]
    left_out = {item for item in verbs if not _is_wanted(item.callspec.params, many)}
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


def _is_wanted(parameters, many):
    way = parameters.get("way", WHOLE_WAYS[0])
    return way in WHOLE_WAYS or (not many and parameters.get("op") in SOME_OPS)


@pytest.fixture(scope="module")
def mpi(request):
    """The package, started on GPUs."""
    import torchmpi_py

    was_started = torchmpi_py.is_started()
    torchmpi_py.stop()
    torchmpi_py.start(with_cuda=True)
    yield torchmpi_py
    if request.session.testsfailed:  # stop() would wait for ranks that wait for this one
        return
    torchmpi_py.stop()
    if was_started:
        torchmpi_py.start()


@pytest.fixture
def stream(mpi):
    """Another stream than the default one as the current one."""
    stream = torch.cuda.Stream(mpi.device())
    with torch.cuda.stream(stream):
        yield stream
    stream.synchronize()
