"""The layout of the board (``board.py``): where in a rank's part of it what is, and what can be read there.

header     a few numbers: process, rank in the world, ...
rows       one for each communicator and thread: a *mark* for each of the last operations there
uses       of each row: which use of it this is
records    the last operations of the rank, with times: its flight recorder; their words are among the strings
groups     of each row: the communicator that has it, in words
strings    what was called, and where
text       where the rank's threads stand, written when another rank asks for it

What Linux tells of a process: whether it is there, and whether it runs.

The board: what each rank of a node is doing and has done, in memory that all of them can read at any time.

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
import pathlib
import struct
import time
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any, NamedTuple

import numpy as np

from torchmpi_py.core import fences, shared_files
from torchmpi_py.core.channels import Place
from torchmpi_py.core.mpi_api import MPI
from torchmpi_py.errors import Unavailable

NUM_RECORDS = 1024
NUM_ROWS = 512
MARKS_PER_ROW = 64
NUM_STRINGS = 1024
STRING_BYTES = 128
TEXT_BYTES = 16 << 10
GROUP_BYTES = 256
BLANK, SCRAP = NUM_ROWS, NUM_ROWS + 1
"""Two rows more: one in which there never is a mark, and one for the marks that nobody looks at."""
RECORD = struct.Struct("7Q")
pack = struct.Struct("5Q").pack_into
"""Write a record, without the times to come."""
RECORD_BYTES = RECORD.size
LAUNCHED, NAMES, BEGUN, ENDED = 2, 4, 5, 6
"""Words of a record. The last two are left as they were in the record that had the place before: what is older than
the launch means nothing. An operation that was not launched, but called, has begun then."""
CHECKSUM_BITS = POSITION_BITS = 24
USE_SHIFT, USES = CHECKSUM_BITS + POSITION_BITS, 1 << 15
STRING_BITS = 16
IS_LAUNCH = 1 << 3 * STRING_BITS
HAS_FAILED = IS_LAUNCH << 1
HEADER_WORDS = 64
USES_BEGIN = HEADER_WORDS + (NUM_ROWS + 2) * MARKS_PER_ROW
RECORDS_BEGIN = (USES_BEGIN + NUM_ROWS) * 8
GROUPS_BEGIN = RECORDS_BEGIN + NUM_RECORDS * RECORD_BYTES
STRINGS_BEGIN = GROUPS_BEGIN + NUM_ROWS * GROUP_BYTES
TEXT_BEGIN = STRINGS_BEGIN + NUM_STRINGS * STRING_BYTES
PART_BYTES = -(-(TEXT_BEGIN + TEXT_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE

# Words of the header
PROCESS, WORLD_RANK, TEXT_WANTED, TEXT_LENGTH, TEXT_GIVEN, HAS_LEFT, NAMESPACE, STARTED, EPOCH = range(9)
"""EPOCH: what to add to a time of a record to have it since the epoch. Theirs is a clock that is never set back."""
CLAIMED_LATE, CLAIMED_DEATH, CLAIMED_DIFFERENCE, CLAIMED_ASKED, LATE_NUMBER = range(9, 14)
"""When this rank last claimed a report, by its reason (``claims.py``); and the record that was late."""
STOPPING, STOPPED, ENDING = 1, 2, 3
"""HAS_LEFT: in ``mpi.stop()``, through with it, about to end the job by itself."""


class Record(NamedTuple):
    """An operation of a rank. Times are in ns since the epoch, 0 for what has not been, ``ended`` < 0 for a failure."""

    number: int
    mark: int
    row: int  # that of its communicator; -1 where there was none left
    position: int  # in the row's sequence; 0 for one that has no counterparts to compare with
    launched: int
    begun: int
    ended: int
    num_bytes: int
    words: str
    site: str
    is_launch: bool  # it was launched, and is carried out by another thread or by MPI

    @property
    def is_queued(self) -> bool:
        """Whether it was launched, and nobody carries it out yet; or MPI does, which is not told apart."""
        return self.is_launch and not self.begun and not self.ended

    @property
    def is_open(self) -> bool:
        """Whether it has begun, and not ended."""
        return bool(self.begun) and not self.ended

    @property
    def what(self) -> str:
        """Verb and arguments."""
        return f"{self.words}, {self.num_bytes} bytes" if self.num_bytes else self.words


class Row(NamedTuple):
    """A row of a rank, and which use of a row it is: who compares late does not mistake another use for this one."""

    place: int
    use: int  # from 1; the ranks of a communicator agree on the largest


class Group(NamedTuple):
    """The communicator that a row is of: its key, and its ranks in the world, as ``0-3,5``."""

    use: int
    key: str
    ranks: str


def group_in_bytes(key: str, ranks: str) -> bytes:
    """Both, with dots for what does not fit: of the key first."""
    if len(ranks) > GROUP_BYTES - 8:
        ranks = ranks[: GROUP_BYTES - 12].rpartition(",")[0] + ",..."
    name, room = key.encode(errors="backslashreplace"), GROUP_BYTES - 1 - len(ranks)
    name = name if len(name) <= room else name[: room - 3] + b"..."
    return (name + f"|{ranks}".encode()).ljust(GROUP_BYTES, b"\0")


class Process(NamedTuple):
    """``state`` is the system's letter; ``started`` tells a process from a later one with the same number."""

    state: str
    started: int

    @property
    def is_dead(self) -> bool:
        """Whether it has ended, and only its parent has not taken notice."""
        return self.state in "ZXx"


UNKNOWN = Process("?", 0)


def look(number: int) -> Process | None:
    """The process of this number; None if there is none. UNKNOWN where the system has no /proc."""
    try:
        fields = pathlib.Path(f"/proc/{number}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return Process(fields[0], int(fields[19]))
    except (FileNotFoundError, ProcessLookupError):
        return None if pathlib.Path("/proc/self/stat").exists() else UNKNOWN
    except (OSError, IndexError, ValueError):
        return UNKNOWN


logger = logging.getLogger("torchmpi_py")


class Board:
    """The board of this rank's node. Made collectively over the ranks of the node.

    Where they can share no memory each has one of its own, and sees itself alone.
    """

    def __init__(self, node: MPI.Comm, places: Sequence[Place], world_rank: int) -> None:
        indices = [place.local for place in places]
        self.index = places[node.rank].local
        size = PART_BYTES * node.size

        def take(path: str, identity: shared_files.Identity) -> mmap.mmap:
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
        self.put(STARTED, (look(os.getpid()) or UNKNOWN).started)

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
"""The board of the session; a session alone assigns it. Read it as ``status_board.current``."""
