"""Calls of ranks of different nodes are compared: while they work, and a last time at the end."""

import json
import types

import pytest
from lone_ranks import Rank

from torchmpi_py.core import sequences
from torchmpi_py.core.status_board import HAS_LEFT, STOPPING, WORLD_RANK, Record
from torchmpi_py.watch import cross_check, final_check, reports
from torchmpi_py.watch.cross_check import Comparison, Desertion, Mismatch, Row


def rows_of(rank):
    if not hasattr(rank, "rows"):
        rank.rows = cross_check.Rows(rank.board)
    return rank.rows.read()


def compare(comparison, *ranks):
    """The first trouble, as a hub finds it."""
    found = None
    for rank in ranks:
        rows, stopping = json.loads(json.dumps(rows_of(rank)))  # as they come over a link
        found = found or comparison.add(rank.board.get(WORLD_RANK), [Row(*row) for row in rows], stopping)
    return found


def test_equal_calls_are_no_mismatch():
    first, second = Rank(0), Rank(1)
    comparison = Comparison()
    for number in range(3000):  # boards and histories go round
        for rank in (first, second):
            rank.call(f"allreduce {number % 7}")
        if number % 400 == 0:
            assert compare(comparison, first, second) is None
    for _ in range(900):
        first.call("ahead")
    assert compare(comparison, first, second) is None


@pytest.mark.parametrize("after", [0, 1, 500])
def test_a_mismatch_is_found_when_the_calls_are_over(after):
    ranks = [Rank(number, "0,3,5") for number in (0, 3, 5)]
    for rank in ranks:
        for number in range(100):
            rank.call(f"allreduce {number}")
    comparison = Comparison()
    assert compare(comparison, *ranks) is None
    position = ranks[0].call("allreduce sum")
    ranks[1].call("allreduce sum")
    ranks[2].call("allreduce max")
    for rank in ranks:
        for number in range(after):
            rank.call(f"later {number}")
    found = compare(comparison, *ranks)
    assert found == Mismatch(position, found.nodes)
    assert set(found.nodes) in ({0, 5}, {3, 5})
    assert position.sequence_number == 101


def test_rows_are_of_delegates_and_read_once_but_for_open_calls():
    rank = Rank(0)
    assert rows_of(rank) == ([], [])
    rank.call("one")
    rank.call("two", is_over=False)
    ((generation, ranks, delegate, waits, fingerprints),) = rows_of(rank)[0]
    assert (generation, ranks, delegate, waits, len(fingerprints)) == (1, "0-1", 0, False, 2)
    rank.call("three")
    assert len(rows_of(rank)[0][0].fingerprints) == 2  # the open one, and what came since
    for rank in (Rank(4, "4"), Rank(4, "0-3")):  # alone, and of another communicator
        rank.call("one")
        assert rows_of(rank)[0] == []


def test_ranks_behind_the_end_of_a_long_list_have_a_delegate():
    """The board has no room for all ranks: node of rank 0, which is in the list, and node of the last ones."""
    ranks = [0, 1, *(each * each for each in range(2, 80))]
    text = sequences.ranks_as_text(ranks, strides=True)
    first, last = Rank(0, text), Rank(ranks[-1], text)
    assert sequences.is_cut(first.board.group(0, first.slot.number).ranks)
    first.call("allreduce sum")
    last.call("allreduce max")
    assert isinstance(compare(Comparison(), first, last), Mismatch)
    world = {0: 90, 1: 70, 2: 80}  # of several such ranks of a node the lowest is the delegate; by local rank
    board = types.SimpleNamespace(
        indices=list(world),
        get=lambda _, index: world[index],
        find_slot=lambda index, generation, ranks: None if index == 1 else 5,  # it belongs to another communicator
    )
    rows = cross_check.Rows(board)
    assert [index for index in world if index != 1 and rows._is_delegate(index, 3, "0,4,...")] == [2]


def test_a_communicator_that_was_freed_is_not_compared_with_the_next_in_its_slot():
    ranks = [Rank(0), Rank(1)]
    for rank, only in zip(ranks, ("here", "there"), strict=True):
        rank.call("barrier")
        rank.call(f"only {only}")
        rank.begin_communicator(2)
        rank.call("allreduce")
    assert compare(Comparison(), *ranks) is None


def test_a_rank_in_stop_is_a_desertion_as_long_as_another_one_waits_for_it(monkeypatch):
    monkeypatch.setattr(cross_check, "_WAITS_NS", 0)
    first, second = Rank(0), Rank(1)
    for rank in (first, second):
        rank.call("one")
    comparison = Comparison()
    position = first.call("two", is_over=False)
    assert compare(comparison, first, second) is None
    second.board.put(HAS_LEFT, STOPPING)
    found = compare(comparison, second, first)
    assert found == Desertion(position, 0, 1)
    assert comparison.lasts(found)
    second.call("two")
    compare(comparison, second, first)
    assert not comparison.lasts(found)
    both = [Rank(0), Rank(1)]
    for rank in both:
        rank.board.put(HAS_LEFT, STOPPING)
    both[0].call("mpi.stop()", is_over=False)  # which is a wait in which nobody is missed
    assert compare(Comparison(), *both, both[0]) is None


@pytest.mark.parametrize("difference", ["none", "call", "one more", "none at all"])
def test_the_last_comparison(difference):
    first, second = ranks = Rank(0), Rank(1)
    for rank in ranks:
        for step in range(10 if difference != "none at all" else 0):
            position = rank.call("sum" if (rank, step, difference) != (second, 5, "call") else "max")
    if difference in ("one more", "none at all"):
        position = first.call("broadcast")

    def last_calls(rank):
        """As a rank alone on its node brings them."""
        rank.board.put(HAS_LEFT, STOPPING)
        place = sequences.last_place(rank.board, 0, rank.slot.number)
        return (*cross_check.Rows(rank.board).read(), {(rank.generation, "0-1"): place})

    found = final_check._first_difference([last_calls(rank) for rank in ranks])
    expected = {"none": None, "call": position._replace(place=position.place - 4)}.get(difference, position)
    assert found == expected
    if difference in ("one more", "none at all"):
        sides = reports.sides_of_nodes([view for rank in ranks for view in reports.views(rank.board, found)])
        assert sides.startswith("rank 0 calls broadcast, ")
        assert "; rank 1 (process " in sides


def test_views_and_positions():
    rank = Rank(3)
    position = rank.call("allreduce", site="train.py:7 in step")
    ahead = position._replace(place=position.place + 1)
    assert reports.position_of(rank.board, rank.board.latest(0)) == position
    (view,) = reports.views(rank.board, position)
    assert (view.rank, view.is_missing, view.text) == (3, False, "allreduce, 4 bytes at train.py:7 in step")
    (view,) = reports.views(rank.board, ahead)
    assert view.is_missing
    assert "rank 3 (process" in view.text
    assert "train.py:7 in step" in view.text
    assert reports.views(rank.board, position._replace(ranks="0-7")) == []
    assert reports.brief(rank.board, 0).endswith("last called allreduce, 4 bytes at train.py:7 in step")
    assert reports.position_of(rank.board, Record(1, 0, -1, 0, 0, 0, 0, 0, "", "", False)) is None
    assert "has completed it" in reports.part_of_node(rank.board, position, "allreduce, 4 bytes", ())[0].text
    assert "has not called it; its last call" in reports.part_of_node(rank.board, ahead, "barrier", ())[0].text


def test_many_ranks_that_do_the_same_are_one_row():
    """For however long they do it; a row names its ranks in a bounded number of ranges."""
    texts = [f"in {'barrier' if rank == 5 else 'reduce'} for {rank / 4:.1f} s" for rank in range(12)]
    rows = [reports.Line([rank], f"rank {rank}", text) for rank, text in enumerate(texts)]
    assert list(map(str, reports.folded(rows))) == ["11 ranks (0-4, 6-11): " + texts[0], f"rank 5: {texts[5]}"]
    assert reports.folded(rows[:4]) == rows[:4]
    with_stacks = [row._replace(text=row.text + "\n    a stack") for row in rows[:3]]
    assert reports.folded(with_stacks[:2]) == with_stacks[:2]
    assert len(reports.folded(with_stacks)) == 1
    (row,) = reports.folded(reports.Line([rank * rank], "", "waits") for rank in range(1000))
    assert str(row).startswith("1000 ranks (0-1, 4, 9, ")
    assert len(str(row)) < 200
