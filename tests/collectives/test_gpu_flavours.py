"""What flavours staged and cudaipc do beyond the values of a call, on the host: pieces, kinds of memory, order."""

import itertools

import pytest
import test_verbs
import torch
from support.lazy_device import LazyDevice
from test_verbs import REDUCTIONS, Way, allgather, allreduce, broadcast, gpu_flavours_on_the_host  # noqa: F401

from torchmpi_py.collectives.flavours import cudaipc, staged
from torchmpi_py.collectives.prepare import builder
from torchmpi_py.collectives.registry import BY_NAME
from torchmpi_py.core import communicators, config
from torchmpi_py.errors import RanksDisagree, Unavailable
from torchmpi_py.memory import devices

FLAVOURS = test_verbs.GPU_FLAVOURS
pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def comm(mpi, gpu_flavours_on_the_host, monkeypatch):  # noqa: F811
    """A new communicator with scratch memory of 4 to 16 KiB and chunks of 4 KiB: less than a user may give."""
    monkeypatch.setattr(cudaipc, "_LEAST_BYTES", 4096)
    small = config.Tuning(gpu_scratch_bytes=16384)
    object.__setattr__(small, "gpu_chunk_bytes", 4096)
    monkeypatch.setattr(config, "current", small)
    with mpi.split(0) as made:
        yield made


def values(rank, count):
    return ((torch.arange(count) * 7 + rank * 3) % 1001).double()


@pytest.mark.mpi
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_several_pieces(request, mpi, comm, flavour):
    if flavour == "cudaipc":
        request.getfixturevalue("one_node")
    way = Way(mpi, flavour, comm=comm)
    with way.naming_the_case():
        for turn in (0, 1):
            for reduced in REDUCTIONS:
                reduced(way, torch.float64, "sum", turn)
            for moved in (broadcast, allgather, test_verbs.gather, test_verbs.scatter, test_verbs.alltoall):
                moved(way, torch.float64, turn)


@pytest.mark.mpi
def test_messages(mpi, comm):
    """Around the ring, to oneself where there is one rank; a staged message may meet another flavour's."""
    size, me = comm.size, comm.rank
    left, right, x = (me - 1) % size, (me + 1) % size, values(me, 3000)
    for mine, theirs in (("staged", "staged"), ("staged", "mpi"), ("mpi", "staged")):
        got = torch.empty(1000, 3).double().t()
        receiving = mpi.recv_async(got, left, comm=comm, flavour=theirs)
        sending = mpi.send_async(x.view(3, 1000), right, comm=comm, flavour=mine)
        assert mpi.wait_all([receiving, sending])[0] is got
        assert torch.equal(got, values(left, 3000).view(3, 1000))
    mpi.sendreceive(x, left, right, comm=comm, flavour="staged")
    assert torch.equal(x, values(left, 3000))
    if size > 1 and me < 2:
        if me == 0:
            mpi.send(x, 1, comm=comm, flavour="staged")
        else:
            assert torch.equal(mpi.recv(x, 0, comm=comm, flavour="staged"), values(size - 1, 3000))


@pytest.mark.mpi
@pytest.mark.usefixtures("one_node")
def test_kinds_of_memory_that_differ_between_ranks(mpi, comm):
    """Symmetric on some ranks only, in all combinations of input and result; the scratch memory grows on the way."""
    for count, kinds in itertools.product([10, 1000, 4001], itertools.product([True, False], repeat=4)):
        kind_of_x, kind_of_out = kinds[:2] if comm.rank % 2 else kinds[2:]  # no scratch memory in the first call
        inputs = [values(rank, count) for rank in range(comm.size)]
        pools = [mpi.symmetric_empty(count, dtype=torch.float64, comm=comm) for _ in range(2)]
        x = (pools[0] if kind_of_x else torch.empty(count).double()).copy_(inputs[comm.rank])
        out = pools[1] if kind_of_out else torch.empty(count).double()
        assert torch.equal(mpi.allgather(x, comm=comm, flavour="cudaipc"), torch.cat(inputs))
        assert torch.equal(mpi.allreduce(x, out=out, comm=comm, flavour="cudaipc"), sum(inputs))
        assert torch.equal(x, inputs[comm.rank])
        got = mpi.reduce(x, 0, out=out.zero_(), comm=comm, flavour="cudaipc")
        assert torch.equal(got, sum(inputs) if comm.rank == 0 else torch.zeros(count).double())
        mpi.broadcast(x, comm.size - 1, comm=comm, flavour="cudaipc")
        assert torch.equal(x, inputs[-1])


@pytest.mark.mpi(min_size=2)
@pytest.mark.usefixtures("one_node")
def test_hierarchical_over_flavours_for_gpus(mpi, comm, monkeypatch):
    """The odd and the even ranks are groups, with cudaipc inside and staged between them."""
    hierarchical = BY_NAME["hierarchical"]
    monkeypatch.setattr(hierarchical, "members", {"cpu": hierarchical.members["cuda"]})
    span = communicators.stack().span
    mpi.set_collective_span(0, mpi.push_communicator(mpi.rank() % 2))
    for text in ("hierarchical", "hierarchical asynchronous"):
        way = Way(mpi, text)
        with way.naming_the_case():
            for turn in range(0, 4 * way.size, 3):
                allreduce(way, torch.float64, "sum", turn)
                test_verbs.reduce(way, torch.float64, "sum", turn)
                broadcast(way, torch.float64, turn)
                allgather(way, torch.float64, turn)
    mpi.set_collective_span(*span)


@pytest.mark.mpi
@pytest.mark.usefixtures("one_node")
def test_little_memory(mpi, comm, monkeypatch):
    """Scratch is as large as there is room for, which is found out once."""
    asked, memory = [], cudaipc.symmetric.memory

    def scarce(channel, num_bytes, device):
        asked.append(num_bytes)
        if num_bytes > 4096:
            raise Unavailable("no room")
        return memory(channel, num_bytes, device)

    monkeypatch.setattr(cudaipc.symmetric, "memory", scarce)
    total = sum(values(rank, 4001) for rank in range(comm.size))
    for _ in range(2):
        assert torch.equal(mpi.allreduce(values(comm.rank, 4001), comm=comm, flavour="cudaipc"), total)
    assert asked == [16384, 8192, 4096]


@pytest.mark.mpi
def test_an_operation_knows_all_its_tensors(mpi):
    """Also a result that is copied out at the end: the allocator of GPU memory has to be told."""
    x, out = torch.zeros(2, 3), torch.zeros(3, 2 * mpi.size()).t()
    for prepared in (builder(mpi.allgather)(x, out=out), builder(mpi.gather)(x, mpi.rank(), out=out)):
        assert any(tensor is out for tensor in prepared.tensors)


@pytest.mark.mpi(min_size=2)
@pytest.mark.usefixtures("one_node")
def test_ranks_that_disagree(mpi, comm):
    with pytest.raises(RanksDisagree, match="rank 1 calls allreduce with sum of 8 elements"):
        mpi.allreduce(torch.ones(7 + (comm.rank > 0)), comm=comm, flavour="cudaipc")


@pytest.mark.parametrize("seed", range(5))
def test_slots_are_not_overwritten_while_they_are_in_use(monkeypatch, seed):
    """Chunks come and go as late, and in as odd an order, as events let them; two operations one after another."""
    lazy = LazyDevice(seed)
    monkeypatch.setattr(devices, "of", lambda device: lazy)
    monkeypatch.setattr(staged.symmetric, "memory", lambda channel, size, device: torch.zeros(size).byte())
    slots = staged.HostSlots(None, torch.device("cpu"))
    x, out = torch.arange(11.0), torch.zeros(11)

    def task(function):
        return lambda k: lazy.do(lambda: function(k))

    def fetch(k):
        slots.part(k, staged.GIVEN, torch.float32, 1)[0] = x[k]

    def work(k):
        given, received = (slots.part(k, which, torch.float32, 1) for which in (staged.GIVEN, staged.RECEIVED))
        received[0] = given[0] * 2

    def put(k):
        out[k] = slots.part(k, staged.RECEIVED, torch.float32, 1)[0]

    slots.pipeline(11, task(fetch), work, task(put))
    lazy.do(lambda: x.copy_(out))  # on the caller's stream, after the results
    slots.pipeline(11, task(fetch), work, task(put))
    lazy.synchronize()
    assert torch.equal(out, 4 * torch.arange(11.0))
