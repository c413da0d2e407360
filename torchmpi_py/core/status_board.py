"""The status board: what each rank of a node does and has done, in memory that all of them read at any time.

Every rank has a part that this rank alone writes; other ranks read the part also when its writer is stopped or dead.
A part holds, in this order:

header        numbers of the rank: process, rank in the world, ...
fingerprints  a *slot* for each communicator and thread, with the fingerprints of the last operations there
generations   of each slot: which communicator, counted over all that had the slot, has it now
records       the last operations of the rank, with times: the flight recorder; texts are among the strings
groups        of each slot: key and ranks of its communicator
strings       what was called, and where
text          stacks of the rank's threads, written when another rank asks for them

A fingerprint is one word of 64 bits, which is written at once: the slot's generation, the operation's sequence number
in the communicator, and a checksum of what has to be equal on all ranks. So ranks compare calls without a message.
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

from torchmpi_py.core import backoff, shared_files
from torchmpi_py.core.channels import Place
from torchmpi_py.core.mpi_api import MPI
from torchmpi_py.errors import Unavailable

logger = logging.getLogger("torchmpi_py")

NUM_RECORDS = 1024
NUM_SLOTS = 512
FINGERPRINTS_PER_SLOT = 64
NUM_STRINGS, NUM_SHORT_STRINGS = 1024, 128  # of all strings, those that stay free for short ones
STRING_BYTES = 128
TEXT_BYTES = 16 << 10
GROUP_BYTES = 256
LEFT_OUT = "..."  # at the end of ranks that do not fit there
BLANK_SLOT, SCRAP_SLOT = NUM_SLOTS, NUM_SLOTS + 1
"""Two slots more: one that stays empty, and one for fingerprints that no rank reads."""

# Bits of a fingerprint: checksum, sequence number, generation
CHECKSUM_BITS = SEQUENCE_NUMBER_BITS = 24
GENERATION_SHIFT, NUM_GENERATIONS = CHECKSUM_BITS + SEQUENCE_NUMBER_BITS, 1 << 15

RECORD = struct.Struct("7Q")
"""Number, fingerprint, time of launch, bytes, names, time of begin, time of end."""
pack = struct.Struct("5Q").pack_into
"""Write a record without the times of its begin and end."""
RECORD_BYTES = RECORD.size
LAUNCHED, NAMES, BEGUN, ENDED = 2, 4, 5, 6
"""Words of a record. A new record leaves the last two words as the overwritten record had them: times before the launch
mean nothing. A blocking operation begins at its launch."""
STRING_BITS = 16  # NAMES: three numbers of this width (site, text, slot + 1), then three flags
IS_LAUNCH = 1 << 3 * STRING_BITS
HAS_FAILED = IS_LAUNCH << 1
ASYNCHRONOUS_SHIFT = 3 * STRING_BITS + 2
IS_ASYNCHRONOUS = 1 << ASYNCHRONOUS_SHIFT

# A rank's part: begins in words up to the generations, then in bytes
HEADER_WORDS = 64
GENERATIONS_BEGIN = HEADER_WORDS + (NUM_SLOTS + 2) * FINGERPRINTS_PER_SLOT
RECORDS_BEGIN = (GENERATIONS_BEGIN + NUM_SLOTS) * 8
GROUPS_BEGIN = RECORDS_BEGIN + NUM_RECORDS * RECORD_BYTES
STRINGS_BEGIN = GROUPS_BEGIN + NUM_SLOTS * GROUP_BYTES
TEXT_BEGIN = STRINGS_BEGIN + NUM_STRINGS * STRING_BYTES
PART_BYTES = -(-(TEXT_BEGIN + TEXT_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE

# Words of the header
PROCESS, WORLD_RANK, TEXT_WANTED, TEXT_LENGTH, TEXT_GIVEN, HAS_LEFT, NAMESPACE, STARTED, EPOCH = range(9)
"""EPOCH: the difference between a time since the epoch and a time of a record, whose clock is never set back."""
CLAIMED_LATE, CLAIMED_DEATH, CLAIMED_DIFFERENCE, CLAIMED_ASKED, LATE_NUMBER = range(9, 14)
WAITS_IN, WAITS_ALONE = 14, 15  # as of the watchdog's last look (``watch/wait_cycles.py``)
"""Times of this rank's last claim of a report, by reason (``watch/watchdog.py``); the number of the late record."""
STOPPING, STOPPED, ENDING, DRAINING = 1, 2, 3, 4
"""HAS_LEFT: the rank waits for the others in ``mpi.stop()``, is through with it, is about to end the job; or it is in
``mpi.stop()``, and may still come to operations that were launched before."""


class Record(NamedTuple):
    """An operation of a rank. Times are in ns since the epoch, 0 before the event, ``ended`` < 0 for a failure."""

    number: int
    fingerprint: int
    slot: int  # the communicator's and thread's; -1 where no slot was left
    sequence_number: int  # among the slot's operations; 0 without counterparts to compare with
    launched: int
    begun: int
    ended: int
    num_bytes: int
    text: str  # verb and arguments, without the size
    site: str
    is_launch: bool  # carried out by another thread or by MPI
    is_asynchronous: bool = False  # the asynchronous version of a function, which never matches the blocking one

    @property
    def is_queued(self) -> bool:
        """Whether the operation was launched and has not begun; one that MPI carries out counts as queued too."""
        return self.is_launch and not self.begun and not self.ended

    @property
    def is_open(self) -> bool:
        """Whether the operation has begun, and not ended."""
        return bool(self.begun) and not self.ended

    @property
    def what(self) -> str:
        """Verb and arguments."""
        return f"{self.text}, {self.num_bytes} bytes" if self.num_bytes else self.text

    @property
    def call(self) -> str:
        """Verb and arguments, the form if it is asynchronous, and the place in the program."""
        return f"{self.what}{' asynchronously' if self.is_asynchronous else ''} at {self.site}"


class BoardSlot(NamedTuple):
    """A slot of a rank. A late reader knows by the generation that a slot has another communicator meanwhile."""

    number: int
    generation: int  # from 1; the ranks of a communicator agree on the largest


class Group(NamedTuple):
    """The communicator of a slot: its key, and its ranks in the world, as ``0-3,5``."""

    generation: int
    key: str
    ranks: str


class ReadableBoard:
    """A board as any process reads it, also after the job. ``begins``: of the ranks' parts, in bytes, by local rank."""

    def __init__(self, mapping: mmap.mmap, begins: dict[int, int], index: int) -> None:
        self.mapping, self._begins, self.index = mapping, begins, index
        self.words = memoryview(mapping).cast("Q")

    @property
    def indices(self) -> list[int]:
        """The local ranks whose parts can be read."""
        return list(self._begins)

    def columns_of(self, index: int) -> Any:
        """A rank's records as an array of shape (words of a record, NUM_RECORDS)."""
        first, length = (self._begins[index] + RECORDS_BEGIN) // 8, NUM_RECORDS * RECORD_BYTES // 8
        return np.frombuffer(self.words[first : first + length], dtype=np.uint64).reshape(NUM_RECORDS, -1).T

    def get(self, word: int, index: int | None = None) -> int:
        """A word of a rank's header."""
        return self.words[self._begins[self.index if index is None else index] // 8 + word]

    def group(self, index: int, slot: int) -> Group:
        """The communicator that has, or had last, this slot of a rank."""
        begin = self._begins[index] + GROUPS_BEGIN + slot * GROUP_BYTES
        key, _, ranks = self._text(begin, GROUP_BYTES).rpartition("|")
        return Group(self.generation_of(index, slot), key, ranks)

    def generation_of(self, index: int, slot: int) -> int:
        """The generation of the communicator that has, or had last, this slot of a rank."""
        return self.words[self._begins[index] // 8 + GENERATIONS_BEGIN + slot]

    def first_fingerprint(self, index: int, slot: int) -> int:
        """The index in ``words`` of the first fingerprint of a rank's slot."""
        return self._begins[index] // 8 + HEADER_WORDS + slot * FINGERPRINTS_PER_SLOT

    def records(self, index: int) -> list[Record]:
        """The last operations of a rank, the latest first."""
        begin = self._begins[index] + RECORDS_BEGIN
        # One copy: the writer goes on. A record that is written meanwhile may be half the former one.
        data = self.mapping[begin : begin + NUM_RECORDS * RECORD_BYTES]
        return [self._record(index, found) for found in sorted(RECORD.iter_unpack(data), reverse=True) if found[0]]

    def latest(self, index: int) -> Record | None:
        """The last operation of a rank, without a look at all texts; None if there was none."""
        place = int(self.columns_of(index)[0].argmax())
        found = RECORD.unpack_from(self.mapping, self._begins[index] + RECORDS_BEGIN + place * RECORD_BYTES)
        return self._record(index, found) if found[0] else None

    def find_slot(self, index: int, generation: int, ranks: str) -> int | None:
        """The slot in which a rank has the communicator of these ranks; None if it has none, or no longer."""
        slots = (slot for slot in range(NUM_SLOTS) if self.generation_of(index, slot) == generation)
        return next((slot for slot in slots if self.group(index, slot).ranks == ranks), None)

    def now(self, index: int) -> int:
        """The time, as in a rank's records."""
        return time.monotonic_ns() + self.get(EPOCH, index)

    def read_text(self, index: int) -> str:
        """The stacks that a rank has published."""
        begin = self._begins[index] + TEXT_BEGIN
        return self.mapping[begin : begin + self.get(TEXT_LENGTH, index)].decode(errors="replace")

    def _record(self, index: int, found: tuple[int, ...]) -> Record:
        number, fingerprint, launched, num_bytes, names, begun, ended = found
        slot = (names >> 2 * STRING_BITS & 0xFFFF) - 1
        sequence_number = fingerprint >> CHECKSUM_BITS & (1 << SEQUENCE_NUMBER_BITS) - 1
        is_launch, epoch = bool(names & IS_LAUNCH), self.get(EPOCH, index)
        # Times before the launch are those of the overwritten record.
        begun = launched if not is_launch else begun if begun >= launched else 0
        ended = (ended + epoch) * (-1 if names & HAS_FAILED else 1) if ended >= launched else 0
        begun, launched = begun and begun + epoch, launched + epoch
        site, text = (self._string(index, names >> shift & 0xFFFF) for shift in (0, STRING_BITS))
        return Record(
            number, fingerprint, slot, sequence_number, launched, begun, ended, num_bytes, text, site, is_launch,
            bool(names & IS_ASYNCHRONOUS),
        )  # fmt: skip

    def _string(self, index: int, number: int) -> str:
        return self._text(self._begins[index] + STRINGS_BEGIN + number * STRING_BYTES, STRING_BYTES) or "?"

    def _text(self, begin: int, length: int) -> str:
        """The text up to the first NUL: while a text is overwritten, more of the former one stands behind the NUL."""
        return self.mapping[begin : begin + length].partition(b"\0")[0].decode(errors="replace")


class Board(ReadableBoard):
    """The board of this rank's node. Made collectively over the ranks of the node.

    Where they can share no memory, each rank has a board of its own, with its own part alone. ``path``: a file to keep
    the board in, for readers after the job; that of the node's first rank counts.
    """

    def __init__(self, node: MPI.Comm, places: Sequence[Place], world_rank: int, path: str = "") -> None:
        indices, index = [place.local for place in places], places[node.rank].local
        size = PART_BYTES * node.size
        ways = (shared_files.kept(path), *shared_files.WAYS) if path else shared_files.WAYS

        def map_board(path: str, identity: shared_files.Identity) -> mmap.mmap:
            return shared_files.map_file(path, size, identity)

        # 1. One file for all ranks of the node, or memory of this rank alone.
        try:
            mapping, _ = shared_files.share(node, 0, size, map_board, ways)
        except Unavailable as error:
            if node.rank == 0 and node.size > 1:
                logger.warning(
                    "the ranks of this node share no memory (%s): what they call is not compared, a death is not "
                    "noticed, and reports name no other rank",
                    error,
                )
            mapping, indices = mmap.mmap(-1, PART_BYTES), [index]
        super().__init__(mapping, {index: part * PART_BYTES for part, index in enumerate(indices)}, index)
        self._begin = self._begins[index]
        self.scrap_word = self._begin // 8 + HEADER_WORDS - 1
        """A word for the end of an operation whose record was overwritten."""

        # 2. What this rank keeps of its own part, in its own memory.
        self._free_slots = list(range(NUM_SLOTS - 1, -1, -1))
        self._generation = 0
        self._strings: dict[str, int] = {}
        self.slots_of: dict[int, dict[int, int]] = {}  # own slot -> the slots of the same sequence, by local rank
        self._first_record = (self._begin + RECORDS_BEGIN) // 8
        self.columns = self.columns_of(self.index)
        self.next_record: Callable[[], tuple[int, tuple[int, int, int]]] = self._count_records()
        """The number of the next record, and where it is: in bytes, in words, and the word for its end."""
        self.texts: dict[tuple[Any, ...], tuple[int, int]] = {}  # the journal's: strings and checksums
        self.sites: dict[tuple[int, int], tuple[int, CodeType]] = {}
        self.calls: dict[int, tuple[CodeType, Any, object, int, int]] = {}

        # 3. After the barrier every rank finds the headers of the others.
        self._write_header(world_rank)
        backoff.fenced(node.Barrier)()

    def _count_records(self) -> Callable[[], Any]:
        length = RECORD_BYTES // 8
        begins = [self._first_record + number % NUM_RECORDS * length for number in range(1, NUM_RECORDS + 1)]
        records = itertools.cycle([(begin * 8, begin, begin + ENDED) for begin in begins])
        return zip(itertools.count(1), records, strict=False).__next__

    def _write_header(self, world_rank: int) -> None:
        self.put(WORLD_RANK, world_rank)
        self.put(PROCESS, os.getpid())
        # In another namespace (a container) the number of a process means another process.
        with contextlib.suppress(OSError):
            self.put(NAMESPACE, os.stat("/proc/self/ns/pid").st_ino)
        self.put(EPOCH, time.time_ns() - time.monotonic_ns())
        self.put(STARTED, (find_process(os.getpid()) or UNKNOWN_PROCESS).started)

    def put(self, word: int, value: int, index: int | None = None) -> None:
        """Write a word of the header: this rank's, or another's as a request to that rank."""
        self.words[self._begins[self.index if index is None else index] // 8 + word] = value

    def acquire_slot(self) -> BoardSlot | None:
        """An empty slot of this rank; None if all are in use."""
        if not self._free_slots:
            return None
        self._generation += 1
        number = self._free_slots.pop()
        # Empty before the other ranks learn of the slot: what stands there is of another communicator.
        begin = self.first_fingerprint(self.index, number) * 8
        self.mapping[begin : begin + FINGERPRINTS_PER_SLOT * 8] = bytes(FINGERPRINTS_PER_SLOT * 8)
        return BoardSlot(number, self._generation)

    def publish_slot(self, slot: BoardSlot, generation: int, key: str, ranks: str) -> None:
        """Write the generation that the ranks have agreed on, and their communicator."""
        # The next slot of this rank gets a generation that no rank of this communicator has used.
        self._generation = max(self._generation, generation)
        self.words[self._begin // 8 + GENERATIONS_BEGIN + slot.number] = generation
        begin = self._begin + GROUPS_BEGIN + slot.number * GROUP_BYTES
        self.mapping[begin : begin + GROUP_BYTES] = _group_as_bytes(key, ranks)

    def release_slot(self, slot: BoardSlot) -> None:
        """Let another communicator have the slot."""
        self._free_slots.append(slot.number)

    def keep_string(self, text: str, short: str = "") -> int:
        """A number by which records of this rank refer to the end of a text; to ``short`` when the room is used up.

        0 when there is no room for the short text either.
        """
        number = self._strings.get(text)
        if number is None:
            if len(self._strings) + 1 >= NUM_STRINGS - (NUM_SHORT_STRINGS if short else 0):
                return self.keep_string(short) if short else 0
            # The end of a text says more than its beginning: the file's name, the line, the function.
            self._strings[text] = number = len(self._strings) + 1
            data = text.encode(errors="backslashreplace")[-STRING_BYTES:].ljust(STRING_BYTES, b"\0")
            begin = self._begin + STRINGS_BEGIN + number * STRING_BYTES
            self.mapping[begin : begin + STRING_BYTES] = data
        return number

    def record(self, number: int) -> Record | None:
        """A record of this rank; None if it was overwritten."""
        begin = (self._first_record + number % NUM_RECORDS * (RECORD_BYTES // 8)) * 8
        found = RECORD.unpack_from(self.mapping, begin)
        return self._record(self.index, found) if found[0] == number else None

    def counterpart(self, slot: int, fingerprint: int, index: int) -> Record | None:
        """Another rank's record of the operation with this fingerprint, up to the checksum, in this rank's slot."""
        theirs, place = self.slots_of.get(slot, {}).get(index), fingerprint >> CHECKSUM_BITS
        return next(
            (r for r in self.records(index) if r.slot == theirs and r.fingerprint >> CHECKSUM_BITS == place), None
        )

    def write_text(self, text: str) -> None:
        """Publish the stacks of this rank's threads."""
        data = text.encode(errors="backslashreplace")[:TEXT_BYTES]
        begin = self._begin + TEXT_BEGIN
        self.mapping[begin : begin + len(data)] = data  # before its length
        self.put(TEXT_LENGTH, len(data))


current: Board | None = None
"""The board of the session; a session alone assigns it. Read it as ``status_board.current``."""


def _group_as_bytes(key: str, ranks: str) -> bytes:
    """Key and ranks; dots stand for what does not fit, the key's end first."""
    if len(ranks) > GROUP_BYTES - 8:
        ranks = ranks[: GROUP_BYTES - 12].rpartition(",")[0] + f",{LEFT_OUT}"
    name, room = key.encode(errors="backslashreplace"), GROUP_BYTES - 1 - len(ranks)
    name = name if len(name) <= room else name[: room - 3] + b"..."
    return (name + f"|{ranks}".encode()).ljust(GROUP_BYTES, b"\0")


class Process(NamedTuple):
    """``state`` is the system's letter; ``started`` tells a process from a later one with the same number."""

    state: str
    started: int

    @property
    def is_dead(self) -> bool:
        """Whether the process has ended, also before its parent reaps it."""
        return self.state in "ZXx"


UNKNOWN_PROCESS = Process("?", 0)


def find_process(number: int) -> Process | None:
    """The process of this number; None if there is none. UNKNOWN_PROCESS where the system has no /proc."""
    try:
        fields = pathlib.Path(f"/proc/{number}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return Process(fields[0], int(fields[19]))
    except (FileNotFoundError, ProcessLookupError):
        return None if pathlib.Path("/proc/self/stat").exists() else UNKNOWN_PROCESS
    except (OSError, IndexError, ValueError):
        return UNKNOWN_PROCESS
