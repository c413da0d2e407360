"""A store of torch.distributed for the ranks of a channel, for libraries that cannot connect ranks through MPI.

On one node the store is a file in the job's folder, which no other user can open. On several nodes, or without a folder
of torchmpirun, rank 0 opens a TCP store on a free port, and sends its address to the others through MPI. So the user
need not set MASTER_ADDR. A TCP store has no password. Therefore it listens on one address only, which is loopback on
one node, and its keys have a prefix that only the job knows.
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
"""The variable with the names of the network interfaces to use, separated by commas; gloo has defined it."""

REMEDY = (
    f"Set {INTERFACE_VARIABLE} on all ranks to the network interface through which all nodes reach each other, and "
    "check that no firewall blocks it"
)
_CONNECT_TIMEOUT = dt.timedelta(seconds=60)
_MOST_AT_ONCE = 1024  # number of ranks from which rank 0 can accept connections at once
_LOOPBACK = "127.0.0.1"
_OUTSIDE = ("192.0.2.1", 9)  # an address reserved for documentation, to which nothing is sent
_SIOCGIFADDR = 0x8915  # Linux's request for the address of an interface

newest_lazy_store = list[Any]()
"""The lazy store of the newest ``init_process_group``, until its process group keeps it."""


def open_store(channel: Channel, who: str, *, is_lazy: bool = False) -> Any:
    """Return a store to which all ranks of a channel are connected. Collective.

    Rank 0 must drop the store last, because it may serve the other ranks. Raise CommunicatorError on every rank if the
    store cannot be opened; the message begins with ``who``, the caller. With ``is_lazy`` on rank 0 and more than 1,024
    ranks, the others connect when they first use the store, because the program may never need these connections. C++
    does not keep a lazy store alive, so ``newest_lazy_store`` does.
    """
    if (path := _shared_file(channel)) is not None:
        store = getattr(distributed, "FileStore")(path, channel.size)  # noqa: B009 - its stub does not export it
        store.set_timeout(_CONNECT_TIMEOUT)
        return store
    # 1. Rank 0 listens. If it cannot, all ranks raise the error.
    is_lazy = is_lazy and channel.size > _MOST_AT_ONCE
    is_server = channel.rank == 0
    host = channel.mpi.bcast(own_address(channel.num_nodes) if is_server else "")
    cannot_open = f"{who}: cannot open a store on rank 0, at {host}"
    server = connect_all(channel.mpi, cannot_open, lambda: _serve(host, channel.size, is_lazy) if is_server else None)
    # 2. Rank 0 sends its port, and the prefix that replaces a password, to the others over MPI. 3. All ranks connect.
    port, prefix, is_lazy = channel.mpi.bcast(server and (server.port, secrets.token_hex(16), is_lazy))
    what = f"{who}: cannot reach the store of rank 0 at {host}, port {port}"

    def connect() -> Any:
        store = server or _tcp_store(host, port, channel.size)
        return getattr(distributed, "PrefixStore")(prefix, store)  # noqa: B009 - its stub does not export it

    if not is_lazy:
        return connect_all(channel.mpi, what, connect)
    newest_lazy_store[:] = [connect() if server else _connected_later(connect)]
    return newest_lazy_store[0]


def _connected_later(connect: Callable[[], Any]) -> Any:
    """Return a store that connects when torch first uses it, from Python or from C++."""
    lock, names_in_cpp = threading.Lock(), {"deleteKey": "delete_key", "getNumKeys": "num_keys"}

    class LazyStore(getattr(distributed, "Store")):  # type: ignore[misc]  # noqa: B009 - as above
        def __getattribute__(self, name: str) -> Any:
            if name.startswith("_") or name in ("timeout", "set_timeout"):
                return super().__getattribute__(name)
            with lock:
                connected = self._connect()
            connected.set_timeout(self.timeout)
            return functools.partial(getattr(connected, names_in_cpp.get(name, name)))  # C++ needs a Python callable

    store = LazyStore()
    # The attribute is set on the object, because the class lives until the next garbage collection.
    store._connect = functools.cache(connect)
    return store


def _shared_file(channel: Channel) -> str | None:
    """Return the path of a new file in the job's folder; None if the ranks cannot share a file.

    The store removes the file.
    """
    path = os.path.join(os.environ.get("TORCHMPIRUN_JOB_DIR", ""), f"store-{secrets.token_hex(8)}")
    is_shared = channel.num_nodes == 1 and "TORCHMPIRUN_JOB_DIR" in os.environ
    if channel.rank == 0 and is_shared:
        try:
            with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # some network file systems do not support locks
        except OSError:
            is_shared = False
    path = channel.mpi.bcast(path)
    return path if all(channel.mpi.allgather(is_shared and os.path.isfile(path))) else None


def _serve(address: str, num_ranks: int, is_lazy: bool) -> Any:
    """Return a store that listens only on ``address``: torch's own socket would listen on all interfaces."""
    needed = len(os.listdir("/proc/self/fd")) + num_ranks
    if (limit := surroundings.allow_open_files(needed)) < needed and not is_lazy:
        raise OSError(f"{num_ranks} connections need {needed} open files, and the limit is {limit}: raise ulimit -n")
    family, kind, protocol, _, where = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as listener:
        listener.bind(where)
        listener.listen()
        port = listener.getsockname()[1]
        options = {"is_master": True, "master_listen_fd": os.dup(listener.fileno())}  # the store closes the duplicate
        try:
            return _tcp_store(address, port, num_ranks, **options)
        except NotImplementedError:  # the libuv server of older torch cannot use an existing socket
            return _tcp_store(address, port, num_ranks, use_libuv=False, **options)


def _tcp_store(host: str, port: int, num_ranks: int, **options: Any) -> Any:
    """Return a TCP store that does not wait for the other ranks."""
    factory = getattr(distributed, "TCPStore")  # noqa: B009 - its stub does not export it
    return factory(host, port, num_ranks, timeout=_CONNECT_TIMEOUT, wait_for_workers=False, **options)


def connect_all(comm: MPI.Comm, what: str, attempt: Callable[[], T], remedy: str = REMEDY) -> T:
    """Return the result of ``attempt``.

    Raise CommunicatorError, with ``what`` and ``remedy``, on all ranks if one attempt fails.
    """

    def failed(failures: Mapping[int, str]) -> CommunicatorError:
        by_rank = "; ".join(f"rank {rank}: {text}" for rank, text in failures.items())
        return CommunicatorError(f"{what} ({by_rank}). {remedy}")

    caught = RuntimeError, ValueError, OSError
    return agree.run_on_all_ranks(comm.allgather, attempt, caught, agree.first_line, failed)


def interfaces() -> list[str]:
    """Return the network interfaces that the user names; empty without any."""
    return [name for name in os.environ.get(INTERFACE_VARIABLE, "").split(",") if name]


def own_address(num_nodes: int) -> str:
    """Return an address of this host for ranks on ``num_nodes`` nodes.

    It is the first of the following that exists:

    1. the address of the interface that the user names
    2. loopback, on one node
    3. the address of the host name, unless it is loopback (the default of Debian), or no interface has it (NAT)
    4. the address from which packets to other networks would leave
    5. the address of the first interface
    """
    if named := next(filter(None, map(_of_interface, interfaces())), ""):
        return named
    if num_nodes == 1:
        return _LOOPBACK
    return next(
        (address for address in _addresses() if _is_reachable(address) and _is_here(address)), socket.gethostname()
    )


def _addresses() -> Iterator[str]:
    """Yield possible addresses of this host, the likeliest first."""
    with contextlib.suppress(OSError):
        for *_, where in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
            yield str(where[0])
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(_OUTSIDE)
        yield str(probe.getsockname()[0])
    yield from filter(None, (_of_interface(name) for _, name in socket.if_nameindex()))


def _of_interface(name: str) -> str:
    """Return the IPv4 address of an interface, or an empty text."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])


def _is_reachable(address: str) -> bool:
    """Return whether other hosts may reach an address, that is, whether it is neither loopback nor link-local."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    return not (parsed.is_loopback or parsed.is_link_local)


def _is_here(address: str) -> bool:
    """Return whether an interface of this host has the address, so that a socket can listen there."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True
