"""Flavour ring on real ranks, in chunks so small that many are under way."""

import weakref

import pytest
import torch
from support.values import total, values
from test_verbs import REDUCTIONS, Way, allgather, alltoall, broadcast, gather, same, scatter

from torchmpi_py.collectives.flavours import ring
from torchmpi_py.core import config
from torchmpi_py.launch import variables

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(240)]

LARGEST_HEADER = 128  # of a message of Open MPI, bytes; at most
CHUNK_BYTES = 1024
CHUNK = CHUNK_BYTES // 4  # elements of float32, and of whatever is reduced as float32


def test_chunks_go_without_asking():
    """A message of Open MPI over TCP beyond the limit asks first, and the answer queues behind the data of others."""
    limit, most = (int(variables.OPEN_MPI[f"OMPI_MCA_btl_tcp_{name}"]) for name in ("eager_limit", "max_send_size"))
    assert ring.CHUNK_BYTES + LARGEST_HEADER <= limit <= most


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(ring, "CHUNK_BYTES", CHUNK_BYTES)


@pytest.mark.parametrize(
    ("dtype", "num_under_way", "text"),
    [
        (torch.float32, 1, "ring"),
        (torch.float32, 7, "ring asynchronous"),
        (torch.bfloat16, 2, "ring"),
        (torch.bfloat16, 7, "ring asynchronous"),
        (torch.uint16, 1, "ring asynchronous"),
        (torch.complex128, 2, "ring asynchronous"),
        (torch.int8, 7, "ring"),
    ],
)
def test_many_chunks(mpi, small_chunks, monkeypatch, dtype, num_under_way, text):
    monkeypatch.setattr(ring, "ROUNDS_UNDER_WAY", num_under_way)
    way = Way(mpi, text)
    with way.naming_the_case():
        for turn in range(0, 4 * way.size, 3):
            for do in (*REDUCTIONS, broadcast, allgather, gather, scatter, alltoall):
                do(way, dtype, *["sum"] * (do in REDUCTIONS), turn)


def check_reductions(mpi, count, root):
    size, me = mpi.size(), mpi.rank()
    x, expected = values(me, count), total(size, count)
    same(mpi.allreduce(x.clone(), flavour="ring"), expected)
    same(mpi.reduce(x.clone(), root, flavour="ring"), expected if me == root else x)
    same(mpi.broadcast(x, root, flavour="ring"), values(root, count))


def test_sizes_around_borders(mpi, small_chunks):
    """Few chunks go through a tree, many through a chain."""
    size = mpi.size()
    borders = {64, CHUNK, 4 * CHUNK, size, size * 64, size * CHUNK, size * 3 * CHUNK, (size + 1) * CHUNK}
    counts = {max(0, border + near) for border in borders for near in (-1, 0, 1)}
    for count in sorted(counts | {number * CHUNK - 3 for number in range(1, size + 2)}):
        check_reductions(mpi, count, count % size)


def test_chunks_of_the_true_size(mpi):
    """More than there are ranks, and than are under way."""
    check_reductions(mpi, ring.CHUNK_BYTES // 4 * (mpi.size() * ring.ROUNDS_UNDER_WAY + 2) + 5, mpi.size() - 1)


def test_the_same_bits_on_all_ranks_and_in_all_runs(mpi, small_chunks):
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        x = torch.randn(20_011, generator=torch.Generator().manual_seed(mpi.rank())).to(dtype)
        first, second = (mpi.allreduce(x, out=torch.empty_like(x), op="avg", flavour="ring") for _ in range(2))
        mpi.check_with_allreduce(first, f"avg of {dtype}")
        same(first, second)


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


def test_no_message_is_longer_than_the_tuning_allows(mpi, posted, monkeypatch):
    monkeypatch.setattr(config, "current", config.Tuning(native_async_bytes=8, message_bytes=1000))
    for dtype in (torch.float32, torch.bfloat16, torch.complex128):
        same(mpi.allreduce(values(mpi.rank(), 5000, dtype), flavour="ring"), total(mpi.size(), 5000, dtype))
        same(mpi.broadcast(values(mpi.rank(), 5000, dtype), flavour="ring"), values(0, 5000, dtype))
    assert max((max(pair) for pair in posted), default=1000) in range(900, 1001)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_that_are_sent(mpi, posted, dtype):
    """Of 16-bit floats, partial sums alone travel as float32: with two ranks there are none on the way."""
    size, count = mpi.size(), 6000 * mpi.size()
    assert (mpi.allreduce(torch.ones(count).to(dtype), flavour="ring") == size).all()
    own, partial = dtype.itemsize, max(4, dtype.itemsize)
    of_a_slice = own + (size - 2) * partial + (size - 1) * own if size > 1 else 0  # from rank to rank, twice around
    assert mpi.allreduce(sum(sent for sent, _ in posted)) == count * of_a_slice


def test_scratch_is_bounded(mpi, small_chunks, monkeypatch):
    """2 rooms a round under way, however large the tensor, and the same ones again in the next call."""
    pools = []

    class Pool(ring.ChunkPool):
        def __init__(self, channel):
            super().__init__(channel)
            pools.append(self)

    monkeypatch.setattr(ring, "ChunkPool", Pool)  # a new key, so a new pool
    for count, dtype in ((60 * CHUNK, torch.float16), (7 * CHUNK, torch.float32), (100 * CHUNK, torch.float32)):
        same(mpi.allreduce(values(mpi.rank(), count, dtype), flavour="ring"), total(mpi.size(), count, dtype))
        mpi.reduce(values(mpi.rank(), count, dtype), flavour="ring")
    (pool,) = pools
    assert len(pool.unused) <= 2 * ring.ROUNDS_UNDER_WAY
    assert all(room.nbytes == CHUNK_BYTES for room in pool.unused)


def test_a_round_keeps_the_tensors_that_mpi_works_on(mpi):
    given, received = torch.ones(3), torch.ones(3)
    copies = ring._Copies(mpi.communicator().direct, given, received)
    walk, kept = copies.walk([]), weakref.ref(received)
    del given, received, copies
    assert kept() is not None
    walk.close()
