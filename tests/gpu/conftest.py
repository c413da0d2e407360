"""Tests on GPUs: the package is started with them, for the tests of a file."""

import pytest
import torch


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
