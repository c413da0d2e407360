"""Link the nodes of a job by TCP connections, over which hang detection communicates without MPI.

The *leader* of a node is its lowest rank. The leaders of the first two nodes are *hubs*, which listen at an address
that the other hosts can reach. The leader of each node connects to the hubs of lower rank. N nodes therefore need at
most 2 N connections, and if one hub dies, the other hub still connects all nodes. A rank that sends a report or a
question opens a *short link* to a hub, and closes the link after the answer.

A message is JSON text after four bytes with its length. Both ends of a connection prove that they know the token of the
job, which MPI has broadcast to all ranks. For this proof each end signs a random number of the other end.

A silent process does not mean that its host is silent. The operating system also acknowledges bytes for a process that
is stopped, or that does not let its Python threads run. So a link checks whether the other host's system has
acknowledged all bytes that were sent. Only bytes without an acknowledgement mean that the host itself is silent.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hmac
import json
import logging
import os
import secrets
import socket
import struct
import termios
import time
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

from torchmpi_py.launch import surroundings

if TYPE_CHECKING:
    from torchmpi_py.core.channels import Channel


logger = logging.getLogger("torchmpi_py")

Message = dict[str, Any]
NUM_HUBS = 2
CONNECT_SECONDS = 2.0  # This includes the hub's answer, because the system accepts links for a hub that is stopped.
_ACCEPTED_PER_SECOND = 100  # A hub accepts at least this many links per second.
_QUIET_SECONDS = 1.0  # A ping follows this time after the last sign of life.
_MOST_UNANSWERED = 1000  # More unanswered pings would fill the connection's buffers.
_LENGTH = struct.Struct("!I")
_MOST_BYTES = 1 << 26
_MOST_BYTES_BEFORE_PROOF = 1 << 10
_DIGEST = "sha256"
_UNREACHABLE = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN}

_open: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_in_child() -> None:
    for each in list(_open):  # A connection ends only when every process that has a copy has closed it.
        each.close()


os.register_at_fork(after_in_child=_close_in_child)


class Nodes(NamedTuple):
    """The nodes of a job, with the same contents on each rank. The lowest rank of a node is the node's number."""

    mine: int
    hosts: dict[int, str]
    ranks: dict[int, list[int]]
    hubs: dict[int, tuple[str, int]]  # node -> address and port, in the order in which ranks try them
    token: bytes

    def name(self, node: int) -> str:
        """Return the host and the ranks of a node, for a report."""
        ranks = self.ranks[node]
        shown = ", ".join(map(str, ranks)) if len(ranks) < 5 else f"{ranks[0]}, {ranks[1]}, ... {ranks[-1]}"
        return f"host {self.hosts[node]} (rank{'s' * (len(ranks) > 1)} {shown})"


current: Nodes | None = None
"""The nodes of the session, or None on one node. Only the session assigns this name, so read ``node_links.current``."""


def introduce(channel: Channel, address: str) -> tuple[Nodes | None, socket.socket | None]:
    """Return the nodes, and the socket on which this rank listens if it is a hub. All ranks must call this function.

    ``channel`` connects all ranks. Other hosts reach this host at ``address``. Return (None, None) if all ranks are on
    one node.
    """
    ranks: dict[int, list[int]] = {}
    for rank, node in enumerate(channel.places.nodes.tolist()):
        ranks.setdefault(node, []).append(rank)
    if len(ranks) == 1:
        return None, None
    order = sorted(ranks)
    is_hub = channel.rank in order[:NUM_HUBS]
    listener = _listen(address, len(order)) if is_hub else None
    port = 0 if listener is None else listener.getsockname()[1]
    mine = channel.places[channel.rank].node
    host = socket.gethostname() if channel.rank == mine else ""
    gathered = channel.mpi.allgather((host, address if is_hub else "", port))
    token = channel.mpi.bcast(secrets.token_bytes(32) if channel.rank == 0 else None)
    hubs = {node: gathered[node][1:] for node in order[:NUM_HUBS] if gathered[node][2]}
    return Nodes(mine, {node: gathered[node][0] for node in order}, ranks, hubs, token), listener


def _listen(address: str, num_nodes: int) -> socket.socket | None:
    # Allow enough open files for the links of all nodes, for short links, and for the program's own files.
    surroundings.allow_open_files(len(os.listdir("/proc/self/fd")) + num_nodes + 256)
    try:
        family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((address, 0), family=family, backlog=socket.SOMAXCONN)
        _open.add(listener)
        return listener
    except OSError as error:
        logger.warning(
            "hang detection cannot listen at %s (%s); set GLOO_SOCKET_IFNAME to the interface that connects the nodes",
            address,
            error,
        )
        return None


class Link:
    """One end of a connection. ``node`` is the other end's node after the proof, or None for a short link."""

    def __init__(self, connection: socket.socket, token: bytes, *, accepts: bool) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection, self._token, self._accepts = connection, token, accepts
        _open.add(connection)
        self.node: int | None = None
        self.is_proved = self.is_leaving = self.is_ending = False
        self.last_heard = self._last_sign = self._last_asked = self.begun = time.monotonic()
        self._failure: OSError | None = None  # the first error, which the system reports only once
        self._num_unanswered = 0
        self._in, self._out = bytearray(), bytearray()
        self.unread: list[Message] = []  # messages that arrived with the last step of the proof
        self._nonce, self._theirs = secrets.token_hex(16), ""
        if accepts:  # The hub sends the first message, a number to sign.
            self.send({"nonce": self._nonce})

    def fileno(self) -> int:
        """Return the connection's file descriptor, so that ``select.poll`` accepts a link."""
        return self.connection.fileno()

    @property
    def has_output(self) -> bool:
        """Whether there are bytes that the system has not accepted yet."""
        return bool(self._out)

    @property
    def is_unreachable(self) -> bool:
        """Whether the link has failed because the other host was unreachable, not because the other end closed."""
        return self._failure is not None and self._failure.errno in _UNREACHABLE

    def send(self, message: Message) -> None:
        """Send a message. ``flush`` must send the bytes that the system does not accept immediately.

        Raise OSError if the link is lost.
        """
        text = json.dumps(message, separators=(",", ":")).encode()
        self._out += _LENGTH.pack(len(text)) + text
        self.flush()

    def flush(self) -> None:
        """Send the bytes that the system has not accepted yet. Raise OSError if the link is lost."""
        try:
            while self._out:
                del self._out[: self.connection.send(self._out)]
        except BlockingIOError:
            pass
        except OSError as error:
            self._failure = self._failure or error
            raise

    def receive(self) -> list[Message]:
        """Return the messages that have arrived since the last call, except messages of the link's own protocol.

        Raise OSError at the end of the connection, or if the other end does not belong to this job.
        """
        self._read()
        messages = [each for each in self._messages() if self._is_news(each)]
        if self._failure is not None and not messages:
            raise self._failure
        return messages

    def _read(self) -> None:
        # Before the proof, read only a few bytes at a time, because an unknown end might send without limit. If more
        # bytes have arrived, the next poll reports the link as readable again.
        most = 1 << 16 if self.is_proved else _MOST_BYTES_BEFORE_PROOF
        try:
            while piece := self.connection.recv(most):
                self._in += piece
                if not self.is_proved:
                    return
            self._failure = self._failure or ConnectionResetError("the other end has closed the connection")
        except BlockingIOError:
            pass
        except OSError as error:
            self._failure = self._failure or error

    def _messages(self) -> list[Message]:
        found = []
        while len(self._in) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._in)
            if length > (_MOST_BYTES if self.is_proved else _MOST_BYTES_BEFORE_PROOF):
                raise ConnectionRefusedError(f"the other end sent a message of {length} bytes, which is too long")
            end = _LENGTH.size + length
            if len(self._in) < end:
                break
            message = _parse(self._in[_LENGTH.size : end])
            del self._in[:end]
            if not self.is_proved:
                self._prove(message)
            else:
                found.append(message)
        return found

    def _is_news(self, message: Message) -> bool:
        """Process a message of the link's own protocol. Return whether the message is for the owner of the link."""
        self.last_heard, self._num_unanswered = time.monotonic(), 0
        if "ping" in message:
            with contextlib.suppress(OSError):  # Later messages still count. The next ``receive`` raises the error.
                self.send({"pong": 1})
        self.is_leaving = self.is_leaving or "leaving" in message
        self.is_ending = self.is_ending or "ending" in message
        return not message.keys() & {"ping", "pong", "leaving", "ending"}

    def _prove(self, message: Message) -> None:
        """Carry out a step of the proof: the hub sends a number, the other end its signature, the hub its signature."""
        if not self._accepts and "nonce" in message:
            self._theirs = str(message["nonce"])
            signed = self._sign("connect", self._theirs + self._nonce)
            self.send({"signed": signed, "nonce": self._nonce, "node": self.node})
            return
        nonces = self._nonce + str(message.get("nonce")) if self._accepts else self._nonce + self._theirs
        role = "connect" if self._accepts else "accept"
        signature = str(message.get("signed")).encode(errors="replace")
        if not hmac.compare_digest(signature, self._sign(role, nonces).encode()):
            raise ConnectionRefusedError("the other end does not know the token of this job")
        self.is_proved = True
        if self._accepts:
            self.node = message.get("node")
            self.send({"signed": self._sign("accept", str(message.get("nonce")) + self._nonce)})

    def _sign(self, role: str, nonces: str) -> str:
        return hmac.new(self._token, f"{role} {nonces}".encode(), _DIGEST).hexdigest()

    def tend(self, now: float) -> None:
        """Record a sign of life if the other host has acknowledged all bytes. Send a ping after a second of silence."""
        if not self._is_unacknowledged():
            self._last_sign = now
            is_due = now - max(self.last_heard, self._last_asked) >= _QUIET_SECONDS
            if is_due and self._num_unanswered < _MOST_UNANSWERED:
                self._last_asked, self._num_unanswered = now, self._num_unanswered + 1
                self.send({"ping": 1})

    def forgive(self, seconds: float, now: float) -> None:
        """Do not count ``seconds``, for which this process itself stalled, as silence of the other host."""
        self._last_sign = min(max(self._last_sign, self.last_heard) + seconds, now)

    def seconds_unheard(self, now: float) -> float:
        """Return for how many seconds the other *host* has given no sign of life."""
        return now - max(self._last_sign, self.last_heard)

    def _is_unacknowledged(self) -> bool:
        num_bytes = fcntl.ioctl(self.connection, termios.TIOCOUTQ, b"\0" * 4)
        return self.has_output or struct.unpack("i", num_bytes)[0] > 0

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()


def _parse(text: bytearray) -> Message:
    try:
        message = json.loads(text)
    except RecursionError:
        message = None
    if not isinstance(message, dict):
        raise ConnectionRefusedError("the data received is not a message of this job")
    return message


def connect(nodes: Nodes, hub: int, node: int | None = None, *, is_again: bool = False) -> Link:
    """Connect to a hub, and return the link after both ends have proved that they know the token of the job.

    Raise OSError within some seconds if the connection or the proof fails. ``node`` is the node of a leader that keeps
    the link, or None for a short link. ``is_again`` means that this rank has tried before. The first attempt has more
    time, because all nodes may connect at the same time: at the start, or when a rank on each node is late.
    """
    seconds = CONNECT_SECONDS + (0 if is_again else len(nodes.hosts) / _ACCEPTED_PER_SECOND)
    until = time.monotonic() + seconds
    connection = socket.create_connection(nodes.hubs[hub], timeout=seconds)
    link = Link(connection, nodes.token, accepts=False)
    link.node = node
    try:
        while not link.is_proved:
            _wait_readable(link, until)
            link.unread = link.receive()
    except BaseException:
        link.close()
        raise
    link.node = hub
    return link


def _wait_readable(link: Link, until: float) -> None:
    link.connection.settimeout(max(until - time.monotonic(), 0.001))
    link.connection.recv(1, socket.MSG_PEEK)  # This raises TimeoutError, an OSError, at the time ``until``.
    link.connection.setblocking(False)


def ask(question: Message, seconds: float) -> Message | None:
    """Send a question to the hubs one after the other until one answers within ``seconds``, and return the answer.

    Return None if no hub answers, or if all ranks are on one node. Any thread of any rank may call this function while
    the hubs run hang detection.
    """
    if (nodes := current) is None:
        return None
    for hub in nodes.hubs:
        with contextlib.suppress(OSError, ValueError), contextlib.closing(connect(nodes, hub)) as link:
            link.send(question)
            until = time.monotonic() + seconds
            while True:
                _wait_readable(link, until)
                for answer in link.receive():
                    return answer
    return None
