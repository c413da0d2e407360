import gc

import pytest
import torch

from torchmpi_py.core import communicators, journal, status_board
from torchmpi_py.core.communicators import group_by_key
from torchmpi_py.errors import CommunicatorError, NotStarted, RanksDisagree

pytestmark = pytest.mark.timeout(240)


@pytest.mark.parametrize("want_cartesian", [False, True])
@pytest.mark.parametrize("num_groups", [1, 2, 3, 5])
def test_grouping(num_groups, want_cartesian):
    for size in range(1, 13):
        plans = [
            group_by_key([f"group {rank % num_groups}" for rank in range(size)], r, want_cartesian) for r in range(size)
        ]
        is_cartesian = want_cartesian and (size % num_groups == 0 or size < num_groups)
        columns = {}
        for rank, plan in enumerate(plans):
            assert plan.is_cartesian == is_cartesian
            assert (plan.inner_rank, plan.inner_colour) == divmod(rank, num_groups)
            columns.setdefault(plan.outer_colour, []).append((plan.outer_rank, rank))
        rows = [[rank for _, rank in sorted(column)] for column in columns.values()]
        roots = list(range(min(num_groups, size)))
        if is_cartesian:
            assert rows == [[first + i for i in roots] for first in range(0, size, num_groups)]
        else:  # the first of each group; the others have columns of their own
            assert sorted(rows) == sorted([roots, *([rank] for rank in range(len(roots), size))])


def test_groups_come_in_the_same_order_in_every_column_whatever_their_keys():
    """TorchMPI ordered each column by the parent's ranks: A B in the first, B A in the second."""
    plans = [group_by_key(["A" * 5000, "B", "B", "A" * 5000], rank, True) for rank in range(4)]
    assert [plan.outer_rank for plan in plans] == [0, 1, 1, 0]
    assert [plan.outer_colour for plan in plans] == [0, 0, 1, 1]


@pytest.fixture
def levels(mpi):
    """What a test pushes is taken away again."""
    stack = communicators.stack()
    number, span = len(stack.levels), stack.span
    yield mpi
    for level in reversed(stack.levels[number:]):
        level._release()
    del stack.levels[number:]
    stack.current, stack.span = stack.levels[0], span


@pytest.mark.mpi
def test_levels(levels):
    mpi = levels
    rank, size = mpi.rank(), mpi.size()
    level = mpi.push_communicator(rank % 2)
    assert mpi.rank() == rank  # push does not move
    group = list(range(rank % 2, size, 2))
    with mpi.at(level) as here:
        assert here is mpi.communicator() is mpi.communicator(level)
        assert (mpi.rank(), mpi.size()) == (group.index(rank), len(group))
        assert mpi.allreduce(torch.tensor([rank])).item() == sum(group)  # tensors and numbers: the current level
        assert mpi.allreduce(rank) == sum(group)
        assert mpi.allgather(rank) == group
        with mpi.at(mpi.push_communicator("alone" if mpi.rank() == 0 else "rest")):
            assert mpi.size() == (1 if group.index(rank) == 0 else len(group) - 1)
        assert mpi.communicator() is here
    assert mpi.size() == size
    comm = mpi.communicator(level)
    assert comm.inner is comm
    assert comm.outer.size == (min(2, size) if group.index(rank) == 0 else 1)
    assert mpi.allreduce(1, comm=comm.outer) == comm.outer.size
    assert not comm.is_cartesian
    assert mpi.communicator(mpi.push_communicator("all")).size == size
    mpi.set_communicator(level)
    assert mpi.size() == len(group)
    mpi.set_communicator(0)
    with pytest.raises(ZeroDivisionError), mpi.at(level):
        _ = 1 / 0
    assert mpi.size() == size


@pytest.mark.mpi
def test_names_and_spans(levels):
    mpi = levels
    level = mpi.push_communicator("green")
    with mpi.at(level):
        first, *_, last = mpi.communicator_names().splitlines()
    assert f"'global': rank {mpi.rank()} of {mpi.size()}, " in first
    assert "'green'" in last
    assert last.endswith("<- current")
    mpi.set_collective_span(0, level)
    assert mpi.communicator_names().splitlines()[-1].endswith("<- span")
    with pytest.raises(ValueError, match=f"end=0 must be begin={level}, or a level that was pushed below it"):
        mpi.set_collective_span(level, 0)
    for bad in (level + 1, -1, "green"):
        with pytest.raises(ValueError, match=f"pass the index of a level, 0 to {level}"):
            mpi.set_communicator(bad)
        with pytest.raises(ValueError, match="does not exist"):
            mpi.set_collective_span(0, bad)
    with pytest.raises(TypeError, match="key must be a str or an int"):
        mpi.push_communicator(None)


@pytest.mark.mpi
def test_split(mpi):
    rank, size = mpi.rank(), mpi.size()
    comm = mpi.split(0, key=-rank)  # reversed
    assert (comm.rank, comm.size, comm.num_nodes) == (size - 1 - rank, size, 1)
    assert mpi.broadcast(torch.tensor([float(rank)]), 0, comm=comm).item() == size - 1
    assert mpi.allreduce_async(torch.ones(3), comm=comm).wait()[0] == size
    comm.free()
    assert "freed" in repr(comm)
    some = mpi.split(None if rank == 0 else 7)
    assert bool(some) == (rank > 0)
    with some:
        if some:
            assert mpi.allreduce(1, comm=some) == some.size == size - 1
        else:
            for call in (mpi.allreduce, mpi.broadcast_async, mpi.allgather_object):  # not the current level
                with pytest.raises(ValueError, match=r"this rank is in no group.*if comm:"):
                    call(torch.ones(2), comm=some)
            some.free()
    for bad in (-1, True, "red"):
        for color in (bad, bad if rank == size - 1 else 0):  # of all, and of one
            with pytest.raises(ValueError, match="color must be a whole number"):
                mpi.split(color)
    with pytest.raises(ValueError, match="key=None; key must be a whole number"):
        mpi.split(0, key=None if rank == size - 1 else 0)
    with mpi.split(1 << 40 if rank else 1 << 41, key=-(1 << 50) - rank) as large:
        assert mpi.allgather(rank, comm=large) == ([*range(size - 1, 0, -1)] if rank else [0])


@pytest.mark.mpi
@pytest.mark.parametrize("number", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_many_communicators_come_and_go(mpi, number):
    """MPI has room for a thousand or two, and so has the board."""
    stack, alive = communicators.stack(), [mpi.split(0) for _ in range(8)]
    mpi.split(0).free()
    others, slots = len(stack.others), len(status_board.current._free_slots)
    for i in range(number):
        with mpi.split(mpi.rank() % 2) as comm:
            if i % 10 == 0:
                assert mpi.allreduce(1, comm=comm) == comm.size
    assert len(status_board.current._free_slots) == slots
    mpi.split(0).free()
    assert len(stack.others) <= others + 1
    for comm in alive:
        assert mpi.allreduce(1, comm=comm) == mpi.size()
        comm.free()
    gc.collect()


@pytest.mark.mpi
def test_freeing_waits_for_what_is_under_way_there_alone(mpi):
    rank, size = mpi.rank(), mpi.size()
    message = mpi.recv_async(got := torch.zeros(4), (rank - 1) % size)
    with mpi.split(0) as comm:
        handles = [mpi.allreduce_async(torch.ones(300_000), comm=comm) for _ in range(5)]
    assert [handle.wait()[7].item() for handle in handles] == [size] * 5
    mpi.send_async(torch.full((4,), rank + 1.0), (rank + 1) % size)
    message.wait()
    assert got.tolist() == [(rank - 1) % size + 1.0] * 4
    with pytest.raises(CommunicatorError, match=r"is a level, which only mpi\.stop\(\) frees"):
        mpi.communicator().free()
    assert mpi.allreduce(1) == size


@pytest.mark.mpi(min_size=2)
def test_a_block_that_raises_does_not_wait_for_the_others(mpi):
    with pytest.raises(ZeroDivisionError), mpi.split(0) as group:
        raise ZeroDivisionError
    assert not group.is_free
    group.free()


@pytest.mark.mpi
def test_a_step_of_all_ranks_that_a_handler_breaks_off(mpi):
    def fail():
        raise TimeoutError

    group = mpi.split(0)
    with pytest.raises(TimeoutError):
        journal.run_together("a step", group, fail)
    assert group.is_broken == (mpi.size() > 1)
    group.free()


@pytest.mark.mpi(min_size=2)
def test_ranks_that_differ_in_version_or_tuning_cannot_start(mpi, monkeypatch, caplog):
    rank, last = mpi.rank(), mpi.size() - 1
    mpi.stop()
    with monkeypatch.context() as patched:
        if rank == last:
            patched.setattr(mpi, "__version__", "0.0.1")
        told = rf"rank 0 has torchmpi_py .+, and rank {last} has torchmpi_py 0\.0\.1 on .+; install the same"
        with pytest.raises(RanksDisagree, match=told):
            mpi.start()
    with monkeypatch.context() as patched:
        if rank == last:
            patched.setattr(torch, "__version__", "1.0")
        mpi.start()
        mpi.stop()
    assert (f"and rank {last} has torchmpi_py {mpi.__version__}, torch 1.0" in caplog.text) is (rank == 0)
    with pytest.raises(NotStarted, match=r"mpi.stop\(\) was called"):
        mpi.rank()
    with pytest.raises(RanksDisagree, match=r"start: rank 0 has Tuning\(native_async_bytes=0.*rank 1 has"):
        mpi.start(tuning=mpi.Tuning(native_async_bytes=rank))
    mpi.start()
    assert mpi.allreduce(1) == mpi.size()


@pytest.mark.mpi
def test_start_with_communicators_of_ones_own(mpi):
    rank, size = mpi.rank(), mpi.size()

    def names_after_start(**options):
        mpi.stop()
        mpi.start(**options)
        return mpi.communicator_names().splitlines()

    try:
        names = names_after_start(
            custom_communicator_init=lambda: mpi.push_communicator(mpi.rank() // 2), with_cartesian_communicator=True
        )
        assert mpi.size() == (1 if rank == size - 1 and size % 2 else 2)  # the deepest level is current
        _, ours, nodes = names
        assert ours.endswith("<- current,span")
        assert nodes.endswith("<- span")
        is_balanced = size % 2 == 0 or size == 1
        assert mpi.communicator(1).is_cartesian == is_balanced
        if is_balanced and size > 1:
            assert (mpi.communicator(1).outer.size, mpi.communicator(1).outer.rank) == (size // 2, rank // 2)
        assert len(names_after_start(collective_communicator=lambda: None)) == 1
        world, ours = names_after_start(collective_communicator=lambda: mpi.push_communicator(mpi.rank() % 2))
        assert world.endswith("<- current,span")
        assert ours.endswith("<- span")
    finally:
        if mpi.is_started():
            mpi.stop()
        mpi.start()
    assert (mpi.rank(), mpi.size()) == (rank, size)
