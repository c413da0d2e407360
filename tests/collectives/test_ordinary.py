"""Ordinary tensors on one node: through slots, or read from the peers' memory; by trials, whichever is faster."""

import ctypes
import errno
import itertools
import mmap
import os

import pytest
import torch
from support.values import total, values
from test_verbs import REDUCTIONS, Way, allgather, alltoall, broadcast, gather, reduce, scatter

from torchmpi_py.collectives.flavours import node_group, single_copy, staging, trials
from torchmpi_py.collectives.flavours.node_group import NodeGroup
from torchmpi_py.collectives.flavours.trials import Trials
from torchmpi_py.core import process_memory
from torchmpi_py.core.tensors import ops_of
from torchmpi_py.errors import CommunicatorError, RanksDisagree
from torchmpi_py.memory import peer_memory

pytestmark = pytest.mark.timeout(120)
mpi_only = pytest.mark.mpi
COUNT = 30_011  # elements of a row: 117 KiB in float32
STAGED, SINGLE_COPY = 0, 1
KINDS = [
    (dtype, op)
    for dtype in (torch.float64, torch.bfloat16, torch.complex64, torch.int16, torch.bool)
    for op in ("sum", "avg", "max", "prod")
    if op in ops_of(dtype)
]


@pytest.fixture
def node(mpi, one_node, monkeypatch):
    """(a communicator of all ranks, its node group) whose chunks and blocks are small."""
    with mpi.split(0) as comm:
        group = comm.direct.keep(NodeGroup, NodeGroup)
        if group.peers is None:
            pytest.skip("the kernel lets no process read another's memory")
        monkeypatch.setattr(group, "chunk_bytes", 4096)
        yield comm, group


@pytest.fixture
def go(node, monkeypatch):
    """A function that chooses the way of all following calls, and counts them."""
    calls = []

    def choose(way):
        monkeypatch.setattr(node[1].trials, "run", lambda key, num_bytes, ways: (calls.append(key), ways[way]()))
        return calls

    return choose


def noise(rank, count, dtype=torch.float32):
    return torch.randn(count, generator=torch.Generator().manual_seed(rank)).mul(3).to(dtype)


def reduced_everywhere(mpi, comm):
    """(result, expectation) of an allreduce."""
    return mpi.allreduce(values(mpi.rank(), COUNT), comm=comm, flavour="shared"), total(mpi.size(), COUNT)


@mpi_only(min_size=2)
@pytest.mark.parametrize("way", [STAGED, SINGLE_COPY])
def test_both_ways(mpi, node, go, way):
    """Of every verb; a reduce is always staged."""
    calls, shared = go(way), Way(mpi, "shared", comm=node[0])
    with shared.naming_the_case():
        for do in (*REDUCTIONS, broadcast, allgather, gather, scatter, alltoall):
            calls.clear()
            for turn in (0, 1):
                do(shared, torch.float32, *["sum"] * (do in REDUCTIONS), turn)
            assert bool(calls) == (do is not reduce), do


@mpi_only
def test_both_ways_give_the_same_bits(mpi, node, go, monkeypatch):
    monkeypatch.setattr(single_copy, "_BLOCK_BYTES", 100_000)  # blocks end in odd places
    for dtype, op in KINDS:
        x, results = noise(mpi.rank(), COUNT, dtype), []
        for way in (STAGED, SINGLE_COPY):
            go(way)
            results.append(mpi.allreduce(x.clone(), op=op, comm=node[0], flavour="shared").view(torch.uint8))
        assert torch.equal(*results), (dtype, op)
        assert len(set(mpi.allgather_object(results[0].numpy().tobytes()))) == 1, (dtype, op)


@mpi_only(min_size=2)
def test_memory_that_not_all_ranks_can_read_is_staged(mpi, node, go, monkeypatch):
    comm, _ = node
    calls = go(SINGLE_COPY)
    memory = mpi.symmetric_empty(COUNT, comm=comm)  # all ranks make it, rank 0 uses it
    x = memory if mpi.rank() == 0 else torch.empty(COUNT)
    mpi.allreduce(x.copy_(values(mpi.rank(), COUNT)), comm=comm, flavour="shared")
    assert torch.equal(x, total(mpi.size(), COUNT))
    monkeypatch.setattr(node_group, "is_readable", lambda x: mpi.rank() != 1)
    assert torch.equal(*reduced_everywhere(mpi, comm))
    assert not calls


@mpi_only(min_size=2)
def test_one_rank_that_may_not_read(mpi, one_node, monkeypatch):
    """Then no rank does, and all is staged."""
    if mpi.rank() == mpi.size() - 1:
        monkeypatch.setattr(peer_memory, "_can_read", lambda *_: False)
    with mpi.split(0) as comm:
        group = comm.direct.keep(NodeGroup, NodeGroup)
        assert group.peers is None
        monkeypatch.setattr(group, "chunk_bytes", 4096)
        assert torch.equal(*reduced_everywhere(mpi, comm))


@mpi_only(min_size=2)
def test_the_ranks_agree(mpi, node, monkeypatch):
    """Each rank finds another way faster; the slowest rank decides."""
    clock = itertools.count()
    monkeypatch.setattr(trials.time, "perf_counter", lambda: next(clock) * (1 + mpi.rank()))
    comm, group = node
    for _ in range(2 * trials._TURNS + 3):
        assert torch.equal(*reduced_everywhere(mpi, comm))
    (trial,) = group.trials._of.values()
    assert mpi.allgather_object(trial.chosen) == [0] * mpi.size()
    assert trial.count == 2 * trials._TURNS + 3


# What fits into two slots, between two ranks: the values come with the headers.


@pytest.fixture
def pair(mpi, one_node, monkeypatch):
    """(a communicator of two ranks, its node group, the calls that went that way); the last of an odd number skips."""
    with mpi.split(mpi.rank() // 2) as comm:
        if comm.size < 2:
            pytest.skip("no other rank is left")
        group, calls, former = comm.direct.keep(NodeGroup, NodeGroup), [], staging.allreduce_at_once
        group.chunk_bytes = group._slot_bytes = 4096
        monkeypatch.setattr(
            staging, "allreduce_at_once", lambda *args: (calls.append(args[1].numel()), former(*args))[1]
        )
        yield comm, group, calls


@mpi_only(min_size=2)
def test_both_ranks_get_the_same_bits_in_rank_order(mpi, pair):
    comm, group, _ = pair
    for (dtype, op), count in itertools.product(KINDS, (100, 10_000)):
        x = noise(comm.rank, count, dtype)
        bits = [mpi.allreduce(x.clone(), op=op, comm=comm, flavour="shared").view(torch.uint8)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(staging, "takes_one_shot", lambda *_: False)
            patch.setattr(group, "peers", None)
            bits.append(mpi.allreduce(x.clone(), op=op, comm=comm, flavour="shared").view(torch.uint8))
        assert all(torch.equal(bits[0], each) for each in (bits[1], *mpi.allgather_object(bits[0], comm=comm)))


@mpi_only(min_size=2)
@pytest.mark.parametrize("op", ["sum", "prod"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.complex128])
def test_bits_do_not_depend_on_the_threads_of_a_rank(mpi, pair, dtype, op):
    """Complex products are rounded otherwise at the ends of what a thread works on."""
    comm, group, _ = pair
    group.chunk_bytes = group._slot_bytes = 1 << 20  # large enough for several threads
    generator, former = torch.Generator().manual_seed(comm.rank), torch.get_num_threads()
    torch.set_num_threads(1 + 2 * comm.rank)
    try:
        x = torch.randn(100_003, dtype=dtype, generator=generator)
        mpi.allreduce(x, op=op, comm=comm, flavour="shared")
    finally:
        torch.set_num_threads(former)
    assert len(set(mpi.allgather_object(bytes(x.view(torch.uint8).numpy()), comm=comm))) == 1


@mpi_only(min_size=2)
def test_what_one_of_two_ranks_does_otherwise(mpi, pair):
    """It gives a symmetric tensor, or another number of elements: then nothing is changed."""
    comm, _, calls = pair
    memory = mpi.symmetric_empty(1000, comm=comm)  # both make it, one uses it
    for who in range(2):
        x = memory if comm.rank == who else torch.empty(1000)
        x.copy_(values(comm.rank, 1000))
        mpi.allreduce(x, comm=comm, flavour="shared")
        assert torch.equal(x, values(0, 1000) + values(1, 1000))
    assert calls == [1000]  # in which the ranks found that it was not for both
    x = values(comm.rank, 100 + comm.rank)
    with pytest.raises(RanksDisagree, match=r"rank 0 calls .*100 elements.*rank 1 calls .*101 elements"):
        mpi.allreduce(x, comm=comm, flavour="shared")
    assert torch.equal(x, values(comm.rank, 100 + comm.rank))
    with torch.inference_mode():  # what is prepared there serves others
        x = mpi.allreduce(values(comm.rank, 77), comm=comm, flavour="shared")
    assert torch.equal(mpi.allreduce(values(comm.rank, 77), comm=comm, flavour="shared"), x)
    assert torch.equal(x, values(0, 77) + values(1, 77))


# Without MPI.


def takes(clock, name, seconds, calls):
    def way():
        clock[0] += seconds[0]
        calls.append(name)

    return way


def test_the_faster_way_is_taken_until_the_next_trial(monkeypatch):
    clock, calls, first, second = [0.0], [], [2.0], [1.0]
    monkeypatch.setattr(trials.time, "perf_counter", lambda: clock[0])
    ways = [takes(clock, "a", first, calls), takes(clock, "b", second, calls)]
    runner = Trials(lambda times: [times, times])
    num_timed = 2 * trials._TURNS
    for _ in range(num_timed + trials._HELD_CALLS):
        runner.run("key", 1, ways)
    assert calls == ["a", "b", "b", "a", "a", "b"] + ["b"] * trials._HELD_CALLS
    calls.clear()
    second[0] = 3.0  # the machine has changed
    for _ in range(num_timed + 1):
        runner.run("key", 1, ways)
    assert calls == ["a", "b", "b", "a", "a", "b", "a"]
    runner.run("another key", 1, ways)
    assert calls[-1] == "a"


def test_one_call_that_is_slow_by_chance_does_not_decide(monkeypatch):
    clock, calls, first = [0.0], [], [100.0]
    monkeypatch.setattr(trials.time, "perf_counter", lambda: clock[0])
    runner, ways = Trials(lambda times: [times]), [takes(clock, "a", first, calls), takes(clock, "b", [2.0], calls)]
    for _ in range(2 * trials._TURNS + 1):
        runner.run("key", 1, ways)
        first[0] = 1.0
    assert calls[-1] == "a"


def own(pid=None):
    return peer_memory.PeerMemory([os.getpid() if pid is None else pid])


def test_the_kernel_takes_a_part_at_a_time(monkeypatch):
    x, into = torch.arange(1000, dtype=torch.uint8), torch.zeros(1000, dtype=torch.uint8)
    whole = process_memory._libc.process_vm_readv

    class Libc:
        @staticmethod
        def process_vm_readv(pid, here, num_here, there, num_there, flags):
            here._obj.num_bytes = min(here._obj.num_bytes, 300)
            return whole(pid, here, num_here, there, num_there, flags)

    monkeypatch.setattr(process_memory, "_libc", Libc)
    own().read(0, x.data_ptr(), into)
    assert torch.equal(into, x)


def test_a_rank_that_has_died():
    child = os.fork()
    if not child:
        os._exit(0)
    into = torch.full((4,), 5.0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    with pytest.raises(CommunicatorError, match="rank 0 has died"):
        own(child).read(0, into.data_ptr(), into)  # it has ended, and has a number still
    os.waitpid(child, 0)
    with pytest.raises(CommunicatorError, match="rank 0 has died"):
        own(child).read(0, into.data_ptr(), into)


def test_memory_that_is_not_there():
    into = torch.zeros(4)
    with pytest.raises(CommunicatorError, match=r"of rank 0 cannot be read: Bad address \(0x10\)\. The rank has died"):
        own().read(0, 16, into)


def test_what_others_can_read():
    """Memory of a driver is mapped as a device is: no other process can read it."""
    with open("/dev/zero", "r+b") as file, mmap.mmap(file.fileno(), 8192) as mapping:
        x = torch.frombuffer(mapping, dtype=torch.uint8)
        assert peer_memory.is_readable(x)
        assert peer_memory.is_readable(x[:0])
        ctypes.CDLL(None).mprotect(ctypes.c_void_p(x.data_ptr() + 4096), ctypes.c_size_t(4096), 0)
        assert peer_memory.is_readable(x[:4096])
        assert not peer_memory.is_readable(x)
        ctypes.CDLL(None).mprotect(ctypes.c_void_p(x.data_ptr() + 4096), ctypes.c_size_t(4096), 3)
        del x
    assert not peer_memory.is_readable(torch.empty(3, device="meta"))


def test_what_lies_at_an_address_must_be_the_token(monkeypatch):
    """Another process may have the same number, as in another container; or the system refuses."""
    other = ctypes.create_string_buffer(b"other" * 4)
    assert not peer_memory._can_read(os.getpid(), ctypes.addressof(other), b"token" * 4)
    assert peer_memory._can_read(os.getpid(), ctypes.addressof(other), b"other" * 4)

    class Refusing:
        process_vm_readv = staticmethod(lambda *_: -1)

    monkeypatch.setattr(process_memory.ctypes, "get_errno", lambda: errno.EPERM)
    for libc in (object(), Refusing):  # there is no such call; it is not allowed
        monkeypatch.setattr(process_memory, "_libc", libc)
        assert not peer_memory._can_read(os.getpid(), 0, b"token")
