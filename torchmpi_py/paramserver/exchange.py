"""The rank's side of what is said with services of other nodes (``messages.py``); runs in the client's thread.

While answers are on their way the rank works on the shards of its own node; then it looks for them, in naps, so that a
rank that waits for another node leaves the processor to the others.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from torchmpi_py.channels import Channel
from torchmpi_py.paramserver.messages import HEADER_TAG, Answer, Links, Request, answer_tag, as_bytes, payload_tag
from torchmpi_py.paramserver.service import Service
from torchmpi_py.waiting import Nap

_LONGEST_NAP_SECONDS = 0.001


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
        self._num_servers = 0

    def number(self) -> int:
        """A number for a new server, the same on all ranks, for every rank takes part in every server of a channel."""
        self._num_servers += 1
        return self._num_servers

    def free(self) -> None:
        """Collective."""
        self.links.free()


class Pending:
    """A request on its way. ``values``, if given, is where the values that it asks for shall go."""

    def __init__(
        self, links: Links, service: int, request: Request, payload: Tensor | None, values: Tensor | None
    ) -> None:
        self._links, self._service, self._shard = links, service, request.shard
        self._values = (
            None if values is None else links.answers.Irecv(as_bytes(values), service, payload_tag(request.shard))
        )
        self._sent = [links.requests.isend(request, service, HEADER_TAG)]
        if payload is not None:
            self._sent.append(links.requests.Isend(as_bytes(payload), service, payload_tag(request.shard)))
        self._alive = payload, values

    def finish(self) -> Any:
        """Wait for the answer: what it tells of the state, or the exception that was raised there."""
        nap = Nap(_LONGEST_NAP_SECONDS)
        while (message := self._links.answers.improbe(self._service, answer_tag(self._shard))) is None:
            nap.take()
        answer: Answer = message.recv()
        if answer.error is None:
            for request in [*self._sent, *filter(None, [self._values])]:
                _complete(request, nap)
            return answer.state
        for request in self._sent:
            _complete(request, nap)
        if self._values is not None:
            self._values.Cancel()
            self._values.Wait()
        raise answer.error


def _complete(request: Any, nap: Nap) -> None:
    while not request.Test():
        nap.take()
