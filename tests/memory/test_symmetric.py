"""Symmetric memory: what ``symmetric_empty`` gives, whose it is, how long it lives, and what shared does with it.

Element j on rank r holds a whole number that depends on both.
"""

import contextlib
import gc
import os
import tempfile

import pytest
import torch
from support import jobs
from support.values import values

from torchmpi_py.collectives.flavours.node_group import NodeGroup
from torchmpi_py.core import shared_files
from torchmpi_py.errors import RanksDisagree, Unavailable
from torchmpi_py.memory import symmetric

pytestmark = pytest.mark.timeout(240)
in_a_job = pytest.mark.mpi
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e5m2, torch.complex128, torch.uint64, torch.int8, torch.bool]
COUNT = 3001


def total(ranks, count):
    return torch.stack([values(rank, count) for rank in ranks]).sum(0)


def everywhere(mpi, holds):
    """Whether it holds on all ranks: a test that is to fail on one must fail on all, or they would wait for it."""
    return mpi.allreduce(int(holds), op="min", flavour="mpi") == 1


def segments_mapped():
    with open("/proc/self/maps") as lines:
        return sum("torchmpi_py" in line and ".so" not in line for line in lines)


def placed(mpi, count, comm=None, offset=0):
    """This rank's values in symmetric memory."""
    x = mpi.symmetric_empty(count + offset, comm=comm)[offset:]
    return x.copy_(values(mpi.rank(), count))


# What is given.


@in_a_job
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_shapes_and_dtypes(mpi, dtype):
    asked = [(), (0,), (3,), (2, 0, 5), (3, 4), ([2, 3],), (torch.Size([2, 2]),), (5000,)]
    expected = [(), (0,), (3,), (2, 0, 5), (3, 4), (2, 3), (2, 2), (5000,)]
    for size, shape in zip(asked, expected, strict=True):
        x = mpi.symmetric_empty(*size, dtype=dtype)
        assert (x.shape, x.dtype, x.device.type, x.is_contiguous()) == (shape, dtype, "cpu", True)
        x.copy_(torch.ones(shape).to(dtype))
        assert not x.requires_grad
    assert mpi.symmetric_empty(2).dtype == torch.get_default_dtype()
    assert mpi.symmetric_empty(2, device=torch.device("cpu")).device.type == "cpu"


@in_a_job
def test_bad_sizes_and_devices(mpi):
    for size in ((-1,), (2.0,), (True,), ("3",), ([2], 3), (None,), (3, -2)):
        with pytest.raises(ValueError, match="pass whole numbers >= 0, as in symmetric_empty"):
            mpi.symmetric_empty(*size)
    with pytest.raises(ValueError, match=r"device='cuda:0': this session computes on the CPU"):
        mpi.symmetric_empty(2, device="cuda:0")
    with pytest.raises(TypeError, match="is not a torchmpi_py communicator"):
        mpi.symmetric_empty(2, comm="world")


@pytest.mark.mpi(min_size=2)
def test_ranks_that_ask_for_different_tensors(mpi):
    last = mpi.rank() == mpi.size() - 1
    before = segments_mapped()
    for size, dtype in (((3 + last,), torch.int8), ((4,), torch.int32 if last else torch.float32)):
        with pytest.raises(RanksDisagree, match=rf"symmetric_empty: .*rank {mpi.size() - 1}: \[4\]"):
            mpi.symmetric_empty(*size, dtype=dtype)
    assert segments_mapped() == before
    assert mpi.symmetric_empty(2).numel() == 2


@in_a_job
def test_memory_that_cannot_be_had(mpi):
    """2^59 bytes per rank: more than any address space."""
    before = segments_mapped()
    with pytest.raises(Unavailable, match=r"cannot share memory of 576460752303423488 bytes per rank: .*--shm-size"):
        mpi.symmetric_empty(1 << 59, dtype=torch.int8)
    assert segments_mapped() == before
    assert mpi.symmetric_empty(2).numel() == 2


def test_files_that_cannot_hold_it(tmp_path):
    with contextlib.ExitStack() as stack, pytest.raises(Unavailable, match="Create a file without a name"):
        shared_files.offer(shared_files.nameless, 1 << 63, stack)
    (tmp_path / "small").write_bytes(bytes(100))
    found = (tmp_path / "small").stat()
    with pytest.raises(Unavailable, match="cannot open"):
        shared_files.map_file(str(tmp_path / "small"), 8192, (found.st_dev, found.st_ino))


@pytest.mark.mpi(min_size=2)
def test_ranks_in_containers_of_their_own(mpi, monkeypatch):
    """There process numbers begin anew, and the path of a nameless file may be that of another one."""
    real = os.open

    def opened(path, *args, **kwargs):
        if str(path).startswith("/proc/") and "/fd/" in str(path) and mpi.rank() == mpi.size() - 1:
            file, name = tempfile.mkstemp()
            os.unlink(name)
            os.ftruncate(file, 1 << 20)
            return file
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", opened)
    x = mpi.symmetric_empty(3)
    monkeypatch.undo()
    assert everywhere(mpi, [view[0].item() for view in peers(mpi, x.fill_(mpi.rank()))] == list(range(mpi.size())))


# Which tensors lie in it.


@in_a_job
def test_find(mpi):
    x, ordinary = mpi.symmetric_empty(40, 5), torch.zeros(200)
    segment, offset = symmetric.find(x)
    assert offset == 0
    assert symmetric.find(x[3:7]) == (segment, 60)
    assert symmetric.find(x.view(-1)[199:]) == (segment, 796)
    assert symmetric.find(x.view(-1).view(torch.uint8)[7:9]) == (segment, 7)
    assert symmetric.find(x.detach()) == (segment, 0)
    assert symmetric.find(ordinary) is None
    assert symmetric.find(x.clone()) is None
    y = mpi.symmetric_empty(40, 5)
    assert symmetric.find(y)[0].key != segment.key
    assert len(set(mpi.allgather(segment.key % (1 << 50)))) == 1
    for peer in range(mpi.size()):  # what is mapped here, but belongs to another rank
        assert (symmetric.find(segment.view(peer, torch.float32, 200)) is None) == (peer != mpi.local_rank())


@in_a_job
def test_an_empty_part_in_a_gather(mpi, selector):
    """A rank that brings 0 rows, whose tensor has no address, has to choose the flavour that the others choose."""
    selector["allgather", "node", True] = "shared"
    x = mpi.symmetric_empty(7, dtype=torch.int64).fill_(mpi.rank())
    got = mpi.allgather(x[3:3] if mpi.rank() == 0 else x)
    assert got.tolist() == [rank for rank in range(1, mpi.size()) for _ in range(7)]


# Whose memory it is, and how long.


def peers(mpi, x):
    """The same tensor of every rank, by local rank, after a meeting."""
    segment, offset = symmetric.find(x)
    mpi.barrier()
    return [segment.view(index, x.dtype, x.numel(), offset) for index in range(mpi.local_size())]


@in_a_job
def test_peers_see_what_is_written(mpi):
    x = mpi.symmetric_empty(3000, dtype=torch.int32)[5:]
    x.copy_(values(mpi.local_rank(), 2995))
    for index, view in enumerate(peers(mpi, x)):
        assert torch.equal(view, values(index, 2995).int())
    mpi.barrier()
    peers(mpi, x)[(mpi.local_rank() + 1) % mpi.size()][7] = 1000 + mpi.local_rank()
    mpi.barrier()
    assert x[7] == 1000 + (mpi.local_rank() - 1) % mpi.size()


@in_a_job
def test_it_lives_as_long_as_a_view(mpi):
    before = segments_mapped()
    x = mpi.symmetric_empty(10, 10)
    segment, _ = symmetric.find(x)
    part = x[3:4]
    del x
    assert segment.is_live
    assert segments_mapped() == before + 1
    mpi.barrier()
    if mpi.rank() == 0:
        del part  # its own affair: the others still have theirs
    else:
        assert part.fill_(3).sum() == 30
        del part
    assert segments_mapped() == before
    assert not segment.is_live


@in_a_job
def test_200_of_them_come_and_go(mpi):
    mpi.allreduce(torch.ones(3), flavour="shared")  # the channel has its own from now on
    gc.collect()
    before, files = segments_mapped(), len(os.listdir("/proc/self/fd"))
    for number in range(200):
        x = mpi.symmetric_empty(5000).fill_(1)
        if number % 2:
            mpi.allreduce(x, flavour="shared")
    del x
    assert everywhere(mpi, segments_mapped() == before and len(os.listdir("/proc/self/fd")) == files)


def is_mapped(address):
    with open("/proc/self/maps") as lines:
        bounds = [[int(end, 16) for end in line.split()[0].split("-")] for line in lines]
    return any(begin <= address < end for begin, end in bounds)


@in_a_job
def test_it_is_no_longer_live_when_it_is_unmapped(mpi, monkeypatch):
    """Else another thread could be given its addresses for ordinary memory, which would be taken for symmetric."""
    seen, remove = [], symmetric.live.remove
    monkeypatch.setattr(
        symmetric.live, "remove", lambda segment: (seen.append(is_mapped(segment.begin)), remove(segment))
    )
    x = mpi.symmetric_empty(1 << 20)
    segment, _ = symmetric.find(x)
    del x
    gc.collect()
    assert seen == [True]
    assert not segment.is_live


@in_a_job
def test_an_address_that_is_used_again(mpi):
    """A stale preparation must not be taken for a tensor that lies where another one was."""
    alone = mpi.split(mpi.rank())
    for count in (5000, 40_000):
        for _ in range(5):
            x = placed(mpi, count)
            assert torch.equal(mpi.allreduce(x, flavour="shared"), total(range(mpi.size()), count))
            del x
            for prepared in mpi.communicator(0).direct.keep(NodeGroup, NodeGroup).prepared.values():
                for ready in prepared._in_place.values():
                    ready.steps.clear()  # whoever takes them again does nothing
            y = values(mpi.rank(), count) if mpi.rank() % 2 else placed(mpi, count, alone)
            assert torch.equal(mpi.allreduce(y, flavour="shared"), total(range(mpi.size()), count))


# What flavour shared does with it.


def reduced_rightly(mpi, x, ranks, comm=None, **kwargs):
    got = mpi.allreduce(x, comm=comm, flavour="shared", **kwargs)
    assert torch.equal(got, total(ranks, x.numel()))


@in_a_job
def test_on_other_communicators_than_it_was_made_for(mpi):
    size, me = mpi.size(), mpi.rank()
    colour = me % 2
    members = [rank for rank in range(size) if rank % 2 == colour]
    with mpi.split(colour, key=-me) as half:
        for _ in range(2):
            reduced_rightly(mpi, placed(mpi, COUNT, half), members, half)  # of its own communicator
            reduced_rightly(mpi, placed(mpi, COUNT), members, half)  # of a larger one
            reduced_rightly(mpi, placed(mpi, COUNT, half), range(size))  # of a smaller one
            x = placed(mpi, COUNT)
            reduced_rightly(mpi, x, range(size), out=mpi.symmetric_empty(COUNT, comm=half))
            got = mpi.broadcast(placed(mpi, COUNT), half.size - 1, comm=half, flavour="shared")
            assert torch.equal(got, values(members[0], COUNT))


@in_a_job
def test_symmetric_on_some_ranks_only(mpi):
    size, me = mpi.size(), mpi.rank()
    for symmetric_ranks in ([], [0], [size - 1], range(1, size)):
        whole, out = mpi.symmetric_empty(COUNT), mpi.symmetric_empty(COUNT)
        x = whole.copy_(values(me, COUNT)) if me in symmetric_ranks else values(me, COUNT)
        reduced_rightly(mpi, x, range(size), out=torch.empty(COUNT))
        reduced_rightly(mpi, x, range(size), out=out)
        reduced_rightly(mpi, x, range(size), out=out if me in symmetric_ranks else torch.empty(COUNT))
        assert torch.equal(x, values(me, COUNT))
        for root in range(size):
            got = mpi.reduce(x, root, out=out.fill_(-1), flavour="shared")
            assert torch.equal(got, total(range(size), COUNT) if me == root else torch.full((COUNT,), -1.0))
        reduced_rightly(mpi, x, range(size))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("elsewhere", ["x", "out"])
def test_in_place_on_some_ranks_only(mpi, elsewhere):
    """So it is with a bucket of one gradient, which one rank has and another one has not."""
    me, size = mpi.rank(), mpi.size()
    for _ in range(2):
        x = placed(mpi, COUNT)
        if me == size - 1:
            reduced_rightly(mpi, x, range(size))
        elif elsewhere == "x":
            reduced_rightly(mpi, values(me, COUNT), range(size), out=x)
        else:
            reduced_rightly(mpi, x, range(size), out=torch.empty(COUNT))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", ["ordinary", "symmetric", "prepared"])
def test_ranks_that_call_different_things(mpi, kind):
    me, last = mpi.rank(), mpi.rank() == mpi.size() - 1
    x = values(me, COUNT) if kind == "ordinary" else placed(mpi, COUNT)
    if kind == "prepared":
        reduced_rightly(mpi, x, range(mpi.size()))
        x.copy_(values(me, COUNT))
    mistakes = [
        lambda: mpi.allreduce(x, op="max" if last else "sum", flavour="shared"),
        lambda: mpi.allreduce(x[: COUNT - last], flavour="shared"),
        lambda: mpi.allreduce_async(x[: COUNT - last], flavour="shared").wait(),
        lambda: mpi.broadcast(x, int(last), flavour="shared"),
        lambda: mpi.allreduce(x.view(torch.int32) if last else x, flavour="shared"),
        lambda: (mpi.reduce if last else mpi.allreduce)(x, flavour="shared"),
    ]
    for mistake in mistakes:
        with pytest.raises(RanksDisagree, match=rf"rank 0 calls .*; rank {mpi.size() - 1} calls .* elements of torch"):
            mistake()
        assert torch.equal(x, values(me, COUNT))
        reduced_rightly(mpi, x.clone(), range(mpi.size()))
        reduced_rightly(mpi, placed(mpi, COUNT), range(mpi.size()))
    reduced_rightly(mpi, x, range(mpi.size()))


# Where the system has less to give.


PROGRAM = """
import errno, os, sys, torch, torchmpi_py as mpi
from torchmpi_py.core import shared_files
from torchmpi_py.memory import symmetric

# A file with a name takes the place of one without, and the name is gone when all ranks have opened it.
del os.memfd_create
shared_files.SHARED_DIRECTORY = sys.argv[1]
mpi.start()
x = mpi.symmetric_empty(100_003).fill_(mpi.rank() + 1)
mpi.barrier()
assert symmetric.unavailable_because == "" and os.listdir(sys.argv[1]) == []
assert sum(sys.argv[1] in line for line in open("/proc/self/maps")) == 2
for y in (x, torch.full((100_003,), mpi.rank() + 1.0)):
    assert (mpi.allreduce(y, flavour="shared") == 3).all()
segment, _ = symmetric.find(x)
x.fill_(mpi.local_rank())
mpi.barrier()
assert (segment.view(1 - mpi.local_rank(), x.dtype, 100_003) == 1 - mpi.local_rank()).all()
mpi.stop()

# No room.
def full(file, begin, num_bytes):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

os.posix_fallocate = full
mpi.start()
for row in mpi.availability():
    if row.flavour == "shared" and row.device == "cpu" and row.status != "unimplemented":
        assert row.status.startswith("unavailable: cannot share memory"), row
        assert "No space left on device" in row.status, row
for count in (10, 1_000_003):
    assert (mpi.allreduce(torch.full((count,), mpi.rank() + 1.0)) == 3).all()
for call in (lambda: mpi.symmetric_empty(10), lambda: mpi.allreduce(torch.ones(2), flavour="shared")):
    try:
        call()
    except mpi.Unavailable as error:
        assert "--shm-size" in str(error), error
    else:
        raise AssertionError(call)
net = torch.nn.Linear(700, 700)
net.weight.grad, net.bias.grad = torch.full((700, 700), mpi.rank() + 1.0), None
mpi.nn.synchronize_gradients(net, average=False)
assert (net.weight.grad == 3).all() and net.bias.grad is None
mpi.stop()
"""


@jobs.needs_mpi
def test_without_nameless_files_and_without_room(tmp_path):
    (tmp_path / "shm").mkdir()
    job = jobs.torchmpirun("-n", 2, "--timeout", 150, jobs.write(tmp_path, PROGRAM), tmp_path / "shm")
    assert job.returncode == 0, job.stdout + job.stderr
    assert os.listdir(tmp_path / "shm") == []
