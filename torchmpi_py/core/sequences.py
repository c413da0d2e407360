"""Sequences: the ordered operations of a communicator in one thread, and their comparison between ranks.

The n-th operation must be the same on all ranks: the same collective, with matching sizes, dtype, op and root. The
idea: each rank writes the fingerprint of its n-th operation to the board, and compares this fingerprint with the
fingerprint of one neighbour, the next rank of its node. If any two ranks of the node differ, then some rank differs
from its neighbour. So every difference is found, at a cost that does not grow with the number of ranks. The
alternative, in which one rank compares all fingerprints, would slow that rank down and leave the other ranks without an
error. The disadvantage is that an error may list only the ranks that have already called.

A rank compares twice: when the operation begins, and again before it returns. The first comparison is early enough to
stop the call before any data moves, but it finds a difference only if the neighbour called first. At the second
comparison the neighbour has called too, provided that the ranks wait for each other in the operation. ``journal.py``
carries out these steps; a ``CallSequence`` stores the positions of the fingerprints.

The ranks of a communicator agree on the generation of their slots, so that equal operations have equal fingerprints.
A rank without a neighbour compares its fingerprint with itself. A rank without a slot (all slots are in use) writes to
a slot that no rank reads, and compares with an empty slot.

The second half of this file finds out, from the records on the board, which ranks differ and how.
"""

from __future__ import annotations

import functools
import itertools
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence as Ranks
from typing import Any, NamedTuple

import numpy as np

from torchmpi_py.core import status_board
from torchmpi_py.core.channels import Places
from torchmpi_py.core.status_board import CHECKSUM_BITS, FINGERPRINTS_PER_SLOT, WORLD_RANK, Board, BoardSlot, Record
from torchmpi_py.errors import CommunicatorError

logger = logging.getLogger("torchmpi_py")
_MOST_NAMED = 4


_NO_SLOT = BoardSlot(-1, 0)


def offer() -> list[int]:
    """Return this rank's data for a new communicator: the world rank, and a slot for each thread role."""
    if (board := status_board.current) is None:
        return [0, *_NO_SLOT, *_NO_SLOT]
    return [board.get(WORLD_RANK), *(board.acquire_slot() or _NO_SLOT), *(board.acquire_slot() or _NO_SLOT)]


class CallSequence:
    """This rank's count of operations for one communicator and one thread role.

    ``offers`` contains the result of ``offer`` on each rank, one row per rank.
    """

    def __init__(self, rank: int, places: Places, offers: Any, thread_role: int, key: str) -> None:
        numbers, generations = offers.T[1 + 2 * thread_role : 3 + 2 * thread_role]
        self.neighbour: int | None = None  # the neighbour's rank in the communicator
        self.is_alone = len(places) == 1
        # The sequence is broken from the operation with fingerprint ``broken_from``, which differed or was interrupted.
        self.is_broken, self.broken_from = False, 1 << 64
        self.slot = None if numbers[rank] < 0 else BoardSlot(int(numbers[rank]), int(generations[rank]))
        self.index = -1 if self.slot is None else self.slot.number
        self._board = board = status_board.current
        if board is None:
            return
        self.blank = board.first_fingerprint(board.index, status_board.BLANK_SLOT)

        # 1. Use the largest generation. It is new to every rank, so no old fingerprint in one of the slots has it.
        generation = int(generations.max())
        self.generation = generation & status_board.NUM_GENERATIONS - 1
        if self.slot is None:
            if numbers.argmin() == rank:  # Only the first rank without a slot warns.
                _warn_of_missing_slots()
            self._count_from(board.first_fingerprint(board.index, status_board.SCRAP_SLOT), self.blank)
            return

        # 2. Let reports find the communicator of a slot, and the slots of the other ranks of this node.
        board.publish_slot(self.slot, generation, key, ranks_as_text(offers[:, 0].tolist(), strides=True))
        here = np.flatnonzero((places.nodes == places.nodes[rank]) & (numbers >= 0))
        slots = dict(zip(places.locals[here].tolist(), numbers[here].tolist(), strict=True))
        board.slots_of[self.slot.number] = slots

        # 3. Find the neighbour: the next rank of this node that also has a slot. If there is no such rank, this rank
        # compares each fingerprint with itself.
        first = neighbours_first = board.first_fingerprint(board.index, self.slot.number)
        for other in [*here[here > rank].tolist(), *here[here < rank].tolist()]:
            if (index := int(places.locals[other])) in board.indices:
                self.neighbour, self.neighbours_index = other, index
                neighbours_first = board.first_fingerprint(index, slots[index])
                break
        self._count_from(first, neighbours_first)

    def _count_from(self, first: int, neighbours_first: int) -> None:
        # Every rank writes the fingerprint of its n-th operation to word n of its slot, modulo the slot's size.
        words = [(first + number, neighbours_first + number) for number in range(FINGERPRINTS_PER_SLOT)]
        step = 1 << CHECKSUM_BITS
        # If the sequence number overflows, the generation changes, on all ranks at the same operation.
        fingerprints = itertools.count((self.generation << status_board.SEQUENCE_NUMBER_BITS) * step + step, step)
        self.next_fingerprint: Callable[[], tuple[int, tuple[int, int]]] = zip(
            fingerprints, itertools.cycle(words[1:] + words[:1]), strict=False
        ).__next__
        """Return the next operation's fingerprint without checksum, and the indices of both ranks' words."""

    def free(self) -> None:
        """Release this rank's slot on the board."""
        if self._board is not None and self.slot is not None:
            self._board.slots_of.pop(self.slot.number, None)
            self._board.release_slot(self.slot)
        self.slot = self.neighbour = None


def refused(name: str, comm: object) -> CommunicatorError:
    """Return the error to raise in a call on a communicator whose sequence is broken."""
    return CommunicatorError(
        f"{name}: an earlier call on {comm!r} failed on this rank, but other ranks may have completed it, so later "
        "calls can no longer be matched. End the job and fix the first error"
    )._of_call(name, comm)


@functools.cache
def _warn_of_missing_slots() -> None:
    """Warn, once per process, that calls on further communicators are not compared."""
    logger.warning(
        "more than %d communicators are in use, so calls on new ones are not compared; call free() on unused ones",
        status_board.NUM_SLOTS // 2,
    )


class Side(NamedTuple):
    """The operation of another rank of the node with the same sequence number as this rank's operation."""

    local: int
    is_same: bool
    record: Record | None


def sides(board: Board, mine: Record, *, only_different: bool = False) -> Iterator[Side]:
    """Yield a ``Side`` for each other rank that has reached the sequence number of this rank's operation.

    With ``only_different``, skip ranks whose operation equals this rank's operation.
    """
    others = board.slots_of.get(mine.slot, {}) if mine.sequence_number else {}
    for index in sorted(others, key=lambda index: board.get(WORLD_RANK, index)):
        if index == board.index or index not in board.indices:
            continue
        first = board.first_fingerprint(index, others[index])
        theirs = board.words[first + mine.sequence_number % FINGERPRINTS_PER_SLOT]
        # With a different generation or sequence number, the rank is behind or a round ahead, or its slot was reused.
        has_come, is_same = theirs >> CHECKSUM_BITS == mine.fingerprint >> CHECKSUM_BITS, theirs == mine.fingerprint
        if has_come and not (is_same and only_different):  # Reading a record is slow, and usually no rank differs.
            yield Side(index, is_same, board.counterpart(mine.slot, mine.fingerprint, index))


def behind(board: Board, mine: Record) -> list[int]:
    """Return the local ranks of this node that have not reached the sequence number of this rank's operation."""
    slots = board.slots_of.get(mine.slot, {}) if mine.sequence_number else {}
    # The other ranks need not answer, because the words of a stopped or dead rank stay readable.
    place, seen = mine.fingerprint >> CHECKSUM_BITS, board.indices
    return [index for index, slot in slots.items() if index in seen and last_place(board, index, slot) < place]


def last_place(board: Board, index: int, slot: int) -> int:
    """Return the generation and sequence number, as one number, of the last operation in a rank's slot."""
    # Fingerprints grow with the sequence number, so the largest fingerprint is the last. An empty slot contains zeros.
    first = board.first_fingerprint(index, slot)
    return max(board.words[first : first + FINGERPRINTS_PER_SLOT]) >> CHECKSUM_BITS


def last_places(board: Board, slots: Iterable[int]) -> dict[tuple[int, str], int]:
    """Return the ``last_place`` of each of this rank's ``slots``, by (generation, ranks) of the slot's communicator."""
    groups = {slot: board.group(board.index, slot) for slot in slots}
    return {(group.generation, group.ranks): last_place(board, board.index, slot) for slot, group in groups.items()}


def is_numbered(mine: Record) -> bool:
    """Return whether an operation has a place in a sequence; messages and operations without a slot do not."""
    return bool(mine.sequence_number) and mine.slot >= 0


def is_freed(board: Board, mine: Record) -> bool:
    """Return whether the communicator of this rank's operation was freed.

    If so, the operation is over. Its end may not be recorded, because a signal handler may have raised an exception.
    """
    if not is_numbered(mine):
        return False
    # Another communicator may use the slot now. Compare the generations, because the slot is empty until the first
    # operation of that communicator.
    mines = mine.fingerprint >> CHECKSUM_BITS + status_board.SEQUENCE_NUMBER_BITS
    ahead = (board.generation_of(board.index, mine.slot) - mines) % status_board.NUM_GENERATIONS
    return mine.slot not in board.slots_of or 0 < ahead < status_board.NUM_GENERATIONS // 2


def is_passed(board: Board, mine: Record) -> bool:
    """Return whether a later operation of the sequence was recorded, or the communicator was freed.

    Even so, the operation may hang if one call records several operations, or if several threads make calls.
    """
    is_later = is_numbered(mine) and last_place(board, board.index, mine.slot) > mine.fingerprint >> CHECKSUM_BITS
    return is_later or is_freed(board, mine)


def difference(board: Board, mine: Record) -> str:
    """Return a description of the ranks whose operation differs from this rank's operation; empty if there are none."""
    different = list(sides(board, mine, only_different=True))
    if not different:
        return ""
    texts = describe_sides(board, mine, different)
    return f"operation {mine.sequence_number} of this communicator is not the same on all ranks: {texts}"


def describe_sides(board: Board, mine: Record, others: list[Side]) -> str:
    """Return a description of this rank's call and of the calls of up to four other ranks."""
    theirs = [f"rank {board.get(WORLD_RANK, side.local)} {_describe(side.record)}" for side in others[:_MOST_NAMED]]
    return "; ".join([f"this rank {_describe(mine)}", *theirs])


def _describe(record: Record | None) -> str:
    return "makes a different call" if record is None else f"calls {record.call}"


def ranks_as_text(ranks: Ranks[int], *, strides: bool = False) -> str:
    """Return ranks as text, such as ``0-3,5``; with ``strides``, write ranks at equal distances as ``0-8/2``."""
    runs: list[list[int]] = []
    for rank in ranks:
        last = runs[-1] if runs else []
        continues = rank - last[-1] == last[1] - last[0] if len(last) > 1 else bool(last) and rank == last[0] + 1
        if continues or (strides and len(last) == 1 and rank > last[0]):
            last.append(rank)
        elif strides and len(last) == 2 and last[1] - last[0] > 1:
            # Two ranks are not yet a stride, because the second of them may begin a run with the new rank.
            runs[-1:] = [last[:1], [last[1], rank] if rank > last[1] else [last[1]]]
            runs += [] if rank > last[1] else [[rank]]
        else:
            runs.append([rank])
    return ",".join(_run_as_text(run) for run in runs)


def _run_as_text(run: Ranks[int]) -> str:
    if len(run) == 1:
        return str(run[0])
    step = run[1] - run[0]
    if step > 1 and len(run) == 2:
        return f"{run[0]},{run[1]}"
    return f"{run[0]}-{run[-1]}" + (f"/{step}" if step > 1 else "")


def ranks_from_text(text: str) -> list[int]:
    """Return the ranks of a text such as ``0-3,5`` or ``0-8/2``; skip parts that cannot be read."""
    matches = (re.fullmatch(r"(\d+)(?:-(\d+)(?:/([1-9]\d*))?)?", part) for part in text.split(","))
    parts = [match.groups() for match in matches if match]
    return [rank for begin, end, step in parts for rank in range(int(begin), int(end or begin) + 1, int(step or 1))]


def is_cut(text: str) -> bool:
    """Return whether a text of ranks was cut; such a text lists many ranks, usually on several nodes."""
    return text.endswith(status_board.LEFT_OUT)
