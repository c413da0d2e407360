"""Fingerprints on the board: every interleaving of what two and three ranks record, also with stores that are late.

What holds in weak order, where every step may pass every other one, holds on every machine.

The steps are the product's own: its code makes the boards, acquires slots and records operations, one rank after
another, and its reads and writes of the board's words are recorded. ``journal.end`` decides whether a fingerprint that
is seen is a difference.
"""

import numpy as np
import pytest
from protocol_model import TSO, WEAK, Step, explore
from protocol_ranks import Ranks

from torchmpi_py.core import journal, sequences, status_board
from torchmpi_py.core.channels import DIRECT, Place, Places
from torchmpi_py.core.status_board import Board
from torchmpi_py.errors import RanksDisagree

pytestmark = pytest.mark.timeout(240)
SIZES = [2, 3]


class Words:
    """The words of a board; reads and writes are recorded, and a reader of a fingerprint sees ``shown``."""

    def __init__(self, words):
        self.words, self.accesses, self.shown = words, [], 0

    def __getitem__(self, where):
        if isinstance(where, slice):
            return self.words[where]
        self.accesses.append(("read", where))
        return self.shown

    def __setitem__(self, where, value):
        self.accesses.append(("write", where, value))
        self.words[where] = value


class Flavour:
    exchanges_headers = False


class Operation:
    """As far as ``journal.record`` needs one."""

    num_bytes, arguments, flavour = 0, (), Flavour()

    def __init__(self, fingerprint, sequence):
        self.fingerprint, self.name = (fingerprint, "flavour", 0), fingerprint
        self.comm = type("Communicator", (), {"sequences": [sequence]})


def make_boards(monkeypatch, size):
    """The boards of the ranks of a node, as its code makes them."""
    ranks, made = Ranks(), {}

    def program(rank):
        node = ranks.comm("node", rank, size)
        made[rank] = Board(node, [Place(0, local) for local in range(size)], rank)

    ranks.run(monkeypatch, *(lambda rank=rank: program(rank) for rank in range(size)))
    return [made[rank] for rank in range(size)]


class Node:
    """The boards of a node, and the recorded steps of its ranks."""

    def __init__(self, monkeypatch, size):
        self.patch, self.size = monkeypatch, size
        self.boards = make_boards(monkeypatch, size)
        self.steps = [[] for _ in range(size)]
        for used in self.boards:
            used.words = Words(used.words)
        monkeypatch.setattr(journal, "pack", self._pack)

    def _pack(self, mapping, place, number, fingerprint, *_):
        self.words.accesses.append(("write", ("record", place), fingerprint))

    def as_rank(self, rank):
        self.words = self.boards[rank].words
        self.patch.setattr(status_board, "current", self.boards[rank])

    def communicator(self, members):
        """Sequences of the ranks that make a communicator."""
        offers, places = [], Places([(0, rank) for rank in members])
        for rank in members:
            self.as_rank(rank)
            offers.append(sequences.offer())
        made = {}
        for index, rank in enumerate(members):
            self.as_rank(rank)
            made[rank] = sequences.CallSequence(index, places, np.array(offers), DIRECT, "key")
            self.words.accesses.clear()
        return made

    def call(self, rank, sequence, what, *between):
        """``what`` is recorded, then these steps, then it ends."""
        self.as_rank(rank)
        words = self.words
        words.shown, begun = 0, len(self.steps[rank])
        entry = journal.record(Operation(what, sequence), DIRECT)
        self._add_steps(rank, entry)
        self.steps[rank] += between
        journal.end(entry)
        self._add_steps(rank, entry)
        return self.steps[rank][begun:]

    def _add_steps(self, rank, entry):
        words, fingerprint = self.words, entry[4]
        first = status_board.HEADER_WORDS
        for kind, where, *value in words.accesses:
            is_recorded = isinstance(where, tuple) or first <= where % self.part_words < status_board.GENERATIONS_BEGIN
            if kind == "write" and is_recorded:
                self.steps[rank].append(Step(f"write {where}", writes=((where, *value),)))
            elif kind == "read" and where == entry[3]:
                self.steps[rank].append(Step(f"look at {where}", looks=(where, self.judge(rank, entry))))
        words.accesses.clear()
        assert fingerprint

    part_words = status_board.PART_BYTES // 8

    def judge(self, rank, entry):
        """Whether a fingerprint that is seen makes the product's code raise."""
        used, known = self.boards[rank], {}

        def differs(shown):
            if shown not in known:
                used.words.shown = shown
                with self.patch.context() as patched:
                    patched.setattr(status_board, "current", used)
                    try:
                        journal.end(entry)
                        known[shown] = False
                    except RanksDisagree:
                        known[shown] = True
            return known[shown]

        return differs


def meeting(number):
    """An operation whose ranks wait for each other."""
    return [Step(f"operation {number}", barrier="comm")]


FENCE = [Step("a call of MPI", is_fence=True)]
"""An operation in which nobody waits: a small message that is sent on."""


def recorded(monkeypatch, size, calls, between):
    """``calls`` of each rank, on one communicator."""
    node = Node(monkeypatch, size)
    made = node.communicator(range(size))
    for rank in range(size):
        for number, what in enumerate(calls[rank]):
            node.call(rank, made[rank], what, *between(number))
    return node


@pytest.mark.parametrize("size", SIZES)
def test_equal_operations_never_differ(monkeypatch, size):
    """Also where ranks run ahead, round the slot."""
    monkeypatch.setattr(sequences, "FINGERPRINTS_PER_SLOT", 2)
    num_calls = 3 if size == 2 else 2
    node = recorded(monkeypatch, size, [["a", "b", "a"][:num_calls]] * size, lambda number: FENCE)
    found = explore(node.steps, WEAK)
    assert not found.problem
    assert found.endings == {(False,) * size}


@pytest.mark.parametrize("between", [meeting, lambda number: FENCE], ids=["meets", "does not wait"])
@pytest.mark.parametrize("size", SIZES)
def test_a_difference_is_found_at_the_end_at_the_latest(monkeypatch, size, between):
    calls = [["a", "b" if rank == size - 1 else "a"] for rank in range(size)]
    found = explore(recorded(monkeypatch, size, calls, between).steps, WEAK)
    assert not found.problem
    is_found = all(any(ending) for ending in found.endings)
    # Of three ranks none looks at both others. Where none waits, those who could see it may have come too early.
    assert is_found == (size == 2 or between is meeting)


def test_a_slot_of_another_communicator(monkeypatch):
    """Rank 0 is late in a communicator whose slot rank 1 has given to another one meanwhile."""
    for early in ("a", "b"):
        with monkeypatch.context() as patched:
            node = Node(patched, 2)
            former = node.communicator([0, 1])
            node.call(1, former[1], "a", *FENCE)
            node.as_rank(1)
            slot = former[1].slot
            former[1].free()
            later = node.communicator([1])
            assert later[1].slot.number == slot.number
            node.call(1, later[1], early, *FENCE)
            node.call(0, former[0], "a", *FENCE)
            assert explore(node.steps, WEAK).endings == {(False, False)}


def test_a_reader_of_a_fingerprint_finds_its_record(monkeypatch):
    """The record is written first. On a machine without store order its words may come late."""
    node = recorded(monkeypatch, 2, [["a"], ["b"]], lambda number: [])
    wrote = [step for step in node.steps[1] if step.writes][:2]
    record, fingerprint = (step.writes[0] for step in wrote)
    assert isinstance(record[0], tuple)
    assert not isinstance(fingerprint[0], tuple)
    reader = [Step("see the fingerprint", until=fingerprint), Step("read the record", reads=(record,))]
    assert not explore([reader, wrote], TSO).problem
    assert "instead of" in explore([reader, wrote], WEAK).problem
