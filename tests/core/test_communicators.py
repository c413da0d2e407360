import gc

import pytest
import torch

from torchmpi_py.core import communicators, journal, status_board
from torchmpi_py.core.communicators import group_by_key
from torchmpi_py.errors import CommunicatorError, NotStarted, RanksDisagree

pytestmark = pytest.mark.timeout(240)


@pytest.mark.parametrize("size", range(1, 38))
@pytest.mark.parametrize("num_groups", [1, 2, 3, 5])
@pytest.mark.parametrize("want_cartesian", [False, True])
def test_grouping(size, num_groups, want_cartesian):
    keys = [f"group {rank % num_groups}" for rank in range(size)]
    plans = [group_by_key(keys, rank, want_cartesian) for rank in range(size)]
    balanced = size % num_groups == 0 or size < num_groups
    for rank, plan in enumerate(plans):
        assert plan.is_cartesian == (want_cartesian and balanced)
        assert plan.inner_rank == rank // num_groups
        assert plan.inner_colour == rank % num_groups
    columns = {}
    for rank, plan in enumerate(plans):
        columns.setdefault(plan.outer_colour, []).append((plan.outer_rank, rank))
    roots = list(range(min(num_groups, size)))
    if want_cartesian and balanced:
        assert [[rank for _, rank in sorted(column)] for column in columns.values()] == [
            [first + i for i in roots] for first in range(0, size, num_groups)
        ]
    else:
        assert (
            sorted(len(column) for column in columns.values()) == [1] * (size - len(roots)) + [len(roots)]
            or len(roots) == 1
        )
        assert [rank for _, rank in sorted(columns[plans[0].outer_colour])] == roots


def test_groups_come_in_the_same_order_in_every_column():
    """TorchMPI ordered each column by the parent's ranks: A B in the first, B A in the second."""
    plans = [group_by_key("ABBA", rank, True) for rank in range(4)]
    assert [plan.outer_rank for plan in plans] == [0, 1, 1, 0]
    assert [plan.outer_colour for plan in plans] == [0, 0, 1, 1]


def test_keys_need_not_sort_or_be_short():
    long = "x" * 5000
    assert group_by_key([long, "b", long], 2, False).inner_rank == 1


@pytest.fixture
def levels(mpi):
    """What a test pushes is taken away again."""
    from torchmpi_py.core import communicators

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
        deeper = mpi.push_communicator("alone" if mpi.rank() == 0 else "rest")
        with mpi.at(deeper):
            assert mpi.size() == (1 if group.index(rank) == 0 else len(group) - 1)
        assert mpi.communicator() is here
    assert mpi.size() == size
    comm = mpi.communicator(level)
    assert comm.inner is comm
    assert comm.outer.size == (min(2, size) if group.index(rank) == 0 else 1)
    assert mpi.allreduce(1, comm=comm.outer) == comm.outer.size
    assert not comm.is_cartesian
    sibling = mpi.push_communicator("all")
    assert mpi.communicator(sibling).size == size
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
        lines = mpi.communicator_names().splitlines()
    assert lines[0].startswith(f"level 0 'global': rank {mpi.rank()} of {mpi.size()}, outer rank 0 of 1, tree, 1 node")
    assert lines[-1].endswith("<- current")
    assert "'green'" in lines[-1]
    mpi.set_collective_span(0, level)
    assert mpi.communicator_names().splitlines()[-1].endswith("<- span")
    with pytest.raises(ValueError, match=f"level end=0 is not below level begin={level}"):
        mpi.set_collective_span(level, 0)
    for bad in (level + 1, -1, "green"):
        with pytest.raises(ValueError, match=f"there are levels 0 to {level}"):
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
    x = torch.tensor([float(rank)])
    assert mpi.broadcast(x, 0, comm=comm).item() == size - 1
    assert mpi.allreduce_async(torch.ones(3), comm=comm).wait()[0] == size
    comm.free()
    assert "freed" in repr(comm)
    some = mpi.split(None if rank == 0 else 7)
    assert bool(some) == (rank > 0)
    with some:
        if some:
            assert some.size == size - 1
            assert mpi.allreduce(1, comm=some) == size - 1
        else:
            for call in (mpi.allreduce, mpi.broadcast_async, mpi.allgather_object):  # not the current level
                with pytest.raises(ValueError, match=r"which is in no group.*if comm:"):
                    call(torch.ones(2), comm=some)
            assert "color None" in repr(some)
            some.free()
    for bad in (-1, True, "red"):
        for color in (bad, bad if rank == size - 1 else 0):  # of all, and of one
            with pytest.raises(ValueError, match="color must be a whole number"):
                mpi.split(color)
    with pytest.raises(ValueError, match="key must be a whole number, not None"):
        mpi.split(0, key=None if rank == size - 1 else 0)
    with mpi.split(1 << 40 if rank else 1 << 41, key=-(1 << 50) - rank) as large:
        assert mpi.allgather(rank, comm=large) == ([*range(size - 1, 0, -1)] if rank else [0])


@pytest.mark.mpi
def test_many_communicators_come_and_go(mpi):
    alive = [mpi.split(0) for _ in range(8)]
    for i in range(1000):
        with mpi.split(mpi.rank() % 2) as comm:
            if i % 100 == 0:
                assert mpi.allreduce(1, comm=comm) == comm.size
    for comm in alive:
        assert mpi.allreduce(1, comm=comm) == mpi.size()
        comm.free()
    gc.collect()


@pytest.mark.mpi
def test_a_communicator_is_freed_with_its_parts(mpi):
    stack = communicators.stack()
    mpi.split(0).free()
    number, slots = len(stack.others), len(status_board.current._free_slots)
    for _ in range(20):
        with mpi.split(0) as group:
            part = communicators.divide(group, mpi.rank() % 2, "part")
            assert mpi.allreduce(1, comm=part) == part.size
        assert part.is_free
    assert len(status_board.current._free_slots) == slots
    mpi.split(0).free()
    assert len(stack.others) <= number + 1


@pytest.mark.mpi
def test_freeing_waits_for_what_is_under_way(mpi):
    with mpi.split(0) as comm:
        handles = [mpi.allreduce_async(torch.ones(300_000), comm=comm) for _ in range(5)]
    assert [handle.wait()[7].item() for handle in handles] == [mpi.size()] * 5
    with pytest.raises(CommunicatorError, match="is a level; levels live until"):
        mpi.communicator().free()
    assert mpi.allreduce(1) == mpi.size()


@pytest.mark.mpi(min_size=2)
def test_ranks_that_are_tuned_differently_cannot_start(mpi):
    mpi.stop()
    with pytest.raises(RanksDisagree, match=r"start: rank 0 has Tuning\(native_async_bytes=0.*rank 1 has"):
        mpi.start(tuning=mpi.Tuning(native_async_bytes=mpi_rank()))
    mpi.start()
    assert mpi.allreduce(1) == mpi.size()


def mpi_rank():
    from mpi4py import MPI

    return MPI.COMM_WORLD.rank


def restart(mpi, **kwargs):
    mpi.stop()
    with pytest.raises(NotStarted, match=r"mpi.stop\(\) was called"):
        mpi.rank()
    mpi.start(**kwargs)


@pytest.mark.mpi
def test_start_with_communicators_of_ones_own(mpi):
    def groups_of_two():
        return mpi.push_communicator(mpi.rank() // 2)

    rank, size = mpi.rank(), mpi.size()
    try:
        restart(mpi, custom_communicator_init=groups_of_two, with_cartesian_communicator=True)
        assert mpi.size() == (1 if rank == size - 1 and size % 2 else 2)  # the deepest level is current
        names = mpi.communicator_names().splitlines()
        assert len(names) == 3  # the world, ours, the nodes below ours
        assert names[1].endswith("<- current,span")
        assert names[2].endswith("<- span")
        balanced = size % 2 == 0 or size == 1
        assert mpi.communicator(1).is_cartesian == balanced
        if balanced and size > 1:
            assert mpi.communicator(1).outer.size == size // 2
            assert mpi.communicator(1).outer.rank == rank // 2

        def no_nodes():
            return None

        restart(mpi, collective_communicator=no_nodes)
        assert len(mpi.communicator_names().splitlines()) == 1

        def by_parity():
            return mpi.push_communicator(mpi.rank() % 2)

        restart(mpi, collective_communicator=by_parity)
        lines = mpi.communicator_names().splitlines()
        assert len(lines) == 2
        assert lines[0].endswith("<- current,span")
        assert lines[1].endswith("<- span")
    finally:
        if mpi.is_started():
            mpi.stop()
        mpi.start()
    assert (mpi.rank(), mpi.size()) == (rank, size)


@pytest.mark.mpi
def test_free_does_not_wait_for_messages_of_other_communicators(mpi):
    rank, size = mpi.rank(), mpi.size()
    group = mpi.split(0)
    handle = mpi.recv_async(got := torch.zeros(4), (rank - 1) % size)
    group.free()
    mpi.send_async(torch.full((4,), rank + 1.0), (rank + 1) % size)
    handle.wait()
    assert got.tolist() == [(rank - 1) % size + 1.0] * 4


@pytest.mark.mpi
def test_a_block_that_raises_does_not_wait_for_the_others(mpi):
    if mpi.size() == 1:
        pytest.skip("nobody waits")
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
