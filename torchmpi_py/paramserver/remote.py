"""What is said between a rank and the service of another node (``exchange.py``, ``service.py``), and how.

A *request* is for one shard: its header, and the payload right behind it if it has one. The *answer* is the values that
were asked for, if any, and a header that says what went wrong. Headers hold plain numbers and bytes: what somebody's
rule or option is made of is unpickled by whoever can answer for it. Requests and answers have a communicator each, for
a rank may ask one service and be another. Messages of one sender with one tag arrive in order, and a rank asks each
shard one thing at a time, so the shard's number as the tag says what belongs together.

The service of a node: a thread that works on the node's shards for the ranks of other nodes.

It runs in the first rank of the node, as long as there are servers that spread over nodes. It looks for messages in
naps, which grow to 2 ms when there are none: an idle service costs about a hundredth of a processor, and the first
request after a while finds it asleep that long.

Requests are taken in the order in which they come. Of bytes that come, and of bytes that go, only a few are on their
way at a time, which bounds the memory that this takes; but those that go do not wait for those that come, so a stream
of sends starves no one. A request that cannot be carried out is answered with the reason; the service goes on. What it
does wait for is a lock: a rank of this node that works long on a shard holds up those who ask from elsewhere.

The rank's side of what is said with services of other nodes (``messages.py``); runs in the client's thread.

While answers are on their way the rank works on the shards of its own node; then it looks for them, in short naps, so
that a rank that waits for another node leaves most of a processor to the others.
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

HEADER_TAG = 0  # of all requests' headers; one service takes them from everybody


class Kind(enum.IntEnum):
    """What is asked."""

    APPLY = 0  # a rule, to the payload
    READ = 1  # the values
    SAVE = 2  # the memory of the shard
    RESTORE = 3  # the payload becomes the memory of the shard

    @property
    def gives(self) -> bool:
        """Whether bytes come with the answer, and not with the request."""
        return self in (Kind.READ, Kind.SAVE)


class ShardRequest(NamedTuple):
    """The header of a request. ``num_bytes`` come behind it, or with the answer."""

    server: int
    shard: int  # the rank that holds it
    kind: int
    num_bytes: int
    rule: bytes = b""  # name and options, pickled


class Links:
    """The two communicators of a channel; collective."""

    def __init__(self, channel: Channel) -> None:
        self.requests = channel.mpi.Dup()
        self.answers = channel.mpi.Dup()
        ulfm.register(self)

    def comms(self) -> list[MPI.Comm]:
        """What MPI has to revoke when a rank dies."""
        return [self.requests, self.answers]

    def free(self) -> None:
        """Collective."""
        self.answers.Free()
        self.requests.Free()


def bytes_tag(shard: int) -> int:
    """Of a payload, or of values."""
    return 1 + 2 * shard


def answer_tag(shard: int) -> int:
    """Of an answer's header."""
    return 2 + 2 * shard


def pieces(x: Tensor) -> list[Any]:
    """The memory of a flat tensor, for MPI, in messages that are not too long."""
    return [part.numpy() for part in torch.split(x.view(torch.uint8), config.current.message_bytes)]


def packed(error: BaseException) -> bytes:
    """An exception for the journey; one that would not survive it, or is none of a rule's, as one of ours."""
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
    """The exception, or, if that is not known here, one of ours."""
    try:
        error: Exception = pickle.loads(data)
        return error
    except Exception as failure:
        return ParameterServerError(f"a shard on another node raised an error that cannot be read here: {failure}")


logger = logging.getLogger("torchmpi_py")

_LONGEST_NAP_SECONDS = 0.002
_LONGEST_NAP_IN_TRANSFER_SECONDS = 0.0001
_MOST_ON_THEIR_WAY = 4


class _Transfer:
    """Bytes on their way, with the memory that they come from or go to."""

    def __init__(self, client: int, request: ShardRequest | None, memory: object, requests: list[Any]) -> None:
        self.client, self.request, self.memory = client, request, memory
        self._requests = requests

    def is_complete(self) -> bool:
        """Move it forward, and look."""
        self._requests = [request for request in self._requests if not request.Test()]
        return not self._requests


class Service:
    """Serves the stores that are added to it; its thread ends when none is left."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._stores: dict[int, Store] = {}
        self._waiting: deque[tuple[int, ShardRequest]] = deque()
        self._coming: list[_Transfer] = []
        self._going: list[_Transfer] = []
        self._answers: list[_Transfer] = []
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
        """Serve it no longer; all that was asked of it has been answered."""
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
            while not (self._is_ending.is_set() and not self._going and not self._answers):
                if self._turn():
                    nap.begin()
                else:
                    is_moving = self._coming or self._going or self._answers
                    nap.take(_LONGEST_NAP_IN_TRANSFER_SECONDS if is_moving else None)
        except BaseException as error:
            if ulfm.is_death(error):
                for comm in self._links.comms():  # who waits for an answer learns of it
                    ulfm.revoke(comm)
                return
            logger.exception("the service of parameter servers failed: ranks of other nodes would wait for ever")
            abort.abort(1)

    def _turn(self) -> bool:
        """Do what can be done now; whether there was anything."""
        self._answers = [answer for answer in self._answers if not answer.is_complete()]
        self._going = [going for going in self._going if not going.is_complete()]
        busy = self._take_headers()
        here, self._coming = self._coming, []
        for coming in here:
            if coming.is_complete():
                self._carry_out(coming.client, coming.request, coming.memory)
                busy = True
            else:
                self._coming.append(coming)
        return busy

    def _take_headers(self) -> bool:
        """Take all requests that have come, and begin with those for which there is room; whether there were any."""
        while (message := self._links.requests.improbe(tag=HEADER_TAG, status=(status := _status()))) is not None:
            self._waiting.append((status.source, ShardRequest._make(message.recv())))
        before = len(self._waiting)
        for _ in range(before):
            client, request = self._waiting.popleft()
            if not self._has_begun(client, request):
                self._waiting.append((client, request))
        return len(self._waiting) < before

    def _has_begun(self, client: int, request: ShardRequest) -> bool:
        """Begin with a request, unless too many bytes are on their way."""
        if Kind(request.kind).gives or not request.num_bytes:
            if len(self._going) >= _MOST_ON_THEIR_WAY:
                return False
            self._carry_out(client, request, None)
        else:
            if len(self._coming) >= _MOST_ON_THEIR_WAY:
                return False
            memory = torch.empty(request.num_bytes, dtype=torch.uint8, device="cpu")
            tag = bytes_tag(request.shard)
            transfers = [self._links.requests.Irecv(part, client, tag) for part in pieces(memory)]
            self._coming.append(_Transfer(client, request, memory, transfers))
        return True

    def _carry_out(self, client: int, request: Any, payload: Any) -> None:
        """Do what is asked, and answer."""
        error = None
        try:
            given = self._done(request, payload)
            if given is not None:
                tag = bytes_tag(request.shard)
                sent = [self._links.answers.Isend(part, client, tag) for part in pieces(given)]
                self._going.append(_Transfer(client, request, given, sent))
        except BaseException as failure:  # whatever a rule raises is its sender's affair
            error = packed(failure)
        answer = self._links.answers.isend(error, client, answer_tag(request.shard))
        self._answers.append(_Transfer(client, None, error, [answer]))

    def _done(self, request: ShardRequest, payload: Tensor | None) -> Tensor | None:
        """Do what is asked; the bytes that were asked for."""
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


def _status() -> Any:

    return MPI.Status()


_LONGEST_NAP_OF_CLIENT_SECONDS = 0.0001


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
        """Collective."""
        self.links.free()

    def abandon(self) -> None:
        """A rank has died; the communicators are revoked, which ends the service."""
        if self.service is not None:
            self.service.abandon()


class PendingReply:
    """A request on its way, whose bytes come from ``memory`` or go there. ``finish`` it, whatever else goes wrong."""

    def __init__(self, links: Links, service: int, request: ShardRequest, memory: Tensor | None) -> None:
        self._answers, self._service, self._shard = links.answers, service, request.shard
        self._memory = memory  # alive until all is done
        self._coming: list[Any] = []
        parts = [] if memory is None else pieces(memory)
        if Kind(request.kind).gives:
            self._coming = [links.answers.Irecv(part, service, bytes_tag(request.shard)) for part in parts]
            parts = []
        self._going = [links.requests.isend(tuple(request), service, HEADER_TAG)]
        self._going += [links.requests.Isend(part, service, bytes_tag(request.shard)) for part in parts]

    def finish(self) -> None:
        """Wait for the answer. Raises what was raised there."""
        nap = Nap(_LONGEST_NAP_OF_CLIENT_SECONDS)
        while (message := self._answers.improbe(self._service, answer_tag(self._shard))) is None:
            nap.take()
        error: bytes | None = message.recv()
        if error is not None:
            for request in self._coming:  # nothing will come
                request.Cancel()
        for request in [*self._going, *self._coming]:
            complete(request, nap)
        self._memory = None
        if error is not None:
            raise unpacked(error)
