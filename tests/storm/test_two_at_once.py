"""Two collectives at the same time on one node, in every way in which a program can come to that: both are right.

TORCHMPI_STORM_TURNS=1000 repeats each so often. The selector takes flavour ``shared`` here, which large tensors get.
"""

import os
import signal
import sys
import threading

import pytest
import storm_actors
import storm_values as values
import torch
import torch.distributed as dist

from torchmpi_py.core import channels, journal, status_board

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.timeout(3600 if "TORCHMPI_STORM_TURNS" in os.environ else 120)]
TURNS = int(os.environ.get("TORCHMPI_STORM_TURNS", "4"))
COUNT = 1_200_001  # more than four chunks; not divisible


@pytest.fixture(scope="module")
def pair(request, mpi):
    """(two groups of torch.distributed, two communicators), all of all ranks; and ``shared`` for allreduce."""
    import torchmpi_py.torch_backend  # noqa: F401

    dist.init_process_group("torchmpi")
    mpi.selector["allreduce", "node"] = "shared"
    yield (dist.new_group(), dist.new_group()), (mpi.split(0), mpi.split(0))
    if not request.session.testsfailed:
        dist.destroy_process_group()
        mpi.selector.__init__()


def both(first, second):
    """Carry out both, the second in another thread."""
    thread = threading.Thread(target=second)
    thread.start()
    first()
    thread.join()


def in_two_groups(mpi, groups, comms, x, y):
    order = [(x, groups[0]), (y, groups[1])]
    works = [dist.all_reduce(t, group=g, async_op=True) for t, g in (order if mpi.rank() % 2 else order[::-1])]
    for work in works:
        work.wait()


def beside_a_blocking_call(mpi, groups, comms, x, y):
    work = dist.all_reduce(x, async_op=True)
    mpi.allreduce(y)
    work.wait()


def in_two_threads(mpi, groups, comms, x, y):
    both(lambda: mpi.allreduce(x, comm=comms[0]), lambda: mpi.allreduce(y, comm=comms[1]))


def launched_and_called(mpi, groups, comms, x, y):
    handle = mpi.allreduce_async(x, comm=comms[0])
    mpi.allreduce(y, comm=comms[1])
    handle.wait()


def staged_and_mapped(mpi, groups, comms, x, y):
    both(
        lambda: mpi.allreduce(x, comm=comms[0], flavour="staged"),
        lambda: mpi.allreduce(y, comm=comms[1], flavour="cudaipc"),
    )


def in_callbacks(mpi, groups, comms, x, y):
    """Each group has calls of callbacks, on channels of their own."""
    starts = torch.zeros(1), torch.zeros(1)
    works = [dist.all_reduce(start, group=g, async_op=True) for start, g in zip(starts, groups, strict=True)]
    chained = [
        work.get_future().then(lambda _, t=t, g=g: dist.all_reduce(t, group=g))
        for work, t, g in zip(works, (x, y), groups, strict=True)
    ]
    for future in chained:
        future.wait()


@pytest.fixture
def on_the_host(monkeypatch):
    """The flavours for GPUs serve CPU tensors too."""
    for name in ("staged", "cudaipc"):
        monkeypatch.setattr(storm_actors.registry.BY_NAME[name], "devices", frozenset({"cpu", "cuda"}))


WAYS = [in_two_groups, beside_a_blocking_call, in_two_threads, launched_and_called]
WAYS += [staged_and_mapped, in_callbacks]


def cases():
    """Each way with one kind of memory a day, the kinds in turn."""
    for number, way in enumerate(WAYS):
        for is_symmetric in (False, True):
            name = f"{way.__name__}-{'symmetric' if is_symmetric else 'ordinary'}"
            yield pytest.param(way, is_symmetric, id=name, marks=[pytest.mark.slow] * (is_symmetric != number % 2))


@pytest.mark.parametrize(("way", "is_symmetric"), list(cases()))
def test_two_at_once(mpi, pair, on_the_host, way, is_symmetric):
    rank, size, wrong = mpi.rank(), mpi.size(), []
    x, y = (mpi.symmetric_empty(COUNT) if is_symmetric else torch.empty(COUNT) for _ in range(2))
    given = [values.given(rank, number, COUNT) for number in (0, 1)]
    expected = [values.reduced(size, number, COUNT) for number in (0, 1)]
    for turn in range(TURNS):
        for t, mine in zip((x, y), given, strict=True):
            t.copy_(mine)
        way(mpi, *pair, x, y)
        wrong += [turn for t, total in zip((x, y), expected, strict=True) if not torch.equal(t, total)]
    assert mpi.allreduce(len(wrong), flavour="mpi") == 0, f"wrong in turns {sorted(set(wrong))} of {TURNS}"


class Slow:
    Iallreduce = None  # of a communicator of MPI whose blocking allreduce takes its time

    def __init__(self, former):
        self.former, self.inside, self.go_on = former, threading.Event(), threading.Event()

    def Allreduce(self, *arguments):
        self.inside.set()
        self.go_on.wait(30)
        self.former.Allreduce(*arguments)


@pytest.fixture
def while_in_allreduce(mpi, monkeypatch):
    """(a communicator, a function: what a step raises in another thread while this one is in an allreduce there)."""
    comm, x, raised = mpi.split(0), torch.ones(3), []
    made = Slow(comm.direct.mpi)
    monkeypatch.setattr(comm.direct, "mpi", made)

    def attempt(step):
        def second():
            made.inside.wait(30)
            try:
                step()
            except mpi.errors.CommunicatorError as error:
                raised.append(str(error))
            made.go_on.set()

        both(lambda: mpi.allreduce(x, comm=comm, flavour="mpi"), second)
        assert (x == mpi.size()).all()
        return raised[0]

    return comm, attempt


def test_two_threads_in_one_communicator_are_refused(mpi, while_in_allreduce):
    """The other ranks could not know the order of the two; nor do they know where it has begun to differ."""
    comm, attempt = while_in_allreduce

    def broadcast():
        mpi.broadcast(torch.ones(3), comm=comm, flavour="mpi")

    told = attempt(broadcast)
    assert "two threads of this rank" in told
    assert "a separate communicator in each thread (mpi.split)" in told
    with pytest.raises(mpi.errors.CommunicatorError, match="two threads of this rank called collectives"):
        broadcast()


def test_a_communicator_in_use_is_not_freed(while_in_allreduce):
    comm, attempt = while_in_allreduce
    assert "cannot be freed during a collective; call free() afterwards" in attempt(comm.free)
    assert not comm.is_free


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # where Python itself drops it
def test_a_signal_in_the_middle_leaves_no_trace(mpi):
    """An exception may come anywhere; the next call is carried out as ever."""

    class Interrupted(Exception):
        pass

    def interrupt(*_):
        raise Interrupted

    with mpi.split(mpi.rank()) as alone:
        x, num_interrupts, former = torch.ones(64), 0, signal.signal(signal.SIGALRM, interrupt)
        try:
            for turn in range(2000):
                try:
                    signal.setitimer(signal.ITIMER_REAL, (1 + turn % 60) * 1e-6)
                    for _ in range(5):
                        mpi.allreduce(x, comm=alone)
                    signal.setitimer(signal.ITIMER_REAL, 0)
                except Interrupted:
                    num_interrupts += 1
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, former)
        assert num_interrupts > 0
        assert alone.direct.user == channels.NOBODY
        if sys.version_info >= (3, 11):  # before, a signal may come between a return and the assignment of its value
            assert not journal.under_way(status_board.current)
