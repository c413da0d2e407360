"""Plain messages of MPI that carry what the requests of a parameter server's clients carry between nodes.

Each client exchanges a message with the first rank of every other node: the elements whose shards lie there one way, a
byte the other way. Of a few bytes the time is that of a round trip.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from torchmpi_py.bench.results import quantile
from torchmpi_py.collectives.timing import interleaved
from torchmpi_py.core import communicators
from torchmpi_py.core.channels import Place
from torchmpi_py.core.mpi_api import MPI

_TO, _BACK = 1, 2  # tags
_MIN_TURNS, _MAX_TURNS = 5, 200

_Message = tuple[int, np.ndarray[Any, Any], np.ndarray[Any, Any]]  # the other rank, the message, the answer


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
    if len({place.node for place in places}) == 1:
        return None
    mine: list[_Message] = []  # of this rank as a client
    others: list[_Message] = []  # to this rank, the first one of its node
    for client, node, num_bytes_to, num_bytes_back in _planned(places, bounds, num_clients, has_payload, is_receive):
        if comm.rank in (client, node):
            to, back = np.zeros(num_bytes_to, np.uint8), np.zeros(num_bytes_back, np.uint8)
            if comm.rank == client:
                mine.append((node, to, back))
            else:
                others.append((client, to, back))

    def exchange() -> None:
        answers = [comm.Irecv(back, node, _BACK) for node, _, back in mine]
        sends = [comm.Isend(to, node, _TO) for node, to, _ in mine]
        requests = [comm.Irecv(to, client, _TO) for client, to, _ in others]
        # A rank answers before it waits for its own answers: all messages go at once.
        for request, (client, _, back) in zip(requests, others, strict=True):
            request.Wait()
            comm.Isend(back, client, _BACK).Wait()
        MPI.Request.Waitall([*answers, *sends])

    times = interleaved(comm, {"wire": exchange}, seconds=seconds / 4, min_turns=_MIN_TURNS, max_turns=_MAX_TURNS)
    return quantile(times["wire"], 0.5)


def _planned(
    places: Sequence[Place], bounds: Sequence[tuple[int, int]], num_clients: int, has_payload: bool, is_receive: bool
) -> list[tuple[int, int, int, int]]:
    """Of each message the client, the node, called after its first rank, and the bytes there and back."""
    sizes: dict[int, int] = dict.fromkeys(sorted({place.node for place in places}), 0)
    for (begin, end), place in zip(bounds, places, strict=True):
        sizes[place.node] += (end - begin) * torch.float32.itemsize
    return [
        (client, node, num_bytes * has_payload or 1, num_bytes * is_receive or 1)
        for client in range(num_clients)
        for node, num_bytes in sizes.items()
        if num_bytes and node != places[client].node
    ]
