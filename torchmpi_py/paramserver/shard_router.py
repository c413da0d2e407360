"""Requests to a parameter server: the thread in which they run, and their way to each shard.

A rank works on the shards of its own node itself (``store.py``), and asks the services of other nodes for theirs
(``remote.py``).
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from torchmpi_py.core import backoff, communicators, journal
from torchmpi_py.core.channels import Channel
from torchmpi_py.core.communication_thread import CommunicationThread
from torchmpi_py.core.handles import Handle, Work
from torchmpi_py.core.mpi_api import MPI
from torchmpi_py.errors import RanksDisagree
from torchmpi_py.paramserver import rules
from torchmpi_py.paramserver.remote import Kind, PendingReply, ShardExchange, ShardRequest
from torchmpi_py.paramserver.rules import Rule
from torchmpi_py.paramserver.shard import Shard, shards
from torchmpi_py.paramserver.store import Store

R = TypeVar("R")
OnShard = Callable[[Shard, int], object]  # a shard, and the rank that holds it
_LONGEST_NAP_SECONDS = 0.02  # of a rank that waits in free


class RequestThread:
    """The thread in which a rank carries out its requests, in the order in which they are made; kept with the world.

    It is not the thread of asynchronous collectives, which wait for other ranks: a parameter server waits for none. It
    runs from the first request until a server is freed, and again from the next request.
    """

    def __init__(self, world: Channel) -> None:
        self._lock = threading.Lock()  # no request is queued on a thread that ends
        self._thread = CommunicationThread(inline=False, name="parameter-server")

    def submit(self, label: str, step: Callable[[], R], *, is_recorded: bool = True) -> Handle[R]:
        """Queue a step; the handle returns or raises what the step does.

        Steps that repeat many times in an operation that is recorded as a whole are not recorded: they would push all
        other records out.
        """
        entry = journal.record_own(label, communicators.stack().levels[0]) if is_recorded else None
        with self._lock:
            return self._thread.submit(_Request(label, step, entry))

    def drain(self) -> None:
        """Wait until all queued requests are done, and end the thread."""
        with self._lock:
            self._thread.close()

    free = abandon = drain


class _Request(Work[R]):
    """A step as work for the thread."""

    def __init__(self, label: str, step: Callable[[], R], entry: journal.Entry | None) -> None:
        self.entry = entry
        self._label = label
        self._step: Callable[[], R] | None = step

    @property
    def label(self) -> str:
        return self._label

    def run(self, in_background: bool = False) -> R:
        if self.entry is None:
            return self._carry_out()
        journal.begin(self.entry)
        try:
            result = self._carry_out()
        except BaseException:
            journal.fail(self.entry)
            raise
        journal.end_launched(self.entry)
        return result

    def _carry_out(self) -> R:
        assert self._step is not None, "requests run once"
        with torch.inference_mode():  # in whatever mode the caller's tensors were made
            return self._step()

    def release(self) -> None:
        self._step = None


class ShardRouter:
    """Carries out a server's requests on all shards; kept with the channel of the server's ranks.

    Made collectively: each rank seeds its shard from ``source``. Only the methods that make and free it run outside of
    the request thread.
    """

    def __init__(self, channel: Channel, source: Tensor, num_slots: int, requests: RequestThread) -> None:
        self.bounds = shards(source.numel(), channel.size)
        self.num_slots = num_slots
        self.is_free = False
        self._channel, self._dtype, self._requests = channel, source.dtype, requests
        self._store = Store(channel, source, self.bounds, num_slots)
        self._exchange = channel.keep(ShardExchange, ShardExchange) if channel.num_nodes > 1 else None
        self._number = self._store.number
        if self._exchange is not None and self._exchange.service is not None:
            self._exchange.service.add(self._number, self._store)
        backoff.fenced(channel.mpi.Barrier)()  # all shards are seeded, and served

    def apply(self, name: str, rule: Rule, options: dict[str, Any], payload: Tensor) -> int:
        """Apply a rule to all shards, also if it fails on one; the number of bytes sent."""
        packed = pickle.dumps((name, options)) if self._exchange is not None else b""

        def ask(rank: int) -> PendingReply:
            sent = self._part(payload, rank) if rule.needs_payload else None
            return self._ask(rank, Kind.APPLY, sent, packed)

        self._on_all(ask, lambda held, rank: held.apply(rule, self._part(payload, rank), options))
        return payload.nbytes if rule.needs_payload else 0

    def read(self, target: Tensor) -> int:
        """Copy all values into a flat tensor; their number of bytes."""
        self._on_all(
            lambda rank: self._ask(rank, Kind.READ, self._part(target, rank)),
            lambda held, rank: self._part(target, rank).copy_(held.values),
        )
        return target.nbytes

    def save(self) -> list[Shard]:
        """Copies of the shards that are not empty, in rank order."""
        copies = {rank: self._new_shard(rank) for rank in self._ranks()}
        self._on_all(
            lambda rank: self._ask(rank, Kind.SAVE, copies[rank].memory),
            lambda held, rank: copies[rank].memory.copy_(held.memory),
        )
        return list(copies.values())

    def restore(self, saved: list[Shard]) -> None:
        """Overwrite the shards that are not empty with saved ones, which are in rank order."""
        of = dict(zip(self._ranks(), saved, strict=True))
        self._on_all(
            lambda rank: self._ask(rank, Kind.RESTORE, of[rank].memory),
            lambda held, rank: held.memory.copy_(of[rank].memory),
        )

    def take_in(self, source: ShardRouter, rule: Rule, options: dict[str, Any]) -> None:
        """Apply a rule to this rank's shard, with its shard of another server of this layout, which becomes zero."""
        rank = self._channel.rank
        with self._store.held(rank) as mine, source._store.held(rank) as payload:
            if len(mine.values):
                mine.apply(rule, payload.values, options)
                payload.apply(rules.named("take_in", "zero"), payload.values, {})

    def abandon(self) -> None:
        """A rank has died, and its shard with it."""
        self._requests.drain()  # requests to other nodes have failed
        self.is_free = True

    def free(self) -> None:
        """Wait for the requests of all ranks, and let go of the memory. Collective; waits asleep."""
        self._requests.drain()
        self._wait_for_all()
        if self._exchange is not None and self._exchange.service is not None:
            self._exchange.service.remove(self._number)
        self.is_free = True
        del self._store

    def _wait_for_all(self) -> None:
        """Wait for all ranks to free this server; RanksDisagree, on all of them, if one frees another."""
        numbers = torch.tensor([self._number, -self._number], device="cpu")
        request = self._channel.mpi.Iallreduce(MPI.IN_PLACE, numbers.numpy(), MPI.MAX)
        backoff.complete(request, backoff.Nap(_LONGEST_NAP_SECONDS))
        if numbers.sum() != 0:
            raise RanksDisagree("the ranks free different parameter servers: free them in the same order on all ranks")

    def _part(self, whole: Tensor, rank: int) -> Tensor:
        """The part of a flat tensor that belongs to the shard of a rank."""
        begin, end = self.bounds[rank]
        return whole[begin:end]

    def _new_shard(self, rank: int) -> Shard:
        """Memory for a copy of a rank's shard."""
        begin, end = self.bounds[rank]
        return Shard.zeros(end - begin, self._dtype, self.num_slots)

    def _ranks(self) -> list[int]:
        """The ranks whose shard is not empty."""
        return [rank for rank, (begin, end) in enumerate(self.bounds) if begin < end]

    def _on_all(self, ask: Callable[[int], PendingReply], here: OnShard) -> None:
        """Ask for the shards of other nodes, work on those of this one, its own first; then wait for the replies.

        Every reply is waited for, whatever fails: one that is left would be taken for the reply to the next request.
        """
        first, size = self._channel.rank, self._channel.size
        ranks = sorted(self._ranks(), key=lambda rank: (rank - first) % size)
        pending: list[PendingReply] = []
        errors: list[BaseException] = []

        def attempt(work: Callable[[], object]) -> None:
            try:
                work()
            except BaseException as error:
                errors.append(error)

        for rank in ranks:
            if rank not in self._store:
                attempt(lambda: pending.append(ask(rank)))  # noqa: B023 - done before the next one
        for rank in ranks:
            if rank in self._store:
                attempt(lambda: self._here(rank, here))  # noqa: B023
        for reply in pending:
            attempt(reply.finish)
        if errors:
            raise errors[0]

    def _here(self, rank: int, work: OnShard) -> None:
        with self._store.held(rank) as held:
            work(held, rank)

    def _ask(self, rank: int, kind: Kind, memory: Tensor | None, rule: bytes = b"") -> PendingReply:
        assert self._exchange is not None, "all shards are here on one node"
        request = ShardRequest(self._number, rank, int(kind), 0 if memory is None else memory.nbytes, rule)
        return PendingReply(self._exchange.links, self._exchange.service_of[rank], request, memory)
