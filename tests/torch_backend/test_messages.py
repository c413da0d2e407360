"""Messages of process groups: which tags there are, and that no group gets what was sent to another one."""

import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

from torchmpi_py.collectives.flavours import mpi_steps
from torchmpi_py.core.mpi_api import MPI
from torchmpi_py.errors import RanksDisagree
from torchmpi_py.torch_backend import communicator_pool

pytestmark = pytest.mark.mpi
NUM_USES = communicator_pool._NUM_USES


@pytest.fixture
def neighbours(group):
    """This rank, the one that it sends to, and the one that it receives from."""
    rank, size = group.rank(), group.size()
    if size == 1:
        pytest.skip("torch refuses messages to oneself")
    return rank, (rank + 1) % size, (rank - 1) % size


def test_tags_do_not_wrap_around(group, neighbours):
    rank, following, before = neighbours
    largest = (MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) + 1) // NUM_USES // mpi_steps.TAGS_PER_KIND - 2
    for tag in (largest + 1, 1 << 40, -1):
        for call in (dist.send, dist.isend, dist.recv, dist.irecv):
            with pytest.raises(ValueError, match=rf"tag={tag}: give one from 0 to {largest}"):
                call(torch.empty(2), following, tag=tag)
    with pytest.raises(TypeError, match="float"):
        dist.isend(torch.empty(2), following, tag=1.5)
    tags = [0, largest, 1, largest - 1]
    works = [dist.isend(torch.tensor([rank, tag]), following, group, tag) for tag in tags]
    for tag in reversed(tags):
        dist.recv(got := torch.empty(2, dtype=torch.int64), before, group, tag)
        assert got.tolist() == [before, tag]
    for work in works:
        work.wait()


def test_a_message_that_does_not_fit_is_an_error(group, neighbours):
    """Of another dtype, and shorter, and longer; the next message is right."""
    rank, following, before = neighbours
    given = torch.arange(6, dtype=torch.int32) + rank
    for expected in (torch.zeros(6), torch.zeros(3, dtype=torch.float64), given[:4].clone(), given.repeat(2)):
        for receive in (
            dist.recv,
            lambda *args: dist.irecv(*args).wait(),
            lambda x, _, group: dist.recv(x, None, group),
        ):
            works = [dist.isend(x, following, group) for x in (given, given + 1)]
            words = f"rank {before} sent .* bytes of torch.int32 where {expected.nbytes} bytes of {expected.dtype} were"
            with pytest.raises(RanksDisagree, match=words):
                receive(expected.clone(), before, group)
            dist.recv(got := torch.empty(6, dtype=torch.int32), before, group)
            assert got.tolist() == list(range(before + 1, before + 7))
            for work in works:
                work.wait()
            dist.barrier()


def test_what_nobody_received_comes_to_no_other_group(group, neighbours):
    _, following, before = neighbours
    dist.isend(torch.tensor([-1]), following, group)
    lost = dist.new_group()
    dist.isend(torch.tensor([-2]), following, lost)
    dist.destroy_process_group(lost)
    for number in range(NUM_USES + 3):
        later = dist.new_group()
        work = dist.isend(torch.tensor([number]), following, later)
        dist.recv(got := torch.tensor([-3]), before, later)
        assert got.item() == number
        work.wait()
        dist.destroy_process_group(later)
    dist.recv(got, before, group)
    assert got.item() == -1


def test_more_live_groups_than_share_a_communicator(group, neighbours):
    rank, following, before = neighbours
    groups = [group, *(dist.new_group() for _ in range(NUM_USES + 3))]
    works = [dist.isend(torch.tensor([rank, number]), following, each) for number, each in enumerate(groups)]
    for number, each in reversed(list(enumerate(groups))):
        dist.recv(got := torch.empty(2, dtype=torch.int64), before, each)
        assert got.tolist() == [before, number]
    for work in works:
        work.wait()
    for each in groups[1:]:
        dist.destroy_process_group(each)


def test_messages_of_a_coalescing_block_are_waited_for(group, neighbours):
    rank, following, before = neighbours
    with _coalescing_manager(device=torch.device("cpu"), async_ops=True) as block:
        time.sleep(0.2 * (rank == 0))
        dist.isend(torch.tensor([rank]), following)
        dist.irecv(got := torch.tensor([-1]), before)
    block.wait()
    assert got.item() == before
