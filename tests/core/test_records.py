"""What is recorded of operations on the board, and which of them count as under way."""

import _thread
import sys
import time

import numpy as np
import pytest
import torch

from torchmpi_py.core import backoff, channels, journal, status_board
from torchmpi_py.core.status_board import CHECKSUM_BITS, NUM_RECORDS, NUM_STRINGS, SEQUENCE_NUMBER_BITS
from torchmpi_py.watch import flight_recorder

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(240)]


def latest():
    """The last record of this rank."""
    return status_board.current.records(status_board.current.index)[0]


def under_way():
    return journal.under_way(status_board.current)


def test_what_is_recorded(mpi):
    x = torch.ones(4)
    mpi.allreduce(x, flavour="mpi")
    line = sys._getframe().f_lineno - 1
    assert latest().what == "allreduce mpi torch.float32 sum, 16 bytes"
    assert latest().site == f"{__file__}:{line} in test_what_is_recorded"[-status_board.STRING_BYTES :]
    assert 0 < latest().begun <= latest().ended
    handle = mpi.allreduce_async(x, flavour="mpi")
    assert latest().launched > 0
    handle.wait()
    assert latest().ended > 0
    assert not under_way()


def test_calls_of_a_thread_in_which_only_the_package_has_frames(mpi):
    """As autograd's for a GPU, which calls hooks. Elsewhere the same lines have callers."""
    torch.manual_seed(0)
    x, module = torch.ones(4), torch.nn.Linear(2, 1)
    for call, argument in ((mpi.allreduce, x), (mpi.nn.check_with_allreduce, module)):
        for _ in range(2):
            call(argument)
            before = latest()
            assert "test_records.py" in before.site
            deadline = time.monotonic() + 60
            thread = _thread.start_new_thread(call, (argument,))
            while latest().number == before.number or thread in sys._current_frames():
                assert time.monotonic() < deadline
                time.sleep(0.001)
            assert latest().ended > 0
            assert "test_records.py" not in latest().site
    assert x.tolist() == [mpi.size() ** 4] * 4


def test_who_waits_is_active_and_no_longer(mpi):
    """Waits that are given up, dropped handles, failed operations: nothing is left to be reported."""
    x = torch.ones(4)
    if mpi.size() > 1:
        handle = mpi.recv_async(x, (mpi.rank() + 1) % mpi.size())
        with pytest.raises(mpi.CollectiveTimeout):
            handle.wait(0.01)
        assert not under_way()
        mpi.barrier()
        mpi.send(x, (mpi.rank() - 1) % mpi.size())
        handle.wait()
    for count in (4, 1 << 18):
        mpi.wait_all([mpi.allreduce_async(torch.ones(count)) for _ in range(3)])
    mpi.allreduce_async(x)
    mpi.barrier()
    assert not under_way()


@pytest.mark.mpi(min_size=2)
def test_ranks_that_may_come_late_while_they_work(mpi):
    """Rank 0 is not late in what it waits for as long as others call something; and is, when they are silent."""

    def counts(wanted):
        until, number = time.monotonic() + 20, latest().number
        while (number in under_way()) != wanted and time.monotonic() < until:
            time.sleep(0.02)
        return (number in under_way()) == wanted

    def look():
        assert counts(False)
        backoff.barrier(turn)  # from now on the others are silent
        assert counts(True)
        backoff.barrier(turn)

    with mpi.split(0) as comm, mpi.split(mpi.rank()) as own:
        turn = comm.background.mpi
        mpi.barrier()
        if mpi.rank() == 0:
            journal.run_while_others_work("the end of training", comm, look)
        else:
            request = turn.Ibarrier()
            while not request.Test():
                mpi.barrier(own)
            backoff.barrier(turn)
            journal.run_while_others_work("the end of training", comm, lambda: None)
        assert not under_way()


def test_a_wait_of_one_rank_alone(mpi):
    """It counts, and moves no rank's place in the sequence that all have to call alike."""
    with mpi.split(0) as comm:
        for _ in range(mpi.rank()):
            assert len(journal.run_alone("alone", comm, under_way)) == 1
        assert mpi.allreduce(1, comm=comm) == mpi.size()
        with pytest.raises(LookupError):
            journal.run_alone("alone", comm, lambda: {}["nothing"])
        assert not under_way()


def test_roots_of_other_types_and_flavours_that_are_given(mpi):
    """Whatever counts as a whole number is the same root on all ranks."""
    root = [0, torch.tensor(0), np.int64(0), np.array(0)][mpi.rank() % 4]
    x = torch.full((3,), float(mpi.rank()))
    assert mpi.broadcast(x, root).tolist() == [0, 0, 0]
    assert (mpi.gather(x, root) is None) == (mpi.rank() > 0)
    chosen = mpi.selector.flavour_for(
        "allgather", mpi.communicator(), x.device, 12 * mpi.size(), symmetric=False, name=None
    )
    forced = {"flavour": chosen.name} if mpi.rank() == 0 else {}  # it makes no difference who has chosen
    assert len(mpi.allgather(x, **forced)) == 3 * mpi.size()


def test_what_is_under_way_outlives_its_record(mpi):
    with mpi.split(mpi.rank()) as comm, mpi.split(mpi.rank()) as other:
        entry = journal.record_plain("long", comm)
        for _ in range(NUM_RECORDS + 600):
            mpi.barrier(other)
        assert under_way() == {entry[0]}
        assert journal.find_record(status_board.current, entry[0]).text == "long"
        journal.end(entry)
        assert not under_way()


def test_what_was_left_without_an_end_is_not_under_way_once_its_communicator_is_freed(mpi):
    used = status_board.current
    with mpi.split(mpi.rank()) as comm:
        slots = {sequence.index for sequence in comm.sequences}
        left = journal.record_plain("left without an end", comm)
        mpi.barrier(comm)  # several operations of one sequence may be open: of a call that records them together
        assert under_way() == {left[0]}
        comm._release()
    assert used.record(left[0]).is_open
    assert not under_way()
    with mpi.split(mpi.rank()) as comm:  # it has the same slot
        assert slots == {sequence.index for sequence in comm.sequences}
        assert used.record(left[0]).is_open
        assert not under_way()
        message = journal.record(journal.Plain("a message", comm, None), channels.DIRECT)
        mpi.barrier(comm)
        assert under_way() == {message[0]}
        journal.end(message)


def test_what_belonged_to_a_freed_communicator(mpi):
    """Its slot is another's now, and its operations are not the new one's."""
    for _ in range(2):
        with mpi.split(0) as comm:
            mpi.barrier(comm)
            mpi.barrier(comm)
    with mpi.split(0) as comm:
        used, sequence = status_board.current, comm.sequences[0]
        fingerprint = (sequence.generation << SEQUENCE_NUMBER_BITS | 1) << CHECKSUM_BITS
        mpi.barrier()
        assert all(used.counterpart(sequence.index, fingerprint, index) is None for index in used.indices)
        groups = flight_recorder.of_rank(used, used.index)["pg_config"].values()
        assert {"split 0", "a communicator that was freed"} >= {
            group["desc"] for group in groups if "." not in group["name"]
        }
        mpi.barrier()
        mpi.barrier(comm)
    assert {"split", "free"} <= {record.text for record in used.records(used.index)}


def test_more_places_of_call_than_are_kept(mpi, monkeypatch):
    monkeypatch.setattr(journal, "MOST_CALLS_KEPT", 3)
    names = {"mpi": mpi, "module": torch.nn.Linear(2, 2)}
    for number in range(9):
        exec(compile("mpi.nn.synchronize_parameters(module)", f"generated{number}.py", "exec"), names)
        assert f"generated{number}.py" in latest().site


def test_rows_and_strings_run_out(mpi):
    """Then operations go on, without being compared, or with the verb and the file alone as words."""
    used, slots = status_board.current, []
    while (slot := used.acquire_slot()) is not None:
        slots.append(slot)
    with mpi.split(0) as comm:
        assert mpi.allreduce(mpi.rank(), comm=comm) == sum(range(mpi.size()))
    for slot in slots:
        used.release_slot(slot)
    assert len({slot.number for slot in slots}) == len(slots)
    for number in range(NUM_STRINGS):
        used.keep_string(f"{number}", "one of many")
    x = torch.ones(3, dtype=torch.int16)
    assert mpi.allreduce(x).tolist() == [mpi.size()] * 3
    assert latest().text == "allreduce"
    assert latest().site.endswith("test_records.py")
    assert len(used.records(used.index)) <= NUM_RECORDS
