"""SIGTERM as a request, in a world of one; jobs are in test_checkpoint_jobs."""

import contextlib
import os
import signal
import threading

import pytest
from support import jobs

from torchmpi_py.engine import EndRequests, end_requests
from torchmpi_py.errors import EndRequested


def ask():
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture(autouse=True)
def default_effect():
    former = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, former)


def test_once_agreed_it_has_no_effect_until_the_next_block():
    with EndRequests() as end:
        assert not any(end.requested() for _ in range(200))
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    for _ in range(2):
        with EndRequests() as end:
            assert not any(end.requested() for _ in range(200))
            ask()
            ask()
            assert any(end.requested() for _ in range(end_requests.MOST_STEPS))
        ask()
        assert callable(signal.getsignal(signal.SIGTERM))


def test_a_handler_of_the_program_stays():
    heard = []

    def handler(*_):
        heard.append(1)

    signal.signal(signal.SIGTERM, handler)
    with EndRequests() as end:
        ask()
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


@pytest.mark.parametrize("error", [None, ValueError, EndRequested, KeyboardInterrupt])
def test_a_signal_that_nobody_asked_for_has_its_effect_afterwards(monkeypatch, caplog, error):
    """Also after an error, which the program may catch; but what ends the program anyway does so."""
    sent = []

    def kill(*arguments):
        sent.append((*arguments, signal.getsignal(signal.SIGTERM)))

    with contextlib.nullcontext() if error is None else pytest.raises(error), EndRequests():
        ask()
        monkeypatch.setattr(os, "kill", kill)
        if error is not None:
            raise error
    has_effect = error in (None, ValueError)
    assert sent == ([(os.getpid(), signal.SIGTERM, signal.SIG_DFL)] if has_effect else [])
    assert [record.exc_info[0] for record in caplog.records] == ([ValueError] if error is ValueError else [])
    assert error is not ValueError or "SIGTERM arrived before this error" in caplog.text


def test_it_ends_a_program_that_catches_the_error():
    program = """
        import os, signal
        from torchmpi_py.engine import EndRequests
        try:
            with EndRequests():
                os.kill(os.getpid(), signal.SIGTERM)
                raise ValueError("a bad batch")
        except ValueError:
            print("goes on")
    """
    ended = jobs.python(program)
    assert (ended.returncode, ended.stdout) == (-signal.SIGTERM, "")
    assert "SIGTERM arrived before this error" in ended.stderr
    assert ended.stderr.endswith("ValueError: a bad batch\n")


@pytest.fixture
def steps(monkeypatch):
    """Return a function that takes a step of so many seconds, and says whether an end was requested in it."""
    now = [0.0]
    monkeypatch.setattr(end_requests.time, "monotonic", lambda: now[0])

    def step(end, seconds):
        now[0] += seconds
        return end.requested()

    return step


@pytest.mark.parametrize("num_steps", [1, 2, 5])
def test_long_steps_exchange_each_time(steps, num_steps):
    with EndRequests() as end:
        assert not any(steps(end, 10.0) for _ in range(num_steps))
        ask()
        assert steps(end, 10.0)


def test_short_steps_exchange_now_and_then(steps):
    """Seen from the number of calls until a signal is reported, for signals that come after any number of steps."""

    def until_reported(num_steps):
        with EndRequests() as end:
            assert not any(steps(end, 0.001) for _ in range(num_steps))
            ask()
            return next(number for number in range(1, 1000) if steps(end, 0.001))

    assert {until_reported(200 + more) for more in range(end_requests.MOST_STEPS)} == set(
        range(1, end_requests.MOST_STEPS + 1)
    )
