"""Flavour gloo gives what flavour mpi gives, on any communicator and thread, and leaves nothing behind."""

import os
import pathlib
import socket
import subprocess
import sys
import textwrap
import time

import pytest
import torch

from torchmpi_py.collectives.flavours import rendezvous, torch_group
from torchmpi_py.core.tensors import ops_of
from torchmpi_py.errors import CommunicatorError, Unavailable

pytestmark = pytest.mark.timeout(240)

REDUCED = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e5m2,
    torch.complex64,
    torch.complex32,
    torch.int8,
    torch.int16,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
]
MOVED = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.int16, torch.uint64, torch.bool]


def name(value):
    return str(value).removeprefix("torch.")


def values(dtype, rank, count):
    """What rank ``rank`` holds: it depends on the element, and is small enough for exact results in any order."""
    j = torch.arange(count)
    whole = (j * 7 + j // 11 + rank * 3) % 5 - (0 if dtype in (torch.uint8, torch.uint16) else 1)
    if dtype == torch.bool:
        return whole > 1
    return torch.complex(whole.double(), (j % 3).double()).to(dtype) if dtype.is_complex else whole.double().to(dtype)


def same(got, expected):
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    assert torch.equal(bits(got), bits(expected))


def bits(x):
    return x.contiguous().reshape(-1).view(torch.uint8)


def both(mpi, verb, x, *args, form="", **kwargs):
    """The result of gloo, which left ``x`` alone if it wrote elsewhere, and that of mpi."""
    before = x.clone()
    expected = getattr(mpi, verb)(x.clone(), *args, flavour="mpi", **kwargs)
    got = getattr(mpi, f"{verb}{form}")(x, *args, flavour="gloo", **kwargs)
    got = got.wait() if form else got
    if got is not x:
        same(x, before)
    assert (got is None) == (expected is None)
    if got is not None:
        same(got, expected)


@pytest.mark.mpi
@pytest.mark.parametrize("dtype", REDUCED, ids=name)
def test_reductions(mpi, dtype):
    ops = ops_of(dtype)
    for op in ops if mpi.size() <= 3 else ops[REDUCED.index(dtype) % 2 :: 2]:
        reductions(mpi, dtype, op)


def reductions(mpi, dtype, op):
    size, me = mpi.size(), mpi.rank()
    for count in (0, 1, 1003):
        x = values(dtype, me, count)
        both(mpi, "allreduce", x.clone(), op=op)
        out = torch.full_like(x, 1)
        assert mpi.allreduce(x, out=out, op=op, flavour="gloo") is out
        same(x, values(dtype, me, count))
        same(out, mpi.allreduce(x, out=torch.empty_like(x), op=op, flavour="mpi"))
        untouched = torch.full_like(x, 1)
        got = mpi.reduce(x, size - 1, out=untouched, op=op, flavour="gloo")
        same(x, values(dtype, me, count))
        same(got, out if me == size - 1 else torch.full_like(x, 1))
        both(mpi, "reduce", x.clone(), op=op)
        both(mpi, "reduce_scatter", values(dtype, me, size * count * 2).view(size * count, 2), op=op)


@pytest.mark.mpi
@pytest.mark.parametrize("form", ["", "_async"], ids=["blocking", "asynchronous"])
@pytest.mark.parametrize("dtype", MOVED, ids=name)
def test_moves(mpi, dtype, form):
    size, me = mpi.size(), mpi.rank()
    for rows in (0, 1, 300):
        x = values(dtype, me, size * rows * 3).view(size * rows, 3)
        for root in {0, size - 1}:
            both(mpi, "broadcast", x.clone(), root, form=form)
            both(mpi, "scatter", x, root, form=form)
            both(mpi, "gather", x, root, form=form)
            both(mpi, "gather", x[: rows * me], root, form=form)
        both(mpi, "allgather", x, form=form)
        both(mpi, "allgather", x[: rows * me], form=form)
        both(mpi, "alltoall", x.clone(), form=form)
        both(mpi, "alltoall", x.t().contiguous().t(), form=form)
    both(mpi, "allgather", values(dtype, me, 1).reshape(()), form=form)


@pytest.mark.mpi
def test_one_element_is_flat_with_any_stride(mpi):
    size, me = mpi.size(), mpi.rank()
    x = values(torch.float32, me, 2 * size).view(1, -1)[:, me]
    assert x.is_contiguous()
    assert x.stride() == (2 * size,)
    assert torch.equal(mpi.broadcast(x, size - 1, flavour="gloo"), values(torch.float32, size - 1, size)[-1:])
    same(mpi.allgather(x, flavour="gloo"), mpi.allgather(x, flavour="mpi"))


@pytest.mark.mpi
@pytest.mark.parametrize("op", ["sum", "avg", "prod"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64], ids=name)
def test_rounding_is_the_same_on_all_ranks(mpi, dtype, op):
    for count in (1, 3, 17, 20_011):
        x = torch.randn(count, dtype=dtype, generator=torch.Generator().manual_seed(mpi.rank()))
        mpi.allreduce(x, op=op, flavour="gloo")
        same(x, mpi.broadcast(x.clone(), 0, flavour="mpi"))


@pytest.mark.mpi
def test_nan_wins(mpi):
    x = torch.tensor([float("nan") if mpi.rank() == mpi.size() - 1 else 1.0, -0.0 if mpi.rank() == 0 else 0.0])
    for op in ("min", "max"):
        both(mpi, "allreduce", x.clone(), op=op)


@pytest.mark.mpi
def test_asynchronous_and_blocking_calls_do_not_meet(mpi):
    tensors = [values(torch.float32, mpi.rank(), count) for count in (3, 70_000, 11)]
    handles = [mpi.allreduce_async(x, flavour="gloo") for x in tensors]
    both(mpi, "allreduce", values(torch.float32, mpi.rank(), 5))
    for x, got in zip(tensors, mpi.wait_all(handles), strict=True):
        assert got is x
        same(x, mpi.allreduce(values(torch.float32, mpi.rank(), x.numel()), flavour="mpi"))


@pytest.mark.mpi
def test_a_communicator_of_some_ranks(mpi):
    mpi.allreduce_async(torch.ones(1), flavour="gloo").wait()  # the communication thread stays
    before = threads()
    with mpi.split(mpi.rank() % 2, key=-mpi.rank()) as comm:
        both(mpi, "allreduce", values(torch.float32, mpi.rank(), 100), comm=comm)
        both(mpi, "broadcast", values(torch.int16, mpi.rank(), 100), comm.size - 1, comm=comm, form="_async")
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
    monkeypatch.setattr(torch_group.distributed, "is_available", lambda: False)
    assert "without torch.distributed" in torch_group.Gloo().missing("cpu")


@pytest.mark.mpi
def test_a_failure_on_one_rank_is_an_error_on_all(mpi):
    def attempt():
        if mpi.rank() == mpi.size() - 1:
            raise RuntimeError("no route\nand a stack")

    with pytest.raises(CommunicatorError, match=r"cannot connect \(rank \d+: no route\).*GLOO_SOCKET_IFNAME"):
        rendezvous.connect_all(mpi.communicator().direct.mpi, "cannot connect", attempt)


@pytest.mark.mpi
def test_an_interface_that_is_not_there(mpi, monkeypatch):
    monkeypatch.setenv(rendezvous.INTERFACE_VARIABLE, "none0")
    with mpi.split(0) as comm, pytest.raises(CommunicatorError, match=r"flavour gloo: cannot connect.*none0"):
        mpi.allreduce(torch.ones(2), flavour="gloo", comm=comm)


@pytest.mark.mpi
def test_an_interface_that_is_there(mpi, monkeypatch):
    if mpi.num_nodes() > 1:
        pytest.skip("other hosts are not reached through the loopback interface")
    monkeypatch.setenv(rendezvous.INTERFACE_VARIABLE, "lo")
    with mpi.split(0) as comm:
        both(mpi, "allreduce", values(torch.float32, mpi.rank(), 100), comm=comm)


def listening_addresses():
    """Of this process, as the kernel writes them; port 0 and what MPI has are among them."""
    links = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    inodes = {link.partition("[")[2].rstrip("]") for link in links if "socket:[" in link}
    tables = [pathlib.Path("/proc/self/net", name).read_text() for name in ("tcp", "tcp6")]
    words = [line.split() for table in tables for line in table.splitlines()]
    return {word[1] for word in words if word[3] == "0A" and word[9] in inodes}


@pytest.mark.mpi
@pytest.mark.parametrize("with_folder", [True, False])
def test_the_store_is_a_file_of_the_job_or_listens_on_loopback_alone(mpi, monkeypatch, tmp_path, with_folder):
    """Strangers can open the file as little as they know the keys of the other store."""
    if mpi.num_nodes() > 1:
        pytest.skip("other hosts are not reached through the loopback interface")
    monkeypatch.delenv(rendezvous.INTERFACE_VARIABLE, raising=False)
    before, channel = listening_addresses(), mpi.communicator().direct
    folder = pathlib.Path(channel.mpi.bcast(str(tmp_path)))
    monkeypatch.setenv("TORCHMPIRUN_JOB_DIR", str(folder if with_folder else folder / "gone"))
    store = rendezvous.open_store(channel, "a test")
    added = {address.partition(":")[0] for address in listening_addresses() - before}
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


def threads():
    """Those of this process; a test counts its own, for those of one before may yet end."""
    return set(os.listdir("/proc/self/task"))


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


def test_starting_twice_and_leaving_nothing_behind(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(
        textwrap.dedent("""
        import os, time, torch, torchmpi_py as mpi

        def settled(wanted):  # a thread that was waited for is in /proc for a moment yet
            until = time.monotonic() + 60
            while (number := len(os.listdir("/proc/self/task"))) > wanted and time.monotonic() < until:
                time.sleep(0.01)
            return number

        before = None
        for _ in range(3):
            mpi.start()
            assert mpi.allreduce(torch.ones(3), flavour="gloo").tolist() == [3.0] * 3
            assert mpi.allreduce_async(torch.ones(3), flavour="gloo").wait().tolist() == [3.0] * 3
            mpi.stop()
            if before is None:
                time.sleep(0.5)
                before = len(os.listdir("/proc/self/task"))
        assert settled(before) <= before
        mpi.start()
        assert mpi.allreduce(torch.ones(3), flavour="gloo").tolist() == [3.0] * 3  # and stop at exit
        assert not torch.distributed.is_initialized()
        """)
    )
    torchmpirun = os.path.join(os.path.dirname(sys.executable), "torchmpirun")
    done = subprocess.run([torchmpirun, "-n", "3", str(path)], capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
