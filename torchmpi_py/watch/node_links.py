"""Links between the nodes of a job: TCP connections beside MPI, on which the watchdogs of different nodes talk.

The *leader* of a node is its lowest rank. The leaders of the first two nodes are *hubs*: they listen, at the address
under which the other hosts know them, and the leader of each node connects to the hubs before it. So N nodes have at
most 2 N connections, and after the death of one hub the nodes still have the other. A rank that has something to tell
or to ask connects to a hub for as long as that takes.

Messages are JSON behind four bytes with their length. Who connects proves that it knows the token of the job, which
MPI has carried to all ranks, and so does who accepts: each signs a number that the other has drawn.

A link that is *stuck* has sent bytes that the other host's system has not acknowledged. The system answers also for a
process that is stopped, or that does not let Python's threads run: then the process is silent, and the host is not.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import json
import logging
import secrets
import socket
import struct
import termios
import time
from typing import Any, NamedTuple

from torchmpi_py.core.channels import Channel

logger = logging.getLogger("torchmpi_py")

Message = dict[str, Any]
NUM_HUBS = 2
CONNECT_SECONDS = 2.0  # also for the hub to answer: a hub that is stopped does not
_QUIET_SECONDS = 1.0  # between a sign of life and the question for another one
_MOST_UNANSWERED = 1000  # such questions; more would fill the memory of a connection whose other end is stopped
_LENGTH = struct.Struct("!I")
_MOST_BYTES = 1 << 26
_MOST_BYTES_BEFORE_PROOF = 1 << 10
_DIGEST = "sha256"


class Nodes(NamedTuple):
    """The nodes of a job, as each rank knows them; a node is named by its lowest rank."""

    mine: int
    hosts: dict[int, str]
    ranks: dict[int, list[int]]
    hubs: dict[int, tuple[str, int]]  # node -> address and port, in the order in which they are asked
    token: bytes

    def name(self, node: int) -> str:
        """Host and ranks of a node, for a report."""
        ranks = self.ranks[node]
        shown = ", ".join(map(str, ranks)) if len(ranks) < 5 else f"{ranks[0]}, {ranks[1]}, ... {ranks[-1]}"
        return f"host {self.hosts[node]} (rank{'s' * (len(ranks) > 1)} {shown})"


current: Nodes | None = None
"""The nodes of the session; None on one node. A session alone assigns it. Read it as ``node_links.current``."""


def introduce(channel: Channel, address: str) -> tuple[Nodes | None, socket.socket | None]:
    """The nodes of a channel of all ranks, and the socket on which this rank listens if it is a hub. Collective.

    ``address``: under which other hosts reach this one. (None, None) where all ranks are on one node.
    """
    places = channel.places
    order = sorted({place.node for place in places})
    if len(order) == 1:
        return None, None
    is_hub = channel.rank in order[:NUM_HUBS]
    listener = _listen(address) if is_hub else None
    port = 0 if listener is None else listener.getsockname()[1]
    mine = places[channel.rank].node
    host = socket.gethostname() if channel.rank == mine else ""
    told = channel.mpi.allgather((host, address if is_hub else "", port))
    token = channel.mpi.bcast(secrets.token_bytes(32) if channel.rank == 0 else None)
    ranks = {node: [rank for rank, place in enumerate(places) if place.node == node] for node in order}
    hubs = {node: told[node][1:] for node in order[:NUM_HUBS] if told[node][2]}
    return Nodes(mine, {node: told[node][0] for node in order}, ranks, hubs, token), listener


def _listen(address: str) -> socket.socket | None:
    try:
        family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((address, 0), family=family, backlog=socket.SOMAXCONN)
    except OSError as error:
        logger.warning(
            "the watch between nodes cannot listen at %s (%s): name the network interface in GLOO_SOCKET_IFNAME",
            address,
            error,
        )
        return None


class Link:
    """One end of a connection. ``node``: the other end's, known when it has proved itself; None for a short link."""

    def __init__(self, connection: socket.socket, token: bytes, *, accepts: bool) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection, self._token, self._accepts = connection, token, accepts
        self.node: int | None = None
        self.is_proved = self.is_leaving = self.is_ending = False
        self.last_heard = self._last_sign = self._last_asked = time.monotonic()
        self._num_unanswered = 0
        self._in, self._out = bytearray(), bytearray()
        self.unread: list[Message] = []  # that came with the last step of the proof
        self._nonce, self._theirs = secrets.token_hex(16), ""
        if accepts:  # the first word is with the hub: a number to sign
            self.send({"nonce": self._nonce})

    def fileno(self) -> int:
        """The descriptor, for poll."""
        return self.connection.fileno()

    @property
    def has_output(self) -> bool:
        """Whether the system has yet to take some of what was sent."""
        return bool(self._out)

    def send(self, message: Message) -> None:
        """Send a message, as far as the system takes it now; ``flush`` sends the rest. OSError if the link is lost."""
        text = json.dumps(message, separators=(",", ":")).encode()
        self._out += _LENGTH.pack(len(text)) + text
        self.flush()

    def flush(self) -> None:
        """Send what is left."""
        with contextlib.suppress(BlockingIOError):
            while self._out:
                del self._out[: self.connection.send(self._out)]

    def receive(self) -> list[Message]:
        """The messages that have come since, but for those by which the ends prove themselves.

        OSError at the end of the connection, or where the other end is no part of this job.
        """
        is_over = False
        with contextlib.suppress(BlockingIOError):
            while not is_over:
                piece = self.connection.recv(1 << 16)
                self._in += piece
                is_over = not piece
        messages = [each for each in self._messages() if self._is_news(each)]
        if is_over and not messages:
            raise ConnectionResetError("the other end has closed the connection")
        return messages

    def _messages(self) -> list[Message]:
        found = []
        while len(self._in) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._in)
            if length > (_MOST_BYTES if self.is_proved else _MOST_BYTES_BEFORE_PROOF):
                raise ConnectionRefusedError(f"a message of {length} bytes")
            end = _LENGTH.size + length
            if len(self._in) < end:
                break
            message = json.loads(self._in[_LENGTH.size : end])
            del self._in[:end]
            if not self.is_proved:
                self._prove(message)
            else:
                found.append(message)
        return found

    def _is_news(self, message: Message) -> bool:
        """Take in what keeps the link itself; whether the message is for the owner of the link."""
        self.last_heard, self._num_unanswered = time.monotonic(), 0
        if "ping" in message:
            self.send({"pong": 1})
        self.is_leaving = self.is_leaving or "leaving" in message
        self.is_ending = self.is_ending or "ending" in message
        return not message.keys() & {"ping", "pong", "leaving", "ending"}

    def _prove(self, message: Message) -> None:
        """One step of the proof: the hub's number, the answer signed with the token, and the hub's own signature."""
        if not self._accepts and "nonce" in message:
            self._theirs = str(message["nonce"])
            signed = self._sign("connect", self._theirs + self._nonce)
            self.send({"signed": signed, "nonce": self._nonce, "node": self.node})
            return
        nonces = self._nonce + str(message.get("nonce")) if self._accepts else self._nonce + self._theirs
        role = "connect" if self._accepts else "accept"
        if not hmac.compare_digest(str(message.get("signed")), self._sign(role, nonces)):
            raise ConnectionRefusedError("the other end does not know the token of this job")
        self.is_proved = True
        if self._accepts:
            self.node = message.get("node")
            self.send({"signed": self._sign("accept", str(message.get("nonce")) + self._nonce)})

    def _sign(self, role: str, nonces: str) -> str:
        return hmac.new(self._token, f"{role} {nonces}".encode(), _DIGEST).hexdigest()

    def tend(self, now: float) -> None:
        """Look for a sign of life, and ask for one where nothing was heard for a while."""
        if not self._is_unacknowledged():
            self._last_sign = now
            is_due = now - max(self.last_heard, self._last_asked) >= _QUIET_SECONDS
            if is_due and self._num_unanswered < _MOST_UNANSWERED:
                self._last_asked, self._num_unanswered = now, self._num_unanswered + 1
                self.send({"ping": 1})

    def seconds_unheard(self, now: float) -> float:
        """For how long the other *host* has given no sign of life."""
        return now - max(self._last_sign, self.last_heard)

    def _is_unacknowledged(self) -> bool:
        left = fcntl.ioctl(self.connection, termios.TIOCOUTQ, b"\0" * 4)
        return self.has_output or struct.unpack("i", left)[0] > 0

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()


def connect(nodes: Nodes, hub: int, node: int | None = None) -> Link:
    """A link to a hub, on which both ends have proved themselves. OSError within some seconds if there is none.

    ``node``: of the leader that connects for good; None for a short link.
    """
    connection = socket.create_connection(nodes.hubs[hub], timeout=CONNECT_SECONDS)
    link = Link(connection, nodes.token, accepts=False)
    link.node = node
    try:
        until = time.monotonic() + CONNECT_SECONDS
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
    link.connection.recv(1, socket.MSG_PEEK)  # TimeoutError, an OSError, when the time is over
    link.connection.setblocking(False)


def ask(question: Message, seconds: float) -> Message | None:
    """The answer of the first hub that gives one; None on one node, or where no hub answers in time.

    Called by any rank, from any thread, while the hubs watch.
    """
    nodes = current
    for hub in () if nodes is None else nodes.hubs:
        assert nodes is not None, "there are hubs"
        with contextlib.suppress(OSError, ValueError), contextlib.closing(connect(nodes, hub)) as link:
            link.send(question)
            until = time.monotonic() + seconds
            while True:
                _wait_readable(link, until)
                for answer in link.receive():
                    return answer
    return None
