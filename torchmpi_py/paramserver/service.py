"""The service of a node: a thread that works on the node's shards for the ranks of other nodes.

The thread runs in the first rank of the node while there are servers over several nodes. ``remote.py`` defines the
messages. MPI cannot wake a thread, so the service polls for messages, and sleeps between two polls. During the first
0.2 ms after a request, the sleep grows to 50 us. Later, the sleep is half a percent of the time since the last request,
up to 2 ms. So a request is delayed by at most 50 us or half a percent of the idle time before the request, whichever is
longer. An idle service uses about a hundredth of a core. The alternative, one-sided MPI operations without a service,
cannot run a rule on the target.

The requests of a rank are carried out in order, but no rank waits for the payload of another rank. The service receives
the next payload of a rank while it applies a rule to the previous payload, so the network does not wait for the rule.
Only a few payloads and a few replies with large values are in transfer at the same time, which limits the memory that
they use. A rule is applied after the whole payload has arrived, so the lock of a shard is not held while the service
waits for the network. If a request fails, the reply contains the error, and the service continues. The service does
wait for locks: if a rank of this node works on a shard for a long time, requests from other nodes are delayed.
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

_LONGEST_NAP_SECONDS = 0.002  # longest sleep of an idle service
_NAP_SHARE = 0.005  # sleep as a fraction of the time since the last request
_SHORT_NAP_SECONDS = 0.00005
_LONGEST_NAP_IN_TRANSFER_SECONDS = 0.0001
_MOST_UNDER_WAY = 4  # limit on payloads in memory, and on replies with large values in transfer
_MOST_OF_A_CLIENT = 2  # One payload of a client can arrive while a rule is applied to another payload.


def packed(error: BaseException) -> bytes:
    """Pickle an exception, and return the bytes.

    If ``error`` is not an Exception or cannot be pickled, pickle a ParameterServerError with the text of ``error``.
    """
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
    """A request that the service has not carried out yet."""

    def __init__(self, request: remote.ShardRequest) -> None:
        self.request = request
        self.payload = None if request.payload is None else torch.frombuffer(request.payload, dtype=torch.uint8)
        is_large = not remote.is_small(request.num_bytes)
        gives = remote.Kind(request.kind).gives
        self.gives_pieces, self.comes_in_pieces = is_large and gives, is_large and not gives
        self.arriving: list[MPI.Request] | None = None  # MPI receives of the pieces; None before the first receive


class _Jobs:
    """A client's requests that the service has not carried out yet, in the order of arrival."""

    def __init__(self) -> None:
        self.waiting: deque[_Job] = deque()
        self._announced: deque[_Job] = deque()  # requests whose large payloads are not yet being received
        self.num_payloads = 0  # number of payloads in memory, complete or in transfer

    def append(self, job: _Job) -> None:
        """Add a request that has arrived."""
        self.waiting.append(job)
        if job.comes_in_pieces:
            self._announced.append(job)

    def popleft(self) -> _Job:
        """Remove the oldest request, which must be ready to be carried out, and return it."""
        job = self.waiting.popleft()
        self.num_payloads -= job.comes_in_pieces
        return job

    def receive_payloads(self, requests: MPI.Comm, client: int, room: int) -> None:
        """Start to receive the client's next payloads, at most ``room`` of them."""
        for _ in range(min(room, _MOST_OF_A_CLIENT - self.num_payloads, len(self._announced))):
            job = self._announced.popleft()
            job.payload = torch.empty(job.request.num_bytes, dtype=torch.uint8, device="cpu")
            job.arriving = [requests.Irecv(piece, client, remote.BYTES_TAG) for piece in remote.pieces(job.payload)]
            self.num_payloads += 1


class Service:
    """The service of a node. Its thread starts with the first store, and ends when the last store is removed."""

    def __init__(self, links: remote.Links) -> None:
        self._links = links
        self._stores: dict[int, Store] = {}
        self._jobs: dict[int, _Jobs] = {}  # by client
        # An MPI request keeps the memory of its message alive until the send is complete.
        self._values: list[list[MPI.Request]] = []  # sends of the pieces of each reply with large values
        self._replies: list[MPI.Request] = []
        self._thread: threading.Thread | None = None
        self._is_ending = threading.Event()

    def add(self, number: int, store: Store) -> None:
        """Add a store, and start the thread if it is not running."""
        self._stores[number] = store
        if self._thread is None:
            self._is_ending.clear()
            self._thread = threading.Thread(target=self._run, name="torchmpi_py-parameter-service", daemon=True)
            self._thread.start()

    def remove(self, number: int) -> None:
        """Remove a store that has no pending requests. If no store is left, wait for the thread to end."""
        del self._stores[number]
        if not self._stores and self._thread is not None:
            self._is_ending.set()
            self._thread.join()
            self._thread = None

    def abandon(self) -> None:
        """End the thread after a rank has died, and wait until it has ended. The links must already be revoked."""
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
                for comm in self._links.comms():  # Ranks that wait for a reply then get an error.
                    ulfm.revoke(comm)
                return
            logger.exception("the parameter-server service failed; the job ends, because other nodes wait for replies")
            abort.abort(1)

    def _turn(self) -> bool:
        """Process all messages and requests that are ready, and return whether there were any."""
        # Drop the MPI requests of complete sends, to release the memory of their messages.
        self._replies = [reply for reply in self._replies if not reply.Test()]
        self._values = [values for values in self._values if not MPI.Request.Testall(values)]
        is_busy = self._receive_requests()
        while self._carry_out_one():
            is_busy = True
        return is_busy

    def _carry_out_one(self) -> bool:
        """Carry out a ready request of the client that was served least recently.

        Return whether any request was ready.
        """
        for client, jobs in self._jobs.items():
            room = _MOST_UNDER_WAY - sum(each.num_payloads for each in self._jobs.values())
            jobs.receive_payloads(self._links.requests, client, room)
            if jobs.waiting and self._is_ready(jobs.waiting[0]):
                self._jobs[client] = self._jobs.pop(client)  # Move the client to the end of the order.
                self._carry_out(client, jobs.popleft())
                return True
        return False

    def _receive_requests(self) -> bool:
        """Receive all requests that have arrived, and return whether any request has arrived."""
        status, has_requests = MPI.Status(), False
        while (message := self._links.requests.improbe(tag=remote.HEADER_TAG, status=status)) is not None:
            job = _Job(remote.ShardRequest._make(message.recv()))
            self._jobs.setdefault(status.source, _Jobs()).append(job)
            has_requests = True
        return has_requests

    def _is_ready(self, job: _Job) -> bool:
        """Return whether a request can be carried out now.

        A large payload must have arrived. A large reply must not exceed the limit on replies in transfer.
        """
        if job.gives_pieces:
            return len(self._values) < _MOST_UNDER_WAY
        return not job.comes_in_pieces or (job.arriving is not None and MPI.Request.Testall(job.arriving))

    def _carry_out(self, client: int, job: _Job) -> None:
        """Carry out a request, and reply with the values or the error."""
        try:
            with self._stores[job.request.server].held(job.request.shard) as shard:
                if remote.Kind(job.request.kind).gives:
                    self._give(client, job, shard)
                    return
                self._change(job.request, job.payload, shard)
        except MPI.Exception:
            # The reply may already be in transfer. The client would match a second reply with its next request.
            raise
        except BaseException as failure:  # Report an error of the rule to the sender. The service continues.
            self._reply(client, packed(failure))
        else:
            self._reply(client)

    def _change(self, request: remote.ShardRequest, payload: Tensor | None, shard: Shard) -> None:
        """Apply a rule to a shard, or restore the shard. The caller must hold the lock of the shard."""
        if request.kind == remote.Kind.APPLY:
            name, options = pickle.loads(request.rule)
            values = shard.values[:0] if payload is None else payload.view(shard.values.dtype)
            shard.apply(rules.named("send", name), values, options)
        else:
            assert payload is not None, request
            shard.memory.copy_(payload)

    def _give(self, client: int, job: _Job, shard: Shard) -> None:
        """Reply with the bytes of a shard. The caller must hold the lock of the shard."""
        source = (shard.memory if job.request.kind == remote.Kind.SAVE else shard.values).view(torch.uint8)
        if not job.gives_pieces:
            self._reply(client, None, remote.to_bytes(source))
            return
        copy = torch.empty_like(source)
        self._reply(client)
        leaving = []
        for piece, into in zip(remote.pieces(source), remote.pieces(copy), strict=True):
            into[:] = piece  # MPI sends the first pieces while the loop copies further pieces.
            leaving.append(self._links.replies.Isend(into, client, remote.BYTES_TAG))
        self._values.append(leaving)

    def _reply(self, client: int, error: bytes | None = None, values: bytearray | None = None) -> None:
        sent = self._links.replies.isend((error, values), client, remote.HEADER_TAG)
        if not sent.Test():
            self._replies.append(sent)


def _longest_nap(idle_seconds: float) -> float:
    return min(_LONGEST_NAP_SECONDS, max(_SHORT_NAP_SECONDS, idle_seconds * _NAP_SHARE))


class ShardExchange:
    """The links and the client of a channel over several nodes, and the service on the first rank of each node."""

    def __init__(self, channel: Channel) -> None:
        self.links = remote.Links(channel)
        self.client = remote.Client(self.links)
        nodes = channel.places.nodes.tolist()
        first = {node: rank for rank, node in reversed(list(enumerate(nodes)))}
        self.service_of = [first[node] for node in nodes]
        is_first = self.service_of[channel.rank] == channel.rank
        self.service = Service(self.links) if is_first else None

    def free(self) -> None:
        """Free the links. All ranks of the channel must call it."""
        self.links.free()

    def abandon(self) -> None:
        """End the service on this rank, if any, after a rank has died. The links must already be revoked."""
        if self.service is not None:
            self.service.abandon()
