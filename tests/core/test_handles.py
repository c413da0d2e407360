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

SMALL, LARGE = 16, 200_000  # posted to MPI, and run in the communication thread


class Step(Work):
    """An operation without MPI."""

    label = "some work"

    def __init__(self, action):
        self.action = action

    def run(self, in_background=False):
        return self.action()

    def release(self):
        del self.action


@pytest.fixture(params=[False, True], ids=["thread", "inline"])
def thread(request):
    made = CommunicationThread(inline=request.param)
    yield made
    made.close()


def test_a_step_that_fails_after_an_operation_ends_no_thread(thread, caplog):
    class Failing(Step):
        def on_done(self):
            raise KeyError("in a callback")

    assert thread.submit(Failing(lambda: 1)).wait() == 1
    assert thread.submit(Step(lambda: 2)).wait() == 2
    assert "what was to follow some work has failed" in caplog.text


def test_order_results_and_repeated_waits(thread):
    seen = []
    handles = [thread.submit(Step(lambda i=i: seen.append(i) or i * i)) for i in range(100)]
    assert wait_all(handles) == [i * i for i in range(100)]
    assert seen == list(range(100))
    assert handles[7].wait() == handles[7].wait() == 49
    assert all(handle.done() for handle in handles)


def test_an_error_is_raised_by_every_wait(thread):
    def fail():
        raise KeyError("lost")

    handle = thread.submit(Step(fail))
    for _ in range(2):
        with pytest.raises(KeyError, match="lost"):
            handle.wait()
    assert "failed" in repr(handle)
    assert thread.submit(Step(lambda: 3)).wait() == 3


def test_wait_all_waits_for_all_and_raises_the_first_error(thread):
    done = []

    def fail(text):
        raise ValueError(text)

    handles = [thread.submit(Step(lambda t=t: fail(t))) for t in ("first", "second")]
    handles.append(thread.submit(Step(lambda: done.append(1))))
    with pytest.raises(ValueError, match="first") as caught:
        wait_all(handles)
    assert done == [1]
    assert caught.value.__notes__ == ["1 more of the operations waited for failed"]


def test_an_error_that_nobody_waits_for_is_logged(thread, caplog):
    def fail():
        raise KeyError("lost")

    with caplog.at_level(logging.ERROR, "torchmpi_py"):
        thread.submit(Step(fail))
        thread.drain()
        gc.collect()
    assert "some work failed, and nobody waited for it: KeyError('lost')" in caplog.text


def test_a_handle_is_not_a_truth_value(thread):
    with pytest.raises(TypeError, match="neither true nor false"):
        bool(thread.submit(Step(lambda: 1)))


def test_timeouts():
    thread = CommunicationThread(inline=False)
    late = threading.Event()
    handle = thread.submit(Step(lambda: late.wait(60) and "late"))
    assert not handle.done()
    assert "under way" in repr(handle)
    with pytest.raises(CollectiveTimeout, match=r"some work is not complete after 0.01 s"):
        handle.wait(timeout_seconds=0.01)
    late.set()
    assert handle.wait(timeout_seconds=30) == "late"
    thread.close()


def test_buffers_live_only_as_long_as_the_operation():
    thread = CommunicationThread(inline=False)
    x = torch.ones(1)
    kept = weakref.ref(x)
    handle = thread.submit(Step(lambda x=x: None))
    del x
    handle.wait()
    gc.collect()
    assert kept() is None
    assert "some work: complete" in repr(handle)
    thread.close()


@pytest.mark.mpi
@pytest.mark.timeout(240)
@pytest.mark.parametrize("count", [SMALL, LARGE])
def test_ten_thousand_outstanding_and_dropped_ones(mpi, count):
    number = 10_000 if count == SMALL else 300
    tensors = [torch.full((count,), float(i % 7 + mpi.rank())) for i in range(number)]
    handles = [mpi.allreduce_async(x) for x in tensors]
    results = mpi.wait_all(handles)
    base = mpi.size() * (mpi.size() - 1) / 2
    for i, x in enumerate(results):
        assert x is tensors[i]
        assert x[0] == x[-1] == mpi.size() * (i % 7) + base
    for _ in range(200):
        mpi.allreduce_async(torch.ones(count))  # dropped: its buffers must live on
    gc.collect()
    assert mpi.allreduce_async(torch.ones(count)).wait()[0] == mpi.size()


@pytest.mark.mpi(min_size=2)
@pytest.mark.timeout(240)
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
@pytest.mark.timeout(240)
def test_blocking_and_asynchronous_operations_mix(mpi):
    """Blocking calls overtake what runs in the background, in another order on every rank."""
    for step in range(50):
        x = [torch.full((count,), 1.0) for count in (SMALL, LARGE, SMALL, LARGE)]
        handles = [mpi.allreduce_async(t) for t in x]
        if (mpi.rank() + step) % 2:
            handles[1].wait()
        assert mpi.allreduce(torch.ones(3))[0] == mpi.size()
        if not (mpi.rank() + step) % 2:
            handles[3].wait()
        mpi.wait_all(reversed(handles))
        assert all(t[0] == t[-1] == mpi.size() for t in x)


@pytest.mark.mpi
@pytest.mark.timeout(240)
def test_a_posted_operation_that_is_complete_is_let_go(mpi):
    """Also behind a receive that stays under way."""
    rank, size = mpi.rank(), mpi.size()
    waiting = mpi.recv_async(torch.zeros(1), (rank - 1) % size)
    kept = []
    for _ in range(50):
        x = torch.ones(SMALL)
        kept.append(weakref.ref(x))
        mpi.allreduce_async(x).wait()
        del x
    gc.collect()
    assert [ref for ref in kept if ref() is not None] == []
    mpi.send(torch.ones(1), (rank + 1) % size)
    waiting.wait()
    assert waiting.wait(float("inf")).item() == 1


def test_a_traceback_does_not_grow_with_every_wait(thread):
    def fail():
        raise KeyError("lost")

    handle = thread.submit(Step(fail))

    def depth():
        with pytest.raises(KeyError) as caught:
            handle.wait()
        return len(caught.traceback)

    assert len({depth() for _ in range(5)}) == 1


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


class Posted(Step):
    def finish(self):
        return self.action()


@pytest.mark.parametrize("seconds", [None, 5])
def test_what_a_handler_raises_in_a_wait_is_no_failure_of_the_operation(seconds):
    handle = RequestHandle(Posted(lambda: 7), [Call(2)])
    with pytest.raises(Alarm):
        handle.wait(seconds)
    assert handle._work is not None  # and so its buffers, into which MPI still writes
    assert handle.wait(seconds) == 7


@pytest.mark.parametrize("looks", [2, 0])
def test_wait_all_does_not_keep_what_a_handler_raises(looks):
    handles = [RequestHandle(Posted(lambda: 7), [Call(looks)]), RequestHandle(Posted(lambda: 8), [Call(2)])]
    with pytest.raises(Alarm):
        wait_all(handles)
    assert handles[1]._requests[0].looks == 2


def test_a_receive_is_taken_back_while_a_thread_waits_for_it():
    handle, errors = RequestHandle(Posted(lambda: 7), [Call(1 << 60, is_interrupted=False)]), []

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
    assert errors == ["some work was cancelled: nothing has come for it"]


def test_a_receive_that_a_handler_interrupted_after_its_end():
    from mpi4py import MPI

    receipt = mpi_steps.Receipt(MPI.COMM_SELF, got := torch.zeros(3), 0, 5)
    MPI.COMM_SELF.Send(torch.ones(3).numpy(), 0, receipt.tag)
    receipt.request.Wait(receipt.status)  # as if a handler had raised before the check
    assert receipt.Test()
    receipt.Wait()
    assert got.tolist() == [1, 1, 1]
