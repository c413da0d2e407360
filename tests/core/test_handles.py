"""Handles: results, errors, limits and drops, first with steps without MPI, then on ranks."""

import gc
import logging
import threading
import time
import weakref

import pytest
import torch

from torchmpi_py.collectives.flavours import mpi_steps
from torchmpi_py.core.communication_thread import CommunicationThread
from torchmpi_py.core.handles import RequestHandle, Work, wait_all
from torchmpi_py.errors import CollectiveTimeout, CommunicatorError

pytestmark = pytest.mark.timeout(240)
SMALL, LARGE = 16, 200_000  # posted to MPI, and run in the communication thread


class Step(Work):
    """An operation without MPI."""

    label = "some work"

    def __init__(self, action):
        self.action = action

    def run(self, in_background=False):
        return self.action()

    finish = run

    def release(self):
        del self.action


def fail(text="lost"):
    raise KeyError(text)


@pytest.fixture(params=[False, True], ids=["thread", "inline"])
def thread(request):
    made = CommunicationThread(inline=request.param)
    yield made
    made.close()


def test_order_results_and_repeated_waits(thread):
    seen = []
    handles = [thread.submit(Step(lambda i=i: seen.append(i) or i * i)) for i in range(100)]
    assert wait_all(handles) == [i * i for i in range(100)]
    assert seen == list(range(100))
    assert handles[7].wait() == handles[7].wait() == 49
    assert all(handle.done() for handle in handles)
    with pytest.raises(TypeError, match="neither true nor false"):
        bool(handles[7])


def test_an_error_is_raised_by_every_wait_with_the_same_traceback(thread):
    handle = thread.submit(Step(fail))
    depths = set()
    for _ in range(5):
        with pytest.raises(KeyError, match="lost") as caught:
            handle.wait()
        depths.add(len(caught.traceback))
    assert len(depths) == 1
    assert "failed" in repr(handle)
    assert thread.submit(Step(lambda: 3)).wait() == 3


def test_wait_all_waits_for_all_and_raises_the_first_error(thread):
    done = []
    handles = [thread.submit(Step(lambda text=text: fail(text))) for text in ("first", "second")]
    handles.append(thread.submit(Step(lambda: done.append(1))))
    with pytest.raises(KeyError, match="first") as caught:
        wait_all(handles)
    assert done == [1]
    assert caught.value.__notes__ == ["wait_all: number of other operations that failed: 1"]


def test_an_error_that_nobody_would_see_is_logged(thread, caplog):
    class Failing(Step):
        def on_done(self):
            raise KeyError("in a callback")

    with caplog.at_level(logging.ERROR, "torchmpi_py"):
        thread.submit(Step(fail))
        thread.drain()
        gc.collect()
        assert thread.submit(Failing(lambda: 1)).wait() == 1
        assert thread.submit(Step(lambda: 2)).wait() == 2
    assert "some work failed, and the program never called wait() on its handle: KeyError('lost')" in caplog.text
    assert "a step chained to some work failed" in caplog.text


def test_a_wait_with_a_limit_and_the_life_of_buffers():
    thread, late = CommunicationThread(inline=False), threading.Event()
    kept = weakref.ref(x := torch.ones(1))
    handle = thread.submit(Step(lambda x=x: late.wait(60) and "late"))
    del x
    assert not handle.done()
    assert "under way" in repr(handle)
    with pytest.raises(CollectiveTimeout, match=r"some work is not complete after 0.01 s"):
        handle.wait(timeout_seconds=0.01)
    assert kept() is not None
    late.set()
    assert handle.wait(timeout_seconds=30) == "late"
    gc.collect()
    assert kept() is None
    assert "complete" in repr(handle)
    thread.close()


class Alarm(Exception):
    """What the handler of a signal raises."""


class Call:
    """A nonblocking call, as MPI's: complete when cancelled, or after ``looks``; a handler interrupts the first."""

    def __init__(self, looks, *, is_interrupted=True):
        self.looks, self.is_interrupted = looks, is_interrupted

    def Test(self):
        if self.is_interrupted:
            self.is_interrupted = False
            raise Alarm
        self.looks -= 1
        return self.looks < 1

    def Wait(self):
        while not self.Test():
            pass

    def Cancel(self):
        self.looks = 1


@pytest.mark.parametrize("seconds", [None, 5])
def test_what_a_handler_raises_in_a_wait_is_no_failure_of_the_operation(seconds):
    handle = RequestHandle(Step(lambda: 7), [Call(2)])
    with pytest.raises(Alarm):
        handle.wait(seconds)
    assert handle._work is not None  # and so its buffers, into which MPI still writes
    assert handle.wait(seconds) == 7


@pytest.mark.parametrize("looks", [2, 0])
def test_wait_all_does_not_keep_what_a_handler_raises(looks):
    second = Call(2)
    with pytest.raises(Alarm):
        wait_all([RequestHandle(Step(lambda: 7), [Call(looks)]), RequestHandle(Step(lambda: 8), [second])])
    assert second.looks == 2


def test_a_receive_is_taken_back_while_a_thread_waits_for_it():
    handle, errors = RequestHandle(Step(lambda: 7), [Call(1 << 60, is_interrupted=False)]), []

    def wait():
        try:
            handle.wait()
        except CommunicatorError as error:
            errors.append(str(error))

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    while not handle._lock.locked():
        time.sleep(0.01)
    handle.cancel()
    waiting.join(60)
    assert errors == ["some work was cancelled: no message has arrived for it"]


def test_a_receive_that_a_handler_interrupted_after_its_end():
    from mpi4py import MPI

    receipt = mpi_steps.Receipt(MPI.COMM_SELF, got := torch.zeros(3), 0, 5)
    MPI.COMM_SELF.Send(torch.ones(3).numpy(), 0, receipt.tag)
    receipt.request.Wait(receipt.status)  # as if a handler had raised before the check
    assert receipt.Test()
    receipt.Wait()
    assert got.tolist() == [1, 1, 1]


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("count", "number"), [(SMALL, 2000), (LARGE, 60), pytest.param(SMALL, 10_000, marks=pytest.mark.slow)]
)
def test_many_outstanding_and_dropped_operations(mpi, count, number):
    tensors = [torch.full((count,), float(i % 7 + mpi.rank())) for i in range(number)]
    results = mpi.wait_all([mpi.allreduce_async(x) for x in tensors])
    base = mpi.size() * (mpi.size() - 1) / 2
    for i, x in enumerate(results):
        assert x is tensors[i]
        assert x[0] == x[-1] == mpi.size() * (i % 7) + base
    for _ in range(50):
        mpi.allreduce_async(torch.ones(count))  # dropped: its buffers must live on
    gc.collect()
    assert mpi.allreduce_async(torch.ones(count)).wait()[0] == mpi.size()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("count", [SMALL, LARGE])
def test_a_late_rank_is_a_timeout_then_a_result(mpi, count):
    x = torch.ones(count)
    others_have_waited = mpi.communicator().direct.mpi.Barrier
    if mpi.rank() == 0:
        others_have_waited()
        handle = mpi.allreduce_async(x)
    else:
        handle = mpi.allreduce_async(x)
        assert not handle.done()
        with pytest.raises(CollectiveTimeout, match=r"allreduce \((mpi|shared), \d+ bytes\) on rank \d of"):
            handle.wait(timeout_seconds=0.05)
        others_have_waited()
    handle.synchronize()
    assert handle.done()
    assert handle.wait() is x
    assert x[0] == mpi.size()


@pytest.mark.mpi
def test_a_posted_operation_that_is_complete_is_let_go(mpi):
    """Also behind a receive that stays under way."""
    rank, size = mpi.rank(), mpi.size()
    waiting = mpi.recv_async(torch.zeros(1), (rank - 1) % size)
    kept = []
    for _ in range(50):
        kept.append(weakref.ref(x := torch.ones(SMALL)))
        mpi.allreduce_async(x).wait()
        del x
    gc.collect()
    assert [ref for ref in kept if ref() is not None] == []
    mpi.send(torch.ones(1), (rank + 1) % size)
    assert waiting.wait(float("inf")).item() == 1
