"""Shards on other nodes: the messages between a rank and the service of another node (``service.py``), a rank's side.

A *request* is for one shard. Its message holds what to do, and the bytes of a small payload; the pieces of a large one
follow. The *reply* says what went wrong, and holds small values; the pieces of large ones follow. Messages hold plain
numbers and bytes: the name and options of a rule are unpickled where a failure can be reported to the sender. Requests
and replies have a communicator each, for a rank may ask one service and be another.

MPI keeps the order of messages between two ranks, and a service carries out the requests of a rank in the order in
which they come. So a rank asks on without waiting for replies: the next reply of a service is for the oldest request
under way there, and the next pieces belong to the oldest one whose pieces have not come.
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

HEADER_TAG, BYTES_TAG = 0, 1  # of requests and replies; of their pieces
_SMALL_BYTES = 16 << 10  # travel within a message: two copies cost less than another message
_PIECE_BYTES = 4 << 20


class Kind(enum.IntEnum):
    """The kinds of requests."""

    APPLY = 0  # a rule, to the payload
    READ = 1  # the values
    SAVE = 2  # the memory of the shard
    RESTORE = 3  # the payload becomes the memory of the shard

    @property
    def gives(self) -> bool:
        """Whether bytes come with the reply, and not with the request."""
        return self in (Kind.READ, Kind.SAVE)


class ShardRequest(NamedTuple):
    """The message of a request. ``num_bytes`` come with it or with the reply."""

    server: int
    shard: int  # the rank that holds it
    kind: int
    num_bytes: int
    rule: bytes = b""  # name and options, pickled
    payload: bytearray | None = None  # a small one


class Links:
    """The two communicators of a channel; collective."""

    def __init__(self, channel: Channel) -> None:
        self.requests = channel.mpi.Dup()
        self.replies = channel.mpi.Dup()
        ulfm.register(self)

    def comms(self) -> list[MPI.Comm]:
        """The communicators that MPI has to revoke when a rank dies."""
        return [self.requests, self.replies]

    def free(self) -> None:
        """Free both. Collective."""
        self.replies.Free()
        self.requests.Free()


def is_small(num_bytes: int) -> bool:
    """Whether so many bytes travel within a message, and not in pieces."""
    return num_bytes <= min(_SMALL_BYTES, config.current.message_bytes)


def pieces(x: Tensor) -> list[np.ndarray[Any, Any]]:
    """The memory of a flat tensor, for MPI, in the pieces of a large payload or of large values."""
    return [part.numpy() for part in torch.split(x.view(torch.uint8), min(_PIECE_BYTES, config.current.message_bytes))]


def to_bytes(x: Tensor) -> bytearray:
    """A copy of the memory of a flat tensor, for a message."""
    return bytearray(x.view(torch.uint8).numpy())


def unpacked(data: bytes) -> Exception:
    """The exception of a reply; a ParameterServerError if its class is not known here."""
    try:
        error: Exception = pickle.loads(data)
        return error
    except Exception as failure:
        return ParameterServerError(f"a shard on another node raised an error that cannot be read here: {failure}")


class PendingReply:
    """A request under way. Its bytes come from ``memory`` or go there."""

    def __init__(self, request: ShardRequest, memory: Tensor | None) -> None:
        self.error: BaseException | None = None  # what was raised at the shard
        self.is_complete = False
        self._request, self._memory = request, memory  # alive until all is done
        self._transfers: list[Any] = []

    def send(self, requests: MPI.Comm, service: int) -> None:
        """Send the request."""
        # A small payload travels in the message; of a large one the pieces follow.
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
        """The reply has come: receive what follows."""
        # With an error no values come; small values are in the message, the pieces of large ones behind it.
        if error is not None:
            self.error = unpacked(error)
        elif self._memory is not None and values is not None:
            self._memory.view(torch.uint8).numpy()[:] = np.frombuffer(values, np.uint8)
        elif self._memory is not None and Kind(self._request.kind).gives:
            self._transfers += [replies.Irecv(piece, service, BYTES_TAG) for piece in pieces(self._memory)]
        self.advance()

    def advance(self) -> bool:
        """Let MPI move the bytes; whether all have arrived and left."""
        if MPI.Request.Testall(self._transfers):
            self._end()
        return self.is_complete

    @property
    def is_under_way(self) -> bool:
        """Whether messages were posted that may not have arrived or left."""
        return bool(self._transfers)

    def fail(self, error: BaseException | None) -> None:
        """The request is over; its memory stays, for messages may still be under way."""
        self.error, self.is_complete = error, True

    def _end(self) -> None:
        """The request is complete."""
        self.is_complete = True
        self._transfers, self._memory = [], None


class Client:
    """A rank's requests to the services of other nodes. For its request thread alone.

    Replies are told apart by their order alone. So after an error on the way there are no further requests: a reply to
    an earlier request would be taken for that to a later one.
    """

    def __init__(self, links: Links) -> None:
        self._links = links
        self._failure: Exception | None = None
        self._failed: list[PendingReply] = []  # MPI may still read and write their memory
        self._awaited: dict[int, deque[PendingReply]] = {}  # by service, the oldest first
        self._arriving: list[PendingReply] = []  # replied to; pieces are under way

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way."""
        return not self._arriving and not any(self._awaited.values())

    def ask(self, service: int, request: ShardRequest, memory: Tensor | None) -> PendingReply:
        """Send a request, without waiting for the reply. ParameterServerError after an error on the way."""
        if self._failure is not None:
            raise ParameterServerError(
                f"an earlier request to another node has failed ({self._failure!r}), and a reply to it could be taken "
                "for that to a later one; start again, from a checkpoint"
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
        """Take the replies that have come; whether there were any. An error ends all that is under way."""
        try:
            status, has_come = MPI.Status(), False
            while any(self._awaited.values()):
                message = self._links.replies.improbe(tag=HEADER_TAG, status=status)
                if message is None:
                    break
                # A service replies in the order of the requests: this is the reply to the oldest one there.
                reply = self._awaited[status.source].popleft()
                self._arriving.append(reply)
                reply.arrive(self._links.replies, status.source, *message.recv())
                has_come = True
            self._arriving = [reply for reply in self._arriving if not reply.is_complete and not reply.advance()]
            return has_come
        except Exception as error:
            self._fail(error)
            return True

    def _fail(self, error: Exception, *others: PendingReply) -> None:
        self._failure = error
        self._failed = [*others, *self._arriving, *(reply for replies in self._awaited.values() for reply in replies)]
        for reply in self._failed:
            reply.fail(error)
        self._awaited, self._arriving = {}, []
