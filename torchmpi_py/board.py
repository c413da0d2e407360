"""The board: what each rank of a node is doing and has done, in memory that all of them can read at any time.

Every rank has a part that it alone writes (``board_layout.py``). Others read it also when the writer is stopped, or
dead. A mark is one word of 64 bits, written at once: which use of the row it is of, the position of an operation in its
sequence, and a checksum of what has to be the same on every rank. So ranks compare what they call without a message.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import mmap
import os
import time
from collections.abc import Callable, Sequence
from types import CodeType
from typing import TYPE_CHECKING, Any

import numpy as np

from torchmpi_py import fences, processes, shared_files
from torchmpi_py.board_layout import (
    CHECKSUM_BITS,
    ENDED,
    EPOCH,
    GROUP_BYTES,
    GROUPS_BEGIN,
    HAS_FAILED,
    HEADER_WORDS,
    IS_LAUNCH,
    MARKS_PER_ROW,
    NAMESPACE,
    NUM_RECORDS,
    NUM_ROWS,
    NUM_STRINGS,
    PART_BYTES,
    POSITION_BITS,
    PROCESS,
    RECORD,
    RECORD_BYTES,
    RECORDS_BEGIN,
    STARTED,
    STRING_BITS,
    STRING_BYTES,
    STRINGS_BEGIN,
    TEXT_BEGIN,
    TEXT_BYTES,
    TEXT_LENGTH,
    USES_BEGIN,
    WORLD_RANK,
    Group,
    Record,
    Row,
    group_in_bytes,
)
from torchmpi_py.channels import Place
from torchmpi_py.errors import Unavailable

if TYPE_CHECKING:
    from mpi4py import MPI

logger = logging.getLogger("torchmpi_py")


class Board:
    """The board of this rank's node. Made collectively over the ranks of the node.

    Where they can share no memory each has one of its own, and sees itself alone.
    """

    def __init__(self, node: MPI.Comm, places: Sequence[Place], world_rank: int) -> None:
        indices = [place.local for place in places]
        self.index = places[node.rank].local
        size = PART_BYTES * node.size

        def take(path: str, identity: shared_files.Identity) -> tuple[mmap.mmap | None, str]:
            return shared_files.map_file(path, size, identity)

        try:
            self.mapping, _ = shared_files.share(node, 0, size, take)
        except Unavailable as error:
            if node.rank == 0 and node.size > 1:
                logger.warning(
                    "the ranks of this node share no memory (%s): what they call is not compared, a death is not "
                    "noticed, and reports name no other rank",
                    error,
                )
            self.mapping, indices = mmap.mmap(-1, PART_BYTES), [self.index]
        self._begins = {index: part * PART_BYTES for part, index in enumerate(indices)}
        self._begin = self._begins[self.index]
        self.waste = self._begin // 8 + HEADER_WORDS - 1
        """A word for what has no place any more."""
        self.words = memoryview(self.mapping).cast("Q")
        self._free_rows = list(range(NUM_ROWS - 1, -1, -1))
        self._num_uses = 0
        self._strings: dict[str, int] = {}
        self.rows_of: dict[int, dict[int, int]] = {}  # own row -> the rows of the same sequence, by local rank
        self.first_record = (self._begin + RECORDS_BEGIN) // 8
        first, length = self.first_record, RECORD_BYTES // 8
        self.columns = self._columns()
        begins = [first + number % NUM_RECORDS * length for number in range(1, NUM_RECORDS + 1)]
        records = itertools.cycle([(begin * 8, begin, begin + ENDED) for begin in begins])
        self.next_record: Callable[[], tuple[int, tuple[int, int, int]]] = zip(
            itertools.count(1), records, strict=False
        ).__next__
        """The number of the next record, and where it is: in bytes, in words, and the word for its end."""
        self.texts: dict[tuple[Any, ...], tuple[int, int]] = {}  # watch.py's: numbers of strings, and checksums
        self.sites: dict[tuple[int, int], tuple[int, CodeType]] = {}
        self.calls: dict[int, tuple[CodeType, Any, object, int, int]] = {}
        self._introduce(world_rank)
        fences.around(node.Barrier)()

    def _columns(self) -> Any:
        """This rank's records as an array: a row for each of their words."""
        length = NUM_RECORDS * RECORD_BYTES // 8
        words = self.words[self.first_record : self.first_record + length]
        return np.frombuffer(words, dtype=np.uint64).reshape(NUM_RECORDS, -1).T

    def _introduce(self, world_rank: int) -> None:
        """Tell who this is."""
        self.put(WORLD_RANK, world_rank)
        self.put(PROCESS, os.getpid())
        with contextlib.suppress(OSError):
            self.put(NAMESPACE, os.stat("/proc/self/ns/pid").st_ino)
        self.put(EPOCH, time.time_ns() - time.monotonic_ns())
        self.put(STARTED, (processes.look(os.getpid()) or processes.UNKNOWN).started)

    @property
    def indices(self) -> list[int]:
        """The local ranks that can be seen."""
        return list(self._begins)

    def put(self, word: int, value: int, index: int | None = None) -> None:
        """Write a word of the header, of this rank or, to ask it for something, of another."""
        self.words[self._begins[self.index if index is None else index] // 8 + word] = value

    def get(self, word: int, index: int | None = None) -> int:
        """A word of a rank's header."""
        return self.words[self._begins[self.index if index is None else index] // 8 + word]

    def take_row(self) -> Row | None:
        """A row of this rank; None if all are taken."""
        if not self._free_rows:
            return None
        self._num_uses += 1
        place = self._free_rows.pop()
        begin = self.first_mark(self.index, place) * 8
        self.mapping[begin : begin + MARKS_PER_ROW * 8] = bytes(MARKS_PER_ROW * 8)
        return Row(place, self._num_uses)

    def settle_row(self, row: Row, use: int, key: str, ranks: str) -> None:
        """The ranks have agreed on a use, and this is their communicator."""
        self._num_uses = max(self._num_uses, use)
        self.words[self._begin // 8 + USES_BEGIN + row.place] = use
        begin = self._begin + GROUPS_BEGIN + row.place * GROUP_BYTES
        self.mapping[begin : begin + GROUP_BYTES] = group_in_bytes(key, ranks)

    def group(self, index: int, row: int) -> Group:
        """The communicator that has, or had last, this row of a rank."""
        begin = self._begins[index] + GROUPS_BEGIN + row * GROUP_BYTES
        key, _, ranks = self._text(begin, GROUP_BYTES).rpartition("|")
        return Group(self.words[self._begins[index] // 8 + USES_BEGIN + row], key, ranks)

    def give_row_back(self, row: Row) -> None:
        """It may be used for another communicator."""
        self._free_rows.append(row.place)

    def first_mark(self, index: int, row: int) -> int:
        """Where the marks of a row begin in ``words``."""
        return self._begins[index] // 8 + HEADER_WORDS + row * MARKS_PER_ROW

    def keep_string(self, text: str) -> int:
        """A number by which records of this rank refer to the end of a text; 0 when there is no room for more."""
        number = self._strings.get(text)
        if number is None:
            if len(self._strings) + 1 >= NUM_STRINGS:
                return 0
            self._strings[text] = number = len(self._strings) + 1
            data = text.encode(errors="backslashreplace")[-STRING_BYTES:].ljust(STRING_BYTES, b"\0")
            begin = self._begin + STRINGS_BEGIN + number * STRING_BYTES
            self.mapping[begin : begin + STRING_BYTES] = data
        return number

    def records(self, index: int) -> list[Record]:
        """What a rank has done, the latest first."""
        begin = self._begins[index] + RECORDS_BEGIN
        data = self.mapping[begin : begin + NUM_RECORDS * RECORD_BYTES]
        return [self._record(index, *found) for found in sorted(RECORD.iter_unpack(data), reverse=True) if found[0]]

    def record(self, number: int) -> Record | None:
        """One of this rank's, while it is there."""
        begin = (self.first_record + number % NUM_RECORDS * (RECORD_BYTES // 8)) * 8
        found = RECORD.unpack_from(self.mapping, begin)
        return self._record(self.index, *found) if found[0] == number else None

    def _record(
        self, index: int, number: int, mark: int, launched: int, num_bytes: int, names: int, begun: int, ended: int
    ) -> Record:
        row, position = (names >> 2 * STRING_BITS & 0xFFFF) - 1, mark >> CHECKSUM_BITS & (1 << POSITION_BITS) - 1
        is_launch, epoch = bool(names & IS_LAUNCH), self.get(EPOCH, index)
        begun = launched if not is_launch else begun if begun >= launched else 0
        ended = (ended + epoch) * (-1 if names & HAS_FAILED else 1) if ended >= launched else 0
        begun = begun and begun + epoch
        site, words = (self._string(index, names >> shift & 0xFFFF) for shift in (0, STRING_BITS))
        return Record(number, mark, row, position, launched + epoch, begun, ended, num_bytes, words, site, is_launch)

    def _string(self, index: int, number: int) -> str:
        return self._text(self._begins[index] + STRINGS_BEGIN + number * STRING_BYTES, STRING_BYTES) or "?"

    def _text(self, begin: int, length: int) -> str:
        """The text up to the first NUL: while it is overwritten, more of the former one stands behind that."""
        return self.mapping[begin : begin + length].partition(b"\0")[0].decode(errors="replace")

    def now(self, index: int) -> int:
        """The time, as in a rank's records."""
        return time.monotonic_ns() + self.get(EPOCH, index)

    def counterpart(self, row: int, mark: int, index: int) -> Record | None:
        """What another rank has noted of the operation that has this mark, but for the checksum, in this rank's row."""
        theirs, place = self.rows_of.get(row, {}).get(index), mark >> CHECKSUM_BITS
        return next((r for r in self.records(index) if r.row == theirs and r.mark >> CHECKSUM_BITS == place), None)

    def write_text(self, text: str) -> None:
        """Tell where this rank's threads stand."""
        data = text.encode(errors="backslashreplace")[:TEXT_BYTES]
        begin = self._begin + TEXT_BEGIN
        self.mapping[begin : begin + len(data)] = data
        self.put(TEXT_LENGTH, len(data))

    def read_text(self, index: int) -> str:
        """What a rank has told."""
        begin = self._begins[index] + TEXT_BEGIN
        return self.mapping[begin : begin + self.get(TEXT_LENGTH, index)].decode(errors="replace")


current: Board | None = None
"""The board of this process between ``start`` and ``stop``; read it as ``board.current``."""


def install(board: Board | None) -> None:
    """Make ``board`` the one in use."""
    global current
    if current is not None:
        current.calls.clear()  # they refer to what refers to the board
    current = board
