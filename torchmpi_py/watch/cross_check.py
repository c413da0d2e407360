"""Compare the calls of ranks on different nodes: once a second, from the boards, without slowing the calls.

The idea: the n-th operation of a communicator must have the same fingerprint on every rank. Within a node the ranks
compare every call themselves (``core/sequences.py``), so one rank per node is enough between nodes. In each
communicator that spans several nodes, the lowest rank of a node is the node's *delegate*. Once a second the leader of a
node reads the new fingerprints of its delegates (``Rows``), and one hub compares the fingerprints of all nodes
(``Comparison``).

An alternative is to exchange the fingerprints over MPI before every collective. We do not do so, because every call
would then need one more exchange between nodes. Moreover, calls that need no other rank, such as a broadcast at its
root, would have to wait for other ranks.

A status board contains the last 1024 operations of each rank. Up to about a thousand operations per second, every
operation is therefore compared. At a higher rate, only the last thousand operations of each second are compared. A
mismatch in an operation in which ranks wait is still found, because the records of that operation stay on the boards. A
hub remembers the 4096 most recently used communicators, and forgets the calls on all other communicators.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np

from torchmpi_py.core import status_board
from torchmpi_py.core.sequences import is_cut, ranks_from_text
from torchmpi_py.core.status_board import CHECKSUM_BITS, HAS_LEFT, LAUNCHED, NAMES, STOPPING, WORLD_RANK, Board

_WAITS_NS = 1_000_000_000  # A call that takes longer counts as a wait for other ranks.
# This is more than the 1024 operations of a board. It is a power of two, so that only the sequence number of a place
# determines its index.
_PLACES_KEPT = 2048
_COMMUNICATORS_KEPT = 4096  # A rank has at most 256 communicators at a time.


class Position(NamedTuple):
    """The identity of an operation, equal on all nodes: its communicator's generation and ranks, and its place.

    ``place`` is the operation's fingerprint without the checksum.
    """

    generation: int
    ranks: str
    place: int

    @property
    def sequence_number(self) -> int:
        """The number of the operation in its communicator, counted from 1."""
        return self.place & (1 << status_board.SEQUENCE_NUMBER_BITS) - 1

    def __str__(self) -> str:
        return f"operation {self.sequence_number} of the communicator of ranks {self.ranks}"


class Row(NamedTuple):
    """The calls of a communicator's delegate since the previous row.

    ``waits`` states whether the delegate is waiting for other ranks in the last of these calls.
    """

    generation: int
    ranks: str
    delegate: int  # world rank
    waits: bool
    fingerprints: list[int]  # oldest first; never empty


class Rows:
    """A reader of a node's board. Each call of ``read`` returns the operations that are new on the board, as rows."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._here = {board.get(WORLD_RANK, index) for index in board.indices}
        self._last = dict.fromkeys(board.indices, 0)  # index -> number of the first record to read next
        self._known: dict[tuple[int, int], tuple[int, str, bool]] = {}  # (index, slot) -> result of ``_communicator``

    def read(self) -> tuple[list[Row], list[int]]:
        """Return the rows since the last call of ``read``, and the world ranks that are in ``mpi.stop()``.

        An operation that was under way at the last call of ``read`` is read again.
        """
        board = self._board
        # A rank in stop() makes no more calls, so rows read from here on are complete for it.
        stopping = [board.get(WORLD_RANK, index) for index in board.indices if board.get(HAS_LEFT, index) == STOPPING]
        return [row for index in board.indices for row in self._of_rank(index)], stopping

    def _of_rank(self, index: int) -> list[Row]:
        board, columns = self._board, self._board.columns_of(index)
        # 1. Copy the columns, and compare the copy with the board. If the two differ in a record, its rank is writing
        #    the record, so leave the record to the next reading.
        seen = columns.copy()
        whole = (seen[:5] == columns[:5]).all(axis=0)
        slots = (seen[NAMES] >> 2 * status_board.STRING_BITS & 0xFFFF).astype(np.int64) - 1
        is_new = whole & (slots >= 0) & (seen[0] >= self._last[index]) & (seen[1] >> CHECKSUM_BITS > 0)
        # 2. Make one row per communicator. Fingerprints of an earlier communicator in the same slot have a smaller
        #    generation.
        rows = []
        for slot in np.unique(slots[is_new]).tolist():
            generation, ranks, is_delegate = self._communicator(index, slot)
            least = generation & status_board.NUM_GENERATIONS - 1
            mine = is_new & (slots == slot) & (seen[1] >> status_board.GENERATION_SHIFT >= least)
            if is_delegate and mine.any():
                order = np.argsort(seen[1][mine])
                last = seen[:, mine][:, order[-1]]
                fingerprints = seen[1][mine][order].tolist()
                rows.append(Row(generation, ranks, board.get(WORLD_RANK, index), _waits(last), fingerprints))
        # 3. Begin the next reading at the oldest operation that is under way (else at the newest one), because only a
        #    later reading shows whether the rank waits in that operation.
        if whole.any():
            self._last[index] = self._next_first(seen[:, whole])
        return rows

    def _next_first(self, seen: Any) -> int:
        newest = int(seen[0].max())
        under_way = (
            (seen[status_board.ENDED] < seen[LAUNCHED]) & (seen[NAMES] & status_board.IS_LAUNCH == 0) & (seen[0] > 0)
        )
        return int(min([newest, *seen[0][under_way].tolist()]))

    def _communicator(self, index: int, slot: int) -> tuple[int, str, bool]:
        """Return (generation, ranks, whether the rank is a delegate) for the communicator in a rank's slot."""
        board = self._board
        known, generation = self._known.get((index, slot)), board.generation_of(index, slot)
        if known is None or known[0] != generation:
            ranks = board.group(index, slot).ranks
            self._known[index, slot] = known = generation, ranks, self._is_delegate(index, generation, ranks)
        return known

    def _is_delegate(self, index: int, generation: int, ranks: str) -> bool:
        """Return whether a rank is the lowest one of this node in a communicator that spans several nodes."""
        board, rank = self._board, self._board.get(WORLD_RANK, index)
        if is_cut(ranks):  # The text omits ranks, but every member on this node has a slot on the board.
            lower = [other for other in board.indices if board.get(WORLD_RANK, other) < rank]
            return all(board.find_slot(other, generation, ranks) is None for other in lower)
        members = set(ranks_from_text(ranks))
        return bool(members - self._here) and rank == min(members & self._here, default=-1)


def _waits(last: Any) -> bool:
    is_call = int(last[NAMES]) & status_board.IS_LAUNCH == 0 and last[status_board.ENDED] < last[LAUNCHED]
    return bool(is_call) and time.monotonic_ns() - int(last[LAUNCHED]) > _WAITS_NS


class Mismatch(NamedTuple):
    """An operation that differs between two nodes."""

    position: Position
    nodes: tuple[int, int]


class Desertion(NamedTuple):
    """Two delegates (world ranks): one waits in an operation that the other skipped before it called ``mpi.stop()``."""

    position: Position
    waiting: int
    stopping: int


class _History:
    """The last fingerprints of a communicator by place, and for each fingerprint the first node that sent it."""

    def __init__(self) -> None:
        self.fingerprints = np.zeros(_PLACES_KEPT, np.uint64)
        self.nodes = np.zeros(_PLACES_KEPT, np.int32)
        self.last: dict[int, Row] = {}  # the last row of each node

    def add(self, node: int, row: Row) -> tuple[int, int] | None:
        """Add a row. Return (place, node with the other fingerprint) of the first difference, or None if all agree."""
        self.last[node] = row
        new = np.array(row.fingerprints, np.uint64)
        places, at = new >> CHECKSUM_BITS, (new >> CHECKSUM_BITS).astype(np.int64) % _PLACES_KEPT
        known = self.fingerprints[at]
        differs = (known >> CHECKSUM_BITS == places) & (known != new)
        if differs.any():
            first = int(differs.argmax())
            return int(places[first]), int(self.nodes[at[first]])
        newer = known >> CHECKSUM_BITS < places
        self.fingerprints[at[newer]], self.nodes[at[newer]] = new[newer], node
        return None


class Comparison:
    """The comparison of the rows of all nodes, on a hub."""

    def __init__(self) -> None:
        self._histories: OrderedDict[tuple[int, str], _History] = OrderedDict()
        self._stopping: set[int] = set()

    def add(self, node: int, rows: list[Row], stopping: list[int]) -> Mismatch | Desertion | None:
        """Add the rows of a node. Return the first fault that these rows show, or None.

        ``stopping`` lists the ranks of the node that are in ``mpi.stop()``.
        """
        self._stopping.update(stopping)
        found: Mismatch | Desertion | None = None
        for row in rows:
            history = self._histories.setdefault((row.generation, row.ranks), _History())
            self._histories.move_to_end((row.generation, row.ranks))
            differs = history.add(node, row)
            if differs is not None:
                place, other = differs
                found = found or Mismatch(Position(row.generation, row.ranks, place), (other, node))
            found = found or self._desertion(row, history)
        while len(self._histories) > _COMMUNICATORS_KEPT:
            self._histories.popitem(last=False)
        return found

    def lasts(self, desertion: Desertion) -> bool:
        """Return whether the last rows still show the desertion."""
        position = desertion.position
        history = self._histories.get((position.generation, position.ranks))
        rows = {} if history is None else {row.delegate: row for row in history.last.values()}
        row = rows.get(desertion.waiting)
        if history is None or row is None or row.fingerprints[-1] >> CHECKSUM_BITS != position.place:
            return False
        return self._desertion(row, history) is not None

    def _desertion(self, row: Row, history: _History) -> Desertion | None:
        place = row.fingerprints[-1] >> CHECKSUM_BITS
        # A delegate that is itself in stop() may wait there, because other ranks may have work to complete before they
        # call stop() too.
        waits = row.waits and self._stopping and row.delegate not in self._stopping
        for other in history.last.values() if waits else ():
            if other.delegate in self._stopping and other.fingerprints[-1] >> CHECKSUM_BITS < place:
                return Desertion(Position(row.generation, row.ranks, place), row.delegate, other.delegate)
        return None
