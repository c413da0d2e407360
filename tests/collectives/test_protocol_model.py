"""The meetings and slots of flavour ``shared``: every interleaving of what the product's code does.

``protocol_ranks.py`` runs that code and notes its steps; ``protocol_model.py`` visits all states. So a barrier that is
taken out of the product makes a test here fail. TORCHMPI_MODEL=all explores more, and without reductions.
"""

import ast
import itertools
import os
import pathlib

import protocol_programs
import pytest
from protocol_model import TSO, WEAK, explore, with_plain_barriers, without_barrier
from protocol_programs import ODD_SIZES, SINGLE_COPY, STAGED, SYMMETRIC, VERBS, needed_barriers, record_shared
from protocol_ranks import PACKAGE, model

from torchmpi_py.core import backoff

pytestmark = pytest.mark.timeout(1000 if os.environ.get("TORCHMPI_MODEL") == "all" else 60)
ALL = os.environ.get("TORCHMPI_MODEL") == "all"
SIZES = [2, 3]
CASES = [
    (name, size) for name in VERBS for size in SIZES if ALL or size == 2 or name[-8:] not in ("3 chunks", "5 chunks")
]
SOME = [*SYMMETRIC, *SINGLE_COPY, *(name for name in STAGED if "2 chunks" in name), "allreduce, 3 chunks"]
SOME = list(VERBS) if ALL else SOME
FOLLOWERS = [
    "allreduce",
    "allgather, from the first",
    "allgather, from the last",
    "allreduce, 2 chunks",
    "allreduce, single copy",
]
"""What comes after an operation, and would overwrite what it has left too early: records and tensors; slots."""


def recorded(monkeypatch, size, *names):
    return model(record_shared(monkeypatch, size, {"A": names}))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 13])
def test_results_on_many_ranks(monkeypatch, size):
    """Many take their time: one root alone has to do for them."""
    record_shared(monkeypatch, size, {"A": [*(VERBS if size == 5 else ()), *list(ODD_SIZES)[size > 5 :]]})


# One channel.


@pytest.mark.parametrize(("name", "size"), CASES)
def test_a_verb_twice(monkeypatch, size, name):
    """Nothing is overwritten before it is read, nobody is stuck; the reduction comes to the same with fewer states."""
    steps = recorded(monkeypatch, size, name, name)
    full, reduced = explore(steps), explore(steps, reduced=True)
    assert not full.problem, full.trail
    assert not reduced.problem
    assert reduced.num_states < full.num_states or size == 2


@pytest.mark.parametrize("size", SIZES)
def test_all_verbs_in_a_row(monkeypatch, size):
    found = explore(recorded(monkeypatch, size, *VERBS, *reversed(VERBS)), reduced=not ALL)
    assert not found.problem, found.trail[-20:]


@pytest.mark.parametrize("size", SIZES)
def test_a_verb_and_each_other(monkeypatch, size):
    for name, follower in itertools.product(VERBS if ALL else ["allreduce"], VERBS):
        with monkeypatch.context() as patched:
            found = explore(recorded(patched, size, name, follower), reduced=not ALL)
        assert not found.problem, (name, follower, found.trail)


def is_expendable(name, size, number, total):
    """Whether what comes later makes up for a barrier of an operation.

    Of three ranks for the last one, where tensors are staged: each later operation announces itself before it fills a
    slot. An allreduce of two fills slots first.
    """
    return name in STAGED and size > 2 and number == total - 1


@pytest.mark.parametrize(("name", "size"), CASES)
def test_without_a_barrier(monkeypatch, size, name):
    """Each barrier of an operation that is taken out lets something be overwritten too early, or read."""
    entry = []
    for names, turn in itertools.product([(name,), *((name, follower) for follower in FOLLOWERS)], (0, 1)):
        with monkeypatch.context() as patched:
            entry.append(record_shared(patched, size, {"A": names}, turn=turn))
    total, needed = needed_barriers(*entry)
    assert needed == {k for k in range(total) if not is_expendable(name, size, k, total)}


def test_barriers_of_different_number_leave_somebody_stuck(monkeypatch):
    steps = recorded(monkeypatch, 2, "broadcast, 2 chunks")
    last = sum(step.barrier is not None for step in steps[0]) - 1
    for reduced in (False, True):
        found = explore([*without_barrier(steps[:1], "A", last), steps[1]], reduced=reduced)
        assert found.problem.startswith("stuck")


def test_all_barriers_of_the_code_are_met(monkeypatch):
    """What the model explores has come by every line of the package that calls the barrier of a node group."""
    met = set()
    entry = [record_shared(monkeypatch, 2, {"A": list(VERBS)})]
    with monkeypatch.context() as patched:
        entry.append(protocol_programs.record_cudaipc(patched, 2, [("allreduce", "s"), ("allreduce, 2 chunks", "s")]))
    for processes in entry:
        met |= {step.site for step in processes[0] if step.name == "barrier"}
    there = set()
    for name in ("shared", "staging", "single_copy", "node_group", "cudaipc"):
        tree = ast.parse(pathlib.Path(PACKAGE, "collectives", "flavours", f"{name}.py").read_text())
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        there |= {f"{name}.py:{c.lineno}" for c in calls if getattr(c.func, "attr", "") == "barrier"}
    assert len(there) > 7
    assert not there - met


# Two channels at once: one process for each rank and channel.

BESIDE = [
    ("allreduce", "allreduce"),
    ("allreduce", "allreduce, 2 chunks"),
    ("allreduce, 2 chunks", "broadcast, 3 chunks"),
    ("allreduce, 3 chunks", "allreduce, 5 chunks"),
    ("allgather, 2 chunks", "allgather, 2 chunks"),
    ("allgather, 2 chunks", "reduce_scatter, 2 chunks"),
]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("one", "other"), BESIDE)
def test_two_channels_at_once(monkeypatch, size, one, other):
    """Each has memory of its own: if they had the same, they would overwrite each other's."""
    entry = record_shared(monkeypatch, size, {"A": [one], "B": [other]})
    found = explore(model(entry), reduced=size > 2 and not ALL)
    assert not found.problem, found.trail


@pytest.mark.parametrize("size", SIZES)
def test_two_channels_in_many_operations(monkeypatch, size):
    names = list(VERBS)
    entry = record_shared(monkeypatch, size, {"A": names, "B": names[7:] + names[:7]})
    found = explore(model(entry), reduced=True)
    assert not found.problem, found.trail[-20:]


# Memory order (docs/decisions/016-memory-ordering.md).


def without_fences(processes, sides):
    """``sides``: 0 for those before each barrier, 1 for those after."""
    counts = [itertools.count() for _ in processes]
    return [
        [step for step in steps if not (step.is_fence and next(count) % 2 in sides)]
        for count, steps in zip(counts, processes, strict=True)
    ]


@pytest.mark.parametrize("name", SOME)
def test_memory_order(monkeypatch, name):
    """Barriers made of plain words do on x86 as they are; elsewhere with the fences that the code has on both sides."""
    monkeypatch.setattr(backoff, "KEEPS_ORDER", False)
    steps = with_plain_barriers(model(record_shared(monkeypatch, 2, {"A": [name, name]}, note_fences=True)))
    assert not explore(steps, WEAK, reduced=True).problem
    assert not explore(without_fences(steps, (0, 1)), TSO, reduced=True).problem
    for sides in ((0,), (1,), (0, 1)):
        assert "instead of" in explore(without_fences(steps, sides), WEAK, reduced=True, hunt=True).problem
