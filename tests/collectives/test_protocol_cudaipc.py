"""The meetings and events of flavour ``cudaipc``: every interleaving of hosts and streams.

As in test_protocol_model.py, the steps are those of the product.
"""

import os

import pytest
from protocol_model import explore
from protocol_programs import STAGED, VERBS, needed_barriers, record_cudaipc
from protocol_ranks import model

from torchmpi_py.memory.cuda_ipc import DONE, READY, PeerEvents

pytestmark = pytest.mark.timeout(1000 if os.environ.get("TORCHMPI_MODEL") == "all" else 60)
ALL = os.environ.get("TORCHMPI_MODEL") == "all"
SIZES = [2, 3]
NAMES = [name for name in VERBS if "3 chunks" not in name]
SOME = NAMES if ALL else ["allreduce", "broadcast", "allreduce, 2 chunks", "reduce, 1 chunks", "allgather, 2 chunks"]
FOLLOWERS = ["allreduce", "allreduce, 1 chunks"]
"""What comes after, on symmetric memory and on scratch, and overwrites what was shown there."""


def calls(*names):
    """On two streams by turns; symmetric tensors, which the program would have to order itself, on one."""
    return [(name, "st"[k % 2] if name in STAGED else "s") for k, name in enumerate(names)]


def recorded(monkeypatch, size, *names, without=None):
    """``without``: (a method of PeerEvents, which event it is called for) that does nothing."""
    with monkeypatch.context() as patched:
        if without is not None:
            method, chosen = without
            original = getattr(PeerEvents, method)
            patched.setattr(
                PeerEvents, method, lambda self, *which: None if [*which] == chosen else original(self, *which)
            )
        return record_cudaipc(patched, size, calls(*names))


EVENTS = {
    "record READY": ("record", [READY]),
    "follow READY": ("follow", [READY]),
    "record DONE": ("record", [DONE]),
    "follow DONE": ("follow", [DONE]),
    "enter": ("enter", []),
    "leave": ("leave", []),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", SOME)
def test_a_verb_twice(monkeypatch, size, name):
    steps = model(recorded(monkeypatch, size, name, name))
    found = explore(steps, reduced=True)
    assert not found.problem, found.trail
    if ALL and size == 2:
        full = explore(steps)
        assert not full.problem, full.trail


@pytest.mark.parametrize("size", SIZES)
def test_all_verbs_in_a_row(monkeypatch, size):
    found = explore(model(recorded(monkeypatch, size, *NAMES)), reduced=True)
    assert not found.problem, found.trail[-20:]


@pytest.mark.parametrize("size", SIZES if ALL else [2])
@pytest.mark.parametrize(
    ("name", "event"),
    [(name, event) for name in SOME for event in EVENTS if name in STAGED or event not in ("enter", "leave")],
)
def test_without_an_event(monkeypatch, size, event, name):
    """READY and DONE order the streams of the ranks; enter and leave those of one rank, where scratch is shown."""
    entry = [recorded(monkeypatch, size, name, follower, without=EVENTS[event]) for follower in FOLLOWERS]
    assert any("instead of" in explore(model(each), reduced=True, hunt=True).problem for each in entry)


@pytest.mark.parametrize("size", SIZES if ALL else [2])
@pytest.mark.parametrize("name", SOME)
def test_without_a_barrier(monkeypatch, size, name):
    entry = [recorded(monkeypatch, size, *names) for names in [(name,), *((name, follower) for follower in FOLLOWERS)]]
    total, needed = needed_barriers(*entry)
    assert needed == set(range(total))
