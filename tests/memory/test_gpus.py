"""Which ranks can map each other's GPU memory: the arithmetic, without a GPU."""

from types import SimpleNamespace

import pytest
import torch

from torchmpi_py.collectives.flavours import gpu_probe
from torchmpi_py.collectives.registry import BY_NAME
from torchmpi_py.core.channels import Place
from torchmpi_py.errors import RanksDisagree, Unavailable
from torchmpi_py.memory import cuda_ipc, gpus, symmetric
from torchmpi_py.memory.gpus import Gpu, GpuOffer, GpuTable

pytestmark = pytest.mark.timeout(240)


@pytest.mark.parametrize(
    ("ranks", "groups"),  # a node, the rank's GPU, and the others that it reaches
    [
        (["0AB", "0BA", "0AB", "0BA", "0AB"], [0, 0, 0, 0, 0]),
        (["0A", "0B", "0A", "0B", "0A"], [0, 1, 0, 1, 0]),  # each process sees its own GPU only
        (["0AB", "0B"], [0, 1]),  # reach has to be mutual
        (["0AB", "0BA"], [0, 0]),
        (["0A", "0A", "2A", "2A"], [0, 0, 2, 2]),  # groups are of one node
        (["0AB", "0BAC", "0CBD", "0DC"], [0, 0, 2, 2]),  # a link of B and C makes not one group of all
    ],
)
def test_ranks_of_a_group_all_reach_each_other(ranks, groups):
    offers = [
        GpuOffer(Place(int(node), local), gpu, frozenset([gpu, *reached]))
        for local, (node, gpu, *reached) in enumerate(ranks)
    ]
    assert gpus.ipc_groups(offers) == groups


def test_why_no_ipc(monkeypatch):
    places = [Place(0, local) for local in range(3)]
    assert "call mpi.start(with_cuda=True)" in gpus.why_no_ipc(places)
    assert gpus.table() is None
    assert gpus.group(Place(7, 1)) == 7
    table = dict(zip(places, [Gpu("A", 0), Gpu("A", 0), Gpu("B", 2)], strict=True))
    monkeypatch.setattr(gpus, "current", GpuTable(table, ""))
    assert gpus.why_no_ipc(places[:2]) == gpus.why_no_ipc() == ""
    assert "cannot all reach each other's memory (A, B)" in gpus.why_no_ipc(places)
    assert gpus.table() == {places[0]: "A", places[1]: "A", places[2]: "B"}
    assert gpus.group(places[2]) == 2
    gpus.switch_off("a reason")
    assert gpus.why_no_ipc(places[:1]) == gpus.why_no_ipc() == "a reason"
    assert gpus.group(places[2]) == 0


def one_gpu(monkeypatch):
    """This process sees one GPU."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(name="A", uuid="5"))


def test_a_table_of_one_rank(monkeypatch):
    """As ``start`` makes it; also where the user has switched IPC off."""
    one_gpu(monkeypatch)
    world = SimpleNamespace(allgather=lambda offer: [offer])
    for with_ipc in (True, False):
        table = gpus.exchange(world, Place(0, 0), torch.device("cuda", 0), with_ipc=with_ipc)
        assert table.gpus == {Place(0, 0): Gpu("GPU-5", 0)}
        monkeypatch.setattr(gpus, "current", table)
        assert (gpus.why_no_ipc() == "") == with_ipc
        assert with_ipc or "with_ipc_groups=False" in gpus.why_no_ipc([Place(0, 0)])


@pytest.mark.parametrize(
    ("num_nodes", "groups", "reason"), [(1, (0, 1), "cannot all reach"), (1, (0, 0), ""), (2, (0, 0), "span 2 nodes")]
)
def test_the_flavour_refuses_ranks_of_several_groups(monkeypatch, num_nodes, groups, reason):
    places = [Place(0, 0), Place(0, 1)]
    table = {place: Gpu(name, group) for place, name, group in zip(places, "AB", groups, strict=True)}
    monkeypatch.setattr(gpus, "current", GpuTable(table, ""))
    refusal = BY_NAME["cudaipc"].refuses(SimpleNamespace(num_nodes=num_nodes, places=places))
    assert reason in refusal
    assert bool(refusal) == bool(reason)


def test_views_of_a_segment():
    """Bytes at an offset, in another dtype, of the part of each rank; the arithmetic is the same in any memory."""
    parts = {index: torch.arange(64, dtype=torch.uint8) + 64 * index for index in (0, 2)}
    segment = cuda_ipc.GpuSegment(key=5, part_bytes=64, own=2, begin=parts[2].data_ptr(), parts=parts)
    assert set(segment.part_of) == {0, 2}
    assert segment.view(0, torch.uint8, 3, 8).tolist() == [8, 9, 10]
    assert segment.view(2, torch.int16, 2, 4).view(torch.uint8).tolist() == [132, 133, 134, 135]
    assert segment.view(0, torch.float64, 0, 8).numel() == 0


@pytest.mark.mpi
def test_peers_memory_is_unmapped_when_the_session_ends(mpi, monkeypatch):
    """And what was symmetric is ordinary; the program may keep it."""
    collected = []
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: collected.append(True))
    parts = {index: torch.zeros(64, dtype=torch.uint8) for index in range(3)}
    segment = cuda_ipc.GpuSegment(key=5, part_bytes=64, own=2, begin=parts[2].data_ptr(), parts=dict(parts))
    segment.device_type = "cpu"
    on_the_host = mpi.symmetric_empty(10)
    symmetric.live.add(segment)
    assert symmetric.find(parts[2])[0] is segment
    symmetric.unmap_peers(mpi.communicator().direct.mpi)
    assert symmetric.find(parts[2]) is None
    assert not segment.parts
    assert collected == [True]
    assert symmetric.find(on_the_host) is not None


@pytest.mark.parametrize(
    ("others", "is_on"), [("", False), ("max_split_size_mb:100", False), ("max_split_size_mb:100", True)]
)
def test_expandable_segments_are_off_while_shared_memory_is_taken(monkeypatch, others, is_on):
    done, former = [], f"{others},expandable_segments:True" if is_on else others
    settings = {"expandable_segments": is_on, "last_allocator_settings": former} if others else {}
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"allocator_settings": settings})
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", done.append, raising=False)
    with cuda_ipc.without_expandable_segments():
        done.append("allocated")
    assert done == ([f"{former},expandable_segments:False", "allocated", former] if is_on else ["allocated"])


@pytest.mark.mpi
@pytest.mark.parametrize("step", ["_offer", "_open_all"])
def test_memory_that_one_rank_cannot_have_or_map(mpi, monkeypatch, step):
    """No rank then has a segment, and all say why."""
    last = mpi.rank() == mpi.size() - 1
    offers = (torch.zeros(512).byte(), dict.fromkeys(range(mpi.size())), "no room" if last and step == "_offer" else "")
    monkeypatch.setattr(cuda_ipc, "_offer", lambda *arguments: offers)

    def open_all(*arguments):
        if last:
            raise RuntimeError("no way\nand a stack")
        return {}

    monkeypatch.setattr(cuda_ipc, "_open_all", open_all)
    declined = []
    monkeypatch.setattr(cuda_ipc, "_decline", declined.extend)
    channel = mpi.communicator().direct
    with pytest.raises(Unavailable, match=r"cannot share GPU memory of 100 bytes per rank: no (room|way)$"):
        cuda_ipc.allocate(channel.mpi, channel.places, 100, torch.device("cpu"), print)
    assert len(declined) == mpi.size() - 1  # what nobody maps is not kept for them


@pytest.mark.mpi
@pytest.mark.parametrize("fault", ["", "no room", "wrong values"])
def test_trial(mpi, monkeypatch, fault):
    """In memory of the host. What goes wrong on the last rank switches cudaipc off on all."""
    channel, kept, last = mpi.communicator().direct, [], mpi.rank() == mpi.size() - 1

    def allocate(comm, places, num_bytes, device, on_end):
        if fault == "no room":
            raise Unavailable(fault)
        mapping, segment = symmetric.allocate(comm, places, num_bytes)
        kept.append(mapping)
        part = segment.view(channel.places[channel.rank].local, torch.uint8, num_bytes)
        return part.clone() if last and fault else part, segment

    monkeypatch.setattr(gpus, "current", GpuTable({place: Gpu("A", 0) for place in channel.places}, ""))
    monkeypatch.setattr(cuda_ipc, "allocate", allocate)
    monkeypatch.setattr(cuda_ipc, "PeerEvents", lambda *arguments: cuda_ipc.NoEvents())
    gpu_probe.run(channel, torch.device("cpu"))
    assert fault in gpus.why_no_ipc()
    assert bool(gpus.why_no_ipc()) == bool(fault)


@pytest.mark.mpi(min_size=2)
def test_ranks_that_disagree_about_gpus(mpi, monkeypatch):
    """One computes on the CPU, the others do not: an error on all, before flavours that do not fit are chosen."""
    from mpi4py import MPI

    one_gpu(monkeypatch)
    device = torch.device("cpu") if mpi.rank() == 1 else torch.device("cuda", 0)
    with pytest.raises(RanksDisagree, match="start: with_cuda=False on rank 1, True on other ranks"):
        gpus.exchange(MPI.COMM_WORLD, Place(0, mpi.rank()), device, with_ipc=True)
    assert gpus.table() is None
