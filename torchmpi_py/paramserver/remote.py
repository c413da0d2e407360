"""Access to shards on other nodes: the client side of the messages to the service of another node (``service.py``).

A *request* concerns one shard. Its message contains the action and, if the payload is small, the bytes of the payload.
A large payload follows in pieces, in separate messages. The *reply* contains the error, if any, or small values. Large
values follow in pieces. A message consists of plain numbers and bytes. The name and the options of a rule are
pickled separately, so that the service can report to the sender if they cannot be unpickled. Requests and replies have
separate communicators, because a rank may be a client of one service while it runs another service.

MPI keeps the order of messages between two ranks, and a service carries out the requests of a rank in order. So a rank
can send further requests without waiting for replies. The next reply of a service belongs to the oldest pending request
to this service, and the next pieces belong to the oldest reply with missing pieces. The alternative, a number in every
message and a table of pending requests, would allow other orders, which no caller needs.
"""

from __future__ import annotations

import enum
import pickle
from collections import deque
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchmpi_py.core import config, ulfm
from torchmpi_py.core.channels import Channel
from torchmpi_py.core.mpi_api import MPI
from torchmpi_py.errors import ParameterServerError

HEADER_TAG, BYTES_TAG = 0, 1  # tags of requests and replies, and of pieces
_SMALL_BYTES = 16 << 10  # Payloads up to this size are part of a message, because two copies cost less than a message.
_PIECE_BYTES = 4 << 20


class Kind(enum.IntEnum):
    """The action of a request."""

    APPLY = 0  # apply a rule with the payload
    READ = 1  # return the values
    SAVE = 2  # return the whole memory of the shard
    RESTORE = 3  # overwrite the memory of the shard with the payload

    @property
    def gives(self) -> bool:
        """Whether the reply carries data of the shard. Otherwise, the request carries data for the shard."""
        return self in (Kind.READ, Kind.SAVE)


class ShardRequest(NamedTuple):
    """The message of a request. ``num_bytes`` is the size of the payload, or of the values in the reply."""

    server: int
    shard: int  # rank that holds the shard
    kind: int
    num_bytes: int
    rule: bytes = b""  # pickled name and options of the rule
    payload: bytearray | None = None  # None for a large or missing payload


class Links:
    """The communicators of a channel for requests and replies. All ranks must call the constructor."""

    def __init__(self, channel: Channel) -> None:
        self.requests = channel.mpi.Dup()
        self.replies = channel.mpi.Dup()
        ulfm.register(self)

    def comms(self) -> list[MPI.Comm]:
        """Return the communicators that MPI has to revoke when a rank dies."""
        return [self.requests, self.replies]

    def free(self) -> None:
        """Free both communicators. All ranks of the channel must call it."""
        self.replies.Free()
        self.requests.Free()


def is_small(num_bytes: int) -> bool:
    """Return whether a payload of this size is part of a message, instead of being sent in pieces."""
    return num_bytes <= min(_SMALL_BYTES, config.current.message_bytes)


def pieces(x: Tensor) -> list[np.ndarray[Any, Any]]:
    """Return MPI buffers that cover a flat tensor, none longer than one piece."""
    return [part.numpy() for part in torch.split(x.view(torch.uint8), min(_PIECE_BYTES, config.current.message_bytes))]


def to_bytes(x: Tensor) -> bytearray:
    """Return a copy of the bytes of a flat tensor, for a message."""
    return bytearray(x.view(torch.uint8).numpy())


def unpacked(data: bytes) -> Exception:
    """Return the exception of a reply, or a ParameterServerError if the exception cannot be unpickled."""
    try:
        error: Exception = pickle.loads(data)
        return error
    except Exception as failure:
        return ParameterServerError(f"a rule on another node failed; import its error's class on this rank: {failure}")


class PendingReply:
    """A pending request. ``memory`` contains the payload of the request, or receives the values of the reply."""

    def __init__(self, request: ShardRequest, memory: Tensor | None) -> None:
        self.error: BaseException | None = None  # exception that the service reported
        self.is_complete = False
        self._request, self._memory = request, memory  # The memory must live until all transfers are complete.
        self._transfers: list[Any] = []

    def send(self, requests: MPI.Comm, service: int) -> None:
        """Send the request. A small payload is part of the message, and a large payload follows in pieces."""
        message, following = self._request, []
        if self._memory is not None and not Kind(message.kind).gives:
            if is_small(message.num_bytes):
                message = message._replace(payload=to_bytes(self._memory))
            else:
                following = pieces(self._memory)
        self._transfers = [requests.isend(tuple(message), service, HEADER_TAG)]
        for piece in following:
            self._transfers.append(requests.Isend(piece, service, BYTES_TAG))

    def arrive(self, replies: MPI.Comm, service: int, error: bytes | None, values: bytearray | None) -> None:
        """Store the content of the reply, and start to receive the pieces of large values.

        ``error`` is a pickled exception, or None. ``values`` contains small values, or is None.
        """
        # A reply with an error has no values. Small values are part of the reply, and large values follow in pieces.
        if error is not None:
            self.error = unpacked(error)
        elif self._memory is not None and values is not None:
            self._memory.view(torch.uint8).numpy()[:] = np.frombuffer(values, np.uint8)
        elif self._memory is not None and Kind(self._request.kind).gives:
            self._transfers += [replies.Irecv(piece, service, BYTES_TAG) for piece in pieces(self._memory)]
        self.advance()

    def advance(self) -> bool:
        """Let MPI make progress, and return whether all transfers are complete."""
        if MPI.Request.Testall(self._transfers):
            self._end()
        return self.is_complete

    @property
    def is_under_way(self) -> bool:
        """Whether MPI may still access the memory of the request."""
        return bool(self._transfers)

    def fail(self, error: BaseException | None) -> None:
        """Complete the request with an error, but keep its memory, because MPI may still access it."""
        self.error, self.is_complete = error, True

    def _end(self) -> None:
        """Complete the request, and release its memory."""
        self.is_complete = True
        self._transfers, self._memory = [], None


class Client:
    """A rank's requests to the services of other nodes. Only the request thread uses it.

    The client matches replies with requests only by their order. So it sends no request after a communication error,
    because it could then match a reply with the wrong request.
    """

    def __init__(self, links: Links) -> None:
        self._links = links
        self._failure: Exception | None = None
        self._failed: list[PendingReply] = []  # MPI may still access the memory of these requests.
        self._awaited: dict[int, deque[PendingReply]] = {}  # requests without a reply, by service, the oldest first
        self._arriving: list[PendingReply] = []  # requests that wait for pieces of their reply

    @property
    def is_idle(self) -> bool:
        """Whether no request is pending."""
        return not self._arriving and not any(self._awaited.values())

    def ask(self, service: int, request: ShardRequest, memory: Tensor | None) -> PendingReply:
        """Send a request, and return without waiting for the reply.

        Raise ParameterServerError if the communication of an earlier request has failed.
        """
        if self._failure is not None:
            raise ParameterServerError(
                f"an earlier request to another node has failed ({self._failure!r}), so this rank can no longer match "
                "replies with requests; restart the job from a checkpoint"
            ) from self._failure
        reply = PendingReply(request, memory)
        self._awaited.setdefault(service, deque()).append(reply)
        try:
            reply.send(self._links.requests, service)
        except Exception as error:
            self._awaited[service].pop()
            if reply.is_under_way:
                self._fail(error, reply)
            raise
        return reply

    def advance(self) -> bool:
        """Process all replies that have arrived, and return whether any reply has arrived.

        A communication error ends all pending requests, and the call returns True.
        """
        try:
            status, has_replies = MPI.Status(), False
            while any(self._awaited.values()):
                message = self._links.replies.improbe(tag=HEADER_TAG, status=status)
                if message is None:
                    break
                # A service replies in the order of the requests, so this reply belongs to the oldest request.
                reply = self._awaited[status.source].popleft()
                self._arriving.append(reply)
                reply.arrive(self._links.replies, status.source, *message.recv())
                has_replies = True
            self._arriving = [reply for reply in self._arriving if not reply.is_complete and not reply.advance()]
            return has_replies
        except Exception as error:
            self._fail(error)
            return True

    def _fail(self, error: Exception, *others: PendingReply) -> None:
        self._failure = error
        self._failed = [*others, *self._arriving, *(reply for replies in self._awaited.values() for reply in replies)]
        for reply in self._failed:
            reply.fail(error)
        self._awaited, self._arriving = {}, []
