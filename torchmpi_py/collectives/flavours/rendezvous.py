"""A store of torch.distributed for the ranks of a channel, for libraries that cannot connect ranks through MPI.

On one node the store is a file in torchmpirun's folder for the job, which no other user can open. On several nodes, or
in jobs without such a folder, rank 0 opens a TCP store on a free port, and sends the address to the other ranks through
MPI. So the user need not set MASTER_ADDR. A TCP store has no password. Therefore it listens on one address only
(loopback on one node), and its keys have a random prefix that is secret to the job.
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
"""The environment variable that lists the network interfaces to use, separated by commas. Gloo defines it."""

REMEDY = (
    f"If the network is the cause, set {INTERFACE_VARIABLE} on all ranks to the network interface that connects the "
    "nodes, and check that no firewall blocks it"
)
_CONNECT_TIMEOUT = dt.timedelta(seconds=60)
_MOST_AT_ONCE = 1024  # number of ranks that may connect to rank 0 at the same time
_LOOPBACK = "127.0.0.1"
_OUTSIDE = ("192.0.2.1", 9)  # an address that is reserved for documentation; nothing is sent
_SIOCGIFADDR = 0x8915  # Linux's request for the address of an interface

newest_lazy_store = list[Any]()
"""The lazy store that ``open_store`` returned last. The list keeps it alive until the process group does."""


def open_store(channel: Channel, who: str, *, is_lazy: bool = False) -> Any:
    """Return a store to which all ranks of a channel are connected. All ranks of the channel must call it.

    Rank 0 must be the last rank to free the store, because rank 0 may be its server. Raise CommunicatorError on every
    rank if the store cannot be opened; the message begins with ``who``, the caller's name.

    If rank 0 passes ``is_lazy`` and there are more than 1,024 ranks, the store is *lazy*. The other ranks connect when
    they first use a lazy store, because the program may never need these connections. ``newest_lazy_store`` keeps the
    lazy store alive, because C++ does not.
    """
    if (path := _shared_file(channel)) is not None:
        store = getattr(distributed, "FileStore")(path, channel.size)  # noqa: B009 - its stub does not export it
        store.set_timeout(_CONNECT_TIMEOUT)
        return store
    # 1. Rank 0 opens a listening socket. If this fails, all ranks raise the error.
    is_lazy = is_lazy and channel.size > _MOST_AT_ONCE
    is_server = channel.rank == 0
    host = channel.mpi.bcast(own_address(channel.num_nodes) if is_server else "")
    cannot_open = f"{who}: cannot open a store on rank 0, at {host}"
    server = connect_all(channel.mpi, cannot_open, lambda: _serve(host, channel.size, is_lazy) if is_server else None)
    # 2. Rank 0 sends the port, and the prefix that replaces a password, to the other ranks through MPI.
    # 3. All ranks connect.
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
            return functools.partial(getattr(connected, names_in_cpp.get(name, name)))  # C++ needs a Python callable.

    store = LazyStore()
    # Set the attribute on the object, because the class, with all its attributes, lives until the next garbage
    # collection.
    store._connect = functools.cache(connect)
    return store


def _shared_file(channel: Channel) -> str | None:
    """Create a file in the job's folder, and return its path, or None if the ranks cannot share a file.

    All ranks of the channel must call it. The store that uses the file also removes it.
    """
    path = os.path.join(os.environ.get("TORCHMPIRUN_JOB_DIR", ""), f"store-{secrets.token_hex(8)}")
    is_shared = channel.num_nodes == 1 and "TORCHMPIRUN_JOB_DIR" in os.environ
    if channel.rank == 0 and is_shared:
        try:
            with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # Some network file systems do not support locks.
        except OSError:
            is_shared = False
    path = channel.mpi.bcast(path)
    return path if all(channel.mpi.allgather(is_shared and os.path.isfile(path))) else None


def _serve(address: str, num_ranks: int, is_lazy: bool) -> Any:
    """Return a store that listens only on ``address``. A socket that torch opens would listen on all interfaces."""
    needed = len(os.listdir("/proc/self/fd")) + num_ranks
    if (limit := surroundings.allow_open_files(needed)) < needed and not is_lazy:
        raise OSError(f"{num_ranks} connections need {needed} open files, but the limit is {limit}; raise ulimit -n")
    family, kind, protocol, _, where = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as listener:
        listener.bind(where)
        listener.listen()
        port = listener.getsockname()[1]
        options = {"is_master": True, "master_listen_fd": os.dup(listener.fileno())}  # The store closes this duplicate.
        try:
            return _tcp_store(address, port, num_ranks, **options)
        except NotImplementedError:  # The libuv server of older versions of torch cannot use an existing socket.
            return _tcp_store(address, port, num_ranks, use_libuv=False, **options)


def _tcp_store(host: str, port: int, num_ranks: int, **options: Any) -> Any:
    """Return a TCP store: its server if ``options`` contains ``is_master``, else a client. Do not wait for clients."""
    factory = getattr(distributed, "TCPStore")  # noqa: B009 - its stub does not export it
    return factory(host, port, num_ranks, timeout=_CONNECT_TIMEOUT, wait_for_workers=False, **options)


def connect_all(comm: MPI.Comm, what: str, attempt: Callable[[], T], remedy: str = REMEDY) -> T:
    """Call ``attempt`` on every rank of ``comm``, and return this rank's result.

    All ranks of ``comm`` must call this function. Raise CommunicatorError on all ranks if any attempt fails. The
    message consists of ``what``, the errors by rank, and ``remedy``.
    """

    def failed(failures: Mapping[int, str]) -> CommunicatorError:
        by_rank = "; ".join(f"rank {rank}: {text}" for rank, text in failures.items())
        return CommunicatorError(f"{what} ({by_rank}). {remedy}")

    caught = RuntimeError, ValueError, OSError
    return agree.run_on_all_ranks(comm.allgather, attempt, caught, agree.first_line, failed)


def interfaces() -> list[str]:
    """Return the names of the network interfaces in GLOO_SOCKET_IFNAME, or an empty list."""
    return [name for name in os.environ.get(INTERFACE_VARIABLE, "").split(",") if name]


def own_address(num_nodes: int) -> str:
    """Return an address at which ranks on ``num_nodes`` nodes can reach this host.

    This is the first of the following addresses that exists:

    1. the address of an interface in GLOO_SOCKET_IFNAME
    2. loopback, if all ranks are on one node
    3. the address of the host name, unless it is loopback (the default of Debian), or no interface has it (NAT)
    4. the source address of packets to other networks
    5. the address of the first interface that other hosts may reach

    If none exists, return the host name.
    """
    if named := next(filter(None, map(_of_interface, interfaces())), ""):
        return named
    if num_nodes == 1:
        return _LOOPBACK
    return next(
        (address for address in _addresses() if _is_reachable(address) and _is_here(address)), socket.gethostname()
    )


def _addresses() -> Iterator[str]:
    """Yield candidates for the address of this host, the best candidate first."""
    with contextlib.suppress(OSError):
        for *_, where in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
            yield str(where[0])
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(_OUTSIDE)
        yield str(probe.getsockname()[0])
    yield from filter(None, (_of_interface(name) for _, name in socket.if_nameindex()))


def _of_interface(name: str) -> str:
    """Return the IPv4 address of an interface, or ""."""
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
