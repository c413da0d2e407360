"""SIGTERM as a request, in a world of one; jobs are in test_checkpoint_jobs."""

import contextlib
import os
import signal
import subprocess
import sys
import threading

import pytest

from torchmpi_py.engine import EndRequests, resume
from torchmpi_py.errors import EndRequested

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


@pytest.mark.parametrize("error", [None, ValueError, EndRequested, KeyboardInterrupt])
def test_a_signal_that_nobody_asked_for_has_its_effect_afterwards(monkeypatch, caplog, error):
    """Also after an error, which the program may catch; but what ends the program anyway does so."""
    sent = []
    with contextlib.nullcontext() if error is None else pytest.raises(error), EndRequests():
        os.kill(os.getpid(), signal.SIGTERM)
        monkeypatch.setattr(os, "kill", lambda *arguments: sent.append(arguments))
        if error is not None:
            raise error
    has_effect = error in (None, ValueError)
    assert sent == ([(os.getpid(), signal.SIGTERM)] if has_effect else [])
    assert [record.exc_info[0] for record in caplog.records] == ([ValueError] if error is ValueError else [])


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
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200, check=False)
    assert (ended.returncode, ended.stdout) == (-signal.SIGTERM, "")
    assert ended.stderr.startswith("SIGTERM came before this error, and has its usual effect now\nTraceback")
    assert ended.stderr.endswith("ValueError: a bad batch\n")


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
