"""Compare the calls of ranks on different nodes for the last time, in ``mpi.stop()``, over MPI.

Hang detection compares the nodes once a second (``cross_check.py``). A job that ends within that second could exit
with code 0 although its values are wrong. So all ranks compare once more in ``mpi.stop()``, with the records that are
still on the boards: the last 1024 operations of each delegate (the rank that represents its node in a communicator).

The ranks also compare how many operations each of them has called on each communicator that is not freed. Some
operations need no other rank, for example a broadcast at its root. If one rank makes one such call too many, the job
may still complete: no rank waits for the extra call, or a later call of another rank matches it. Then only the count
shows the difference.

The count skips communicators that were freed, and communicators on which a call has failed: after a failed experiment,
for example, the ranks have legitimately made different numbers of calls.
"""

from __future__ import annotations

from torchmpi_py.core import communicators, sequences, status_board
from torchmpi_py.core.channels import Channel
from torchmpi_py.core.status_board import NUM_GENERATIONS, SEQUENCE_NUMBER_BITS, Board
from torchmpi_py.errors import RanksDisagree
from torchmpi_py.watch import node_links, reports
from torchmpi_py.watch.cross_check import Comparison, Mismatch, Position, Row, Rows

_Places = dict[tuple[int, str], int]  # (generation, ranks) of a communicator -> place of its last operation
_Calls = tuple[list[Row], list[int], _Places]  # rows and ranks in stop() from a node's leader; the rank's own places


def run(channel: Channel) -> None:
    """Compare the last calls of all nodes. All ranks must call this function, after their last operation.

    ``channel`` connects all ranks. Raise RanksDisagree on all ranks if nodes have called different operations, or if
    ranks have made different numbers of calls on a communicator.
    """
    nodes, board = node_links.current, status_board.current
    if nodes is None or board is None:
        return
    leads = channel.rank == nodes.mine
    rows, stopping = Rows(board).read() if leads else ([], [])  # A new reader reads all records.
    calls: list[_Calls] | None = channel.mpi.gather((rows, stopping, _last_places(board)))
    position = channel.mpi.bcast(_first_difference(calls or []))
    if position is None:
        return
    views = channel.mpi.gather(reports.views(board, position) if leads else []) or []
    sides = reports.sides_of_nodes([view for each in views for view in each])
    sides = channel.mpi.bcast(sides) or "the calls are unknown, because their records have been overwritten"
    raise RanksDisagree(f"{position} is not the same on all ranks: {sides}")


def _last_places(board: Board) -> _Places:
    """Return the place of this rank's last operation on each communicator that is neither freed nor broken."""
    stack = communicators.stack()
    parts = [part for each in (*stack.levels, *stack.others) for part in (each, each.outer) if part is not None]
    sound = [sequence for part in parts if not (part.is_free or part.is_broken) for sequence in part.sequences]
    return sequences.last_places(board, [sequence.index for sequence in sound if sequence.slot is not None])


def _first_difference(calls: list[_Calls]) -> Position | None:
    """Return the first operation that differs between two nodes or is missing on a rank, or None if all calls agree."""
    comparison, ends = Comparison(), dict[tuple[int, str], set[int]]()
    for rank, (rows, stopping, places) in enumerate(calls):
        trouble = comparison.add(rank, rows, stopping)
        if isinstance(trouble, Mismatch):
            return trouble.position
        for which, place in places.items():
            ends.setdefault(which, set()).add(place)
    for (generation, ranks), found in ends.items():
        if len(found) > 1:
            # A place of 0 means that the rank has made no call, so the missing operation is the first one.
            before_first = (generation & NUM_GENERATIONS - 1) << SEQUENCE_NUMBER_BITS
            return Position(generation, ranks, max(min(found), before_first) + 1)
    return None
