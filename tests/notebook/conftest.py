"""The notebook that the tests of a module share, with a job of two ranks: starting a job is what takes time."""

import signal

import pytest

from torchmpi_py.notebook import cell_run, rank_output


@pytest.fixture(autouse=True)
def _patience(monkeypatch):
    """Equal lines are one, and ranks say where they are, however late they are on this machine."""
    monkeypatch.setattr(rank_output, "HOLD_SECONDS", 60.0)
    monkeypatch.setattr(cell_run, "_ANSWER_SECONDS", 60.0)


@pytest.fixture(autouse=True)
def _interruptible():
    """Ctrl-C reaches this process also where the tests were started in the background of a script, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def loaded():
    from shells import Notebook

    notebook = Notebook()
    yield notebook
    notebook.magics.stop()


@pytest.fixture
def notebook(loaded):
    """A notebook with two idle ranks, those of the test before if they are as many."""
    assert "Error" not in loaded.good("pass", "-n 2")
    return loaded
