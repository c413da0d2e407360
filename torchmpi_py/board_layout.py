"""The layout of the board (``board.py``): where in a rank's part of it what is, and what can be read there.

header     a few numbers: process, rank in the world, ...
rows       one for each communicator and thread: a *mark* for each of the last operations there
uses       of each row: which use of it this is
records    the last operations of the rank, with times: its flight recorder; their words are among the strings
groups     of each row: the communicator that has it, in words
strings    what was called, and where
text       where the rank's threads stand, written when another rank asks for it
"""

from __future__ import annotations

import mmap
import struct
from typing import NamedTuple

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
