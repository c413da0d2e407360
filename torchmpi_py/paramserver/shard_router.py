"""Carries out requests on all shards of a parameter server: those of this node itself, others by way of their service.

Everything here runs in the client's thread, one request after the other, but for making and freeing.
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
from torchmpi_py.paramserver import request_thread, rules, shard
from torchmpi_py.paramserver.remote import Kind, PendingReply, ShardExchange, ShardRequest
from torchmpi_py.paramserver.rules import Rule
from torchmpi_py.paramserver.shard import Shard, shards
from torchmpi_py.paramserver.store import Store

_LONGEST_NAP_SECONDS = 0.02  # of a rank that waits in free
OnShard = Callable[[Shard, int], object]  # a shard, and the rank that holds it


class ShardRouter:
    """Kept with the channel of the server's ranks. Made collectively: each rank seeds its shard from ``source``."""

    def __init__(self, channel: Channel, source: Tensor, num_slots: int) -> None:
        self.bounds = shards(source.numel(), channel.size)
        self.num_slots = num_slots
        self.is_free = False
        self._channel, self._dtype = channel, source.dtype
        self._store = Store(channel, source, self.bounds, num_slots)
        self._exchange = channel.keep(ShardExchange, ShardExchange) if channel.num_nodes > 1 else None
        self._number = self._store.number
        if self._exchange is not None and self._exchange.service is not None:
            self._exchange.service.add(self._number, self._store)
        backoff.fenced(channel.mpi.Barrier)()  # all shards are seeded, and served

    def apply(self, name: str, rule: Rule, options: dict[str, Any], payload: Tensor) -> int:
        """Apply a rule to all shards, also if it fails on one; how many bytes were sent."""
        packed = pickle.dumps((name, options)) if self._exchange is not None else b""

        def ask(rank: int) -> PendingReply:
            sent = self._part(payload, rank) if rule.needs_payload else None
            return self._ask(rank, Kind.APPLY, sent, packed)

        self._on_all(ask, lambda held, rank: held.apply(rule, self._part(payload, rank), options))
        return payload.nbytes if rule.needs_payload else 0

    def read(self, target: Tensor) -> int:
        """All values into a flat tensor; how many bytes they are."""
        self._on_all(
            lambda rank: self._ask(rank, Kind.READ, self._part(target, rank)),
            lambda held, rank: self._part(target, rank).copy_(held.values),
        )
        return target.nbytes

    def save(self) -> list[Shard]:
        """Copies of the shards that are not empty, in the order of ranks."""
        copies = {rank: self._new_shard(rank) for rank in self._ranks()}
        self._on_all(
            lambda rank: self._ask(rank, Kind.SAVE, copies[rank].memory),
            lambda held, rank: copies[rank].memory.copy_(held.memory),
        )
        return list(copies.values())

    def restore(self, saved: list[Shard]) -> None:
        """Let the shards that are not empty become what was saved."""
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
        """A rank has died, and its part of the values with it."""
        request_thread.drain()  # what had to do with other nodes has failed
        self.is_free = True

    def free(self) -> None:
        """When all ranks have done what they were asked, let go of the memory. Collective; waits asleep."""
        request_thread.drain()
        self._meet()
        if self._exchange is not None and self._exchange.service is not None:
            self._exchange.service.remove(self._number)
        self.is_free = True
        del self._store

    def _meet(self) -> None:
        """Wait for all ranks to free this server; RanksDisagree, on all of them, if one frees another."""
        numbers = torch.tensor([self._number, -self._number], device="cpu")
        request = self._channel.mpi.Iallreduce(MPI.IN_PLACE, numbers.numpy(), MPI.MAX)
        backoff.complete(request, backoff.Nap(_LONGEST_NAP_SECONDS))
        if numbers.sum() != 0:
            raise RanksDisagree("the ranks free different parameter servers: free them in the same order on all ranks")

    def _part(self, whole: Tensor, rank: int) -> Tensor:
        """What of a flat tensor belongs to the shard of a rank."""
        begin, end = self.bounds[rank]
        return whole[begin:end]

    def _new_shard(self, rank: int) -> Shard:
        """Room for a copy of a rank's shard."""
        begin, end = self.bounds[rank]
        count = end - begin
        size = shard.num_bytes(count, self._dtype, self.num_slots)
        return Shard(torch.empty(size, dtype=torch.uint8, device="cpu"), count, self._dtype, self.num_slots)

    def _ranks(self) -> list[int]:
        return [rank for rank, (begin, end) in enumerate(self.bounds) if begin < end]

    def _on_all(self, ask: Callable[[int], PendingReply], here: OnShard) -> None:
        """Ask for the shards of other nodes, work on those of this one, its own first; then wait for the answers.

        What has been asked is waited for in any case: an answer that is left would be taken for the next one's.
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
        for request in pending:
            attempt(request.finish)
        if errors:
            raise errors[0]

    def _here(self, rank: int, work: OnShard) -> None:
        with self._store.held(rank) as held:
            work(held, rank)

    def _ask(self, rank: int, kind: Kind, memory: Tensor | None, rule: bytes = b"") -> PendingReply:
        assert self._exchange is not None, "all shards are here on one node"
        request = ShardRequest(self._number, rank, int(kind), 0 if memory is None else memory.nbytes, rule)
        return PendingReply(self._exchange.links, self._exchange.service_of[rank], request, memory)
