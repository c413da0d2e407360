"""Messages of process groups: which tags there are, and that no group gets what was sent to another one."""

import json
import time

import pytest
import torch
import torch.distributed as dist
from support.values import values as of

from torchmpi_py.collectives.flavours import mpi_steps
from torchmpi_py.core.mpi_api import MPI
from torchmpi_py.errors import RanksDisagree
from torchmpi_py.torch_backend import communicator_pool
from torchmpi_py.watch import tracing

pytestmark = pytest.mark.mpi(min_size=2)
NUM_USES = communicator_pool._NUM_USES


@pytest.fixture
def neighbours(group, rank, size):
    """This rank, the one that it sends to, and the one that it receives from."""
    return rank, (rank + 1) % size, (rank - 1) % size


def wait(works):
    for work in works:
        work.wait()


def test_messages(group, neighbours):
    """Not in the order of the sends; from any rank; into columns; empty ones; a future of one."""
    rank, following, before = neighbours
    second, first = torch.empty(3), torch.empty(4, dtype=torch.int64)
    works = [dist.irecv(second, before, tag=2), dist.irecv(first, before, tag=1)]
    works += [dist.isend(of(rank, 4, torch.int64), following, tag=1), dist.isend(of(rank, 3), following, tag=2)]
    wait(works)
    assert torch.equal(second, of(before, 3))
    assert torch.equal(first, of(before, 4, torch.int64))
    columns = torch.empty(4, 2).t()
    operations = [dist.P2POp(dist.isend, of(rank, 8).view(2, 4), following), dist.P2POp(dist.irecv, columns, before)]
    wait(dist.batch_isend_irecv(operations))
    assert torch.equal(columns, of(before, 8).view(2, 4))
    if rank == 0:
        got = torch.empty(2)
        sources = {dist.recv(got, tag=7): got.tolist() for _ in range(group.size() - 1)}
        assert sources == {r: of(r, 2).tolist() for r in range(1, group.size())}
        assert dist.recv(torch.empty(0), tag=3) == 1
        future = dist.irecv(got := torch.empty(2), 1, tag=9).get_future()
        assert torch.equal(future.wait()[0], of(1, 2))
        assert torch.equal(got, of(1, 2))
    else:
        dist.send(of(rank, 2), 0, tag=7)
    if rank == 1:
        dist.send(torch.empty(0), 0, tag=3)
        dist.send(of(1, 2), 0, tag=9)


def test_messages_are_traced(mpi, neighbours, tmp_path, monkeypatch):
    rank, following, before = neighbours
    monkeypatch.setenv("TORCHMPI_PROFILE", str(tmp_path))
    monkeypatch.setattr(tracing, "current", tracing.start(mpi.communicator()))
    wait([dist.irecv(torch.empty(5), before), dist.isend(of(rank, 5), following)])
    tracing.stop()
    events = json.loads(tracing.current.path.read_text())["traceEvents"]
    ours = [(event["name"], event["args"]["bytes"]) for event in events if event.get("cat") == "torchmpi"]
    assert sorted(ours) == [("recv", 20), ("send", 20)]


def test_tags_do_not_wrap_around(group, neighbours):
    rank, following, before = neighbours
    largest = (MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) + 1) // NUM_USES // mpi_steps.TAGS_PER_KIND - 1
    for tag in (largest + 1, 1 << 40, -1):
        for call in (dist.send, dist.isend, dist.recv, dist.irecv):
            with pytest.raises(ValueError, match=rf"from 0 to {largest}, .*found tag={tag}"):
                call(torch.empty(2), following, tag=tag)
    with pytest.raises(TypeError, match="float"):
        dist.isend(torch.empty(2), following, tag=1.5)
    tags = [0, largest, 1, largest - 1]
    works = [dist.isend(torch.tensor([rank, tag]), following, group, tag) for tag in tags]
    for tag in reversed(tags):
        dist.recv(got := torch.empty(2, dtype=torch.int64), before, group, tag)
        assert got.tolist() == [before, tag]
    wait(works)


def test_a_message_that_is_too_large_and_nobody_waits_for(group, neighbours):
    part = dist.new_group()
    if group.rank() == 0:
        for rank in range(1, group.size()):
            dist.isend(torch.ones(64), rank, group=part)
    else:
        memory = torch.zeros(64)
        message = dist.irecv(memory[:4], 0, group=part)
    dist.barrier(part)
    dist.barrier(part)
    dist.destroy_process_group(part)
    if group.rank() > 0:
        with pytest.raises(RanksDisagree, match=r"rank 0 sent .* where 16 bytes of torch.float32 were"):
            message.wait()


def test_what_nobody_received_comes_to_no_other_group(group, neighbours):
    """Nor does it end a group that nobody receives what is sent, or sends what is received."""
    _, following, before = neighbours
    dist.isend(torch.tensor([-1]), following, group)
    lost = dist.new_group()
    dist.isend(torch.tensor([-2]), following, lost)
    dist.irecv(torch.zeros(2), following, lost, tag=7)
    dist.barrier()
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
    wait(works)
    for each in groups[1:]:
        dist.destroy_process_group(each)


def test_messages_of_a_coalescing_block_are_waited_for(group, neighbours):
    rank, following, before = neighbours
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as block:
        time.sleep(0.2 * (rank == 0))
        dist.isend(torch.tensor([rank]), following)
        dist.irecv(got := torch.tensor([-1]), before)
    block.wait()
    assert got.item() == before
