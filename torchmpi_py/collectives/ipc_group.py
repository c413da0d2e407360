"""The ranks of a channel that can map each other's GPU memory, and how they let each other at their tensors.

In an *exchange* every rank shows the others a tensor of equal size and form: ``rows`` rows, of which all or some
*columns* at a time. It is the caller's own where that is symmetric on all ranks (its *home*), and then all columns are
shown at once. Else it is a piece of the channel's *scratch* memory, as large as the largest tensor so far, up to
``Tuning.gpu_scratch_bytes``; a larger tensor takes several pieces. The steps, for a piece:

1. ``fill``: put this rank's columns there, on the current stream; record the event READY
2. the ranks meet (the first time they also find out whether they show homes or scratch); follow all READY events
3. ``work`` on the tensors of all ranks; record the event DONE
4. the ranks meet; follow all DONE events; ``drain``: fetch what the others left here

Exchanges may run on one stream now and on another then: each first follows the one before it. So the host takes two
meetings a piece, whatever the number of ranks, and waits for no GPU. Where a rank cannot show
anything before the first meeting, because scratch must be made or grown, or where kinds differ, it takes a third.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torchmpi_py import config, devices, symmetric
from torchmpi_py.channels import Channel
from torchmpi_py.collectives.node_group import NodeGroup
from torchmpi_py.collectives.schedule import chunks
from torchmpi_py.cuda_ipc import DONE, READY, peer_events
from torchmpi_py.errors import Unavailable

_LEAST_BYTES = 1 << 20


def _nothing(shown: Tensor, begin: int, end: int) -> None:
    """There is nothing to put there, or to fetch."""


@dataclasses.dataclass
class Exchange:
    """What a verb wants done. The callbacks get tensors of shape (rows, end - begin): columns ``begin`` to ``end``."""

    what: str
    x: Tensor
    count: int  # elements, equal on all ranks if they do the same
    rows: int
    columns: int
    work: Callable[[Sequence[Tensor], int, int], None]
    home: Tensor | None = None
    fill: Callable[[Tensor, int, int], None] = _nothing
    drain: Callable[[Tensor, int, int], None] = _nothing


class IpcGroup:
    """A channel whose ranks can map each other's memory on ``device``; kept with the channel."""

    def __init__(self, channel: Channel, device: torch.device) -> None:
        self.node = channel.keep(NodeGroup, NodeGroup)
        self.rank, self.size = channel.rank, channel.size
        self._channel, self._device = channel, device
        self._events = peer_events(channel, device)
        self._scratch: Tensor | None = None
        self._most_bytes = sys.maxsize  # of scratch that there is memory for

    def run(self, exchange: Exchange) -> None:
        """Carry out an exchange, on the current stream. Collective."""
        self._events.enter()
        try:
            self._carry_out(exchange)
        finally:
            self._events.leave()

    def _carry_out(self, exchange: Exchange) -> None:
        shown = self._shown_first(exchange)
        if shown is not None:
            exchange.fill(shown, 0, shown.shape[1])
        self._events.record(READY)
        place = exchange.x[:0] if shown is None else shown.reshape(-1)  # what is empty lies nowhere
        met = self.node.meet(exchange.what, place, count=exchange.count)
        if not exchange.count:
            self.node.barrier()  # all have read what was told
            return
        if met.read is None:
            shown = None
            self._make_room(_bytes(exchange))
        elif shown is not None and shown.shape[1] == exchange.columns:
            self._finish(exchange, shown, met.read, 0, exchange.columns)
            return
        for begin, end in chunks(0, exchange.columns, self._step(exchange)):
            if begin or shown is None:
                shown = self._piece(exchange, end - begin)
                exchange.fill(shown, begin, end)
                self._events.record(READY)
                self.node.barrier()
            self._finish(exchange, shown, [0] * self.size, begin, end)

    def _shown_first(self, exchange: Exchange) -> Tensor | None:
        """The home; else the first piece of scratch, unless there is not enough."""
        if exchange.home is not None:
            found = symmetric.find(exchange.home)
            if found is not None and self.node.is_within(found[0]):
                return exchange.home.view(exchange.rows, exchange.columns)
        if self._scratch is None or not exchange.count or self._scratch.numel() < self._wanted_bytes(_bytes(exchange)):
            return None
        return self._piece(exchange, min(exchange.columns, self._step(exchange)))

    def _finish(self, exchange: Exchange, shown: Tensor, offsets: Sequence[int], begin: int, end: int) -> None:
        """What follows the meeting at which all had filled what they show."""
        views = [view.view(shown.shape) for view in self.node.views(shown.view(-1), offsets)]
        self._events.follow(READY)
        exchange.work(views, begin, end)
        self._events.record(DONE)
        self.node.barrier()
        self._events.follow(DONE)
        exchange.drain(shown, begin, end)

    def _step(self, exchange: Exchange) -> int:
        """Columns in a piece of scratch."""
        assert self._scratch is not None, "scratch was made before it is cut up"
        return max(1, self._scratch.numel() // (exchange.rows * exchange.x.itemsize))

    def _piece(self, exchange: Exchange, columns: int) -> Tensor:
        assert self._scratch is not None, "scratch was made before it is cut up"
        num_bytes = exchange.rows * columns * exchange.x.itemsize
        return self._scratch[:num_bytes].view(exchange.x.dtype).view(exchange.rows, columns)

    def _make_room(self, num_bytes: int) -> None:
        """Let the scratch be as large as it should be, or as there is memory for. Collective; equal on all ranks."""
        wanted = self._wanted_bytes(num_bytes)
        while self._scratch is None or self._scratch.numel() < wanted:
            former, self._scratch = self._scratch, None
            del former  # first, so that there is room for the new one
            try:
                self._scratch = symmetric.memory(self._channel, wanted, self._device)
            except Unavailable:
                wanted //= 2
                if wanted < _LEAST_BYTES:
                    raise
                self._most_bytes = wanted

    def _wanted_bytes(self, num_bytes: int) -> int:
        """The size of scratch for tensors of so many bytes: powers of two, so that it grows seldom."""
        limit = max(_LEAST_BYTES, config.current.gpu_scratch_bytes)
        return min(limit, self._most_bytes, max(_LEAST_BYTES, 1 << (num_bytes - 1).bit_length()))

    def free(self) -> None:
        """Let go of scratch memory and events, when no GPU waits for an event any more."""
        devices.of(self._device).synchronize()
        self._channel.mpi.Barrier()
        self._scratch = None
        del self._events


def _bytes(exchange: Exchange) -> int:
    return exchange.rows * exchange.columns * exchange.x.itemsize
