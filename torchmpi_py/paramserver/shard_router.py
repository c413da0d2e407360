"""Distribution of a rank's requests to all shards of a parameter server.

A rank works on the shards of its own node directly (``store.py``), and sends messages to the services of other nodes
(``remote.py``).
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchmpi_py.core import backoff
from torchmpi_py.core.channels import Channel
from torchmpi_py.core.mpi_api import MPI
from torchmpi_py.errors import RanksDisagree
from torchmpi_py.paramserver import rules
from torchmpi_py.paramserver.remote import Kind, ShardRequest
from torchmpi_py.paramserver.request_thread import Answers, RequestThread
from torchmpi_py.paramserver.rules import Rule
from torchmpi_py.paramserver.service import ShardExchange
from torchmpi_py.paramserver.shard import Shard, shards
from torchmpi_py.paramserver.store import Store

OnShard = Callable[[Shard, int], object]  # function of a shard and of the rank that holds the shard
_LONGEST_NAP_SECONDS = 0.02  # longest sleep of a rank that waits in free


class ShardRouter:
    """A distributor of requests to the shards of one server. It is stored with the channel of the server's ranks.

    All ranks of the channel must call the constructor, in which each rank fills its shard from ``source``. All methods
    run in the request thread, except the constructor, ``new_shards``, ``abandon`` and ``free``.
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
        backoff.fenced(channel.mpi.Barrier)()  # All shards must be filled, and served, before the first request.

    def apply(self, name: str, rule: Rule, options: dict[str, Any], payload: Tensor, answers: Answers) -> None:
        """Apply a rule to all shards, even if the rule fails on some shards."""
        packed = pickle.dumps((name, options)) if self._exchange is not None else b""

        def ask(rank: int) -> None:
            part = self._part(payload, rank) if rule.needs_payload else None
            self._ask(answers, rank, Kind.APPLY, part, packed)

        self._on_all(answers, ask, lambda shard, rank: shard.apply(rule, self._part(payload, rank), options))

    def read(self, target: Tensor, answers: Answers) -> None:
        """Copy the values of all shards into a flat tensor."""
        self._on_all(
            answers,
            lambda rank: self._ask(answers, rank, Kind.READ, self._part(target, rank)),
            lambda shard, rank: self._part(target, rank).copy_(shard.values),
        )

    def save(self, copies: dict[int, Shard], answers: Answers) -> None:
        """Copy the shards into ``copies``, which ``new_shards`` has returned."""
        self._on_all(
            answers,
            lambda rank: self._ask(answers, rank, Kind.SAVE, copies[rank].memory),
            lambda shard, rank: copies[rank].memory.copy_(shard.memory),
        )

    def restore(self, saved: list[Shard], answers: Answers) -> None:
        """Overwrite all shards. ``saved`` contains a saved shard for each shard that is not empty, in rank order."""
        of = dict(zip(self._ranks(), saved, strict=True))
        self._on_all(
            answers,
            lambda rank: self._ask(answers, rank, Kind.RESTORE, of[rank].memory),
            lambda shard, rank: shard.memory.copy_(of[rank].memory),
        )

    def take_in(self, source: ShardRouter, rule: Rule, options: dict[str, Any]) -> None:
        """Apply a rule to this rank's shard, with this rank's shard of ``source`` as the payload.

        ``source`` is another server with the same layout. Its shard on this rank is then set to zero.
        """
        rank = self._channel.rank
        with self._store.held(rank) as mine, source._store.held(rank) as payload:
            if len(mine.values):
                mine.apply(rule, payload.values, options)
                payload.apply(rules.named("take_in", "zero"), payload.values, {})

    def new_shards(self) -> dict[int, Shard]:
        """Return a new shard of zeros, in host memory, for each rank whose shard is not empty."""
        counts = {rank: self.bounds[rank][1] - self.bounds[rank][0] for rank in self._ranks()}
        return {rank: Shard.zeros(count, self._dtype, self.num_slots) for rank, count in counts.items()}

    def abandon(self) -> None:
        """Mark the server as lost, because a rank has died and its shard is lost."""
        self._requests.drain()  # This returns, because the requests to other nodes have failed.
        self.is_free = True

    def free(self) -> None:
        """Wait until the requests of all ranks are complete, and release the memory.

        All ranks of the server must call it. A rank sleeps until the other ranks also call it.
        """
        self._requests.drain()
        self._wait_for_all()
        if self._exchange is not None and self._exchange.service is not None:
            self._exchange.service.remove(self._number)
        self.is_free = True
        del self._store

    def _wait_for_all(self) -> None:
        """Wait until all ranks call ``free``. Raise RanksDisagree, on every rank, if they free different servers."""
        # Keep the memory alive in an attribute, because MPI may still write to the memory if the wait ends early.
        numbers = self._all_numbers = torch.tensor([self._number, -self._number], device="cpu")
        request = self._channel.mpi.Iallreduce(MPI.IN_PLACE, numbers.numpy(), MPI.MAX)
        backoff.complete(request, backoff.Nap(_LONGEST_NAP_SECONDS))
        if numbers.sum() != 0:
            raise RanksDisagree("ranks free different parameter servers; free servers in the same order on all ranks")

    def _part(self, whole: Tensor, rank: int) -> Tensor:
        """Return the part of a flat tensor that belongs to the shard of a rank."""
        begin, end = self.bounds[rank]
        return whole[begin:end]

    def _ranks(self) -> list[int]:
        """Return the ranks whose shard is not empty."""
        return [rank for rank, (begin, end) in enumerate(self.bounds) if begin < end]

    def _on_all(self, answers: Answers, ask: Callable[[int], object], here: OnShard) -> None:
        """Call ``ask`` with the rank of each shard on another node, and then ``here`` with each shard of this node."""
        # Start with this rank's own shard, so that ranks do not queue for the lock of the same shard.
        first, size = self._channel.rank, self._channel.size
        ranks = sorted(self._ranks(), key=lambda rank: (rank - first) % size)
        for rank in ranks:
            if rank not in self._store:
                answers.attempt(lambda: ask(rank))  # noqa: B023 - the lambda runs before the next iteration
        for rank in ranks:
            if rank in self._store:
                answers.attempt(lambda: self._here(rank, here))  # noqa: B023

    def _here(self, rank: int, work: OnShard) -> None:
        with self._store.held(rank) as shard:
            work(shard, rank)

    def _ask(self, answers: Answers, rank: int, kind: Kind, memory: Tensor | None, rule: bytes = b"") -> None:
        assert self._exchange is not None, "on a single node no shard is remote"
        request = ShardRequest(self._number, rank, int(kind), 0 if memory is None else memory.nbytes, rule)
        client = self._exchange.client
        answers.expect(client, client.ask(self._exchange.service_of[rank], request, memory))
