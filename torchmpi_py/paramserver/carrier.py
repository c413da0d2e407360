"""Carries out requests on all shards of a parameter server: those of this node itself, others by way of their service.

Everything here runs in the client's thread, one request after the other, but for making and freeing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from torchmpi_py import waiting
from torchmpi_py.channels import Channel
from torchmpi_py.paramserver import client
from torchmpi_py.paramserver.exchange import Exchange, Pending
from torchmpi_py.paramserver.messages import Kind, Request
from torchmpi_py.paramserver.rules import Rule
from torchmpi_py.paramserver.shard import Shard, ShardState
from torchmpi_py.paramserver.sharding import shards
from torchmpi_py.paramserver.store import Store

_LONGEST_NAP_SECONDS = 0.02  # of a rank that waits in free
OnShard = Callable[[Shard, int], object]  # a shard, and the rank that holds it


class Carrier:
    """Kept with the channel of the server's ranks. Made collectively: each rank seeds its shard from ``source``."""

    def __init__(self, channel: Channel, source: Tensor, num_slots: int) -> None:
        self.bounds = shards(source.numel(), channel.size)
        self.is_free = False
        self._channel = channel
        self._store = Store(channel, source, self.bounds, num_slots)
        self._exchange = channel.keep(Exchange, Exchange) if channel.num_nodes > 1 else None
        self._number = 0
        if self._exchange is not None:
            self._number = self._exchange.number()
            if self._exchange.service is not None:
                self._exchange.service.add(self._number, self._store)
        channel.mpi.Barrier()  # all shards are seeded, and served

    def apply(self, name: str, rule: Rule, options: dict[str, Any], payload: Tensor) -> int:
        """Apply a rule to all shards, also if it fails on one; how many bytes were sent."""

        def part(rank: int) -> Tensor:
            begin, end = self.bounds[rank]
            return payload[begin:end]

        def ask(rank: int) -> Pending:
            sent = part(rank) if rule.needs_payload else None
            num_bytes = 0 if sent is None else sent.nbytes
            return self._ask(Request(self._number, rank, Kind.APPLY, num_bytes, name, options), payload=sent)

        self._on_all(ask, lambda shard, rank: shard.apply(rule, part(rank), options))
        return payload.nbytes if rule.needs_payload else 0

    def read(self, target: Tensor) -> int:
        """All values into a flat tensor; how many bytes they are."""

        def part(rank: int) -> Tensor:
            begin, end = self.bounds[rank]
            return target[begin:end]

        def ask(rank: int) -> Pending:
            values = part(rank)
            return self._ask(Request(self._number, rank, Kind.READ, values.nbytes), values=values)

        self._on_all(ask, lambda shard, rank: part(rank).copy_(shard.values))
        return target.nbytes

    def save(self) -> list[ShardState]:
        """Copies of the shards that are not empty, in the order of ranks."""
        states = self._on_all(
            lambda rank: self._ask(Request(self._number, rank, Kind.SAVE)), lambda shard, rank: shard.state()
        )
        return [states[rank] for rank in sorted(states)]

    def restore(self, states: list[ShardState]) -> None:
        """Let the shards that are not empty become what was saved."""
        of = dict(zip(self._ranks(), states, strict=True))
        self._on_all(
            lambda rank: self._ask(Request(self._number, rank, Kind.RESTORE, state=of[rank])),
            lambda shard, rank: shard.restore(of[rank]),
        )

    def take_in(self, source: Carrier, rule: Rule, options: dict[str, Any]) -> None:
        """Apply a rule to this rank's shard, with its shard of another server of this layout, which becomes zero."""
        rank = self._channel.rank
        with self._store.held(rank) as shard, source._store.held(rank) as payload:
            if len(shard.values):
                shard.apply(rule, payload.values, options)
                payload.values.zero_()

    def free(self) -> None:
        """When all ranks have done what they were asked, let go of the memory. Collective; waits asleep."""
        client.drain()
        waiting.barrier(self._channel.mpi, _LONGEST_NAP_SECONDS)
        if self._exchange is not None and self._exchange.service is not None:
            self._exchange.service.remove(self._number)
        self.is_free = True
        del self._store

    def _ranks(self) -> list[int]:
        return [rank for rank, (begin, end) in enumerate(self.bounds) if begin < end]

    def _on_all(self, ask: Callable[[int], Pending], here: OnShard) -> dict[int, Any]:
        """Ask for the shards of other nodes, work on those of this one, its own first; then wait for the answers."""
        first = self._channel.rank
        ranks = sorted(self._ranks(), key=lambda rank: (rank - first) % self._channel.size)
        pending = {rank: ask(rank) for rank in ranks if rank not in self._store}
        results, errors = {}, []
        for rank in ranks:
            try:
                if rank in pending:
                    continue
                with self._store.held(rank) as shard:
                    results[rank] = here(shard, rank)
            except Exception as error:
                errors.append(error)
        for rank, request in pending.items():
            try:
                results[rank] = request.finish()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return results

    def _ask(self, request: Request, payload: Tensor | None = None, values: Tensor | None = None) -> Pending:
        assert self._exchange is not None, "all shards are here on one node"
        return Pending(self._exchange.links, self._exchange.service_of[request.shard], request, payload, values)
