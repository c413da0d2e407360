"""Ranks that are alone on their node, without MPI: a board, on which calls are recorded as the journal does."""

import time

from torchmpi_py.core import status_board
from torchmpi_py.core.channels import Place
from torchmpi_py.watch.cross_check import Position


class OneRank:
    """A communicator of one rank that shares no memory."""

    rank, size = 0, 1

    def allgather(self, x):
        return [x]

    def Barrier(self):
        pass


def make_board(rank=0):
    return status_board.Board(OneRank(), [Place(0, 0)], rank)


class Rank:
    def __init__(self, rank, ranks="0-1"):
        self.board = make_board(rank)
        self.slot = self.board.acquire_slot()
        self.board.slots_of[self.slot.number] = {0: self.slot.number}
        self.begin_communicator(1, ranks)

    def begin_communicator(self, generation, ranks="0-1"):
        self.generation, self.num_calls = generation, 0
        self.board.publish_slot(self.slot, generation, "key", ranks)

    def call(self, what, *, is_over=True, site="here.py:1 in f"):
        self.num_calls += 1
        place = self.generation << status_board.SEQUENCE_NUMBER_BITS | self.num_calls
        fingerprint = place << status_board.CHECKSUM_BITS | sum(map(ord, what))
        number, (byte, _, end_word) = self.board.next_record()
        now = time.monotonic_ns()
        text, where = self.board.keep_string(what), self.board.keep_string(site)
        names = (self.slot.number + 1) << 2 * status_board.STRING_BITS | text << status_board.STRING_BITS | where
        status_board.pack(self.board.mapping, byte, number, fingerprint, now, 4 * self.num_calls, names)
        first = self.board.first_fingerprint(0, self.slot.number)
        self.board.words[first + self.num_calls % status_board.FINGERPRINTS_PER_SLOT] = fingerprint
        if is_over:
            self.board.words[end_word] = now
        return Position(self.generation, self.board.group(0, self.slot.number).ranks, place)
