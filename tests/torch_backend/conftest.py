import pytest
import torch.distributed as dist


@pytest.fixture(scope="module")
def group(request, mpi):
    """The default group of torch.distributed, of all ranks of this run, over "torchmpi". Afterwards there is none."""
    import torchmpi_py.torch_backend  # noqa: F401

    dist.init_process_group("torchmpi")
    yield dist.group.WORLD
    if not request.session.testsfailed:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def group_for_frameworks(request, mpi):
    """The same, but for 1 and 5 ranks."""
    if mpi.size() in (1, 5):
        pytest.skip("it is as with 2 to 4 ranks, and the frameworks take long to import")
    return request.getfixturevalue("group")
