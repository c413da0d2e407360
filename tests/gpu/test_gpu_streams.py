"""The order of work: what is queued before a call is done before it, what is queued after it sees its results."""

import gc

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no GPU that torch can use", allow_module_level=True)

pytestmark = pytest.mark.mpi

COUNT = 300_001
SLOW = 2_000_000  # cycles; about a millisecond
FLAVOURS = ["staged", "cudaipc"]


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("form", ["blocking", "asynchronous"])
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_no_race(mpi, size, me, stream, flavour, form, symmetric):
    """Values arrive late on every rank, each time on another one last; 200 times."""
    x = mpi.symmetric_empty(COUNT, device="cuda") if symmetric else torch.empty(COUNT, device="cuda")
    wrong = torch.zeros((), device="cuda")
    for turn in range(200):
        torch.cuda._sleep(SLOW if turn % size == me else 0)
        x.fill_(turn + me)
        if form == "blocking":
            mpi.allreduce(x, flavour=flavour)
        else:
            mpi.allreduce_async(x, flavour=flavour).wait()
        wrong += (x != size * turn + size * (size - 1) // 2).sum()  # no waiting on the host
    assert wrong.item() == 0


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_computation_meanwhile(mpi, size, me, stream, flavour):
    """An asynchronous operation and other work on the caller's stream do not disturb each other."""
    x, y = torch.empty(COUNT, device="cuda"), torch.zeros(COUNT, device="cuda")
    for turn in range(50):
        torch.cuda._sleep(SLOW // 10)
        x.fill_(turn + me)
        handle = mpi.allreduce_async(x, flavour=flavour)
        y += 1
        handle.wait()
        y += x
    total = sum(size * turn + size * (size - 1) // 2 for turn in range(50)) + 50
    assert (y == total).all()


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_one_stream_after_another(mpi, size, me, flavour):
    """Operations on several streams that do not wait for each other share the flavour's own memory."""
    streams = [torch.cuda.Stream() for _ in range(3)]
    results = []
    for turn in range(60):
        with torch.cuda.stream(streams[turn % 3]):
            torch.cuda._sleep(SLOW if turn % size == me else 0)
            x = torch.full((COUNT,), float(turn + me), device="cuda")
            results.append(mpi.allreduce(x, flavour=flavour))
    torch.cuda.synchronize()
    for turn, x in enumerate(results):
        assert (x == size * turn + size * (size - 1) // 2).all()


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_handles(mpi, stream, flavour):
    x = torch.ones(COUNT, device="cuda")
    handle = mpi.allreduce_async(x, flavour=flavour)
    handle.synchronize()
    assert handle.done()
    assert handle.wait() is x
    with torch.cuda.stream(torch.cuda.Stream()):
        assert (handle.wait() == mpi.size()).all()


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_dropped_tensors(mpi, stream, flavour):
    """Memory of tensors that only the operation knows is not given to others before the operation is through."""
    handles = []
    for turn in range(100):
        x = torch.full((COUNT,), float(turn + mpi.rank()), device="cuda")
        handles.append(mpi.allreduce_async(x, out=torch.empty(COUNT, device="cuda"), flavour=flavour))
        del x
        torch.empty(COUNT, device="cuda").fill_(-1)
    size = mpi.size()
    for turn, handle in enumerate(handles):
        assert (handle.wait() == size * turn + size * (size - 1) // 2).all()


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_memory_that_comes_and_goes(mpi, size, me, flavour):
    """1000 tensors of torch's allocator, freed and taken again: no stale mapping, and memory stays as it is."""
    for turn in range(1000):
        count = 1000 + 7919 * (turn % 13)
        x = torch.full((count,), float(turn % 97 + me), device="cuda")
        mpi.allreduce(x, flavour=flavour)
        if turn % 50 == 0:
            assert (x == size * (turn % 97) + size * (size - 1) // 2).all()
            del x
            torch.cuda.empty_cache()
        if turn == 100:
            before = used(mpi)
    assert used(mpi) <= before + (64 << 20)


def test_symmetric_memory_comes_and_goes(mpi, size, me):
    for turn in range(300):
        x = mpi.symmetric_empty(100_000 + 1000 * (turn % 7), device="cuda").fill_(turn + me)
        mpi.allreduce(x, flavour="cudaipc")
        if turn % 20 == 0:
            assert (x == size * turn + size * (size - 1) // 2).all()
        if turn == 50:
            before = used(mpi)
    del x
    assert used(mpi) <= before + (64 << 20)


def used(mpi):
    """Bytes of the GPU in use, by all processes."""
    gc.collect()
    torch.cuda.synchronize()
    mpi.barrier()
    torch.cuda.empty_cache()
    torch.cuda.ipc_collect()
    mpi.barrier()
    free, total = torch.cuda.mem_get_info()
    return total - free


def test_a_graph_cannot_hold_a_collective(mpi):
    x = torch.ones(10, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x += 1  # torch warns of a graph with nothing in it
        with pytest.raises(RuntimeError, match="a collective cannot be part of a CUDA graph"):
            mpi.allreduce(x)
    graph.replay()
    assert (x == 2).all()


def test_large_tensors_in_pieces(mpi, size, me, stream):
    """Larger than scratch memory and chunks: several pieces, the last one shorter."""
    count = (300 << 20) // 4 + 17
    for flavour in FLAVOURS:
        whole = torch.arange(count, device="cuda", dtype=torch.int32).remainder_(1000)  # float32 does not count so far
        x = whole.add(me).float()
        mpi.allreduce(x, flavour=flavour)
        assert torch.equal(x, whole.mul_(size).add_(size * (size - 1) // 2).float())
