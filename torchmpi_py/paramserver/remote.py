"""Shards on other nodes: the messages between a rank and the service of another node, and both of their sides.

A *request* is for one shard: its header, and right behind it the payload if it has one. The *reply* is the values that
were asked for, if any, and a header that says what went wrong. Headers hold plain numbers and bytes: the name and
options of a rule are unpickled where a failure can be reported to the sender. Requests and replies have a communicator
each, for a rank may ask one service and be another. Messages of one sender with one tag arrive in order, and a rank
asks each shard one thing at a time, so the shard's number as the tag says what belongs together.

The *service* of a node is a thread in the first rank of the node, as long as there are servers that spread over nodes.
It looks for messages in naps, which grow to 2 ms when there are none: an idle service costs about a hundredth of a
processor, and the first request after a while finds it asleep that long. Requests are taken in the order in which they
arrive. Only a few payloads, and a few replies with values, are under way at a time, which bounds the memory that they
take; replies do not wait for payloads, so a stream of sends starves no reader. A request that cannot be carried out is
replied to with the reason; the service goes on. It does wait for locks: a rank of this node that works long on a shard
delays the ranks that ask from elsewhere.

A rank's own side runs in its request thread. While replies are under way the rank works on the shards of its own node;
then it looks for them, in short naps, so that a rank that waits for another node leaves most of a processor to others.
"""

from __future__ import annotations

import enum
import logging
import pickle
import threading
from collections import deque
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchmpi_py.core import config, ulfm
from torchmpi_py.core.backoff import Nap, complete
from torchmpi_py.core.channels import Channel
from torchmpi_py.core.mpi_api import MPI
from torchmpi_py.errors import ParameterServerError
from torchmpi_py.paramserver import rules
from torchmpi_py.paramserver.store import Store
from torchmpi_py.watch import abort

logger = logging.getLogger("torchmpi_py")

HEADER_TAG = 0  # of the headers of all requests; a service receives them from every rank
_LONGEST_NAP_SECONDS = 0.002  # of an idle service
_LONGEST_NAP_IN_TRANSFER_SECONDS = 0.0001
_MOST_UNDER_WAY = 4  # payloads, and as many replies with values


class Kind(enum.IntEnum):
    """What a request asks for."""

    APPLY = 0  # a rule, to the payload
    READ = 1  # the values
    SAVE = 2  # the memory of the shard
    RESTORE = 3  # the payload becomes the memory of the shard

    @property
    def gives(self) -> bool:
        """Whether bytes come with the reply, and not with the request."""
        return self in (Kind.READ, Kind.SAVE)


class ShardRequest(NamedTuple):
    """The header of a request. ``num_bytes`` follow it, or come with the reply."""

    server: int
    shard: int  # the rank that holds it
    kind: int
    num_bytes: int
    rule: bytes = b""  # name and options, pickled


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


def bytes_tag(shard: int) -> int:
    """The tag of a payload, or of values."""
    return 1 + 2 * shard


def reply_tag(shard: int) -> int:
    """The tag of a reply's header."""
    return 2 + 2 * shard


def pieces(x: Tensor) -> list[Any]:
    """The memory of a flat tensor, for MPI, in messages that are not too long."""
    return [part.numpy() for part in torch.split(x.view(torch.uint8), config.current.message_bytes)]


def packed(error: BaseException) -> bytes:
    """An exception, pickled; as a ParameterServerError if it cannot be, or is no Exception."""
    try:
        if isinstance(error, Exception):
            data = pickle.dumps(error)
            pickle.loads(data)
            return data
    except Exception:
        pass
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:
        text = type(error).__name__
    return pickle.dumps(ParameterServerError(text))


def unpacked(data: bytes) -> Exception:
    """The exception; a ParameterServerError if its class is not known here."""
    try:
        error: Exception = pickle.loads(data)
        return error
    except Exception as failure:
        return ParameterServerError(f"a shard on another node raised an error that cannot be read here: {failure}")


class _Transfer:
    """Bytes under way, with the memory that they come from or go to."""

    def __init__(self, client: int, request: ShardRequest | None, memory: object, requests: list[Any]) -> None:
        self.client, self.request, self.memory = client, request, memory
        self._requests = requests

    def is_complete(self) -> bool:
        """Let MPI move the bytes, and test whether all have arrived or left."""
        self._requests = [request for request in self._requests if not request.Test()]
        return not self._requests


class Service:
    """Serves the stores that are added to it; its thread ends with the last store."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._stores: dict[int, Store] = {}
        self._waiting: deque[tuple[int, ShardRequest]] = deque()  # (client, request): no room for their bytes yet
        self._payloads: list[_Transfer] = []
        self._values: list[_Transfer] = []
        self._replies: list[_Transfer] = []
        self._thread: threading.Thread | None = None
        self._is_ending = threading.Event()

    def add(self, number: int, store: Store) -> None:
        """Serve a store."""
        self._stores[number] = store
        if self._thread is None:
            self._is_ending.clear()
            self._thread = threading.Thread(target=self._run, name="torchmpi_py-parameter-service", daemon=True)
            self._thread.start()

    def remove(self, number: int) -> None:
        """Serve a store no longer; all requests for it have been replied to."""
        del self._stores[number]
        if not self._stores and self._thread is not None:
            self._is_ending.set()
            self._thread.join()
            self._thread = None

    def abandon(self) -> None:
        """Wait for the end of the thread: a rank has died, and the links are revoked."""
        if self._thread is not None:
            self._is_ending.set()
            self._thread.join()

    @torch.inference_mode()
    def _run(self) -> None:
        try:
            nap = Nap(_LONGEST_NAP_SECONDS)
            while not (self._is_ending.is_set() and not self._values and not self._replies):
                if self._turn():
                    nap.begin()
                else:
                    is_moving = self._payloads or self._values or self._replies
                    nap.take(_LONGEST_NAP_IN_TRANSFER_SECONDS if is_moving else None)
        except BaseException as error:
            if ulfm.is_death(error):
                for comm in self._links.comms():  # ranks that wait for a reply learn of the death
                    ulfm.revoke(comm)
                return
            logger.exception("the service of parameter servers failed: ranks of other nodes would wait for ever")
            abort.abort(1)

    def _turn(self) -> bool:
        """Do what can be done now; whether there was anything."""
        # Memory of replies that have left is free again.
        self._replies = [reply for reply in self._replies if not reply.is_complete()]
        self._values = [values for values in self._values if not values.is_complete()]
        is_busy = self._receive_headers()
        # Requests whose payload has arrived are carried out in the order in which they came.
        payloads, self._payloads = self._payloads, []
        for payload in payloads:
            if payload.is_complete():
                self._carry_out(payload.client, payload.request, payload.memory)
                is_busy = True
            else:
                self._payloads.append(payload)
        return is_busy

    def _receive_headers(self) -> bool:
        """Receive all requests that have come, and begin with those for which there is room; whether there were any."""
        status = MPI.Status()
        while (message := self._links.requests.improbe(tag=HEADER_TAG, status=status)) is not None:
            self._waiting.append((status.source, ShardRequest._make(message.recv())))
        before = len(self._waiting)
        for _ in range(before):
            client, request = self._waiting.popleft()
            if not self._has_begun(client, request):
                self._waiting.append((client, request))
        return len(self._waiting) < before

    def _has_begun(self, client: int, request: ShardRequest) -> bool:
        """Begin with a request, unless too many bytes are under way."""
        if Kind(request.kind).gives or not request.num_bytes:
            if len(self._values) >= _MOST_UNDER_WAY:
                return False
            self._carry_out(client, request, None)
        else:
            if len(self._payloads) >= _MOST_UNDER_WAY:
                return False
            memory = torch.empty(request.num_bytes, dtype=torch.uint8, device="cpu")
            tag = bytes_tag(request.shard)
            transfers = [self._links.requests.Irecv(part, client, tag) for part in pieces(memory)]
            self._payloads.append(_Transfer(client, request, memory, transfers))
        return True

    def _carry_out(self, client: int, request: Any, payload: Any) -> None:
        """Carry out a request, and reply: first the values, if any, then the header with the error, if any."""
        error = None
        try:
            given = self._result(request, payload)
            if given is not None:
                tag = bytes_tag(request.shard)
                sent = [self._links.replies.Isend(part, client, tag) for part in pieces(given)]
                self._values.append(_Transfer(client, request, given, sent))
        except BaseException as failure:  # an error of a rule concerns its sender alone
            error = packed(failure)
        reply = self._links.replies.isend(error, client, reply_tag(request.shard))
        self._replies.append(_Transfer(client, None, error, [reply]))

    def _result(self, request: ShardRequest, payload: Tensor | None) -> Tensor | None:
        """Work on the shard under its lock; the bytes that were asked for."""
        name, options = pickle.loads(request.rule) if request.kind == Kind.APPLY else ("", {})
        with self._stores[request.server].held(request.shard) as shard:
            if request.kind == Kind.APPLY:
                values = shard.values[:0] if payload is None else payload.view(shard.values.dtype)
                shard.apply(rules.named("send", name), values, options)
            elif request.kind == Kind.RESTORE:
                assert payload is not None, request
                shard.memory.copy_(payload)
            else:
                return (shard.memory if request.kind == Kind.SAVE else shard.values).clone()
        return None


class ShardExchange:
    """Kept with a channel whose ranks are on several nodes: its links, and the service, in the node's first rank."""

    def __init__(self, channel: Channel) -> None:
        self.links = Links(channel)
        first: dict[int, int] = {}
        for rank, place in enumerate(channel.places):
            first.setdefault(place.node, rank)
        self.service_of = [first[place.node] for place in channel.places]
        is_first = self.service_of[channel.rank] == channel.rank
        self.service = Service(self.links) if is_first else None

    def free(self) -> None:
        """Free the links. Collective."""
        self.links.free()

    def abandon(self) -> None:
        """A rank has died; the communicators are revoked, which ends the service."""
        if self.service is not None:
            self.service.abandon()


class PendingReply:
    """A request under way, whose bytes come from ``memory`` or go there. ``finish`` it, whatever else goes wrong."""

    def __init__(self, links: Links, service: int, request: ShardRequest, memory: Tensor | None) -> None:
        self._replies, self._service, self._shard = links.replies, service, request.shard
        self._memory = memory  # alive until all is done
        self._values: list[Any] = []
        parts = [] if memory is None else pieces(memory)
        if Kind(request.kind).gives:
            self._values = [links.replies.Irecv(part, service, bytes_tag(request.shard)) for part in parts]
            parts = []
        self._sent = [links.requests.isend(tuple(request), service, HEADER_TAG)]
        self._sent += [links.requests.Isend(part, service, bytes_tag(request.shard)) for part in parts]

    def finish(self) -> None:
        """Wait for the reply. Raises what was raised at the shard."""
        nap = Nap(_LONGEST_NAP_IN_TRANSFER_SECONDS)
        while (message := self._replies.improbe(self._service, reply_tag(self._shard))) is None:
            nap.take()
        error: bytes | None = message.recv()
        if error is not None:
            for request in self._values:  # no values will come
                request.Cancel()
        for request in [*self._sent, *self._values]:
            complete(request, nap)
        self._memory = None
        if error is not None:
            raise unpacked(error)
