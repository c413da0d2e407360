"""The status board: the current and past operations of each rank of a node, in memory that all these ranks can read.

The idea: each rank writes its own part, and other ranks can read the part even if its writer is stopped or dead. Into
another rank's part, a rank writes only requests. The alternative, messages between threads of the ranks, needs an
answer from the rank that hangs. A part contains:

- header: numbers that describe the rank, such as its process ID and its world rank
- fingerprints: a *slot* for each communicator and thread, with the fingerprints of the last operations
- generations: for each slot, a number that identifies its communicator, larger than for earlier communicators
- records: the last operations of the rank with their times (the flight recorder)
- groups: for each slot, the key and the ranks of its communicator
- strings: the texts of the calls, and their places in the program
- text: stacks of the rank's threads, written when another rank requests them

A fingerprint is one 64-bit word, so that a single store writes it. It contains the slot's generation, the operation's
sequence number in the communicator, and a checksum of the values that must be equal on all ranks. So ranks can compare
their calls without a message.
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
NUM_STRINGS, NUM_SHORT_STRINGS = 1024, 128  # number of all strings, and of the strings reserved for short texts
STRING_BYTES = 128
TEXT_BYTES = 16 << 10
GROUP_BYTES = 256
LEFT_OUT = "..."  # the end of a list of ranks that was cut
BLANK_SLOT, SCRAP_SLOT = NUM_SLOTS, NUM_SLOTS + 1
"""Two additional slots: one that stays empty, and one for fingerprints that no rank reads."""

# Bits of a fingerprint: checksum, sequence number, generation
CHECKSUM_BITS = SEQUENCE_NUMBER_BITS = 24
GENERATION_SHIFT, NUM_GENERATIONS = CHECKSUM_BITS + SEQUENCE_NUMBER_BITS, 1 << 15

RECORD = struct.Struct("7Q")
"""Number, fingerprint, launch time, bytes, names, begin time, end time."""
pack = struct.Struct("5Q").pack_into
"""Write a record except its begin and end times."""
RECORD_BYTES = RECORD.size
LAUNCHED, NAMES, BEGUN, ENDED = 2, 4, 5, 6
"""Indices of words in a record. ``pack`` does not overwrite the begin and end times of the former record, so times
before the launch are invalid. A blocking operation begins at its launch."""
STRING_BITS = 16  # NAMES consists of three numbers of this width (site, text, slot + 1) and three flags.
IS_LAUNCH = 1 << 3 * STRING_BITS
HAS_FAILED = IS_LAUNCH << 1
ASYNCHRONOUS_SHIFT = 3 * STRING_BITS + 2
IS_ASYNCHRONOUS = 1 << ASYNCHRONOUS_SHIFT

# Positions in a rank's part, in words up to GENERATIONS_BEGIN, and in bytes from RECORDS_BEGIN on
HEADER_WORDS = 64
GENERATIONS_BEGIN = HEADER_WORDS + (NUM_SLOTS + 2) * FINGERPRINTS_PER_SLOT
RECORDS_BEGIN = (GENERATIONS_BEGIN + NUM_SLOTS) * 8
GROUPS_BEGIN = RECORDS_BEGIN + NUM_RECORDS * RECORD_BYTES
STRINGS_BEGIN = GROUPS_BEGIN + NUM_SLOTS * GROUP_BYTES
TEXT_BEGIN = STRINGS_BEGIN + NUM_STRINGS * STRING_BYTES
PART_BYTES = -(-(TEXT_BEGIN + TEXT_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE

# Words of the header
PROCESS, WORLD_RANK, TEXT_WANTED, TEXT_LENGTH, TEXT_GIVEN, HAS_LEFT, NAMESPACE, STARTED, EPOCH = range(9)
"""EPOCH: the epoch time minus the time of records, whose clock is monotonic."""
CLAIMED_LATE, CLAIMED_DEATH, CLAIMED_DIFFERENCE, CLAIMED_ASKED, LATE_NUMBER = range(9, 14)
WAITS_IN, WAITS_ALONE = 14, 15  # from the watchdog's last check (``watch/wait_cycles.py``)
"""CLAIMED_*: the time at which this rank last claimed a report, by reason (``watch/watchdog.py``). LATE_NUMBER: the
number of the late operation's record."""
STOPPING, STOPPED, ENDING, DRAINING = 1, 2, 3, 4
"""Values of HAS_LEFT. STOPPING: the rank waits for the other ranks in ``mpi.stop()``. STOPPED: the rank no longer needs
the other ranks. ENDING: the rank is about to end the job. DRAINING: the rank is in ``mpi.stop()``, but may still run
operations that were launched before."""


class Record(NamedTuple):
    """An operation of a rank.

    Times are in ns since the epoch, and 0 before the event. If ``ended`` is negative, the operation failed.
    """

    number: int
    fingerprint: int
    slot: int  # slot of the communicator and thread, or -1 if no slot was free
    sequence_number: int  # position among the slot's operations, or 0 without counterparts to compare
    launched: int
    begun: int
    ended: int
    num_bytes: int
    text: str  # the collective and its arguments, without the size
    site: str
    is_launch: bool  # whether another thread or MPI carries out the operation
    is_asynchronous: bool = False  # whether it is the asynchronous version, which never matches the blocking one

    @property
    def is_queued(self) -> bool:
        """Whether the operation was launched but is not known to have begun; MPI does not report when it begins."""
        return self.is_launch and not self.begun and not self.ended

    @property
    def is_open(self) -> bool:
        """Whether the operation has begun but not ended."""
        return bool(self.begun) and not self.ended

    @property
    def what(self) -> str:
        """The collective and its arguments."""
        return f"{self.text}, {self.num_bytes} bytes" if self.num_bytes else self.text

    @property
    def call(self) -> str:
        """The collective, its arguments, whether it is asynchronous, and the place in the program."""
        return f"{self.what}{' asynchronously' if self.is_asynchronous else ''} at {self.site}"


class BoardSlot(NamedTuple):
    """A slot of a rank. The generation shows a reader whether another communicator has taken over the slot."""

    number: int
    generation: int  # starts at 1; the ranks of a communicator agree on the largest of their generations


class Group(NamedTuple):
    """The communicator of a slot: its key, and its world ranks as text, such as ``0-3,5``."""

    generation: int
    key: str
    ranks: str


class ReadableBoard:
    """A board that any process can read, even after the job. ``begins`` maps a local rank to its part's first byte."""

    def __init__(self, mapping: mmap.mmap, begins: dict[int, int], index: int) -> None:
        self.mapping, self._begins, self.index = mapping, begins, index
        self.words = memoryview(mapping).cast("Q")

    @property
    def indices(self) -> list[int]:
        """The local ranks whose parts this process can read."""
        return list(self._begins)

    def columns_of(self, index: int) -> Any:
        """Return a rank's records as an array of shape (words of a record, NUM_RECORDS)."""
        first, length = (self._begins[index] + RECORDS_BEGIN) // 8, NUM_RECORDS * RECORD_BYTES // 8
        return np.frombuffer(self.words[first : first + length], dtype=np.uint64).reshape(NUM_RECORDS, -1).T

    def get(self, word: int, index: int | None = None) -> int:
        """Return a word of a rank's header; the default is this rank."""
        return self.words[self._begins[self.index if index is None else index] // 8 + word]

    def group(self, index: int, slot: int) -> Group:
        """Return the communicator that uses this slot of a rank, or that used it last."""
        begin = self._begins[index] + GROUPS_BEGIN + slot * GROUP_BYTES
        key, _, ranks = self._text(begin, GROUP_BYTES).rpartition("|")
        return Group(self.generation_of(index, slot), key, ranks)

    def generation_of(self, index: int, slot: int) -> int:
        """Return the generation of the communicator that uses this slot of a rank, or that used it last."""
        return self.words[self._begins[index] // 8 + GENERATIONS_BEGIN + slot]

    def first_fingerprint(self, index: int, slot: int) -> int:
        """Return the index in ``words`` of the first fingerprint in a rank's slot."""
        return self._begins[index] // 8 + HEADER_WORDS + slot * FINGERPRINTS_PER_SLOT

    def records(self, index: int) -> list[Record]:
        """Return the last operations of a rank, the newest first."""
        begin = self._begins[index] + RECORDS_BEGIN
        # Copy all records first, because the writer continues. A record that is written during the copy may be partly
        # old and partly new.
        data = self.mapping[begin : begin + NUM_RECORDS * RECORD_BYTES]
        return [self._record(index, values) for values in sorted(RECORD.iter_unpack(data), reverse=True) if values[0]]

    def latest(self, index: int) -> Record | None:
        """Return the last operation of a rank without decoding the other records; None if the rank has no records."""
        place = int(self.columns_of(index)[0].argmax())
        values = RECORD.unpack_from(self.mapping, self._begins[index] + RECORDS_BEGIN + place * RECORD_BYTES)
        return self._record(index, values) if values[0] else None

    def find_slot(self, index: int, generation: int, ranks: str) -> int | None:
        """Return the slot that a rank uses for a communicator, identified by its generation and ranks, else None."""
        slots = (slot for slot in range(NUM_SLOTS) if self.generation_of(index, slot) == generation)
        return next((slot for slot in slots if self.group(index, slot).ranks == ranks), None)

    def now(self, index: int) -> int:
        """Return the current time in ns, on the clock of a rank's records."""
        return time.monotonic_ns() + self.get(EPOCH, index)

    def read_text(self, index: int) -> str:
        """Return the text in which a rank has published the stacks of its threads."""
        begin = self._begins[index] + TEXT_BEGIN
        return self.mapping[begin : begin + self.get(TEXT_LENGTH, index)].decode(errors="replace")

    def _record(self, index: int, values: tuple[int, ...]) -> Record:
        number, fingerprint, launched, num_bytes, names, begun, ended = values
        slot = (names >> 2 * STRING_BITS & 0xFFFF) - 1
        sequence_number = fingerprint >> CHECKSUM_BITS & (1 << SEQUENCE_NUMBER_BITS) - 1
        is_launch, epoch = bool(names & IS_LAUNCH), self.get(EPOCH, index)
        # Times before the launch belong to the overwritten record.
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
        """Return a text up to its first NUL; the end of an older, longer text may follow the NUL."""
        return self.mapping[begin : begin + length].partition(b"\0")[0].decode(errors="replace")


class Board(ReadableBoard):
    """The board of this rank's node. All ranks of the node must create it together.

    If the ranks cannot share memory, each rank has a separate board, which contains only that rank's part. ``path`` is
    the file in which the board can be read after the job. Only the path of the node's first rank counts.
    """

    def __init__(self, node: MPI.Comm, places: Sequence[Place], world_rank: int, path: str = "") -> None:
        indices, index = [place.local for place in places], places[node.rank].local
        size = PART_BYTES * node.size
        ways = (shared_files.kept(path), *shared_files.WAYS) if path else shared_files.WAYS

        def map_board(path: str, identity: shared_files.Identity) -> mmap.mmap:
            return shared_files.map_file(path, size, identity)

        # 1. Map one file that all ranks of the node share. If that fails, map memory for this rank alone.
        try:
            mapping, _ = shared_files.share(node, 0, size, map_board, ways)
        except Unavailable as error:
            if node.rank == 0 and node.size > 1:
                logger.warning(
                    "the ranks of this node cannot share memory (%s). So their calls are not compared, the death of a "
                    "rank is not noticed, and each report shows only the rank that writes it",
                    error,
                )
            mapping, indices = mmap.mmap(-1, PART_BYTES), [index]
        super().__init__(mapping, {index: part * PART_BYTES for part, index in enumerate(indices)}, index)
        self._begin = self._begins[index]
        self.scrap_word = self._begin // 8 + HEADER_WORDS - 1
        """The index of a word to which the end time of an operation is written if its record was overwritten."""

        # 2. Create this rank's own tables, in its private memory.
        self._free_slots = list(range(NUM_SLOTS - 1, -1, -1))
        self._generation = 0
        self._strings: dict[str, int] = {}
        self.slots_of: dict[int, dict[int, int]] = {}  # this rank's slot: {local rank: slot}
        self._first_record = (self._begin + RECORDS_BEGIN) // 8
        self.columns = self.columns_of(self.index)
        self.next_record: Callable[[], tuple[int, tuple[int, int, int]]] = self._count_records()
        """Return the number of the next record, and (its first byte, its first word, the word of its end time)."""
        self.texts: dict[tuple[Any, ...], tuple[int, int]] = {}  # the journal's cache of strings and checksums
        self.sites: dict[tuple[int, int], tuple[int, CodeType]] = {}
        self.calls: dict[int, tuple[CodeType, Any, object, int, int]] = {}

        # 3. Write this rank's header. After the barrier every rank can read all headers.
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
        # In another PID namespace (a container) another process may have the same number.
        with contextlib.suppress(OSError):
            self.put(NAMESPACE, os.stat("/proc/self/ns/pid").st_ino)
        self.put(EPOCH, time.time_ns() - time.monotonic_ns())
        self.put(STARTED, (find_process(os.getpid()) or UNKNOWN_PROCESS).started)

    def put(self, word: int, value: int, index: int | None = None) -> None:
        """Write a word of this rank's header, or of another rank's header as a request to that rank."""
        self.words[self._begins[self.index if index is None else index] // 8 + word] = value

    def acquire_slot(self) -> BoardSlot | None:
        """Return an empty slot of this rank; None if all slots are in use."""
        if not self._free_slots:
            return None
        self._generation += 1
        number = self._free_slots.pop()
        # Clear the slot before the other ranks know its number, because it may contain fingerprints of another
        # communicator.
        begin = self.first_fingerprint(self.index, number) * 8
        self.mapping[begin : begin + FINGERPRINTS_PER_SLOT * 8] = bytes(FINGERPRINTS_PER_SLOT * 8)
        return BoardSlot(number, self._generation)

    def publish_slot(self, slot: BoardSlot, generation: int, key: str, ranks: str) -> None:
        """Write the generation on which the ranks have agreed, and the key and ranks of the slot's communicator."""
        # The next slot of this rank then gets a generation that no rank of this communicator has used.
        self._generation = max(self._generation, generation)
        self.words[self._begin // 8 + GENERATIONS_BEGIN + slot.number] = generation
        begin = self._begin + GROUPS_BEGIN + slot.number * GROUP_BYTES
        self.mapping[begin : begin + GROUP_BYTES] = _group_as_bytes(key, ranks)

    def release_slot(self, slot: BoardSlot) -> None:
        """Make a slot of this rank available for another communicator."""
        self._free_slots.append(slot.number)

    def keep_string(self, text: str, short: str = "") -> int:
        """Store a text, or the end of a long text, and return the number by which this rank's records refer to it.

        Return the number of ``short`` if no space is left for long texts, and 0 if no space is left for any text.
        """
        number = self._strings.get(text)
        if number is None:
            if len(self._strings) + 1 >= NUM_STRINGS - (NUM_SHORT_STRINGS if short else 0):
                return self.keep_string(short) if short else 0
            # Cut the start of a long text, because its end contains the file's name, the line and the function.
            self._strings[text] = number = len(self._strings) + 1
            data = text.encode(errors="backslashreplace")[-STRING_BYTES:].ljust(STRING_BYTES, b"\0")
            begin = self._begin + STRINGS_BEGIN + number * STRING_BYTES
            self.mapping[begin : begin + STRING_BYTES] = data
        return number

    def record(self, number: int) -> Record | None:
        """Return this rank's record with this number; None if the record was overwritten."""
        begin = (self._first_record + number % NUM_RECORDS * (RECORD_BYTES // 8)) * 8
        values = RECORD.unpack_from(self.mapping, begin)
        return self._record(self.index, values) if values[0] == number else None

    def counterpart(self, slot: int, fingerprint: int, index: int) -> Record | None:
        """Return another rank's record of the operation that has this fingerprint in this rank's ``slot``.

        The checksums may differ. Return None if the other rank has no such record.
        """
        theirs, place = self.slots_of.get(slot, {}).get(index), fingerprint >> CHECKSUM_BITS
        return next(
            (r for r in self.records(index) if r.slot == theirs and r.fingerprint >> CHECKSUM_BITS == place), None
        )

    def write_text(self, text: str) -> None:
        """Publish the stacks of this rank's threads."""
        data = text.encode(errors="backslashreplace")[:TEXT_BYTES]
        begin = self._begin + TEXT_BEGIN
        self.mapping[begin : begin + len(data)] = data  # Written before the length, so that readers see a whole text.
        self.put(TEXT_LENGTH, len(data))


current: Board | None = None
"""The board of the session. Only a session assigns this variable; read it as ``status_board.current``."""


def _group_as_bytes(key: str, ranks: str) -> bytes:
    """Return key and ranks as GROUP_BYTES bytes. If they are too long, cut the end of the key first, and add dots."""
    if len(ranks) > GROUP_BYTES - 8:
        ranks = ranks[: GROUP_BYTES - 12].rpartition(",")[0] + f",{LEFT_OUT}"
    name, room = key.encode(errors="backslashreplace"), GROUP_BYTES - 1 - len(ranks)
    name = name if len(name) <= room else name[: room - 3] + b"..."
    return (name + f"|{ranks}".encode()).ljust(GROUP_BYTES, b"\0")


class Process(NamedTuple):
    """A process: the letter of its state, and its start time, which differs if a process ID is used again."""

    state: str
    started: int

    @property
    def is_dead(self) -> bool:
        """Whether the process has ended, even if its parent has not reaped it yet."""
        return self.state in "ZXx"


UNKNOWN_PROCESS = Process("?", 0)


def find_process(number: int) -> Process | None:
    """Return the process with this process ID, or None if it does not exist.

    Return UNKNOWN_PROCESS if /proc is missing or cannot be read.
    """
    try:
        fields = pathlib.Path(f"/proc/{number}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return Process(fields[0], int(fields[19]))
    except (FileNotFoundError, ProcessLookupError):
        return None if pathlib.Path("/proc/self/stat").exists() else UNKNOWN_PROCESS
    except (OSError, IndexError, ValueError):
        return UNKNOWN_PROCESS
