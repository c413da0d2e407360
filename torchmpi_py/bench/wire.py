"""The limit that the network sets: the fewest bytes that a collective can send between nodes, and the time they take.

The *link* of a node carries ``bytes_per_second`` in each direction, a rate that the user specifies. The *floor* of a
call is the time that the busiest link needs for the fewest possible bytes.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Sequence
from typing import NamedTuple

import torchmpi_py as mpi
from torchmpi_py.bench import UsageError
from torchmpi_py.bench.cases import ROOT

_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def parse_link(text: str) -> float:
    """Return the rate of ``--link`` (such as "1gbit" or "200mbit") in bytes per second."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]bit)", text.lower())
    if match is None or float(match[1]) == 0:
        raise ValueError(f"{text!r}: pass the rate of a link in one direction, such as 200mbit (iperf3 can measure it)")
    return float(match[1]) * _UNITS[match[2]] / 8


def floor_bytes(verb: str, num_bytes: int, ranks_per_node: Sequence[int]) -> float:
    """Return the smallest number of bytes that the busiest link must carry in one direction.

    S is ``num_bytes``, the size of a rank's larger tensor. P ranks run on M nodes: r = P/M ranks on each node, or r_0,
    r_1, ... ranks if the nodes are unequal. The root is on the first node. Ranks of a node can add their values, and
    distribute received values, without the link.

    allreduce           2 S (M-1)/M. To compute a total, the values of M - 1 nodes must leave these nodes. Afterwards
                        the total must enter M - 1 nodes. So M links carry 2 S (M-1) bytes together.
    broadcast, reduce   S: the whole tensor enters (broadcast) or leaves (reduce) each node except the root's.
    reduce_scatter      S (M-1)/M, or S (1 - min r_i/P): a node sends its values of the slices of all other nodes.
    allgather           S (M-1)/M, or S (1 - min r_i/P): a node receives the slices of all other nodes.
    alltoall            r S (M-1)/M, or the largest r_i S (P - r_i)/P: a rank sends S/P to each rank of other nodes.
    gather, scatter     S (M-1)/M, or S (1 - r_0/P): the slices of other nodes' ranks enter or leave the root's node.
    """
    num_ranks, num_nodes = sum(ranks_per_node), len(ranks_per_node)
    elsewhere = [1 - ranks / num_ranks for ranks in ranks_per_node]
    if num_nodes == 1:
        return 0.0
    factors = {
        "allreduce": 2 * (num_nodes - 1) / num_nodes,
        "broadcast": 1.0,
        "reduce": 1.0,
        "reduce_scatter": max(elsewhere),
        "allgather": max(elsewhere),
        "alltoall": max(ranks * part for ranks, part in zip(ranks_per_node, elsewhere, strict=True)),
        "gather": elsewhere[0],
        "scatter": elsewhere[0],
    }
    return num_bytes * factors[verb]


class Wire(NamedTuple):
    """The link of each node, which determines the floor (the shortest possible time) of a call."""

    bytes_per_second: float
    ranks_per_node: list[int]

    def floor_seconds(self, verb: str, num_bytes: int) -> float:
        """Return the shortest time in seconds in which the busiest link can carry its bytes of a call."""
        return floor_bytes(verb, num_bytes, self.ranks_per_node) / self.bytes_per_second


def open_link(bytes_per_second: float) -> Wire:
    """Return the link of a job on several nodes.

    Raise UsageError on every rank if all ranks are on one node.
    """
    sizes = [len(ranks) for ranks in _nodes()]
    if len(sizes) == 1:
        raise UsageError("--link: all ranks are on one node, so they do not use a link; omit --link")
    return Wire(bytes_per_second, sizes)


def facts(link: Wire | None) -> dict[str, str]:
    """Return the facts about a link for the header of a report."""
    return {} if link is None else {"link": f"{link.bytes_per_second / 1e6:.4g} MB/s in each direction"}


def _nodes() -> list[list[int]]:
    """Return the ranks of each node, the root's node first."""
    nodes = collections.defaultdict(list)
    for rank, place in enumerate(mpi.communicator().direct.places):
        nodes[place.node].append(rank)
    return sorted(nodes.values(), key=lambda ranks: (ROOT not in ranks, ranks))
