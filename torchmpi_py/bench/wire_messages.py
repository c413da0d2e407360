"""Plain messages of MPI that carry what the requests of a parameter server's clients carry between nodes.

Each client exchanges a message with the first rank of every other node: the elements whose shards lie there one way, a
byte the other way. Of a few bytes the time is that of a round trip.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from torchmpi_py.bench.results import quantile
from torchmpi_py.collectives.timing import interleaved
from torchmpi_py.core import communicators
from torchmpi_py.core.mpi_api import MPI

_TO, _BACK = 1, 2  # tags
_MIN_TURNS, _MAX_TURNS = 5, 200


def median_seconds(
    comm: MPI.Comm,
    bounds: Sequence[tuple[int, int]],
    num_clients: int,
    has_payload: bool,
    is_receive: bool,
    seconds: float,
) -> float | None:
    """The time of the messages of the first ``num_clients`` ranks at once; None on one node.

    ``bounds``: the elements (float32) of each rank's shard. They go to their node if the request ``has_payload``, and
    come from there if it ``is_receive``. Collective over ``comm``, which holds all ranks.
    """
    places = communicators.communicator(0).direct.places
    nodes = sorted({place.node for place in places})  # a node is called after its first rank
    if len(nodes) == 1:
        return None
    sizes = dict.fromkeys(nodes, 0)
    for (begin, end), place in zip(bounds, places, strict=True):
        sizes[place.node] += (end - begin) * torch.float32.itemsize
    pairs = [
        (client, node) for client in range(num_clients) for node in nodes if node != places[client].node and sizes[node]
    ]
    messages = [
        _Message(comm, client, node, sizes[node] * has_payload or 1, sizes[node] * is_receive or 1)
        for client, node in pairs
        if comm.rank in (client, node)
    ]

    def exchange() -> None:
        for message in messages:
            message.begin()
        for message in sorted(messages, key=lambda message: message.is_mine):  # answers first: all go at once
            message.finish()

    times = interleaved(comm, {"wire": exchange}, seconds=seconds / 4, min_turns=_MIN_TURNS, max_turns=_MAX_TURNS)
    return quantile(times["wire"], 0.5)


class _Message:
    """A message from a client to a node, and the answer, as one of the two sees them."""

    def __init__(self, comm: MPI.Comm, client: int, node: int, num_bytes_to: int, num_bytes_back: int) -> None:
        self._comm, self._client, self._node = comm, client, node
        self.is_mine = comm.rank == client
        self._to, self._back = np.zeros(num_bytes_to, np.uint8), np.zeros(num_bytes_back, np.uint8)
        self._requests: list[MPI.Request] = []

    def begin(self) -> None:
        """Send as the client, or be ready to receive as the node."""
        if self.is_mine:
            back = self._comm.Irecv(self._back, self._node, _BACK)
            self._requests = [back, self._comm.Isend(self._to, self._node, _TO)]
        else:
            self._requests = [self._comm.Irecv(self._to, self._client, _TO)]

    def finish(self) -> None:
        """Wait for the answer, or give it."""
        MPI.Request.Waitall(self._requests)
        if not self.is_mine:
            self._comm.Isend(self._back, self._client, _BACK).Wait()
