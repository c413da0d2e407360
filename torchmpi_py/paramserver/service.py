"""The service of a node: a thread that works on the node's shards for the ranks of other nodes.

It runs in the first rank of the node, as long as there are servers that spread over nodes. The messages are those of
``remote.py``. MPI cannot wake a thread, so the service looks for messages in naps, which grow to 50 us within a fifth
of a millisecond after a request, and on to 2 ms, by half a percent of the time since. So a request is late by half a
percent of the time that nothing was asked, and an idle service costs about a hundredth of a processor.

Requests of a rank are carried out in the order in which they come; ranks do not wait for each other's payloads. While a
payload is received, the next one of the same rank comes in, so the network does not wait for the rule. Only a few
payloads, and a few replies with large values, are under way at a time, which bounds the memory that they take. A rule
is applied when all of the payload is there: to whom works on the shard meanwhile a slow network makes no difference. A
request that cannot be carried out is replied to with the reason; the service goes on. It does wait for locks: a rank of
this node that works long on a shard delays the ranks that ask from elsewhere.
"""

from __future__ import annotations

import logging
import pickle
import threading
from collections import deque

import torch
from torch import Tensor

from torchmpi_py.core import ulfm
from torchmpi_py.core.backoff import Nap, end_sleeps_in_time
from torchmpi_py.core.channels import Channel
from torchmpi_py.core.mpi_api import MPI
from torchmpi_py.errors import ParameterServerError
from torchmpi_py.paramserver import remote, rules
from torchmpi_py.paramserver.shard import Shard
from torchmpi_py.paramserver.store import Store
from torchmpi_py.watch import abort

logger = logging.getLogger("torchmpi_py")

_LONGEST_NAP_SECONDS = 0.002  # of an idle service
_NAP_SHARE = 0.005  # of the time since the last request
_SHORT_NAP_SECONDS = 0.00005
_LONGEST_NAP_IN_TRANSFER_SECONDS = 0.0001
_MOST_UNDER_WAY = 4  # payloads, and as many replies with large values
_MOST_OF_A_CLIENT = 2  # payloads: one is received while the rule is applied to the other


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


class _Job:
    """A request that is not carried out yet."""

    def __init__(self, request: remote.ShardRequest) -> None:
        self.request = request
        self.payload = None if request.payload is None else torch.frombuffer(request.payload, dtype=torch.uint8)
        is_large = not remote.is_small(request.num_bytes)
        gives = remote.Kind(request.kind).gives
        self.gives_pieces, self.comes_in_pieces = is_large and gives, is_large and not gives
        self.arriving: list[MPI.Request] | None = None  # the pieces of the payload, once they are received


class _Jobs:
    """The requests of a client that are not carried out yet, in the order in which they came."""

    def __init__(self) -> None:
        self.waiting: deque[_Job] = deque()
        self._announced: deque[_Job] = deque()  # their payloads are not received yet
        self.num_payloads = 0  # received, or under way, of requests that wait

    def append(self, job: _Job) -> None:
        """A request has come."""
        self.waiting.append(job)
        if job.comes_in_pieces:
            self._announced.append(job)

    def popleft(self) -> _Job:
        """The oldest request, which is ready."""
        job = self.waiting.popleft()
        self.num_payloads -= job.comes_in_pieces
        return job

    def receive_payloads(self, requests: MPI.Comm, client: int, room: int) -> None:
        """Begin to receive the next payloads, ``room`` at most."""
        for _ in range(min(room, _MOST_OF_A_CLIENT - self.num_payloads, len(self._announced))):
            job = self._announced.popleft()
            job.payload = torch.empty(job.request.num_bytes, dtype=torch.uint8, device="cpu")
            job.arriving = [requests.Irecv(piece, client, remote.BYTES_TAG) for piece in remote.pieces(job.payload)]
            self.num_payloads += 1


class Service:
    """Serves the stores that are added to it; its thread ends with the last store."""

    def __init__(self, links: remote.Links) -> None:
        self._links = links
        self._stores: dict[int, Store] = {}
        self._jobs: dict[int, _Jobs] = {}  # by client
        # MPI's requests hold the memory from which bytes leave.
        self._values: list[list[MPI.Request]] = []  # the pieces of each reply with large values
        self._replies: list[MPI.Request] = []
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
        end_sleeps_in_time()
        try:
            nap = Nap(_LONGEST_NAP_SECONDS, share=0.25)
            while not (self._is_ending.is_set() and not self._values and not self._replies):
                if self._turn():
                    nap.begin()
                else:
                    is_moving = self._values or any(jobs.waiting for jobs in self._jobs.values())
                    nap.take(_LONGEST_NAP_IN_TRANSFER_SECONDS if is_moving else _longest_nap(nap.seconds))
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
        self._replies = [reply for reply in self._replies if not reply.Test()]
        self._values = [values for values in self._values if not MPI.Request.Testall(values)]
        is_busy = self._receive_requests()
        while self._carry_out_one():
            is_busy = True
        return is_busy

    def _carry_out_one(self) -> bool:
        """Carry out a request that is ready, of the client that has waited longest; whether there was one."""
        for client, jobs in self._jobs.items():
            room = _MOST_UNDER_WAY - sum(each.num_payloads for each in self._jobs.values())
            jobs.receive_payloads(self._links.requests, client, room)
            if jobs.waiting and self._is_ready(jobs.waiting[0]):
                self._jobs[client] = self._jobs.pop(client)  # its place among the clients is the last one now
                self._carry_out(client, jobs.popleft())
                return True
        return False

    def _receive_requests(self) -> bool:
        """Receive all requests that have come; whether there were any."""
        status, has_come = MPI.Status(), False
        while (message := self._links.requests.improbe(tag=remote.HEADER_TAG, status=status)) is not None:
            job = _Job(remote.ShardRequest._make(message.recv()))
            self._jobs.setdefault(status.source, _Jobs()).append(job)
            has_come = True
        return has_come

    def _is_ready(self, job: _Job) -> bool:
        """Whether a request can be carried out: its payload has come, or there is room for the reply."""
        if job.gives_pieces:
            return len(self._values) < _MOST_UNDER_WAY
        return not job.comes_in_pieces or (job.arriving is not None and MPI.Request.Testall(job.arriving))

    def _carry_out(self, client: int, job: _Job) -> None:
        """Carry out a request, and reply with the values or the error, if any."""
        try:
            with self._stores[job.request.server].held(job.request.shard) as shard:
                if remote.Kind(job.request.kind).gives:
                    self._give(client, job, shard)
                    return
                self._change(job.request, job.payload, shard)
        except MPI.Exception:  # the reply may have left: another one would be taken for the next request's
            raise
        except BaseException as failure:  # an error of a rule concerns its sender alone
            self._reply(client, packed(failure))
        else:
            self._reply(client)

    def _change(self, request: remote.ShardRequest, payload: Tensor | None, shard: Shard) -> None:
        """Apply a rule to a shard, or restore it. Under its lock."""
        if request.kind == remote.Kind.APPLY:
            name, options = pickle.loads(request.rule)
            values = shard.values[:0] if payload is None else payload.view(shard.values.dtype)
            shard.apply(rules.named("send", name), values, options)
        else:
            assert payload is not None, request
            shard.memory.copy_(payload)

    def _give(self, client: int, job: _Job, shard: Shard) -> None:
        """Reply with the bytes of a shard. Under its lock."""
        source = (shard.memory if job.request.kind == remote.Kind.SAVE else shard.values).view(torch.uint8)
        if not job.gives_pieces:
            self._reply(client, None, remote.to_bytes(source))
            return
        copy = torch.empty_like(source)
        self._reply(client)
        leaving = []
        for piece, into in zip(remote.pieces(source), remote.pieces(copy), strict=True):
            into[:] = piece  # the first pieces leave while the others are copied
            leaving.append(self._links.replies.Isend(into, client, remote.BYTES_TAG))
        self._values.append(leaving)

    def _reply(self, client: int, error: bytes | None = None, values: bytearray | None = None) -> None:
        sent = self._links.replies.isend((error, values), client, remote.HEADER_TAG)
        if not sent.Test():
            self._replies.append(sent)


def _longest_nap(idle_seconds: float) -> float:
    return min(_LONGEST_NAP_SECONDS, max(_SHORT_NAP_SECONDS, idle_seconds * _NAP_SHARE))


class ShardExchange:
    """Kept with a channel over several nodes: its links, a client, and the service in each node's first rank."""

    def __init__(self, channel: Channel) -> None:
        self.links = remote.Links(channel)
        self.client = remote.Client(self.links)
        nodes = channel.places.nodes.tolist()
        first = {node: rank for rank, node in reversed(list(enumerate(nodes)))}
        self.service_of = [first[node] for node in nodes]
        is_first = self.service_of[channel.rank] == channel.rank
        self.service = Service(self.links) if is_first else None

    def free(self) -> None:
        """Free the links. Collective."""
        self.links.free()

    def abandon(self) -> None:
        """A rank has died; the communicators are revoked, which ends the service."""
        if self.service is not None:
            self.service.abandon()
