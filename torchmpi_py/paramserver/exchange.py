"""The rank's side of what is said with services of other nodes (``messages.py``); runs in the client's thread.

While answers are on their way the rank works on the shards of its own node; then it looks for them, in short naps, so
that a rank that waits for another node leaves most of a processor to the others.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from torchmpi_py.channels import Channel
from torchmpi_py.paramserver.messages import (
    HEADER_TAG,
    Kind,
    Links,
    Request,
    answer_tag,
    bytes_tag,
    pieces,
    unpacked,
)
from torchmpi_py.paramserver.service import Service
from torchmpi_py.waiting import Nap, complete

_LONGEST_NAP_SECONDS = 0.0001


class Exchange:
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


class Pending:
    """A request on its way, whose bytes come from ``memory`` or go there. ``finish`` it, whatever else goes wrong."""

    def __init__(self, links: Links, service: int, request: Request, memory: Tensor | None) -> None:
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
        nap = Nap(_LONGEST_NAP_SECONDS)
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
