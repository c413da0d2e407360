"""SIGTERM as a request, in a world of one; jobs are in test_checkpoint_jobs."""

import os
import signal
import threading

import pytest

from torchmpi_py.engine import EndRequests, resume

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(autouse=True)
def default_effect():
    former = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, former)


def num_calls(end, most=1000):
    """Until it says that an end was requested."""
    return next(number for number in range(most) if end.requested())


def test_it_is_noted_and_the_former_effect_comes_back():
    with EndRequests() as end:
        assert not any(end.requested() for _ in range(200))
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_once_agreed_it_has_no_effect_until_the_next_block():
    for _ in range(2):
        with EndRequests() as end:
            assert not any(end.requested() for _ in range(200))
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
            assert num_calls(end) <= resume.MOST_STEPS
        os.kill(os.getpid(), signal.SIGTERM)
        assert callable(signal.getsignal(signal.SIGTERM))


def test_a_handler_of_the_program_stays():
    heard = []
    handler = lambda *_: heard.append(1)  # noqa: E731
    signal.signal(signal.SIGTERM, handler)
    with EndRequests() as end:
        os.kill(os.getpid(), signal.SIGTERM)
        assert not any(end.requested() for _ in range(200))
    assert (heard, signal.getsignal(signal.SIGTERM)) == ([1], handler)


def test_outside_the_main_thread_nothing_is_touched():
    def work():
        with EndRequests() as end:
            found.extend([signal.getsignal(signal.SIGTERM), end.requested()])

    found = []
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [signal.SIG_DFL, False]


@pytest.mark.parametrize("fails", [True, False])
def test_a_signal_that_nobody_asked_for_has_its_effect_afterwards(monkeypatch, fails):
    sent = []
    with pytest.raises(ValueError, match="boom") if fails else EndRequests(), EndRequests():
        os.kill(os.getpid(), signal.SIGTERM)
        monkeypatch.setattr(os, "kill", lambda *arguments: sent.append(arguments))
        if fails:
            raise ValueError("boom")
    assert sent == ([] if fails else [(os.getpid(), signal.SIGTERM)])


@pytest.mark.parametrize("num_steps", range(1, 6))
def test_long_steps_exchange_each_time(monkeypatch, num_steps):
    now = [0.0]
    monkeypatch.setattr(resume.time, "monotonic", lambda: now[0])
    with EndRequests() as end:
        for _ in range(num_steps):
            now[0] += 10.0
            assert not end.requested()
        os.kill(os.getpid(), signal.SIGTERM)
        assert end.requested()


def test_short_steps_exchange_now_and_then(monkeypatch):
    """Seen from the number of calls until a signal is reported, for signals that come after any number of steps."""
    now = [0.0]
    monkeypatch.setattr(resume.time, "monotonic", lambda: now[0])

    def until_reported(num_steps):
        def calls():
            while True:
                now[0] += 0.001
                yield end.requested()

        with EndRequests() as end:
            answers = calls()
            assert not any(next(answers) for _ in range(num_steps))
            os.kill(os.getpid(), signal.SIGTERM)
            return next(number for number, answer in enumerate(answers, 1) if answer)

    assert {until_reported(200 + more) for more in range(resume.MOST_STEPS)} == set(range(1, resume.MOST_STEPS + 1))
