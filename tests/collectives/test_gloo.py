"""Flavour gloo: its groups, threads, stores and addresses; test_verbs.py has its values."""

import os
import pathlib
import socket
import time

import pytest
import torch
from support import jobs
from support.values import total, values
from test_verbs import same

from torchmpi_py.collectives.flavours import rendezvous, torch_group
from torchmpi_py.errors import CommunicatorError, Unavailable

pytestmark = pytest.mark.timeout(240)


@pytest.mark.mpi
def test_one_element_is_flat_with_any_stride(mpi):
    size, me = mpi.size(), mpi.rank()
    x = values(me, 2 * size).view(1, -1)[:, me]
    assert x.is_contiguous()
    assert x.stride() == (2 * size,)
    assert torch.equal(
        mpi.allgather(x, flavour="gloo"), torch.stack([values(rank, size)[rank] for rank in range(size)])
    )
    assert torch.equal(mpi.broadcast(x, size - 1, flavour="gloo"), values(size - 1, size)[-1:])


@pytest.mark.mpi
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64], ids=str)
def test_rounding_is_the_same_on_all_ranks(mpi, dtype):
    for op, count in (("sum", 17), ("sum", 20_011), ("avg", 3), ("avg", 20_011), ("prod", 1), ("prod", 20_011)):
        x = torch.randn(count, dtype=dtype, generator=torch.Generator().manual_seed(mpi.rank()))
        mpi.allreduce(x, op=op, flavour="gloo")
        same(x, mpi.broadcast(x.clone(), 0, flavour="mpi"))


@pytest.mark.mpi
def test_nan_wins(mpi):
    x = torch.tensor([float("nan") if mpi.rank() == mpi.size() - 1 else 1.0, -0.0 if mpi.rank() == 0 else 0.0])
    for op in ("min", "max"):
        same(mpi.allreduce(x.clone(), op=op, flavour="gloo"), mpi.allreduce(x.clone(), op=op, flavour="mpi"))


def threads():
    """Those of this process; a test counts its own, for those of one before may yet end."""
    return set(os.listdir("/proc/self/task"))


@pytest.mark.mpi
def test_a_communicator_of_some_ranks(mpi):
    """Its threads end with it."""
    mpi.allreduce_async(torch.ones(1), flavour="gloo").wait()  # the communication thread stays
    before, me = threads(), mpi.rank()
    members = list(range(me % 2, mpi.size(), 2))[::-1]
    with mpi.split(me % 2, key=-me) as comm:
        got = mpi.allreduce(values(me, 100), comm=comm, flavour="gloo")
        assert torch.equal(got, sum(values(rank, 100) for rank in members))
        got = mpi.broadcast_async(values(me, 100), comm.size - 1, comm=comm, flavour="gloo").wait()
        assert torch.equal(got, values(members[-1], 100))
        assert threads() - before
    end = time.monotonic() + 10
    while threads() - before and time.monotonic() < end:
        time.sleep(0.05)  # a thread that was waited for is in /proc for a moment yet
    assert not threads() - before


@pytest.mark.mpi
def test_a_torch_without_gloo(mpi, monkeypatch):
    monkeypatch.setattr(torch_group.distributed, "is_gloo_available", lambda: False)
    with mpi.split(0) as comm, pytest.raises(Unavailable, match="built without gloo"):
        mpi.allreduce(torch.ones(2), flavour="gloo", comm=comm)


@pytest.mark.mpi
@pytest.mark.parametrize("interface", ["none0", "lo"])
def test_interfaces(mpi, monkeypatch, interface):
    if mpi.num_nodes() > 1:
        pytest.skip("other hosts are not reached through the loopback interface")
    monkeypatch.setenv(rendezvous.INTERFACE_VARIABLE, interface)
    with mpi.split(0) as comm:
        if interface == "lo":
            assert torch.equal(
                mpi.allreduce(values(mpi.rank(), 100), flavour="gloo", comm=comm), total(mpi.size(), 100)
            )
            return
        with pytest.raises(CommunicatorError, match=r"flavour gloo: cannot connect.*none0"):
            mpi.allreduce(torch.ones(2), flavour="gloo", comm=comm)


@pytest.mark.mpi
@pytest.mark.parametrize("with_folder", [True, False])
def test_the_store_is_a_file_of_the_job_or_listens_on_loopback_alone(mpi, monkeypatch, tmp_path, with_folder):
    """Strangers can open the file as little as they know the keys of the other store."""
    if mpi.num_nodes() > 1:
        pytest.skip("other hosts are not reached through the loopback interface")
    monkeypatch.delenv(rendezvous.INTERFACE_VARIABLE, raising=False)
    before, channel = jobs.listeners("self"), mpi.communicator().direct
    folder = pathlib.Path(channel.mpi.bcast(str(tmp_path)))
    monkeypatch.setenv("TORCHMPIRUN_JOB_DIR", str(folder if with_folder else folder / "gone"))
    store = rendezvous.open_store(channel, "a test")
    added = {where for inode, where in jobs.listeners("self").items() if inode not in before}
    assert added == (set() if with_folder or mpi.rank() else {"0100007F"})
    assert [oct(file.stat().st_mode & 0o777) for file in folder.glob("store-*")] == ["0o600"] * with_folder
    if mpi.rank() == 0:
        store.set("key", "right")
        if not with_folder:
            served = store.underlying_store
            stranger = torch.distributed.TCPStore("127.0.0.1", served.port, is_master=False, wait_for_workers=False)
            assert not stranger.check(["key"])
            stranger.set("key", "forged")
    channel.mpi.Barrier()
    assert store.get("key") == b"right"
    if mpi.rank() > 0:
        store = None
    channel.mpi.Barrier()
    store = None
    channel.mpi.Barrier()
    assert list(folder.glob("store-*")) == []


@pytest.mark.mpi
def test_a_torch_whose_newer_store_cannot_take_a_socket(mpi, monkeypatch):
    """As that of torch 2.4."""
    factory = rendezvous.distributed.TCPStore

    def old_factory(*args, use_libuv=True, **options):
        if use_libuv and "master_listen_fd" in options:
            raise NotImplementedError("the libuv backend does not support a listen fd")
        return factory(*args, **options)

    monkeypatch.setattr(rendezvous.distributed, "TCPStore", old_factory)
    monkeypatch.delenv("TORCHMPIRUN_JOB_DIR", raising=False)
    channel = mpi.communicator().direct
    store = rendezvous.open_store(channel, "a test")
    store.add("ranks", 1)
    mpi.barrier()
    assert store.add("ranks", 0) == mpi.size()
    monkeypatch.setattr(rendezvous.surroundings, "allow_open_files", lambda needed: 10)
    with pytest.raises(CommunicatorError, match=r"rank 0: .* connections need .* the limit is 10; raise ulimit -n"):
        rendezvous.open_store(channel, "a test")
    mpi.barrier()


@pytest.mark.mpi(min_size=2)
def test_a_store_that_connects_when_it_is_used(mpi, monkeypatch):
    """Through a PrefixStore, as torch uses it from C++."""
    monkeypatch.setattr(rendezvous, "_MOST_AT_ONCE", 1)
    monkeypatch.delenv("TORCHMPIRUN_JOB_DIR", raising=False)
    store = torch.distributed.PrefixStore("", rendezvous.open_store(mpi.communicator().direct, "test", is_lazy=True))
    store.set(key := f"key {mpi.rank()}", "value")
    assert (store.get(key), store.num_keys() > 0, store.delete_key(key)) == (b"value", True, True)
    mpi.barrier()


def test_addresses(monkeypatch):
    def resolving(*addresses):
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in addresses]
        monkeypatch.setattr(rendezvous.socket, "getaddrinfo", lambda *_, **__: found)

    monkeypatch.delenv(rendezvous.INTERFACE_VARIABLE, raising=False)
    resolving("127.0.1.1", "203.0.113.7")
    assert rendezvous.own_address(1) == "127.0.0.1"
    assert rendezvous.own_address(2) != "203.0.113.7"  # of no interface: nobody can listen there
    monkeypatch.setattr(rendezvous, "_is_here", lambda _: True)
    assert rendezvous.own_address(2) == "203.0.113.7"
    monkeypatch.setenv(rendezvous.INTERFACE_VARIABLE, "none0,lo")
    assert rendezvous.own_address(2) == "127.0.0.1"
    monkeypatch.delenv(rendezvous.INTERFACE_VARIABLE)
    resolving("127.0.1.1", "fe80::1%eth0")
    assert not rendezvous.own_address(2).startswith(("127.", "fe80"))
