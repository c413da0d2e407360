"""The last comparison of what ranks of different nodes have called: in ``mpi.stop()``, and through MPI.

The watch between nodes compares once a second (``cross_check.py``). A job that ends within that second would end in
order, with wrong values. So ranks that have all come to their end compare once more, what the boards still have: the
last 1024 operations of the nodes' delegates. They also compare the number of operations of each communicator that is
not freed, on all ranks: where an operation needs no other rank, as a broadcast of the root, one that was called once
more than on other ranks has harmed nobody yet, or has been taken for another call. Communicators that were freed, or on
which a call has failed before, are left out: experiments that failed, say, have called different numbers.
"""

from __future__ import annotations

from torchmpi_py.core import communicators, sequences, status_board
from torchmpi_py.core.channels import Channel
from torchmpi_py.core.status_board import NUM_GENERATIONS, SEQUENCE_NUMBER_BITS, Board
from torchmpi_py.errors import RanksDisagree
from torchmpi_py.watch import node_links, reports
from torchmpi_py.watch.cross_check import Comparison, Mismatch, Position, Row, Rows

_Places = dict[tuple[int, str], int]  # of the last operation of each communicator (generation, ranks)
_Calls = tuple[list[Row], list[int], _Places]  # rows and ranks in stop, of a node's leader; the rank's own last places


def run(channel: Channel) -> None:
    """Compare the last calls on all nodes. Collective over all ranks, which have made them.

    RanksDisagree, on all ranks, where ranks of different nodes have called different operations.
    """
    nodes, board = node_links.current, status_board.current
    if nodes is None or board is None:
        return
    leads = channel.rank == nodes.mine
    rows, stopping = Rows(board).read() if leads else ([], [])  # from the first record that the board has
    calls: list[_Calls] | None = channel.mpi.gather((rows, stopping, _last_places(board)))
    position = channel.mpi.bcast(_first_difference(calls or []))
    if position is None:
        return
    views = channel.mpi.gather(reports.views(board, position) if leads else []) or []
    sides = reports.sides_of_nodes([view for each in views for view in each])
    sides = channel.mpi.bcast(sides) or "their records were overwritten meanwhile"
    raise RanksDisagree(f"{position} is not the same on all ranks: {sides}")


def _last_places(board: Board) -> _Places:
    """Where this rank's operations on communicators that are sound end."""
    stack = communicators.stack()
    parts = [part for each in (*stack.levels, *stack.others) for part in (each, each.outer) if part is not None]
    sound = [sequence for part in parts if not (part.is_free or part.is_broken) for sequence in part.sequences]
    return sequences.last_places(board, [sequence.index for sequence in sound if sequence.slot is not None])


def _first_difference(calls: list[_Calls]) -> Position | None:
    """The first operation that is not the same on two nodes, or is missing on a rank; None if there is none."""
    comparison, ends = Comparison(), dict[tuple[int, str], set[int]]()
    for rank, (rows, stopping, places) in enumerate(calls):
        trouble = comparison.add(rank, rows, stopping)
        if isinstance(trouble, Mismatch):
            return trouble.position
        for which, place in places.items():
            ends.setdefault(which, set()).add(place)
    for (generation, ranks), found in ends.items():
        if len(found) > 1:
            before_first = (generation & NUM_GENERATIONS - 1) << SEQUENCE_NUMBER_BITS  # a rank without a call has 0
            return Position(generation, ranks, max(min(found), before_first) + 1)
    return None
