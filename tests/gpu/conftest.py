"""Tests on GPUs: the package is started with them, for these tests alone."""

import pytest
import torch


@pytest.fixture(scope="package")
def mpi():
    """The package, started on GPUs."""
    import torchmpi_py

    was_started = torchmpi_py.is_started()
    torchmpi_py.stop()
    torchmpi_py.start(with_cuda=True)
    yield torchmpi_py
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
