"""A future counts as a wait from when it is asked for until its call is over, or given up; a Work alone does not."""

import contextlib
import gc
import types
import weakref

import pytest
import torch
import torch.distributed as dist

from torchmpi_py.core import handles, journal, status_board
from torchmpi_py.torch_backend import work as works

pytestmark = pytest.mark.mpi(min_size=2)


def held_up(mpi, group, ask, rank=0):
    """The operation that the group's last call of this rank was noted as; ``rank`` makes it after all have asked."""
    x = torch.full((3,), 1.0 + mpi.rank())
    answer = None
    if mpi.rank() != rank:
        work = dist.all_reduce(x, group=group, async_op=True)
        number = status_board.current.records(status_board.current.index)[0].number
        answer = ask(work, number)
    mpi.barrier()
    if mpi.rank() == rank:
        dist.all_reduce(x, group=group)
    else:
        work.wait()
    assert x.tolist() == [sum(range(1, 1 + mpi.size()))] * 3
    return answer


def is_waited_for(number):
    return number in journal.under_way(status_board.current)


def test_what_a_callback_holds_is_kept_until_its_work_on_a_gpu_is_done(mpi, group, monkeypatch):
    seen = []

    def follow(fails):
        held, future = torch.ones(3), works.CallFuture([])
        alive, future.gpus = weakref.ref(held), [torch.device("cuda", 0)]
        stream = types.SimpleNamespace(synchronize=lambda: seen.append(alive() is not None))
        monkeypatch.setattr(works.devices, "of", lambda gpu: types.SimpleNamespace(current=lambda: stream))
        works._follow(lambda _: held.sum() if not fails else 1 / 0, future, None)
        return future

    assert follow(False).wait() == 3
    with pytest.raises(ZeroDivisionError):
        follow(True).wait()
    assert seen == [True] * 2


def test_a_future_of_a_gpu_is_completed_on_the_stream_of_the_call(mpi, group, monkeypatch):
    """On the program's stream later work would wait for the call, though nobody has asked for that."""
    inside, seen = [False], []

    @contextlib.contextmanager
    def on_its_stream(handle):
        inside[0] = True
        yield
        inside[0] = False

    monkeypatch.setattr(handles.Handle, "on_its_stream", on_its_stream)
    real = works.CallFuture.set_result
    monkeypatch.setattr(works.CallFuture, "set_result", lambda *given: (seen.append(inside[0]), real(*given)))
    future = dist.all_reduce(torch.ones(3), async_op=True).get_future()
    assert future.wait()[0].tolist() == [mpi.size()] * 3
    assert seen == [True]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_future_is_a_wait(mpi, group, rank):
    """Also one that is dropped: who holds it in C++ cannot be seen. When the call is over it is none; nor is a Work."""

    def ask(work, number):
        before = is_waited_for(number)
        work.get_future()
        return number, before, is_waited_for(number)

    asked = held_up(mpi, group, ask, rank)
    if mpi.rank() != rank:
        number, before, after = asked
        assert (before, after, is_waited_for(number)) == (False, True, False)


def test_a_group_that_is_given_up_waits_for_nothing(mpi, group):
    """What is under way there goes on, and nobody is late in it."""
    other = dist.new_group()

    def ask(work, number):
        work.get_future()
        assert is_waited_for(number)
        other.abort()
        return is_waited_for(number)

    assert held_up(mpi, other, ask) in (False, None)
    dist.destroy_process_group(other)


def test_what_is_over_or_has_failed_is_not_under_way(mpi, group):
    """Or it would be reported as late, though the program has its future, or has caught the error, and goes on."""
    before = journal.under_way(status_board.current)
    for _ in range(20):
        work = dist.all_reduce(torch.ones(3), async_op=True)
        work.wait()
        assert work.get_future().wait()[0].tolist() == [mpi.size()] * 3

    def fail(_):
        raise ValueError("lost")

    operations = [group.extra.operation("memory", 64, torch.device("cpu"), keep=fail), group.extra.operation("barrier")]
    with pytest.raises(ValueError, match="lost"):
        group.carry_out((operations, [], None), types.SimpleNamespace(asyncOp=False))
    assert journal.under_way(status_board.current) <= before  # what former tests began may end meanwhile
    dist.barrier()


def test_a_call_that_had_a_future_lets_its_tensors_go(mpi, group):
    """At once, and not when the collector runs."""
    kept = []
    gc.disable()
    try:
        for _ in range(5):
            x = torch.ones(3)
            dist.all_reduce(x, async_op=True).get_future().wait()
            kept.append(weakref.ref(x))
            del x
        dist.barrier()  # behind it the last call is over in the group's thread, too
        assert [ref() for ref in kept[:-1]] == [None] * 4
    finally:
        gc.enable()
