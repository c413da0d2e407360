"""The wire between nodes as a limit: the fewest bytes that a collective can send over it, and their time.

The *link* of a node carries ``bytes_per_second`` in each direction, which the user gives. The *floor* of a call is the
time that the busiest link needs for the fewest bytes.
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
        raise ValueError(f"{text!r}: give the rate of a link in one direction, such as 200mbit (iperf3 measures it)")
    return float(match[1]) * _UNITS[match[2]] / 8


def floor_bytes(verb: str, num_bytes: int, ranks_per_node: Sequence[int]) -> float:
    """Return the least number of bytes that the busiest link carries in one direction. The root is on the first node.

    S is ``num_bytes``, the size of the larger tensor of a rank; M nodes have r_0, r_1, ... of all P ranks, in equal
    numbers r = P/M. A node can add its ranks' values, or spread what it has received, without its link.

    allreduce           2 S (M-1)/M. Before an element's total is known anywhere, the values of M - 1 nodes have left
                        them; then the total enters M - 1 nodes: 2 S (M-1) bytes in all, on M links
    broadcast, reduce   S: all of it enters each other node; the values of each other node leave it
    reduce_scatter      S (M-1)/M, or S (1 - min r_i/P): a node sends its values of all slices that are not its own
    allgather           the same, received
    alltoall            r S (M-1)/M, or the largest r_i S (P - r_i)/P: every rank sends S/P to each rank elsewhere
    gather, scatter     S (M-1)/M, or S (1 - r_0/P): the slices of all ranks elsewhere enter or leave the root's node
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
    """A link, from which the floor (the shortest possible time) of a call follows."""

    bytes_per_second: float
    ranks_per_node: list[int]

    def floor_seconds(self, verb: str, num_bytes: int) -> float:
        """Return the seconds that the busiest link takes for the bytes that it has to carry."""
        return floor_bytes(verb, num_bytes, self.ranks_per_node) / self.bytes_per_second


def open_link(bytes_per_second: float) -> Wire:
    """Return the link of a job on several nodes.

    Raise UsageError on every rank if all ranks are on one node.
    """
    sizes = [len(ranks) for ranks in _nodes()]
    if len(sizes) == 1:
        raise UsageError(f"--link: all {sizes[0]} ranks are on one node, and send nothing over a link; omit --link")
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
