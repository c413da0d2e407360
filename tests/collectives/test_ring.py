"""Flavour ring on real ranks, in chunks so small that many are under way; what is common to all flavours is elsewhere.

Element j on rank r holds a whole number that depends on both and is exact in every dtype used here.
"""

import weakref

import pytest
import torch

from torchmpi_py.collectives.flavours import ring
from torchmpi_py.core import config
from torchmpi_py.launch import variables

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(240)]

LARGEST_HEADER = 128  # of a message of Open MPI, bytes; at most
CHUNK_BYTES = 1024
CHUNK = CHUNK_BYTES // 4  # elements of float32, and of whatever is reduced as float32
DTYPES = [torch.float32, torch.bfloat16, torch.uint16, torch.complex128, torch.int8]


def name(value):
    return str(value).removeprefix("torch.")


def test_chunks_go_without_asking():
    """A message of Open MPI over TCP beyond the limit asks first, and the answer queues behind the data of others."""
    limit, most = (int(variables.OPEN_MPI[f"OMPI_MCA_btl_tcp_{name}"]) for name in ("eager_limit", "max_send_size"))
    assert ring.CHUNK_BYTES + LARGEST_HEADER <= limit <= most


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(ring, "CHUNK_BYTES", CHUNK_BYTES)


def values(rank, count, dtype=torch.float32):
    j = torch.arange(count)
    return ((j * 7 + j // 11 + j // CHUNK + rank * 3) % 5).to(dtype)


def total(size, count, dtype=torch.float32):
    return torch.stack([values(rank, count, torch.int64) for rank in range(size)]).sum(0).to(dtype)


def same(got, expected):
    assert got.dtype == expected.dtype
    assert torch.equal(got.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


def call(mpi, form, verb, *args, **kwargs):
    if form == "blocking":
        return getattr(mpi, verb)(*args, flavour="ring", **kwargs)
    return getattr(mpi, f"{verb}_async")(*args, flavour="ring", **kwargs).wait()


@pytest.mark.parametrize("form", ["blocking", "asynchronous"])
@pytest.mark.parametrize("num_under_way", [1, 2, 7])
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_many_chunks(mpi, small_chunks, monkeypatch, dtype, num_under_way, form):
    monkeypatch.setattr(ring, "ROUNDS_UNDER_WAY", num_under_way)
    size, me, rows = mpi.size(), mpi.rank(), 9 * CHUNK + 5
    count = size * rows
    inputs = [values(rank, count, dtype) for rank in range(size)]
    x, out = inputs[me].clone(), torch.full((count,), 1).to(dtype)
    expected = total(size, count, dtype)
    same(call(mpi, form, "allreduce", x, out=out), expected)
    same(x, inputs[me])
    same(call(mpi, form, "allreduce", x.clone()), expected)
    same(call(mpi, form, "reduce_scatter", x), expected[me * rows : (me + 1) * rows])
    same(call(mpi, form, "alltoall", x, out=out), torch.cat([y[me * rows : (me + 1) * rows] for y in inputs]))
    same(x, inputs[me])
    for root in range(size):
        same(call(mpi, form, "reduce", x.clone(), root), expected if me == root else x)
        same(call(mpi, form, "reduce", x, root, out=out.fill_(1)), expected if me == root else torch.ones_like(out))
        same(call(mpi, form, "broadcast", x.clone(), root), inputs[root])
        same(call(mpi, form, "scatter", x, root), inputs[root][me * rows : (me + 1) * rows])
    same(x, inputs[me])


@pytest.mark.parametrize("form", ["blocking", "asynchronous"])
def test_unequal_parts(mpi, small_chunks, form):
    size, me = mpi.size(), mpi.rank()
    for rows in (
        [(rank * 5 % 3) * CHUNK for rank in range(size)],
        [CHUNK * (rank == size - 1) for rank in range(size)],
    ):
        parts = [values(rank, 3 * rows[rank], torch.int16).view(-1, 3) for rank in range(size)]
        same(call(mpi, form, "allgather", parts[me]), torch.cat(parts))
        for root in range(size):
            got = call(mpi, form, "gather", parts[me], root)
            assert (got is None) == (me != root)
            if got is not None:
                same(got, torch.cat(parts))


def test_sizes_around_borders(mpi, small_chunks):
    size, me = mpi.size(), mpi.rank()
    borders = {64, CHUNK, 4 * CHUNK, size, size * 64, size * CHUNK, size * 3 * CHUNK, (size + 1) * CHUNK}
    for count in sorted({max(0, border + near) for border in borders for near in (-1, 0, 1)}):
        x, expected = values(me, count), total(size, count)
        same(mpi.allreduce(x.clone(), flavour="ring"), expected)
        root = count % size
        same(mpi.broadcast(x.clone(), root, flavour="ring"), values(root, count))
        same(mpi.reduce(x.clone(), root, flavour="ring"), expected if me == root else x)


def test_8_mib(mpi):
    """As many chunks of the true size as there are ranks and more."""
    size, me, count = mpi.size(), mpi.rank(), (8 << 20) // 4 // mpi.size() * mpi.size()
    x, expected = values(me, count), total(size, count)
    out = torch.zeros_like(x)
    same(mpi.allreduce(x, out=out, flavour="ring"), expected)
    same(mpi.reduce(x, size - 1, out=out.zero_(), flavour="ring"), expected if me == size - 1 else torch.zeros(count))
    same(mpi.allreduce_async(x, flavour="ring").wait(), expected)
    x = values(me, count)
    same(mpi.broadcast(x, size - 1, flavour="ring"), values(size - 1, count))


def test_the_same_bits_on_all_ranks_and_in_all_runs(mpi, small_chunks):
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        x = torch.randn(20_011, generator=torch.Generator().manual_seed(mpi.rank())).to(dtype)
        first, second = (mpi.allreduce(x, out=torch.empty_like(x), op="avg", flavour="ring") for _ in range(2))
        mpi.check_with_allreduce(first, f"avg of {dtype}")
        same(first, second)


def test_between_tree_and_chain(mpi, small_chunks):
    """From one chunk to a few, where broadcast and reduce go over from the tree to the chain."""
    size, me = mpi.size(), mpi.rank()
    for num_chunks in range(1, size + 2):
        count = num_chunks * CHUNK - 3
        for root in range(size):
            same(mpi.broadcast(values(me, count), root, flavour="ring"), values(root, count))
            got = mpi.reduce(values(me, count), root, flavour="ring")
            same(got, total(size, count) if me == root else values(me, count))


def test_communicators_within(mpi, small_chunks):
    """Halves of the world at the same time, one of them in reversed order."""
    world, me = mpi.size(), mpi.rank()
    with mpi.split(me % 2, key=me if me % 2 else -me) as comm:
        members = sorted(range(me % 2, world, 2), reverse=me % 2 == 0)
        assert comm.size == len(members)
        count = 3 * comm.size * CHUNK + 1
        expected = torch.stack([values(rank, count) for rank in members]).sum(0)
        same(mpi.allreduce(values(me, count), comm=comm, flavour="ring"), expected)
        same(mpi.broadcast(values(me, count), comm.size - 1, comm=comm, flavour="ring"), values(members[-1], count))
        got = mpi.allgather(values(me, CHUNK + me), comm=comm, flavour="ring")
        same(got, torch.cat([values(rank, CHUNK + rank) for rank in members]))


def test_messages_of_the_user_are_left_alone(mpi, small_chunks):
    """A receive from the left neighbour is under way while the ring's messages come from there."""
    size, me, count = mpi.size(), mpi.rank(), 5 * CHUNK
    got = torch.zeros(count)
    receiving = mpi.recv_async(got, (me - 1) % size)
    same(mpi.allreduce(values(me, count), flavour="ring"), total(size, count))
    sending = mpi.send_async(values(me, count), (me + 1) % size)
    same(mpi.broadcast(values(me, count), size - 1, flavour="ring"), values(size - 1, count))
    mpi.wait_all([receiving, sending])
    same(got, values((me - 1) % size, count))


def test_no_message_is_longer_than_the_tuning_allows(mpi, monkeypatch):
    longest = []
    post = ring.post

    def measured(comm, step, given, taken):
        longest.append(max(len(given), len(taken)))
        return post(comm, step, given, taken)

    monkeypatch.setattr(ring, "post", measured)
    monkeypatch.setattr(config, "current", config.Tuning(native_async_bytes=8, message_bytes=1000))
    for dtype in (torch.float32, torch.bfloat16, torch.complex128):
        x = values(mpi.rank(), 5000, dtype)
        same(mpi.allreduce(x, flavour="ring"), total(mpi.size(), 5000, dtype))
        same(mpi.broadcast(values(mpi.rank(), 5000, dtype), flavour="ring"), values(0, 5000, dtype))
    assert max(longest, default=1000) in range(900, 1001)


def test_scratch_is_bounded(mpi, small_chunks, monkeypatch):
    """2 rooms a round under way, however large the tensor, and the same ones again in the next call."""
    pools = []

    class Pool(ring.ChunkPool):
        def __init__(self, channel):
            super().__init__(channel)
            pools.append(self)

    monkeypatch.setattr(ring, "ChunkPool", Pool)  # a new key, so a new pool
    for count in (100 * CHUNK, 7 * CHUNK, 150 * CHUNK):
        for dtype in (torch.float32, torch.float16):
            same(mpi.allreduce(values(mpi.rank(), count, dtype), flavour="ring"), total(mpi.size(), count, dtype))
            mpi.reduce(values(mpi.rank(), count, dtype), flavour="ring")
    for pool in pools:
        assert len(pool.unused) <= 2 * ring.ROUNDS_UNDER_WAY
        assert all(room.nbytes == CHUNK_BYTES for room in pool.unused)
    assert len(pools) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bytes_that_are_sent(mpi, monkeypatch, dtype):
    """Of 16-bit floats, partial sums alone travel as float32: with two ranks there are none on the way."""
    size, count = mpi.size(), 6000 * mpi.size()
    sent, post = [], ring.post

    def counted(comm, step, given, received):
        sent.append(len(given))
        return post(comm, step, given, received)

    monkeypatch.setattr(ring, "post", counted)
    x = torch.ones(count).to(dtype)
    mpi.allreduce(x, flavour="ring")
    assert (x == size).all()
    own, partial = dtype.itemsize, max(4, dtype.itemsize)
    of_a_slice = own + (size - 2) * partial + (size - 1) * own if size > 1 else 0  # from rank to rank, twice around
    assert mpi.allreduce(sum(sent)) == count * of_a_slice


def test_a_round_keeps_the_tensors_that_mpi_works_on(mpi):
    given, received = torch.ones(3), torch.ones(3)
    copies = ring._Copies(mpi.communicator().direct, given, received)
    walk, kept = copies.walk([]), weakref.ref(received)
    del given, received, copies
    assert kept() is not None
    walk.close()
