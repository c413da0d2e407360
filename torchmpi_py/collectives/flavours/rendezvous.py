"""A store of torch.distributed for the ranks of a channel, for libraries that do not start over MPI.

On one node the store is a file in the job's folder, which no other user can open. On several nodes, and where no
torchmpirun has made a folder, rank 0 opens a TCP store on a free port, and MPI carries its address to the others: no
MASTER_ADDR is needed. That store has no password. So it listens on one address, loopback on one node, and its keys
stand under a prefix that only the job knows.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import fcntl
import functools
import ipaddress
import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from torch import distributed

from torchmpi_py.core import agree
from torchmpi_py.core.channels import Channel
from torchmpi_py.core.mpi_api import MPI
from torchmpi_py.errors import CommunicatorError
from torchmpi_py.launch import surroundings

T = TypeVar("T")

INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
"""Names the network interfaces to use, separated by commas; gloo's own variable."""

REMEDY = (
    f"Name the network interface through which all nodes reach each other in {INTERFACE_VARIABLE} (for all ranks), and "
    "see that no firewall blocks it"
)
_CONNECT_TIMEOUT = dt.timedelta(seconds=60)
_MOST_AT_ONCE = 1024  # ranks whose connections rank 0 can have without harm
_LOOPBACK = "127.0.0.1"
_OUTSIDE = ("192.0.2.1", 9)  # reserved for documentation: nobody is there, and nothing is sent
_SIOCGIFADDR = 0x8915  # Linux: ask for the address of an interface

newest_lazy_store = list[Any]()
"""The lazy store of the newest ``init_process_group``, until its group takes it over."""


def open_store(channel: Channel, who: str, *, is_lazy: bool = False) -> Any:
    """A store that all ranks of a channel are connected to; rank 0, which may serve it, must be the last to drop it.

    Collective. CommunicatorError, on every rank, if it cannot be had; ``who``, the caller, begins the message.
    ``is_lazy``: on rank 0 of more than 1,024 ranks, whether the others connect when they first use the store: rank 0
    may never need the thousands of connections. C++ does not keep a lazy store alive: ``newest_lazy_store`` does.
    """
    if (path := _shared_file(channel)) is not None:
        store = getattr(distributed, "FileStore")(path, channel.size)  # noqa: B009 - its stub does not export it
        store.set_timeout(_CONNECT_TIMEOUT)
        return store
    # 1. Rank 0 listens, or all ranks hear that it cannot.
    is_lazy = is_lazy and channel.size > _MOST_AT_ONCE
    is_server = channel.rank == 0
    host = channel.mpi.bcast(own_address(channel.num_nodes) if is_server else "")
    cannot_open = f"{who}: cannot open a store on rank 0, at {host}"
    served = connect_all(channel.mpi, cannot_open, lambda: _serve(host, channel.size, is_lazy) if is_server else None)
    # 2. Its port, and the prefix that stands for a password, go to the others over MPI. 3. All connect.
    port, prefix, is_lazy = channel.mpi.bcast(served and (served.port, secrets.token_hex(16), is_lazy))
    what = f"{who}: cannot reach the store of rank 0 at {host}, port {port}"

    def connect() -> Any:
        store = served or _tcp_store(host, port, channel.size)
        return getattr(distributed, "PrefixStore")(prefix, store)  # noqa: B009 - its stub does not export it

    if not is_lazy:
        return connect_all(channel.mpi, what, connect)
    newest_lazy_store[:] = [connect() if served else _connected_later(connect)]
    return newest_lazy_store[0]


def _connected_later(connect: Callable[[], Any]) -> Any:
    """A store that connects when torch first uses it, from Python or from C++."""
    lock, names_in_cpp = threading.Lock(), {"deleteKey": "delete_key", "getNumKeys": "num_keys"}

    class LazyStore(getattr(distributed, "Store")):  # type: ignore[misc]  # noqa: B009 - as above
        def __getattribute__(self, name: str) -> Any:
            if name.startswith("_") or name in ("timeout", "set_timeout"):
                return super().__getattribute__(name)
            with lock:
                connected = self._connect()
            connected.set_timeout(self.timeout)
            return functools.partial(getattr(connected, names_in_cpp.get(name, name)))  # C++ calls no function of C++

    store = LazyStore()
    store._connect = functools.cache(connect)  # the class stays until the next garbage collection, this does not
    return store


def _shared_file(channel: Channel) -> str | None:
    """A new file in the job's folder, which the store removes in the end; None where not all ranks can share one."""
    path = os.path.join(os.environ.get("TORCHMPIRUN_JOB_DIR", ""), f"store-{secrets.token_hex(8)}")
    is_shared = channel.num_nodes == 1 and "TORCHMPIRUN_JOB_DIR" in os.environ
    if channel.rank == 0 and is_shared:
        try:
            with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # which not every network's file system has
        except OSError:
            is_shared = False
    path = channel.mpi.bcast(path)
    return path if all(channel.mpi.allgather(is_shared and os.path.isfile(path))) else None


def _serve(address: str, num_ranks: int, is_lazy: bool) -> Any:
    """A store that listens on ``address`` alone: torch's own socket would listen on all interfaces."""
    needed = len(os.listdir("/proc/self/fd")) + num_ranks
    if (limit := surroundings.allow_open_files(needed)) < needed and not is_lazy:
        raise OSError(f"{num_ranks} connections need {needed} open files, and the limit is {limit}: raise ulimit -n")
    family, kind, protocol, _, where = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as listener:
        listener.bind(where)
        listener.listen()
        port = listener.getsockname()[1]
        options = {"is_master": True, "master_listen_fd": os.dup(listener.fileno())}  # which the store takes over
        try:
            return _tcp_store(address, port, num_ranks, **options)
        except NotImplementedError:  # older versions of torch have a server on libuv that cannot
            return _tcp_store(address, port, num_ranks, use_libuv=False, **options)


def _tcp_store(host: str, port: int, num_ranks: int, **options: Any) -> Any:
    factory = getattr(distributed, "TCPStore")  # noqa: B009 - its stub does not export it
    return factory(host, port, num_ranks, timeout=_CONNECT_TIMEOUT, wait_for_workers=False, **options)


def connect_all(comm: MPI.Comm, what: str, attempt: Callable[[], T], remedy: str = REMEDY) -> T:
    """What ``attempt`` returns; if it fails on one rank, a CommunicatorError of ``what`` and ``remedy`` on all."""

    def failed(failures: Mapping[int, str]) -> CommunicatorError:
        by_rank = "; ".join(f"rank {rank}: {text}" for rank, text in failures.items())
        return CommunicatorError(f"{what} ({by_rank}). {remedy}")

    caught = RuntimeError, ValueError, OSError
    return agree.run_on_all_ranks(comm.allgather, attempt, caught, agree.first_line, failed)


def interfaces() -> list[str]:
    """The interfaces that the user names; empty if none are named."""
    return [name for name in os.environ.get(INTERFACE_VARIABLE, "").split(",") if name]


def own_address(num_nodes: int) -> str:
    """An address of this host for ranks that spread over ``num_nodes``.

    The address of the interface which the user names; else loopback on one node; else what the host name stands for,
    unless this is loopback (as Debian has it), or an address that no interface has (NAT); else the address from which
    packets would leave; else the first interface's.
    """
    if named := next(filter(None, map(_of_interface, interfaces())), ""):
        return named
    if num_nodes == 1:
        return _LOOPBACK
    return next(
        (address for address in _addresses() if _is_reachable(address) and _is_here(address)), socket.gethostname()
    )


def _addresses() -> Iterator[str]:
    """Addresses that may be this host's, the likeliest first."""
    with contextlib.suppress(OSError):
        for *_, where in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
            yield str(where[0])
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as trying:
        trying.connect(_OUTSIDE)
        yield str(trying.getsockname()[0])
    yield from filter(None, (_of_interface(name) for _, name in socket.if_nameindex()))


def _of_interface(name: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])


def _is_reachable(address: str) -> bool:
    """Whether other hosts may reach an address: loopback and link-local ones mean something on this host alone."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    return not (parsed.is_loopback or parsed.is_link_local)


def _is_here(address: str) -> bool:
    """Whether an interface of this host has the address, so that a socket can listen there."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as trying:
        try:
            trying.bind((address, 0))
        except OSError:
            return False
    return True
