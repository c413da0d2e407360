"""The last comparison of what ranks of different nodes have called: in ``mpi.stop()``, and through MPI.

The watch between nodes compares once a second (``cross_check.py``). A job that ends within that second would end in
order, with wrong values. So ranks that have all come to their end compare once more, what the boards still have: the
last 1024 operations of each rank, and the number of operations of each communicator, which other ranks of the node
cannot tell where an operation needs no others, as a broadcast of the root does.
"""

from __future__ import annotations

from torchmpi_py.core import status_board
from torchmpi_py.core.channels import Channel
from torchmpi_py.errors import RanksDisagree
from torchmpi_py.watch import cross_check, node_links, reports
from torchmpi_py.watch.cross_check import Comparison, Mismatch, Position, Row

_Calls = tuple[list[Row], list[int], list[Position]]  # of a node: its rows, its ranks in stop, its delegates' ends


def run(channel: Channel) -> None:
    """Compare the last calls on all nodes. Collective over all ranks, which have made them.

    RanksDisagree, on all ranks, where ranks of different nodes have called different operations.
    """
    nodes, board = node_links.current, status_board.current
    if nodes is None or board is None:
        return
    leads = channel.rank == nodes.mine
    rows = cross_check.Rows(board)  # from the first record that the board has
    calls: list[_Calls | None] | None = channel.mpi.gather((*rows.read(), rows.ends()) if leads else None)
    position = channel.mpi.bcast(_first_difference([each for each in calls or [] if each is not None]))
    if position is None:
        return
    views = channel.mpi.gather(reports.views(board, position) if leads else []) or []
    sides = reports.sides_of_nodes([view for each in views for view in each])
    sides = channel.mpi.bcast(sides) or "their records were overwritten meanwhile"
    raise RanksDisagree(f"{position} is not the same on all ranks: {sides}")


def _first_difference(calls: list[_Calls]) -> Position | None:
    """The first operation that is not the same on two nodes, or is missing on one; None if there is none."""
    comparison, ends = Comparison(), dict[tuple[int, str], set[int]]()
    for node, (rows, stopping, last) in enumerate(calls):
        trouble = comparison.add(node, rows, stopping)
        if isinstance(trouble, Mismatch):
            return trouble.position
        for generation, ranks, place in last:
            ends.setdefault((generation, ranks), set()).add(place)
    return next((Position(*which, min(places) + 1) for which, places in ends.items() if len(places) > 1), None)
